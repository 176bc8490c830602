"""Parts of the loop that end-to-end runs do not single out: memory of prefill, and when sharing yields."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import loop
from ssv_jax.models.layer_plan import LayerPlan
from tests.e2e import harness


def prefill_temporaries(config_name: str, capacity: int) -> int:
    """Bytes of temporary buffers of one prefill pass of 64 tokens."""
    target = harness.model(config_name)
    what = harness.decoding(target)
    state = loop.init_state(
        what,
        jnp.ones((1, 8), jnp.int32),
        jnp.asarray([8], jnp.int32),
        max_new_tokens=1,
        key=jax.random.key(0),
        capacity=capacity,
    )
    compiled = jax.jit(loop.prefill_chunk, static_argnames=("decoding", "size"), donate_argnames="state").lower(
        decoding=what, params=target.params, state=state, size=64
    )
    return compiled.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("name", ["overlapping", "dense"])
def test_prefill_memory_is_linear_in_the_prompt(name):
    """Scores of the whole prompt against itself: memory that grows with the square."""
    small, large = prefill_temporaries(name, 4096), prefill_temporaries(name, 16384)
    assert large < 5 * small


def test_sharing_yields_to_low_overlap_and_returns_later():
    """Sharing that flickers around one threshold, or never comes back."""
    target = harness.model("overlapping")
    what = harness.decoding(target, shared=True, group=2)
    ema, on, history = 1.0, True, []
    blocks = {
        "same": jnp.asarray([[[[0, 1, 2, 3], [0, 1, 2, 3]]]], jnp.int32),
        "different": jnp.asarray([[[[0, 1, 2, 3], [4, 5, 6, 7]]]], jnp.int32),
    }
    stats = loop.RoundStats.zero(1)
    queries = SimpleNamespace(position=jnp.asarray([[64, 65]], jnp.int32))
    tree = SimpleNamespace(valid=jnp.ones((1, 2), bool))
    for step in range(16):
        chosen = blocks["different" if step < 6 else "same"]
        state = dataclasses.make_dataclass("State", ["stats", "status", "overlap_ema", "shared_on"], frozen=True)(
            stats, jnp.zeros((1,), jnp.int32), jnp.float32(ema), jnp.asarray(on)
        )
        output = SimpleNamespace(selections=(SimpleNamespace(blocks=chosen), None))
        watch = inspect.unwrap(loop._watch_overlap)
        after = watch(what, state, tree, queries, output)
        ema, on = float(after.overlap_ema), bool(after.shared_on)
        history.append((round(ema, 3), on))
    flags = [flag for _, flag in history]
    assert flags[:2] == [True, True]  # 0.75, 0.56
    assert not flags[2]  # 0.42 < 0.5
    first_return = flags.index(True, 3)
    assert history[first_return][0] > loop.SHARING_ON
    assert history[first_return - 1][0] <= loop.SHARING_ON
    assert all(flags[first_return:])


def test_layer_plans_name_their_layers():
    """A plan that starts without a selection, or names layers that do not exist."""
    assert LayerPlan.at(4, (0, 2)).refresh == (True, False, True, False)
    with pytest.raises(ValueError, match="layer 0 must"):
        LayerPlan.at(4, (1, 2))
    with pytest.raises(ValueError, match="no layer 4"):
        LayerPlan.at(4, (0, 4))


def test_approximate_runs_differ_only_by_their_statement():
    """With one node per group, sharing must change nothing at all."""
    target = harness.model("overlapping")
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, harness.VOCAB, 40).tolist()]
    from ssv_jax.drafting.ngram import NgramDrafter

    drafter = NgramDrafter(depth=3, branches=2, num_nodes=7, min_ngram=1)
    options = {"max_new_tokens": 16, "capacity": 96}
    exact, _ = harness.run(harness.decoding(target, drafter), target.params, prompts, **options)
    alone, _ = harness.run(harness.decoding(target, drafter, shared=True), target.params, prompts, **options)
    assert alone == exact
    _, state = harness.run(harness.decoding(target, drafter, shared=True, group=4), target.params, prompts, **options)
    assert 0 < float(state.stats.overlap) <= float(state.stats.overlap_count)
    assert 0 <= float(state.stats.free_overlap) <= float(state.stats.overlap_count)
