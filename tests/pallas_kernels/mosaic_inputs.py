"""Random passes for the Hopper kernels, with poison wherever nothing may be read."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax.pallas_kernels import (
    CachedKV,
    Geometry,
    Selection,
    TreeKV,
    TreeQueries,
    completions,
    merge,
)

POISON = 3e4  # the largest that float16 holds, nearly


def op_module(name: str) -> Any:
    """A module of an op: the functions of the package have the names of its folders."""
    return importlib.import_module(f"ssv_jax.pallas_kernels.{name}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Arguments of the fused layers."""

    q: jax.Array
    cached: CachedKV
    tree: TreeKV
    queries: TreeQueries
    gates: jax.Array
    selection: Selection
    geometry: Geometry = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})


def make_call(work: Any, seed: int = 0) -> Call:
    """Random queries, keys, values, tree and selection of a workload; forced blocks are always selected."""
    rng = np.random.default_rng(seed)
    geometry = Geometry(
        kernel_size=work.kernel_size,
        kernel_stride=work.kernel_stride,
        block_size=work.block_size,
        n_blocks=work.n_blocks,
        init_blocks=1,
        local_blocks=1,
        window=work.window,
    )
    batch, nodes = len(work.lengths), work.nodes
    length = np.array(work.lengths, np.int32)
    parent = np.full((batch, nodes), -1, np.int32)
    depth = np.zeros((batch, nodes), np.int32)
    ancestor = np.broadcast_to(np.eye(nodes, dtype=bool), (batch, nodes, nodes)).copy()
    for b, node in np.ndindex(batch, nodes):
        if node:
            parent[b, node] = node - 1 if work.chain else rng.integers(0, node)
            depth[b, node] = depth[b, parent[b, node]] + 1
            ancestor[b, node] |= ancestor[b, parent[b, node]]
    queries = TreeQueries(
        length=jnp.asarray(length),
        position=jnp.asarray(length[:, None] + depth),
        ancestor=jnp.asarray(ancestor),
        parent=jnp.asarray(parent),
    )

    def array(rows: int, valid: Any = None, sign: float = 1.0) -> jax.Array:
        x = rng.standard_normal((batch, work.kv_heads, rows, work.dim))
        for b in range(batch):
            if valid is not None:
                x[b, :, valid[b] :] = sign * POISON
        return jnp.asarray(x, work.dtype)

    entries = max(geometry.entries(work.capacity), 1)
    seen = [geometry.entries(int(n)) for n in length]
    cached = CachedKV(
        k=array(work.capacity, length),
        v=array(work.capacity, length, -1),
        k_cmp=array(entries, seen, -1),
        v_cmp=array(entries, seen),
    )
    completed = completions(queries, geometry)
    tree = TreeKV(
        k=array(nodes),
        v=array(nodes),
        k_cmp=array(nodes),
        v_cmp=array(nodes),
        completions=completed,
    )
    blocks = work.capacity // work.block_size
    slots = min(work.n_blocks, blocks)
    chosen = np.full((batch, work.kv_heads, nodes, slots), -1, np.int32)
    for b, head, node in np.ndindex(batch, work.kv_heads, nodes):
        own = min((length[b] + depth[b, node]) // work.block_size, blocks - 1)
        rest = rng.permutation(own)
        found = np.sort(np.append(rest[: slots - 1], own))
        chosen[b, head, node, : len(found)] = found
    schedule = merge(jnp.asarray(chosen), work.group, blocks)
    heads = (batch, nodes, work.kv_heads, work.heads)
    return Call(
        q=jnp.asarray(rng.standard_normal((*heads, work.dim)), work.dtype),
        cached=cached,
        tree=tree,
        queries=queries,
        gates=jnp.asarray(rng.uniform(0.1, 1, (*heads, 3)), jnp.float32),
        selection=Selection(blocks=jnp.asarray(chosen), schedule=schedule),
        geometry=geometry,
        scale=work.dim**-0.5,
    )


def abstract_call(work: Any) -> Call:
    """Shapes of a workload, without its memory."""
    few = dataclasses.replace(work, capacity=work.block_size * work.n_blocks, lengths=(work.block_size,))
    call = make_call(few)
    geometry = call.geometry
    entries = geometry.entries(work.capacity)

    def widened(call: Call) -> Call:
        def rows(x: jax.Array, count: int) -> jax.Array:
            return jnp.zeros((*x.shape[:2], count, x.shape[3]), x.dtype)

        old, schedule = call.cached, call.selection.schedule
        cached = CachedKV(
            k=rows(old.k, work.capacity),
            v=rows(old.v, work.capacity),
            k_cmp=rows(old.k_cmp, entries),
            v_cmp=rows(old.v_cmp, entries),
        )
        width = min(work.n_blocks * work.group, work.capacity // work.block_size)
        wide = jnp.zeros((*schedule.blocks.shape[:3], width), jnp.int32)
        schedule = dataclasses.replace(schedule, blocks=wide, owners=wide)
        selection = dataclasses.replace(call.selection, schedule=schedule)
        return dataclasses.replace(call, cached=cached, selection=selection)

    return jax.eval_shape(widened, call)


def relative_error(got: Any, want: Any) -> float:
    """In Euclidean norm; NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = np.linalg.norm(got - want) / np.linalg.norm(want)
    return float(error) if np.isfinite(error) else float("inf")
