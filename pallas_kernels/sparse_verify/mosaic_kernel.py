"""The launch around `mosaic_attend`: jobs of a grid, partial results, and the sum over branches and splits.

Blocks leave (maximum, sum, accumulator) in global memory, for `mosaic_sum`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from .mosaic_attend import Barriers, Job, Keys, Ring, attend, locate, pick
from .mosaic_combine import LANES
from .mosaic_inline import store_partial
from .mosaic_problem import SELECTED, Inputs, Problem
from .mosaic_rows import ROWS, pass_masks, row_tiles
from .mosaic_sum import PARAMETERS, add_partials
from .schedule import MergedSchedule
from .tiles import TileConfig

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
PLAIN = (plgpu.SwizzleTransform(128),)
F32 = jnp.float32


def _copy_q(problem: Problem, q: Any, target: list[Any], barrier: Any, job: Job, interpret: bool) -> None:
    """Queries of a row tile: rows (node, head) of one KV head; always as many as a dense tile has."""
    heads, count = problem.rows.heads, problem.rows.per_dense
    first = job.tile * jnp.where(job.branch == SELECTED, problem.rows.per_tile, count)
    for chunk in range(problem.chunks):
        columns = pl.ds(64 * chunk, 64)
        if interpret:  # the interpreter keeps the two views apart
            for node in range(count):
                at = jnp.minimum(first + node, problem.rows.nodes - 1)
                plgpu.copy_gmem_to_smem(
                    q.at[job.b, at, job.k, :, columns], target[chunk][0].at[pl.ds(node * heads, heads)], barrier
                )
        else:
            plgpu.copy_gmem_to_smem(
                q.at[job.b, pl.ds(first, count), job.k, :, columns], target[chunk][1].at[pl.ds(0, count)], barrier
            )


def _scratch(problem: Problem, dtype: Any, interpret: bool) -> tuple[list[Any], Any]:
    """Scratch types of the kernel, and the function that names what the body receives."""
    rows, stages, chunks = problem.rows, problem.stages, problem.chunks
    tiled_q = plgpu.SMEM((ROWS, 64), dtype, transforms=TILED)
    plain_q = plgpu.SMEM((ROWS // rows.heads, rows.heads, 64), dtype, transforms=PLAIN)
    tiled = plgpu.SMEM((stages, ROWS, 64), dtype, transforms=TILED)
    plain = plgpu.SMEM((stages, ROWS, 64), dtype, transforms=PLAIN)
    arrivals = chunks * problem.pieces
    barriers = [plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * stages)]
    if interpret:
        buffers = [tiled_q] * chunks + [tiled] * (2 * chunks)
        barriers.append(plgpu.Barrier(num_arrivals=chunks * rows.per_dense))
        last = [plgpu.SMEM((ROWS, ROWS), dtype, transforms=TILED)]
    else:
        buffers = [plgpu.RefUnion(tiled_q, plain_q)] * chunks + [plgpu.RefUnion(tiled, plain)] * (2 * chunks)
        if arrivals == chunks:
            barriers = [plgpu.Barrier(num_arrivals=arrivals, num_barriers=2 * stages + 1)]
        else:
            barriers.append(plgpu.Barrier(num_arrivals=chunks))
        last = []

    def name(refs: Any) -> dict[str, Any]:
        refs = list(refs)
        views = [(x, x) if interpret else tuple(x) for x in refs[: 3 * chunks]]
        array, *rest = refs[3 * chunks :]
        named: dict[str, Any] = {"q": views[:chunks], "p": rest.pop() if interpret else None}
        named["q_barrier"] = rest[0] if rest else array.at[2 * stages]
        k_barriers, v_barriers = Barriers(array, 0), Barriers(array, stages)
        named["ring"] = Ring(
            problem.block_size, views[chunks : 2 * chunks], views[2 * chunks :], k_barriers, v_barriers
        )
        return named

    return [*buffers, *barriers, *last], name


def launch(
    problem: Problem,
    inputs: Inputs,
    gates: Float[Array, "B T K G 3"],
    *,
    added: Array | None = None,
    dtype: DTypeLike = F32,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """Runs the kernels."""
    rows = problem.rows
    fields = [f for f in Inputs.__dataclass_fields__ if getattr(inputs, f) is not None]
    arrays = [getattr(inputs, f) for f in fields]
    scratch_types, name = _scratch(problem, inputs.q.dtype, interpret is not None)
    padded = problem.partials * ROWS
    partial_type = jax.ShapeDtypeStruct((padded, problem.dim), F32)
    stats_type = jax.ShapeDtypeStruct((2, padded), F32)
    # Barriers are explicit: every copy into a slot comes after a `sync` that follows its last use.
    options = {"compiler_params": PARAMETERS, "interpret": interpret}
    grid = {"grid": (sum(problem.jobs), problem.kv_heads, problem.batch), "grid_names": ("j", "k", "b")}

    def partials(*args: Any) -> None:
        refs = Inputs(**dict(zip(fields, args, strict=False)))
        partial_ref, stats_ref, *scratch = args[len(fields) :]
        named = name(scratch)
        job = locate(problem, lax.axis_index("b"), lax.axis_index("k"), lax.axis_index("j"))
        _copy_q(problem, refs.q, named["q"], named["q_barrier"], job, interpret is not None)
        keys = Keys(problem, refs, job, interpret is not None)
        q = [tiled for tiled, *_ in named["q"]]
        acc, top, norm = attend(problem, named["ring"], q, named["q_barrier"], named["p"], keys, inputs.q.dtype)
        head = job.b * problem.kv_heads + job.k
        starts = [problem.first_partial(n) + head * count for n, count in enumerate(problem.jobs)]
        first = (pick(job.branch, starts) + job.number) * ROWS
        used = jnp.where(job.branch == SELECTED, rows.per_tile, rows.per_dense) * rows.heads
        store_partial(partial_ref, stats_ref, first, acc, top, norm, used, interpret=interpret is not None)

    partials.__name__ = "sparse_attention"
    split = plgpu.kernel(partials, out_type=[partial_type, stats_type], scratch_types=scratch_types, **grid, **options)
    partial, stats = split(*arrays)
    return add_partials(
        problem, partial, stats, gates, name="sparse_combine", added=added, dtype=dtype, interpret=interpret
    )


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
    added: Float[Array, "B T K G D"] | None = None,
    dtype: DTypeLike = F32,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """Selected and window branch, and the compressed one: computed if asked for, or as another launch `added` it."""
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
        last=min(config.last or config.selected, config.selected),
        stages=config.stages,
    )
    if sum(problem.splits) > LANES:
        raise ValueError(f"config: at most {LANES} splits of all branches, got {problem.splits}")
    masks = pass_masks(queries, tree.completions if compressed else None, geometry, rows)
    inputs = Inputs(
        q=q,
        k=cached.k,
        v=cached.v,
        tree_k=tree.k,
        tree_v=tree.v,
        length=queries.length,
        blocks=schedule.blocks,
        owners=schedule.owners,
        words=masks.words,
        below=masks.below,
        block_columns=masks.block_columns,
        tree_range=masks.tree_range if max(problem.tree_tiles) > 1 else None,
        k_cmp=cached.k_cmp if compressed else None,
        v_cmp=cached.v_cmp if compressed else None,
        tree_k_cmp=tree.k_cmp if slots else None,
        tree_v_cmp=tree.v_cmp if slots else None,
    )
    return launch(problem, inputs, gates.astype(F32), added=added, dtype=dtype, interpret=interpret)
