"""Widening: the parameters of a model of other sizes that computes the same function, exactly but for rounding.

How, for a model of hidden size E, head size D, K KV heads of G queries each, and a twin of E', D', K', G':

- Stream: coordinates E to E' are 0 everywhere, since everything that writes into them is 0 there; kernel rows that
  read them are random. RMSNorm averages over E' coordinates: scale * sqrt(E / E'), eps * E / E', both exact.
- Heads: dim i of a half goes to i * D' / D of the twin's half, the place of the same rotary frequency. Keys and values
  are 0 in the other dims (their queries and output rows are random); queries grow by sqrt(D' / D), as the attention
  scale shrinks. With q_norm and k_norm, which share eps with the other norms, raw queries and keys grow such that the
  same eps is right for both.
- KV heads K to K' repeat the real ones (queries, keys, values, compressors, gates), and their output rows are 0.
- Query heads G to G' of a group are zero queries with zero output rows. They add the same mass 1 / N to each visible
  compressed entry. All blocks that compete have all their entries visible, if blocks that lack some are forced, so the
  same amount is added to each: their order stays, equal ones included. `widen_config` refuses other geometries. In
  floating point, blocks whose masses differ by less than a rounding of the sum (some 1e-10 at 64K) become equal, and
  the lower one is chosen.
- Feed-forward: units F to F' have zero gates, so they are silu(0) * up = 0, and their output rows are random.
- Layers L to L' come last: copies of the last layer with zero values and zero gates, which select real blocks and
  write 0. So taps keep their numbers, and so does a layer plan: `LayerPlan.every` of the twin is that of the model on
  its layers, and any plan may go on as it likes.
- Vocabulary: tied embeddings become untied. Logits of ids V to V' are far below any real one, -2^38 over the stream's
  root mean square: coordinate E is a mark, 2^-20 for every token, too small to change a norm by half a rounding, hidden
  from all layers by zero scales, and multiplied by -2^58 in the output columns of those ids alone. A draft vocabulary
  is padded alike; the head's mark comes from its last tap.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ssv_jax.models import eagle3
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.llama import param_shapes

Put = Callable[[np.ndarray], Any]
_POOL = 1_048_573  # values; prime, so that rows of a matrix do not start alike
_STD = 0.02
_MARK = 2.0**-20
_MARK_SCALE, _MARK_WEIGHT = 2.0**28, -(2.0**30)  # of the final norm, and of the output columns of padded ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a twin; `draft_vocab_size` is that of its head, at least (None: the head's own)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    draft_vocab_size: int | None = None


def widen_config(config: LlamaConfig, shape: Shape) -> LlamaConfig:
    """The twin's configuration.

    Raises:
      ValueError: a size that is smaller than the model's or cannot hold it; the message names it.
    """
    names = [field.name for field in dataclasses.fields(Shape) if field.name != "draft_vocab_size"]
    wide = dataclasses.replace(
        config,
        **{name: getattr(shape, name) for name in names},
        rms_eps=config.rms_eps * config.hidden_size / shape.hidden_size,
        tie_embeddings=False,
    )
    for name in ("vocab_size", "num_layers"):
        _at_least(name, getattr(config, name), getattr(wide, name))
    _check_heads(config, wide)
    if wide.vocab_size > config.vocab_size and wide.hidden_size == config.hidden_size:
        raise ValueError(f"vocab_size={wide.vocab_size}: padded ids need a hidden_size above {config.hidden_size}")
    if config.nsa is not None and wide.group > config.group and not _uniform_mass_is_neutral(config.nsa):
        raise ValueError(
            f"num_heads={wide.num_heads}: a zero query would change which blocks are selected, since blocks without "
            "all of their compressed entries compete; needs init_blocks >= 1 and local_blocks >= 2, or kernel_size = "
            f"kernel_stride, or groups of {config.group} queries"
        )
    return wide


def widen_head_config(head: Eagle3Config, target: LlamaConfig, wide: LlamaConfig, shape: Shape) -> Eagle3Config:
    """The configuration of the head's twin, which has an output matrix of its own.

    Args:
      head: drafts for `target`.
      target, wide: the model and its twin.
      shape: as given to `widen_config`.

    Raises:
      ValueError: as `widen_config`, or a draft vocabulary that cannot be padded.
    """
    size, vocab = head.hidden_size, max(shape.draft_vocab_size or 0, head.draft_vocab_size)
    wider = dataclasses.replace(
        head,
        vocab_size=wide.vocab_size,
        draft_vocab_size=vocab,
        hidden_size=wide.hidden_size,
        target_hidden_size=wide.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_eps=head.rms_eps * size / wide.hidden_size,
        own_head=True,
    )
    _check_heads(head, wider)
    if size != target.hidden_size:
        raise ValueError(f"a head of hidden_size {size} for a model of {target.hidden_size} cannot be widened")
    if vocab > head.draft_vocab_size:
        added, free = vocab - head.draft_vocab_size, wide.vocab_size - target.vocab_size
        if head.normed_output or head.normed_residual:
            raise ValueError("draft_vocab_size: a head with normed features has no stream that could mark padded ids")
        if added > free or (vocab == wide.vocab_size and head.reduced_vocab):
            raise ValueError(f"draft_vocab_size={vocab}: {added} padded ids need as many padded ids of the target")
    return wider


def widen_params(
    config: LlamaConfig,
    params: Mapping[str, Any],
    wide: LlamaConfig,
    *,
    seed: int = 0,
    dtype: Any = np.float32,
    put: Put | None = None,
) -> dict[str, Any]:
    """The twin's parameters by flat name.

    Args:
      config, params: the model.
      wide: from `widen_config`.
      seed: of the values that nothing depends on.
      dtype: of the result; everything is computed in float32 and rounded once.
      put: applied to each array, such as `jax.device_put`.
    """
    axes = _axes_of(config, wide, marked=wide.vocab_size > config.vocab_size)
    noise = _Noise(seed, dtype)
    last = config.num_layers - 1
    result = {}
    for name, shape in param_shapes(wide).items():
        out = noise(shape)
        if name.startswith("layers/"):
            _, number, part = name.split("/", 2)
            source = np.asarray(params[f"layers/{min(int(number), last)}/{part}"], np.float32)
            _widen_layer_part(axes, part, source, out, silent=int(number) > last)
        elif name == "embed/embedding":
            _widen_embedding(axes, np.asarray(params[name], np.float32), out)
        elif name == "norm/scale":
            axes.norm(np.asarray(params[name], np.float32), out, mark=_MARK_SCALE)
        else:
            assert name == "lm_head/kernel"
            tied = config.tie_embeddings
            table = np.asarray(params["embed/embedding" if tied else name], np.float32)
            _widen_output(axes, table.T if tied else table, out)
        result[name] = out if put is None else put(out)
    return result


def widen_head(
    head: Eagle3Config,
    params: Mapping[str, Any],
    target: LlamaConfig,
    wide: Eagle3Config,
    *,
    seed: int = 1,
    dtype: Any = np.float32,
    put: Put | None = None,
) -> dict[str, Any]:
    """Parameters of the head's twin by flat name.

    Args:
      head, params: the head.
      target: what it drafts for, not widened.
      wide: from `widen_head_config`.
      seed, dtype, put: as for `widen_params`.
    """
    padded = wide.draft_vocab_size > head.draft_vocab_size
    axes = _axes_of(head, wide, marked=padded or wide.vocab_size > target.vocab_size)
    noise, size = _Noise(seed, dtype), head.hidden_size
    result = {}
    for name, shape in eagle3.param_shapes(wide).items():
        if name == "target_ids":
            known = np.asarray(params[name]) if head.reduced_vocab else np.arange(head.draft_vocab_size)
            added = target.vocab_size + np.arange(wide.draft_vocab_size - head.draft_vocab_size)
            out = np.concatenate([known, added]).astype(np.int32)
            result[name] = out if put is None else put(out)
            continue
        out, source = noise(shape), np.asarray(params[name], np.float32)
        if name.startswith("layers/"):
            _, _, part = name.split("/", 2)
            rows = None
            if part == "attn/qkv/kernel" and len(source) == 2 * size:
                rows = np.concatenate([np.arange(size), wide.hidden_size + np.arange(size)])
            _widen_layer_part(axes, part, source, out, rows=rows)
        elif name == "embed/embedding":
            out[...] = 0
            out[: len(source), :size] = source
        elif name == "norm/scale":
            axes.norm(source, out, mark=_MARK_SCALE)
        elif name == "lm_head/kernel":
            _widen_output(axes, source, out)
        elif name == "fc/kernel":
            _widen_fusion(axes, source, out, padded)
        else:  # norms of taps, one each or one of all
            for part, row in enumerate(np.split(source, len(source) // size)):
                axes.norm(row, out[part * wide.hidden_size :][: wide.hidden_size], mark=1)
        result[name] = out if put is None else put(out)
    return result


def _at_least(name: str, old: int, new: int) -> None:
    if new < old:
        raise ValueError(f"{name}={new} is below the model's {old}: a twin can only be larger")


def _check_heads(old: LlamaConfig | Eagle3Config, new: LlamaConfig | Eagle3Config) -> None:
    for name in ("hidden_size", "intermediate_size", "num_kv_heads", "group", "head_dim"):
        what = "queries per KV head" if name == "group" else name
        _at_least(what, getattr(old, name), getattr(new, name))
    if new.head_dim % old.head_dim:
        raise ValueError(
            f"head_dim={new.head_dim} must be a multiple of {old.head_dim}, to have its rotary frequencies"
        )


def _uniform_mass_is_neutral(nsa: NSAConfig) -> bool:
    """Whether every block that is not forced has all of its compressed entries, and all are visible."""
    if nsa.kernel_size == nsa.kernel_stride:
        return True  # entries lie inside their block, which is over
    # Block 0 lacks the entries that would begin before it; the last entry of a block ends in the next block.
    return nsa.init_blocks >= 1 and nsa.local_blocks >= 2


class _Noise:
    """Arrays of small normal values, copied from one seeded pool: as fast as memory."""

    def __init__(self, seed: int, dtype: Any) -> None:
        self._rng = np.random.default_rng(seed)
        self._pool = (self._rng.standard_normal(_POOL, np.float32) * np.float32(_STD)).astype(dtype)

    def __call__(self, shape: tuple[int, ...]) -> np.ndarray:
        flat = np.empty(math.prod(shape), self._pool.dtype)
        pool = np.roll(self._pool, -int(self._rng.integers(_POOL)))
        whole = len(flat) // _POOL * _POOL
        flat[:whole].reshape(-1, _POOL)[...] = pool
        flat[whole:] = pool[: len(flat) - whole]
        return flat.reshape(shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axes:
    """Where the axes of a small decoder lie in a wide one; pairs are (small, wide).

    Every method overwrites what matters of `out`, an array of random values, from a float32 source.
    """

    hidden: tuple[int, int]
    ffn: tuple[int, int]
    kv: tuple[int, int]
    group: tuple[int, int]
    dim: tuple[int, int]
    normed: bool  # queries and keys have norms
    marked: bool  # coordinate `hidden[0]` of the stream is the mark

    @property
    def heads(self) -> np.ndarray:
        """The real KV head of each wide one."""
        return np.arange(self.kv[1]) % self.kv[0]

    @property
    def dims(self) -> np.ndarray:
        """The wide place of each dim of a head."""
        small, wide = self.dim
        half = np.arange(small // 2) * (wide // small)
        return np.concatenate([half, wide // 2 + half])

    def norm(self, source: np.ndarray, out: np.ndarray, mark: float = 0.0) -> None:
        small, wide = self.hidden
        out[...] = 1
        out[:small] = source * np.float32(math.sqrt(small / wide))
        if self.marked:
            out[small] = mark

    def qkv(self, source: np.ndarray, out: np.ndarray, silent: bool) -> None:
        """[R, K', G' + 2, D'] from [R, K, G + 2, D]: kernel rows that read real coordinates, or a bias of R = 1."""
        group, wide_group, dims = *self.group, self.dims
        stretch = self.dim[1] / self.dim[0]
        # A norm undoes any gain, but weighs it against eps.
        gain = math.sqrt(self.hidden[0] / self.hidden[1] * stretch) if self.normed else 1.0
        source = source[:, self.heads]
        q = np.zeros((*out.shape[:2], wide_group, len(dims)), np.float32)
        q[:, :, :group] = source[:, :, :group] * np.float32(gain if self.normed else math.sqrt(stretch))
        if self.normed:
            out[:, :, :wide_group] = 0
        out[:, :, :wide_group, dims] = q
        out[:, :, wide_group:] = 0
        out[:, :, wide_group, dims] = source[:, :, group] * np.float32(gain)
        if not silent:
            out[:, :, wide_group + 1, dims] = source[:, :, group + 1]

    def head_norm(self, source: np.ndarray, out: np.ndarray, *, query: bool) -> None:
        out[...] = 1
        out[self.dims] = source * np.float32(1.0 if query else math.sqrt(self.dim[0] / self.dim[1]))

    def o(self, source: np.ndarray, out: np.ndarray, silent: bool) -> None:
        """[K', G', D', E'] from [K, G, D, E]; values of other dims are 0, so their rows may be random."""
        if not silent:
            out[:, :, self.dims] = 0
            (kv, _), (group, _), (size, _) = self.kv, self.group, self.hidden
            out[np.ix_(np.arange(kv), np.arange(group), self.dims, np.arange(size))] = source

    def compressor(self, part: str, source: np.ndarray, out: np.ndarray, silent: bool) -> None:
        """Maps between heads' dims; entries are 0 in the other dims, as their rows are."""
        source, dims = source[self.heads], self.dims
        if part == "weight" and source.ndim == 2:
            out[...] = source
        elif part in ("pe", "b1", "b2"):
            out[...] = 0
            if not silent:
                out[..., dims] = source
        else:
            real = np.zeros((*source.shape[:-1], out.shape[-1]), np.float32)
            real[..., dims] = source
            out[..., dims, :] = real

    def gate(self, source: np.ndarray, out: np.ndarray) -> None:
        """[R, K', G', 3] from [R, K, G, 3], or [R, 3] of a gate that all heads share."""
        if source.ndim == 4:
            source = source[:, self.heads][:, :, np.arange(self.group[1]) % self.group[0]]
        out[...] = source

    def gate_up(self, source: np.ndarray, out: np.ndarray, silent: bool) -> None:
        """[R, 2, F'] from [R, 2, F]."""
        small = self.ffn[0]
        out[:, 0] = 0
        out[:, 1, :small] = source[:, 1]
        if not silent:
            out[:, 0, :small] = source[:, 0]

    def down(self, source: np.ndarray, out: np.ndarray, silent: bool) -> None:
        if not silent:
            out[: self.ffn[0]] = 0
            out[: self.ffn[0], : self.hidden[0]] = source

    def write_bias(self, source: np.ndarray, out: np.ndarray, silent: bool) -> None:
        """A bias that is added to the stream."""
        out[...] = 0
        if not silent:
            out[: self.hidden[0]] = source


def _axes_of(small: LlamaConfig | Eagle3Config, wide: LlamaConfig | Eagle3Config, *, marked: bool) -> _Axes:
    return _Axes(
        hidden=(small.hidden_size, wide.hidden_size),
        ffn=(small.intermediate_size, wide.intermediate_size),
        kv=(small.num_kv_heads, wide.num_kv_heads),
        group=(small.group, wide.group),
        dim=(small.head_dim, wide.head_dim),
        normed=isinstance(small, LlamaConfig) and small.qk_norm,
        marked=marked,
    )


def _widen_layer_part(
    axes: _Axes, part: str, source: np.ndarray, out: np.ndarray, *, silent: bool = False, rows: np.ndarray | None = None
) -> None:
    """One parameter of a decoder layer; a silent layer writes nothing. `rows`: where the kernel's rows lie."""
    module, name = part.rsplit("/", 1)
    if module in ("attn/q_norm", "attn/k_norm"):
        axes.head_norm(source, out, query=module == "attn/q_norm")
    elif name == "scale":
        axes.norm(source, out)
    elif module in ("attn/compress_k", "attn/compress_v"):
        axes.compressor(name, source, out, silent and module == "attn/compress_v")
    elif module == "attn/o" and name == "kernel":
        axes.o(source, out, silent)
    elif module == "mlp/down" and name == "kernel":
        axes.down(source, out, silent)
    elif module in ("attn/o", "mlp/down"):
        axes.write_bias(source, out, silent)
    else:
        if name == "bias":
            source, real = source[None], out[None]
        else:
            rows = np.arange(len(source)) if rows is None else rows
            real = out[rows]  # a copy
        if module == "attn/qkv":
            axes.qkv(source, real, silent)
        elif module == "attn/gate":
            axes.gate(source, real)
        else:
            assert module == "mlp/gate_up", part
            axes.gate_up(source, real, silent)
        if name == "kernel":
            out[rows] = real


def _widen_embedding(axes: _Axes, source: np.ndarray, out: np.ndarray) -> None:
    vocab, size = source.shape
    out[...] = 0
    out[:vocab, :size] = source
    if axes.marked:
        out[:, size] = _MARK


def _widen_output(axes: _Axes, source: np.ndarray, out: np.ndarray) -> None:
    """[E', V'] from [E, V]."""
    size, vocab = source.shape
    out[:size, :vocab] = source
    if axes.marked:
        out[size] = 0
        out[size, vocab:] = _MARK_WEIGHT


def _widen_fusion(axes: _Axes, source: np.ndarray, out: np.ndarray, padded: bool) -> None:
    """[3 E', E'] from [3 E, E]: three taps side by side; for padded ids the last one hands on its mark."""
    small, wide = axes.hidden
    taps = len(source) // small
    for tap in range(taps):
        part = out[tap * wide : (tap + 1) * wide]
        part[:small] = 0
        part[:small, :small] = source[tap * small : (tap + 1) * small]
        if axes.marked:
            part[small] = 0
            if padded and tap == taps - 1:
                part[small, small] = 1
