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

from ..pallas_kernels.dispatch import Implementation
from ..pallas_kernels.node_inputs import rotate as rotate  # belongs to the layers
from ..pallas_kernels.row_matmul import gated_matmul, matmul_parts, one_matmul, residual_norm
from ..pallas_kernels.row_matmul import rms_norm as rms_norm
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
        lead, matrix = x.shape[: x.ndim - len(self.inputs)], self.matrix
        parts = one_matmul(x.reshape(*lead, matrix.shape[0]), matrix, dtype or x.dtype)
        y = parts[0] if parts.shape[0] == 1 else parts.sum(0).astype(dtype or x.dtype)
        y = y.reshape(*lead, *self.outputs)
        return y if self.bias is None else y + self.bias[...].astype(y.dtype)

    @property
    def matrix(self) -> Float[Array, "E N"]:
        """The kernel with its inputs, and its outputs, flattened."""
        return self.kernel[...].reshape(math.prod(self.inputs), math.prod(self.outputs))


def project_parts(
    x: Float[Array, "R E"], projection: Projection, implementation: Implementation
) -> Float[Array, "_ _ _"]:
    """A projection of some rows, outputs flattened, in parts as `row_matmul.matmul_parts` gives them."""
    if projection.bias is not None:
        return projection(x.reshape(-1, *projection.inputs)).reshape(1, x.shape[0], -1)
    return matmul_parts(x, (projection.matrix,), (x.dtype,), implementation=implementation)[0]


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, *, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.scale = nnx.Param(jnp.ones((size,), dtype))

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        """See `rms_norm`."""
        return rms_norm(x, self.scale[...], self.eps)

    def after(
        self, x: Float[Array, "R E"], added: Float[Array, "S _ _"] | None, implementation: Implementation
    ) -> tuple[Float[Array, "R E"], Float[Array, "R E"]]:
        """The residual stream after an addition that comes in parts, and its norm."""
        return residual_norm(x, added, self.scale[...], eps=self.eps, implementation=implementation)


class SwiGLU(nnx.Module):
    """down(silu(gate x) * up x), gate and up in one product."""

    def __init__(self, size: int, hidden: int, *, bias: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.gate_up = Projection((size,), (2, hidden), bias=bias, dtype=dtype, rngs=rngs)
        self.down = Projection((hidden,), (size,), bias=bias, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "... E"]) -> Float[Array, "... E"]:
        """The feed-forward output."""
        hidden = self.gate_up(x)
        return self.down(jax.nn.silu(hidden[..., 0, :]) * hidden[..., 1, :])

    def parts(self, x: Float[Array, "R E"], implementation: Implementation) -> Float[Array, "_ _ _"]:
        """The feed-forward output of some rows, in parts."""
        if self.gate_up.bias is not None:
            return self(x)[None]
        hidden = gated_matmul(x, self.gate_up.kernel[...], implementation=implementation)
        return project_parts(hidden, self.down, implementation)


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
