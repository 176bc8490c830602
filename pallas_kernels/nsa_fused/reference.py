"""The three branches of a refresh and of a reuse layer, composed from the float32 reference ops."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..block_select import reference as select_ops
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from ..sparse_verify import reference as verify_ops
from ..sparse_verify.schedule import Selection, merge


def refresh_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
    group: int,
) -> tuple[Float[Array, "B T K G D"], Selection]:
    """All three branches, and the selection made on the way."""
    compressed, blocks = select_ops.block_select(q, cached, tree, queries, geometry=geometry, scale=scale)
    schedule = merge(blocks, group, cached.capacity // geometry.block_size)
    out = verify_ops.sparse_verify(q, cached, tree, queries, schedule, gates, geometry=geometry, scale=scale)
    out += gates[..., 0:1].astype(jnp.float32) * compressed
    return out, Selection(blocks=blocks, schedule=schedule)


def reuse_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    gates: Float[Array, "B T K G 3"],
    selection: Selection,
    *,
    geometry: Geometry,
    scale: float,
) -> Float[Array, "B T K G D"]:
    """All three branches under an inherited selection."""
    compressed = select_ops.compressed_attention(q, cached, tree, queries, geometry=geometry, scale=scale)
    out = verify_ops.sparse_verify(
        q, cached, tree, queries, selection.schedule, gates, geometry=geometry, scale=scale
    )
    return out + gates[..., 0:1].astype(jnp.float32) * compressed
