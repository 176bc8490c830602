"""EAGLE-3 draft head: fused target features, decoder layers over (token, feature) pairs, a reduced vocabulary.

Pair i joins the target's feature at position i with the token at i + 1. The head's output for a pair is the
next feature, from which the token at i + 2 is predicted and which takes the target feature's place in drafted
pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..pallas_kernels import ShapeError, TreeQueries, dense_verify
from ..pallas_kernels.dispatch import Implementation
from .cache import Cache, DenseLayerCache, DenseLayerTree, LayerCache
from .eagle3_config import NUM_TAPS, Eagle3Config
from .layers import Projection, RMSNorm, SwiGLU, rope_angles, rotate
from .llama import Embedding, fill_state, flat_name


class VocabMap(nnx.Variable):
    """Integer table that is loaded with the parameters and never trained."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DraftOptions:
    """Static choices of one pass of the head.

    Args:
      window: pairs in reach of the attention, the own one included; None for all.
      implementation: of the attention, see `pallas_kernels.dispatch.run`.
    """

    window: int | None = None
    implementation: Implementation = None


class DraftAttention(nnx.Module):
    """Grouped-query attention whose input may be wider than its output."""

    def __init__(self, config: Eagle3Config, inputs: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        kv_heads, group, dim = config.num_kv_heads, config.group, config.head_dim
        self.config = config
        self.qkv = Projection((inputs,), (kv_heads, group + 2, dim), bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o = Projection((kv_heads, group, dim), (config.hidden_size,), bias=config.o_bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T I"],
        queries: TreeQueries,
        cache: LayerCache,
        earlier: DenseLayerTree | None,
        options: DraftOptions,
    ) -> tuple[Float[Array, "B T E"], DenseLayerTree]:
        """See `Eagle3.__call__`."""
        assert isinstance(cache, DenseLayerCache)
        qkv = self.qkv(x)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        rows = x.shape[1]
        cos, sin = rope_angles(queries.position[:, -rows:], self.config.head_dim, self.config.rope)
        q = rotate(q, cos[:, :, None, None], sin[:, :, None, None])
        k = rotate(k, cos[:, :, None], sin[:, :, None])
        tree = DenseLayerTree(k=jnp.swapaxes(k, 1, 2), v=jnp.swapaxes(v, 1, 2))
        if earlier is not None:
            tree = jax.tree.map(lambda old, new: jnp.concatenate([old, new], axis=2), earlier, tree)
        out = dense_verify(
            q,
            cache.k,
            cache.v,
            tree.k,
            tree.v,
            queries,
            scale=self.config.head_dim**-0.5,
            window=options.window,
            dtype=x.dtype,
            implementation=options.implementation,
        )
        return self.o(out.astype(x.dtype)), tree


class DraftLayer(nnx.Module):
    """A decoder layer; the first of a head attends from token and feature side by side."""

    def __init__(self, config: Eagle3Config, *, first: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        size, eps = config.hidden_size, config.rms_eps
        self.normed_residual = config.normed_residual
        if first:
            self.token_norm = RMSNorm(size, eps=eps, dtype=dtype)
            self.feature_norm = RMSNorm(size, eps=eps, dtype=dtype)
        else:
            self.attn_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.attn = DraftAttention(config, 2 * size if first else size, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(size, eps=eps, dtype=dtype)
        self.mlp = SwiGLU(size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        embedded: Float[Array, "B T E"] | None,
        queries: TreeQueries,
        cache: LayerCache,
        earlier: DenseLayerTree | None,
        options: DraftOptions,
    ) -> tuple[Float[Array, "B T E"], DenseLayerTree]:
        """The stream after this layer; `embedded` are the tokens' embeddings, in the first layer."""
        if embedded is None:
            joined = self.attn_norm(x)
        else:
            normed = self.feature_norm(x)
            joined = jnp.concatenate([self.token_norm(embedded), normed], axis=-1)
            x = normed if self.normed_residual else x
        out, tree = self.attn(joined, queries, cache, earlier, options)
        x = x + out
        return x + self.mlp(self.mlp_norm(x)), tree


class Eagle3(nnx.Module):
    """The head; holds parameters only, the cache of pairs travels as an argument."""

    def __init__(self, config: Eagle3Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        if config.own_embedding:
            self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        width = config.target_hidden_size
        if config.tap_norm == "each":
            norms = [RMSNorm(width, eps=config.rms_eps, dtype=dtype) for _ in range(NUM_TAPS)]
            self.tap_norms = nnx.List(norms)
        elif config.tap_norm == "concat":
            self.tap_norm = RMSNorm(NUM_TAPS * width, eps=config.rms_eps, dtype=dtype)
        self.fc = Projection((NUM_TAPS * width,), (config.hidden_size,), bias=False, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DraftLayer(config, first=i == 0, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_eps, dtype=dtype)
        self.lm_head = Projection((config.hidden_size,), (config.draft_vocab_size,), bias=False, dtype=dtype, rngs=rngs)
        if config.reduced_vocab:
            self.target_ids = VocabMap(jnp.arange(config.draft_vocab_size, dtype=jnp.int32))

    def fuse(self, taps: tuple[Float[Array, "B T Et"], ...]) -> Float[Array, "B T E"]:
        """The feature of each position from the target's residual streams, low to high.

        Raises:
          ShapeError: another number of taps, or another width than `target_hidden_size`.
        """
        width = self.config.target_hidden_size
        shapes = [tap.shape for tap in taps]
        if len(taps) != NUM_TAPS or any(shape[-1] != width for shape in shapes):
            raise ShapeError(f"taps have shapes {shapes}, expected {NUM_TAPS} of width {width}")
        with jax.default_matmul_precision("highest"):
            taps = tuple(tap.astype(self.fc.kernel.dtype) for tap in taps)
            if self.config.tap_norm == "each":
                taps = tuple(norm(tap) for norm, tap in zip(self.tap_norms, taps, strict=True))
            joined = jnp.concatenate(taps, axis=-1)
            if self.config.tap_norm == "concat":
                joined = self.tap_norm(joined)
            return self.fc(joined)

    def __call__(
        self,
        embedded: Float[Array, "B T E"],
        features: Float[Array, "B T E"],
        queries: TreeQueries,
        cache: Cache,
        earlier: tuple[DenseLayerTree, ...] | None = None,
        options: DraftOptions = DraftOptions(),  # noqa: B008 - frozen
    ) -> tuple[Float[Array, "B T E"], tuple[DenseLayerTree, ...]]:
        """The features after T pairs.

        Args:
          embedded: embeddings of the pairs' tokens.
          features: the pairs' features: fused taps, or outputs of this method.
          queries: where the X pairs of `earlier` passes and of this one stand; this one's are the last T.
          cache: stable pairs.
          earlier: keys and values of the X - T pairs before this pass, by layer.
          options: static choices.

        Returns:
          The next features [B, T, E], and the keys and values of all X pairs.
        """
        size = self.config.hidden_size
        for name, x in (("embedded", embedded), ("features", features)):
            if x.shape[-1] != size:
                raise ShapeError(f"{name} have shape {x.shape}, expected width {size}")
        trees: list[DenseLayerTree] = []
        with jax.default_matmul_precision("highest"):
            x = features.astype(self.fc.kernel.dtype)
            for i, layer in enumerate(self.layers):
                token = embedded.astype(x.dtype) if i == 0 else None
                before = None if earlier is None else earlier[i]
                x, tree = layer(x, token, queries, cache.layers[i], before, options)
                trees.append(tree)
            if self.config.normed_output:
                x = self.norm(x)
        return x, tuple(trees)

    def logits(self, features: Float[Array, "B T E"]) -> Float[Array, "B T Vd"]:
        """Next-token logits over the draft vocabulary, float32, from features that `__call__` returned."""
        with jax.default_matmul_precision("highest"):
            x = features.astype(self.fc.kernel.dtype)
            return self.lm_head(x if self.config.normed_output else self.norm(x), dtype=jnp.float32)

    def to_target(self, draft_ids: Int[Array, "..."]) -> Int[Array, "..."]:
        """Target ids of draft ids."""
        return jnp.take(self.target_ids[...], draft_ids) if self.config.reduced_vocab else draft_ids


def init_draft_cache(config: Eagle3Config, capacity: int, *, batch: int, dtype: DTypeLike) -> Cache:
    """An empty cache of `capacity` pairs."""

    def zeros() -> Float[Array, "B K L D"]:
        return jnp.zeros((batch, config.num_kv_heads, capacity, config.head_dim), dtype)

    layers = tuple(DenseLayerCache(k=zeros(), v=zeros()) for _ in range(config.num_layers))
    return Cache(layers=layers, length=jnp.zeros((batch,), jnp.int32))


def _abstract(config: Eagle3Config, dtype: DTypeLike) -> tuple[nnx.GraphDef, nnx.State]:
    return nnx.split(nnx.eval_shape(lambda: Eagle3(config, dtype=dtype, rngs=nnx.Rngs(0))))


def param_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Flat names of the parameters, the vocabulary map included, and their shapes."""
    _, state = _abstract(config, jnp.float32)
    return {flat_name(path): tuple(leaf.shape) for path, leaf in nnx.to_flat_state(state)}


def build(
    config: Eagle3Config, params: Mapping[str, Array | np.ndarray], dtype: DTypeLike = jnp.float32
) -> tuple[nnx.GraphDef, nnx.State]:
    """The head's structure and state with the given parameters.

    Args:
      config: the head.
      params: arrays by flat name, exactly those of `param_shapes`.
      dtype: floating-point parameters are cast to it.

    Raises:
      ValueError: missing, unknown or wrongly shaped parameters; all are listed.
    """
    graphdef, state = _abstract(config, dtype)
    return graphdef, fill_state(state, params)


def random_params(config: Eagle3Config, seed: int = 0, dtype: DTypeLike = jnp.float32) -> dict[str, Array]:
    """Freshly initialised parameters by flat name; the draft vocabulary is the first ids."""
    make = jax.jit(lambda: nnx.split(Eagle3(config, dtype=dtype, rngs=nnx.Rngs(seed)))[1])
    return {flat_name(path): leaf[...] for path, leaf in nnx.to_flat_state(make())}
