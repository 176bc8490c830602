"""Layers that every decoder here is made of: projections, RMSNorm, rotary embedding, SwiGLU."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from .config import RopeConfig

_INIT_STD = 0.02


def random_values(shapes: Mapping[str, tuple[int, ...]], seed: int, dtype: DTypeLike) -> dict[str, Array]:
    """Initial parameters by flat name: unit norms, zero biases, average position weights, small normal matrices.

    Drawn with NumPy: compiling a JAX generator for every shape would take longer than everything else.
    """
    rng = np.random.default_rng(seed)

    def value(name: str, shape: tuple[int, ...]) -> np.ndarray:
        last = name.rsplit("/", 1)[-1]
        if last == "scale":
            return np.ones(shape, np.float32)
        if last in ("bias", "b1", "b2"):
            return np.zeros(shape, np.float32)
        if last == "weight" and len(shape) == 2:
            return np.full(shape, 1 / shape[1], np.float32)
        return rng.standard_normal(shape, np.float32) * np.float32(_INIT_STD)

    return {name: jnp.asarray(value(name, shape), dtype) for name, shape in shapes.items()}


def _parts(rows: int, columns: int) -> int:
    """Into how many sums a product of one row with a matrix is cut.

    XLA gives each thread block of a GPU some columns; a few thousand columns are too few to read at full speed.
    """
    parts = 1
    while columns * parts <= 16384 and rows % (2 * parts) == 0:
        parts *= 2
    return parts if rows * columns >= 1 << 22 else 1


class Projection(nnx.Module):
    """A linear map from the last axes of its input to new last axes.

    Args:
      inputs, outputs: the axes that are contracted and produced; the kernel is [*inputs, *outputs].
      bias: whether a bias of shape [*outputs] is added.
      dtype: of the parameters.
      rngs: initialises the kernel.
    """

    def __init__(
        self,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        *,
        bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        draw = jax.random.normal(rngs.params(), (*inputs, *outputs), jnp.float32)
        self.kernel = nnx.Param((draw * _INIT_STD).astype(dtype))
        self.bias = nnx.Param(jnp.zeros(outputs, dtype)) if bias else None

    def __call__(self, x: Float[Array, "..."], dtype: DTypeLike | None = None) -> Float[Array, "..."]:
        """Maps [..., *inputs] to [..., *outputs], in `dtype` or that of the input."""
        lead = x.shape[: x.ndim - len(self.inputs)]
        rows, columns = math.prod(self.inputs), math.prod(self.outputs)
        flat, kernel = x.reshape(*lead, rows), self.kernel[...].reshape(rows, columns)
        parts = _parts(rows, columns) if math.prod(lead) == 1 and x.dtype == jnp.bfloat16 else 1
        if parts > 1:
            each = jnp.einsum(
                "pr,prc->pc",
                flat.reshape(parts, rows // parts),
                kernel.reshape(parts, rows // parts, columns),
                preferred_element_type=jnp.float32,
            )
            y = jax.lax.optimization_barrier(each).sum(0).astype(dtype or x.dtype)
        else:
            y = jnp.matmul(flat, kernel, preferred_element_type=dtype or x.dtype)
        y = y.reshape(*lead, *self.outputs)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)


def rms_norm(x: Float[Array, "... E"], scale: Float[Array, " E"], eps: float) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, returned in the input's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        """See `rms_norm`."""
        return rms_norm(x, self.scale[...], self.eps)


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x), gate and up in one product."""

    def __init__(self, size: int, hidden: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate_up = Projection((size,), (2, hidden), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Projection((hidden,), (size,), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        """The feed-forward output."""
        hidden = self.gate_up(x)
        return self.down(jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :])


def rope_frequencies(head_dim: int, rope: RopeConfig) -> Float[np.ndarray, " half"]:
    """Inverse frequencies in radians per token, with Llama 3 scaling where configured."""
    inverse = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    scaling = rope.scaling
    if scaling is not None:
        wavelength = 2 * math.pi / inverse
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blend = (1 - smooth) * inverse / scaling.factor + smooth * inverse
        scaled = np.where(wavelength > low, inverse / scaling.factor, blend)
        inverse = np.where(wavelength < high, inverse, scaled)
    return inverse.astype(np.float32)


def rope_angles(
    position: Int[Array, "..."], head_dim: int, rope: RopeConfig
) -> tuple[Float[Array, "... half"], Float[Array, "... half"]]:
    """Cosine and sine of every position's angles, float32; no table, so no length limit."""
    angle = position[..., None].astype(jnp.float32) * rope_frequencies(head_dim, rope)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(
    x: Float[Array, "... D"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... D"]:
    """Rotary embedding, half-split layout; `cos` and `sin` broadcast against x's leading axes."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
