"""Float32 definition of the products and of what follows them; plain, never optimised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .parts import total


def matmul_parts(
    x: Float[Array, "R E"], weights: tuple[Float[Array, "E _"], ...], dtypes: tuple[DTypeLike, ...]
) -> tuple[Float[Array, "1 R _"], ...]:
    """Every product in one part, rounded once."""
    x = x.astype(jnp.float32)
    products = [jnp.matmul(x, weight.astype(jnp.float32), precision="highest") for weight in weights]
    return tuple(product[None].astype(dtype) for product, dtype in zip(products, dtypes, strict=True))


def gated_matmul(x: Float[Array, "R E"], weight: Float[Array, "E 2 H"]) -> Float[Array, "R H"]:
    """silu(x W0) * (x W1), rounded once."""
    gate, up = (
        jnp.matmul(x.astype(jnp.float32), weight[:, i].astype(jnp.float32), precision="highest") for i in (0, 1)
    )
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def residual_norm(
    x: Float[Array, "R E"], parts: Float[Array, "S _ _"] | None, scale: Float[Array, " E"], eps: float
) -> tuple[Float[Array, "R E"], Float[Array, "R E"]]:
    """The sum, rounded to the stream's dtype, and its norm."""
    if parts is not None:
        rows, width = x.shape
        x = (x.astype(jnp.float32) + total(parts, rows, width, jnp.float32)).astype(x.dtype)
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32**2, axis=-1, keepdims=True)
    return x, (x32 / jnp.sqrt(mean + eps) * scale.astype(jnp.float32)).astype(x.dtype)
