"""Orders of a few scores without sorting, in launches that XLA fuses.

On a GPU XLA sorts a few dozen numbers in several copies and a kernel, and takes the eight largest of 16,384 with a
kernel of 43 us that no graph can hold (one H200). Counting who comes before whom takes one reduction. A NaN comes
before nothing and behind nothing: indices are then out of range.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

CHUNK = 64
MOST_COUNTED = 1024  # scores that are compared with each other


def ranks(*keys: Shaped[Array, "... n"]) -> Int[Array, "... n"]:
    """Where a stable sort by rising keys puts each item; the first key counts most, nothing may be NaN."""
    index = jnp.arange(keys[0].shape[-1])
    before = index[None, :] < index[:, None]
    for key in reversed(keys):
        mine, other = key[..., :, None], key[..., None, :]
        before = (other < mine) | ((other == mine) & before)
    return before.sum(-1, dtype=jnp.int32)


def picked(rank: Int[Array, "... n"], count: int, value: Shaped[Array, "..."]) -> Shaped[Array, "... count"]:
    """The values of ranks 0, 1, ... below `count`; of a whole permutation and the indices, its inverse."""
    here = rank[..., None, :] == jnp.arange(count)[:, None]
    return jnp.where(here, value[..., None, :], 0).sum(-1, dtype=value.dtype)


def best(score: Float[Array, "... n"], count: int) -> Int[Array, "... count"]:
    """Indices of the `count` first scores by (-score, index), in rising order; nothing may be NaN."""
    size = score.shape[-1]
    if size > MOST_COUNTED:
        index = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), score.shape)
        order = jnp.lexsort((index, -score), axis=-1)[..., :count]
        return jnp.sort(order, axis=-1).astype(jnp.int32)
    chosen = ranks(-score) < count
    index = jnp.arange(size, dtype=jnp.int32)
    place = (chosen[..., None, :] & (index[None, :] < index[:, None])).sum(-1, dtype=jnp.int32)
    return picked(jnp.where(chosen, place, count), count, index)


def largest(score: Float[Array, "... n"], count: int) -> tuple[Float[Array, "... count"], Int[Array, "... count"]]:
    """The `count` first scores by (-score, index) and their indices, in this order; nothing may be NaN.

    The largest scores lie in the chunks with the largest maxima, as many as there are scores to find: the others are
    not looked at again.
    """
    size = score.shape[-1]
    chunks = -(-size // CHUNK)
    if max(chunks, count * CHUNK) > MOST_COUNTED:
        return _by_top_k(score, count)
    return jax.lax.platform_dependent(score, cpu=lambda x: _by_top_k(x, count), default=lambda x: _by_chunks(x, count))


def _by_top_k(score: Float[Array, "... n"], count: int) -> tuple[Float[Array, "... count"], Int[Array, "... count"]]:
    """On a CPU comparing all pairs would take longer. Which of equal scores come last is left to the device."""
    value, index = jax.lax.top_k(score, count)
    order = jnp.lexsort((index, -value), axis=-1)
    return jnp.take_along_axis(value, order, axis=-1), jnp.take_along_axis(index, order, axis=-1)


def _by_chunks(score: Float[Array, "... n"], count: int) -> tuple[Float[Array, "... count"], Int[Array, "... count"]]:
    lead, size = score.shape[:-1], score.shape[-1]
    chunks = -(-size // CHUNK)
    # Padding has the highest indices, so that it loses against any score as low as itself.
    padded = jnp.pad(score, [(0, 0)] * len(lead) + [(0, chunks * CHUNK - size)], constant_values=-jnp.inf)
    padded = padded.reshape(*lead, chunks, CHUNK)
    few = min(count, chunks)
    kept = picked(ranks(-padded.max(-1)), few, jnp.arange(chunks, dtype=jnp.int32))
    value = jnp.take_along_axis(padded, kept[..., None], axis=-2, mode="clip").reshape(*lead, few * CHUNK)
    index = (kept[..., None] * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)).reshape(*lead, few * CHUNK)
    rank = ranks(-value, index)
    return picked(rank, count, value), picked(rank, count, index)
