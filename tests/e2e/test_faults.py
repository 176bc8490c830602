"""Faults that other speculative decoders shipped, each provoked on purpose.

The tiny models' argmax wanders, so any wrong key, position or row changes the tokens within a few steps.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import loop
from ssv_jax.drafting import Params
from ssv_jax.drafting.replay import ReplayDrafter, Script
from ssv_jax.models.cache import Cache
from ssv_jax.models.llama import build
from ssv_jax.state import EXHAUSTED, FAILED, RUNNING, STOPPED
from tests.e2e import harness

pytestmark = pytest.mark.usefixtures("quick_programs")
CAPACITY = 96
NEW = 24
CHAIN = ReplayDrafter(num_nodes=17, max_depth=16)


@pytest.fixture(scope="module")
def plain_runs():
    """Autoregressive runs of 16 prompts whose lengths cover every offset of a block."""
    target = harness.model("overlapping")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, harness.VOCAB, length).tolist() for length in range(1, 17)]
    tokens, state = harness.run(harness.decoding(target), target.params, prompts, max_new_tokens=NEW, capacity=CAPACITY)
    return target, prompts, tokens, np.asarray(state.history)


def chain_script(truth: np.ndarray, wrong_depth: np.ndarray) -> Script:
    """Chains of 16 drafts, of which the one at `wrong_depth[turn, row]` is wrong (0: none is)."""
    turns, batch = wrong_depth.shape
    nodes = np.arange(CHAIN.num_nodes)
    parent = np.broadcast_to(nodes - 1, (turns, batch, CHAIN.num_nodes))
    shift = (nodes == wrong_depth[..., None]) & (nodes > 0)
    return Script(
        truth=jnp.asarray(truth, jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        shift=jnp.asarray(shift, jnp.int32),
        vocab_size=jnp.asarray(harness.VOCAB, jnp.int32),
        played=jnp.asarray(0, jnp.int32),
    )


@pytest.mark.parametrize("offset", range(0, 17, 2))
def test_rejection_at_every_offset_of_a_block(plain_runs, offset):
    """Rows of rejected drafts leak into later compressed entries; drafts that cross several strides are miscounted.

    Sixteen drafts cross up to four strides and two blocks; prompts start at every offset; the first wrong draft
    moves through every depth, turn by turn.
    """
    target, prompts, want, truth = plain_runs
    depth = (offset + np.arange(16)[None] + np.arange(5)[:, None] * 3) % 17
    fast = harness.decoding(target, CHAIN)
    got, state = harness.run(
        fast, target.params, prompts, max_new_tokens=NEW, capacity=CAPACITY, script=chain_script(truth, depth)
    )
    assert got == want
    assert int(state.stats.accepted) > 0


def test_rejecting_everything_loses_nothing(plain_runs):
    """A round without accepted drafts resets history instead of rolling back."""
    target, prompts, want, truth = plain_runs
    script = chain_script(truth, np.ones((1, 16), int))
    got, state = harness.run(
        harness.decoding(target, CHAIN), target.params, prompts, max_new_tokens=NEW, capacity=CAPACITY, script=script
    )
    assert got == want
    assert int(state.stats.accepted) == 0


def test_ragged_accepts_in_a_batch(plain_runs):
    """One offset for all sequences corrupts a batch whose rows accept different numbers of drafts."""
    target, prompts, want, truth = plain_runs
    depth = np.broadcast_to(np.arange(16) % 17, (3, 16))
    got, state = harness.run(
        harness.decoding(target, CHAIN),
        target.params,
        prompts,
        max_new_tokens=NEW,
        capacity=CAPACITY,
        script=chain_script(truth, depth),
    )
    assert got == want
    np.testing.assert_array_equal(state.cache.length, state.count - 1)


def poison(cache: Cache) -> Cache:
    """Every row that is not committed becomes large and finite."""

    def spoil(rows: jax.Array, valid: jax.Array) -> jax.Array:
        row = jnp.arange(rows.shape[2])
        return jnp.where((row < valid[:, None])[:, None, :, None], rows, 1e4)

    layers = []
    for layer in cache.layers:
        geometry_count = jnp.where(cache.length < 8, 0, (cache.length - 8) // 4 + 1)
        kv = dataclasses.replace(
            layer.kv,
            k=spoil(layer.kv.k, cache.length),
            v=spoil(layer.kv.v, cache.length),
            k_cmp=spoil(layer.kv.k_cmp, geometry_count),
            v_cmp=spoil(layer.kv.v_cmp, geometry_count),
        )
        # Row r of the tail holds positions r, r + l and so on: garbage before the first of them.
        bad = (jnp.arange(layer.tail_k.shape[2]) >= cache.length[:, None])[:, None, :, None]
        tails = {name: jnp.where(bad, 1e4, getattr(layer, name)) for name in ("tail_k", "tail_v")}
        layers.append(dataclasses.replace(layer, kv=kv, **tails))
    return dataclasses.replace(cache, layers=tuple(layers))


def test_uncommitted_rows_are_never_read(plain_runs):
    """Stale or rejected rows beyond the committed length reach attention, selection or compression."""
    target, prompts, want, truth = plain_runs
    fast = harness.decoding(target, CHAIN)
    lengths = [len(prompt) for prompt in prompts]
    padded = np.zeros((16, CAPACITY), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    state = harness.init_state(
        fast,
        jnp.asarray(padded),
        jnp.asarray(lengths, jnp.int32),
        max_new_tokens=NEW,
        key=jax.random.key(0),
        capacity=CAPACITY,
    )
    depth = (np.arange(16)[None] + np.arange(5)[:, None] * 3) % 17
    state = dataclasses.replace(state, drafter=chain_script(truth, depth), cache=jax.jit(poison)(state.cache))
    state, _ = harness.prefill_chunk(fast, target.params, state, harness.CHUNK)
    for _ in range(NEW):
        state = dataclasses.replace(state, cache=jax.jit(poison)(state.cache))
        state, _ = harness.decode_until(fast, target.params, state, 1)
    history, count = np.asarray(state.history), np.asarray(state.count)
    assert [history[row, lengths[row] : count[row]].tolist() for row in range(16)] == want


def plain_cut(tokens: list[int], stops: set[int], allowed: int) -> tuple[int, int]:
    """The rule in words: scan in order; a stop token ends, else the budget does."""
    for index, token in enumerate(tokens, start=1):
        if token in stops:
            return index, STOPPED
        if index == allowed:
            return index, EXHAUSTED
    return len(tokens), RUNNING


def test_stop_and_budget_at_every_offset():
    """Junk after a stop token, or the wrong reason, because the budget is tested before it in a multi-token round."""
    target = harness.model("dense")
    decoding = harness.decoding(target, ReplayDrafter(num_nodes=5, max_depth=4), stop_ids=(7, 9))
    cases = [
        (available, allowed, stop, second)
        for available in range(1, 6)
        for allowed in range(1, 8)
        for stop in range(6)
        for second in range(6)
    ]
    available, allowed, stop, second = (jnp.asarray(column, jnp.int32) for column in zip(*cases, strict=True))
    slot = jnp.arange(5)
    tokens = jnp.where(slot == stop[:, None], 7, jnp.where(slot == second[:, None], 9, 1)).astype(jnp.int32)
    batch = len(cases)
    state = loop.init_state(
        decoding,
        jnp.ones((batch, 1), jnp.int32),
        jnp.ones((batch,), jnp.int32),
        max_new_tokens=8,
        key=jax.random.key(0),
        capacity=64,
    )
    state = dataclasses.replace(state, count=jnp.full((batch,), 10, jnp.int32), limit=10 + allowed)
    emitted, status = loop._cut(decoding, state, tokens, available, jnp.zeros((batch, harness.VOCAB)))
    for row, (have, budget, *_) in enumerate(cases):
        want = plain_cut(tokens[row, :have].tolist(), {7, 9}, budget)
        assert (int(emitted[row]), int(status[row])) == want, cases[row]


def test_finished_sequences_stay_as_they_are(plain_runs):
    """A sequence that stopped goes on emitting while others of its batch run."""
    target, prompts, want, truth = plain_runs
    script = chain_script(truth, np.zeros((1, 16), int))
    limits = [len(prompt) + 1 + row for row, prompt in enumerate(prompts)]
    got, state = harness.run(
        harness.decoding(target, CHAIN),
        target.params,
        prompts,
        max_new_tokens=NEW,
        capacity=CAPACITY,
        script=script,
        limits=limits,
    )
    assert got == [tokens[: row + 1] for row, tokens in enumerate(want)]
    np.testing.assert_array_equal(state.status, EXHAUSTED)


def test_bfloat16_differs_only_at_near_ties():
    """Another matrix shape may round a near-tie the other way in bfloat16; anything beyond that is a fault."""
    target = harness.model("overlapping")
    graphdef, weights = harness.build(target.config, harness.raw_params("overlapping"), jnp.bfloat16)
    params = harness.Params(target=weights)
    low = dataclasses.replace(target, graphdef=graphdef, params=params)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, harness.VOCAB, 19).tolist() for _ in range(8)]
    options = {"max_new_tokens": NEW, "capacity": CAPACITY, "dtype": jnp.bfloat16}
    want, state = harness.run(harness.decoding(low), params, prompts, **options)
    drafter = ReplayDrafter(num_nodes=9, max_depth=4)
    script = harness.script_for(rng, drafter, np.asarray(state.history), kind="tree", wrong=0.3)
    got, _ = harness.run(harness.decoding(low, drafter), params, prompts, script=script, **options)
    for prompt, plain, fast in zip(prompts, want, got, strict=True):
        if plain == fast:
            continue
        at = next(i for i, pair in enumerate(zip(plain, fast, strict=True)) if pair[0] != pair[1])
        margin = harness.margin(low, prompt + plain[:at], plain[at], fast[at], capacity=CAPACITY)
        assert margin < 0.25, f"first difference at token {at} with a logit margin of {margin}"


@pytest.mark.parametrize("drafter", [None, CHAIN], ids=["plain", "chain"])
def test_logits_that_are_not_finite_end_a_sequence_and_emit_nothing(drafter):
    """The argmax of NaN is a token too: damaged weights write plausible text. Others in the batch must not notice."""
    target = harness.model("wide-blocks")
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, harness.VOCAB, 9).tolist() for _ in range(6)]
    plain = harness.decoding(target)
    want, state = harness.run(plain, target.params, prompts, max_new_tokens=NEW, capacity=CAPACITY)
    known = [{*prompt, *tokens} for prompt, tokens in zip(prompts, want, strict=True)]
    poisoned, victim = next(
        (token, row)
        for row in range(6)
        for token in want[row][3:9]
        if token not in prompts[row] + want[row][:3]
        if sum(token not in others for others in known) >= 2
    )
    params = dict(harness.raw_params("wide-blocks"))
    params["embed/embedding"] = params["embed/embedding"].at[poisoned].set(jnp.nan)
    damaged = Params(target=build(target.config, params)[1])
    script = None if drafter is None else chain_script(np.asarray(state.history), np.zeros((1, 6), int))
    got, state = harness.run(
        harness.decoding(target, drafter), damaged, prompts, max_new_tokens=NEW, capacity=CAPACITY, script=script
    )
    assert int(state.status[victim]) == FAILED
    assert len(got[victim]) <= want[victim].index(poisoned) + 1
    if drafter is None:
        assert got[victim] == want[victim][: want[victim].index(poisoned) + 1]
    for row in range(6):
        assert got[row] == want[row][: len(got[row])]
        if poisoned not in known[row]:
            assert got[row] == want[row]
            assert int(state.status[row]) == EXHAUSTED


def test_a_prompt_whose_logits_are_not_finite_emits_nothing():
    """The first token comes from prefill, which no round checks."""
    target = harness.model("overlapping")
    params = {name: array * jnp.nan for name, array in harness.raw_params("overlapping").items()}
    damaged = Params(target=build(target.config, params)[1])
    got, state = harness.run(harness.decoding(target), damaged, [[1, 2, 3]], max_new_tokens=NEW, capacity=CAPACITY)
    assert got == [[]]
    assert int(state.status[0]) == FAILED
