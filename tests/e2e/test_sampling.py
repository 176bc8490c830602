"""With a temperature, the whole loop emits the joint distribution of autoregressive sampling.

The first three emitted tokens of many sequences are counted against the exact distribution, computed by running the
model on every prefix. A wrong key, a wrong residual or a commit of the wrong row shows as a shift of the counts.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import loop
from ssv_jax.drafting.ngram import NgramDrafter
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.drafting.replay import ReplayDrafter, Script
from ssv_jax.models.llama import build, random_params
from ssv_jax.sampling import Sampling, probabilities
from tests.e2e import harness

VOCAB, BATCH, KEYS, CAPACITY = 5, 2048, 12, 32
PROMPT = [1, 2, 3, 1, 2]
SAMPLING = Sampling(temperature=0.9, top_p=0.95)


@pytest.fixture(scope="module")
def target() -> harness.Model:
    config = dataclasses.replace(harness.MODELS["overlapping"], vocab_size=VOCAB, num_layers=2)
    params = {name: x * (6.0 if x.ndim > 1 else 1.0) for name, x in random_params(config, 4).items()}
    graphdef, state = build(config, params)
    return harness.Model(config, graphdef, Params(target=state))


def next_probabilities(target: harness.Model, prefixes: np.ndarray) -> np.ndarray:
    """Exact next-token distributions after equally long prefixes."""
    plain = loop.Decoding(model=target.graphdef, config=target.config, drafter=NoDrafter())
    batch, length = prefixes.shape
    state = harness.init_state(
        plain,
        jnp.asarray(prefixes, jnp.int32),
        jnp.full((batch,), length, jnp.int32),
        max_new_tokens=1,
        key=jax.random.key(0),
        capacity=CAPACITY,
    )
    _, logits = harness.prefill_chunk(plain, target.params, state, harness.CHUNK)
    return np.asarray(probabilities(logits, SAMPLING), np.float64)


@pytest.fixture(scope="module")
def exact(target) -> np.ndarray:
    """Probability of every triple of tokens after the prompt."""
    joint = next_probabilities(target, np.asarray([PROMPT]))[0]
    for depth in (1, 2):
        prefixes = np.array([PROMPT + list(t) for t in itertools.product(range(VOCAB), repeat=depth)])
        joint = (joint.reshape(-1, 1) * next_probabilities(target, prefixes)).reshape(-1)
    return joint


def counts(target: harness.Model, drafter, script: Script | None = None) -> np.ndarray:
    """How often each triple is emitted first."""
    what = loop.Decoding(model=target.graphdef, config=target.config, drafter=drafter, sampling=SAMPLING)
    seen = np.zeros(VOCAB**3)
    prompts = jnp.broadcast_to(jnp.asarray(PROMPT, jnp.int32), (BATCH, len(PROMPT)))
    for seed in range(KEYS):
        state = harness.init_state(
            what,
            prompts,
            jnp.full((BATCH,), len(PROMPT), jnp.int32),
            max_new_tokens=3,
            key=jax.random.key(seed),
            capacity=CAPACITY,
        )
        if script is not None:
            state = dataclasses.replace(state, drafter=script)
        state, _ = harness.prefill_chunk(what, target.params, state, harness.CHUNK)
        state, _ = harness.decode_until(what, target.params, state, 2)
        history = np.asarray(state.history)[:, len(PROMPT) : len(PROMPT) + 3]
        assert np.asarray(state.count).min() == len(PROMPT) + 3
        seen += np.bincount(history @ [VOCAB**2, VOCAB, 1], minlength=VOCAB**3)
    return seen


def distance(seen: np.ndarray, exact: np.ndarray) -> tuple[float, float]:
    """Total variation, and what a perfect sampler of as many draws stays under but once in many thousand runs."""
    total = seen.sum()
    spread = np.sqrt(exact * (1 - exact) / total)
    return 0.5 * np.abs(seen / total - exact).sum(), 0.5 * np.sqrt(2 / np.pi) * spread.sum() + 4 * spread.max()


def scripted(shift: list[int]) -> Script:
    """A tree of two branches of two drafts under the root, tokens 0, 1, ... by `shift`."""
    parent = jnp.broadcast_to(jnp.asarray([-1, 0, 0, 1, 2], jnp.int32), (1, BATCH, 5))
    return Script(
        truth=jnp.zeros((BATCH, CAPACITY + 1), jnp.int32),
        parent=parent,
        shift=jnp.broadcast_to(jnp.asarray(shift, jnp.int32), (1, BATCH, 5)),
        vocab_size=jnp.asarray(VOCAB, jnp.int32),
        played=jnp.asarray(0, jnp.int32),
    )


CASES = {
    "autoregressive": (NoDrafter(), None),
    "prompt-lookup": (NgramDrafter(depth=2, branches=2, num_nodes=5, min_ngram=1), None),
    "tree": (ReplayDrafter(num_nodes=5, max_depth=2), [0, 3, 1, 2, 2]),
    "twins": (ReplayDrafter(num_nodes=5, max_depth=2), [0, 1, 1, 0, 3]),
}


@pytest.mark.parametrize("case", CASES)
def test_joint_distribution_is_that_of_autoregressive_sampling(target, exact, case):
    """Samples that are not the target's: drafts favoured or punished, a key used twice, a raw distribution."""
    drafter, shift = CASES[case]
    seen = counts(target, drafter, None if shift is None else scripted(shift))
    found, bound = distance(seen, exact)
    assert found < bound
    assert seen[exact == 0].sum() == 0, "a token was emitted that top-p removed"


def test_the_statistic_notices_a_wrong_temperature(target, exact):
    """The bound is tight enough to fail: a slightly flatter sampler exceeds it."""
    rng = np.random.default_rng(0)
    flat = exact**0.9 / (exact**0.9).sum()
    found, bound = distance(rng.multinomial(BATCH * KEYS, flat).astype(float), exact)
    assert found > bound
