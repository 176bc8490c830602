"""Prompt lookup: drafts what followed earlier occurrences of the last few tokens, without any network."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from ..strategy import LookupShape
from ..tree import DraftTree
from .protocol import Observation, Params


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class NgramDrafter(LookupShape):
    """Continues the longest, then most recent, earlier matches of the sequence's last tokens.

    A match that reaches the end of the sequence is continued periodically. Branches start with different tokens;
    a branch without a match is padding. Arguments and errors are those of `LookupShape`.
    """

    taps: tuple[int, ...] = dataclasses.field(default=(), init=False)

    @property
    def max_depth(self) -> int:
        """See `Drafter`."""
        return min(self.depth, self.num_nodes - 1)

    def init(self, *, batch: int, capacity: int, dtype: Any) -> None:
        """Stateless: the history is all it reads."""

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
        """See `Drafter`."""
        batch, width = history.shape
        end = count[:, None] - 1  # the root's place
        place = jnp.arange(width)
        matched = jnp.ones((batch, width), bool)
        length = jnp.zeros((batch, width), jnp.int32)
        for back in range(self.max_ngram):
            wanted = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
            shifted = jnp.roll(history, back, axis=1)
            matched &= (shifted == wanted) & (place >= back) & (end >= back)
            length += matched
        found = (place < end) & (length >= self.min_ngram)
        score = jnp.where(found, length * width + place, -1)
        following = jnp.roll(history, -1, axis=1)

        tokens = [jnp.take_along_axis(history, end, axis=1)]
        parent, valid = [jnp.full((batch, 1), -1)], [jnp.ones((batch, 1), bool)]
        rank = [jnp.zeros((batch, 1), jnp.int32)]
        steps = jnp.arange(self.depth)
        for branch in range(self.branches):
            used = sum(block.shape[1] for block in tokens)
            size = min(self.depth, self.num_nodes - used)
            if size <= 0:
                break
            best = jnp.argmax(score, axis=1)[:, None]
            present = jnp.take_along_axis(score, best, axis=1) >= 0
            period = jnp.maximum(end - best, 1)
            source = best + 1 + steps[:size] % period
            tokens.append(jnp.take_along_axis(history, jnp.minimum(source, width - 1), axis=1))
            above = jnp.where(steps[:size] == 0, 0, used + steps[:size] - 1)
            parent.append(jnp.where(present, above, -1))
            valid.append(jnp.broadcast_to(present, (batch, size)))
            rank.append(jnp.broadcast_to(jnp.where(steps[:size] == 0, branch, 0), (batch, size)))
            first = jnp.take_along_axis(following, best, axis=1)
            score = jnp.where(following == first, -1, score)
        return DraftTree(
            tokens=jnp.concatenate(tokens, axis=1).astype(jnp.int32),
            parent=jnp.concatenate(parent, axis=1).astype(jnp.int32),
            valid=jnp.concatenate(valid, axis=1),
            rank=jnp.concatenate(rank, axis=1).astype(jnp.int32),
        )
