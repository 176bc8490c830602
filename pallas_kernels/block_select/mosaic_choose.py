"""Combination of the attention kernel's splits, top-n selection and merged schedules, on Hopper.

A thread block serves four consecutive nodes of one KV head, a warp for each. A row of block scores lives in the
registers of one warp, so every round of the selection is two integer maxima over the warp (`redux`): scores are not
negative, so their bits order as integers. Other thread blocks of the same launch add up the splits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .mosaic_attend import TREE_TILE, Partials, put

QUAD = 4  # nodes of a thread block: one per warp
EMPTY = 1 << 30
EARLY_REGISTERS = 128  # masses that a thread loads ahead: half of the registers that it can have
_HIDDEN = 1e30  # log-sum-exp of a row that sees nothing: exp2(x - _HIDDEN) = 0
_Lay = plgpu.Layout.TILED
_Times = plgpu.Replicated


def cube(lanes: int, vector: int = 1) -> Any:
    """[n, 4, m] registers: the middle axis on warps, the last on `lanes` lanes (the rest of a warp repeats)."""
    lane_dims = (-2,) if lanes == 32 else (_Times(32 // lanes), -2)
    tiling = plgpu.Tiling(((1, QUAD, lanes * vector), (vector,)))
    return _Lay(tiling, warp_dims=(-3,), lane_dims=lane_dims, vector_dim=-1)


def square(lanes: int) -> Any:
    """[4 n, m] registers: rows on warps, columns on lanes."""
    lane_dims = (-2,) if lanes == 32 else (_Times(32 // lanes), -2)
    return _Lay(plgpu.Tiling(((QUAD, lanes), (1,))), warp_dims=(-3,), lane_dims=lane_dims, vector_dim=-1)


def tall() -> Any:
    """[32 n, 4] registers: rows on lanes, columns on warps."""
    return _Lay(plgpu.Tiling(((32, QUAD), (1,))), warp_dims=(-2,), lane_dims=(-3,), vector_dim=-1)


def _pairs(size: int) -> tuple[int, Any]:
    """Lanes that hold two neighbours each of `size` numbers, and how they are laid out over a warp.

    Two, because a load or store of single words in shared memory becomes `ldmatrix` or `stmatrix`.
    """
    lanes = next((n for n in (32, 16, 8, 4, 2, 1) if size % (2 * n) == 0), 0)
    return lanes, (-2,) if lanes == 32 else (_Times(32 // max(lanes, 1)), -2)


def pairs(size: int) -> Any:
    """[4 n, size] registers: rows on warps, pairs of columns on lanes."""
    lanes, lane_dims = _pairs(size)
    return _Lay(plgpu.Tiling(((QUAD, 2 * lanes), (2,))), warp_dims=(-3,), lane_dims=lane_dims, vector_dim=-1)


def line(size: int) -> Any:
    """[size] registers, the same in every warp."""
    lanes, lane_dims = _pairs(size)
    if lanes < 2:
        return _Lay(plgpu.Tiling(((1,),)), warp_dims=(_Times(4),), lane_dims=(_Times(32),), vector_dim=-1)
    return _Lay(plgpu.Tiling(((2 * lanes,), (2,))), warp_dims=(_Times(4),), lane_dims=lane_dims, vector_dim=-1)


def spread(x: Array, shape: tuple[int, ...], dims: tuple[int, ...], layout: Any) -> Array:
    """`broadcast_in_dim` into a layout."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, dims), layout)


