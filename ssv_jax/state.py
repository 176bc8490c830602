"""What a decoding run carries from round to round."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from .errors import NumericsError
from .models.cache import Cache

# Status of a sequence; FAILED: the target's logits were not finite, and no token was emitted from them.
RUNNING, STOPPED, EXHAUSTED, FAILED = 0, 1, 2, 3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundStats:
    """Sums over rounds and sequences, from running sequences only.

    Args:
      rounds: sequence-rounds.
      drafted: draft tokens verified (roots and padding not counted).
      accepted: draft tokens accepted and emitted.
      emitted: tokens emitted, bonus included.
      offered_at, accepted_at: rounds in which a node of depth d + 1 was offered, and accepted.
      overlap, free_overlap: sums of the block overlap of consecutive nodes, and of the same without forced
        blocks; `overlap_count` terms each.
    """

    rounds: Int[Array, ""]
    drafted: Int[Array, ""]
    accepted: Int[Array, ""]
    emitted: Int[Array, ""]
    offered_at: Int[Array, " depth"]
    accepted_at: Int[Array, " depth"]
    overlap: Float[Array, ""]
    free_overlap: Float[Array, ""]
    overlap_count: Float[Array, ""]

    @classmethod
    def zero(cls, max_depth: int) -> RoundStats:
        """Before any round."""
        shapes = {name: ((), jnp.int32) for name in ("rounds", "drafted", "accepted", "emitted")}
        shapes |= {name: ((max_depth,), jnp.int32) for name in ("offered_at", "accepted_at")}
        shapes |= {name: ((), jnp.float32) for name in ("overlap", "free_overlap", "overlap_count")}
        return cls(**{name: jnp.zeros(*shape) for name, shape in shapes.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """A batch of sequences. Every running one has one more known token than committed ones: the next root.

    Args:
      cache: committed tokens.
      history: known tokens, prompt first; columns at and after `count` are garbage.
      count: known tokens; 0 until prefill has begun to know them beyond the prompt.
      prompt: prompt tokens.
      limit: `count` at which the sequence is exhausted.
      status: RUNNING, STOPPED (by a stop token), EXHAUSTED (by `limit`) or FAILED.
      key: folded with `round` before use.
      round: rounds done, prefill passes included.
      drafter: the drafter's own state.
      stats: sums since the start.
      shared_on: whether approximate sharing is in use (it yields to low overlap).
      overlap_ema: moving average of the overlap that decides it.
    """

    cache: Cache
    history: Int[Array, "B H"]
    count: Int[Array, " B"]
    prompt: Int[Array, " B"]
    limit: Int[Array, " B"]
    status: Int[Array, " B"]
    key: PRNGKeyArray
    round: Int[Array, ""]
    drafter: Any
    stats: RoundStats
    shared_on: Array
    overlap_ema: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Emitted:
    """Tokens emitted by one call, in order; columns at and after `count` are garbage.

    Args:
      tokens: of all rounds of the call, one after the other.
      count: tokens of each sequence.
      drafted, accepted: drafts verified and accepted in each round; 0 in rounds that did not happen.
      emitted: tokens emitted in each round.
    """

    tokens: Int[Array, "B X"]
    count: Int[Array, " B"]
    drafted: Int[Array, "B R"]
    accepted: Int[Array, "B R"]
    emitted: Int[Array, "B R"]


def check_finite(status: int, emitted: int) -> None:
    """Refuses to go on with a sequence where the target's logits were not finite.

    Args:
      status: of the sequence, after prefill or rounds.
      emitted: new tokens so far, for the message.

    Raises:
      NumericsError: says what to try.
    """
    if status == FAILED:
        raise NumericsError(
            f"the model's logits are not finite after {emitted} new tokens: its weights are damaged, or too large for "
            "the dtype: try float32"
        )
