"""Autoregressive decoding: the tree is its root."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from ..tree import DraftTree
from .protocol import Observation, Params


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NoDrafter:
    """Proposes nothing, so every round emits the target's own next token."""

    num_nodes: int = dataclasses.field(default=1, init=False)
    max_depth: int = dataclasses.field(default=0, init=False)
    taps: tuple[int, ...] = dataclasses.field(default=(), init=False)

    def init(self, *, batch: int, capacity: int, dtype: Any) -> None:
        """Stateless."""

    def observe(self, params: Params, state: Any, seen: Observation) -> None:
        """Stateless."""

    def propose(
        self,
        params: Params,
        state: Any,
        *,
        history: Int[Array, "B H"],
        count: Int[Array, " B"],
        key: PRNGKeyArray,
    ) -> DraftTree:
        """The root alone."""
        root = jnp.take_along_axis(history, count[:, None] - 1, axis=1)
        return DraftTree(
            tokens=root,
            parent=jnp.full_like(root, -1),
            valid=jnp.ones(root.shape, bool),
            rank=jnp.zeros_like(root),
        )
