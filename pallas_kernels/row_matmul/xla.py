"""Portable products and norms."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .parts import total


def _slices(rows: int, columns: int) -> int:
    """Into how many sums a product of one row with a matrix is cut.

    XLA gives each thread block of a GPU some columns; a few thousand columns are too few to read at full speed.
    """
    parts = 1
    while columns * parts <= 16384 and rows % (2 * parts) == 0:
        parts *= 2
    return parts if rows * columns >= 1 << 22 else 1


def one_matmul(x: Float[Array, "*lead E"], weight: Float[Array, "E N"], dtype: DTypeLike) -> Float[Array, "S *lead N"]:
    """One product: in float32 parts where a single row would read the matrix slowly, else whole and in `dtype`."""
    inputs, columns = weight.shape
    single = x.size == inputs and x.dtype == jnp.bfloat16
    parts = _slices(inputs, columns) if single else 1
    if parts == 1:
        return jnp.matmul(x, weight, preferred_element_type=dtype)[None]
    each = jnp.einsum(
        "pr,prc->pc",
        x.reshape(parts, inputs // parts),
        weight.reshape(parts, inputs // parts, columns),
        preferred_element_type=jnp.float32,
    )
    return jax.lax.optimization_barrier(each).reshape(parts, *x.shape[:-1], columns)


def matmul_parts(
    x: Float[Array, "R E"], weights: tuple[Float[Array, "E _"], ...], dtypes: tuple[DTypeLike, ...]
) -> tuple[Float[Array, "_ R _"], ...]:
    """The products one by one."""
    return tuple(one_matmul(x, weight, dtype) for weight, dtype in zip(weights, dtypes, strict=True))


def gated_matmul(x: Float[Array, "R E"], weight: Float[Array, "E 2 H"]) -> Float[Array, "R H"]:
    """Gate and up in one product."""
    hidden = weight.shape[2]
    flat = weight.reshape(weight.shape[0], 2 * hidden)
    both = total(one_matmul(x, flat, x.dtype), x.shape[0], 2 * hidden, x.dtype).reshape(x.shape[0], 2, hidden)
    return jax.nn.silu(both[:, 0]) * both[:, 1]


def rms_norm(x: Float[Array, "... E"], scale: Float[Array, " E"], eps: float) -> Float[Array, "... E"]:
    """x / sqrt(mean(x^2) + eps) * scale over the last axis, in float32, returned in the input's dtype."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def residual_norm(
    x: Float[Array, "R E"], parts: Float[Array, "S _ _"] | None, scale: Float[Array, " E"], eps: float
) -> tuple[Float[Array, "R E"], Float[Array, "R E"]]:
    """The residual stream after an addition, and its norm."""
    if parts is not None:
        rows, width = x.shape
        x = x + total(parts, rows, width, x.dtype)
    return x, rms_norm(x, scale, eps)
