"""Float32 definition of the selected and window branches, block by block; plain, never optimised.

Each node walks its group's visit list in ascending order with a running softmax. A block that the node does not
own changes nothing, bit for bit, so grouped and ungrouped schedules give identical results.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from .schedule import MergedSchedule, owned_by

_START = -1e30  # a finite running maximum: a first tile that is masked whole must not give inf - inf


def _step(carry: tuple[Array, Array, Array], scores: Array, mask: Array, values: Array) -> tuple[Array, Array, Array]:
    """One tile of running softmax: scores and mask [..., G, X], values [..., X, D]."""
    top, total, acc = carry
    new_top = jnp.maximum(top, jnp.max(jnp.where(mask, scores, -jnp.inf), axis=-1))
    new_top = jnp.maximum(new_top, _START)
    p = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
    rescale = jnp.exp(top - new_top)
    # Multiply-and-sum instead of a matrix product: its order of additions does not depend on the row count.
    gained = jnp.sum(p[..., None] * values[..., None, :, :], axis=-2)
    return new_top, total * rescale + p.sum(-1), acc * rescale[..., None] + gained


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
    """Gated sum of the selected and the window branch."""
    batch, nodes, kv_heads, group, dim = q.shape
    size = geometry.block_size
    q32 = jnp.moveaxis(q, 1, 2).astype(jnp.float32)  # B K T G D
    length = queries.length
    tree_k, tree_v = (x.astype(jnp.float32)[:, :, None] for x in (tree.k, tree.v))
    tree_scores = jnp.einsum("bktgd,bkxd->bktgx", q32, tree_k[:, :, 0]) * scale
    tree_block = queries.position // size

    shape = (batch, kv_heads, nodes, group)
    start = (jnp.full(shape, _START), jnp.zeros(shape), jnp.zeros((*shape, dim)))
    part = jnp.arange(nodes) // schedule.group
    blocks = schedule.blocks[:, :, part]  # B K T U
    own = owned_by(schedule).reshape(batch, kv_heads, -1, schedule.blocks.shape[-1])[:, :, :nodes]
    rows = jnp.arange(size)
    paged = [x.astype(jnp.float32).reshape(batch, kv_heads, -1, size, dim) for x in (cached.k, cached.v)]

    def visit(slot: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        block = jnp.maximum(blocks[..., slot], 0)
        k, v = (jnp.take_along_axis(x, block[..., None, None], axis=2) for x in paged)  # B K T X D
        committed = block[..., None] * size + rows < length[:, None, None, None]
        mask = own[..., slot, None, None] & committed[..., None, :]
        scores = jnp.sum(q32[..., None, :] * k[..., None, :, :], axis=-1) * scale
        return _step(carry, scores, jnp.broadcast_to(mask, scores.shape), v)

    carry = jax.lax.fori_loop(0, schedule.blocks.shape[-1], visit, start)
    member = (blocks[..., None] == tree_block[:, None, None, None]) & own[..., None]  # B K T U X
    mask = member.any(3) & queries.ancestor[:, None]
    carry = _step(carry, tree_scores, jnp.broadcast_to(mask[:, :, :, None], tree_scores.shape), tree_v)
    selected = carry[2] / jnp.where(carry[1] == 0, 1, carry[1])[..., None]

    position = queries.position[:, None, :, None, None]
    row = jnp.arange(cached.capacity)
    mask = (row < length[:, None, None, None, None]) & (row > position - geometry.window)
    all_k, all_v = (x.astype(jnp.float32) for x in (cached.k, cached.v))
    scores = jnp.einsum("bktgd,bkxd->bktgx", q32, all_k) * scale
    carry = _step(start, scores, jnp.broadcast_to(mask, scores.shape), all_v[:, :, None])
    near = queries.position[:, None] > queries.position[:, :, None] - geometry.window
    mask = (queries.ancestor & near)[:, None, :, None]
    carry = _step(carry, tree_scores, jnp.broadcast_to(mask, tree_scores.shape), tree_v)
    window = carry[2] / jnp.where(carry[1] == 0, 1, carry[1])[..., None]

    gates = jnp.moveaxis(gates, 1, 2).astype(jnp.float32)
    return jnp.moveaxis(gates[..., 1:2] * selected + gates[..., 2:3] * window, 2, 1)
