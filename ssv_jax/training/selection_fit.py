"""The fit of one layer's key compressor to the mass that full attention puts on blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..models.config import LlamaConfig
from ..models.layers import rope_angles
from ..models.llama import param_shapes
from ..models.nsa import NSAttention
from .forward import SequenceOptions, layer_builder, layer_output
from .schedule import adamw, learning_rate
from .sparse import attention_mass, compress, free_blocks, key_scores, rotated, score_blocks, selection_loss

COMPRESSOR = "attn/compress_k/"
_CHECKS = 8  # of the held-out loss in a fit; the best values are kept
_TOGETHER = 32  # queries whose full attention is computed at a time


def with_pools(config: LlamaConfig, arrays: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """A delta's tensors, with pools where it has none: those of keys read a little, those of values nothing.

    Args:
      config: of the model with `cmp_fn="pooled"`.
      arrays: of the delta, by flat name.
      seed: of the pools' queries.
    """
    assert config.nsa is not None
    rng, result = np.random.default_rng(seed), dict(arrays)
    for name, shape in param_shapes(config).items():
        if "/pool_" in name and name not in arrays:
            value = np.zeros(shape, np.float32)
            if name.endswith("pool_query"):
                value = rng.standard_normal(shape, np.float32) * np.float32(0.1)
            elif name.endswith("pool_mix") and COMPRESSOR in name:
                value += np.float32(0.2 / config.nsa.cmp_pools)
            result[name] = value
    return result


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Seen:
    """What the fit of a layer needs of a sequence.

    Attributes:
      position: of the C queries.
      q: rotated.
      rows: the compressor's input.
      mass: that full attention puts on blocks.
    """

    position: Int[Array, " C"]
    q: Float[Array, "1 K C G D"]
    rows: Float[Array, "1 K S D"]
    mass: Float[Array, "1 K C N"]


class LayerFit:
    """Compiled parts of the fit, the same for all layers.

    Args:
      config: of the sparse model.
      length: tokens of a sequence.
      dtype: of the layers; the compressor is fitted in float32.
      chunk: queries per tile of sparse attention.
    """

    def __init__(self, config: LlamaConfig, *, length: int, dtype: DTypeLike, chunk: int) -> None:
        assert config.nsa is not None
        self._config, self._dtype = config, jnp.dtype(dtype)
        self._blocks = -(-length // config.nsa.block_size)
        self._build = layer_builder(config, dtype)
        self._cos, self._sin = rope_angles(jnp.arange(length), config.head_dim, config.rope)
        self._options = SequenceOptions(chunk=chunk)
        self._optimizer = adamw(weight_decay=0.0, clip=1.0)
        self.draw = jax.jit(self._draw, static_argnames=("count", "focus"))
        self.observe = jax.jit(self._observe)
        self.loss = jax.jit(self._loss)
        self.advance = jax.jit(self._advance)
        self._step = jax.jit(self._update)

    def _precise(self) -> Any:
        return jax.default_matmul_precision("highest" if self._dtype == jnp.float32 else "default")

    def _attention(self, params: Mapping[str, Array]) -> NSAttention:
        attn = self._build(params).attn
        assert isinstance(attn, NSAttention)
        return attn

    def _projected(self, params: Mapping[str, Array], x: Float[Array, "1 S E"]) -> tuple[Array, ...]:
        """Rotated queries [1, K, S, G, D], unrotated and rotated keys [1, K, S, D]."""
        normed = self._build(params).attn_norm(x)
        q, raw, k, _ = rotated(self._attention(params), normed, self._cos, self._sin)
        return tuple(jnp.moveaxis(y, 1, 2) for y in (q, raw, k))

    def _masses(self, q: Array, k: Array, position: Int[Array, " C"], scale: float, reduce: Any) -> Array:
        """`reduce` of the mass [1, K, n, N] on blocks of some queries at a time, for q [1, K, C, G, D]; C leads."""

        def one(index: Array) -> Array:  # few queries at a time: scores of all would be large
            scores = key_scores(q[:, :, index][:, :, None], k, scale)
            return reduce(attention_mass(scores, position[index][None], self._blocks, self._config), position[index])

        return jax.lax.map(one, jnp.arange(position.shape[0]), batch_size=_TOGETHER)

    def _draw(
        self, params: dict[str, Array], x: Float[Array, "1 S E"], key: Array, *, count: int, focus: float
    ) -> Int[Array, " C"]:
        """Positions of `count` queries that have free blocks, those more often that retrieve.

        A query retrieves as much as the free block that a KV head reads most has of its attention. Such queries are
        few, and they are those that lose by a wrong selection.

        Args:
          params, x: as `observe`.
          key: of the draw.
          count: C.
          focus: share of the chances that follows how much a query retrieves; 0 draws evenly.
        """
        nsa = self._config.nsa
        assert nsa is not None
        position = jnp.arange((nsa.init_blocks + nsa.local_blocks) * nsa.block_size, x.shape[1])

        def peak(mass: Array, at: Array) -> Array:
            return jnp.where(free_blocks(at[None], self._blocks, self._config), mass[0, :, 0], 0.0).max()

        chance = jnp.ones(position.shape[0])
        if focus > 0:
            with self._precise():
                q, _, k = self._projected(params, x)
                peaks = self._masses(q[:, :, position], k, position, self._attention(params).scale, peak)
            chance = (1 - focus) + focus * peaks / jnp.maximum(peaks.mean(), 1e-9)
        _, drawn = jax.lax.top_k(jnp.log(chance + 1e-9) + jax.random.gumbel(key, chance.shape), count)
        return jnp.sort(position[drawn])

    def _observe(self, params: dict[str, Array], x: Float[Array, "1 S E"], position: Int[Array, " C"]) -> Seen:
        """A sequence as the fit sees it, from the layer's parameters and input."""
        assert self._config.nsa is not None
        with self._precise():
            q, raw, k = self._projected(params, x)
            q = q[:, :, position]
            mass = self._masses(q, k, position, self._attention(params).scale, lambda mass, _: mass[:, :, 0])
            rows = k if self._config.nsa.cmp_rope == "pre" else raw
            return Seen(position=position, q=q, rows=rows, mass=jnp.moveaxis(mass, 0, 2))

    def _loss(self, fitted: dict[str, Array], params: dict[str, Array], seen: Seen) -> Array:
        """The selection loss per query and KV head, nats."""
        with self._precise():
            attn = self._attention(params | {name: value.astype(self._dtype) for name, value in fitted.items()})
            k_cmp, _ = compress(attn, seen.rows, seen.rows)
            scores = score_blocks(seen.q, k_cmp, seen.position, self._blocks, attn)
            return selection_loss(scores, seen.mass, seen.position, self._config) / (seen.q.shape[1] * seen.q.shape[2])

    def _update(
        self, fitted: dict[str, Array], state: Any, params: dict[str, Array], seen: Seen, rate: Array
    ) -> tuple[dict[str, Array], Any]:
        grads = jax.grad(self._loss)(fitted, params, seen)
        updates, state = self._optimizer.update(grads, state, fitted)
        return jax.tree.map(lambda value, update: value - rate * update, fitted, updates), state

    def _advance(self, params: dict[str, Array], x: Float[Array, "1 S E"]) -> Float[Array, "1 S E"]:
        """The layer's output, selecting its own blocks."""
        with self._precise():
            selected = jnp.zeros((1, self._config.num_kv_heads, x.shape[1], self._blocks), bool)
            layer = self._build(params)
            return layer_output(layer, x, self._cos, self._sin, jnp.array(True), selected, self._options)[0]

    def fit(
        self, params: dict[str, Array], fit_on: list[Seen], check_on: list[Seen], *, steps: int, rate: float, seed: int
    ) -> tuple[dict[str, np.ndarray], tuple[float, float]]:
        """Fits a layer's compressor.

        Args:
          params: of the layer, by `forward.layer_names`.
          fit_on: sequences to learn from, one a step.
          check_on: sequences that decide when it was best.
          steps: to take.
          rate: peak learning rate.
          seed: of the order.

        Returns:
          The fitted parameters, float32, and the mean loss on `check_on` before and after.
        """
        fitted = {name: v.astype(jnp.float32) for name, v in params.items() if name.startswith(COMPRESSOR)}
        state = self._optimizer.init(fitted)
        rng = np.random.default_rng(seed)

        def checked() -> float:
            return float(np.mean([float(self.loss(fitted, params, seen)) for seen in check_on]))

        before = least = checked()
        best = fitted
        for step in range(steps):
            now = learning_rate(step, rate, steps // 20, steps)
            chosen = fit_on[int(rng.integers(len(fit_on)))]
            fitted, state = self._step(fitted, state, params, chosen, np.float32(now))
            if (step + 1) % max(steps // _CHECKS, 1) == 0 and (loss := checked()) < least:
                least, best = loss, fitted
        return {name: np.asarray(value) for name, value in best.items()}, (before, least)
