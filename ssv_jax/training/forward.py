"""Differentiable passes over whole sequences, for training and for likelihoods.

Layers run in one scan over stacked parameters, so that a deep model compiles as fast as a shallow one. Sparse
attention is in `sparse`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..models.attention import DenseAttention
from ..models.config import LlamaConfig
from ..models.layers import rms_norm, rope_angles
from ..models.llama import DecoderLayer, fill_state, param_shapes
from ..models.nsa import NSAttention
from .sparse import SELECTED, SparseOptions, library_attention, rotated, sparse_attention

_LAYER = "layers/0/"
_KEPT = "attention_output"
Stacked = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Hidden:
    """Results of `hidden_states`.

    Attributes:
      final: after the final norm, what the output head reads.
      taps: residual streams, in the order asked for.
      streams: residual streams after every layer, if asked for.
      selected: blocks that each query reads in every layer, if asked for.
      selection_loss: of every layer, if asked for, see `sparse.selection_loss`.
    """

    final: Float[Array, "B S E"]
    taps: tuple[Float[Array, "B S E"], ...]
    streams: Float[Array, "L B S E"] | None = None
    selected: Bool[Array, "L B K S N"] | None = None
    selection_loss: Float[Array, " L"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOptions(SparseOptions):
    """Static choices of a pass over whole sequences, beside those of sparse attention.

    Args:
      taps: residual streams to return: k is the stream after k layers, 0 the embeddings.
      streams: return the stream after every layer.
      selected: return the selected blocks.
      remat: recompute activations in the backward pass, all but products with weights and attention outputs.
    """

    taps: tuple[int, ...] = ()
    streams: bool = False
    selected: bool = False
    remat: bool = False


def layer_names(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Names of a layer's parameters, relative to the layer, and their shapes."""
    return {name.removeprefix(_LAYER): s for name, s in param_shapes(config).items() if name.startswith(_LAYER)}


def stack_params(config: LlamaConfig, params: Mapping[str, Any], dtype: DTypeLike | None = None) -> Stacked:
    """Parameters by flat name with those of the layers stacked: `layers/NAME` is [L, ...].

    Args:
      config: the model.
      params: by the flat names of `models.llama.param_shapes`.
      dtype: of the result; that of the parameters by default.
    """
    stacked: Stacked = {
        name: jnp.asarray(value, dtype) for name, value in params.items() if not name.startswith("layers/")
    }
    for name in layer_names(config):
        rows = [np.asarray(params[f"layers/{i}/{name}"]) for i in range(config.num_layers)]
        stacked[f"layers/{name}"] = jnp.asarray(np.stack(rows), dtype)
    return stacked


