"""Key tiles through a ring in shared memory, from one warpgroup that copies to several that attend.

The attending warpgroups of a block hold a row tile each, and all read every key tile: one copy for up to 192 rows. A
block with a single row tile lets them take key tiles in turn instead, each with a running softmax of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax

from ..sparse_verify.mosaic_attend import (
    LOG2E,
    PER_ROW,
    START,
    WGMMA,
    Barriers,
    Ring,
    along_rows,
    load_rows,
    mask_columns,
    range_words,
    splat,
)
from ..sparse_verify.mosaic_problem import Cut
from ..sparse_verify.mosaic_rows import ROWS

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

I32, F32 = jnp.int32, jnp.float32
FIRST, WHOLE, TREE = range(3)  # columns of `Inputs.bounds`

State = tuple[tuple[jax.Array, ...], jax.Array, jax.Array]  # accumulators of 64 columns, maximum, sum


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Cut):
    """Static description of a call.

    Args:
      tree: X, nodes that have keys.
      window: keys in reach, or None for all.
      scale: multiplies q . k.
      tile: keys in a tile.
      stages: key tiles in the ring.
      warpgroups: that attend, and row tiles of a block.
      packed: whether the queries lie in the order of row tiles.
      alternate: whether the two attending warpgroups take turns at the tensor cores.
    """

    tree: int
    window: int | None
    scale: float
    tile: int
    stages: int
    warpgroups: int
    packed: bool
    alternate: bool

    @property
    def blocks(self) -> int:
        """Thread blocks per KV head and split."""
        return -(-self.rows.tiles // self.warpgroups)

    @property
    def left(self) -> int:
        """Row tiles of the last block."""
        return self.rows.tiles - (self.blocks - 1) * self.warpgroups

    @property
    def words(self) -> int:
        """Mask words of a key tile."""
        return self.tile // 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arrays of a call, or their global references, in the order in which they are passed.

    Args:
      q, k, v, tree_k, tree_v, length: as the op's; or q [B, K, R, D], 64 rows for each row tile.
      bounds: [B, blocks, 4], for each block of rows: first cached row in reach of any of them, first from which on
        all are in reach of all of them, and key tiles of the tree.
      words: [B, tiles, W, 64], tree columns that each row sees, 32 to a word.
      below: [B, tiles, 64], the last position out of each row's window; None without a window.
    """

    q: Any
    k: Any
    v: Any
    tree_k: Any
    tree_v: Any
    length: Any
    bounds: Any
    words: Any
    below: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What a thread block works on: sequence, KV head, block of rows, split of the keys."""

    b: Any
    k: Any
    block: Any
    split: Any


def _where(condition: Any, yes: Any, no: Any) -> Any:
    """A choice, made now if the condition is known."""
    if isinstance(condition, bool):
        return yes if condition else no
    return jnp.where(condition, yes, no)


class Roles:
    """Which row tile a warpgroup has, and which key tiles it takes.

    Args:
      problem: the call.
      block: block of rows.
      w: number of the warpgroup.

    Attributes:
      tile: row tile.
      active: whether there is one.
      share, stride: first item of the key stream that the warpgroup takes, and the distance to the next.
      extra: arrivals at the barriers of free slots beside the own one, which all blocks need equally many of.
    """

    def __init__(self, problem: Problem, block: Any, w: Any):
        full, left = problem.warpgroups, problem.left
        last = True if problem.blocks == 1 else block == problem.blocks - 1
        alone = last if left == 1 and full > 1 else False
        self.tile = block * full + _where(alone, 0, w)
        self.share, self.stride = _where(alone, w, 0), _where(alone, full, 1)
        self.active, self.extra = True, _where(alone, full - 1, 0)
        if 1 < left < full:
            first = w == 0
            self.active = w < left if last is True else ~last | (w < left)
            self.extra = jnp.where(first if last is True else last & first, full - left, 0)

    def count(self, items: jax.Array) -> jax.Array:
        """How many of the first items of the stream this warpgroup takes."""
        if isinstance(self.stride, int) and self.stride == 1:
            return items
        mine = jnp.maximum(items - self.share, 0)
        return lax.div(mine + self.stride - 1, jnp.int32(self.stride))


class Stream:
    """The key tiles of a split in the order in which they are taken: first those that no row has masked columns in.

    Attributes:
      count: items.
      whole: of them without masks.
    """

    def __init__(self, problem: Problem, refs: Inputs, job: Job):
        tile = jnp.int32(problem.tile)
        self.tile = tile
        self.length = refs.length[job.b]
        first, whole, tree = (refs.bounds[job.b, job.block, column] for column in (FIRST, WHOLE, TREE))
        self.base = lax.div(first, tile)
        self.cached = jnp.maximum(lax.div(self.length + tile - 1, tile) - self.base, 0)
        total = self.cached + tree
        splits = jnp.int32(problem.splits[0])
        self.start = lax.div(total * job.split, splits)
        stop = lax.div(total * (job.split + 1), splits)
        low = jnp.clip(lax.div(whole + tile - 1, tile) - self.base, 0, self.cached)
        high = jnp.clip(lax.div(self.length, tile) - self.base, low, self.cached)
        self.low = jnp.clip(low, self.start, stop)
        self.high = jnp.clip(high, self.low, stop)
        self.whole, self.count = self.high - self.low, stop - self.start

    def tile_of(self, item: jax.Array) -> jax.Array:
        """Number of an item's key tile: tiles of the cache, then those of the tree."""
        cut = item - self.whole
        before = self.low - self.start
        cut = jnp.where(cut < before, self.start + cut, self.high + cut - before)
        return jnp.where(item < self.whole, self.low + item, cut)


