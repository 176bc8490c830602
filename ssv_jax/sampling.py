"""How the next token is chosen from logits: greedily, or from a processed distribution."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Choice of the next token, static: temperature, then top-k, then top-p, in that order.

    Args:
      temperature: divides the logits; 0 is greedy.
      top_k: keep the k most likely tokens (ties at the k-th are kept); 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches top_p (ties with its least likely
        one are kept); 1 keeps all.

    Raises:
      ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number >= 0, got {self.temperature}")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be an integer >= 0 (0 keeps all tokens), got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


GREEDY = Sampling()
# Tokens whose probabilities `invert` sums in one go.
_BLOCK = 512


def probabilities(logits: Float[Array, "... V"], sampling: Sampling) -> Float[Array, "... V"]:
    """The processed next-token distribution in float32; removed tokens have probability exactly 0.

    Greedy choice is the one-hot distribution of the first maximum.
    """
    logits = logits.astype(jnp.float32)
    vocab = logits.shape[-1]
    if sampling.greedy:
        return jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab, dtype=jnp.float32)
    # From the maximum, so that no temperature overflows; one below float32's range is its smallest number.
    temperature = max(sampling.temperature, float(jnp.finfo(jnp.float32).tiny))
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    filter_k = 0 < sampling.top_k < vocab
    if not filter_k and sampling.top_p == 1:
        return jax.nn.softmax(logits, axis=-1)
    descending = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    if filter_k:
        threshold = descending[..., sampling.top_k - 1 : sampling.top_k]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
        descending = jnp.where(descending < threshold, -jnp.inf, descending)
    if sampling.top_p < 1:
        mass = jax.nn.softmax(descending, axis=-1)
        before = jnp.cumsum(mass, axis=-1) - mass
        last = jnp.maximum(jnp.sum(before < sampling.top_p, axis=-1, keepdims=True) - 1, 0)
        threshold = jnp.take_along_axis(descending, last, axis=-1)
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    return jax.nn.softmax(logits, axis=-1)


def sample_from(key: PRNGKeyArray, p: Float[Array, "B V"]) -> Int[Array, " B"]:
    """One token per row, never one of probability 0; rows need not be normalised, but need some mass."""
    return invert(p, jax.random.uniform(key, (p.shape[0], 2)))


def invert(p: Float[Array, "B V"], u: Float[Array, "B 2"]) -> Int[Array, " B"]:
    """The token at which the cumulative mass reaches a uniform number: `sample_from` with given uniforms.

    A block of tokens is chosen first, then a token in it. One float32 sum over a large vocabulary would round
    by as much as a rare token's probability.

    Args:
      p: non-negative weights.
      u: independent numbers in [0, 1), for the block and for the token.
    """
    batch, vocab = p.shape
    width = min(vocab, _BLOCK)
    blocks = jnp.pad(p.astype(jnp.float32), ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)
    block = _first_reaching(blocks.sum(-1), u[:, :1])
    tokens = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]
    return block * width + _first_reaching(tokens, u[:, 1:])


def _first_reaching(weights: Float[Array, "B N"], u: Float[Array, "B 1"]) -> Int[Array, " B"]:
    """First index whose cumulative weight reaches (1 - u) of the total, among those of positive weight."""
    # Parallel prefix sums round differently from one index to the next: they can step at a weight of 0, and
    # down. Hence the mask, and the largest sum as total, which some index of positive weight reaches.
    mass = jnp.where(weights > 0, jnp.cumsum(weights, axis=-1), 0)
    target = (1 - u) * mass.max(axis=-1, keepdims=True)
    return jnp.argmax((weights > 0) & (mass >= target), axis=-1).astype(jnp.int32)


def sample(key: PRNGKeyArray, logits: Float[Array, "B V"], sampling: Sampling) -> Int[Array, " B"]:
    """The next token of each row."""
    if sampling.greedy:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return sample_from(key, probabilities(logits, sampling))
