"""Portable selected and window branches: gathers the merged blocks, or masks the cache where that is cheaper."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..dense_verify.xla import dense_verify
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from ..masking import attend_cache_and_tree, map_query_tiles, repeat_for_heads
from .schedule import MergedSchedule, owned_by

# Masking reads the whole cache once; gathering copies the union of every group first. Copies cost a few times
# what masked scores do (two CPU cores), so the cache must be this much longer than the union to be worth it.
GATHER_RATIO = 4


def selected_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    schedule: MergedSchedule,
    *,
    geometry: Geometry,
    scale: float,
) -> Float[Array, "B T K G D"]:
    """The selected branch, ungated, in float32."""
    batch, nodes, kv_heads, heads, dim = q.shape
    size, count = geometry.block_size, schedule.group
    parts = schedule.blocks.shape[2]
    width = schedule.blocks.shape[3]
    own = owned_by(schedule)  # B K P C U
    tree_block = queries.position // size
    in_tree = ((schedule.blocks[..., None, :, None] == tree_block[:, None, None, None, None]) & own[..., None]).any(
        -2
    )  # B K P C T
    pad = parts * count - nodes
    ancestor = jnp.pad(queries.ancestor, [(0, 0), (0, pad), (0, 0)]).reshape(batch, 1, parts, count, nodes)
    in_tree &= ancestor
    rows = jnp.pad(q, [(0, 0), (0, pad), (0, 0), (0, 0), (0, 0)])
    rows = jnp.moveaxis(rows.reshape(batch, parts, count, kv_heads, heads, dim), 3, 1)
    rows = rows.reshape(batch, kv_heads, parts, count * heads, dim)
    gather = cached.capacity > GATHER_RATIO * width * size
    paged_k, paged_v = (x.reshape(batch, kv_heads, -1, size, dim) for x in (cached.k, cached.v))
    committed = jnp.arange(cached.capacity) < queries.length[:, None]  # B L
    attend = functools.partial(attend_cache_and_tree, tree_k=tree.k, tree_v=tree.v, scale=scale)

    def tile(q_tile: Array, blocks: Array, owns: Array, tree_mask: Array) -> Array:
        q_tile, blocks, owns, tree_mask = (jnp.moveaxis(x, 1, 2) for x in (q_tile, blocks, owns, tree_mask))
        groups = blocks.shape[2]
        if gather:
            at = jnp.maximum(blocks, 0).reshape(batch, kv_heads, groups * width)
            k, v = (
                jnp.take_along_axis(x, at[..., None, None], axis=2).reshape(batch, kv_heads, groups, width * size, dim)
                for x in (paged_k, paged_v)
            )
            row = blocks[..., None] * size + jnp.arange(size)
            readable = (row < queries.length[:, None, None, None, None]).reshape(
                batch, kv_heads, groups, 1, width * size
            )
            mask = jnp.repeat(owns, size, axis=-1) & readable
            return jnp.moveaxis(
                attend(
                    q_tile,
                    k,
                    v,
                    mask=repeat_for_heads(mask, heads),
                    tree_mask=repeat_for_heads(tree_mask, heads),
                ),
                2,
                1,
            )
        every = jnp.arange(cached.capacity // size)
        hit = (blocks[..., None, :, None] == every) & owns[..., None]  # B K P C U NB
        mask = jnp.repeat(hit.any(-2), size, axis=-1) & committed[:, None, None, None]

        def flat(x: Array) -> Array:
            return x.reshape(batch, kv_heads, 1, groups * x.shape[3], x.shape[4])

        out = attend(
            flat(q_tile),
            cached.k[:, :, None],
            cached.v[:, :, None],
            mask=flat(repeat_for_heads(mask, heads)),
            tree_mask=flat(repeat_for_heads(tree_mask, heads)),
        )
        return jnp.moveaxis(out.reshape(q_tile.shape), 2, 1)

    keys = width * size if gather else cached.capacity
    per_group = batch * kv_heads * keys * (max(count * heads, 2 * dim) if gather else count * heads)
    out = map_query_tiles(
        tile, per_group, *(jnp.moveaxis(x, 2, 1) for x in (rows, schedule.blocks, own, in_tree))
    )  # B P K R D
    out = jnp.moveaxis(out.reshape(batch, parts, kv_heads, count, heads, dim), 2, 3)
    return out.reshape(batch, parts * count, kv_heads, heads, dim)[:, :nodes]


def sparse_verify(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    schedule: MergedSchedule,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
) -> Float[Array, "B T K G D"]:
    """Gated sum of the selected and the window branch, in float32."""
    selected = selected_attention(q, cached, tree, queries, schedule, geometry=geometry, scale=scale)
    window = dense_verify(q, cached.k, cached.v, tree.k, tree.v, queries, scale=scale, window=geometry.window)
    gates = gates.astype(jnp.float32)
    return gates[..., 1:2] * selected + gates[..., 2:3] * window
