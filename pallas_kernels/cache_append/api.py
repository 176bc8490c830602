"""Copies of a few rows into many large arrays, in place: the commit of an accepted path to every layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxtyping import Array, Shaped

from .. import dispatch
from ..errors import ShapeError
from ..hopper import on_hopper
from . import reference, xla
from .layout import RowMoves

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"mosaic_gpu": on_hopper(__name__, "append_rows"), "xla": xla.append_rows, "reference": reference.append_rows}
)


def append_rows(
    old: Sequence[Shaped[Array, "_ _ _ _"]],
    new: Sequence[Shaped[Array, "_ _ _ _"]],
    moves: Sequence[RowMoves],
    which: Sequence[int],
    *,
    implementation: dispatch.Implementation = None,
) -> tuple[Shaped[Array, "B K _ D"], ...]:
    """`old[i][b, :, move.target[b, p]] = new[i][b, :, move.source[b, p]]` with `move = moves[which[i]]`.

    Args:
      old: arrays to write to; donated ones are written in place.
      new: arrays to read from, cast to the old arrays' dtypes.
      moves: which rows.
      which: for every pair of arrays, the index of its move.
      implementation: see `dispatch.run`.

    Returns:
      The arrays after; rows that are no target keep their bits.

    Raises:
      ShapeError: arrays that do not fit each other.
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    if not len(old) == len(new) == len(which):
        raise ShapeError(f"old, new and which must pair up, got {len(old)}, {len(new)} and {len(which)}")
    for index, (into, rows) in enumerate(zip(old, new, strict=True)):
        want = (*into.shape[:2], rows.shape[2], into.shape[3])
        if rows.shape != want:
            raise ShapeError(f"new[{index}] has shape {rows.shape}, expected {want} beside old of shape {into.shape}")
    arguments = (tuple(old), tuple(new), tuple(moves), tuple(which))
    return dispatch.run("append_rows", IMPLEMENTATIONS, implementation, *arguments)
