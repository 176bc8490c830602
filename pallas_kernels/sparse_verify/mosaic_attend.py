"""One Hopper kernel for all branches of sparse attention over a tree of queries.

Blocks of one warpgroup each take a row tile, a branch, and a share (a split) of the branch's keys; they stream the
keys through a ring in shared memory and leave (maximum, sum, accumulator) in global memory. The block that
arrives last at a row tile adds the splits in split order, applies the gates and writes the output, so the result
does not depend on who is last.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax

from .mosaic_inline import list_counts, sync
from .mosaic_rows import ROWS, WORDS, RowTiles

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

LOG2E = math.log2(math.e)
MASKED = -1e30  # score of a masked key; finite, so that no inf - inf arises
START = -1e20  # running maximum of a row without keys: exp2((MASKED - START) * scale) is 0

WGMMA = plgpu.Layout.WGMMA
PER_ROW = WGMMA.reduce(1)
I32, F32 = jnp.int32, jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Static description of a call.

    Args:
      batch, kv_heads, dim: B, K, D.
      rows: row tiles.
      block_size, stride, kernel_size: of the geometry.
      window: keys in reach of the window branch.
      union: U, width of a visit list.
      slots: M, completed entries a pass can have.
      scale: multiplies q . k.
      splits: splits of each branch, in the order selected, window, compressed (absent without that branch).
      stages: key tiles in the ring.
      fused: whether the last block at a row tile sums its splits, or a launch of its own does.
    """

    batch: int
    kv_heads: int
    dim: int
    rows: RowTiles
    block_size: int
    stride: int
    kernel_size: int
    window: int
    union: int
    slots: int
    scale: float
    splits: tuple[int, ...]
    stages: int
    fused: bool

    @property
    def chunks(self) -> int:
        """64-column pieces of a head; shared memory holds each piece as its own swizzled tile."""
        return self.dim // 64

    @property
    def pieces(self) -> int:
        """Blocks in a key tile."""
        return ROWS // self.block_size

    @property
    def tree_tiles(self) -> int:
        """Key tiles of the tree."""
        return -(-self.rows.nodes // ROWS)

    @property
    def compressed(self) -> bool:
        """Whether the compressed branch is part of the call."""
        return len(self.splits) == 3

    @property
    def jobs(self) -> tuple[int, ...]:
        """Thread blocks per KV head, by branch."""
        tiles = (self.rows.tiles, self.rows.dense_tiles, self.rows.dense_tiles)
        return tuple(count * splits for count, splits in zip(tiles, self.splits, strict=False))

    @property
    def partials(self) -> int:
        """Partial results of the whole call."""
        return self.batch * self.kv_heads * sum(self.jobs)

    def first_partial(self, branch: int) -> int:
        """Index of a branch's first partial result."""
        return self.batch * self.kv_heads * sum(self.jobs[:branch])


def splat(shape: tuple[int, ...], value: float | int, dtype: Any, layout: Any) -> jax.Array:
    """A constant array in a register layout."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along_rows(vector: jax.Array) -> jax.Array:
    """A vector over rows, for every column of a tile."""
    return lax.broadcast_in_dim(vector, (ROWS, ROWS), [0])


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

    def __init__(self, problem: Problem, k: Any, v: Any, k_barriers: Barriers, v_barriers: Barriers):
        self.problem = problem
        self.k, self.v = k, v
        self.k_barriers, self.v_barriers = k_barriers, v_barriers

    def fetch(self, source: Any, target: Any, barrier: Any, slot: jax.Array, rows: tuple[jax.Array, ...]) -> None:
        """Copies `pieces` runs of rows of a [rows, D] reference into a slot that all warps have read."""
        size = self.problem.block_size
        for chunk in range(self.problem.chunks):
            for piece, row in enumerate(rows):
                plgpu.copy_gmem_to_smem(
                    source.at[pl.ds(row, size), pl.ds(64 * chunk, 64)],
                    target[chunk][1].at[slot, pl.ds(piece * size, size)],
                    barrier,
                )


Words = tuple[jax.Array, jax.Array]  # which of 64 columns each row sees: a word for the lower half, one for the upper


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A run of key tiles: those of the cache, or those of the tree.

    Args:
      k, v: [rows, D] references.
      rows: scalars of a tile: the first row of each of its pieces.
      bounds: scalars of a tile that its mask needs. Both are read one step ahead, off the critical path.
      words: mask of a tile from (tile, bounds).
      bias: for tiles without masked keys, what to add to the scores of each row from (bounds); None for nothing.
    """

    k: Any
    v: Any
    rows: Callable[[jax.Array], tuple[jax.Array, ...]]
    bounds: Callable[[jax.Array], tuple[jax.Array, ...]]
    words: Callable[[jax.Array, tuple[jax.Array, ...]], Words]
    bias: Callable[[tuple[jax.Array, ...]], jax.Array] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """The key tiles of a row tile in one branch: cached ones, then the tree's; split s takes s, s + splits, ...

    Args:
      cached, tree: the two runs.
      counts: number of cached tiles, and how many of them, from the first, have no masked keys (but maybe rows).
      tree_tiles: number of tree tiles.
    """

    cached: Part
    tree: Part
    counts: Callable[[], tuple[jax.Array, jax.Array]]
    tree_tiles: int


def attend(
    problem: Problem,
    ring: Ring,
    q: list[Any],
    q_barrier: Any,
    p_ref: Any,
    stream: Stream,
    split: jax.Array,
    splits: int,
    dtype: Any,
) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Running softmax of a row tile over a split of a stream: accumulators, maximum (of base-2 exponents), sum."""
    stages, chunks = problem.stages, problem.chunks
    cached, tree = stream.cached, stream.tree

    def tile_of(item: Any) -> jax.Array:
        return split + item * splits

    # Everything that the first copies wait for, in one round trip to memory.
    ahead = [cached.rows(tile_of(stage)) for stage in range(stages + 1)]
    bounds = cached.bounds(tile_of(0))
    count, full = stream.counts()

    def share(tiles: Any) -> jax.Array:
        return lax.div(jnp.maximum(tiles - split, 0) + splits - 1, jnp.int32(splits))

    ours, total = share(count), share(count + stream.tree_tiles)
    begin = jnp.minimum(share(full), ours)

    def fetch(which: int, item: Any, rows: tuple[jax.Array, ...]) -> None:
        """Fills the slot of an item, which all warps have read; `rows` of a cached tile."""
        slot = lax.rem(jnp.int32(item), jnp.int32(stages))
        target, barriers = (ring.k, ring.k_barriers) if which == 0 else (ring.v, ring.v_barriers)

        @pl.when(item < ours)
        def _cached() -> None:
            ring.fetch((cached.k, cached.v)[which], target, barriers[slot], slot, rows)

        @pl.when((item >= ours) & (item < total))
        def _tree() -> None:
            tree_rows = tree.rows(tile_of(item) - count)
            ring.fetch((tree.k, tree.v)[which], target, barriers[slot], slot, tree_rows)

    for stage in range(stages):
        for which in (0, 1):
            fetch(which, stage, ahead[stage])

    def refill(which: int, item: jax.Array, rows: tuple[jax.Array, ...]) -> None:
        if p_ref is None:
            sync()
        fetch(which, item, rows)

    columns = plgpu.broadcasted_iota(I32, (ROWS, ROWS), 1, layout=WGMMA)
    start = (
        tuple(splat((ROWS, ROWS), 0.0, F32, WGMMA) for _ in range(chunks)),
        splat((ROWS,), START, F32, PER_ROW),
        splat((ROWS,), 0.0, F32, PER_ROW),
    )
    plgpu.barrier_wait(q_barrier)
    unit = problem.scale * LOG2E

    def step(item: jax.Array, rows: Any, state: Any, words: Words | None = None, bias: Any = None) -> Any:
        acc, top, norm = state
        slot = lax.rem(item, jnp.int32(stages))
        plgpu.barrier_wait(ring.k_barriers[slot])

        def scores(acc_ref: Any) -> jax.Array:
            for chunk in range(chunks):
                plgpu.wgmma(acc_ref, q[chunk], ring.k[chunk][0].at[slot].transpose((1, 0)))
            return acc_ref[...]

        s = pl.run_scoped(scores, plgpu.ACC((ROWS, ROWS), F32))
        refill(0, item + stages, rows)
        if words is not None:
            half = jnp.where(columns < 32, along_rows(words[0]), along_rows(words[1]))
            s = jnp.where(((half >> (columns & 31)) & 1) == 1, s, MASKED)
        peak = s.max(axis=1)
        new_top = jnp.maximum(top, peak if bias is None else peak + bias)
        shrink = jnp.exp2((top - new_top) * unit)
        shift = (0.0 - new_top if bias is None else bias - new_top) * unit
        p = jnp.exp2(s * unit + along_rows(shift))
        norm = norm * shrink + p.sum(axis=1)
        p = p.astype(dtype)
        if p_ref is not None:
            p_ref[...] = p
            plgpu.commit_smem()
        plgpu.barrier_wait(ring.v_barriers[slot])

        def values(*acc_refs: Any) -> tuple[jax.Array, ...]:
            for chunk, acc_ref in enumerate(acc_refs):
                plgpu.wgmma(acc_ref, p if p_ref is None else p_ref, ring.v[chunk][0].at[slot])
            return tuple(acc_ref[...] for acc_ref in acc_refs)

        gained = pl.run_scoped(values, *[plgpu.ACC((ROWS, ROWS), F32)] * chunks)
        refill(1, item + stages, rows)
        acc = tuple(a * along_rows(shrink) + new for a, new in zip(acc, gained, strict=True))
        return acc, new_top, norm

    def following(item: jax.Array) -> Any:
        return cached.rows(tile_of(item + stages + 1)), cached.bounds(tile_of(item + 1))

    def full_step(item: jax.Array, carry: Any) -> Any:
        state, rows, bounds = carry
        after = following(item)
        bias = None if cached.bias is None else cached.bias(bounds)
        return step(item, rows, state, bias=bias), *after

    def masked_step(item: jax.Array, carry: Any) -> Any:
        state, rows, bounds = carry
        after = following(item)
        of_cache = cached.words(tile_of(item), bounds)
        if stream.tree_tiles:
            tile = jnp.maximum(tile_of(item) - count, 0)
            of_tree = tree.words(tile, tree.bounds(tile))
            low, high = (jnp.where(item < ours, c, t) for c, t in zip(of_cache, of_tree, strict=True))
            of_cache = low, high
        return step(item, rows, state, words=of_cache), *after

    carry = lax.fori_loop(0, begin, full_step, (start, ahead[stages], bounds))
    (acc, top, norm), _, _ = lax.fori_loop(begin, total, masked_step, carry)
    return list(acc), top * unit, norm


def _nothing(*_: Any) -> tuple[()]:
    return ()


def _load_rows(ref: Any, *at: Any) -> jax.Array:
    """A vector over the rows of a tile, from global memory."""
    return plgpu.load(ref.at[at], layout=PER_ROW, optimized=False)


def _tile_rows(problem: Problem, base: Any = 0) -> Callable[[jax.Array], tuple[jax.Array, ...]]:
    """Rows of consecutive key tiles."""
    size = problem.block_size
    return lambda i: tuple((i + base) * ROWS + piece * size for piece in range(problem.pieces))


def _range_words(low: jax.Array, high: jax.Array) -> Words:
    """The columns from `low` up to before `high` of each row."""

    def below(bound: jax.Array, half: int) -> jax.Array:
        bound = jnp.clip(bound - 32 * half, 0, 32)
        return jnp.where(bound == 32, -1, (1 << (bound & 31)) - 1)

    words = [below(high, half) & ~below(low, half) for half in range(WORDS)]
    return words[0], words[1]


def _table_words(ref: Any, at: tuple[Any, ...]) -> Callable[[jax.Array, Any], Words]:
    """The words of a tree tile from a table of all words of each row."""
    return lambda tile, _: (_load_rows(ref, *at, tile * WORDS), _load_rows(ref, *at, tile * WORDS + 1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Global references of a call, in the order in which they are passed."""

    q: Any
    k: Any
    v: Any
    tree_k: Any
    tree_v: Any
    length: Any
    blocks: Any
    owners: Any
    path: Any
    block_columns: Any
    near_path: Any
    window_below: Any
    k_cmp: Any = None
    v_cmp: Any = None
    tree_k_cmp: Any = None
    tree_v_cmp: Any = None
    completed: Any = None


def _selected(problem: Problem, refs: Inputs, b: Any, k: Any, tile: Any, interpret: bool) -> Stream:
    """Key tiles of the selected branch of one selected tile."""
    rows, size, pieces = problem.rows, problem.block_size, problem.pieces
    first_node = tile * rows.per_tile
    group = lax.div(first_node, jnp.int32(rows.group))
    blocks, owners = refs.blocks.at[b, k, group], refs.owners.at[b, k, group]
    length = refs.length[b]
    border = lax.div(length, jnp.int32(size))
    row = plgpu.broadcasted_iota(I32, (ROWS,), 0, layout=PER_ROW)
    node = lax.div(row, jnp.int32(rows.heads)) + lax.rem(first_node, jnp.int32(rows.group))
    listed: list[jax.Array] = []

    def owned(bits: jax.Array) -> jax.Array:
        return ((bits >> node) & 1) == 1

    def entries(i: jax.Array) -> list[jax.Array]:
        return [jnp.minimum(i * pieces + piece, problem.union - 1) for piece in range(pieces)]

    def block_rows(i: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.maximum(blocks[at], 0) * size for at in entries(i))

    def bounds(i: jax.Array) -> tuple[jax.Array, ...]:
        found = []
        for piece, at in enumerate(entries(i)):
            bits = jnp.where(i * pieces + piece < problem.union, owners[at], 0)  # 0 in the padding of a list
            found += [bits, jnp.clip(length - blocks[at] * size, 0, size) + piece * size]
        return tuple(found)

    def cached_words(_: jax.Array, bounds: tuple[jax.Array, ...]) -> Words:
        found = []
        for piece in range(pieces):
            bits, end = bounds[2 * piece : 2 * piece + 2]
            found.append(_range_words(jnp.int32(piece * size), jnp.where(owned(bits), end, piece * size)))
        low, high = (functools.reduce(jnp.bitwise_or, halves) for halves in zip(*found, strict=True))
        return low, high

    def tree_words(i: jax.Array, _: Any) -> Words:
        """Tree keys on a node's path whose block it selected. Only the visit list's tail reaches the tree."""
        depth = refs.block_columns.shape[1]

        def more(carry: Any) -> jax.Array:
            at = carry[0]
            return (at >= 0) & (blocks[jnp.maximum(at, 0)] >= border)

        def add(carry: Any) -> Any:
            at, *reach = carry
            step = jnp.clip(blocks[at] - border, 0, depth - 1)
            ours = owned(owners[at])
            found = [refs.block_columns[b, step, i * WORDS + half] for half in range(WORDS)]
            return at - 1, *(had | jnp.where(ours, word, 0) for had, word in zip(reach, found, strict=True))

        path = _table_words(refs.path, (b, tile))(i, None)
        none = splat((ROWS,), 0, I32, PER_ROW)
        _, low, high = lax.while_loop(more, add, (listed[0] - 1, none, none))
        return path[0] & low, path[1] & high

    def counts() -> tuple[jax.Array, jax.Array]:
        count, full = list_counts(blocks, problem.union, border, interpret)
        listed.append(count)
        return lax.div(count + pieces - 1, jnp.int32(pieces)), full if pieces == 1 else jnp.int32(0)

    return Stream(
        cached=Part(
            k=refs.k.at[b, k],
            v=refs.v.at[b, k],
            rows=block_rows,
            bounds=bounds,
            words=cached_words,
            bias=lambda bounds: jnp.where(owned(bounds[0]), 0.0, MASKED),
        ),
        tree=_rows_part(problem, refs.tree_k.at[b, k], refs.tree_v.at[b, k], tree_words),
        counts=counts,
        tree_tiles=problem.tree_tiles,
    )


def _rows_part(problem: Problem, k: Any, v: Any, words: Any, base: Any = 0) -> Part:
    """Key tiles that follow each other."""
    return Part(k=k, v=v, rows=_tile_rows(problem, base), bounds=_nothing, words=words)


def _window(problem: Problem, refs: Inputs, b: Any, k: Any, tile: Any, interpret: bool) -> Stream:
    """Key tiles of the window branch of one dense tile."""
    length = refs.length[b]
    below = _load_rows(refs.window_below, b, tile)
    base = lax.div(jnp.maximum(length - problem.window + 1, 0), jnp.int32(ROWS))
    count = lax.div(length + ROWS - 1, jnp.int32(ROWS)) - base

    def cached_words(i: jax.Array, _: Any) -> Words:
        row = (i + base) * ROWS
        return _range_words(below - row + 1, length - row)

    return Stream(
        cached=_rows_part(problem, refs.k.at[b, k], refs.v.at[b, k], cached_words, base),
        tree=_rows_part(problem, refs.tree_k.at[b, k], refs.tree_v.at[b, k], _table_words(refs.near_path, (b, tile))),
        counts=lambda: (count, jnp.int32(0)),
        tree_tiles=problem.tree_tiles,
    )


def _compressed(problem: Problem, refs: Inputs, b: Any, k: Any, tile: Any, interpret: bool) -> Stream:
    """Key tiles of the compressed branch of one dense tile."""
    length = refs.length[b]
    entries = lax.div(length - problem.kernel_size, jnp.int32(problem.stride)) + 1
    entries = jnp.where(length < problem.kernel_size, 0, entries)
    fresh = -(-problem.slots // ROWS)

    def cached_words(i: jax.Array, _: Any) -> Words:
        end = jnp.full((ROWS,), 0, I32) + (entries - i * ROWS)
        return _range_words(jnp.int32(0), plgpu.layout_cast(end, PER_ROW))

    of_cache = _rows_part(problem, refs.k_cmp.at[b, k], refs.v_cmp.at[b, k], cached_words)
    of_tree = of_cache
    if fresh:
        words = _table_words(refs.completed, (b, tile))
        of_tree = _rows_part(problem, refs.tree_k_cmp.at[b, k], refs.tree_v_cmp.at[b, k], words)
    return Stream(
        cached=of_cache,
        tree=of_tree,
        counts=lambda: (lax.div(entries + ROWS - 1, jnp.int32(ROWS)), lax.div(entries, jnp.int32(ROWS))),
        tree_tiles=fresh,
    )


BRANCHES = (_selected, _window, _compressed)
