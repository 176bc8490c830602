"""Float32 definition of dense (optionally windowed) attention over a tree of queries; plain, never optimised."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..layout import TreeQueries


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
    """Every node attends to the committed rows and to its own path, under one softmax."""
    reach = k.shape[2] + tree_k.shape[2] if window is None else window
    keys, values = (jnp.concatenate([old, new], axis=2).astype(jnp.float32) for old, new in ((k, tree_k), (v, tree_v)))
    asked = q.shape[1]  # the last nodes
    first = queries.position[:, -asked:, None] - reach  # B T 1
    row = jnp.arange(k.shape[2])
    old = (row < queries.length[:, None, None]) & (row > first)
    new = queries.ancestor[:, -asked:] & (queries.position[:, None] > first)
    mask = jnp.concatenate([old, new], axis=-1)[:, None, :, None]
    scores = jnp.einsum("btkgd,bkxd->bktgx", q.astype(jnp.float32), keys) * scale
    scores = jnp.where(mask, scores, -jnp.inf)
    weights = jnp.exp(scores - scores.max(-1, keepdims=True))
    values = jnp.where(mask.any((1, 2, 3))[:, None, :, None], values, 0.0)
    return jnp.einsum("bktgx,bkxd->btkgd", weights / weights.sum(-1, keepdims=True), values).astype(dtype)