def produce(problem: Problem, ring: Ring, free: tuple[Barriers, Barriers], refs: Inputs, job: Job) -> None:
    """Copies the key tiles of a split, each into a slot that all have read."""
    stream = Stream(problem, refs, job)
    stages = jnp.int32(problem.stages)
    sources = [(x.at[job.b, job.k], y.at[job.b, job.k]) for x, y in ((refs.k, refs.v), (refs.tree_k, refs.tree_v))]

    def copy(item: jax.Array, carry: None) -> None:
        slot = lax.rem(item, stages)
        tile = stream.tile_of(item)
        of_tree = tile >= stream.cached
        row = jnp.where(of_tree, tile - stream.cached, tile + stream.base) * stream.tile
        for which in (0, 1):

            @pl.when(item >= stages)
            def _wait(which: int = which) -> None:
                plgpu.barrier_wait(free[which][slot])

            for wanted, pair in zip((~of_tree, of_tree), sources, strict=True):

                @pl.when(wanted)
                def _copy(pair: Any = pair, which: int = which) -> None:
                    ring.fetch(which, pair[which], slot, (row,))

    lax.fori_loop(0, stream.count, copy, None)

    def drain(item: jax.Array, carry: None) -> None:
        for which in (0, 1):
            plgpu.barrier_wait(free[which][lax.rem(item, stages)])

    lax.fori_loop(jnp.maximum(stream.count - stages, 0), stream.count, drain, None)


