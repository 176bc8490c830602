"""A model that reads batches through its cache, as it does when it serves, with all that the loop does not show."""

from __future__ import annotations

from typing import Any

import _evaluation as evaluation
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ssv_jax.models.cache import Cache, commit, geometry_of, init_cache
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import LlamaOutput, PassOptions, build
from ssv_jax.pallas_kernels import chain
from ssv_jax.tree import DraftTree, queries_of


class Served:
    """Passes over a cache that the caller keeps.

    Args:
      model: dense or sparse.
      dtype: of parameters and cache.
      size: tokens of a reading pass.
      plan: refresh and reuse layers; None refreshes everywhere.
    """

    def __init__(self, model: evaluation.Model, dtype: Any, size: int, plan: LayerPlan | None = None) -> None:
        self.config, self.dtype, self.size, self.plan = model.config, dtype, size, plan
        self._graphdef, self._params = build(model.config, model.params, dtype)
        self._geometry = geometry_of(model.config.nsa) if model.config.nsa else None
        self._read = jax.jit(self._reading, donate_argnums=1)
        self._score = jax.jit(self._scoring, static_argnames=("group", "shared"))
        self._look = jax.jit(self._looking, static_argnames="best")

    def cache(self, capacity: int, batch: int = 1) -> Cache:
        """An empty cache."""
        return init_cache(self.config, capacity, batch=batch, dtype=self.dtype)

    def _run(self, params: Any, *args: Any, **kwargs: Any) -> LlamaOutput:
        return nnx.merge(self._graphdef, params)(*args, **kwargs)

    def _reading(self, params: Any, cache: Cache, tokens: jax.Array, count: jax.Array) -> Cache:
        batch, width = tokens.shape
        last = jnp.zeros((batch, 1), jnp.int32)  # no logits are wanted
        options = PassOptions(plan=self.plan, is_chain=True)
        output = self._run(params, tokens, chain(cache.length, width), cache, options, last)
        path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), tokens.shape)
        return commit(cache, output.trees, path, count, self._geometry)

    def read(self, cache: Cache, tokens: np.ndarray, counts: np.ndarray | None = None) -> Cache:
        """Commits the first `counts` of tokens [B, S] (all by default); the cache given is gone."""
        counts = np.full(len(tokens), tokens.shape[1]) if counts is None else counts
        for at in range(0, int(counts.max(initial=0)), self.size):
            part = tokens[:, at : at + self.size]
            part = np.pad(part, ((0, 0), (0, self.size - part.shape[1]))).astype(np.int32)
            count = np.clip(counts - at, 0, self.size).astype(np.int32)
            cache = self._read(self._params, cache, jnp.asarray(part), jnp.asarray(count))
        return cache

    def _scoring(
        self, params: Any, cache: Cache, tokens: jax.Array, targets: jax.Array, *, group: int, shared: bool
    ) -> tuple[jax.Array, jax.Array, Cache]:
        options = PassOptions(plan=self.plan, group=group, is_chain=True)
        sharing = jnp.ones((), bool) if shared else None
        output = self._run(params, tokens, chain(cache.length, tokens.shape[1]), cache, options, shared=sharing)
        taken = jnp.take_along_axis(output.logits, targets[..., None], axis=2)[..., 0]
        loss = jax.nn.logsumexp(output.logits, axis=-1) - taken
        path = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        count = jnp.full_like(cache.length, tokens.shape[1])
        best = jnp.argmax(output.logits, axis=-1).astype(jnp.int32)
        return loss, best, commit(cache, output.trees, path, count, self._geometry)

    def score(
        self, cache: Cache, tokens: np.ndarray, targets: np.ndarray, group: int = 1, shared: bool = False
    ) -> tuple[np.ndarray, np.ndarray, Cache]:
        """One pass over a chain of tokens [B, T], whose nodes share the blocks of their group's first if `shared`.

        Returns:
          -log p of the targets [B, T], the likeliest tokens [B, T], and the cache with the chain; the cache given
          stays.
        """
        ids = (jnp.asarray(x, jnp.int32) for x in (tokens, targets))
        loss, best, cache = self._score(self._params, cache, *ids, group=group, shared=shared)
        return np.asarray(loss), np.asarray(best), cache

    def _looking(
        self, params: Any, cache: Cache, tree: DraftTree, *, best: int
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        options = PassOptions(plan=self.plan)
        output = self._run(params, tree.tokens, queries_of(tree, cache.length), cache, options)
        values, ids = jax.lax.top_k(jax.nn.log_softmax(output.logits), best)
        blocks = -(-cache.capacity // self._geometry.block_size) if self._geometry else 0
        chosen = [members(choice.blocks, blocks) for choice in output.selections if choice is not None]
        return values, ids, jnp.stack(chosen)

    def look(self, cache: Cache, tree: DraftTree, best: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores a tree on a sparse model and commits nothing.

        Returns:
          Log-probabilities and ids of the likeliest tokens after each node [B, N, best], and the blocks that each
          selects in the layers that select, bool [L, B, K, N, blocks].
        """
        return jax.device_get(self._look(self._params, cache, tree, best=best))


def members(blocks: jax.Array, count: int) -> jax.Array:
    """Selected blocks [..., S], -1 padded, as sets, bool [..., count]."""
    return (blocks[..., None] == jnp.arange(count)).any(-2)