def unstack_params(config: LlamaConfig, stacked: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `stack_params`, on the host."""
    params = split_layers(stacked)
    return {name: params[name] for name in param_shapes(config)}


def split_layers(stacked: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Any values by stacked name as rows by flat name, on the host."""
    rows: dict[str, np.ndarray] = {}
    for name, value in stacked.items():
        if not name.startswith("layers/"):
            rows[name] = np.asarray(value)
            continue
        for layer, row in enumerate(np.asarray(value)):
            rows[f"layers/{layer}/{name.removeprefix('layers/')}"] = row
    return rows


def layer_builder(config: LlamaConfig, dtype: DTypeLike) -> Callable[[Mapping[str, Array]], DecoderLayer]:
    """A function from one layer's parameters, by `layer_names`, to the layer."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, dtype=dtype, rngs=nnx.Rngs(0))), nnx.Param)
    return lambda params: nnx.merge(graphdef, fill_state(state, params))


def layer_output(
    layer: DecoderLayer,
    x: Float[Array, "B S E"],
    cos: Float[Array, "S R"],
    sin: Float[Array, "S R"],
    is_refresh: Bool[Array, ""],
    selected: Bool[Array, "B K S N"] | None,
    options: SequenceOptions,
) -> tuple[Float[Array, "B S E"], Bool[Array, "B K S N"] | None, Float[Array, ""] | None]:
    """The residual stream after a layer, the blocks that its queries read, and its selection loss, if asked for."""
    normed, loss = layer.attn_norm(x), None
    if isinstance(layer.attn, NSAttention):
        assert selected is not None
        out, selected, loss = sparse_attention(layer.attn, normed, cos, sin, is_refresh, selected, options)
    else:
        out = _dense_attention(layer.attn, normed, cos, sin)
    x = x + layer.attn.o(checkpoint_name(out, _KEPT))
    return x + layer.mlp(layer.mlp_norm(x)), selected, loss


def hidden_states(
    config: LlamaConfig,
    stacked: Mapping[str, Array],
    tokens: Int[Array, "B S"],
    refresh: Bool[Array, " L"] | None = None,
    options: SequenceOptions = SequenceOptions(),  # noqa: B008 - frozen
) -> Hidden:
    """Runs whole sequences from position 0.

    Args:
      config: the model, dense or sparse.
      stacked: parameters, see `stack_params`; their dtype is that of the computation.
      tokens: B sequences of S tokens.
      refresh: layers that select blocks, all by default; the first must. May be traced, so that one compiled
        step serves every plan.
      options: static choices.

    Returns:
      What the output head reads, and the streams asked for.
    """
    dtype = stacked["embed/embedding"].dtype
    highest = jax.default_matmul_precision("highest" if dtype == jnp.float32 else "default")
    with highest:
        return _run(config, stacked, tokens, refresh, options)


def logits_of(config: LlamaConfig, stacked: Mapping[str, Array], final: Float[Array, "... E"]) -> Float[Array, "... V"]:
    """Next-token logits in float32 from `Hidden.final`."""
    with jax.default_matmul_precision("highest" if final.dtype == jnp.float32 else "default"):
        if config.tie_embeddings:
            head = stacked["embed/embedding"]
            return jnp.einsum("...e,ve->...v", final, head, preferred_element_type=jnp.float32)
        return jnp.einsum("...e,ev->...v", final, stacked["lm_head/kernel"], preferred_element_type=jnp.float32)


def _run(
    config: LlamaConfig,
    stacked: Mapping[str, Array],
    tokens: Array,
    refresh: Array | None,
    options: SequenceOptions,
) -> Hidden:
    embedding = stacked["embed/embedding"]
    dtype = embedding.dtype
    batch, length = tokens.shape
    build = layer_builder(config, dtype)
    cos, sin = rope_angles(jnp.arange(length), config.head_dim, config.rope)
    if refresh is None:
        refresh = jnp.ones((config.num_layers,), bool)

    def layer_step(carry: tuple[Array, Array | None], xs: tuple[dict[str, Array], Array]) -> tuple[Any, Any]:
        x, selected = carry
        params, is_refresh = xs
        layer = build(params)
        x, selected, loss = layer_output(layer, x, cos, sin, is_refresh, selected, options)
        keep_stream = options.streams or bool(options.taps)
        return (x, selected), (x if keep_stream else None, selected if options.selected else None, loss)

    if options.remat:
        policies = jax.checkpoint_policies
        layer_step = jax.checkpoint(
            layer_step,
            policy=policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(_KEPT, SELECTED)
            ),
        )
    x = jnp.take(embedding, tokens, axis=0)
    selected = None
    if config.nsa is not None:
        blocks = -(-length // config.nsa.block_size)
        selected = jnp.zeros((batch, config.num_kv_heads, length, blocks), bool)
    layers = {name: stacked[f"layers/{name}"] for name in layer_names(config)}
    first = x
    (x, _), (streams, selections, losses) = jax.lax.scan(layer_step, (x, selected), (layers, refresh))
    taps = tuple(first if tap == 0 else streams[tap - 1] for tap in options.taps)
    return Hidden(
        final=rms_norm(x, stacked["norm/scale"], config.rms_eps),
        taps=taps,
        streams=streams if options.streams else None,
        selected=selections,
        selection_loss=losses,
    )


def _dense_attention(attn: DenseAttention, x: Array, cos: Array, sin: Array) -> Array:
    q, _, k, v = rotated(attn, x, cos, sin)
    flat = q.reshape(*q.shape[:2], -1, q.shape[-1])
    return library_attention(flat, k, v, scale=attn.scale).reshape(q.shape)
