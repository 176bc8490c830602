"""The launch around `mosaic_attend`: jobs of a grid, shared memory, masks, and the sum of partial results."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..layout import TreeQueries
from ..sparse_verify.mosaic_attend import Barriers, Ring
from ..sparse_verify.mosaic_inline import store_partial
from ..sparse_verify.mosaic_rows import NOWHERE, ROWS, RowTiles, row_tiles, row_words, rows_of
from ..sparse_verify.mosaic_sum import PARAMETERS, add_partials
from .mosaic_attend import Attender, Inputs, Job, Problem, Roles, produce
from .tiles import MOST_PARTIALS, TileConfig

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
PLAIN = (plgpu.SwizzleTransform(128),)  # lies in memory like a tiled piece of 64 columns, and takes any row
F32 = jnp.float32
# Registers of a thread that copies, and of one that attends, by the number of attending warpgroups. There are 65,536: a
# thread block of two warpgroups in all needs no dividing.
REGISTERS = {2: (40, 232), 3: (32, 160)}


def masks(
    queries: TreeQueries, problem: Problem
) -> tuple[Int[Array, "B blocks 4"], Int[Array, "B tiles W 64"], Int[Array, "B tiles 64"] | None]:
    """`Inputs.bounds`, `words` and `below` of a pass; the same in every layer."""
    rows, window, tile = problem.rows, problem.window, problem.tile
    position = queries.position[:, -rows.nodes :]
    sees = queries.ancestor[:, -rows.nodes :]
    first = whole = jnp.zeros((position.shape[0], problem.blocks), jnp.int32)
    per_block = problem.warpgroups * rows.per_tile
    below = None
    # The last block repeats its last node.
    member = np.minimum(np.arange(problem.blocks * per_block), rows.nodes - 1).reshape(problem.blocks, per_block)
    if window is not None:
        sees &= queries.position[:, None] > position[:, :, None] - window
        low = position[:, member] - window + 1
        first, whole = jnp.maximum(low.min(2), 0), jnp.maximum(low.max(2), 0)
        node, valid = rows_of(rows.tiles, rows.per_tile, rows.heads, rows.nodes)
        below = jnp.where(jnp.asarray(valid), position[:, node] - window, NOWHERE).astype(jnp.int32)
    columns = jnp.arange(1, problem.tree + 1, dtype=jnp.int32)
    reach = jnp.where(sees, columns, 0).max(2)[:, member].max(2)  # columns up to the last that a row sees
    tiles = (reach + tile - 1) // tile
    words = row_words(sees, rows.tiles, rows.per_tile, rows.heads)
    words = jnp.pad(words, [(0, 0), (0, 0), (0, -words.shape[2] % problem.words), (0, 0)])
    return jnp.stack([first, whole, tiles, tiles], axis=2).astype(jnp.int32), words, below


def packed(q: Float[Array, "B T K G D"], rows: RowTiles) -> Float[Array, "B K R D"]:
    """Queries in the order of row tiles, each filled up to 64 rows."""
    batch, nodes, kv_heads, heads, dim = q.shape
    moved = jnp.moveaxis(q, 2, 1)
    moved = jnp.pad(moved, [(0, 0), (0, 0), (0, rows.tiles * rows.per_tile - nodes), (0, 0), (0, 0)])
    tiles = moved.reshape(batch, kv_heads, rows.tiles, rows.per_tile * heads, dim)
    tiles = jnp.pad(tiles, [(0, 0)] * 3 + [(0, ROWS - rows.per_tile * heads), (0, 0)])
    return tiles.reshape(batch, kv_heads, rows.tiles * ROWS, dim)


def _scratch(problem: Problem, dtype: Any, interpret: bool) -> tuple[list[Any], Any]:
    """Scratch types of the kernel, and the function that names what the body receives."""
    heads, stages, chunks, workers = problem.rows.heads, problem.stages, problem.chunks, problem.warpgroups

    def views(shape: tuple[int, ...], plain: tuple[int, ...]) -> Any:
        tiled = plgpu.SMEM(shape, dtype, transforms=TILED)
        if interpret:  # which keeps the members of a union apart
            return tiled
        return plgpu.RefUnion(tiled, plgpu.SMEM(plain, dtype, transforms=PLAIN))

    q_shape, kv_shape = (workers, ROWS, 64), (stages, problem.tile, 64)
    q_plain = q_shape if problem.packed else (workers, ROWS // heads, heads, 64)
    buffers = [views(q_shape, q_plain)] * chunks + [views(kv_shape, kv_shape)] * (2 * chunks)
    barriers = [
        plgpu.Barrier(num_arrivals=chunks, num_barriers=workers),
        plgpu.Barrier(num_arrivals=chunks, num_barriers=2 * stages),
        plgpu.Barrier(num_arrivals=workers, num_barriers=2 * stages),
    ]
    if problem.alternate:
        barriers.append(plgpu.Barrier(num_arrivals=workers))
    staging = [plgpu.SMEM((workers, ROWS, problem.tile), dtype, transforms=TILED)] if interpret else []

    def name(refs: Any) -> dict[str, Any]:
        refs = list(refs)
        named = [(x, x) if interpret else tuple(x) for x in refs[: 3 * chunks]]
        q_barriers, full, free, *rest = refs[3 * chunks :]
        k, v = named[chunks : 2 * chunks], named[2 * chunks :]
        return {
            "q": named[:chunks],
            "q_barriers": q_barriers,
            "ring": Ring(problem.tile, k, v, Barriers(full, 0), Barriers(full, stages)),
            "free": (Barriers(free, 0), Barriers(free, stages)),
            "staging": rest.pop() if interpret else None,
            "turn": rest[0] if problem.alternate else None,
        }

    return [*buffers, *barriers, *staging], name


def _copy_q(problem: Problem, q: Any, named: dict[str, Any], job: Job, tile: Any, w: Any) -> None:
    """Queries of a row tile: rows (node, head) of one KV head."""
    count, barrier = problem.rows.per_tile, named["q_barriers"].at[w]
    for chunk, (_, plain) in enumerate(named["q"]):
        columns = pl.ds(64 * chunk, 64)
        if problem.packed:
            plgpu.copy_gmem_to_smem(q.at[job.b, job.k, pl.ds(tile * ROWS, ROWS), columns], plain.at[w], barrier)
        else:
            source = q.at[job.b, pl.ds(tile * count, count), job.k, :, columns]
            plgpu.copy_gmem_to_smem(source, plain.at[w, pl.ds(0, count)], barrier)


def launch(problem: Problem, inputs: Inputs, *, dtype: DTypeLike, interpret: Any = None) -> Float[Array, "B T K G D"]:
    """Runs the kernels; the output is of the dtype."""
    fields = [f for f in Inputs.__dataclass_fields__ if getattr(inputs, f) is not None]
    scratch_types, name = _scratch(problem, inputs.q.dtype, interpret is not None)
    padded, workers, splits = problem.partials * ROWS, problem.warpgroups, problem.splits[0]
    copier, attender = REGISTERS.get(workers, (None, None))

    def body(*args: Any) -> None:
        refs = Inputs(**dict(zip(fields, args, strict=False)))
        partial_ref, stats_ref, *scratch = args[len(fields) :]
        named, w, j = name(scratch), lax.axis_index("wg"), lax.axis_index("j")
        split = lax.div(j, jnp.int32(problem.blocks))
        job = Job(b=lax.axis_index("b"), k=lax.axis_index("k"), block=j - split * problem.blocks, split=split)

        @pl.when(w == workers)
        def _copier() -> None:
            if copier is not None:
                plgpu.set_max_registers(copier, action="decrease")
            produce(problem, named["ring"], named["free"], refs, job)

        @pl.when(w < workers)
        def _attender() -> None:
            if attender is not None:
                plgpu.set_max_registers(attender, action="increase")
            roles = Roles(problem, job.block, w)

            @pl.when(roles.active)
            def _attend() -> None:
                _copy_q(problem, refs.q, named, job, roles.tile, w)
                plgpu.barrier_wait(named["q_barriers"].at[w])
                acc, top, norm = Attender(
                    problem,
                    refs,
                    job,
                    roles,
                    ring=named["ring"],
                    free=named["free"],
                    q=[tiled.at[w] for tiled, *_ in named["q"]],
                    turn=named["turn"],
                    w=w,
                    staging=None if named["staging"] is None else named["staging"].at[w],
                    dtype=inputs.q.dtype,
                ).run()
                head = job.b * problem.kv_heads + job.k
                used = jnp.int32(problem.rows.per_tile * problem.rows.heads)
                number = roles.tile * splits + split * roles.stride + roles.share
                first = (head * problem.jobs[0] + number) * ROWS
                store_partial(partial_ref, stats_ref, first, acc, top, norm, used, interpret=interpret is not None)

    body.__name__ = "dense_attention"
    partial, stats = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((padded, problem.dim), F32),
            jax.ShapeDtypeStruct((2, padded), F32),
        ],
        scratch_types=scratch_types,
        # Blocks that run side by side share a head's keys in the L2 cache.
        grid=(problem.batch, problem.kv_heads, problem.blocks * splits),
        grid_names=("b", "k", "j"),
        num_threads=workers + 1,
        thread_name="wg",
        compiler_params=PARAMETERS,
        interpret=interpret,
    )(*(getattr(inputs, f) for f in fields))
    return add_partials(problem, partial, stats, None, name="dense_combine", dtype=dtype, interpret=interpret)


def attention(
    q: Float[Array, "B T K G D"],
    k: Float[Array, "B K L D"],
    v: Float[Array, "B K L D"],
    tree_k: Float[Array, "B K X D"],
    tree_v: Float[Array, "B K X D"],
    queries: TreeQueries,
    *,
    scale: float,
    window: int | None,
    dtype: DTypeLike,
    config: TileConfig,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """Attention over the committed rows and each node's own path."""
    batch, nodes, kv_heads, heads, dim = q.shape
    rows = row_tiles(nodes, heads, min(ROWS // heads, nodes))
    workers, splits = config.warpgroups, config.splits
    alone = rows.tiles % workers == 1 and workers > 1
    problem = Problem(
        batch=batch,
        kv_heads=kv_heads,
        dim=dim,
        rows=rows,
        splits=(splits,),
        last=splits * workers if alone else splits,
        tree=tree_k.shape[2],
        window=window,
        scale=scale,
        tile=config.tile,
        stages=config.stages,
        warpgroups=workers,
        # One copy brings the rows of a tile where heads divide it; the interpreter knows no other shape of a buffer.
        packed=interpret is not None or ROWS % heads != 0,
        alternate=config.alternate and workers == 2 and rows.tiles % 2 == 0,
    )
    if problem.most_splits[0] > MOST_PARTIALS:
        raise ValueError(f"config: at most {MOST_PARTIALS} partial results of a row, got {problem.most_splits[0]}")
    if alone and config.stages % workers:
        raise ValueError(f"config: {workers} warpgroups need a multiple of that many stages, got {config.stages}")
    bounds, words, below = masks(queries, problem)
    inputs = Inputs(
        q=packed(q, rows) if problem.packed else q,
        k=k,
        v=v,
        tree_k=tree_k,
        tree_v=tree_v,
        length=queries.length,
        bounds=bounds,
        words=words,
        below=below,
    )
    return launch(problem, inputs, dtype=dtype, interpret=interpret)
