"""Sparse attention over whole sequences, with a gradient: for training and for likelihoods.

It computes what `models.nsa` computes (arXiv 2502.11089) as masked dense attention: more arithmetic than gathering
blocks, but no scatter in its gradient. By tiles of queries, nothing of size length x length is ever kept; on a GPU in
half precision, selected and window branches are calls of cuDNN's attention instead, which is several times as fast.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from ..models.attention import DenseAttention
from ..models.config import LlamaConfig
from ..models.layers import rope_angles, rotate
from ..models.nsa import NSAttention

SELECTED = "selected_blocks"
_ENTRY_MULTIPLE = 16


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


def rotated(attn: DenseAttention | NSAttention, x: Array, cos: Array, sin: Array) -> tuple[Array, Array, Array, Array]:
    """Rotated queries [B, S, K, G, D], unrotated and rotated keys, values [B, S, K, D]."""
    q, k, v = attn.project(x)
    q = rotate(q, cos[:, None, None], sin[:, None, None])
    return q, k, rotate(k, cos[:, None], sin[:, None]), v


def _attend(scores: Array, v: Array, visible: Array) -> Array:
    """Output [B, K, C, G, D] of a tile in float32; `visible` broadcasts against the scores [B, K, C, G, N]."""
    p = jax.nn.softmax(jnp.where(visible, scores, -1e30), axis=-1)
    return product("bkcgn,bknd->bkcgd", p.astype(v.dtype), v)


def compress(attn: NSAttention, raw_k: Array, v: Array) -> tuple[Array, Array]:
    """All entries of the sequence, [B, K, M, D] keys (rotated) and values, from [B, K, S, D].

    Padded with entries that end beyond the sequence: products of an odd width are slow.
    """
    config, nsa = attn.config, attn.config.nsa
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


def free_blocks(position: Array, blocks: int, config: LlamaConfig) -> Array:
    """Blocks that a query may but need not read, bool [C, N].

    Args:
      position: of the C queries.
      blocks: N.
      config: the model.
    """
    candidate, forced = _candidates(position, blocks, config)
    return candidate & ~forced


def choose_blocks(scores: Array, position: Array, config: LlamaConfig) -> Array:
    """Blocks that each query reads, bool [B, K, C, N]: the forced ones, and those of the highest scores.

    Args:
      scores: of blocks, [B, K, C, N]; of equal ones the lower block counts.
      position: of the C queries.
      config: the model.
    """
    nsa = config.nsa
    assert nsa is not None
    blocks = scores.shape[-1]
    candidate, forced = _candidates(position, blocks, config)
    rank_by = jnp.where(candidate, jnp.where(forced, jnp.inf, scores), -jnp.inf)
    _, chosen = jax.lax.top_k(rank_by, min(nsa.n_blocks, blocks))  # ties: lower index first
    return (chosen[..., None] == jnp.arange(blocks)).any(-2) & candidate


def attention_mass(scores: Array, position: Array, blocks: int, config: LlamaConfig) -> Array:
    """The mass that full attention puts on every block, mean over heads, [B, K, C, N]; no gradient flows into it.

    Args:
      scores: of single keys, scaled, [B, K, C, G, S].
      position: of the C queries.
      blocks: N.
      config: the model.
    """
    nsa = config.nsa
    assert nsa is not None
    keys = scores.shape[-1]
    causal = (jnp.arange(keys) <= position[:, None])[:, None]
    full = jax.nn.softmax(jnp.where(causal, jax.lax.stop_gradient(scores), -1e30), axis=-1)
    near = -(-keys // nsa.block_size)
    full = jnp.pad(full, [(0, 0)] * 4 + [(0, near * nsa.block_size - keys)])
    mass = full.reshape(*full.shape[:-1], near, nsa.block_size).sum(-1).mean(3)  # [B, K, C, near]
    return jnp.pad(mass, [(0, 0)] * 3 + [(0, blocks - near)])


def selection_loss(block_scores: Array, mass: Array, position: Array, config: LlamaConfig) -> Array:
    """How far block scores are from the mass that full attention puts on the blocks, summed over queries.

    Cross-entropy less entropy between both as distributions over the blocks that are not forced, weighted by the
    share of full attention that lies there: 0 where only forced blocks matter. It trains the compressor, which the
    choice of blocks itself, having no gradient, does not (after DeepSeek-V3.2's indexer, arXiv 2512.02556).

    Args:
      block_scores: [B, K, C, N].
      mass: of the same blocks, see `attention_mass`.
      position: of the C queries.
      config: the model.
    """
    free = free_blocks(position, block_scores.shape[-1], config)
    mass = jnp.where(free, mass, 0.0)
    share = mass.sum(-1, keepdims=True)
    chances = jnp.where(free, block_scores, 0.0) + 1e-9
    log_ratio = jnp.log(mass / jnp.maximum(share, 1e-9) + 1e-9) - jnp.log(chances / chances.sum(-1, keepdims=True))
    return jnp.where(free, mass * log_ratio, 0.0).sum()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptions:
    """Static choices of sparse attention over whole sequences.

    Args:
      selection_loss: return how far block scores are from what full attention reads.
      selection_every: that loss is of each n-th query.
      chunk: queries per tile.
      segments: parts of the sequence whose queries only look at keys up to the part's end; more compile longer
        and compute less beyond the diagonal.
      library: whether selected and window branches are calls of a library's attention; by default where cuDNN can.
    """

    selection_loss: bool = False
    selection_every: int = 1
    chunk: int = 128
    segments: int = 4
    library: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Rows:
    """Projections of a layer, heads first: q [B, K, S, G, D], k and v [B, K, S, D], entries [B, K, M, D], gates."""

    q: Float[Array, "B K S G D"]
    k: Float[Array, "B K S D"]
    v: Float[Array, "B K S D"]
    k_cmp: Float[Array, "B K M D"]
    v_cmp: Float[Array, "B K M D"]
    gates: Float[Array, "B K S G 3"]


def _rows(attn: NSAttention, x: Array, cos: Array, sin: Array) -> _Rows:
    nsa = attn.config.nsa
    assert nsa is not None
    q, raw, k, v = (jnp.moveaxis(y, 1, 2) for y in rotated(attn, x, cos, sin))
    k_cmp, v_cmp = compress(attn, k if nsa.cmp_rope == "pre" else raw, v)
    return _Rows(q=q, k=k, v=v, k_cmp=k_cmp, v_cmp=v_cmp, gates=jnp.moveaxis(attn.gates(x), 1, 2))


def key_scores(q: Array, k: Array, scale: float) -> Array:
    """Scaled scores in float32, [B, K, C, G, N] of q [B, K, C, G, D] and k [B, K, N, D]."""
    return product("bkcgd,bknd->bkcgn", q, k.astype(q.dtype)) * scale


def _shares(q: Array, k_cmp: Array, position: Array, attn: NSAttention) -> Array:
    """What a tile's queries read of every entry, [B, K, C, G, M]; rows that see none are 0."""
    nsa = attn.config.nsa
    assert nsa is not None
    seen = jnp.arange(k_cmp.shape[2]) * nsa.kernel_stride + nsa.kernel_size - 1 <= position[:, None]
    p = jax.nn.softmax(jnp.where(seen[:, None], key_scores(q, k_cmp, attn.scale), -1e30), axis=-1)
    return p * seen.any(-1)[:, None, None]


def score_blocks(q: Array, k_cmp: Array, position: Array, blocks: int, attn: NSAttention) -> Array:
    """Scores of blocks that selection ranks by, [B, K, C, N] in float32.

    Args:
      q: rotated queries [B, K, C, G, D].
      k_cmp: compressed keys [B, K, M, D], rotated.
      position: of the C queries.
      blocks: N.
      attn: the layer.
    """
    if not k_cmp.shape[2]:
        return jnp.zeros((*q.shape[:3], blocks))
    return _block_scores(_shares(q, k_cmp, position, attn).sum(3), blocks, attn.config)


def _compressed(
    q: Array, k_cmp: Array, v_cmp: Array, position: Array, blocks: int, attn: NSAttention
) -> tuple[Array, Array]:
    """Compressed branch of a tile [B, K, C, G, D] and its block scores [B, K, C, N], both float32."""
    if not k_cmp.shape[2]:
        return jnp.zeros(q.shape, jnp.float32), jnp.zeros((*q.shape[:3], blocks))
    p = _shares(q, k_cmp, position, attn)
    out = product("bkcgn,bknd->bkcgd", p.astype(q.dtype), v_cmp.astype(q.dtype))
    return out, _block_scores(p.sum(3), blocks, attn.config)


def _routed(
    attn: NSAttention,
    rows: _Rows,
    is_refresh: Array,
    inherited: Array,
    options: SparseOptions,
    start: Array,
    size: int,
    keys: int,
) -> tuple[Array, Array, Array]:
    """Compressed branch of a tile [B, K, C, G, D] in float32, the blocks that it reads, and its selection loss."""
    cut = lambda y: jax.lax.dynamic_slice_in_dim(y, start, size, 2)  # noqa: E731
    q, position = cut(rows.q), start + jnp.arange(size)
    out, block_scores = _compressed(q, rows.k_cmp, rows.v_cmp, position, inherited.shape[-1], attn)
    chosen = choose_blocks(jax.lax.stop_gradient(block_scores), position, attn.config)
    chosen = jnp.where(is_refresh, chosen, cut(inherited))
    return out, chosen, _compared(q, rows.k[:, :, :keys], block_scores, position, attn, options)


def _compared(
    q: Array, k: Array, block_scores: Array, position: Array, attn: NSAttention, options: SparseOptions
) -> Array:
    """Selection loss of a tile's queries, each `selection_every`-th of them."""
    if not options.selection_loss:
        return jnp.zeros(())
    some = slice(options.selection_every - 1, None, options.selection_every)
    q, k = jax.lax.stop_gradient((q[:, :, some], k))
    scores, position = block_scores[:, :, some], position[some]
    mass = attention_mass(key_scores(q, k, attn.scale), position, scores.shape[-1], attn.config)
    return selection_loss(scores, mass, position, attn.config)


def _has_cudnn(dtype: jnp.dtype, length: int, masked: bool) -> bool:
    """Whether cuDNN's attention takes sequences of a length, with a gradient; under a mask it wants even ones."""
    return jax.default_backend() == "gpu" and dtype in (jnp.bfloat16, jnp.float16) and not (masked and length % 2)


def library_attention(
    q: Float[Array, "B S H D"],
    k: Float[Array, "B S K D"],
    v: Float[Array, "B S K D"],
    *,
    scale: float,
    window: int | None = None,
    mask: Bool[Array, "B 1 S S"] | None = None,
) -> Float[Array, "B S H D"]:
    """Causal attention by a library: cuDNN where it can, otherwise XLA (any dtype, S x S scores in memory).

    Args:
      q, k, v: rotated queries and keys, values.
      scale: of the scores.
      window: keys that a query reads, itself included; all by default.
      mask: keys that a query may read.
    """
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation="cudnn" if _has_cudnn(q.dtype, q.shape[1], mask is not None) else "xla",
    )


