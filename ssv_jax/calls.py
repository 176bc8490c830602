"""Calls of compiled functions that cost the host little: flat lists of arrays go in, one array comes back."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from . import loop
from .loop import Decoding
from .state import DecodeState, Emitted


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one call of decoding did, on the host; columns of `tokens` at and after `count` are garbage.

    Args:
      tokens, count, drafted, accepted, emitted: see `Emitted`.
      status: of each sequence after the call, see `DecodeState`.
      overlap, overlap_count: of the statistics after the call, see `RoundStats`.
    """

    tokens: Int[np.ndarray, "B X"]
    count: Int[np.ndarray, " B"]
    drafted: Int[np.ndarray, "B R"]
    accepted: Int[np.ndarray, "B R"]
    emitted: Int[np.ndarray, "B R"]
    status: Int[np.ndarray, " B"]
    overlap: float
    overlap_count: float


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["rounds"])
@dataclasses.dataclass(frozen=True)
class Packed:
    """An `Outcome` that is still on the device, in one array: every array fetched costs the host a transfer.

    Args:
      array: a row for each sequence, see `pack`.
      rounds: of the executable that made it.
    """

    array: Int[Array, "B columns"]
    rounds: int

    def fetch(self) -> Outcome:
        """Waits for the call, and brings what it did to the host in one transfer."""
        rows = np.asarray(self.array)
        ends = np.cumsum([1, 1, 2, self.rounds, self.rounds, self.rounds])
        count, status, sums, drafted, accepted, emitted, tokens = np.split(rows, ends, axis=1)
        overlap, overlap_count = sums[0].view(np.float32).tolist()
        return Outcome(
            tokens=tokens,
            count=count[:, 0],
            drafted=drafted,
            accepted=accepted,
            emitted=emitted,
            status=status[:, 0],
            overlap=overlap,
            overlap_count=overlap_count,
        )


def pack(state: DecodeState, out: Emitted) -> Packed:
    """What the host reads after a call, in one array; `Packed.fetch` takes it apart.

    Args:
      state: after the call.
      out: what `loop.decode_until` emitted.

    Returns:
      Columns: count, status, the bits of the float32 sums overlap and overlap_count (the same in every row), R of
      drafted, R of accepted, R of emitted, and the tokens.
    """
    sums = jnp.stack([state.stats.overlap, state.stats.overlap_count])
    bits = jax.lax.bitcast_convert_type(sums, jnp.int32)
    first = jnp.stack([out.count, state.status], axis=1)
    every = jnp.broadcast_to(bits, (first.shape[0], 2))
    array = jnp.concatenate([first, every, out.drafted, out.accepted, out.emitted, out.tokens], axis=1)
    return Packed(array, out.emitted.shape[1])


def decode_packed(
    decoding: Decoding, params: Any, state: DecodeState, rounds: int, most: Int[Array, ""]
) -> tuple[DecodeState, Packed]:
    """`loop.decode_until` with its tokens packed."""
    state, out = loop.decode_until(decoding, params, state, rounds, most)
    return state, pack(state, out)


class Leaves:
    """Leaves of the parameters of the last call; to flatten them for every call costs the host milliseconds.

    Holds those parameters, whose id might come to mean others, until it is asked for others' leaves.
    """

    def __init__(self) -> None:
        self._last: tuple[Any, list[Any], Any] = None, [], None

    def of(self, params: Any) -> tuple[list[Any], Any]:
        """The leaves of these parameters and their structure, the same objects as long as the parameters are."""
        last = self._last  # read once: another thread may replace it
        if last[0] is not params:
            self._last = last = params, *jax.tree.flatten(params)
        return last[1], last[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lowered:
    """A function of flat lists of arrays, lowered.

    On its way in and out, a call's host time is mostly that of nested containers.

    Args:
      lowered: what JAX compiles.
      params, state: structures that the lists come from.
    """

    lowered: jax.stages.Lowered
    params: Any
    state: Any

    def compile(self, options: dict[str, Any] | None, leaves: Leaves | None = None) -> Callable[..., Any]:
        """The executable, as a function of (params, state, *numbers) that donates the state.

        Args:
          options: of XLA.
          leaves: shared with other executables of the same parameters; by default its own.

        Returns:
          A function that gives the state after and what else there is. It raises ValueError for parameters or a state
          of another structure than were lowered, whose arrays might fit all the same.
        """
        executable = self.lowered.compile(options)
        leaves = Leaves() if leaves is None else leaves
        wanted, structure, known = self.params, self.state, None

        def call(params: Any, state: DecodeState, *numbers: np.int32) -> tuple[DecodeState, Any]:
            nonlocal known
            flat_params, found = leaves.of(params)
            flat_state, same = jax.tree.flatten(state)
            if found is not known and found != wanted:
                raise ValueError("params have another structure than those that it was compiled for: compile for them")
            if same != structure:
                raise ValueError("state has another structure than the one that this was compiled for: compile for it")
            known = found
            after, out = executable(flat_params, flat_state, *numbers)
            return jax.tree.unflatten(structure, after), out

        return call


def lower(
    function: Callable[..., Any],
    decoding: Decoding,
    params: Any,
    state: DecodeState,
    value: int,
    *numbers: np.int32,
    shardings: Any = None,
) -> Lowered:
    """Lowers `function(decoding, params, state, value, *numbers)` as a function of the leaves of params and state.

    Args:
      function: `loop.prefill_chunk`, or `decode_packed`.
      decoding: the run.
      params, state, numbers: arrays or their shapes.
      value: static, size of a chunk or number of rounds.
      shardings: a list of those of the state's leaves, and that of what else comes back; None for one device.

    Returns:
      What `Lowered.compile` makes an executable of.
    """
    flat_state, structure = jax.tree.flatten(state)
    flat_params, params_structure = jax.tree.flatten(params)

    def flat(params: list[Any], state: list[Any], *numbers: Any) -> tuple[list[Any], Any]:
        nested = jax.tree.unflatten(params_structure, params), jax.tree.unflatten(structure, state)
        after, out = function(decoding, *nested, value, *numbers)
        leaves, same = jax.tree.flatten(after)
        assert same == structure, "a state of the same structure comes back"
        return leaves, out

    flat.__name__ = function.__name__  # of the program, in traces
    jitted = jax.jit(flat, donate_argnums=1, out_shardings=shardings)
    lowered = jitted.lower(flat_params, flat_state, *numbers)
    return Lowered(lowered=lowered, params=params_structure, state=structure)
