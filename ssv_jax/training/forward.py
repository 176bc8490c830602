"""Differentiable passes over whole sequences, for training and for likelihoods.

Layers run in one scan over stacked parameters, so that a deep model compiles as fast as a shallow one. Sparse
attention is masked dense attention over tiles of queries: more arithmetic than gathering blocks, but no scatter
in its gradient, and nothing of size length x length is ever kept. It computes what `models.nsa` computes
(arXiv 2502.11089).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
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
from ..models.layers import rms_norm, rope_angles, rotate
from ..models.llama import DecoderLayer, fill_state, param_shapes
from ..models.nsa import NSAttention

_LAYER = "layers/0/"
_KEPT = "attention_output"
_ENTRY_MULTIPLE = 16
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
      selection_loss: of every layer, if asked for, see `_selection_loss`.
    """

    final: Float[Array, "B S E"]
    taps: tuple[Float[Array, "B S E"], ...]
    streams: Float[Array, "L B S E"] | None = None
    selected: Bool[Array, "L B K S N"] | None = None
    selection_loss: Float[Array, " L"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceOptions:
    """Static choices of a pass over whole sequences.

    Args:
      taps: residual streams to return: k is the stream after k layers, 0 the embeddings.
      streams: return the stream after every layer.
      selected: return the selected blocks.
      selection_loss: return how far block scores are from what full attention reads.
      remat: recompute activations in the backward pass, all but products with weights and attention outputs.
      chunk: queries per tile of sparse attention.
      segments: parts of the sequence whose queries only look at keys up to the part's end; more compile longer
        and compute less beyond the diagonal.
    """

    taps: tuple[int, ...] = ()
    streams: bool = False
    selected: bool = False
    selection_loss: bool = False
    remat: bool = False
    chunk: int = 128
    segments: int = 4


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
    names = layer_names(config)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DecoderLayer(config, dtype=dtype, rngs=nnx.Rngs(0))), nnx.Param)
    cos, sin = rope_angles(jnp.arange(length), config.head_dim, config.rope)
    if refresh is None:
        refresh = jnp.ones((config.num_layers,), bool)

    def layer_step(carry: tuple[Array, Array | None], xs: tuple[dict[str, Array], Array]) -> tuple[Any, Any]:
        x, selected = carry
        params, is_refresh = xs
        layer = nnx.merge(graphdef, fill_state(state, params))
        normed = layer.attn_norm(x)
        if isinstance(layer.attn, NSAttention):
            assert selected is not None
            out, selected, loss = _sparse_attention(layer.attn, normed, cos, sin, is_refresh, selected, options)
        else:
            out, loss = _dense_attention(layer.attn, normed, cos, sin), None
        x = x + layer.attn.o(checkpoint_name(out, _KEPT))
        x = x + layer.mlp(layer.mlp_norm(x))
        keep_stream = options.streams or bool(options.taps)
        return (x, selected), (x if keep_stream else None, selected if options.selected else None, loss)

    if options.remat:
        policies = jax.checkpoint_policies
        layer_step = jax.checkpoint(
            layer_step,
            policy=policies.save_from_both_policies(
                policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names(_KEPT)
            ),
        )
    x = jnp.take(embedding, tokens, axis=0)
    selected = None
    if config.nsa is not None:
        blocks = -(-length // config.nsa.block_size)
        selected = jnp.zeros((batch, config.num_kv_heads, length, blocks), bool)
    layers = {name: stacked[f"layers/{name}"] for name in names}
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


def _rotated(attn: DenseAttention | NSAttention, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array, Array]:
    """Rotated queries [B, S, K, G, D], unrotated and rotated keys, values [B, S, K, D]."""
    q, k, v = attn.project(x)
    q = rotate(q, cos[:, None, None], sin[:, None, None])
    return q, k, rotate(k, cos[:, None], sin[:, None]), v


def _dense_attention(attn: DenseAttention, x: Array, cos: Array, sin: Array) -> Array:
    q, _, k, v = _rotated(attn, x, cos, sin)
    flat = q.reshape(*q.shape[:2], -1, q.shape[-1])
    fast = jax.default_backend() == "gpu" and x.dtype in (jnp.bfloat16, jnp.float16)
    out = jax.nn.dot_product_attention(
        flat, k, v, is_causal=True, scale=attn.scale, implementation="cudnn" if fast else "xla"
    )
    return out.reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(spec: str, a: Array, b: Array) -> Array:
    """A batched product with a float32 result, whose gradient is again a product of the operands' dtype."""
    return jnp.einsum(spec, a, b, preferred_element_type=jnp.float32, precision=_precision(a))


def _precision(a: Array) -> jax.lax.Precision | None:
    return jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None


def _forward_rule(spec: str, a: Array, b: Array) -> tuple[Array, tuple[Array, Array]]:
    return product(spec, a, b), (a, b)


def _backward_rule(spec: str, operands: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
    # JAX's own rule would multiply float32 by bfloat16, for which no tensor core exists.
    a, b = operands
    return jax.vjp(lambda a, b: jnp.einsum(spec, a, b, precision=_precision(a)), a, b)[1](g.astype(a.dtype))


product.defvjp(_forward_rule, _backward_rule)


def _attend(scores: Array, v: Array, visible: Array) -> tuple[Array, Array]:
    """Output [B, K, C, G, D] in float32 and probabilities [B, K, C, G, N] of a tile.

    `visible` broadcasts against the scores; a row that sees nothing gives a mean, which the caller discards.
    """
    p = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return product("bkcgn,bknd->bkcgd", p.astype(v.dtype), v), p


def _compress(attn: NSAttention, raw_k: Array, v: Array, config: LlamaConfig) -> tuple[Array, Array]:
    """All entries of the sequence, [B, K, M, D] keys (rotated) and values, from [B, K, S, D].

    Padded with entries that end beyond the sequence: products of an odd width are slow.
    """
    nsa = config.nsa
    assert nsa is not None
    stride, parts = nsa.kernel_stride, nsa.kernel_size // nsa.kernel_stride
    pieces = raw_k.shape[2] // stride
    entries = max(pieces - parts + 1, 0)

    def rows(x: Array) -> Array:  # [B, K, M, l, D]
        x = x[:, :, : pieces * stride].reshape(*x.shape[:2], pieces, stride, x.shape[-1])
        return jnp.concatenate([x[:, :, i : i + entries] for i in range(parts)], axis=3)

    k_cmp, v_cmp = attn.compress_k(rows(raw_k)), attn.compress_v(rows(v))
    if nsa.cmp_rope == "post":
        cos, sin = rope_angles(jnp.arange(entries) * stride, config.head_dim, config.rope)
        k_cmp = rotate(k_cmp, cos, sin)
    padding = -entries % _ENTRY_MULTIPLE
    widths = ((0, 0), (0, 0), (0, padding), (0, 0))
    return jnp.pad(k_cmp, widths), jnp.pad(v_cmp, widths)


def _block_scores(mass: Array, blocks: int, config: LlamaConfig) -> Array:
    """Scores [B, K, C, N] of selection blocks from the head-summed mass on entries [B, K, C, M]."""
    nsa = config.nsa
    assert nsa is not None
    ratio, overlap = nsa.block_size // nsa.kernel_stride, nsa.kernel_size // nsa.kernel_stride
    width = blocks * ratio
    padded = jnp.pad(mass, [(0, 0)] * 3 + [(overlap - 1, max(width - mass.shape[-1], 0))])
    spread = sum(padded[..., i : i + width] for i in range(overlap))
    return jnp.asarray(spread).reshape(*mass.shape[:-1], blocks, ratio).sum(-1)


def _candidates(position: Array, blocks: int, config: LlamaConfig) -> tuple[Array, Array]:
    """Blocks that a query may read, and those that it must, bool [C, N]."""
    nsa = config.nsa
    assert nsa is not None
    own = (position // nsa.block_size)[:, None]
    index = jnp.arange(blocks)
    return index <= own, ((index < nsa.init_blocks) | (index > own - nsa.local_blocks)) & (index <= own)


def _choose(scores: Array, position: Array, config: LlamaConfig) -> Array:
    """Blocks that each query reads, bool [B, K, C, N], from their scores."""
    nsa = config.nsa
    assert nsa is not None
    blocks = scores.shape[-1]
    candidate, forced = _candidates(position, blocks, config)
    rank_by = jnp.where(candidate, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    _, chosen = jax.lax.top_k(rank_by, min(nsa.n_blocks, blocks))  # ties: lower index first
    return (chosen[..., None] == jnp.arange(blocks)).any(-2) & candidate


def _selection_loss(block_scores: Array, scores: Array, position: Array, config: LlamaConfig) -> Array:
    """How far block scores are from the mass that full attention puts on the blocks, summed over queries.

    Cross-entropy less entropy between both as distributions over the blocks that are not forced, weighted by the
    share of full attention that lies there: 0 where only forced blocks matter. It trains the compressor, which the
    choice of blocks itself, having no gradient, does not (after DeepSeek-V3.2's indexer, arXiv 2512.02556).

    Args:
      block_scores: [B, K, C, N].
      scores: of single keys, scaled, [B, K, C, G, S]; no gradient flows into them.
      position: of the C queries.
      config: the model.
    """
    nsa = config.nsa
    assert nsa is not None
    blocks, keys = block_scores.shape[-1], scores.shape[-1]
    causal = (jnp.arange(keys) <= position[:, None])[:, None]
    full = jax.nn.softmax(jnp.where(causal, jax.lax.stop_gradient(scores), -1e30), axis=-1)
    near = -(-keys // nsa.block_size)
    full = jnp.pad(full, [(0, 0)] * 4 + [(0, near * nsa.block_size - keys)])
    mass = full.reshape(*full.shape[:-1], near, nsa.block_size).sum(-1).mean(3)  # [B, K, C, near]
    mass = jnp.pad(mass, [(0, 0)] * 3 + [(0, blocks - near)])
    candidate, forced = _candidates(position, blocks, config)
    free = candidate & ~forced
    mass = jnp.where(free, mass, 0.0)
    share = mass.sum(-1, keepdims=True)
    chances = jnp.where(free, block_scores, 0.0) + 1e-9
    log_ratio = jnp.log(mass / jnp.maximum(share, 1e-9) + 1e-9) - jnp.log(chances / chances.sum(-1, keepdims=True))
    return jnp.where(free, mass * log_ratio, 0.0).sum()


def _sparse_attention(
    attn: NSAttention,
    x: Array,
    cos: Array,
    sin: Array,
    is_refresh: Array,
    inherited: Array,
    options: SequenceOptions,
) -> tuple[Array, Array, Array | None]:
    """Output before the output projection [B, S, K, G, D], selected blocks [B, K, S, N], and the selection loss."""
    config, nsa = attn.config, attn.config.nsa
    assert nsa is not None
    q, *keyed = (jnp.moveaxis(y, 1, 2) for y in _rotated(attn, x, cos, sin))  # heads first
    raw, k, v = keyed
    k_cmp, v_cmp = _compress(attn, k if nsa.cmp_rope == "pre" else raw, v, config)
    gates = jnp.moveaxis(attn.gates(x), 1, 2)
    length, blocks, window = x.shape[1], inherited.shape[-1], nsa.window_keys
    entry_end = jnp.arange(k_cmp.shape[2]) * nsa.kernel_stride + nsa.kernel_size - 1
    reach = min(window, length)  # keys before a tile that its window may touch
    # Float32 between tiles: their gradients are added up in it.
    k, v, k_cmp, v_cmp = (y.astype(jnp.float32) for y in (k, v, k_cmp, v_cmp))
    k_wide, v_wide = (jnp.pad(y, ((0, 0), (0, 0), (reach, 0), (0, 0))) for y in (k, v))

    @functools.partial(jax.checkpoint, static_argnums=(1, 2))
    def tile(start: Array, size: int, keys: int) -> tuple[Array, Array, Array]:
        """Queries start ... start + size - 1 over the first `keys` keys."""
        cut = lambda y, length=size: jax.lax.dynamic_slice_in_dim(y, start, length, 2)  # noqa: E731
        low = lambda y: y.astype(q.dtype)  # noqa: E731
        q_tile, gate = cut(q), cut(gates)
        score = lambda y: product("bkcgd,bknd->bkcgn", q_tile, low(y)) * attn.scale  # noqa: E731
        position = start + jnp.arange(size)
        if k_cmp.shape[2]:
            seen = entry_end <= position[:, None]
            out_cmp, p = _attend(score(k_cmp), low(v_cmp), seen[:, None])
            seeing = seen.any(-1)[:, None, None]
            out_cmp, mass = out_cmp * seeing, (p * seeing).sum(3)
        else:
            out_cmp, mass = jnp.zeros(q_tile.shape, jnp.float32), jnp.zeros((*inherited.shape[:2], size, 0))
        block_scores = _block_scores(mass, blocks, config)
        chosen = _choose(jax.lax.stop_gradient(block_scores), position, config)
        chosen = jnp.where(is_refresh, chosen, cut(inherited))
        key = jnp.arange(keys)
        readable = jnp.repeat(chosen[..., : -(-keys // nsa.block_size)], nsa.block_size, axis=-1)[..., :keys]
        readable = (readable & (key <= position[:, None]))[:, :, :, None]
        scores = score(k[:, :, :keys])
        out_slc, _ = _attend(scores, low(v[:, :, :keys]), readable)
        loss = _selection_loss(block_scores, scores, position, config) if options.selection_loss else jnp.zeros(())
        at = start - reach + jnp.arange(size + reach)
        inside = (at >= 0) & (at <= position[:, None]) & (at > position[:, None] - window)
        near_k, near_v = (cut(y, size + reach) for y in (k_wide, v_wide))
        out_win, _ = _attend(score(near_k), low(near_v), inside[:, None])
        out = sum(gate[..., i, None] * branch for i, branch in enumerate((out_cmp, out_slc, out_win)))
        return jnp.asarray(out).astype(x.dtype), chosen, loss

    parts, chosen_parts, loss = [], [], jnp.zeros(())
    for begin, size, count in _tiles(length, options.chunk, options.segments):
        keys = begin + size * count
        starts = begin + size * jnp.arange(count)
        *results, losses = jax.lax.map(lambda s, size=size, keys=keys: tile(s, size, keys), starts)
        out, chosen = (jnp.moveaxis(y, 0, 2) for y in results)  # [B, K, tiles, C, ...]
        parts.append(out.reshape(*out.shape[:2], size * count, *out.shape[4:]))
        chosen_parts.append(chosen.reshape(*chosen.shape[:2], size * count, blocks))
        loss += losses.sum()
    out = jnp.moveaxis(jnp.concatenate(parts, axis=2), 2, 1)
    rows = out.shape[0] * length * config.num_kv_heads
    return out, jnp.concatenate(chosen_parts, axis=2), loss / rows if options.selection_loss else None


def _tiles(length: int, chunk: int, segments: int) -> list[tuple[int, int, int]]:
    """(first query, tile size, number of tiles) of each segment."""
    chunk = min(chunk, length)
    whole = length // chunk
    per = max(1, -(-whole // segments))
    tiles = [(first * chunk, chunk, min(per, whole - first)) for first in range(0, whole, per)]
    if length % chunk:
        tiles.append((whole * chunk, length % chunk, 1))
    return tiles
