"""The launch around `mosaic_attend`: jobs of a grid, partial results, and the sum over branches and splits."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from .mosaic_attend import (
    BRANCHES,
    F32,
    PER_ROW,
    WGMMA,
    Barriers,
    Inputs,
    Problem,
    Ring,
    attend,
    splat,
)
from .mosaic_inline import acquire, arrive, reset, store_rows, sync
from .mosaic_rows import ROWS, gate_rows, pass_masks, row_tiles
from .schedule import MergedSchedule
from .tiles import TileConfig

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
TILED_F32 = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
PLAIN = (plgpu.SwizzleTransform(128),)
OUT_COLUMNS = 32


def _copy_q(
    problem: Problem,
    refs: Inputs,
    q: list[Any],
    barrier: Any,
    at: tuple[Any, Any, Any],
    count: int,
    interpret: bool,
) -> None:
    """Queries of `count` nodes: rows (node, head) of one KV head."""
    b, k, first = at
    heads = problem.rows.heads
    for chunk in range(problem.chunks):
        columns = pl.ds(64 * chunk, 64)
        if interpret:  # the interpreter keeps the two views apart
            for node in range(count):
                plgpu.copy_gmem_to_smem(
                    refs.q.at[b, first + node, k, :, columns],
                    q[chunk][0].at[pl.ds(node * heads, heads)],
                    barrier,
                )
        else:
            plgpu.copy_gmem_to_smem(
                refs.q.at[b, pl.ds(first, count), k, :, columns], q[chunk][1].at[pl.ds(0, count)], barrier
            )


def _row_vector(stats_ref: Any, kind: int, start: Any) -> jax.Array:
    return plgpu.load(stats_ref.at[kind, pl.ds(start, ROWS)], layout=PER_ROW, optimized=False)


def _combine(
    problem: Problem,
    at: tuple[Any, Any, Any],
    partial_ref: Any,
    stats_ref: Any,
    gates_ref: Any,
    out_ref: Any,
    out: list[Any],
    pieces: list[Any],
    interpret: bool,
) -> None:
    """Gated sum of all branches of one selected tile, splits in order; writes some columns of the tile's nodes.

    Args:
      at: sequence, KV head and tile.
      out: staging buffers of 32 columns.
      pieces: which 32 columns.
      interpret: whether the interpreter runs it.
    """
    b, k, tile = at
    rows = problem.rows
    head = b * problem.kv_heads + k
    total = [splat((ROWS, OUT_COLUMNS), 0.0, F32, WGMMA) for _ in pieces]
    for branch, splits in enumerate(problem.splits):
        dense = lax.div(tile, jnp.int32(rows.dense_per_selected))
        inside = lax.rem(tile, jnp.int32(rows.dense_per_selected)) * (rows.per_tile * rows.heads)
        job = (head * rows.dense_tiles + dense if branch else head * rows.tiles + tile) * splits
        first = (problem.first_partial(branch) + job) * ROWS + (inside if branch else 0)
        starts = [first + s * ROWS for s in range(splits)]
        tops = [_row_vector(stats_ref, 0, start) for start in starts]
        norms = [_row_vector(stats_ref, 1, start) for start in starts]
        top = functools.reduce(jnp.maximum, tops)
        norm = functools.reduce(lambda x, y: x + y, [jnp.exp2(t - top) * n for t, n in zip(tops, norms, strict=True)])
        gate = plgpu.load(gates_ref.at[b, k, tile, branch], layout=PER_ROW, optimized=False)
        gate = jnp.where(norm > 0.0, gate / jnp.maximum(norm, 1e-30), 0.0)

        def add(numbers: list[Any], total: Any, first: Any = first, top: Any = top, gate: Any = gate) -> Any:
            loaded = []
            for s in numbers:  # all loads before the first use
                start = first + s * ROWS
                parts = [
                    plgpu.load(
                        partial_ref.at[pl.ds(start, ROWS), pl.ds(OUT_COLUMNS * piece, OUT_COLUMNS)],
                        layout=WGMMA,
                        optimized=False,
                    )
                    for piece in pieces
                ]
                loaded.append((_row_vector(stats_ref, 0, start), parts))
            for own_top, parts in loaded:
                factor = jnp.exp2(own_top - top) * gate
                factor = lax.broadcast_in_dim(factor, (ROWS, OUT_COLUMNS), [0])
                total = tuple(t + part * factor for t, part in zip(total, parts, strict=True))
            return total

        def add_two(pair: Any, total: Any, add: Any = add) -> Any:
            return add([2 * pair, 2 * pair + 1], total)

        total = tuple(total)
        if splits > 1:
            total = lax.fori_loop(0, splits // 2, add_two, total)
        if splits % 2:
            total = add([splits - 1], total)
    _write(problem, at, list(zip(pieces, total, strict=True)), out_ref, out, interpret)


def _write(
    problem: Problem,
    at: tuple[Any, Any, Any],
    total: list[tuple[Any, jax.Array]],
    out_ref: Any,
    out: list[Any],
    interpret: bool,
) -> None:
    """Rows of a selected tile to [B, T, K, G, D], through shared memory; copies clip at the last node."""
    b, k, tile = at
    rows = problem.rows
    count, first = rows.per_tile, tile * rows.per_tile
    for start in range(0, len(total), len(out)):
        if not interpret:
            sync()  # the copies out of the buffer were awaited by the thread that issued them
        batch = total[start : start + len(out)]
        for (_, value), (tiled, _) in zip(batch, out, strict=False):
            tiled[...] = value
        plgpu.commit_smem()
        for (piece, _), (tiled, plain) in zip(batch, out, strict=False):
            columns = pl.ds(OUT_COLUMNS * piece, OUT_COLUMNS)
            if not interpret:
                target = out_ref.at[b, pl.ds(first, count), k, :, columns]
                plgpu.copy_smem_to_gmem(plain.at[pl.ds(0, count)], target)
                continue
            for node in range(count):
                source = tiled.at[pl.ds(node * rows.heads, rows.heads)]
                plgpu.copy_smem_to_gmem(source, out_ref.at[b, first + node, k, :, columns])
        plgpu.wait_smem_to_gmem(0)


def _scratch(problem: Problem, dtype: Any, interpret: bool) -> tuple[list[Any], Any]:
    """Scratch types of the kernel, and the function that names what the body receives."""
    rows, stages, chunks = problem.rows, problem.stages, problem.chunks
    nodes = ROWS // rows.heads
    q_types = []
    for _ in range(chunks):
        tiled_q = plgpu.SMEM((ROWS, 64), dtype, transforms=TILED)
        tiled_out = plgpu.SMEM((ROWS, OUT_COLUMNS), F32, transforms=TILED_F32)
        if interpret:
            q_types += [tiled_q, tiled_out]
            continue
        plain_q = plgpu.SMEM((nodes, rows.heads, 64), dtype, transforms=PLAIN)
        plain_out = plgpu.SMEM((nodes, rows.heads, OUT_COLUMNS), F32, transforms=PLAIN)
        q_types.append(plgpu.RefUnion(tiled_q, plain_q, tiled_out, plain_out))
    shape = (stages, ROWS, 64)
    arrivals = chunks * problem.pieces
    if interpret:
        ring_types = [plgpu.SMEM(shape, dtype, transforms=TILED) for _ in range(2 * chunks)]
        barriers = [plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * stages)]
        barriers += [plgpu.Barrier(num_arrivals=chunks * n) for n in (rows.per_tile, rows.per_dense)]
        last = [plgpu.SMEM((ROWS, ROWS), dtype, transforms=TILED)]
    else:
        views = (
            plgpu.SMEM(shape, dtype, transforms=TILED),
            plgpu.SMEM(shape, dtype, transforms=PLAIN),
            plgpu.SMEM((1,), jnp.int32),  # for the arrival count, once the ring is idle
        )
        ring_types = [plgpu.RefUnion(*views) for _ in range(2 * chunks)]
        barriers = [plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * stages + 1)]
        if arrivals != chunks:
            barriers.append(plgpu.Barrier(num_arrivals=chunks))
        last = []

    def name(refs: Any) -> dict[str, Any]:
        refs = list(refs)
        q: list[Any] = [(refs.pop(0), refs.pop(0)) if interpret else refs.pop(0) for _ in range(chunks)]
        ring = [refs.pop(0) for _ in range(2 * chunks)]
        array = refs.pop(0)
        named: dict[str, Any] = {}
        if interpret:
            named["q"] = [(x, x) for x, _ in q]
            named["out"] = [(x, x) for _, x in q]
            named["q_barriers"] = refs[:2]
            named["p"] = refs[2]
            ring = [(x, x) for x in ring]
        else:
            named["q"] = [(x[0], x[1]) for x in q]
            named["out"] = [(x[2], x[3]) for x in q]
            named["q_barriers"] = [refs[0] if refs else array.at[2 * stages]] * 2
            named["flag"] = ring[0][2]
        k_barriers, v_barriers = Barriers(array, 0), Barriers(array, stages)
        named["ring"] = Ring(problem, ring[:chunks], ring[chunks:], k_barriers, v_barriers)
        return named

    return [*q_types, *ring_types, *barriers, *last], name


def launch(
    problem: Problem, inputs: Inputs, gates: Float[Array, "B K tiles branches 64"], *, interpret: Any = None
) -> Float[Array, "B T K G D"]:
    """Runs the kernel; the sum is a launch of its own if so configured, and in the interpreter (no atomics)."""
    rows = problem.rows
    dtype = inputs.q.dtype
    fields = [f for f in Inputs.__dataclass_fields__ if getattr(inputs, f) is not None]
    arrays = [getattr(inputs, f) for f in fields]
    scratch_types, name = _scratch(problem, dtype, interpret is not None)
    arrivals = sum(problem.splits)

    def job(
        refs: Inputs,
        named: dict[str, Any],
        partial_ref: Any,
        stats_ref: Any,
        branch: int,
        b: Any,
        k: Any,
        j: Any,
    ) -> jax.Array:
        splits = problem.splits[branch]
        tile, split = lax.div(j, jnp.int32(splits)), lax.rem(j, jnp.int32(splits))
        count = rows.per_dense if branch else rows.per_tile
        barrier = named["q_barriers"][1 if branch else 0]
        _copy_q(problem, refs, named["q"], barrier, (b, k, tile * count), count, interpret is not None)
        stream = BRANCHES[branch](problem, refs, b, k, tile, interpret is not None)
        q = [tiled for tiled, _ in named["q"]]
        acc, top, norm = attend(problem, named["ring"], q, barrier, named.get("p"), stream, split, splits, dtype)
        head = b * problem.kv_heads + k
        first = (problem.first_partial(branch) + head * problem.jobs[branch] + j) * ROWS
        for chunk, value in enumerate(acc):
            target = partial_ref.at[pl.ds(first, ROWS), pl.ds(64 * chunk, 64)]
            if interpret is None:
                store_rows(target, value, count * rows.heads)
            else:
                target[...] = value
        stats_ref[0, pl.ds(first, ROWS)] = top
        stats_ref[1, pl.ds(first, ROWS)] = norm
        return tile

    def jobs(refs: Inputs, named: dict[str, Any], partial_ref: Any, stats_ref: Any, done: Any) -> None:
        b, k = lax.axis_index("b"), lax.axis_index("k")
        j = lax.axis_index("j")
        first = 0
        for branch, count in enumerate(problem.jobs):

            @pl.when((j >= first) & (j < first + count))
            def _branch(branch: int = branch, first: int = first) -> None:
                tile = job(refs, named, partial_ref, stats_ref, branch, b, k, j - first)
                done(branch, b, k, tile)

            first += count

    batch, heads = problem.batch, problem.kv_heads
    padded = (problem.partials + 1) * ROWS  # a tile that starts late in a dense tile reads past it
    partial_type = jax.ShapeDtypeStruct((padded, problem.dim), F32)
    stats_type = jax.ShapeDtypeStruct((2, padded), F32)
    out_type = jax.ShapeDtypeStruct(inputs.q.shape, F32)
    options = {
        "compiler_params": plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        "interpret": interpret,
    }
    grid = {"grid": (sum(problem.jobs), heads, batch), "grid_names": ("j", "k", "b")}

    interpreted = interpret is not None
    if problem.fused and not interpreted:
        columns = list(range(problem.dim // OUT_COLUMNS))

        def body(*args: Any) -> None:
            refs = Inputs(**dict(zip(fields, args, strict=False)))
            gates_ref, counters_ref, out_ref, partial_ref, stats_ref, *scratch = args[len(fields) :]
            named = name(scratch)

            def done(branch: int, b: Any, k: Any, tile: Any) -> None:
                parts = rows.dense_per_selected if branch else 1
                for part in range(parts):
                    at = tile * parts + part

                    @pl.when(at < rows.tiles)
                    def _counted(at: Any = at) -> None:
                        counter = counters_ref.at[b, k, at]
                        before = arrive(counter, named["flag"])

                        @pl.when(before == arrivals - 1)
                        def _last() -> None:
                            acquire()
                            reset(counter)
                            results = (partial_ref, stats_ref, gates_ref, out_ref)
                            _combine(problem, (b, k, at), *results, named["out"], columns, False)

            jobs(refs, named, partial_ref, stats_ref, done)

        # Every launch leaves the counters at zero, so all launches of a program may share one array.
        counters = jnp.zeros((batch, heads, rows.tiles), jnp.int32)
        body.__name__ = "sparse_attention"
        kernel = plgpu.kernel(
            body, out_type=[out_type, partial_type, stats_type], scratch_types=scratch_types, **grid, **options
        )
        return kernel(*arrays, gates, counters)[0]

    def partials(*args: Any) -> None:
        refs = Inputs(**dict(zip(fields, args, strict=False)))
        partial_ref, stats_ref, *scratch = args[len(fields) :]
        jobs(refs, name(scratch), partial_ref, stats_ref, lambda *_: None)

    def combine(partial_ref: Any, stats_ref: Any, gates_ref: Any, out_ref: Any, staging: Any) -> None:
        at = (lax.axis_index("b"), lax.axis_index("k"), lax.axis_index("i"))
        out = [(staging, staging) if interpreted else (staging[0], staging[1])]
        columns = [lax.axis_index("c")]
        _combine(problem, at, partial_ref, stats_ref, gates_ref, out_ref, out, columns, interpreted)

    partials.__name__, combine.__name__ = "sparse_attention", "sparse_combine"
    split = plgpu.kernel(partials, out_type=[partial_type, stats_type], scratch_types=scratch_types, **grid, **options)(
        *arrays
    )
    staging = plgpu.SMEM((ROWS, OUT_COLUMNS), F32, transforms=TILED_F32)
    if not interpreted:
        plain = plgpu.SMEM((ROWS // rows.heads, rows.heads, OUT_COLUMNS), F32, transforms=PLAIN)
        staging = plgpu.RefUnion(staging, plain)
    return plgpu.kernel(
        combine,
        out_type=out_type,
        scratch_types=[staging],
        grid=(problem.dim // OUT_COLUMNS, rows.tiles, heads, batch),
        grid_names=("c", "i", "k", "b"),
        **options,
    )(*split, gates)


def attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    schedule: MergedSchedule,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
    compressed: bool,
    config: TileConfig,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """Selected and window branch, and the compressed one if asked for, in one launch; float32 out."""
    batch, nodes, kv_heads, heads, dim = q.shape
    rows = row_tiles(nodes, heads, schedule.group, config.dense_nodes)
    slots = tree.k_cmp.shape[2] if compressed else 0
    problem = Problem(
        batch=batch,
        kv_heads=kv_heads,
        dim=dim,
        rows=rows,
        block_size=geometry.block_size,
        stride=geometry.kernel_stride,
        kernel_size=geometry.kernel_size,
        window=geometry.window,
        union=schedule.blocks.shape[-1],
        slots=slots,
        scale=scale,
        splits=(config.selected, config.window, *((config.compressed,) if compressed else ())),
        stages=config.stages,
        fused=config.fused,
    )
    completions = tree.completions if compressed else None
    masks = pass_masks(queries, completions, geometry, rows)
    inputs = Inputs(
        q=q,
        k=cached.k,
        v=cached.v,
        tree_k=tree.k,
        tree_v=tree.v,
        length=queries.length,
        blocks=schedule.blocks,
        owners=schedule.owners,
        path=masks.path,
        block_columns=masks.block_columns,
        near_path=masks.near_path,
        window_below=masks.window_below,
        k_cmp=cached.k_cmp if compressed else None,
        v_cmp=cached.v_cmp if compressed else None,
        tree_k_cmp=tree.k_cmp if slots else None,
        tree_v_cmp=tree.v_cmp if slots else None,
        completed=masks.completed if slots else None,
    )
    branches = (1, 2, 0) if compressed else (1, 2)
    return launch(problem, inputs, gate_rows(gates, rows, branches), interpret=interpret)
