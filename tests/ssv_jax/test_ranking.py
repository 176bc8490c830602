"""Orders without sorting, against a sort, ties and limits included."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import ranking

# Few values, so that most scores are tied; the last kind is all different.
KINDS = {"tied": [0.0, -1.0, -2.5, -1e30], "equal": [-1e30], "impossible": [-1.0, -np.inf], "different": None}


def scores(kind: str, *shape: int) -> np.ndarray:
    rng = np.random.default_rng(len(shape) + shape[-1])
    values = KINDS[kind]
    return (rng.standard_normal(shape) if values is None else rng.choice(values, shape)).astype(np.float32)


def sorted_first(score: np.ndarray, count: int) -> np.ndarray:
    """Indices of the first by (-score, index)."""
    return np.argsort(-score, axis=-1, kind="stable")[..., :count]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "count"), [((1, 1), 1), ((2, 64), 8), ((1, 328), 31), ((2, 1024), 5), ((2, 1025), 5)]
)
def test_best_are_those_of_a_sort_in_rising_order(kind, shape, count):
    """A tie that the higher index wins, one place too few, the order of the scores instead of the indices."""
    score = scores(kind, *shape)
    want = np.sort(sorted_first(score, count), axis=-1)
    np.testing.assert_array_equal(jax.jit(ranking.best, static_argnums=1)(score, count), want)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("function", [ranking._by_chunks, ranking._by_top_k, ranking.largest])
@pytest.mark.parametrize(
    ("shape", "count"),
    [((2, 3, 1000), 8), ((1, 1, 16384), 8), ((2, 64), 3), ((3, 70), 10), ((1, 5), 5), ((2, 16001), 1)],
)
def test_largest_are_those_of_a_sort(kind, function, shape, count):
    """A chunk left out, padding that wins, indices of a chunk instead of the whole."""
    score = scores(kind, *shape)
    value, index = jax.jit(function, static_argnums=1)(score, count)
    want = sorted_first(score, count)
    np.testing.assert_array_equal(value, np.take_along_axis(score, want, axis=-1))
    np.testing.assert_array_equal(index, want)


def test_scores_of_many_are_not_all_compared(monkeypatch):
    """A matrix of all pairs that does not fit the memory."""
    monkeypatch.setattr(jax.lax, "platform_dependent", None)  # leads to it, and not on a CPU
    score = scores("different", 1, 200_000)
    for count in (4, 40):
        value, _ = ranking.largest(jnp.asarray(score), count)
        np.testing.assert_array_equal(value, -np.sort(-score)[:, :count])
