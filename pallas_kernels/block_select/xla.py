"""Portable compressed branch and block selection: exact, in tiles of queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from ..masking import einsum32, map_query_tiles, masked_softmax


def _attend(
    q: Float[Array, "B T K G D"],
    ancestor: Bool[Array, "B T T2"],
    cached: CachedKV,
    tree: TreeKV,
    length: Int[Array, " B"],
    geometry: Geometry,
    scale: float,
) -> tuple[Float[Array, "B T K G D"], Float[Array, "B K T N"], Float[Array, "B K T M"]]:
    """Output, and head-summed mass on committed and on completed entries."""
    entries = cached.k_cmp.shape[2]
    node = tree.completions.node
    old = jnp.arange(entries) < geometry.num_entries(length)[:, None]
    new = jnp.take_along_axis(ancestor, jnp.maximum(node, 0)[:, None], axis=2) & (node >= 0)[:, None]
    visible = jnp.concatenate([jnp.broadcast_to(old[:, None], (*new.shape[:2], entries)), new], axis=2)
    scores = jnp.concatenate(
        [
            einsum32("btkgd,bknd->bktgn", q, cached.k_cmp),
            einsum32("btkgd,bkmd->bktgm", q, tree.k_cmp),
        ],
        axis=-1,
    )
    p = masked_softmax(scores * scale, visible[:, None, :, None])
    p_old, p_new = p[..., :entries], p[..., entries:]
    dtype = cached.v_cmp.dtype
    # Transposed afterwards: XLA's CPU backend refuses bfloat16 products whose result has the batch axes apart.
    out = einsum32("bktgn,bknd->bktgd", p_old.astype(dtype), cached.v_cmp)
    out += einsum32("bktgm,bkmd->bktgd", p_new.astype(dtype), tree.v_cmp)
    return jnp.moveaxis(out, 1, 2), p_old.sum(3), p_new.sum(3)


def _select(
    mass_old: Float[Array, "B K T N"],
    mass_new: Float[Array, "B K T M"],
    position: Int[Array, "B T"],
    tree: TreeKV,
    capacity: int,
    geometry: Geometry,
) -> Int[Array, "B K T S"]:
    ratio = geometry.block_size // geometry.kernel_stride
    overlap = geometry.kernel_size // geometry.kernel_stride
    blocks = capacity // geometry.block_size
    entries = mass_old.shape[-1]
    # A row sees at most one completed entry per index, and none that is committed: adding is placing.
    target = jnp.where(tree.completions.node >= 0, tree.completions.entry, entries)
    mass = jax.vmap(lambda old, new, at: old.at[..., at].add(new, mode="drop"))(mass_old, mass_new, target)
    # Entry c touches blocks floor(c / r) ... floor((c + o - 1) / r): a sliding sum over o, then sums of r.
    padded = jnp.pad(mass, [(0, 0)] * 3 + [(overlap - 1, max(blocks * ratio - entries, 0))])
    width = blocks * ratio
    spread = jnp.stack([padded[..., shift : shift + width] for shift in range(overlap)]).sum(0)
    scores = spread.reshape(*spread.shape[:-1], blocks, ratio).sum(-1)

    own = (position // geometry.block_size)[:, None, :, None]
    index = jnp.arange(blocks)
    candidate = index <= own
    forced = (index < geometry.init_blocks) | (index > own - geometry.local_blocks)
    rank_by = jnp.where(candidate, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    value, chosen = jax.lax.top_k(rank_by, geometry.selection_width(capacity))  # ties: lower index first
    ascending = jnp.sort(jnp.where(value == -jnp.inf, blocks, chosen), axis=-1)
    return jnp.where(ascending == blocks, -1, ascending).astype(jnp.int32)


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

    def tile(q_tile: Array, ancestor: Array) -> Array:
        return _attend(q_tile, ancestor, cached, tree, queries.length, geometry, scale)[0]

    return map_query_tiles(tile, _row_elements(q, cached, tree), q, queries.ancestor)


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

    def tile(q_tile: Array, ancestor: Array, position: Array) -> tuple[Array, Array]:
        out, old, new = _attend(q_tile, ancestor, cached, tree, queries.length, geometry, scale)
        blocks = _select(old, new, position, tree, cached.capacity, geometry)
        return out, jnp.moveaxis(blocks, 2, 1)

    out, blocks = map_query_tiles(tile, _row_elements(q, cached, tree), q, queries.ancestor, queries.position)
    return out, jnp.moveaxis(blocks, 1, 2)


def _row_elements(q: Array, cached: CachedKV, tree: TreeKV) -> int:
    batch, _, kv_heads, group, _ = q.shape
    return batch * kv_heads * group * (cached.k_cmp.shape[2] + tree.k_cmp.shape[2])
