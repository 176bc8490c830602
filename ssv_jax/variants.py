"""Compiled variants: one executable for each (function, static choices, shapes), compiled once and counted."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import loop
from .calls import Leaves, decode_packed, lower
from .loop import Decoding
from .models.sharding import state_sharding
from .state import DecodeState

logger = logging.getLogger(__name__)


def compiler_options() -> dict[str, Any] | None:
    """XLA's options for the executables of a model: on a GPU, to record launches as one graph however few there are.

    By default XLA leaves runs of fewer than five launches out of its graphs, and a step then waits for the host between
    them.
    """
    return {"xla_gpu_graph_min_graph_size": 1} if jax.default_backend() == "gpu" else None


class Variants:
    """Executables of one model. After warm-up `compilations` must not grow.

    They hold the parameters that they were last called with, and take them to be as they were then: after a change,
    give them another object.

    Args:
      mesh: devices that parameters and state are spread over, None for one device.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.mesh = mesh
        self.compilations = 0
        self.compile_seconds = 0.0
        self._executables: dict[Any, Callable[..., Any]] = {}
        self._leaves = Leaves()
        self._lock = threading.Lock()

    def prepare(
        self, jobs: Sequence[Callable[[], Callable[..., Any]]], done: Callable[[int], None] = lambda count: None
    ) -> list[Callable[..., Any]]:
        """Runs calls of `prefill` and `decode`, as many at a time as there are cores.

        Compiling leaves Python's lock alone, so that many executables take little longer than one; tracing and
        lowering do not.

        Args:
          jobs: calls of different executables.
          done: told, in this thread, how many are ready.

        Returns:
          What the jobs returned, in their order. `compile_seconds` grows by the time until the last was ready.
        """
        before, began = self.compile_seconds, time.perf_counter()
        done(0)
        pool = concurrent.futures.ThreadPoolExecutor(max(1, min(len(jobs), os.cpu_count() or 1)))
        try:
            waiting = [pool.submit(job) for job in jobs]
            for count, _ in enumerate(concurrent.futures.as_completed(waiting), 1):
                done(count)
        finally:  # an interruption does not wait for what is being compiled
            pool.shutdown(wait=False, cancel_futures=True)
        new = self.compile_seconds > before
        self.compile_seconds = before + (time.perf_counter() - began if new else 0.0)
        return [job.result() for job in waiting]

    def prefill(self, decoding: Decoding, params: Any, state: DecodeState, size: int) -> Callable[..., Any]:
        """`loop.prefill_chunk` of this size, as a function of (params, state); donates the state."""
        return self._get(loop.prefill_chunk, decoding, params, state, size)

    def decode(self, decoding: Decoding, params: Any, state: DecodeState, rounds: int) -> Callable[..., Any]:
        """`loop.decode_until` of so many rounds or fewer, as a function of (params, state, most); donates the state.

        It returns the state after, and what it did as a `calls.Packed`, without waiting for either.
        """
        call = self._get(decode_packed, decoding, params, state, rounds, np.int32(rounds))
        return lambda params, state, most=rounds: call(params, state, np.int32(most))

    def _get(
        self,
        function: Callable[..., Any],
        decoding: Decoding,
        params: Any,
        state: DecodeState,
        value: int,
        *numbers: np.int32,
    ) -> Callable[..., Any]:
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(state))
        name = function.__name__
        key = (name, decoding, value, shapes)
        if key not in self._executables:
            began = time.perf_counter()
            shardings: Any = None
            if self.mesh is not None:
                replicated = NamedSharding(self.mesh, PartitionSpec())
                shardings = (jax.tree.leaves(state_sharding(self.mesh, state)), replicated)
            lowered = lower(function, decoding, params, state, value, *numbers, shardings=shardings)
            self._executables[key] = lowered.compile(compiler_options(), self._leaves)
            seconds = time.perf_counter() - began
            with self._lock:
                self.compilations += 1
                self.compile_seconds += seconds
            logger.info("compiled %s(%d) in %.1f s", name, value, seconds)
        return self._executables[key]
