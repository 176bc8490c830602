"""Speculative greedy decoding in float32 emits exactly the tokens of autoregressive decoding.

Every case has its own prompt length, tree, mistakes and budget; the compiled shapes are few.
"""

from __future__ import annotations

import numpy as np
import pytest

from ssv_jax.drafting.ngram import NgramDrafter
from ssv_jax.drafting.replay import ReplayDrafter
from tests.e2e import harness

pytestmark = pytest.mark.usefixtures("quick_programs")
CAPACITY = 96
NEW = 24
# model, (nodes, depth, kind), traversal, group, refresh interval
CONFIGURATIONS = [
    ("overlapping", (9, 4, "tree"), "bfs", 1, 1),
    ("overlapping", (17, 16, "chain"), "bfs", 4, 1),
    ("overlapping", (9, 4, "tree"), "dfs", 3, 2),
    ("short-window", (13, 9, "tree"), "dfs", 2, 1),
    ("short-window", (12, 1, "star"), "bfs", 5, 1),
    ("wide-blocks", (10, 5, "tree"), "bfs", 4, 3),
    ("pooled-token-gates", (8, 3, "tree"), "bfs", 8, 1),
    ("dense", (9, 4, "tree"), "dfs", 1, 1),
]


def prompts_of(rng: np.random.Generator, batch: int) -> list[list[int]]:
    """Lengths around block, stride and window boundaries, and some that leave little room."""
    edges = [1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 12, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 64]
    nearly_full = [CAPACITY - 1, CAPACITY, CAPACITY - 2, CAPACITY - 9]
    lengths = [int(rng.choice(nearly_full if rng.random() < 0.15 else edges)) for _ in range(batch)]
    return [rng.integers(0, harness.VOCAB, length).tolist() for length in lengths]


@pytest.mark.parametrize(
    ("configuration", "batch"),
    [(c, batch) for batch in (1, 8) for c in CONFIGURATIONS if batch == 8 or c[2] == "bfs"],
    ids=lambda c: f"{c[0]}-{c[1][2]}-{c[2]}-C{c[3]}-R{c[4]}" if isinstance(c, tuple) else f"B{c}",
)
def test_speculation_emits_what_autoregression_does(configuration, batch):
    """A token that differs from plain decoding: wrong tree mask, position, compressed entry, commit or cut."""
    name, (nodes, depth, kind), traversal, group, interval = configuration
    target = harness.model(name)
    plan = harness.plan(interval, target.config.num_layers)
    stop = (7, 23)
    plain = harness.decoding(target, plan=plan, stop_ids=stop)
    drafter = ReplayDrafter(num_nodes=nodes, max_depth=depth)
    fast = harness.decoding(target, drafter, plan=plan, traversal=traversal, group=group, stop_ids=stop)
    accepted = []
    for case in range(10 if batch == 1 else 5):
        rng = np.random.default_rng([case, batch, nodes, group])
        prompts = prompts_of(rng, batch)
        limits = [len(prompt) + int(rng.integers(1, NEW + 1)) for prompt in prompts]
        options = {"max_new_tokens": NEW, "capacity": CAPACITY, "limits": limits}
        want, plain_state = harness.run(plain, target.params, prompts, **options)
        truth = np.asarray(plain_state.history)
        script = harness.script_for(rng, drafter, truth, kind=kind, wrong=[0.0, 0.25, 0.6, 1.0][case % 4])
        got, state = harness.run(fast, target.params, prompts, script=script, **options)
        assert got == want
        np.testing.assert_array_equal(state.status, plain_state.status)
        np.testing.assert_array_equal(state.cache.length, state.count - 1)
        accepted.append(int(state.stats.accepted))
    assert max(accepted) > 0, "no draft was ever accepted: the test shows nothing"


@pytest.mark.parametrize("name", ["overlapping", "dense"])
@pytest.mark.parametrize("batch", [1, 4])
def test_prompt_lookup_emits_what_autoregression_does(name, batch):
    """Drafts copied from the sequence itself change the speed, never the tokens."""
    target = harness.model(name)
    plain = harness.decoding(target)
    fast = harness.decoding(target, NgramDrafter(depth=4, branches=2, num_nodes=8, min_ngram=1))
    accepted = 0
    for case in range(6 if batch == 1 else 3):
        rng = np.random.default_rng([case, batch])
        phrase = rng.integers(0, harness.VOCAB, 5).tolist()
        prompts = [(phrase * 6)[: int(rng.integers(3, 30))] for _ in range(batch)]
        want, _ = harness.run(plain, target.params, prompts, max_new_tokens=NEW, capacity=CAPACITY)
        got, state = harness.run(fast, target.params, prompts, max_new_tokens=NEW, capacity=CAPACITY)
        assert got == want
        accepted += int(state.stats.accepted)
    assert accepted > 0