class Attender:
    """One warpgroup's running softmax over its key tiles.

    Args:
      problem, refs, job, roles: the call, and the warpgroup's part in it.
      ring: key tiles.
      free: barriers of the slots of keys and of values.
      q: the warpgroup's queries, by 64-column piece.
      turn: barrier at which two warpgroups meet, if they take turns.
      w: number of the warpgroup.
      staging: shared memory for probabilities, in the interpreter.
      dtype: of the probabilities.
    """

    def __init__(
        self,
        problem: Problem,
        refs: Inputs,
        job: Job,
        roles: Roles,
        *,
        ring: Ring,
        free: tuple[Barriers, Barriers],
        q: list[Any],
        turn: Any,
        w: Any,
        staging: Any,
        dtype: Any,
    ):
        self.problem, self.refs, self.job, self.roles = problem, refs, job, roles
        self.ring, self.free, self.q, self.turn, self.w = ring, free, q, turn, w
        self.staging, self.dtype = staging, dtype
        self.stream = Stream(problem, refs, job)
        self.unit = problem.scale * LOG2E

    def meet(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Waits for the other warpgroup, if they take turns."""
        if self.turn is not None:
            plgpu.barrier_arrive(self.turn)
        meanwhile()
        if self.turn is not None:
            plgpu.barrier_wait(self.turn)

    def release(self, which: int, slot: jax.Array) -> None:
        """Says that a slot has been read."""
        plgpu.barrier_arrive(self.free[which][slot])
        if not isinstance(self.roles.extra, int) or self.roles.extra:
            lax.fori_loop(0, self.roles.extra, lambda i, carry: plgpu.barrier_arrive(self.free[which][slot]), None)

    def scores(self, slot: jax.Array, *, meet: bool) -> jax.Array:
        """Products with the keys of a slot."""

        def product(acc_ref: Any) -> jax.Array:
            for q, keys in zip(self.q, self.ring.tiles[0], strict=True):
                plgpu.wgmma(acc_ref, q, keys[0].at[slot].transpose((1, 0)))
            if meet:
                self.meet()
            return acc_ref[...]

        return pl.run_scoped(product, plgpu.ACC((ROWS, self.problem.tile), F32))

    def masked(self, s: jax.Array, item: jax.Array) -> jax.Array:
        """Scores of a tile that has masked columns."""
        problem, stream = self.problem, self.stream
        tile = stream.tile_of(item)
        row = (tile + stream.base) * stream.tile
        high = plgpu.layout_cast(jnp.zeros((ROWS,), I32) + jnp.clip(stream.length - row, 0, problem.tile), PER_ROW)
        low = None
        if self.refs.below is not None:
            below = load_rows(self.refs.below, self.job.b, self.roles.tile)
            low = jnp.clip(below + 1 - row, 0, problem.tile)
        first = jnp.maximum(tile - stream.cached, 0) * problem.words
        words = [
            jnp.where(
                tile < stream.cached, word, load_rows(self.refs.words, self.job.b, self.roles.tile, first + index)
            )
            for index, word in enumerate(range_words(low, high, problem.words))
        ]
        return mask_columns(s, words)

    def weigh(self, acc: tuple[jax.Array, ...], p: jax.Array, slot: jax.Array) -> tuple[jax.Array, ...]:
        """Accumulators with the weighted values of a slot."""
        values = [tiled.at[slot] for tiled, *_ in self.ring.tiles[1]]
        if self.staging is None:

            def multiply(acc_refs: list[Any]) -> None:
                for acc_ref, part in zip(acc_refs, values, strict=True):
                    plgpu.wgmma(acc_ref, p, part)

            # In place: a second set of accumulators does not fit into the registers.
            return tuple(pl.run_state(multiply)([plgpu.ACC.init(old) for old in acc]))
        self.staging[...] = p
        plgpu.commit_smem()

        def multiply_from_zero(*acc_refs: Any) -> list[jax.Array]:
            for acc_ref, part in zip(acc_refs, values, strict=True):
                plgpu.wgmma(acc_ref, self.staging, part)
            return [acc_ref[...] for acc_ref in acc_refs]

        new = pl.run_scoped(multiply_from_zero, *[plgpu.ACC((ROWS, ROWS), F32)] * len(acc))
        return tuple(a + b for a, b in zip(acc, new, strict=True))

    def step(self, turn: jax.Array, state: State, *, cut: bool) -> State:
        """The warpgroup's next key tile."""
        acc, top, norm = state
        item = self.roles.share + turn * self.roles.stride
        slot = lax.rem(item, jnp.int32(self.problem.stages))
        plgpu.barrier_wait(self.ring.barriers[0][slot])
        s = self.scores(slot, meet=not cut)
        self.release(0, slot)
        if cut:
            s = self.masked(s, item)
        new_top = jnp.maximum(top, s.max(axis=1))
        shrink = jnp.exp2((top - new_top) * self.unit)
        p = jnp.exp2(s * self.unit - along_rows(new_top * self.unit, self.problem.tile))
        norm = norm * shrink + p.sum(axis=1)
        acc = tuple(old * along_rows(shrink) for old in acc)
        p = p.astype(self.dtype)
        if self.staging is None:
            # Everything is done before the other warpgroup's turn ends; and all operands must be in registers before
            # the first product, or the compiler runs the products one at a time.
            acc, new_top, norm, p = lax.optimization_barrier((acc, new_top, norm, p))

        def arrived() -> None:
            plgpu.barrier_wait(self.ring.barriers[1][slot])

        if cut:
            arrived()
        else:
            self.meet(arrived)
        acc = self.weigh(acc, p, slot)
        self.release(1, slot)
        return acc, new_top, norm

    def run(self) -> State:
        """Accumulators, maxima (of base-2 exponents) and sums over the warpgroup's key tiles."""
        state: State = (
            tuple(splat((ROWS, ROWS), 0.0, F32, WGMMA) for _ in range(self.problem.chunks)),
            splat((ROWS,), START, F32, PER_ROW),
            splat((ROWS,), 0.0, F32, PER_ROW),
        )
        whole, count = self.roles.count(self.stream.whole), self.roles.count(self.stream.count)
        if self.turn is not None:
            pl.when(self.w == 1)(self.meet)
        state = lax.fori_loop(0, whole, lambda turn, state: self.step(turn, state, cut=False), state)
        if self.turn is not None:
            pl.when(self.w == 0)(self.meet)
        acc, top, norm = lax.fori_loop(whole, count, lambda turn, state: self.step(turn, state, cut=True), state)
        return acc, top * self.unit, norm
