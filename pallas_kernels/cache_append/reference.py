"""Definition of the copies: one row after the other."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Shaped

from .layout import RowMoves


def append_rows(
    old: tuple[Shaped[Array, "B K _ D"], ...],
    new: tuple[Shaped[Array, "B K _ D"], ...],
    moves: tuple[RowMoves, ...],
    which: tuple[int, ...],
) -> tuple[Shaped[Array, "B K _ D"], ...]:
    """Every row of every sequence on its own."""
    after = []
    for into, rows, index in zip(old, new, which, strict=True):
        move, out = moves[index], into
        for b in range(into.shape[0]):
            for p in range(move.width):
                at = jnp.clip(move.target[b, p], 0, into.shape[2] - 1)
                row = rows[b, :, jnp.clip(move.source[b, p], 0, rows.shape[2] - 1)].astype(into.dtype)
                out = out.at[b, :, at].set(jnp.where(at == move.target[b, p], row, out[b, :, at]))
        after.append(out)
    return tuple(after)
