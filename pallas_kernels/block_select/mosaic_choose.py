"""The second launch on Hopper: half of its thread blocks add up the attention kernel's splits, half select blocks.

Each serves a bunch of consecutive nodes of one KV head. The selection itself is in `mosaic_select`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from ..sparse_verify import schedule as schedules
from .mosaic_attend import Partials, mass_depth
from .mosaic_common import TREE_TILE, put
from .mosaic_select import emit
from .select_shape import QUAD, SelectShape

_Lay = plgpu.Layout.TILED
_Times = plgpu.Replicated


def cube(lanes: int, vector: int = 1) -> Any:
    """[n, 4, m] registers: the middle axis on warps, the last on `lanes` lanes (the rest of a warp repeats)."""
    lane_dims = (-2,) if lanes == 32 else (_Times(32 // lanes), -2)
    tiling = plgpu.Tiling(((1, QUAD, lanes * vector), (vector,)))
    return _Lay(tiling, warp_dims=(-3,), lane_dims=lane_dims, vector_dim=-1)


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
    rows = min(length, 2048 // length)  # as many as fit the registers
    first_s, owner_s, rank_s, block_s, bits_s = (scratch.at[i] for i in range(5))

    def at_columns(ref: Any) -> Array:
        x = plgpu.load(ref.at[pl.ds(0, length)], layout=by_column, optimized=False)
        return spread(x, (rows, length), (1,), layout)

    def tiles(body: Callable[[Any], None]) -> None:
        def step(number: Array, _: None) -> None:
            body(pl.multiple_of(number * rows, rows))

        lax.fori_loop(0, length // rows, step, None)  # unrolled, long lists take ten seconds to compile

    def at_rows(start: Any) -> Array:
        x = plgpu.load(list_s.at[pl.ds(start, rows)], layout=by_row, optimized=False)
        return spread(x, (rows, length), (0,), layout)

    column = plgpu.broadcasted_iota(i32, (rows, length), 1, layout=layout)
    row = plgpu.broadcasted_iota(i32, (rows, length), 0, layout=layout)
    values = at_columns(list_s)
    bits = lax.shift_left(full((rows, length), 1, i32, layout), lax.div(column, i32(width)))

    def look_back(start: Any) -> None:
        same = (at_rows(start) == values) & (values >= 0)
        earlier = jnp.where(same & (column < row + start), 1, 0)
        put(first_s.at[pl.ds(start, rows)], jnp.sum(earlier, axis=1), interpret)
        put(owner_s.at[pl.ds(start, rows)], jnp.sum(jnp.where(same, bits, 0), axis=1), interpret)

    tiles(look_back)
    first = (at_columns(first_s) == 0) & (values >= 0)

    def count_below(start: Any) -> None:
        below = jnp.where(first & (values < at_rows(start)), 1, 0)
        put(rank_s.at[pl.ds(start, rows)], jnp.sum(below, axis=1), interpret)

    tiles(count_below)
    rank = jnp.where(first, at_columns(rank_s), -1)
    owners = at_columns(owner_s)

    def place(start: Any) -> None:
        here = rank == row + start
        put(block_s.at[pl.ds(start, rows)], jnp.sum(jnp.where(here, values + 1, 0), axis=1) - 1, interpret)
        put(bits_s.at[pl.ds(start, rows)], jnp.sum(jnp.where(here, owners, 0), axis=1), interpret)

    tiles(place)


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
      bunch: nodes of a thread block: 4, or at most a larger group; the thread blocks of a group are a cluster.
      warps: that serve a node.
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
    bunch: int
    warps: int

    @property
    def rounds(self) -> int:
        """Blocks to choose beside the forced ones."""
        return max(self.slots - self.init - self.local, 0)

    @property
    def cluster(self) -> int:
        """Thread blocks that serve a group together."""
        return max(self.group // self.bunch, 1)


def finish(
    partials: Partials,
    counts: Int[Array, "B 4"],
    own: Int[Array, "B T2"],
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
      own: each node's own block, padded to whole bunches, and those to whole clusters.
      weights: how often each completed entry counts in each block from `counts[2]` on.
      shape: B, T, K, G, D.
      per_tile_nodes: nodes in a tile of query rows; its rows are head-major.
      plan: of the selection, or None.
      interpret: parameters of the interpreter, or None. The interpreter does not know the selection's instructions:
        with it, a portable version stands in for them.

    Returns:
      The output [B, T, K, G, D]; with a plan also the blocks [B * K, T, S]; with a group also the merged blocks and
      owners, [B * K, P, U].
    """
    if plan is None or interpret is None:
        return _launch(partials, counts, own, weights, shape, per_tile_nodes, plan, interpret)
    (out,) = _launch(partials, counts, own, weights, shape, per_tile_nodes, None, interpret)
    assert weights is not None
    blocks = portable_select(partials, counts, own, weights, shape, per_tile_nodes, plan)
    if not plan.group:
        return out, blocks
    schedule = schedules.merge(blocks[None], plan.group, plan.blocks)
    return out, blocks, schedule.blocks[0], schedule.owners[0]


