"""Scripted trees: drafts a known continuation with chosen mistakes, to drive the loop through any acceptance."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from ..tree import DraftTree, ancestors
from .protocol import Observation, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Script:
    """What to draft, for R rounds that repeat.

    Args:
      truth: the expected sequence of every batch row, prompt included.
      parent: trees, -1 for the root and for padding.
      shift: added to the true token of each node's position, modulo the vocabulary; 0 drafts the truth.
      vocab_size: the modulus.
      played: rounds so far.
    """

    truth: Int[Array, "B X"]
    parent: Int[Array, "R B N"]
    shift: Int[Array, "R B N"]
    vocab_size: Int[Array, ""]
    played: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplayDrafter:
    """Drafts from a `Script`, which the caller puts in place of the state that `init` makes."""

    num_nodes: int
    max_depth: int
    taps: tuple[int, ...] = ()

    def init(self, *, batch: int, capacity: int, dtype: Any) -> Script:
        """A script that always drafts padding."""
        trees = jnp.full((1, batch, self.num_nodes), -1, jnp.int32)
        return Script(
            truth=jnp.zeros((batch, capacity + 1), jnp.int32),
            parent=trees,
            shift=jnp.zeros_like(trees),
            vocab_size=jnp.ones((), jnp.int32),
            played=jnp.zeros((), jnp.int32),
        )

    def observe(self, params: Params, state: Script, seen: Observation) -> Script:
        """Turns to the next tree."""
        return dataclasses.replace(state, played=state.played + 1)

    def propose(
        self,
        params: Params,
        state: Script,
        *,
        history: Int[Array, "B H"],
        count: Int[Array, " B"],
        key: PRNGKeyArray,
    ) -> DraftTree:
        """See `Drafter`."""
        turn = state.played % state.parent.shape[0]
        parent, shift = state.parent[turn], state.shift[turn]
        depth = ancestors(parent).sum(-1) - 1
        at = jnp.minimum(count[:, None] - 1 + depth, state.truth.shape[1] - 1)
        tokens = (jnp.take_along_axis(state.truth, at, axis=1) + shift) % state.vocab_size
        root = jnp.take_along_axis(history, count[:, None] - 1, axis=1)
        index = jnp.arange(self.num_nodes)
        return DraftTree(
            tokens=jnp.where(index == 0, root, tokens).astype(jnp.int32),
            parent=parent,
            valid=(parent >= 0) | (index == 0),
            rank=jnp.broadcast_to(index, parent.shape).astype(jnp.int32),
        )
