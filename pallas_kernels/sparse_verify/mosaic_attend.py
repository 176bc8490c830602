"""Streams of key tiles and the running softmax over them, for all branches of sparse attention in one code path.

Blocks of one warpgroup each take a row tile, a branch, and a share (a split) of the branch's keys, which they stream
through a ring in shared memory. What the branches differ in are scalars: code that is not there need not be lowered,
compiled or fetched.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax

from .mosaic_inline import list_count, sync
from .mosaic_problem import COMPRESSED, SELECTED, Inputs, Problem
from .mosaic_rows import ROWS, WORDS

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

LOG2E = math.log2(math.e)
MASKED = -1e30  # score of a masked key; finite, so that no inf - inf arises
START = -1e20  # running maximum of a row without keys: exp2((MASKED - START) * scale) is 0
HOISTED = 4  # tree blocks up to which the end of a visit list is read ahead of the loop

WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)
I32, F32 = jnp.int32, jnp.float32

Scalars = tuple[jax.Array, ...]
Words = tuple[jax.Array, jax.Array]  # which of 64 columns each row sees: a word for the lower half, one for the upper


def splat(shape: tuple[int, ...], value: float | int, dtype: Any, layout: Any) -> jax.Array:
    """A constant array in a register layout."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along_rows(vector: jax.Array, columns: int = ROWS) -> jax.Array:
    """A vector over rows, for every column of a tile."""
    return lax.broadcast_in_dim(vector, (ROWS, columns), [0])


def pick(number: Any, values: Sequence[Any]) -> Any:
    """The value of that number; a constant where all are the same."""
    if all(isinstance(value, int) for value in values) and len(set(values)) == 1:
        return jnp.int32(values[0])
    chosen = jnp.int32(values[0])
    for index, value in enumerate(values[1:], 1):
        chosen = jnp.where(number == index, value, chosen)
    return chosen


class Barriers:
    """A run of an array of barriers: all of a kernel share one array, as each takes a kilobyte."""

    def __init__(self, array: Any, first: int):
        self.array, self.first = array, first

    def __getitem__(self, index: Any) -> Any:
        return self.array.at[self.first + index]


