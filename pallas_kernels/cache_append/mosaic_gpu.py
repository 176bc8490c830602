"""All copies of a commit in one launch, in place, on NVIDIA Hopper.

A thread block copies the rows of one KV head of a few arrays. It reads all rows before it writes the first, so the
copies overlap; nothing is read that is written.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
from jax import lax
from jaxtyping import Array, Shaped

from ..errors import UnsupportedKernelError
from ..mosaic_rows import read_row, row_layout
from .layout import RowMoves

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

MAX_ROWS = 64  # longer paths are chunks of a prompt: the portable scatters take them
PER_BLOCK = 6  # arrays of a thread block, those of one layer


def append_rows(
    old: tuple[Shaped[Array, "B K _ D"], ...],
    new: tuple[Shaped[Array, "B K _ D"], ...],
    moves: tuple[RowMoves, ...],
    which: tuple[int, ...],
    *,
    interpret: Any = None,
) -> tuple[Shaped[Array, "B K _ D"], ...]:
    """See `api.append_rows`; does not look at the device.

    Raises:
      UnsupportedKernelError: shapes or dtypes that the kernel does not cover.
    """
    batch, heads = old[0].shape[:2]
    for into, rows in zip(old, new, strict=True):
        row_layout(into.shape[3])
        if into.shape[:2] != (batch, heads):
            raise UnsupportedKernelError(f"needs arrays of one batch and head count, got {into.shape}")
        if into.dtype != rows.dtype:
            raise UnsupportedKernelError(f"needs new rows of the old dtype {into.dtype}, got {rows.dtype}")
    widest = max(move.width for move in moves)
    if widest > MAX_ROWS:
        raise UnsupportedKernelError(f"needs at most {MAX_ROWS} rows, got {widest}")

    def body(*refs: Any) -> None:
        into, rows, at = refs[: len(old)], refs[len(old) : 2 * len(old)], refs[2 * len(old) :]
        b, k, number = lax.axis_index("b"), lax.axis_index("k"), lax.axis_index("n")
        for block in range(-(-len(old) // PER_BLOCK)):
            members = range(block * PER_BLOCK, min((block + 1) * PER_BLOCK, len(old)))
            pl.when(number == block)(functools.partial(_copy, into, rows, at, members, b, k))

    def _copy(into: Any, rows: Any, at: Any, members: range, b: Any, k: Any) -> None:
        found: dict[int, list[tuple[Any, Any]]] = {}
        for index in {which[i] for i in members}:
            source, target = at[2 * index], at[2 * index + 1]
            found[index] = [(source[b, p], target[b, p]) for p in range(moves[index].width)]
        held = []
        for i in members:
            for source, target in found[which[i]]:
                row = lax.min(lax.max(source, 0), new[i].shape[2] - 1)
                held.append((i, target, read_row(rows[i], b, k, row)))
        for i, target, value in held:
            inside = (target >= 0) & (target < old[i].shape[2])
            pl.when(inside)(functools.partial(_store, into[i].at[b, k, lax.max(target, 0)], value))

    def _store(ref: Any, value: Any) -> None:
        ref[...] = value

    body.__name__ = "cache_append"
    kernel = plgpu.kernel(
        body,
        out_type=(),
        grid=(heads, -(-len(old) // PER_BLOCK), batch),
        grid_names=("k", "n", "b"),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )
    targets = [jax.new_ref(x) for x in old]
    indices = [x for move in moves for x in (move.source, move.target)]
    kernel(*targets, *new, *indices)
    return tuple(jax.freeze(x) for x in targets)
