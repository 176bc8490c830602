"""Portable copies: one scatter per array."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from .layout import RowMoves


def _append(
    old: Shaped[Array, "K L D"],
    new: Shaped[Array, "K X D"],
    source: Int[Array, " P"],
    target: Int[Array, " P"],
    *,
    ascending: bool,
) -> Shaped[Array, "K L D"]:
    rows = old.shape[1]
    # Rows that are not written get indices of their own beyond the end, so that all are distinct. Two rows at least:
    # XLA makes a read, a choice and an update of a scatter of one row, on GPUs two kernels for one.
    more = max(0, 2 - source.shape[0])
    source, target = jnp.pad(source, (0, more)), jnp.pad(target, (0, more), constant_values=rows)
    written = (target >= 0) & (target < rows)
    target = jnp.where(written, target, rows + jnp.arange(target.shape[0]))
    picked = jnp.take(new, source, axis=1, mode="clip").astype(old.dtype)
    return old.at[:, target].set(picked, mode="drop", indices_are_sorted=ascending, unique_indices=True)


def append_rows(
    old: tuple[Shaped[Array, "B K _ D"], ...],
    new: tuple[Shaped[Array, "B K _ D"], ...],
    moves: tuple[RowMoves, ...],
    which: tuple[int, ...],
) -> tuple[Shaped[Array, "B K _ D"], ...]:
    """A scatter per array; without a batch axis where the batch is 1, so that updates stay in place."""

    def one(into: Array, rows: Array, move: RowMoves) -> Array:
        arguments = (into, rows, move.source, move.target)
        if into.shape[0] == 1:
            return _append(*(x[0] for x in arguments), ascending=move.ascending)[None]
        return jax.vmap(functools.partial(_append, ascending=move.ascending))(*arguments)

    return tuple(one(into, rows, moves[index]) for into, rows, index in zip(old, new, which, strict=True))
