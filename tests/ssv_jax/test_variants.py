"""Executables that are prepared together, and what an observing drafter collects in one call."""

from __future__ import annotations

import dataclasses
import gc
import os
import threading
import weakref
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
from ssv_jax.state import EXHAUSTED, FAILED, RUNNING, STOPPED
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


def prefilled(decoding: loop.Decoding, params: Params, batch: int = 1):
    prompts = jnp.asarray(np.random.default_rng(0).integers(0, 9, (batch, 14)), jnp.int32)
    lengths = jnp.full((batch,), 14, jnp.int32)
    state = loop.init_state(decoding, prompts, lengths, max_new_tokens=30, key=jax.random.key(0), capacity=64)
    return harness.prefill_chunk(decoding, params, state, 16)[0]


def test_a_call_of_fewer_rounds_than_its_executable():
    """Rounds that a planner did not ask for, and more than there is room for."""
    target = harness.model("overlapping")
    decoding, params, variants = harness.decoding(target), target.params, Variants()
    state = prefilled(decoding, params)
    call, done = variants.decode(decoding, params, state, 8), []
    for most in (3, 1, 8, 100):
        state, out = call(params, state, most)
        done.append(int((out.fetch().emitted[0] > 0).sum()))
    assert done == [3, 1, 8, 8]
    assert int((call(params, state)[1].fetch().emitted[0] > 0).sum()) == 8
    assert variants.compilations == 1


def test_what_a_call_did_arrives_whole_whatever_became_of_its_sequences():
    """A field in another's columns, rows mixed up, sums that are no longer floats, or a status from before the call."""
    target = harness.model("overlapping")
    drafter = NgramDrafter(depth=2, branches=2, num_nodes=5)
    decoding = harness.decoding(target, drafter, measure_overlap=True)
    state = prefilled(decoding, target.params, batch=4)
    state = dataclasses.replace(
        state,
        limit=state.limit.at[1].set(state.count[1] + 3),
        status=state.status.at[3].set(FAILED),
    )
    _, free = harness.decode_until(decoding, target.params, state, 6)
    free = [free.tokens[row, : free.count[row]].tolist() for row in range(3)]
    stop = next(token for token in free[2][1:] if token not in free[0] + free[1])
    decoding = dataclasses.replace(decoding, stop_ids=(stop,))
    after, want = harness.decode_until(decoding, target.params, state, 6)

    call = Variants().decode(decoding, target.params, state, 6)
    mine, packed = call(target.params, state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state)), "donated"
    got = packed.fetch()
    assert got.status.tolist() == [RUNNING, EXHAUSTED, STOPPED, FAILED]
    np.testing.assert_array_equal(got.status, after.status)
    for field in dataclasses.fields(want):
        np.testing.assert_array_equal(getattr(got, field.name), getattr(want, field.name), field.name)
    assert got.overlap == float(mine.stats.overlap) > 0
    assert got.overlap_count == float(mine.stats.overlap_count) > 0
    assert jax.tree.structure(mine) == jax.tree.structure(after)
    np.testing.assert_array_equal(mine.history, after.history)


def test_arrays_of_another_structure_are_refused():
    """Leaves that fit, in the wrong places."""
    target = harness.model("overlapping")
    decoding, params = harness.decoding(target), target.params
    call = Variants().decode(decoding, params, prefilled(decoding, params), 2)
    with pytest.raises(ValueError, match="params have another structure"):
        call(tuple(jax.tree.leaves(params)), prefilled(decoding, params))
    state = prefilled(decoding, params)
    with pytest.raises(ValueError, match="state has another structure"):
        call(params, dataclasses.replace(state, drafter={"other": state.drafter}))
    assert call(params, state)[1].fetch().count[0] > 0


def test_each_parameters_give_their_own_results_and_are_let_go():
    """Leaves of parameters that were given before; parameters held for ever, by these or by what they compiled."""
    target = harness.model("overlapping")
    decoding, variants = harness.decoding(target), Variants()
    mine = [Params(target=harness.model("overlapping", seed).params.target) for seed in (0, 1)]
    plain = [harness.decode_until(decoding, params, prefilled(decoding, params), 4)[1] for params in mine]
    want = [out.tokens.tolist() for out in plain]
    assert want[0] != want[1]
    call = variants.decode(decoding, mine[0], prefilled(decoding, mine[0]), 4)
    for at in (0, 1, 0, 0, 1):
        assert call(mine[at], prefilled(decoding, mine[at]))[1].fetch().tokens.tolist() == want[at]
    assert variants.compilations == 1

    first, second = map(weakref.ref, mine)
    del mine
    gc.collect()
    assert first() is None, "others have been given since"
    assert second() is not None
    gc.disable()  # no cycle keeps memory until a collection
    try:
        del variants, call
        assert second() is None
    finally:
        gc.enable()
