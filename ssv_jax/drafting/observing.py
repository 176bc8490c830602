"""One drafter proposes while another only watches, so that a run can change drafters and lose nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxtyping import Array, Int, PRNGKeyArray

from ..tree import DraftTree
from .protocol import Drafter, Observation, Params


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observing:
    """Proposes what `proposer` does and carries the state of `observer`, which sees everything committed.

    Args:
      proposer: without a state of its own.
      observer: with one; it is as current as if it had drafted itself.
    """

    proposer: Drafter
    observer: Drafter

    @property
    def num_nodes(self) -> int:
        """See `Drafter`."""
        return self.proposer.num_nodes

    @property
    def max_depth(self) -> int:
        """See `Drafter`."""
        return self.proposer.max_depth

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self.observer.taps

    def init(self, *, batch: int, capacity: int, dtype: Any) -> Any:
        """See `Drafter`."""
        return self.observer.init(batch=batch, capacity=capacity, dtype=dtype)

    def observe(self, params: Params, state: Any, seen: Observation) -> Any:
        """See `Drafter`."""
        return self.observer.observe(params, state, seen)

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
        return self.proposer.propose(params, None, history=history, count=count, key=key)