def full(shape: tuple[int, ...], value: float | int, dtype: Any, layout: Any) -> Array:
    """A constant in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def lists_width(slots: int) -> int:
    """Slots of a list of selected blocks in shared memory."""
    return 16 if slots <= 16 else -(-slots // 32) * 32


def merge_lists(list_s: Any, scratch: Any, width: int, length: int, interpret: Any) -> None:
    """Union of the lists in `list_s[0:length]`, each `width` long and -1 padded, by comparing all pairs.

    Leaves the distinct blocks, ascending, in `scratch[3]`, and who listed them, as bits, in `scratch[4]`.
    """
    i32 = jnp.int32
    layout = pairs(length)
    by_row, by_column = layout.reduce(1), layout.reduce(0)
    rows = min(length, 4096 // length)
    first_s, owner_s, rank_s, block_s, bits_s = (scratch.at[i] for i in range(5))

    def at_columns(ref: Any) -> Array:
        x = plgpu.load(ref.at[pl.ds(0, length)], layout=by_column, optimized=False)
        return spread(x, (rows, length), (1,), layout)

    def at_rows(start: int) -> Array:
        x = plgpu.load(list_s.at[pl.ds(start, rows)], layout=by_row, optimized=False)
        return spread(x, (rows, length), (0,), layout)

    column = plgpu.broadcasted_iota(i32, (rows, length), 1, layout=layout)
    row = plgpu.broadcasted_iota(i32, (rows, length), 0, layout=layout)
    values = at_columns(list_s)
    bits = lax.shift_left(full((rows, length), 1, i32, layout), lax.div(column, i32(width)))
    for start in range(0, length, rows):
        same = (at_rows(start) == values) & (values >= 0)
        earlier = jnp.where(same & (column < row + start), 1, 0)
        put(first_s.at[pl.ds(start, rows)], jnp.sum(earlier, axis=1), interpret)
        put(owner_s.at[pl.ds(start, rows)], jnp.sum(jnp.where(same, bits, 0), axis=1), interpret)
    first = (at_columns(first_s) == 0) & (values >= 0)
    for start in range(0, length, rows):
        below = jnp.where(first & (values < at_rows(start)), 1, 0)
        put(rank_s.at[pl.ds(start, rows)], jnp.sum(below, axis=1), interpret)
    rank = jnp.where(first, at_columns(rank_s), -1)
    owners = at_columns(owner_s)
    for start in range(0, length, rows):
        here = rank == row + start
        put(block_s.at[pl.ds(start, rows)], jnp.sum(jnp.where(here, values + 1, 0), axis=1) - 1, interpret)
        put(bits_s.at[pl.ds(start, rows)], jnp.sum(jnp.where(here, owners, 0), axis=1), interpret)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelectPlan:
    """Static choices of the selection.

    Args:
      slots: blocks per node.
      blocks: blocks in the cache.
      init, local: forced blocks.
      ratio: entries per block.
      steps: tiles of entries.
      per_tile: blocks per tile of entries.
      spills: whether an entry can overlap two blocks.
      group: nodes that share a schedule; 0 leaves the merging to `merge`.
    """

    slots: int
    blocks: int
    init: int
    local: int
    ratio: int
    steps: int
    per_tile: int
    spills: bool
    group: int

    @property
    def rounds(self) -> int:
        """Blocks to choose beside the forced ones."""
        return max(self.slots - self.init - self.local, 0)


def finish(
    partials: Partials,
    counts: Int[Array, "B 4"],
    own: Int[Array, "B T4"],
    weights: Float[Array, "B E M"] | None,
    *,
    shape: tuple[int, int, int, int, int],
    per_tile_nodes: int,
    plan: SelectPlan | None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """Adds up the splits, and selects blocks if there is a plan for it.

    Args:
      partials: of the attention kernel.
      counts: committed entries, completed entries, and first block that a completed entry can touch.
      own: each node's own block, padded to whole quads.
      weights: how often each completed entry counts in each block from `counts[2]` on.
      shape: B, T, K, G, D.
      per_tile_nodes: nodes in a tile of query rows; its rows are head-major.
      plan: of the selection, or None.
      interpret: parameters of the interpreter, or None.

    Returns:
      The output [B, T, K, G, D]; with a plan also the blocks [B * K, T, S]; with a group also the merged blocks and
      owners, [B * K, P, U].
    """
    batch, nodes, heads, group_heads, dim = shape
    quads = -(-nodes // QUAD)
    static: Any = plan  # read only where there is a plan
    selects = plan is not None
    merges = selects and bool(static.group)
    mass: Any = partials.mass
    jobs = 1 if plan is None else 2
    f32, i32 = jnp.float32, jnp.int32
    vector = min(4, dim // 32)
    rows3 = cube(32, vector)

    def log_sum_exp(stats_ref: Any, at: Any, layout: Any) -> tuple[Array, Array, Array]:
        """Maximum [4] and sum [4] over splits, and the splits' maxima [splits, 4]."""
        tops = plgpu.load(stats_ref.at[:, 0, at], layout=layout.reduce(2), optimized=False)
        sums = plgpu.load(stats_ref.at[:, 1, at], layout=layout.reduce(2), optimized=False)
        top = jnp.max(tops, axis=0)
        weight = jnp.exp2(tops - spread(top, tops.shape, (1,), layout.reduce(2)))
        return top, jnp.sum(weight * sums, axis=0), tops

    def body(*refs: Any) -> None:
        left = iter(refs)

        def take(present: bool = True) -> Any:
            return next(left) if present else None

        out_p, stats_ref, counts_ref = (take() for _ in range(3))
        mass_ref, top_ref, tree_ref, own_ref, weights_ref = (take(selects) for _ in range(5))
        out_ref, selected_ref = take(), take(selects)
        merged_ref, owners_ref = take(merges), take(merges)
        out_s = take()
        flat_s, words_s, floats_s, factor_s, over_s, item_s, rank_s = (take(selects) for _ in range(7))
        work_s = take(merges)
        quad, x = lax.axis_index("q"), lax.axis_index("x")
        b, head = lax.div(x, i32(heads)), lax.rem(x, i32(heads))
        t0 = quad * QUAD
        tile = lax.div(t0, i32(per_tile_nodes))
        inside = lax.rem(t0, i32(per_tile_nodes))

        def rows(h: int) -> Any:
            return pl.ds(pl.multiple_of(inside + h * per_tile_nodes, QUAD), QUAD)

        def combine() -> None:
            layout = rows3
            found = [log_sum_exp(stats_ref.at[x, tile], rows(h), layout) for h in range(group_heads)]
            results = []
            for h, (top, total, tops) in enumerate(found):  # no store before the last load: it would be a barrier
                scale = jnp.where(total > 0.0, 1.0 / jnp.maximum(total, 1e-30), 0.0)
                weight = jnp.exp2(tops - spread(top, tops.shape, (1,), layout.reduce(2)))
                weight = weight * spread(scale, tops.shape, (1,), layout.reduce(2))
                parts = plgpu.load(out_p.at[x, tile, :, rows(h)], layout=layout, optimized=False)
                results.append(jnp.sum(parts * spread(weight, parts.shape, (0, 1), layout), axis=0))
            for h, result in enumerate(results):
                put(out_s.at[:, h], result, interpret)
            plgpu.commit_smem()
            for i in range(QUAD):

                @pl.when(t0 + i < nodes)
                def _(i: int = i) -> None:
                    plgpu.copy_smem_to_gmem(out_s.at[i], out_ref.at[b, t0 + i, head])

            plgpu.wait_smem_to_gmem(0)

        if plan is None:
            combine()
            return

        def recast(x: Array, layout: Any) -> Array:
            """Moves one number per node to a layout with other lanes."""
            if static.per_tile >= 32:
                return plgpu.layout_cast(x, layout)
            word_s = words_s if x.dtype == i32 else floats_s
            put(word_s, x, interpret)
            return plgpu.load(word_s, layout=layout, optimized=False)

        def select() -> None:
            steps, depth = static.steps, mass_ref.shape[2]
            shape3 = (steps, QUAD, static.per_tile)
            layout = cube(min(32, static.per_tile))
            by_tile, by_node = layout.reduce(2), layout.reduce(0).reduce(1)
            down = tall()  # tiles on lanes
            tile_of = plgpu.broadcasted_iota(i32, shape3, 0, layout=layout)
            lane = plgpu.broadcasted_iota(i32, shape3, 2, layout=layout)
            size = static.per_tile * static.ratio
            visited = lax.div(counts_ref[b, 0] + (size - 1), i32(size))
            chunks = lax.div(counts_ref[b, 1] + (TREE_TILE - 1), i32(TREE_TILE))
            base = counts_ref[b, 2]
            extra = weights_ref.shape[1]
            gains = [full((QUAD,), 0.0, f32, by_node)] * extra

            # Loads of all heads come before the first store to shared memory, which is a barrier that they cannot pass.
            columns = pl.ds(0, static.per_tile)

            def load_mass(h: int) -> Array:
                part = mass_ref.at[x, tile, pl.ds(1, steps), rows(h), columns]
                return plgpu.load(part, layout=layout, optimized=False)

            early = group_heads * steps * -(-static.per_tile // 32) <= EARLY_REGISTERS
            masses = [load_mass(h) for h in range(group_heads)] if early else []
            tops = [
                plgpu.load(top_ref.at[x, tile, pl.ds(0, depth), rows(h)], layout=down, optimized=False)
                for h in range(group_heads)
            ]
            rests = [
                plgpu.load(mass_ref.at[x, tile, :, rows(h), static.per_tile], layout=down, optimized=False)
                for h in range(group_heads if static.spills else 0)
            ]

            # Factors from running maxima to probabilities, and the masses that spill over a tile's end.
            factors, lses, over = [], [], full((depth, QUAD), 0.0, f32, down)
            for h in range(group_heads):
                top, total = log_sum_exp(stats_ref.at[x, tile], rows(h), layout)[:2]
                lse = jnp.where(total > 0.0, top + jnp.log2(jnp.maximum(total, 1e-30)), _HIDDEN)
                lses.append(lse)
                lse_down = lse if static.per_tile >= 32 else recast(lse, down.reduce(0))
                factors.append(jnp.exp2(tops[h] - spread(lse_down, (depth, QUAD), (1,), down)))
            for rest, factor in zip(rests, factors, strict=False):
                over = over + rest * factor

            def chunk(i: Array, gains: list[Array]) -> list[Array]:
                flat = square(32)
                columns = pl.ds(pl.multiple_of(i * TREE_TILE, TREE_TILE), TREE_TILE)
                for h, lse in enumerate(lses):
                    p = plgpu.load(tree_ref.at[x, tile, rows(h), columns], layout=flat, optimized=False)
                    top = plgpu.load(top_ref.at[x, tile, depth + i, rows(h)], layout=by_node, optimized=False)
                    scale = jnp.exp2(top - lse)
                    new = []
                    for e, gain in enumerate(gains):
                        share = plgpu.load(weights_ref.at[b, e, columns], layout=flat.reduce(0), optimized=False)
                        share = spread(share, (QUAD, TREE_TILE), (1,), flat)
                        total = jnp.sum(jnp.where(share > 0.0, p * share, 0.0), axis=1)
                        new.append(gain + recast(total, by_node) * scale)
                    gains = new
                return gains

            gains = lax.fori_loop(0, chunks, chunk, gains)
            for h, factor in enumerate(factors):
                put(factor_s.at[h], factor, interpret)
            if static.spills:
                put(over_s, over, interpret)

            # Garbage beyond the visited tiles is dropped at the end: it stays in its own elements.
            score = full(shape3, 0.0, f32, layout)
            for h in range(group_heads):
                mass = masses[h] if early else load_mass(h)
                factor = plgpu.load(factor_s.at[h, pl.ds(1, steps)], layout=by_tile, optimized=False)
                score = score + mass * spread(factor, shape3, (0, 1), layout)
            score = jnp.where(tile_of < visited, score, 0.0)
            if static.spills:
                spilt = spread(
                    plgpu.load(over_s.at[pl.ds(0, steps)], layout=by_tile, optimized=False), shape3, (0, 1), layout
                )
                score = score + jnp.where((lane == 0) & (tile_of > 0) & (tile_of <= visited), spilt, 0.0)
            block = tile_of * static.per_tile + lane
            for e, gain in enumerate(gains):
                score = score + jnp.where(block == base + e, spread(gain, shape3, (1,), layout), 0.0)

            mine = plgpu.load(own_ref.at[b, pl.ds(t0, QUAD)], layout=by_node, optimized=False)
            mine3 = spread(mine, shape3, (1,), layout)
            free = (block <= mine3 - static.local) & (block >= static.init)
            key = jnp.where(free, lax.bitcast_convert_type(score, i32), -1)
            reverse = EMPTY - block
            rounds = static.rounds

            def choose(r: Array, key: Array) -> Array:
                best = jnp.max(jnp.max(key, axis=0), axis=1)
                found = jnp.where(key == spread(best, shape3, (1,), layout), reverse, -1)
                index = EMPTY - jnp.max(jnp.max(found, axis=0), axis=1)
                index = jnp.where(best >= 0, index, EMPTY)
                put(item_s.at[static.init + r], index, interpret)
                # The kept value first: a constant there would make the lowering take the whole for unsigned.
                return jnp.where(block != spread(index, shape3, (1,), layout), key, -1)

            lax.fori_loop(0, rounds, choose, key)  # a loop, not unrolled: fetching instructions takes time too

            # Every chosen block's place in the ascending list.
            zero = full((QUAD,), 0, i32, by_node)
            count = jnp.minimum(mine + 1, static.init)
            for i in range(static.init):
                put(item_s.at[i], jnp.where(mine >= i, zero + i, EMPTY), interpret)
                put(rank_s.at[i], zero + i, interpret)
            taken = count
            if rounds:
                some = pl.ds(static.init, rounds)
                items = plgpu.load(item_s.at[some], layout=by_tile, optimized=False)
                ranks = spread(count, (rounds, QUAD), (1,), by_tile)
                for i in range(rounds):
                    other = plgpu.load(item_s.at[static.init + i], layout=by_node, optimized=False)
                    ranks = ranks + jnp.where(spread(other, (rounds, QUAD), (1,), by_tile) < items, 1, 0)
                put(rank_s.at[some], ranks, interpret)
                taken = taken + jnp.sum(jnp.where(items < EMPTY, 1, 0), axis=0)
            for i in range(static.local):
                index = mine - (static.local - 1 - i)
                valid = index >= static.init
                put(item_s.at[static.init + rounds + i], jnp.where(valid, index, EMPTY), interpret)
                put(rank_s.at[static.init + rounds + i], taken, interpret)
                taken = taken + jnp.where(valid, 1, 0)

            width = lists_width(static.slots)
            wide, flat = (QUAD, width), pairs(width)
            slot = plgpu.broadcasted_iota(i32, wide, 1, layout=flat)
            lists = full(wide, -1, i32, flat)
            node = t0 + plgpu.broadcasted_iota(i32, wide, 0, layout=flat)
            for i in range(static.init + rounds + static.local):
                index, rank = (
                    spread(plgpu.load(ref.at[i], layout=flat.reduce(1), optimized=False), wide, (0,), flat)
                    for ref in (item_s, rank_s)
                )
                lists = jnp.where((slot == rank) & (index < EMPTY) & (node < nodes), index, lists)
            if interpret is None:
                put(flat_s.reshape(QUAD, width), lists, interpret)
            else:  # the interpreter cannot reshape references
                for i in range(QUAD):
                    flat_s[pl.ds(i * width, width)] = lists[i]
            for i in range(QUAD):

                @pl.when(t0 + i < nodes)
                def _(i: int = i) -> None:
                    slots = pl.ds(i * width, static.slots)
                    picked = plgpu.load(flat_s.at[slots], layout=line(static.slots), optimized=False)
                    put(selected_ref.at[x, t0 + i], picked, interpret)

            if static.group:
                publish(width)

        def publish(width: int) -> None:
            """Merges the lists of each group of this thread block."""
            length = static.group * width
            used = min(static.group * static.slots, static.blocks)
            for part in range(QUAD // static.group):

                @pl.when(t0 + part * static.group < nodes)
                def _(part: int = part) -> None:
                    merge_lists(flat_s.at[pl.ds(part * length, length)], work_s, width, length, interpret)
                    index = quad * (QUAD // static.group) + part
                    for ref, source in ((merged_ref, 3), (owners_ref, 4)):
                        found = plgpu.load(work_s.at[source, pl.ds(0, used)], layout=line(used), optimized=False)
                        put(ref.at[x, index], found, interpret)

        @pl.when(lax.axis_index("j") == 0)
        def _() -> None:
            select()

        @pl.when(lax.axis_index("j") == 1)
        def _() -> None:
            combine()

    body.__name__ = "nsa_combine" if plan is None else "nsa_select"
    shapes = [jax.ShapeDtypeStruct((batch, nodes, heads, group_heads, dim), f32)]
    operands: list[Any] = [partials.out, partials.stats, counts]
    scratch: list[Any] = [plgpu.SMEM((QUAD, group_heads, dim), f32)]
    if plan is not None:
        operands += [partials.mass, partials.top, partials.tree, own, weights]
        shapes.append(jax.ShapeDtypeStruct((batch * heads, nodes, static.slots), i32))
        width = lists_width(static.slots)
        scratch.append(plgpu.SMEM((QUAD * width,), i32))
        scratch += [plgpu.SMEM((QUAD,), i32), plgpu.SMEM((QUAD,), f32)]
        depth = mass.shape[2]
        scratch += [plgpu.SMEM((group_heads, depth, QUAD), f32), plgpu.SMEM((depth, QUAD), f32)]
        scratch += [plgpu.SMEM((static.init + static.rounds + static.local, QUAD), i32)] * 2
        if static.group:
            merged = (batch * heads, -(-nodes // static.group), min(static.group * static.slots, static.blocks))
            shapes += [jax.ShapeDtypeStruct(merged, i32)] * 2
            scratch.append(plgpu.SMEM((5, static.group * width), i32))
    return tuple(
        plgpu.kernel(
            body,
            out_type=shapes,
            scratch_types=scratch,
            grid=(quads, batch * heads, jobs),
            grid_names=("q", "x", "j"),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=interpret,
        )(*operands)
    )


def merge(
    selected: Int[Array, "X T S"], *, group: int, blocks: int, interpret: Any = None
) -> tuple[Int[Array, "X P U"], Int[Array, "X P U"]]:
    """Merged blocks and owners of groups of `group` nodes, one thread block each; for groups above `QUAD`."""
    batch_heads, nodes, slots = selected.shape
    parts = -(-nodes // group)
    width = lists_width(slots)
    length = group * width
    length += -length % 64
    used = min(group * slots, blocks)
    padding = ((0, 0), (0, parts * group - nodes), (0, width - slots))
    lists = jnp.pad(selected, padding, constant_values=-1).reshape(batch_heads, parts, group * width)
    lists = jnp.pad(lists, ((0, 0), (0, 0), (0, length - group * width)), constant_values=-1)

    def body(list_ref: Any, merged_ref: Any, owners_ref: Any, list_s: Any, work_s: Any) -> None:
        part, x = lax.axis_index("p"), lax.axis_index("x")
        lists = plgpu.load(list_ref.at[x, part], layout=line(length), optimized=False)
        put(list_s, lists, interpret)
        merge_lists(list_s, work_s, width, length, interpret)
        for ref, source in ((merged_ref, 3), (owners_ref, 4)):
            found = plgpu.load(work_s.at[source, pl.ds(0, used)], layout=line(used), optimized=False)
            put(ref.at[x, part], found, interpret)

    body.__name__ = "nsa_merge"
    merged = jax.ShapeDtypeStruct((batch_heads, parts, used), jnp.int32)
    blocks_out, owners = plgpu.kernel(
        body,
        out_type=[merged, merged],
        scratch_types=[plgpu.SMEM((length,), jnp.int32), plgpu.SMEM((5, length), jnp.int32)],
        grid=(parts, batch_heads),
        grid_names=("p", "x"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )(lists)
    return blocks_out, owners
