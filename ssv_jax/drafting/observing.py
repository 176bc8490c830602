"""One drafter proposes while another only watches, so that a run can change drafters and lose nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from ..tree import DraftTree
from .eagle3 import Eagle3State
from .protocol import Drafter, Observation, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Waiting:
    """A state, and what was committed since, in the form of one `Observation`."""

    observer: Eagle3State
    tokens: Int[Array, "B W"]
    taps: tuple[Float[Array, "B W E"], ...]
    start: Int[Array, " B"]
    count: Int[Array, " B"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observing:
    """Proposes what `proposer` does and carries the state of `observer`, which sees everything committed.

    Between `enter` and `leave` it collects what is committed, and the observer's network runs once for all: weights
    that are as large as a layer of the target are then read once a call and not once a round.

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

    def enter(self, state: Eagle3State, rounds: int, tap_size: int) -> _Waiting:
        """The state at the beginning of at most `rounds` rounds, for taps of width `tap_size`."""
        batch, width = state.feature.shape[0], rounds * (self.max_depth + 1)
        taps = tuple(jnp.zeros((batch, width, tap_size), state.feature.dtype) for _ in self.taps)
        none = jnp.zeros((batch,), jnp.int32)
        return _Waiting(observer=state, tokens=jnp.zeros((batch, width), jnp.int32), taps=taps, start=none, count=none)

    def leave(self, params: Params, state: _Waiting) -> Eagle3State:
        """The state after them."""
        seen = Observation(tokens=state.tokens, taps=state.taps, start=state.start, count=state.count)
        return self.observer.observe(params, state.observer, seen)

    def observe(self, params: Params, state: Any, seen: Observation) -> Any:
        """See `Drafter`."""
        if not isinstance(state, _Waiting):
            return self.observer.observe(params, state, seen)
        batch, width = state.tokens.shape
        slot = jnp.arange(seen.tokens.shape[1])
        column = jnp.where(slot < seen.count[:, None], state.count[:, None] + slot, width)
        row = jnp.arange(batch)[:, None]

        def put(into: Array, new: Array) -> Array:
            return into.at[row, column].set(new.astype(into.dtype), mode="drop")

        return dataclasses.replace(
            state,
            tokens=put(state.tokens, seen.tokens),
            taps=tuple(put(old, new) for old, new in zip(state.taps, seen.taps, strict=True)),
            start=jnp.where(state.count == 0, seen.start, state.start),
            count=state.count + seen.count,
        )

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
