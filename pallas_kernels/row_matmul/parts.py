"""A product in parts: sums over slices of the contracted axis that nobody has added up yet."""

from __future__ import annotations

from jax.typing import DTypeLike
from jaxtyping import Array, Float


def total(parts: Float[Array, "S _ _"], rows: int, columns: int, dtype: DTypeLike) -> Float[Array, "{rows} {columns}"]:
    """The product itself: parts are added in order, in float32; padding of rows and columns is cut off."""
    whole = parts[0] if parts.shape[0] == 1 else parts.sum(0)
    return whole[:rows, :columns].astype(dtype)
