"""Masked softmax and query tiling that the portable implementations share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Shaped

# Scores of the largest intermediate stay below this many elements (float32: 256 MiB); longer calls run in tiles
# of queries, so memory grows with the cache and not with cache times prompt.
MAX_SCORE_ELEMENTS = 1 << 26


def einsum32(subscripts: str, a: Array, b: Array) -> Array:
    """Contraction of two arrays, accumulated in and returned as float32."""
    return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def masked_softmax(scores: Float[Array, "*dims S"], mask: Bool[Array, "*dims2 S"]) -> Float[Array, "*dims S"]:
    """Softmax over the last axis in float32; masked columns are exactly 0, and so is a row without columns."""
    floor = jnp.finfo(jnp.float32).min
    scores = jnp.where(mask, scores.astype(jnp.float32), floor)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(mask, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total == 0.0, 1.0, total)


def repeat_for_heads(mask: Bool[Array, "*dims C X"], heads: int) -> Bool[Array, "*dims R X"]:
    """Every node's mask row once for each of its heads: R = C * heads, heads fastest."""
    shape = (*mask.shape[:-1], heads, mask.shape[-1])
    repeated = jnp.broadcast_to(mask[..., None, :], shape)
    return repeated.reshape(*mask.shape[:-2], mask.shape[-2] * heads, mask.shape[-1])


def attend_cache_and_tree(
    q: Float[Array, "B K P R D"],
    k: Float[Array, "B K P X D"],
    v: Float[Array, "B K P X D"],
    tree_k: Float[Array, "B K T D"],
    tree_v: Float[Array, "B K T D"],
    mask: Bool[Array, "B K2 P R X"],
    tree_mask: Bool[Array, "B K2 P R T"],
    *,
    scale: float,
) -> Float[Array, "B K P R D"]:
    """R rows of P groups attend to their group's keys and to the tree's, under one softmax; float32 out.

    The masks' KV-head axis may be 1. Garbage keys must be masked, and garbage values finite.
    """
    keys = k.shape[3]
    scores = jnp.concatenate(
        [
            einsum32("bkprd,bkpxd->bkprx", q, k),
            einsum32("bkprd,bktd->bkprt", q, tree_k),
        ],
        axis=-1,
    )
    p = masked_softmax(scores * scale, jnp.concatenate([mask, tree_mask], axis=-1)).astype(v.dtype)
    out = einsum32("bkprx,bkpxd->bkprd", p[..., :keys], v)
    return out + einsum32("bkprt,bktd->bkprd", p[..., keys:], tree_v)


def map_query_tiles(function: Callable[..., Any], per_query_elements: int, *arrays: Shaped[Array, "B T ..."]) -> Any:
    """`function(*arrays)` over tiles of the T axis (axis 1 of arguments and results), one tile if it fits.

    Args:
      function: maps arrays with a T axis at 1 to a tree of arrays with a T axis at 1; rows are independent.
      per_query_elements: elements of the largest intermediate for one query row.
      arrays: the per-query arguments.
    """
    rows = arrays[0].shape[1]
    tile = max(1, MAX_SCORE_ELEMENTS // max(per_query_elements, 1))
    if rows <= tile:
        return function(*arrays)
    count = -(-rows // tile)
    tile = -(-rows // count)
    padding = count * tile - rows

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0), (0, padding)] + [(0, 0)] * (array.ndim - 2))
        tiles = padded.reshape(array.shape[0], count, tile, *array.shape[2:])
        return jnp.moveaxis(tiles, 1, 0)

    def join(tiles: Array) -> Array:
        moved = jnp.moveaxis(tiles, 0, 1)
        return moved.reshape(moved.shape[0], count * tile, *moved.shape[3:])[:, :rows]

    return jax.tree.map(join, jax.lax.map(lambda tiles: function(*tiles), tuple(map(split, arrays))))
