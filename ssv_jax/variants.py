"""Compiled variants: one executable for each (function, static choices, shapes), compiled once and counted."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import loop
from .loop import Decoding
from .models.sharding import state_sharding
from .state import DecodeState

logger = logging.getLogger(__name__)


class Variants:
    """Executables of one model. After warm-up `compilations` must not grow.

    Args:
      mesh: devices that parameters and state are spread over, None for one device.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh
        self.compilations = 0
        self.compile_seconds = 0.0
        self._executables: dict[Any, Callable[..., Any]] = {}

    def prefill(self, decoding: Decoding, params: Any, state: DecodeState, size: int) -> Callable[..., Any]:
        """`loop.prefill_chunk` of this size, as a function of (params, state); donates the state."""
        return self._get(loop.prefill_chunk, decoding, params, state, "size", size)

    def decode(self, decoding: Decoding, params: Any, state: DecodeState, rounds: int) -> Callable[..., Any]:
        """`loop.decode_until` of this many rounds, as a function of (params, state); donates the state."""
        return self._get(loop.decode_until, decoding, params, state, "rounds", rounds)

    def _get(
        self,
        function: Callable[..., Any],
        decoding: Decoding,
        params: Any,
        state: DecodeState,
        static: str,
        value: int,
    ) -> Callable[..., Any]:
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(state))
        key = (function.__name__, decoding, value, shapes)
        if key not in self._executables:
            began = time.perf_counter()
            shardings: Any = None
            if self.mesh is not None:
                replicated = NamedSharding(self.mesh, PartitionSpec())
                shardings = (state_sharding(self.mesh, state), replicated)
            jitted = jax.jit(
                function,
                static_argnames=("decoding", static),
                donate_argnames=("state",),
                out_shardings=shardings,
            )
            lowered = jitted.lower(decoding=decoding, params=params, state=state, **{static: value})
            executable = lowered.compile()
            self._executables[key] = lambda params, state: executable(params=params, state=state)
            seconds = time.perf_counter() - began
            self.compilations += 1
            self.compile_seconds += seconds
            logger.info("compiled %s(%s=%d) in %.1f s", function.__name__, static, value, seconds)
        return self._executables[key]
