"""Executables that are prepared together, and what an observing drafter collects in one call."""

from __future__ import annotations

import dataclasses
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import loop
from ssv_jax.drafting.eagle3 import Eagle3Drafter
from ssv_jax.drafting.ngram import NgramDrafter
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.observing import Observing
from ssv_jax.drafting.protocol import Params
from ssv_jax.models import eagle3
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.variants import Variants
from tests.e2e import harness


def test_jobs_run_side_by_side_and_keep_their_order():
    variants, told, both = Variants(), [], threading.Barrier(2, timeout=600)

    def job(name: str):
        if (os.cpu_count() or 1) > 1:
            both.wait()  # one after the other would wait for ever
        variants.compile_seconds += 1e6
        return lambda params, state: name

    ready = variants.prepare([lambda: job("a"), lambda: job("b")], told.append)
    assert [call(None, None) for call in ready] == ["a", "b"]
    assert told == [0, 1, 2]
    assert variants.compile_seconds < 1e6, "the time until all were ready, not the sum"
    assert variants.prepare([]) == []


def test_a_job_that_fails_says_so():
    def fail():
        raise ValueError("no such kernel")

    with pytest.raises(ValueError, match="no such kernel"):
        Variants().prepare([fail])


def test_an_interruption_does_not_wait_for_other_jobs():
    started, held, finished = threading.Event(), threading.Event(), []

    def compile_long() -> Any:
        started.set()
        held.wait(20)
        finished.append(True)

    def compile_short() -> Any:
        if (os.cpu_count() or 1) > 1:
            assert started.wait(600)

    def interrupt(count: int) -> None:
        if count:
            raise KeyboardInterrupt

    try:
        with pytest.raises(KeyboardInterrupt):
            Variants().prepare([compile_short, compile_long], interrupt)
        assert not finished
    finally:
        held.set()


PROPOSERS = {"none": NoDrafter(), "ngram": NgramDrafter(depth=2, branches=1, num_nodes=3)}


@pytest.mark.parametrize("name", PROPOSERS)
def test_what_is_collected_equals_what_is_observed_at_once(name):
    """Pairs of a call of six rounds: those of six calls of one; sequences that end within the call included."""
    target = harness.model("overlapping")
    config = Eagle3Config(
        vocab_size=harness.VOCAB,
        draft_vocab_size=harness.VOCAB,
        hidden_size=target.config.hidden_size,
        target_hidden_size=target.config.hidden_size,
        intermediate_size=40,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        taps=(0, 1, 3),
    )
    graphdef, draft = eagle3.build(config, eagle3.random_params(config, 2))
    head = Eagle3Drafter(graphdef=graphdef, config=config, depth=1, top_k=2, num_nodes=4)
    decoding = dataclasses.replace(harness.decoding(target), drafter=Observing(proposer=PROPOSERS[name], observer=head))
    params = Params(target=target.params.target, draft=draft)
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 9, (2, 14)), jnp.int32)
    state = loop.init_state(
        decoding, prompts, jnp.array([14, 9]), max_new_tokens=30, key=jax.random.key(0), capacity=64
    )
    state, _ = harness.prefill_chunk(decoding, params, state, 16)
    state = dataclasses.replace(state, limit=jnp.array([44, 13], jnp.int32))  # the second one ends early
    decode = jax.jit(loop.decode_until, static_argnames=("decoding", "rounds"))
    once, _ = decode(decoding, params, state, 6)
    for _ in range(6):
        state, _ = decode(decoding, params, state, 1)
    np.testing.assert_array_equal(once.history, state.history)
    np.testing.assert_array_equal(once.drafter.cache.length, state.drafter.cache.length)
    np.testing.assert_array_equal(once.drafter.cache.length, once.cache.length)
    np.testing.assert_allclose(once.drafter.feature, state.drafter.feature, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(once.drafter.cache.layers, state.drafter.cache.layers, strict=True):
        for row, length in enumerate(once.cache.length.tolist()):
            np.testing.assert_allclose(ours.k[row, :, :length], theirs.k[row, :, :length], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(ours.v[row, :, :length], theirs.v[row, :, :length], rtol=1e-4, atol=1e-5)


def test_a_call_of_fewer_rounds_than_its_executable():
    """Rounds that a planner did not ask for, and more than there is room for."""
    target = harness.model("overlapping")
    decoding, params, variants = harness.decoding(target), target.params, Variants()
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 9, (1, 14)), jnp.int32)
    state = loop.init_state(decoding, prompts, jnp.array([14]), max_new_tokens=30, key=jax.random.key(0), capacity=64)
    state, _ = harness.prefill_chunk(decoding, params, state, 16)
    call, done = variants.decode(decoding, params, state, 8), []
    for most in (3, 1, 8, 100):
        state, out = call(params, state, most)
        done.append(int((out.emitted[0] > 0).sum()))
    assert done == [3, 1, 8, 8]
    assert int((call(params, state)[1].emitted[0] > 0).sum()) == 8
    assert variants.compilations == 1