def sparse_attention(
    attn: NSAttention,
    x: Float[Array, "B S E"],
    cos: Float[Array, "S R"],
    sin: Float[Array, "S R"],
    is_refresh: Bool[Array, ""],
    inherited: Bool[Array, "B K S N"],
    options: SparseOptions,
) -> tuple[Float[Array, "B S K G D"], Bool[Array, "B K S N"], Float[Array, ""] | None]:
    """The three gated branches over whole sequences.

    Args:
      attn: the layer.
      x: its normalised input.
      cos, sin: of positions 0 ... S - 1.
      is_refresh: whether the layer selects blocks, or takes the inherited ones.
      inherited: of the last refresh layer.
      options: how to compute it.

    Returns:
      Output before the output projection, the blocks that each query reads, and the selection loss, if asked for.

    Raises:
      ValueError: tiles that are no whole number of `selection_every` queries.
    """
    if options.chunk % options.selection_every:
        raise ValueError(f"chunk must be a multiple of selection_every, got {options.chunk}, {options.selection_every}")
    rows = _rows(attn, x, cos, sin)
    library = options.library
    if library is None:
        library = _has_cudnn(x.dtype, x.shape[1], masked=True)
    branches = _by_library if library else _by_tiles
    out, chosen, loss = branches(attn, rows, is_refresh, inherited, options)
    compared = out.shape[0] * out.shape[1] * (out.shape[2] // options.selection_every)
    out = jnp.moveaxis(out, 2, 1).astype(x.dtype)
    return out, chosen, loss / max(compared, 1) if options.selection_loss else None


def _by_tiles(
    attn: NSAttention, rows: _Rows, is_refresh: Array, inherited: Array, options: SparseOptions
) -> tuple[Array, Array, Array]:
    """All branches of a tile of queries at a time."""
    nsa = attn.config.nsa
    assert nsa is not None
    q, gates, window = rows.q, rows.gates, nsa.window_keys
    length = q.shape[2]
    reach = min(window, length)  # keys before a tile that its window may touch
    # Float32 between tiles: their gradients are added up in it.
    k, v = rows.k.astype(jnp.float32), rows.v.astype(jnp.float32)
    rows = dataclasses.replace(
        rows, k=k, v=v, k_cmp=rows.k_cmp.astype(jnp.float32), v_cmp=rows.v_cmp.astype(jnp.float32)
    )
    k_wide, v_wide = (jnp.pad(y, ((0, 0), (0, 0), (reach, 0), (0, 0))) for y in (k, v))

    def tile(start: Array, size: int, keys: int) -> tuple[Array, Array, Array]:
        cut = lambda y, length=size: jax.lax.dynamic_slice_in_dim(y, start, length, 2)  # noqa: E731
        low = lambda y: y.astype(q.dtype)  # noqa: E731
        q_tile, gate = cut(q), cut(gates)
        out_cmp, chosen, loss = _routed(attn, rows, is_refresh, inherited, options, start, size, keys)
        position, key = start + jnp.arange(size), jnp.arange(keys)
        readable = jnp.repeat(chosen[..., : -(-keys // nsa.block_size)], nsa.block_size, axis=-1)[..., :keys]
        readable = (readable & (key <= position[:, None]))[:, :, :, None]
        out_slc = _attend(key_scores(q_tile, k[:, :, :keys], attn.scale), low(v[:, :, :keys]), readable)
        at = start - reach + jnp.arange(size + reach)
        inside = (at >= 0) & (at <= position[:, None]) & (at > position[:, None] - window)
        near_k, near_v = (cut(y, size + reach) for y in (k_wide, v_wide))
        out_win = _attend(key_scores(q_tile, near_k, attn.scale), low(near_v), inside[:, None])
        return _gated(gate, out_cmp, out_slc, out_win).astype(q.dtype), chosen, loss

    return _over_tiles(tile, length, options)


def _by_library(
    attn: NSAttention, rows: _Rows, is_refresh: Array, inherited: Array, options: SparseOptions
) -> tuple[Array, Array, Array]:
    """Compressed branch and selection by tiles, the other branches by a library's attention over all keys."""
    nsa = attn.config.nsa
    assert nsa is not None
    q, k, v = rows.q, rows.k, rows.v
    batch, heads, length, group, dim = q.shape
    # Float32 between tiles: their gradients are added up in it.
    rows = dataclasses.replace(rows, k_cmp=rows.k_cmp.astype(jnp.float32), v_cmp=rows.v_cmp.astype(jnp.float32))

    def tile(start: Array, size: int, keys: int) -> tuple[Array, Array, Array]:
        out, chosen, loss = _routed(attn, rows, is_refresh, inherited, options, start, size, keys)
        return out.astype(q.dtype), chosen, loss

    out_cmp, chosen, loss = _over_tiles(tile, length, options)
    chosen = checkpoint_name(chosen, SELECTED)
    readable = jnp.repeat(chosen, nsa.block_size, axis=-1)[..., :length]
    # Every KV head is a sequence of its own: its heads share a mask, those of other KV heads do not.
    alone = lambda y, width: y.reshape(batch * heads, length, width, dim)  # noqa: E731
    out_slc = library_attention(
        alone(q, group),
        alone(k, 1),
        alone(v, 1),
        scale=attn.scale,
        mask=readable.reshape(batch * heads, 1, length, length),
    )
    out_win = library_attention(alone(q, group), alone(k, 1), alone(v, 1), scale=attn.scale, window=nsa.window_keys)
    return _gated(rows.gates, out_cmp, out_slc.reshape(q.shape), out_win.reshape(q.shape)), chosen, loss


def _gated(gates: Array, *branches: Array) -> Array:
    return jnp.asarray(sum(gates[..., i, None] * branch for i, branch in enumerate(branches)))


def _over_tiles(
    tile: Callable[[Array, int, int], tuple[Array, Array, Array]], length: int, options: SparseOptions
) -> tuple[Array, Array, Array]:
    """A function of tiles of queries over all of them: `tile(start, size, keys)` sees the first `keys` keys."""
    tile = jax.checkpoint(tile, static_argnums=(1, 2))
    parts, chosen_parts, loss = [], [], jnp.zeros(())
    for begin, size, count in _tiles(length, options.chunk, options.segments):
        keys = begin + size * count
        starts = begin + size * jnp.arange(count)
        *results, losses = jax.lax.map(lambda s, size=size, keys=keys: tile(s, size, keys), starts)
        out, chosen = (jnp.moveaxis(y, 0, 2) for y in results)  # [B, K, tiles, C, ...]
        parts.append(out.reshape(*out.shape[:2], size * count, *out.shape[4:]))
        chosen_parts.append(chosen.reshape(*chosen.shape[:2], size * count, *chosen.shape[4:]))
        loss += losses.sum()
    return jnp.concatenate(parts, axis=2), jnp.concatenate(chosen_parts, axis=2), loss


def _tiles(length: int, chunk: int, segments: int) -> list[tuple[int, int, int]]:
    """(first query, tile size, number of tiles) of each segment."""
    chunk = min(chunk, length)
    whole = length // chunk
    per = max(1, -(-whole // segments))
    tiles = [(first * chunk, chunk, min(per, whole - first)) for first in range(0, whole, per)]
    if length % chunk:
        tiles.append((whole * chunk, length % chunk, 1))
    return tiles
