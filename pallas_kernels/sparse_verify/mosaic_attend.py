"""One Hopper kernel for all branches of sparse attention over a tree of queries.

Blocks of one warpgroup each take a row tile, a branch, and a share (a split) of the branch's keys; they stream the
keys through a ring in shared memory and leave (maximum, sum, accumulator) in global memory. The block that
arrives last at a row tile adds the splits in split order, applies the gates and writes the output, so the result
does not depend on who is last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

from .mosaic_rows import ROWS, WORDS, RowTiles

LOG2E = math.log2(math.e)
MASKED = -1e30  # score of a masked key; finite, so that no inf - inf arises
START = -1e20  # running maximum of a row without keys: exp2((MASKED - START) * scale) is 0
SELECTED, WINDOW, COMPRESSED = "selected", "window", "compressed"

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


def arrive(counter_ref: Any, flag_ref: Any) -> jax.Array:
    """Adds one to a global counter after the whole block's writes; all threads get the value before."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), I32, layout=plgpu.Layout.WG_SPLAT),
    )
    def add(ctx: Any, counter: Any, flag: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        zero = mgpu.utils.c(0, ir.IndexType.get())
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
            llvm.inline_asm(None, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True)
            before = llvm.inline_asm(
                i32,
                [mgpu.utils.memref_ptr(counter), mgpu.utils.c(1, i32)],
                "atom.add.relaxed.gpu.global.s32 $0, [$1], $2;",
                "=r,l,r,~{memory}",
                has_side_effects=True,
            )
            memref.store(before, flag, [zero])
        mgpu.utils.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(memref.load(flag, [zero]), (), is_signed=True)

    return add(counter_ref, flag_ref)


def acquire() -> None:
    """Makes the writes of blocks that arrived earlier visible to every thread of this one."""

    @plgpu.inline_mgpu()
    def fence(ctx: Any) -> None:
        llvm.inline_asm(None, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True)

    fence()


def store_rows(ref: Any, value: jax.Array, rows: int) -> None:
    """Stores the first rows of a tile, in steps of the 16 rows that a warp holds."""
    warps = -(-rows // 16)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx: Any, target: Any, array: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        warp = arith.remui(mgpu.utils.warp_idx(sync=False), mgpu.utils.c(4, i32))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, warp, mgpu.utils.c(warps, i32))):
            array.store_untiled(target, optimized=False)

    store(ref, value)


def reset(counter_ref: Any) -> None:
    """Leaves the counter at 0 for the next launch."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(ctx: Any, counter: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
            llvm.inline_asm(
                None,
                [mgpu.utils.memref_ptr(counter), mgpu.utils.c(0, i32)],
                "st.relaxed.gpu.global.s32 [$0], $1;",
                "l,r",
                has_side_effects=True,
            )

    store(counter_ref)


def sync() -> None:
    """Barrier of the block's one warpgroup."""

    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    barrier()


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


@dataclasses.dataclass(frozen=True)
class Part:
    """A run of key tiles: those of the cache, or those of the tree.

    Args:
      k, v: [rows, D] references.
      rows: scalars of a tile: the first row of each of its pieces.
      bounds: scalars of a tile that its mask needs. Both are read one step ahead, off the critical path.
      prepare: row vectors that the masks need, read while the first copies are under way.
      keep: mask of a tile from (tile, bounds, what `prepare` gave, columns).
      bias: for tiles without masked keys, what to add to the scores of each row from (bounds); None for nothing.
    """

    k: Any
    v: Any
    rows: Callable[[jax.Array], tuple[jax.Array, ...]]
    bounds: Callable[[jax.Array], tuple[jax.Array, ...]]
    prepare: Callable[[], Any]
    keep: Callable[[jax.Array, tuple[jax.Array, ...], Any, jax.Array], jax.Array]
    bias: Callable[[tuple[jax.Array, ...]], jax.Array] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stream:
    """The key tiles of a row tile in one branch: cached ones, then the tree's; split s takes s, s + splits, ...

    Args:
      cached, tree: the two runs.
      count: number of cached tiles.
      full: how many of them, from the first, have no masked keys (but perhaps masked rows).
      valid: whether a tile is a cached one, cheaper than `count`.
      tree_tiles: number of tree tiles.
    """

    cached: Part
    tree: Part
    count: Callable[[], jax.Array]
    full: Callable[[], jax.Array] | None
    valid: Callable[[jax.Array], jax.Array]
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

    def copy(which: int, part: Part, slot: jax.Array, rows: tuple[jax.Array, ...]) -> None:
        target, barriers = (ring.k, ring.k_barriers) if which == 0 else (ring.v, ring.v_barriers)
        ring.fetch((part.k, part.v)[which], target, barriers[slot], slot, rows)

    def first_copies(item: jax.Array, _: Any) -> Any:
        tile = tile_of(item)
        rows = cached.rows(tile)

        @pl.when(stream.valid(tile))
        def _() -> None:
            for which in (0, 1):
                copy(which, cached, item, rows)

        return _

    lax.fori_loop(0, stages, first_copies, None)
    count = stream.count()

    def share(tiles: Any) -> jax.Array:
        return lax.div(jnp.maximum(tiles - split, 0) + splits - 1, jnp.int32(splits))

    ours, total = share(count), share(count + stream.tree_tiles)

    def first_tree_copies(item: jax.Array, _: Any) -> Any:
        for which in (0, 1):
            copy(which, tree, item, tree.rows(tile_of(item) - count))
        return _

    lax.fori_loop(jnp.minimum(ours, stages), jnp.minimum(total, stages), first_tree_copies, None)

    def fetch(which: int, item: jax.Array, rows: tuple[jax.Array, ...] | None) -> None:
        """Refills the slot of item - stages, which all warps have read."""
        slot = lax.rem(item, jnp.int32(stages))
        if p_ref is None:
            sync()
        if rows is not None:

            @pl.when(item < ours)
            def _cached() -> None:
                copy(which, cached, slot, rows)

        @pl.when((item >= ours) & (item < total))
        def _tree() -> None:
            copy(which, tree, slot, tree.rows(tile_of(item) - count))

    columns = plgpu.broadcasted_iota(I32, (ROWS, ROWS), 1, layout=WGMMA)
    start = (
        tuple(splat((ROWS, ROWS), 0.0, F32, WGMMA) for _ in range(chunks)),
        splat((ROWS,), START, F32, PER_ROW),
        splat((ROWS,), 0.0, F32, PER_ROW),
    )
    ahead = cached.rows(tile_of(stages)), cached.bounds(tile_of(0))
    ready = cached.prepare(), tree.prepare()
    plgpu.barrier_wait(q_barrier)

    unit = problem.scale * LOG2E

    def step(item: jax.Array, rows: Any, state: Any, keep: Any = None, bias: Any = None) -> Any:
        acc, top, norm = state
        slot = lax.rem(item, jnp.int32(stages))
        plgpu.barrier_wait(ring.k_barriers[slot])

        def scores(acc_ref: Any) -> jax.Array:
            for chunk in range(chunks):
                plgpu.wgmma(acc_ref, q[chunk], ring.k[chunk][0].at[slot].transpose((1, 0)))
            return acc_ref[...]

        s = pl.run_scoped(scores, plgpu.ACC((ROWS, ROWS), F32))
        fetch(0, item + stages, rows)
        if keep is not None:
            s = jnp.where(keep(columns), s, MASKED)
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
        fetch(1, item + stages, rows)
        acc = tuple(a * along_rows(shrink) + new for a, new in zip(acc, gained, strict=True))
        return acc, new_top, norm

    def following(item: jax.Array) -> Any:
        return cached.rows(tile_of(item + stages + 1)), cached.bounds(tile_of(item + 1))

    def full_step(item: jax.Array, carry: Any) -> Any:
        state, rows, bounds = carry
        after = following(item)
        bias = None if cached.bias is None else cached.bias(bounds)
        return step(item, rows, state, bias=bias), *after

    def cached_step(item: jax.Array, carry: Any) -> Any:
        state, rows, bounds = carry
        after = following(item)
        return step(item, rows, state, keep=lambda c: cached.keep(tile_of(item), bounds, ready[0], c)), *after

    def tree_step(item: jax.Array, state: Any) -> Any:
        tile = tile_of(item) - count
        return step(item, None, state, keep=lambda c: tree.keep(tile, tree.bounds(tile), ready[1], c))

    carry: Any = (start, *ahead)
    begin: Any = 0
    if stream.full is not None:
        begin = jnp.minimum(share(stream.full()), ours)
        carry = lax.fori_loop(0, begin, full_step, carry)
    state, _, _ = lax.fori_loop(begin, ours, cached_step, carry)
    acc, top, norm = lax.fori_loop(ours, total, tree_step, state)
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


def _keep_words(tile: jax.Array, _: Any, words: list[jax.Array], columns: jax.Array) -> jax.Array:
    """Mask of a tree tile from the words of its rows."""
    return _bits(_pick(words, tile, 0), _pick(words, tile, 1), columns)


def _bits(low: jax.Array, high: jax.Array, columns: jax.Array) -> jax.Array:
    """Mask of a key tile from the two words of each row."""
    words = jnp.where(columns < 32, along_rows(low), along_rows(high))
    return ((words >> (columns & 31)) & 1) == 1


def _pick(words: list[jax.Array], tile: jax.Array, half: int) -> jax.Array:
    word = words[half]
    for other in range(1, len(words) // WORDS):
        word = jnp.where(tile == other, words[other * WORDS + half], word)
    return word


def _count(blocks: Any, union: int, border: jax.Array | None = None) -> jax.Array:
    """Entries of a visit list before the padding, or before `border`; a probe per cache line, then bisection."""

    def counted(at: Any) -> jax.Array:
        block = blocks[at]
        return block >= 0 if border is None else (block >= 0) & (block < border)

    low = jnp.int32(-1)
    for line in range(0, union, 32):
        low = jnp.where(counted(line), jnp.int32(line), low)
    high = jnp.where(low < 0, 0, jnp.minimum(low + 32, union))
    for _ in range(5):  # blocks[low] counts, blocks[high] does not
        middle = lax.div(low + high, jnp.int32(2))
        open_ = high - low > 1
        probe = open_ & counted(jnp.clip(middle, 0, union - 1))
        high = jnp.where(open_ & ~probe, middle, high)
        low = jnp.where(probe, middle, low)
    return high


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


def _selected(problem: Problem, refs: Inputs, b: Any, k: Any, tile: Any) -> Stream:
    """Key tiles of the selected branch of one selected tile."""
    rows, size, pieces = problem.rows, problem.block_size, problem.pieces
    first_node = tile * rows.per_tile
    group = lax.div(first_node, jnp.int32(rows.group))
    blocks, owners = refs.blocks.at[b, k, group], refs.owners.at[b, k, group]
    length = refs.length[b]
    row = plgpu.broadcasted_iota(I32, (ROWS,), 0, layout=PER_ROW)
    node = lax.div(row, jnp.int32(rows.heads)) + lax.rem(first_node, jnp.int32(rows.group))

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

    def keep_cached(i: jax.Array, bounds: tuple[jax.Array, ...], _: Any, columns: jax.Array) -> jax.Array:
        keep = None
        for piece in range(pieces):
            bits, readable = bounds[2 * piece : 2 * piece + 2]
            end = jnp.where(((bits >> node) & 1) == 1, readable, 0)
            mask = columns < along_rows(end)
            if piece:
                mask = mask & (columns >= piece * size)
            keep = mask if keep is None else keep | mask
        return keep

    def bias(bounds: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.where(((bounds[0] >> node) & 1) == 1, 0.0, MASKED)

    def prepare_tree() -> list[jax.Array]:
        """Tree keys on a node's path whose block it selected. Only the visit list's tail reaches the tree."""
        count_words = problem.tree_tiles * WORDS
        words = [_load_rows(refs.path, b, tile, word) for word in range(count_words)]
        border = lax.div(length, jnp.int32(size))
        depth = refs.block_columns.shape[1]

        def more(carry: Any) -> jax.Array:
            at = carry[0]
            return (at >= 0) & (blocks[jnp.maximum(at, 0)] >= border)

        def add(carry: Any) -> Any:
            at, reach = carry
            step = jnp.clip(blocks[at] - border, 0, depth - 1)
            owned = ((owners[at] >> node) & 1) == 1
            columns = [refs.block_columns[b, step, word] for word in range(count_words)]
            return at - 1, tuple(had | jnp.where(owned, word, 0) for had, word in zip(reach, columns, strict=True))

        none = tuple(splat((ROWS,), 0, I32, PER_ROW) for _ in words)
        _, reach = lax.while_loop(more, add, (_count(blocks, problem.union) - 1, none))
        return [word & allowed for word, allowed in zip(words, reach, strict=True)]

    return Stream(
        cached=Part(refs.k.at[b, k], refs.v.at[b, k], block_rows, bounds, _nothing, keep_cached, bias),
        tree=Part(
            refs.tree_k.at[b, k],
            refs.tree_v.at[b, k],
            _tile_rows(problem),
            _nothing,
            prepare_tree,
            _keep_words,
        ),
        count=lambda: lax.div(_count(blocks, problem.union) + pieces - 1, jnp.int32(pieces)),
        full=(lambda: _count(blocks, problem.union, lax.div(length, jnp.int32(size)))) if pieces == 1 else None,
        valid=lambda i: (i * pieces < problem.union) & (blocks[entries(i)[0]] >= 0),
        tree_tiles=problem.tree_tiles,
    )


def _window(problem: Problem, refs: Inputs, b: Any, k: Any, tile: Any) -> Stream:
    """Key tiles of the window branch of one dense tile."""
    length = refs.length[b]
    base = lax.div(jnp.maximum(length - problem.window + 1, 0), jnp.int32(ROWS))
    cached = lax.div(length + ROWS - 1, jnp.int32(ROWS)) - base

    def keep_cached(i: jax.Array, _: Any, below: jax.Array, columns: jax.Array) -> jax.Array:
        row = (i + base) * ROWS
        return (columns < length - row) & (columns > along_rows(below - row))

    def prepare_tree() -> list[jax.Array]:
        return [_load_rows(refs.near_path, b, tile, word) for word in range(problem.tree_tiles * WORDS)]

    def prepare_cached() -> jax.Array:
        return _load_rows(refs.window_below, b, tile)

    return Stream(
        cached=Part(refs.k.at[b, k], refs.v.at[b, k], _tile_rows(problem, base), _nothing, prepare_cached, keep_cached),
        tree=Part(
            refs.tree_k.at[b, k],
            refs.tree_v.at[b, k],
            _tile_rows(problem),
            _nothing,
            prepare_tree,
            _keep_words,
        ),
        count=lambda: cached,
        full=None,
        valid=lambda i: i < cached,
        tree_tiles=problem.tree_tiles,
    )


def _compressed(problem: Problem, refs: Inputs, b: Any, k: Any, tile: Any) -> Stream:
    """Key tiles of the compressed branch of one dense tile."""
    length = refs.length[b]
    entries = lax.div(length - problem.kernel_size, jnp.int32(problem.stride)) + 1
    entries = jnp.where(length < problem.kernel_size, 0, entries)
    cached = lax.div(entries + ROWS - 1, jnp.int32(ROWS))
    fresh = -(-problem.slots // ROWS)

    def prepare_tree() -> list[jax.Array]:
        return [_load_rows(refs.completed, b, tile, word) for word in range(fresh * WORDS)]

    def keep_cached(i: jax.Array, *args: Any) -> jax.Array:
        return args[-1] < entries - i * ROWS

    of_cache = Part(refs.k_cmp.at[b, k], refs.v_cmp.at[b, k], _tile_rows(problem), _nothing, _nothing, keep_cached)
    of_tree = of_cache
    if fresh:
        of_tree = Part(
            refs.tree_k_cmp.at[b, k],
            refs.tree_v_cmp.at[b, k],
            _tile_rows(problem),
            _nothing,
            prepare_tree,
            _keep_words,
        )
    return Stream(
        cached=of_cache,
        tree=of_tree,
        count=lambda: cached,
        full=lambda: lax.div(entries, jnp.int32(ROWS)),
        valid=lambda i: i < cached,
        tree_tiles=fresh,
    )


BRANCHES = (_selected, _window, _compressed)