def _launch(
    partials: Partials,
    counts: Array,
    own: Array,
    weights: Array | None,
    shape: tuple[int, int, int, int, int],
    per_tile_nodes: int,
    plan: SelectPlan | None,
    interpret: Any,
) -> tuple[Array, ...]:
    """See `finish`. With a plan, thread blocks of two kinds: one adds up splits, the other selects."""
    batch, nodes, heads, group_heads, dim = shape
    bunch, cluster = (QUAD, 1) if plan is None else (plan.bunch, plan.cluster)
    warpgroups = 1 if plan is None else bunch // QUAD * plan.warps
    sums = bunch // QUAD * group_heads  # of a quad's splits for one head
    each = -(-sums // warpgroups)  # of a warpgroup; surplus ones repeat the last
    f32, i32 = jnp.float32, jnp.int32
    layout = cube(32, min(4, dim // 32))
    merges = plan is not None and plan.group > 0
    sizes = None if plan is None else _select_shape(partials, weights, shape, per_tile_nodes, plan)

    def body(*refs: Any) -> None:
        left = iter(refs)

        def take(present: bool = True) -> Any:
            return next(left) if present else None

        selects = plan is not None
        out_p, stats_ref, counts_ref = (take() for _ in range(3))
        mass_ref, top_ref, tree_ref, own_ref, weights_ref = (take(selects) for _ in range(5))
        out_ref, selected_ref = take(), take(selects)
        merged_ref, owners_ref = take(merges), take(merges)
        out_s = take()
        bits_s, gains_s, found_s = (take(selects) for _ in range(3))
        which, x = lax.axis_index("q"), lax.axis_index("x")
        start = which * cluster if cluster > 1 else which  # of the cluster
        which = start + lax.axis_index("c") if cluster > 1 else which
        first = lax.axis_index("wg") * each if warpgroups > 1 else i32(0)
        b, head = lax.div(x, i32(heads)), lax.rem(x, i32(heads))
        t0 = which * bunch
        tile = lax.div(t0, i32(per_tile_nodes))
        inside = lax.rem(t0, i32(per_tile_nodes))

        def combine() -> None:
            mine = [jnp.minimum(first + i, sums - 1) for i in range(each)]
            mine = [(lax.rem(i, i32(group_heads)), lax.div(i, i32(group_heads)) * QUAD) for i in mine]
            results = []
            for h, skip in mine:  # no store before the last load: it would be a barrier
                rows = pl.ds(pl.multiple_of(inside + skip + h * per_tile_nodes, QUAD), QUAD)
                tops, weights_of = (
                    plgpu.load(stats_ref.at[x, tile, :, i, rows], layout=layout.reduce(2), optimized=False)
                    for i in range(2)
                )
                weight = jnp.exp2(tops - spread(jnp.max(tops, axis=0), tops.shape, (1,), layout.reduce(2)))
                total = jnp.sum(weight * weights_of, axis=0)
                scale = jnp.where(total > 0.0, 1.0 / jnp.maximum(total, 1e-30), 0.0)
                weight = weight * spread(scale, tops.shape, (1,), layout.reduce(2))
                parts = plgpu.load(out_p.at[x, tile, :, rows], layout=layout, optimized=False)
                results.append(jnp.sum(parts * spread(weight, parts.shape, (0, 1), layout), axis=0))
            for (h, skip), result in zip(mine, results, strict=True):
                put(out_s.at[h, pl.ds(pl.multiple_of(skip, QUAD), QUAD)], result, interpret)
            plgpu.commit_smem()
            for h, skip in mine:
                for i in range(QUAD):

                    @pl.when(t0 + skip + i < nodes)
                    def _(h: Array = h, at: Array = skip + i) -> None:
                        plgpu.copy_smem_to_gmem(out_s.at[h, at], out_ref.at[b, t0 + at, head, h])

            plgpu.wait_smem_to_gmem(0)

        if sizes is None:
            combine()
            return
        static: SelectShape = sizes

        @pl.when(lax.axis_index("j") == 0)
        def _() -> None:
            references = {
                "stats": stats_ref,
                "counts": counts_ref,
                "mass": mass_ref,
                "top": top_ref,
                "tree": tree_ref,
                "own": own_ref,
                "weights": weights_ref,
                "selected": selected_ref,
                "merged": merged_ref if merges else selected_ref,
                "owners": owners_ref if merges else selected_ref,
                "bits": bits_s,
                "gains": gains_s,
                "found": found_s,
            }
            emit(static, references, start, x)

        sums_up = lax.axis_index("j") == 1

        @pl.when(sums_up & (t0 < nodes) if cluster > 1 else sums_up)  # the last cluster may have bunches without nodes
        def _() -> None:
            combine()

    body.__name__ = "nsa_combine" if plan is None else "nsa_select"
    shapes = [jax.ShapeDtypeStruct((batch, nodes, heads, group_heads, dim), f32)]
    operands: list[Any] = [partials.out, partials.stats, counts]
    scratch: list[Any] = [plgpu.SMEM((group_heads, bunch, dim), f32)]
    if plan is not None and sizes is not None:
        operands += [partials.mass, partials.top, partials.tree, own, weights]
        shapes.append(jax.ShapeDtypeStruct((batch * heads, nodes, plan.slots), i32))
        if merges:
            merged = (batch * heads, -(-nodes // plan.group), sizes.merged_width)
            shapes += [jax.ShapeDtypeStruct(merged, i32)] * 2
        scratch += [plgpu.SMEM((words,), i32) for words in sizes.shared_words]
    options: dict[str, Any] = {"num_threads": warpgroups, "thread_name": "wg"} if warpgroups > 1 else {}
    if cluster > 1:
        options |= {"cluster": (cluster,), "cluster_names": ("c",)}
    return tuple(
        plgpu.kernel(
            body,
            out_type=shapes,
            scratch_types=scratch,
            grid=(1 if plan is None else 2, batch * heads, -(-nodes // (bunch * cluster))),
            grid_names=("j", "x", "q"),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=interpret,
            **options,
        )(*operands)
    )


def _select_shape(
    partials: Partials,
    weights: Array | None,
    shape: tuple[int, int, int, int, int],
    per_tile_nodes: int,
    plan: SelectPlan,
) -> SelectShape:
    assert partials.mass is not None and partials.top is not None
    assert partials.tree is not None and weights is not None
    return SelectShape(
        nodes=shape[1],
        kv_heads=shape[2],
        heads=shape[3],
        tiles=partials.stats.shape[1],
        per_tile_nodes=per_tile_nodes,
        splits=partials.stats.shape[2],
        depth=partials.mass.shape[2],
        width=partials.mass.shape[4],
        per_tile=plan.per_tile,
        tile_entries=plan.per_tile * plan.ratio,
        steps=plan.steps,
        tops=partials.top.shape[2],
        tree_width=partials.tree.shape[3],
        extra=weights.shape[1],
        blocks=plan.blocks,
        slots=plan.slots,
        init=plan.init,
        local=plan.local,
        spills=plan.spills,
        group=plan.group,
        bunch=plan.bunch,
        warps=plan.warps,
    )


def portable_select(
    partials: Partials,
    counts: Int[Array, "B 4"],
    own: Int[Array, "B T2"],
    weights: Float[Array, "B E M"],
    shape: tuple[int, int, int, int, int],
    per_tile_nodes: int,
    plan: SelectPlan,
) -> Int[Array, "X T S"]:
    """The selection of `finish` in plain JAX; arguments as there."""
    assert partials.mass is not None and partials.top is not None and partials.tree is not None
    _, nodes, heads, group_heads, _ = shape
    steps, per_tile = plan.steps, plan.per_tile
    counts, own, weights = (jnp.repeat(x, heads, axis=0) for x in (counts, own, weights))
    visited = -(-counts[:, 0] // (per_tile * plan.ratio))
    high = partials.stats[:, :, :, 0].max(2)
    total = jnp.sum(jnp.exp2(partials.stats[:, :, :, 0] - high[:, :, None]) * partials.stats[:, :, :, 1], axis=2)
    lse = jnp.where(total > 0, high + jnp.log2(jnp.maximum(total, 1e-30)), 1e30)  # exp2 gives 0

    seen = (jnp.arange(steps) < visited[:, None])[:, None, :, None, None]
    factor = jnp.exp2(partials.top[:, :, 1 : steps + 1] - lse[:, :, None])[..., None]
    mass = jnp.where(seen, partials.mass[:, :, 1 : steps + 1] * factor, 0.0)  # X R N 64 Y
    scores = mass[..., :per_tile]
    if plan.spills:
        scores = scores.at[:, :, 1:, :, 0].add(mass[:, :, :-1, :, per_tile])
    scores = jnp.moveaxis(scores, 2, 3).reshape(*lse.shape, steps * per_tile)
    chunks = -(-counts[:, 1] // TREE_TILE)
    scale = jnp.exp2(partials.top[:, :, mass_depth(steps) :] - lse[:, :, None])
    scale = jnp.where((jnp.arange(scale.shape[2]) < chunks[:, None])[:, None, :, None], scale, 0.0)
    scale = jnp.repeat(jnp.moveaxis(scale, 2, 3), TREE_TILE, axis=3)
    shares = jnp.where(scale > 0, partials.tree * scale, 0.0)
    gains = jnp.einsum("xrim,xem->xrie", shares, weights, precision="highest")
    touched = counts[:, 2, None] + jnp.arange(weights.shape[1])
    scores += jnp.einsum(
        "xrie,xeu->xriu", gains, touched[..., None] == jnp.arange(scores.shape[-1]), precision="highest"
    )

    def of_nodes(x: Array) -> Array:
        by_head = x[:, :, : group_heads * per_tile_nodes].reshape(*x.shape[:2], group_heads, per_tile_nodes, -1)
        return by_head.sum(2).reshape(x.shape[0], -1, x.shape[-1])[:, :nodes]

    mine, index = own[:, :nodes, None], jnp.arange(plan.blocks)
    forced = (index <= mine) & ((index < plan.init) | (index > mine - plan.local))
    ranked = jnp.where(forced, jnp.inf, of_nodes(scores)[..., : plan.blocks])
    value, chosen = lax.top_k(jnp.where(index <= mine, ranked, -jnp.inf), plan.slots)  # ties: lower index first
    ascending = jnp.sort(jnp.where(value == -jnp.inf, plan.blocks, chosen), axis=-1)
    return jnp.where(ascending == plan.blocks, -1, ascending).astype(jnp.int32)


def merge(
    selected: Int[Array, "X T S"], *, group: int, blocks: int, interpret: Any = None
) -> tuple[Int[Array, "X P U"], Int[Array, "X P U"]]:
    """Merged blocks and owners of groups that `finish` does not merge, one thread block each."""
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
