"""Float32 definition of the compressed branch and block selection; plain, never optimised.

Native Sparse Attention, arXiv 2502.11089, sections 3.3.1 and 3.3.2; over a tree of queries, every node sees the
committed entries and those that its own path completes.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ..layout import CachedKV, Geometry, TreeKV, TreeQueries


def _visible(cached: CachedKV, tree: TreeKV, queries: TreeQueries, geometry: Geometry) -> Bool[Array, "B T E"]:
    """Which of the committed and completed entries each node sees."""
    count = geometry.num_entries(queries.length)
    index = jnp.arange(cached.k_cmp.shape[2])
    old = jnp.broadcast_to(index < count[:, None, None], (*queries.position.shape, cached.k_cmp.shape[2]))
    node = tree.completions.node
    new = jnp.take_along_axis(queries.ancestor, jnp.maximum(node, 0)[:, None], axis=2)
    return jnp.concatenate([old, new & (node >= 0)[:, None]], axis=2)


def _probabilities(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    geometry: Geometry,
    scale: float,
) -> tuple[Float[Array, "B K T G E"], Float[Array, "B K E D"]]:
    keys = jnp.concatenate([cached.k_cmp, tree.k_cmp], axis=2).astype(jnp.float32)
    values = jnp.concatenate([cached.v_cmp, tree.v_cmp], axis=2).astype(jnp.float32)
    visible = _visible(cached, tree, queries, geometry)[:, None, :, None]
    scores = jnp.einsum("btkgd,bked->bktge", q.astype(jnp.float32), keys) * scale
    scores = jnp.where(visible, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(visible, jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0)), 0.0)
    total = weights.sum(-1, keepdims=True)
    # Garbage rows carry weight 0, but 0 * inf is not 0: drop their values too.
    values = jnp.where(visible.any((1, 2, 3))[:, None, :, None], values, 0.0)
    return weights / jnp.where(total == 0, 1, total), values


def compressed_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
) -> Float[Array, "B T K G D"]:
    """Attention over compressed entries; 0 for a node that sees none."""
    p, values = _probabilities(q, cached, tree, queries, geometry, scale)
    return jnp.einsum("bktge,bked->btkgd", p, values)


def block_select(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
) -> tuple[Float[Array, "B T K G D"], Int[Array, "B K T S"]]:
    """The compressed branch's output and the blocks that each node selects, ascending, -1 padded."""
    p, values = _probabilities(q, cached, tree, queries, geometry, scale)
    out = jnp.einsum("bktge,bked->btkgd", p, values)

    mass = p.sum(axis=3)  # head-summed, B K T E
    entries = cached.k_cmp.shape[2]
    entry_of = jnp.concatenate(
        [jnp.broadcast_to(jnp.arange(entries), (q.shape[0], entries)), tree.completions.entry], axis=1
    )
    blocks = cached.capacity // geometry.block_size
    ratio = geometry.block_size // geometry.kernel_stride
    overlap = geometry.kernel_size // geometry.kernel_stride
    weight = np.zeros((entries, blocks), np.float32)
    for block in range(blocks):
        for m in range(ratio):
            for e in range(overlap):
                entry = ratio * block + m + e - (overlap - 1)
                if 0 <= entry < entries:
                    weight[entry, block] += 1
    scores = jnp.einsum("bkte,beu->bktu", mass, jnp.asarray(weight)[entry_of])

    own = queries.position // geometry.block_size  # B T
    index = jnp.arange(blocks)
    candidate = index <= own[..., None]
    local = index > own[..., None] - geometry.local_blocks
    forced = candidate & ((index < geometry.init_blocks) | local)
    rank_by = jnp.where(forced[:, None], jnp.inf, scores)
    rank_by = jnp.where(candidate[:, None], rank_by, -jnp.inf)
    order = jnp.argsort(-rank_by, axis=-1, stable=True)[..., : geometry.selection_width(cached.capacity)]
    chosen = jnp.take_along_axis(jnp.broadcast_to(candidate[:, None], rank_by.shape), order, axis=-1)
    ascending = jnp.sort(jnp.where(chosen, order, blocks), axis=-1)
    return out, jnp.where(ascending == blocks, -1, ascending).astype(jnp.int32)
