"""Compressed-branch attention for few query rows on Hopper: keys take the place of the 64 rows of wgmma.

A tile of queries that fills 4 of 64 rows costs as much as a full one. Here the rows are the N of wgmma instead, of
which 8 are the least: scores^T = K q^T, the softmax runs over the first axis, and out^T = V^T p^T, with the
probabilities in shared memory between the two. They lie there in float32 too, from where each block's few entries are
added up: so masses need no product and no rounding. Results go where those of a full tile would be, row by row; rows of
no query are not written.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .mosaic_common import MASKED, PANEL, ROWS, START, TILED, TREE_TILE, Accumulator, put

COLUMNS = 8  # query rows that there is room for
_PADDING = 2  # columns of the sheet that keep its rows on different banks
_WGMMA = plgpu.Layout.WGMMA
Carry = tuple[list[Array], Array, Array]  # accumulators of the panels, running maximum, running sums by thread


def _down(size: int) -> Any:
    """[size] registers, spread over the warps, for a column of the sheet: a multiple of 8."""
    lanes = min(32, size // 4)
    lane_dims = (-2,) if lanes == 32 else (plgpu.Replicated(32 // lanes), -2)
    tiling = plgpu.Tiling(((4 * lanes,), (lanes,), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=lane_dims, vector_dim=-1)


def narrow_scratch(size: int, ratio: int, dtype: Any) -> list[Any]:
    """Shared memory beside queries, keys and values, for tiles of `size` entries in blocks of `ratio`.

    Probabilities as an operand; the sheet, which has a block of zeros and then the probabilities in float32, a column
    for each row; the running maximum and sum of each row.
    """
    return [
        plgpu.SMEM((COLUMNS, size), dtype, transforms=TILED),
        plgpu.SMEM((ratio + size, COLUMNS + _PADDING), jnp.float32),
        plgpu.SMEM((2, COLUMNS), jnp.float32),
    ]


def attend_narrow(
    inputs: tuple[Any, ...],
    results: tuple[Any, ...],
    shared: tuple[Any, ...],
    barriers: tuple[Any, ...],
    *,
    batch: Array,
    x: Array,
    split: Array,
    first: Array,
    steps: Array,
    chunks: Array,
    visible: Array,
    overlap: tuple[tuple[int, ...], tuple[int, ...]],
    per_tile_nodes: int,
    depth: int,
    factor: float,
    fetch: Callable[[Array], None],
    refill: Callable[[Array, Array], None],
    interpret: Any,
) -> None:
    """The body of a thread block that serves all query rows of a KV head, at most `COLUMNS`.

    Args:
      inputs: queries and the bias of completed entries.
      results: the arrays of `Partials`; None for the last three without scores.
      shared: queries, the same for copies, rings of keys and of values, `narrow_scratch`.
      barriers: of the copies of queries, keys and values.
      batch, x, split: sequence, KV head of all sequences, and split.
      first, steps, chunks: first tile of entries, how many, and tiles of completed entries after those.
      visible: committed entries of the sequence.
      overlap: how often each entry of a block counts in it, and in the next one.
      per_tile_nodes: nodes of a full row tile; rows of partial results are head-major.
      depth: tiles of the mass array.
      factor: of scores in log2 units.
      fetch: starts the copies of a step.
      refill: says that a step has been read from its slot.
      interpret: parameters of the interpreter, or None.
    """
    (q_ref, bias_ref), (o_ref, stats_ref, mass_ref, top_ref, tree_ref) = inputs, results
    (q_s, q_copy, k_s, v_s, p_s, sheet, ends), (q_b, k_b, v_b) = shared, barriers
    f32, i32 = jnp.float32, jnp.int32
    in_smem = interpret is not None
    score = mass_ref is not None
    _, nodes, kv_heads, heads, _ = q_ref.shape
    stages, panels, size, _ = k_s.shape
    own, spilt = overlap
    ratio = len(own)
    blocks = size // ratio
    cells = pl.ds(0, COLUMNS)
    rows = [h * per_tile_nodes + n for n in range(nodes) for h in range(heads)]  # of partial results

    # Columns of no query stay as they are: columns are independent.
    for n in range(nodes):
        for panel in range(panels):
            source = q_ref.at[batch, n, lax.rem(x, i32(kv_heads)), :, pl.ds(panel * PANEL, PANEL)]
            plgpu.copy_gmem_to_smem(source, q_copy.at[0, panel, pl.ds(n * heads, heads)], q_b.at[0])
    for i in range(stages):
        fetch(i32(i))
    if score:
        for e in range(ratio):
            if spilt[e]:
                for c in range(len(rows)):
                    sheet[e, c] = f32(0.0)
    plgpu.barrier_wait(q_b.at[0])

    def constant(shape: tuple[int, ...], value: float, layout: Any) -> Array:
        return plgpu.layout_cast(jnp.full(shape, value, f32), layout)

    def panel_of(ring: Any, slot: Array, panel: int, length: int) -> Any:
        return ring.at[slot, panel] if length == size else ring.at[slot, panel, pl.ds(0, length)]

    def scores(slot: Array, length: int) -> Array:
        """Products, not scaled yet: entries by columns."""

        def product(acc_ref: Any) -> Array:
            for panel in range(panels):
                keys = panel_of(k_s, slot, panel, length)
                plgpu.wgmma(acc_ref, keys, q_s.at[0, panel].transpose((1, 0)))
            return acc_ref[...]

        return pl.run_scoped(product, Accumulator((length, COLUMNS), f32))

    def soften(values: Array, carry: Carry) -> tuple[Array, Carry]:
        acc, top, sums = carry
        new_top = jnp.maximum(top, values.max(axis=0) * factor)
        p = jnp.exp2(values * factor - lax.broadcast_in_dim(new_top, values.shape, [1]))
        factors = lax.broadcast_in_dim(jnp.exp2(top - new_top), sums.shape, [1])
        sums = sums * factors
        for start in range(0, values.shape[0], ROWS):
            sums = sums + p[start : start + ROWS]
        return p, ([old * factors for old in acc], new_top, sums)

    def weigh(p: Array, carry: Carry, slot: Array, number: Array, beside: Callable[[], None]) -> Carry:
        """Adds the weighted values to accumulators that have been rescaled; meanwhile, `beside`."""
        acc, top, sums = carry
        length = p.shape[0]
        weights = p_s if length == size else p_s.at[:, pl.ds(0, length)]
        weights.transpose((1, 0))[...] = p.astype(q_ref.dtype)
        if score:
            put(sheet.at[pl.ds(ratio, length), cells], p, interpret)
            put(ends.at[0], top, interpret)
        plgpu.commit_smem()
        plgpu.barrier_wait(v_b.at[slot])

        def product(acc_refs: list[Any]) -> None:
            for panel, acc_ref in enumerate(acc_refs):
                values = panel_of(v_s, slot, panel, length)
                plgpu.wgmma(acc_ref, values.transpose((1, 0)), weights.transpose((1, 0)))
            if score:
                beside()

        def from_zero(*acc_refs: Any) -> list[Array]:
            product(list(acc_refs))
            return [acc_ref[...] for acc_ref in acc_refs]

        if in_smem:
            gained = pl.run_scoped(from_zero, *[Accumulator((PANEL, COLUMNS), f32)] * panels)
            acc = [old + new for old, new in zip(acc, gained, strict=True)]
        else:
            acc = pl.run_state(product)([Accumulator.init(old) for old in acc])
        refill(number, slot)
        return acc, top, sums

    def column(length: int, c: int) -> Array:
        return plgpu.load(sheet.at[pl.ds(ratio, length), c], layout=_down(length), optimized=False)

    def entry_of_blocks(start: int, e: int, c: int) -> Array:
        """Entry e of each block, from block `start` of the sheet on."""
        if in_smem:  # the interpreter does not know reshaped references
            return sheet[pl.ds(start * ratio, size), c].reshape(blocks, ratio)[:, e]
        by_block = sheet.reshape((sheet.shape[0] // ratio, ratio, sheet.shape[1]))
        return plgpu.load(by_block.at[pl.ds(start, blocks), e, c], layout=_down(blocks), optimized=False)

    def weighted(terms: list[tuple[int, Callable[[], Array]]]) -> Array:
        """Their sum; those of weight 0 are not read."""
        return functools.reduce(operator.add, (f32(n) * read() if n > 1 else read() for n, read in terms if n))

    def sum_up(step: Array) -> None:
        """Masses of the blocks of a step, from the sheet."""
        masses, rests = [], []
        for c in range(len(rows)):  # all loads, then all stores
            entries = [
                (times[e], functools.partial(entry_of_blocks, start, e, c))
                for start, times in ((1, own), (0, spilt))
                for e in range(ratio)
            ]
            masses.append(weighted(entries))
            if any(spilt):
                rest = [(spilt[e], lambda e=e, c=c: sheet[size + e, c]) for e in range(ratio)]
                rests.append(weighted(rest))
        for c, row in enumerate(rows):
            at = (x, 0, step + 1, row)
            put(mass_ref.at[*at, pl.ds(0, blocks)], masses[c], interpret)
            if rests:
                mass_ref[*at, blocks] = rests[c]
            top_ref[*at] = ends[0, c]

    entry = plgpu.broadcasted_iota(i32, (size, COLUMNS), 0, layout=_WGMMA)

    def step(i: Array, carry: Carry) -> Carry:
        slot = lax.rem(i, i32(stages))
        plgpu.barrier_wait(k_b.at[slot])
        values = jnp.where(entry < visible - (first + i) * size, scores(slot, size), MASKED)
        p, carry = soften(values, carry)
        return weigh(p, carry, slot, i, lambda: sum_up(first + i))

    def tree_step(i: Array, carry: Carry) -> Carry:
        slot = lax.rem(steps + i, i32(stages))
        at = pl.ds(pl.multiple_of(i * TREE_TILE, TREE_TILE), TREE_TILE)
        staged = pl.ds(ratio, TREE_TILE)
        plgpu.commit_smem()  # the sheet has been read
        for c, row in enumerate(rows):
            hidden = plgpu.load(bias_ref.at[batch, 0, row, at], layout=_down(TREE_TILE), optimized=False)
            put(sheet.at[staged, c], hidden, interpret)
        plgpu.commit_smem()
        hidden = plgpu.load(sheet.at[staged, cells], layout=_WGMMA, optimized=False)
        plgpu.barrier_wait(k_b.at[slot])
        values = jnp.where(hidden < 0.0, MASKED, scores(slot, TREE_TILE))
        p, carry = soften(values, carry)

        def write() -> None:
            for c, row in enumerate(rows):
                put(tree_ref.at[x, 0, row, at], column(TREE_TILE, c), interpret)
                top_ref[x, 0, depth + i, row] = ends[0, c]

        return weigh(p, carry, slot, steps + i, write)

    acc = [constant((PANEL, COLUMNS), 0.0, _WGMMA)] * panels
    carry = acc, constant((COLUMNS,), START, _WGMMA.reduce(0)), constant((ROWS, COLUMNS), 0.0, _WGMMA)
    carry = lax.fori_loop(0, steps, step, carry)
    acc, top, sums = lax.fori_loop(0, chunks, tree_step, carry)
    put(ends.at[0], top, interpret)
    put(ends.at[1], sums.sum(axis=0), interpret)
    for panel in range(panels):
        plgpu.commit_smem()  # the sheet has been read
        put(sheet.at[pl.ds(ratio, PANEL), cells], acc[panel], interpret)
        plgpu.commit_smem()
        for c, row in enumerate(rows):
            at = o_ref.at[x, 0, split, row, pl.ds(panel * PANEL, PANEL)]
            put(at, column(PANEL, c), interpret)
    for c, row in enumerate(rows):
        for i in range(2):
            stats_ref[x, 0, split, i, row] = ends[i, c]
