"""Approximate shared selections, and the overlap that says whether sharing is worth it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..layout import Geometry


def _forced(position: Int[Array, "B T"], geometry: Geometry) -> Int[Array, "B 1 T F"]:
    """Blocks that every node selects by its position, -1 where they do not exist."""
    own = (position // geometry.block_size)[:, None, :, None]
    first = jnp.arange(geometry.init_blocks)
    local = own - jnp.arange(geometry.local_blocks)
    first = jnp.where((first <= own) & (first <= own - geometry.local_blocks), first, -1)
    return jnp.concatenate([first, jnp.maximum(local, -1)], axis=-1)


def _ascending(blocks: Int[Array, "... S"], width: int) -> Int[Array, "... W"]:
    """Distinct non-negative blocks in ascending order, -1 padded to `width`."""
    big = jnp.iinfo(jnp.int32).max
    ordered = jnp.sort(jnp.where(blocks < 0, big, blocks), axis=-1)
    again = jnp.concatenate([jnp.zeros_like(ordered[..., :1], bool), ordered[..., 1:] == ordered[..., :-1]], -1)
    ordered = jnp.sort(jnp.where(again, big, ordered), axis=-1)[..., :width]
    ordered = jnp.pad(ordered, [(0, 0)] * (ordered.ndim - 1) + [(0, width - ordered.shape[-1])], constant_values=big)
    return jnp.where(ordered == big, -1, ordered)


def share(
    blocks: Int[Array, "B K T S"],
    position: Int[Array, "B T"],
    length: Int[Array, " B"],
    *,
    geometry: Geometry,
    group: int,
) -> Int[Array, "B K T S2"]:
    """Every node of a group reads the free blocks of the group's first node.

    Node q reads (J intersected with blocks up to its own) united with its forced blocks, where J is the first
    node's selection without blocks that reach past the committed length. Self, recency and causality so hold for
    every node; only free blocks are shared.

    Args:
      blocks: exact selections.
      position: of the nodes, in the order that groups follow.
      length: committed tokens.
      geometry: static sizes.
      group: nodes per group.

    Returns:
      Selections with S + init_blocks + local_blocks slots, ascending, -1 padded.
    """
    size = geometry.block_size
    nodes = blocks.shape[2]
    first = blocks[:, :, (jnp.arange(nodes) // group) * group]
    committed = (first + 1) * size <= length[:, None, None, None]
    causal = first <= (position // size)[:, None, :, None]
    kept = jnp.where(committed & causal, first, -1)
    forced = jnp.broadcast_to(
        _forced(position, geometry), (*kept.shape[:3], geometry.init_blocks + geometry.local_blocks)
    )
    both = jnp.concatenate([kept, forced], axis=-1)
    return _ascending(both, both.shape[-1])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Overlap:
    """Sums over pairs of nodes, KV heads and sequences; divide by `count`.

    Args:
      raw: |I & I'| / min(|I|, |I'|) of consecutive nodes.
      free: the same without forced blocks (1 where neither has a free block).
      group: |I_first & I| / |I| of each node and its group's first.
      count, group_count: terms of the sums.
    """

    raw: Float[Array, ""]
    free: Float[Array, ""]
    group: Float[Array, ""]
    count: Float[Array, ""]
    group_count: Float[Array, ""]


def overlap(
    blocks: Int[Array, "B K T S"],
    position: Int[Array, "B T"],
    valid: Bool[Array, "B T"],
    *,
    geometry: Geometry,
    group: int,
) -> Overlap:
    """How much the selections of neighbouring nodes agree.

    Args:
      blocks: exact selections.
      position: of the nodes.
      valid: nodes that count.
      geometry: static sizes.
      group: nodes per group, for the overlap with the group's first.
    """
    nodes = blocks.shape[2]
    index = jnp.arange(nodes)

    def shared(a: Array, b: Array) -> Array:
        return ((a[..., :, None] == b[..., None, :]) & (a[..., :, None] >= 0)).any(-1).sum(-1)

    def size(a: Array) -> Array:
        return (a >= 0).sum(-1)

    forced = (blocks[..., None] == _forced(position, geometry)[..., None, :]).any(-1)
    free = jnp.where(forced, -1, blocks)
    heads = blocks.shape[1]

    def ratio(part: Array, whole: Array) -> Array:
        return jnp.where(whole == 0, 1.0, part / jnp.maximum(whole, 1))

    previous = jnp.maximum(index - 1, 0)
    pair = (valid & valid[:, previous] & (index > 0))[:, None]
    raw = ratio(shared(blocks, blocks[:, :, previous]), jnp.minimum(size(blocks), size(blocks[:, :, previous])))
    loose = ratio(shared(free, free[:, :, previous]), jnp.minimum(size(free), size(free[:, :, previous])))
    leader = (index // group) * group
    member = (valid & (index != leader))[:, None]
    led = ratio(shared(blocks, blocks[:, :, leader]), size(blocks))

    def total(x: Array, mask: Array) -> Array:
        return jnp.where(mask, x, 0.0).sum().astype(jnp.float32)

    return Overlap(
        raw=total(raw, pair),
        free=total(loose, pair),
        group=total(led, member),
        count=(pair.sum() * heads).astype(jnp.float32),
        group_count=(member.sum() * heads).astype(jnp.float32),
    )
