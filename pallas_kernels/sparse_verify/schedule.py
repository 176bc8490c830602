"""Merged schedules: the union of the blocks that a group of queries selected, each visited once."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

MAX_GROUP = 32  # an ownership mask is one int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MergedSchedule:
    """Visit lists of groups of C consecutive nodes (the last group may be short).

    Args:
      blocks: distinct selected blocks of the group, ascending, -1 padded at the end, U = min(C * S, blocks).
      owners: bit c says that the group's node c selected the block; 0 where padded.
      group: C, static.
    """

    blocks: Int[Array, "B K P U"]
    owners: Int[Array, "B K P U"]
    group: int = dataclasses.field(metadata={"static": True})


def check_group(group: int) -> None:
    """Raises ValueError unless an ownership mask holds `group` nodes."""
    if not 1 <= group <= MAX_GROUP:
        raise ValueError(f"group must be between 1 and {MAX_GROUP}, got {group}")


def merge(selected: Int[Array, "B K T S"], group: int, num_blocks: int) -> MergedSchedule:
    """The exact merged schedule: every node reads precisely the blocks that it selected.

    Args:
      selected: blocks per node, -1 padded.
      group: nodes per group, 1 to 32.
      num_blocks: blocks in the cache, a bound on the union.

    Raises:
      ValueError: group out of range.
    """
    check_group(group)
    batch, kv_heads, nodes, slots = selected.shape
    parts = -(-nodes // group)
    padded = jnp.pad(selected, [(0, 0), (0, 0), (0, parts * group - nodes), (0, 0)], constant_values=-1)
    grouped = padded.reshape(batch, kv_heads, parts, group, slots)
    width = min(group * slots, num_blocks)

    flat = jnp.sort(jnp.where(grouped < 0, num_blocks, grouped).reshape(batch, kv_heads, parts, group * slots), axis=-1)
    first = jnp.concatenate([jnp.ones_like(flat[..., :1], bool), flat[..., 1:] != flat[..., :-1]], axis=-1)
    first &= flat < num_blocks
    slot = jnp.where(first, jnp.cumsum(first, axis=-1) - 1, width)
    empty = jnp.full((batch, kv_heads, parts, width), -1, jnp.int32)
    where = jnp.meshgrid(*(jnp.arange(n) for n in (batch, kv_heads, parts)), indexing="ij")
    blocks = empty.at[(*(index[..., None] for index in where), slot)].set(flat, mode="drop")

    owned = (grouped[..., None] == blocks[..., None, None, :]).any(-2) & (blocks >= 0)[..., None, :]
    bits = jnp.left_shift(jnp.int32(1), jnp.arange(group, dtype=jnp.int32))
    owners = jnp.sum(jnp.where(owned, bits[:, None], 0), axis=-2, dtype=jnp.int32)
    return MergedSchedule(blocks=blocks, owners=owners, group=group)


def owned_by(schedule: MergedSchedule) -> Array:
    """Ownership as booleans, B K P C U."""
    bits = jnp.arange(schedule.group, dtype=jnp.int32)
    return (jnp.right_shift(schedule.owners[..., None, :], bits[:, None]) & 1).astype(bool)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """What a refresh layer chose, and reuse layers inherit.

    Args:
      blocks: blocks per node, ascending, -1 padded.
      schedule: the visit lists merged from them.
    """

    blocks: Int[Array, "B K T S"]
    schedule: MergedSchedule
