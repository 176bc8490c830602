"""The processed next-token distribution and drawing from it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ssv_jax.sampling import GREEDY, Sampling, invert, probabilities, sample, sample_from

LAST = float(np.nextafter(np.float32(1), np.float32(0)))


def process(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Temperature, top-k, top-p in float64, one row; equal logits do not occur where something is cut."""
    logits = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    if sampling.top_p < 1:
        reached = np.cumsum(weights[order])
        weights[order[np.searchsorted(reached, sampling.top_p) + 1 :]] = 0
    return weights / weights.sum()


# --- Processing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 5, 40, 100])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.4, 1e-6])
def test_probabilities_agree_with_the_formula(temperature, top_k, top_p):
    """Order of the steps: temperature, then top-k, then top-p on what top-k left."""
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = np.random.default_rng(0).normal(0, 2, (2, 3, 40)).astype(np.float32)
    got = np.asarray(probabilities(jnp.asarray(logits), sampling))
    expected = np.apply_along_axis(process, -1, logits, sampling)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    np.testing.assert_array_equal(got == 0, expected == 0)
    np.testing.assert_allclose(got.sum(-1), 1, atol=1e-5)


def test_cuts_come_in_the_stated_order():
    """Top-p of the mass that top-k left differs from top-p of the whole."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    p = probabilities(logits, Sampling(temperature=1.0, top_k=2, top_p=0.5))
    np.testing.assert_allclose(p, [1, 0, 0, 0], atol=1e-6)
    p = probabilities(logits, Sampling(temperature=1.0, top_p=0.5))
    np.testing.assert_allclose(p, [4 / 7, 3 / 7, 0, 0], atol=1e-6)


def test_equal_logits_at_a_cut_are_kept():
    """The cut does not depend on token numbers."""
    logits = jnp.array([1.0, 2.0, 1.0, 0.0])
    kept = probabilities(logits, Sampling(temperature=1.0, top_k=2)) > 0
    assert kept.tolist() == [True, True, True, False]
    assert (probabilities(jnp.zeros(5), Sampling(temperature=1.0, top_p=0.3)) > 0).all()


def test_low_precision_logits_give_float32_probabilities():
    """Probabilities in bfloat16 would bias acceptance."""
    logits = jax.random.normal(jax.random.key(0), (2, 50)).astype(jnp.bfloat16)
    for sampling in (Sampling(temperature=0.7, top_k=9, top_p=0.8), GREEDY):
        got = probabilities(logits, sampling)
        assert got.dtype == jnp.float32
        np.testing.assert_array_equal(got, probabilities(logits.astype(jnp.float32), sampling))


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 1e30])
@pytest.mark.parametrize("cut", [{}, {"top_k": 3}, {"top_p": 0.5}], ids=["all", "k", "p"])
def test_extreme_temperatures_stay_finite(temperature, cut):
    """NaN from infinity minus infinity when large logits are divided by a small temperature."""
    logits = jnp.array([[1e4, 3.0, -1e4, 9.9e3], [0.0, -np.inf, 1.0, 0.5]])
    p = np.asarray(probabilities(logits, Sampling(temperature=temperature, **cut)))
    assert np.isfinite(p).all()
    np.testing.assert_allclose(p.sum(-1), 1, atol=1e-5)
    assert p[1, 1] == 0
    if temperature < 1:
        np.testing.assert_allclose(p, [[1, 0, 0, 0], [0, 0, 1, 0]], atol=1e-6)


def test_greedy_is_the_first_maximum():
    logits = jnp.array([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert probabilities(logits, GREEDY).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert sample(jax.random.key(0), logits, GREEDY).tolist() == [1, 0]
    assert GREEDY.greedy and not Sampling(temperature=0.1).greedy


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
    ],
)
def test_values_out_of_range_are_refused(wrong, name):
    with pytest.raises(ValueError, match=name):
        Sampling(**wrong)


# --- Drawing ------------------------------------------------------------------------------------------


def test_samples_follow_the_distribution():
    """Over one block of the cumulative sum, with weights of 0 and rows that are not normalised."""
    p = np.array([0.0, 0.3, 0.05, 0.0, 0.25, 0.4, 0.0])
    rows = jnp.broadcast_to(jnp.asarray(3 * p, jnp.float32), (100_000, 7))
    seen = np.bincount(np.asarray(sample_from(jax.random.key(0), rows)), minlength=7)
    assert (seen[p == 0] == 0).all()
    assert stats.chisquare(seen[p > 0], 1e5 * p[p > 0]).pvalue > 1e-3


@pytest.mark.parametrize("vocab", [512, 513, 1500])
def test_samples_follow_the_distribution_over_several_blocks(vocab):
    """Vocabularies at and beside the size of a block: each token, its place in the block, its block."""
    p = np.random.default_rng(0).exponential(size=vocab) * (np.arange(vocab) % 3 > 0)
    p = (p / p.sum()).astype(np.float32)

    def draw(key):
        return sample_from(key, jnp.broadcast_to(p, (4096, vocab)))

    keys = jax.random.split(jax.random.key(0), 12)
    seen = np.bincount(np.asarray(jax.jit(lambda k: jax.lax.map(draw, k))(keys)).ravel(), minlength=vocab)
    assert len(seen) == vocab and (seen[p == 0] == 0).all()
    enough = p * seen.sum() > 5
    due = np.append(p[enough], p[~enough].sum()) * seen.sum()
    due = due / due.sum() * seen.sum()
    assert stats.chisquare(np.append(seen[enough], seen[~enough].sum()), due).pvalue > 1e-3


@pytest.mark.parametrize("vocab", [1, 4, 511, 512, 513, 5000])
def test_extreme_uniforms_give_possible_tokens(vocab):
    """A token of probability 0, or one outside the vocabulary, when the uniform is exactly 0 or nearly 1."""
    for first, last in ((0, 0), (0, vocab - 1), (vocab // 2, vocab // 2), (vocab // 3, vocab // 2)):
        p = np.zeros((1, vocab), np.float32)
        p[0, [first, last]] = 1e-3
        for u, expected in ((0.0, last), (LAST, first)):
            assert invert(jnp.asarray(p), jnp.full((1, 2), u, jnp.float32)).tolist() == [expected]


def test_rounding_of_the_cumulative_sum_gives_no_share_to_removed_tokens():
    """A removed token is drawn: over a large vocabulary a float32 prefix sum also moves where the weight is 0."""
    vocab, kept = 32768, 4096
    p = probabilities(3 * jax.random.normal(jax.random.key(0), (1, vocab)), Sampling(temperature=1.0, top_k=kept))
    mass = np.asarray(jnp.cumsum(p, axis=-1))[0]
    moved = np.flatnonzero((np.diff(mass) > 0) & (np.asarray(p)[0, 1:] == 0)) + 1
    # The uniforms that inverting that sum would turn into a removed token; others where it has none.
    reach = np.append(mass[moved] / mass[-1], np.linspace(0.001, 1, 64))[:256]
    u = jnp.asarray(np.clip(1 - reach, 0, LAST), jnp.float32)
    draw = jax.jit(jax.vmap(lambda a, b: invert(p, jnp.stack([a, b])[None])[0], in_axes=(0, None)))
    for within in (0.0, 0.37, LAST):
        tokens = np.asarray(draw(u, jnp.float32(within)))
        assert (np.asarray(p)[0, tokens] > 0).all()
    inner = jax.jit(jax.vmap(lambda a: invert(p, jnp.stack([jnp.float32(0.4), a])[None])[0]))
    assert (np.asarray(p)[0, np.asarray(inner(u))] > 0).all()


def test_sample_draws_from_the_processed_distribution():
    logits = jnp.broadcast_to(jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), (20_000, 4))
    sampling = Sampling(temperature=1.0, top_k=2)
    seen = np.bincount(np.asarray(sample(jax.random.key(0), logits, sampling)), minlength=4)
    assert (seen[2:] == 0).all()
    assert stats.chisquare(seen[:2], 20_000 * np.array([5 / 8, 3 / 8])).pvalue > 1e-3


def test_draws_use_the_key():
    """The same key gives the same tokens, another key others; rows are independent."""
    p = jnp.full((64, 1000), 1e-3)
    one = sample_from(jax.random.key(0), p)
    np.testing.assert_array_equal(one, sample_from(jax.random.key(0), p))
    assert (one != sample_from(jax.random.key(1), p)).sum() > 50
    assert len(set(one.tolist())) > 50
