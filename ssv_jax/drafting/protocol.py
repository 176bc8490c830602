"""What the decode loop asks of a drafter."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..tree import DraftTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """Parameters of the target and, where the drafter has a network, of that."""

    target: nnx.State
    draft: nnx.State | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """Target tokens that have just been committed: what a drafter learns after prefill and after every round.

    Args:
      tokens: for each committed token the token that follows it (the last emitted one at the end).
      taps: the target's residual streams at the committed tokens, as `Drafter.taps` asks.
      start: position of the first committed token.
      count: committed tokens per sequence; later columns are garbage.
    """

    tokens: Int[Array, "B P"]
    taps: tuple[Float[Array, "B P E"], ...]
    start: Int[Array, " B"]
    count: Int[Array, " B"]


@runtime_checkable
class Drafter(Protocol):
    """Frozen, hashable description of a draft method: a static argument of the compiled round.

    Its state is a pytree that the loop carries; `None` where there is none.
    """

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree that it proposes, the root included (static)."""
        ...

    @property
    def max_depth(self) -> int:
        """Bound on the depth of any node (static); 0 proposes nothing."""
        ...

    @property
    def taps(self) -> tuple[int, ...]:
        """Target residual streams that `observe` needs: k is the stream after k layers."""
        ...

    def init(self, *, batch: int, capacity: int, dtype: Any) -> Any:
        """State before any token."""
        ...

    def observe(self, params: Params, state: Any, seen: Observation) -> Any:
        """State after the target committed tokens."""
        ...

    def propose(
        self,
        params: Params,
        state: Any,
        *,
        history: Int[Array, "B H"],
        count: Int[Array, " B"],
        key: PRNGKeyArray,
    ) -> DraftTree:
        """A tree rooted at the last emitted token, `history[b, count[b] - 1]`.

        Args:
          params: of target and drafter.
          state: after everything committed so far was observed.
          history: the sequence's tokens, prompt included; columns at and after `count` are garbage.
          count: known tokens, one more than are committed.
          key: for drafters that sample.
        """
        ...
