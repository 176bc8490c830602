"""The three branches of a refresh and of a reuse layer, composed from the portable ops."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ..block_select import xla as select_ops
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from ..sparse_verify import xla as verify_ops
from ..sparse_verify.schedule import Selection, merge
from ..sparse_verify.sharing import share


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
    shared: Bool[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "B T K G D"], Selection]:
    """All three branches, and the selection made on the way."""
    compressed, blocks = select_ops.block_select(q, cached, tree, queries, geometry=geometry, scale=scale)
    read = blocks
    if shared is not None:
        common = share(blocks, queries.position, queries.length, geometry=geometry, group=group)
        exact = jnp.pad(blocks, [(0, 0)] * 3 + [(0, common.shape[-1] - blocks.shape[-1])], constant_values=-1)
        read = jnp.where(shared, common, exact)
    schedule = merge(read, group, cached.capacity // geometry.block_size)
    out = verify_ops.sparse_verify(q, cached, tree, queries, schedule, gates, geometry=geometry, scale=scale)
    out += gates[..., 0:1].astype(jnp.float32) * compressed
    return out.astype(dtype), Selection(blocks=blocks, schedule=schedule)


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
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "B T K G D"]:
    """All three branches under an inherited selection."""
    compressed = select_ops.compressed_attention(q, cached, tree, queries, geometry=geometry, scale=scale)
    out = verify_ops.sparse_verify(q, cached, tree, queries, selection.schedule, gates, geometry=geometry, scale=scale)
    return (out + gates[..., 0:1].astype(jnp.float32) * compressed).astype(dtype)