class Ring:
    """K and V tiles on their way through shared memory. Pieces of a head's columns are separate tiles.

    The copies fill plain 64-row tiles at any row; the products read the same bytes as (8, 64)-tiled operands.
    """

    def __init__(self, size: int, k: Any, v: Any, k_barriers: Barriers, v_barriers: Barriers):
        self.size = size
        self.tiles = (k, v)
        self.barriers = (k_barriers, v_barriers)

    def fetch(self, which: int, source: Any, slot: jax.Array, rows: Scalars) -> None:
        """Copies runs of `size` rows of a [rows, D] reference into a slot that all warps have read."""
        size = self.size
        for chunk in range(len(self.tiles[which])):
            for piece, row in enumerate(rows):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row, size), pl.ds(64 * chunk, 64)],
                    self.tiles[which][chunk][1].at[slot, pl.ds(piece * size, size)],
                    self.barriers[which][slot],
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a thread block works on, as scalars.

    Args:
      b, k: sequence and KV head.
      branch: number of the branch.
      number: of the job among those of the branch and the KV head.
      tile: row tile of the branch.
      split, splits: which share of the tile's keys, of how many.
    """

    b: Any
    k: Any
    branch: Any
    number: Any
    tile: Any
    split: Any
    splits: Any


def _divide(number: jax.Array, branch: jax.Array, problem: Problem) -> jax.Array:
    """A job's number by the splits of its branch. The compiler makes one slow division of several by constants."""
    factors = [-(-(1 << 16) // n) for n in problem.splits]
    exact = all(
        x * factor >> 16 == x // n and x * factor < 1 << 31
        for factor, n, jobs in zip(factors, problem.splits, problem.jobs, strict=True)
        for x in range(jobs)
    )
    if exact:
        return (number * pick(branch, factors)) >> 16
    return pick(branch, [lax.div(number, jnp.int32(n)) for n in problem.splits])


def locate(problem: Problem, b: Any, k: Any, j: Any) -> Job:
    """The job of a thread block."""
    edges = [sum(problem.jobs[:n]) for n in range(len(problem.jobs))]
    branch = jnp.int32(0)
    for edge in edges[1:]:
        branch += jnp.where(j >= edge, 1, 0)
    number = j - pick(branch, edges)
    splits = pick(branch, problem.splits)
    tile = _divide(number, branch, problem)
    split = number - tile * splits
    if problem.last != problem.splits[SELECTED]:
        before = (problem.rows.tiles - 1) * problem.splits[SELECTED]
        last = (branch == SELECTED) & (number >= before)
        splits = jnp.where(last, problem.last, splits)
    return Job(b=b, k=k, branch=branch, number=number, tile=tile, split=split, splits=splits)


def load_rows(ref: Any, *at: Any) -> jax.Array:
    """A vector over the rows of a tile, from global memory."""
    return plgpu.load(ref.at[at], layout=PER_ROW, optimized=False)


def range_words(low: jax.Array | None, high: jax.Array, words: int = WORDS) -> list[jax.Array]:
    """The columns from `low` (or the first) up to before `high` of each row, of tiles of 32 * `words` columns."""

    def below(bound: jax.Array, word: int) -> jax.Array:
        bound = jnp.clip(bound - 32 * word, 0, 32)
        return jnp.where(bound == 32, -1, (1 << (bound & 31)) - 1)

    found = [below(high, word) for word in range(words)]
    return found if low is None else [had & ~below(low, word) for word, had in enumerate(found)]


def mask_columns(s: jax.Array, words: Sequence[jax.Array]) -> jax.Array:
    """Scores with those columns masked whose bit is not set in their row's words, lowest columns first."""
    columns = plgpu.broadcasted_iota(I32, s.shape, 1, layout=WGMMA)
    chosen = along_rows(words[-1], s.shape[1])
    for index in reversed(range(len(words) - 1)):
        chosen = jnp.where(columns < 32 * (index + 1), along_rows(words[index], s.shape[1]), chosen)
    return jnp.where(((chosen >> (columns & 31)) & 1) == 1, s, MASKED)


class Keys:
    """The key tiles of a job: `count` of the cache, then `tree_count` of the tree.

    Args:
      problem, refs, job: the call.
      interpret: whether the interpreter runs it.
    """

    def __init__(self, problem: Problem, refs: Inputs, job: Job, interpret: bool):
        self.problem, self.refs, self.job, self.interpret = problem, refs, job, interpret
        tiling, size = problem.rows, problem.block_size
        self.selected = job.branch == SELECTED
        first_node = jnp.where(self.selected, job.tile * tiling.per_tile, 0)
        group = lax.div(first_node, jnp.int32(tiling.group))
        self.blocks, self.owners = (x.at[job.b, job.k, group] for x in (refs.blocks, refs.owners))
        self.length = refs.length[job.b]
        self.border = lax.div(self.length, jnp.int32(size))
        row = plgpu.broadcasted_iota(I32, (ROWS,), 0, layout=PER_ROW)
        self.node = (lax.div(row, jnp.int32(tiling.heads)) + lax.rem(first_node, jnp.int32(tiling.group))) & 31
        self.table = job.tile + pick(job.branch, [0, tiling.tiles, tiling.tiles + tiling.dense_tiles])
        self.below = load_rows(refs.below, job.b, self.table)

        length, window = self.length, problem.window
        first = lax.div(jnp.maximum(length - window + 1, 0), jnp.int32(ROWS))
        entries = lax.div(length - problem.kernel_size, jnp.int32(problem.stride)) + 1
        entries = jnp.where(length < problem.kernel_size, 0, entries)
        many = len(problem.splits)
        self.base = pick(job.branch, [0, first, 0][:many])
        self.limit = pick(job.branch, [length, length, entries][:many])
        self.whole_from = pick(job.branch, [0, length + tiling.nodes - window, 0][:many])
        self.dense_count = lax.div(self.limit + ROWS - 1, jnp.int32(ROWS)) - self.base
        # Rows see a part of a large tree: nodes of a chain what comes before them, and in the window little of that.
        self.tree_first: Any = 0
        self.tree_count = pick(job.branch, problem.tree_tiles)
        if refs.tree_range is not None:
            self.tree_first = refs.tree_range[job.b, self.table, 0]
            self.tree_count = refs.tree_range[job.b, self.table, 1] - self.tree_first

    def count_cached(self) -> jax.Array:
        """Key tiles of the cache; sets what the tree's masks need."""
        pieces = self.problem.pieces
        self.listed = list_count(self.blocks, self.problem.union, self.interpret)
        self.count = jnp.where(self.selected, lax.div(self.listed + pieces - 1, jnp.int32(pieces)), self.dense_count)
        return self.count

    def _entries(self, i: jax.Array) -> list[jax.Array]:
        pieces = self.problem.pieces
        return [jnp.minimum(i * pieces + piece, self.problem.union - 1) for piece in range(pieces)]

    def rows(self, i: jax.Array) -> Scalars:
        """First row of each piece of a cached tile."""
        size = self.problem.block_size
        plain = (i + self.base) * ROWS
        listed = [jnp.maximum(self.blocks[at], 0) * size for at in self._entries(i)]
        return tuple(jnp.where(self.selected, at, plain + n * size) for n, at in enumerate(listed))

    def tree_rows(self, i: jax.Array) -> Scalars:
        """First row of each piece of a tree tile."""
        return tuple(i * ROWS + piece * self.problem.block_size for piece in range(self.problem.pieces))

    def bits(self, i: jax.Array) -> Scalars:
        """Who owns each piece of a cached tile: a bit for every node of the group; nobody in a list's padding."""
        found = []
        for piece, at in enumerate(self._entries(i)):
            owners = jnp.where(i * self.problem.pieces + piece < self.problem.union, self.owners[at], 0)
            found.append(jnp.where(self.selected, owners, -1))
        return tuple(found)

    def owned(self, bits: jax.Array) -> jax.Array:
        """Which rows own a piece."""
        return ((bits >> self.node) & 1) == 1

    def cut(self, rows: Scalars) -> jax.Array:
        """Whether a cached tile has masked columns."""
        cut = (rows[0] + ROWS > self.limit) | (rows[0] < self.whole_from)
        return cut if self.problem.pieces == 1 else cut | self.selected

    def cached_words(self, rows: Scalars, bits: Scalars) -> Words:
        """Columns of a cached tile that each row sees; with one piece to a tile, whoever owns it."""
        size, found = self.problem.block_size, []
        for piece, (row, own) in enumerate(zip(rows, bits, strict=True)):
            start = piece * size
            high = jnp.clip(self.limit - row, 0, size) + start
            if self.problem.pieces > 1:
                high = jnp.where(self.owned(own), high, start)
            low = jnp.clip(self.below + 1 - row, 0, size) + start
            found.append(range_words(low, plgpu.layout_cast(jnp.zeros((ROWS,), I32) + high, PER_ROW)))
        low, high = (functools.reduce(jnp.bitwise_or, halves) for halves in zip(*found, strict=True))
        return low, high

    def last_listed(self, e: Any) -> tuple[jax.Array, jax.Array]:
        """Owners, and distance from the first tree block, of an entry counted from the end of the visit list."""
        at = jnp.maximum(self.listed - 1 - e, 0)
        step, depth = self.blocks[at] - self.border, self.refs.block_columns.shape[1]
        there = self.selected & (self.listed > e) & (step >= 0) & (step < depth)
        return jnp.where(there, self.owners[at], 0), jnp.clip(step, 0, depth - 1)

    def read_ahead(self) -> None:
        """Reads what the tree's masks need."""
        depth = self.refs.block_columns.shape[1]
        self.tail = [self.last_listed(e) for e in range(depth)] if depth <= HOISTED else None
        self.one_tile = self.tree_words(jnp.int32(0)) if max(self.problem.tree_tiles) == 1 else None

    def tree_words(self, i: jax.Array) -> Words:
        """Columns of a tree tile on a row's path: of selected blocks, in the window, or of completed entries."""
        refs, b = self.refs, self.job.b

        def add(reach: Any, bits: jax.Array, step: jax.Array) -> Any:
            ours = self.owned(bits)
            found = [refs.block_columns[b, step, i * WORDS + half] for half in range(WORDS)]
            return tuple(had | jnp.where(ours, word, 0) for had, word in zip(reach, found, strict=True))

        reach = (splat((ROWS,), 0, I32, PER_ROW),) * WORDS
        if self.tail is not None:
            for bits, step in self.tail:
                reach = add(reach, bits, step)
        else:
            steps = jnp.where(self.selected, refs.block_columns.shape[1], 0)
            reach = lax.fori_loop(0, steps, lambda e, reach: add(reach, *self.last_listed(e)), reach)
        path = [load_rows(refs.words, b, self.table, i * WORDS + half) for half in range(WORDS)]
        low, high = (word & jnp.where(self.selected, had, -1) for word, had in zip(path, reach, strict=True))
        return low, high


def attend(
    problem: Problem, ring: Ring, q: list[Any], q_barrier: Any, p_ref: Any, keys: Keys, dtype: Any
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Running softmax of a row tile over a split of its keys: accumulators, maximum (of base-2 exponents), sum."""
    stages, chunks = problem.stages, problem.chunks
    job = keys.job

    # Everything that the first copies wait for, in one round trip to memory.
    queue = tuple(keys.rows(job.split + stage * job.splits) for stage in range(stages + 1))
    bits = keys.bits(job.split)
    count = keys.count_cached()
    end, of_cache = count + keys.tree_count, count - keys.tree_first  # tile n >= count is the tree's n - of_cache
    sources = keys.refs.sources(job.b, job.k)

    def fetch(which: int, slot: Any, tile: jax.Array, rows: Scalars) -> None:
        """Fills a slot, which all warps have read, with a tile, if there is one; `rows` of a cached tile."""
        of_tree = tile >= count
        rows = tuple(jnp.where(of_tree, t, c) for t, c in zip(keys.tree_rows(tile - of_cache), rows, strict=True))
        number = jnp.where(of_tree, 1, 0) + jnp.where(job.branch == COMPRESSED, 2, 0)
        for candidate, pair in sources.items():

            @pl.when((tile < end) & (number == candidate))
            def _from(pair: Any = pair) -> None:
                ring.fetch(which, pair[which], slot, rows)

    def fill(stage: jax.Array, carry: None) -> None:
        rows = tuple(pick(stage, column) for column in zip(*queue[:stages], strict=True))
        for which in (0, 1):
            fetch(which, stage, job.split + stage * job.splits, rows)

    lax.fori_loop(0, jnp.minimum(stages, end), fill, None)  # a static count would be unrolled
    keys.read_ahead()

    def release() -> None:
        """Waits until all warps have read a slot."""
        if p_ref is None:
            sync()

    unit = problem.scale * LOG2E

    def masked(s: jax.Array, tile: jax.Array, rows: Scalars, bits: Scalars) -> jax.Array:
        low, high = keys.cached_words(rows, bits)
        if max(problem.tree_tiles):
            tree_tile = jnp.maximum(tile - of_cache, 0)
            tree = keys.tree_words(tree_tile) if keys.one_tile is None else keys.one_tile
            low, high = (jnp.where(tile < count, c, t) for c, t in zip((low, high), tree, strict=True))
        return mask_columns(s, (low, high))

    def multiply_keys(acc_ref: Any, slot: Any) -> None:
        for chunk in range(chunks):
            plgpu.wgmma(acc_ref, q[chunk], ring.tiles[0][chunk][0].at[slot].transpose((1, 0)))

    def multiply_values(acc_refs: Any, p: jax.Array, slot: Any) -> None:
        if p_ref is not None:
            p_ref[...] = p
            plgpu.commit_smem()
        plgpu.barrier_wait(ring.barriers[1][slot])
        for chunk, acc_ref in enumerate(acc_refs):
            plgpu.wgmma(acc_ref, p if p_ref is None else p_ref, ring.tiles[1][chunk][0].at[slot])

    def soften(s: jax.Array, tile: jax.Array, rows: Scalars, bits: Scalars, top: jax.Array) -> tuple[jax.Array, ...]:
        """Weights of a tile's keys, their sums, the new maximum, and the factor of what came before."""
        cut = (tile >= count) | keys.cut(rows)
        s = lax.cond(cut, lambda s: masked(s, tile, rows, bits), lambda s: s, s)
        peak = s.max(axis=1)
        if problem.pieces == 1:
            bias = jnp.where(keys.owned(jnp.where(tile < count, bits[0], -1)), 0.0, MASKED)
            new_top = jnp.maximum(top, peak + bias)
            shift = (bias - new_top) * unit
        else:
            new_top = jnp.maximum(top, peak)
            shift = (0.0 - new_top) * unit
        p = jnp.exp2(s * unit + along_rows(shift))
        return p.astype(dtype), p.sum(axis=1), new_top, jnp.exp2((top - new_top) * unit)

    accumulator = plgpu.ACC((ROWS, ROWS), F32)

    def scores(slot: Any) -> jax.Array:
        def run(acc_ref: Any) -> jax.Array:
            multiply_keys(acc_ref, slot)
            return acc_ref[...]

        return pl.run_scoped(run, accumulator)

    def step(carry: Any) -> Any:
        tile, item, (acc, top, norm), queue, bits = carry
        after = keys.rows(tile + (stages + 1) * job.splits), keys.bits(tile + job.splits)
        slot = lax.rem(item, jnp.int32(stages))
        plgpu.barrier_wait(ring.barriers[0][slot])
        s = scores(slot)
        release()
        fetch(0, slot, tile + stages * job.splits, queue[stages])

        def run(*acc_refs: Any) -> tuple[Any, ...]:
            p, gained, new_top, shrink = soften(s, tile, queue[0], bits, top)
            multiply_values(acc_refs, p, slot)
            return tuple(acc_ref[...] for acc_ref in acc_refs), gained, new_top, shrink

        values, gained, new_top, shrink = pl.run_scoped(run, *[accumulator] * chunks)
        release()
        fetch(1, slot, tile + stages * job.splits, queue[stages])
        acc = tuple(a * along_rows(shrink) + new for a, new in zip(acc, values, strict=True))
        state = acc, new_top, norm * shrink + gained
        return tile + job.splits, item + 1, state, (*queue[1:], after[0]), after[1]

    start = (
        tuple(splat((ROWS, ROWS), 0.0, F32, WGMMA) for _ in range(chunks)),
        splat((ROWS,), START, F32, PER_ROW),
        splat((ROWS,), 0.0, F32, PER_ROW),
    )
    plgpu.barrier_wait(q_barrier)
    carry = (job.split, jnp.int32(0), start, queue, bits)
    _, _, (acc, top, norm), _, _ = lax.while_loop(lambda carry: carry[0] < end, step, carry)
    return list(acc), top * unit, norm
