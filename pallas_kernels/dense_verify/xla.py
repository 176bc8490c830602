"""Portable dense or windowed attention over a tree of queries, in tiles of queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..layout import TreeQueries
from ..masking import attend_cache_and_tree, map_query_tiles, repeat_for_heads


def dense_verify(
    q: Float[Array, "B T K G D"],
    k: Float[Array, "B K L D"],
    v: Float[Array, "B K L D"],
    tree_k: Float[Array, "B K X D"],
    tree_v: Float[Array, "B K X D"],
    queries: TreeQueries,
    *,
    scale: float,
    window: int | None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "B T K G D"]:
    """Every node attends to the committed rows in reach and to its own path, under one softmax."""
    batch, asked, kv_heads, heads, dim = q.shape
    nodes = tree_k.shape[2]
    capacity = k.shape[2]
    reach = capacity + nodes if window is None else window
    width = min(reach, capacity)
    start = jnp.clip(queries.length - reach + 1, 0, capacity - width)

    def near(x: Array) -> Array:
        if width == capacity:
            return x
        return jax.vmap(lambda rows, at: jax.lax.dynamic_slice_in_dim(rows, at, width, axis=1))(x, start)

    k, v = (near(x)[:, :, None] for x in (k, v))
    row = start[:, None] + jnp.arange(width)  # B X
    readable = row < queries.length[:, None]

    def tile(q_tile: Array, position: Array, ancestor: Array) -> Array:
        count = q_tile.shape[1]
        first = position[..., None] - reach
        mask = readable[:, None] & (row[:, None] > first)
        tree_mask = ancestor & (queries.position[:, None] > first)
        rows = jnp.moveaxis(q_tile, 1, 2).reshape(batch, kv_heads, 1, count * heads, dim)
        masks = (repeat_for_heads(x, heads)[:, None, None] for x in (mask, tree_mask))
        out = attend_cache_and_tree(rows, k, v, tree_k, tree_v, *masks, scale=scale)
        return jnp.moveaxis(out.reshape(batch, kv_heads, count, heads, dim), 2, 1)

    elements = batch * kv_heads * heads * (width + nodes)
    return map_query_tiles(tile, elements, q, queries.position[:, -asked:], queries.ancestor[:, -asked:]).astype(dtype)
