"""Compressed-branch attention on Hopper tensor cores: split partials, and block masses on the way.

One thread block takes up to W tiles of 64 query rows through one split of a sequence's compressed entries, so the
rows of all nodes and heads share each load of keys and values. It keeps a running softmax. The same probabilities
give the block masses: a product with a static 0/1 matrix of overlaps, in two bf16 parts (16 bits of mantissa), relative
to the running maximum of the moment, which is stored beside them. So scores need no second pass over the keys.
Few query rows have another body: `mosaic_narrow`.
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

from .mosaic_common import LOG2E, MASKED, PANEL, PLAIN, ROWS, START, TILED, TREE_TILE, Accumulator, put
from .mosaic_narrow import COLUMNS, attend_narrow, narrow_scratch

Carry = tuple[list[Array], Array, Array]  # accumulators of the panels, running maximum, running sum
_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttendConfig:
    """Tile choices of both kernels.

    Args:
      tile: entries per step, 64 or 128.
      splits: parts that the entries are divided into.
      warpgroups: row tiles that share loads of keys and values.
      stages: tiles of keys and values in flight.
      select_warps: that serve a node in the selection: 1, 2, 4 or 8.
      select_bunch: most nodes of a thread block of the selection, 4, 8 or 16: larger groups take a cluster of thread
        blocks. 0 for a thread block per group, and a launch of its own for the visit lists of groups of which a row
        tile does not hold a whole number.
      narrow: keys in the place of query rows, where the rows of a KV head are at most `mosaic_narrow.COLUMNS`.
    """

    tile: int
    splits: int
    warpgroups: int
    stages: int
    select_warps: int = 1
    select_bunch: int = 0
    narrow: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Partials:
    """What the attention kernel leaves for the next one. X = B * K, R row tiles of 64 rows.

    Args:
      out: unnormalised output of each split.
      stats: running maximum (log2 units) and sum of each split.
      mass: per tile of entries (from index 1) and row, the blocks' masses relative to `top`; then the mass that spills
        into the first block of the next tile. None if not asked for.
      top: the reference of each tile's mass (from index 1), and after N those of the tiles of completed entries.
      tree: masses of the completed entries.
    """

    out: Float[Array, "X R S 64 D"]
    stats: Float[Array, "X R S 2 64"]
    mass: Float[Array, "X R N 64 Y"] | None
    top: Float[Array, "X R N2 64"] | None
    tree: Float[Array, "X R 64 M"] | None


def mass_depth(steps: int) -> int:
    """Tiles of the mass array for `steps` tiles of entries: one before them, and a multiple of 32 in all."""
    return -(-(steps + 1) // 32) * 32


def attend(
    q: Float[Array, "B T K G D"],
    k: Float[Array, "X N D"],
    v: Float[Array, "X N D"],
    tree_k: Float[Array, "X M2 D"],
    tree_v: Float[Array, "X M2 D"],
    bias: Float[Array, "B R 64 M"],
    counts: Int[Array, "B 4"],
    bins: Float[Array, "Y tile"] | None,
    *,
    overlap: tuple[tuple[int, ...], tuple[int, ...]],
    per_tile_nodes: int,
    scale: float,
    config: AttendConfig,
    score: bool,
    interpret: Any = None,
) -> Partials:
    """Runs the attention kernel.

    Args:
      q: rotated queries.
      k, v: compressed entries; rows at and after the count are garbage.
      tree_k, tree_v: completed entries; rows past the last are read as zeros.
      bias: 0 where a row sees a completed entry, `MASKED` elsewhere.
      counts: committed entries, and completed ones, of each sequence.
      bins: transposed overlaps of the entries of a tile with its blocks and the next; None where they are the same.
      overlap: how often each entry of a block counts in it, and in the next one.
      per_tile_nodes: nodes in a row tile, a multiple of 4; its rows are head-major.
      scale: multiplies q . k.
      config: tile choices.
      score: whether block masses are wanted.
      interpret: parameters of the interpreter, or None.
    """
    batch_size, nodes, heads, group_heads, dim = q.shape
    batch_heads, entries = batch_size * heads, k.shape[1]
    tiles, tree_width = bias.shape[1], bias.shape[3]
    size, splits, warps, stages = config.tile, config.splits, config.warpgroups, config.stages
    warps = min(warps, tiles)
    groups = -(-tiles // warps)
    steps = -(-entries // size)
    depth = mass_depth(steps)
    narrow = config.narrow
    binned = score and bins is not None and not narrow
    width = size if bins is None else bins.shape[0]
    factor = LOG2E * scale
    panels = dim // PANEL
    in_smem = interpret is not None  # the interpreter knows wgmma with both operands in shared memory only
    f32, i32 = jnp.float32, jnp.int32
    half = q.dtype
    if in_smem:  # nor has it reads past the end
        rows = ((0, 0), (0, max(0, TREE_TILE - tree_k.shape[1])), (0, 0))
        tree_k, tree_v = jnp.pad(tree_k, rows), jnp.pad(tree_v, rows)

    def body(*refs: Any) -> None:
        left = iter(refs)

        def take(present: bool = True) -> Any:
            return next(left) if present else None

        q_ref, k_ref, v_ref, tk_ref, tv_ref, bias_ref, counts_ref = (take() for _ in range(7))
        bins_ref = take(binned)
        o_ref, stats_ref = take(), take()
        mass_ref, top_ref, tree_ref = (take(score) for _ in range(3))
        (q_s, q_copy), (k_s, k_copy), (v_s, v_copy), q_b, k_b, v_b, free_b = (take() for _ in range(7))
        bins_s, bins_b = take(binned), take(binned)
        few_s = tuple(take(narrow) for _ in range(3))
        p_s, b_s, pt_s = (take(in_smem and not narrow) for _ in range(3))
        if in_smem:  # and gives each member of a union a buffer of its own
            q_copy, k_copy, v_copy = q_s, k_s, v_s
        w = lax.axis_index("wg")
        s, x, g = lax.axis_index("s"), lax.axis_index("x"), lax.axis_index("g")
        batch = lax.div(x, i32(heads))
        tile = jnp.minimum(g * warps + w, tiles - 1)  # surplus warpgroups repeat the last tile
        visible, completed = counts_ref[batch, 0], counts_ref[batch, 1]
        count = lax.div(visible + (size - 1), i32(size))
        first = lax.div(count * s, i32(splits))
        n = lax.div(count * (s + 1), i32(splits)) - first
        chunks = jnp.where(s == splits - 1, lax.div(completed + (TREE_TILE - 1), i32(TREE_TILE)), 0)

        def copy(sources: tuple[Any, Any], start: Array, rows: int, slot: Array) -> None:
            at = pl.ds(pl.multiple_of(start * rows, rows), rows)
            for source, target, barrier in zip(sources, (k_copy, v_copy), (k_b, v_b), strict=True):
                for panel in range(panels):
                    columns = pl.ds(panel * PANEL, PANEL)
                    part = target.at[slot, panel] if rows == size else target.at[slot, panel, pl.ds(0, rows)]
                    plgpu.copy_gmem_to_smem(source.at[x, at, columns], part, barrier.at[slot])

        def fetch(i: Array) -> None:
            """Step i of this block: tiles of committed entries, then of completed ones."""
            slot = lax.rem(i, i32(stages))

            @pl.when(i < n)
            def _() -> None:
                copy((k_ref, v_ref), first + i, size, slot)

            @pl.when((i >= n) & (i < n + chunks))
            def _() -> None:
                copy((tk_ref, tv_ref), i - n, TREE_TILE, slot)

        def refill(i: Array, slot: Array) -> None:
            """After every warpgroup has read step i."""
            plgpu.barrier_arrive(free_b.at[slot])

            @pl.when(w == 0)
            def _() -> None:
                plgpu.barrier_wait(free_b.at[slot])  # every completed phase must be awaited, the last ones too
                fetch(i + stages)

        if narrow:
            attend_narrow(
                (q_ref, bias_ref),
                (o_ref, stats_ref, mass_ref, top_ref, tree_ref),
                (q_s, q_copy, k_s, v_s, *few_s),
                (q_b, k_b, v_b),
                batch=batch,
                x=x,
                split=s,
                first=first,
                steps=n,
                chunks=chunks,
                visible=visible,
                overlap=overlap,
                per_tile_nodes=per_tile_nodes,
                depth=depth,
                factor=factor,
                fetch=fetch,
                refill=refill,
                interpret=interpret,
            )
            return

        # Rows of no node or no head are zeros, or stay as they are: rows are independent.
        copied = min(per_tile_nodes, nodes)
        these = pl.ds(pl.multiple_of(tile * per_tile_nodes, per_tile_nodes), copied)
        for h in range(group_heads):
            for panel in range(panels):
                source = q_ref.at[batch, these, lax.rem(x, i32(heads)), h, pl.ds(panel * PANEL, PANEL)]
                target = q_copy.at[w, panel, pl.ds(h * per_tile_nodes, copied)]
                plgpu.copy_gmem_to_smem(source, target, q_b.at[w])

        @pl.when(w == 0)
        def _() -> None:
            for i in range(stages):
                fetch(i32(i))
            if binned:
                plgpu.copy_gmem_to_smem(bins_ref, bins_s, bins_b)

        plgpu.barrier_wait(q_b.at[w])
        if binned:
            plgpu.barrier_wait(bins_b)
        column = plgpu.broadcasted_iota(i32, (ROWS, size), 1, layout=plgpu.Layout.WGMMA)
        top = plgpu.layout_cast(jnp.full((ROWS,), START, f32), _ROW)
        total = plgpu.layout_cast(jnp.full((ROWS,), 0.0, f32), _ROW)
        acc = [plgpu.layout_cast(jnp.full((ROWS, PANEL), 0.0, f32), plgpu.Layout.WGMMA)] * panels

        def panel_of(ring: Any, slot: Array, panel: int, rows: int) -> Any:
            return ring.at[slot, panel] if rows == size else ring.at[slot, panel, pl.ds(0, rows)]

        def scores(slot: Array, columns: int) -> Array:
            """Products, not scaled yet."""

            def product(acc_ref: Any) -> Array:
                for panel in range(panels):
                    keys = panel_of(k_s, slot, panel, columns)
                    plgpu.wgmma(acc_ref, q_s.at[w, panel], keys.transpose((1, 0)))
                return acc_ref[...]

            return pl.run_scoped(product, Accumulator((ROWS, columns), f32))

        def soften(values: Array, top: Array, total: Array) -> tuple[Array, Array, Array, Array]:
            new_top = jnp.maximum(top, values.max(axis=1) * factor)
            alpha = jnp.exp2(top - new_top)
            p = jnp.exp2(values * factor - lax.broadcast_in_dim(new_top, values.shape, [0]))
            return p, new_top, alpha, total * alpha + p.sum(axis=1)

        def multiply(
            acc: list[Array], alpha: Array, operand: Array, slot: Array, staging: Any, parts: tuple[Array, ...] = ()
        ) -> tuple[list[Array], Array | None]:
            """Adds the weighted values to the rescaled accumulators; bins the parts of the probabilities."""
            factors = lax.broadcast_in_dim(alpha, (ROWS, PANEL), [0])
            acc = [old * factors for old in acc]
            if in_smem:
                staging[w] = operand
                for index, part in enumerate(parts):
                    b_s[w, index] = part
                plgpu.commit_smem()
            else:  # all operands in registers before the first wgmma: otherwise they run one at a time
                acc, operand, parts = lax.optimization_barrier((acc, operand, parts))

            def weigh(acc_refs: list[Any]) -> None:
                for panel, acc_ref in enumerate(acc_refs):
                    values = panel_of(v_s, slot, panel, operand.shape[1])
                    plgpu.wgmma(acc_ref, staging.at[w] if in_smem else operand, values)

            def bin_parts(acc_ref: Any) -> None:
                for index, part in enumerate(parts):
                    plgpu.wgmma(acc_ref, b_s.at[w, index] if in_smem else part, bins_s.transpose((1, 0)))

            if in_smem:

                def weigh_from_zero(*acc_refs: Any) -> list[Array]:
                    weigh(list(acc_refs))
                    return [acc_ref[...] for acc_ref in acc_refs]

                def bin_from_zero(acc_ref: Any) -> Array:
                    bin_parts(acc_ref)
                    return acc_ref[...]

                gained = pl.run_scoped(weigh_from_zero, *[Accumulator((ROWS, PANEL), f32)] * panels)
                acc = [old + new for old, new in zip(acc, gained, strict=True)]
                return acc, pl.run_scoped(bin_from_zero, Accumulator((ROWS, width), f32)) if parts else None

            def both(refs: tuple[list[Any], list[Any]]) -> None:
                weigh(refs[0])
                for acc_ref in refs[1]:
                    bin_parts(acc_ref)

            # In place: two sets of accumulators do not fit into the registers of three warpgroups.
            zero = [plgpu.layout_cast(jnp.full((ROWS, width), 0.0, f32), plgpu.Layout.WGMMA)] if parts else []
            acc, found = pl.run_state(both)(
                ([Accumulator.init(old) for old in acc], [Accumulator.init(new) for new in zero])
            )
            return acc, found[0] if parts else None

        def step(i: Array, carry: Carry) -> Carry:
            acc, top, total = carry
            slot = lax.rem(i, i32(stages))
            plgpu.barrier_wait(k_b.at[slot])
            values = scores(slot, size)
            values = jnp.where(column < visible - (first + i) * size, values, MASKED)
            p, top, alpha, total = soften(values, top, total)
            high = p.astype(jnp.bfloat16)
            if not in_smem:  # otherwise the compiler converts one by one, which takes as long as all the exponentials
                high = lax.optimization_barrier(high)
            operand = high if half == jnp.bfloat16 else p.astype(half)
            parts = (high, (p - high.astype(f32)).astype(jnp.bfloat16)) if binned else ()
            plgpu.barrier_wait(v_b.at[slot])
            acc, mass = multiply(acc, alpha, operand, slot, p_s if in_smem else None, parts)
            refill(i, slot)
            if score:
                put(mass_ref.at[x, tile, first + i + 1], p if mass is None else mass, interpret)
                put(top_ref.at[x, tile, first + i + 1], top, interpret)
            return acc, top, total

        acc, top, total = lax.fori_loop(0, n, step, (acc, top, total))

        def tree_step(i: Array, carry: Carry) -> Carry:
            acc, top, total = carry
            slot = lax.rem(n + i, i32(stages))
            at = pl.ds(pl.multiple_of(i * TREE_TILE, TREE_TILE), TREE_TILE)
            hidden = plgpu.load(bias_ref.at[batch, tile, :, at], layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.barrier_wait(k_b.at[slot])
            values = jnp.where(hidden < 0.0, MASKED, scores(slot, TREE_TILE))
            p, top, alpha, total = soften(values, top, total)
            plgpu.barrier_wait(v_b.at[slot])
            acc = multiply(acc, alpha, p.astype(half), slot, pt_s if in_smem else None)[0]
            refill(n + i, slot)
            if score:
                put(tree_ref.at[x, tile, :, at], p, interpret)
                put(top_ref.at[x, tile, depth + i], top, interpret)
            return acc, top, total

        acc, top, total = lax.fori_loop(0, chunks, tree_step, (acc, top, total))
        for panel in range(panels):
            put(o_ref.at[x, tile, s, :, pl.ds(panel * PANEL, PANEL)], acc[panel], interpret)
        put(stats_ref.at[x, tile, s, 0], top, interpret)
        put(stats_ref.at[x, tile, s, 1], total, interpret)

    body.__name__ = "nsa_compressed_scores" if score else "nsa_compressed"
    sm = plgpu.SMEM
    rows, ring = (warps, panels, COLUMNS if narrow else ROWS, PANEL), (stages, panels, size, PANEL)
    shapes = [
        jax.ShapeDtypeStruct((batch_heads, tiles, splits, ROWS, dim), f32),
        jax.ShapeDtypeStruct((batch_heads, tiles, splits, 2, ROWS), f32),
    ]
    scratch = [
        plgpu.RefUnion(sm(rows, half, transforms=TILED), sm(rows, half, transforms=PLAIN)),
        plgpu.RefUnion(sm(ring, half, transforms=TILED), sm(ring, half, transforms=PLAIN)),
        plgpu.RefUnion(sm(ring, half, transforms=TILED), sm(ring, half, transforms=PLAIN)),
        plgpu.Barrier(num_arrivals=panels * (nodes if narrow else group_heads), num_barriers=warps),
        plgpu.Barrier(num_arrivals=panels, num_barriers=stages),
        plgpu.Barrier(num_arrivals=panels, num_barriers=stages),
        plgpu.Barrier(num_arrivals=warps, num_barriers=stages),
    ]
    operands: list[Any] = [q, k, v, tree_k, tree_v, bias, counts]
    if score:
        shapes += [
            jax.ShapeDtypeStruct((batch_heads, tiles, depth, ROWS, width), f32),
            jax.ShapeDtypeStruct((batch_heads, tiles, depth + tree_width // TREE_TILE, ROWS), f32),
            jax.ShapeDtypeStruct((batch_heads, tiles, ROWS, tree_width), f32),
        ]
        if binned:
            operands.append(bins)
            scratch += [sm((width, size), jnp.bfloat16, transforms=TILED), plgpu.Barrier()]
    if narrow:
        scratch += narrow_scratch(size, len(overlap[0]), half)
    elif in_smem:
        scratch += [
            sm((warps, ROWS, size), half, transforms=TILED),
            sm((warps, 2, ROWS, size), jnp.bfloat16, transforms=TILED),
            sm((warps, ROWS, TREE_TILE), half, transforms=TILED),
        ]
    results = plgpu.kernel(
        body,
        out_type=shapes,
        scratch_types=scratch,
        grid=(splits, batch_heads, groups),
        grid_names=("s", "x", "g"),
        num_threads=warps,
        thread_name="wg",
        # Shared memory is written by copies only, and `free_b` says when it may be: no barrier around each access.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(*operands)
    rest = results[2:] if score else (None, None, None)
    return Partials(out=results[0], stats=results[1], mass=rest[0], top=rest[1], tree=rest[2])
