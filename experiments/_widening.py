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
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax.models import eagle3
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.llama import param_shapes

Put = Callable[[jax.Array], Any]
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
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
    """The twin's parameters by flat name, made on the default device, a layer at a time.

    Args:
      config, params: the model; its arrays may lie on the host.
      wide: from `widen_config`.
      seed: of the values that nothing depends on.
      dtype: of the result; everything is computed in float32 and rounded once.
      put: applied to each array, in place of which its result is kept.
    """
    axes = _axes_of(config, wide, marked=wide.vocab_size > config.vocab_size)
    noise = _Noise(seed, dtype)
    last, shapes = config.num_layers - 1, param_shapes(wide)
    first = "layers/0/"
    parts = tuple((name.removeprefix(first), shape) for name, shape in shapes.items() if name.startswith(first))
    outside = tuple((name, shape) for name, shape in shapes.items() if not name.startswith("layers/"))
    tied = {"lm_head/kernel": "embed/embedding"} if config.tie_embeddings else {}
    source = {name: params[tied.get(name, name)] for name, _ in outside}
    result = _keep(_widen_outside(axes, outside, config.tie_embeddings, noise.pool, noise.at(outside), source), put)
    for number in range(wide.num_layers):
        source = {part: params[f"layers/{min(number, last)}/{part}"] for part, _ in parts}
        layer = _widen_layer(axes, parts, number > last, noise.pool, noise.at(parts), source)
        result |= _keep({f"layers/{number}/{part}": array for part, array in layer.items()}, put)
    return {name: result[name] for name in shapes}


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
    """Parameters of the head's twin by flat name, made on the default device.

    Args:
      head, params: the head.
      target: what it drafts for, not widened.
      wide: from `widen_head_config`.
      seed, dtype, put: as for `widen_params`.
    """
    padded = wide.draft_vocab_size > head.draft_vocab_size
    axes = _axes_of(head, wide, marked=padded or wide.vocab_size > target.vocab_size)
    noise, shapes = _Noise(seed, dtype), eagle3.param_shapes(wide)
    parts = tuple((name, shape) for name, shape in shapes.items() if name != "target_ids")
    source = {name: params[name] for name, _ in parts}
    result = _widen_head(axes, parts, padded, noise.pool, noise.at(parts), source)
    if "target_ids" in shapes:
        known = np.asarray(params["target_ids"]) if head.reduced_vocab else np.arange(head.draft_vocab_size)
        added = target.vocab_size + np.arange(wide.draft_vocab_size - head.draft_vocab_size)
        result["target_ids"] = jnp.asarray(np.concatenate([known, added]), jnp.int32)
    result = _keep(result, put)
    return {name: result[name] for name in shapes}


def _keep(arrays: dict[str, jax.Array], put: Put | None) -> dict[str, Any]:
    return arrays if put is None else {name: put(array) for name, array in arrays.items()}


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
    """Small normal values: one seeded pool on the device, which arrays repeat from places of their own."""

    def __init__(self, seed: int, dtype: Any) -> None:
        self._rng = np.random.default_rng(seed)
        pool = self._rng.standard_normal(_POOL, np.float32) * np.float32(_STD)
        self.pool = jnp.asarray(pool).astype(dtype)

    def at(self, shapes: Shapes) -> jax.Array:
        """Where in the pool each array begins."""
        return jnp.asarray(self._rng.integers(_POOL, size=len(shapes)), jnp.int32)


def _filled(pool: jax.Array, start: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.resize(jnp.roll(pool, -start), shape)


def _set(out: jax.Array, where: Any, value: Any) -> jax.Array:
    """`out` with `value` at an index, rounded to its dtype."""
    return out.at[where].set(jnp.asarray(value).astype(out.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Axes:
    """Where the axes of a small decoder lie in a wide one; pairs are (small, wide).

    Every method returns `out`, an array of random values, with all that matters written over from a float32 source.
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

    def norm(self, source: jax.Array, out: jax.Array, mark: float = 0.0) -> jax.Array:
        small, wide = self.hidden
        out = _set(jnp.ones_like(out), np.s_[:small], source * np.float32(math.sqrt(small / wide)))
        return _set(out, small, mark) if self.marked else out

    def qkv(self, source: jax.Array, out: jax.Array, silent: bool) -> jax.Array:
        """[R, K', G' + 2, D'] from [R, K, G + 2, D]: kernel rows that read real coordinates, or a bias of R = 1."""
        group, wide_group, dims = *self.group, self.dims
        stretch = self.dim[1] / self.dim[0]
        # A norm undoes any gain, but weighs it against eps.
        gain = math.sqrt(self.hidden[0] / self.hidden[1] * stretch) if self.normed else 1.0
        source = source[:, self.heads]
        q = jnp.zeros((*out.shape[:2], wide_group, len(dims)), jnp.float32)
        q = _set(q, np.s_[:, :, :group], source[:, :, :group] * np.float32(gain if self.normed else math.sqrt(stretch)))
        if self.normed:
            out = _set(out, np.s_[:, :, :wide_group], 0)
        out = _set(out, np.s_[:, :, :wide_group, dims], q)
        out = _set(out, np.s_[:, :, wide_group:], 0)
        out = _set(out, np.s_[:, :, wide_group, dims], source[:, :, group] * np.float32(gain))
        return out if silent else _set(out, np.s_[:, :, wide_group + 1, dims], source[:, :, group + 1])

    def head_norm(self, source: jax.Array, out: jax.Array, *, query: bool) -> jax.Array:
        scale = 1.0 if query else math.sqrt(self.dim[0] / self.dim[1])
        return _set(jnp.ones_like(out), self.dims, source * np.float32(scale))

    def o(self, source: jax.Array, out: jax.Array, silent: bool) -> jax.Array:
        """[K', G', D', E'] from [K, G, D, E]; values of other dims are 0, so their rows may be random."""
        if silent:
            return out
        (kv, _), (group, _), (size, _) = self.kv, self.group, self.hidden
        out = _set(out, np.s_[:, :, self.dims], 0)
        return _set(out, np.ix_(np.arange(kv), np.arange(group), self.dims, np.arange(size)), source)

    def compressor(self, part: str, source: jax.Array, out: jax.Array, silent: bool) -> jax.Array:
        """Maps between heads' dims; entries are 0 in the other dims, as their rows are."""
        source, dims = source[self.heads], self.dims
        if part == "pool_bias" or (part == "weight" and source.ndim == 2):
            return _set(out, np.s_[:], source)
        if part == "pool_query":
            return _set(out, np.s_[:, dims], source)
        if part in ("pe", "b1", "b2", "pool_mix"):
            out = jnp.zeros_like(out)
            return out if silent else _set(out, np.s_[..., dims], source)
        real = _set(jnp.zeros((*source.shape[:-1], out.shape[-1]), jnp.float32), np.s_[..., dims], source)
        return _set(out, np.s_[..., dims, :], real)

    def gate(self, source: jax.Array, out: jax.Array) -> jax.Array:
        """[R, K', G', 3] from [R, K, G, 3], or [R, 3] of a gate that all heads share."""
        if source.ndim == 4:
            source = source[:, self.heads][:, :, np.arange(self.group[1]) % self.group[0]]
        return _set(out, np.s_[:], source)

    def gate_up(self, source: jax.Array, out: jax.Array, silent: bool) -> jax.Array:
        """[R, 2, F'] from [R, 2, F]."""
        small = self.ffn[0]
        out = _set(_set(out, np.s_[:, 0], 0), np.s_[:, 1, :small], source[:, 1])
        return out if silent else _set(out, np.s_[:, 0, :small], source[:, 0])

    def down(self, source: jax.Array, out: jax.Array, silent: bool) -> jax.Array:
        if silent:
            return out
        return _set(_set(out, np.s_[: self.ffn[0]], 0), np.s_[: self.ffn[0], : self.hidden[0]], source)

    def write_bias(self, source: jax.Array, out: jax.Array, silent: bool) -> jax.Array:
        """A bias that is added to the stream."""
        out = jnp.zeros_like(out)
        return out if silent else _set(out, np.s_[: self.hidden[0]], source)


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


_on_device = functools.partial(jax.jit, static_argnums=(0, 1, 2))


@_on_device
def _widen_layer(
    axes: _Axes, parts: Shapes, silent: bool, pool: jax.Array, starts: jax.Array, source: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """All parameters of a decoder layer; a silent layer writes nothing."""
    return {
        part: _widen_layer_part(axes, part, source[part], _filled(pool, starts[i], shape), silent=silent)
        for i, (part, shape) in enumerate(parts)
    }


@_on_device
def _widen_outside(
    axes: _Axes, parts: Shapes, tied: bool, pool: jax.Array, starts: jax.Array, source: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """A model's parameters outside of its layers."""
    result = {}
    for i, (name, shape) in enumerate(parts):
        out, array = _filled(pool, starts[i], shape), jnp.asarray(source[name], jnp.float32)
        if name == "embed/embedding":
            result[name] = _widen_embedding(axes, array, out)
        elif name == "norm/scale":
            result[name] = axes.norm(array, out, mark=_MARK_SCALE)
        else:
            assert name == "lm_head/kernel"
            result[name] = _widen_output(axes, array.T if tied else array, out)
    return result


@_on_device
def _widen_head(
    axes: _Axes, parts: Shapes, padded: bool, pool: jax.Array, starts: jax.Array, source: Mapping[str, Any]
) -> dict[str, jax.Array]:
    """All parameters of a draft head."""
    small, wide = axes.hidden
    result = {}
    for i, (name, shape) in enumerate(parts):
        out, array = _filled(pool, starts[i], shape), jnp.asarray(source[name], jnp.float32)
        if name.startswith("layers/"):
            _, _, part = name.split("/", 2)
            rows = None
            if part == "attn/qkv/kernel" and len(array) == 2 * small:
                rows = np.concatenate([np.arange(small), wide + np.arange(small)])
            result[name] = _widen_layer_part(axes, part, array, out, rows=rows)
        elif name == "embed/embedding":
            result[name] = _set(jnp.zeros_like(out), np.s_[: len(array), :small], array)
        elif name == "norm/scale":
            result[name] = axes.norm(array, out, mark=_MARK_SCALE)
        elif name == "lm_head/kernel":
            result[name] = _widen_output(axes, array, out)
        elif name == "fc/kernel":
            result[name] = _widen_fusion(axes, array, out, padded)
        else:  # norms of taps, one each or one of all
            rows = zip(jnp.split(array, len(array) // small), jnp.split(out, len(array) // small), strict=True)
            result[name] = jnp.concatenate([axes.norm(row, free, mark=1) for row, free in rows])
    return result


def _widen_layer_part(
    axes: _Axes, part: str, source: Any, out: jax.Array, *, silent: bool = False, rows: np.ndarray | None = None
) -> jax.Array:
    """One parameter of a decoder layer; a silent layer writes nothing. `rows`: where the kernel's rows lie."""
    module, name = part.rsplit("/", 1)
    source = jnp.asarray(source, jnp.float32)
    if module in ("attn/q_norm", "attn/k_norm"):
        return axes.head_norm(source, out, query=module == "attn/q_norm")
    if name == "scale":
        return axes.norm(source, out)
    if module in ("attn/compress_k", "attn/compress_v"):
        return axes.compressor(name, source, out, silent and module == "attn/compress_v")
    if module == "attn/o" and name == "kernel":
        return axes.o(source, out, silent)
    if module == "mlp/down" and name == "kernel":
        return axes.down(source, out, silent)
    if module in ("attn/o", "mlp/down"):
        return axes.write_bias(source, out, silent)
    if name == "bias":
        source, real, where = source[None], out[None], None
    else:
        where = np.s_[: len(source)] if rows is None else rows
        real = out[where]
    if module == "attn/qkv":
        real = axes.qkv(source, real, silent)
    elif module == "attn/gate":
        real = axes.gate(source, real)
    else:
        assert module == "mlp/gate_up", part
        real = axes.gate_up(source, real, silent)
    return real[0] if where is None else _set(out, where, real)


def _widen_embedding(axes: _Axes, source: jax.Array, out: jax.Array) -> jax.Array:
    vocab, size = source.shape
    out = _set(jnp.zeros_like(out), np.s_[:vocab, :size], source)
    return _set(out, np.s_[:, size], _MARK) if axes.marked else out


def _widen_output(axes: _Axes, source: jax.Array, out: jax.Array) -> jax.Array:
    """[E', V'] from [E, V]."""
    size, vocab = source.shape
    out = _set(out, np.s_[:size, :vocab], source)
    return _set(_set(out, size, 0), np.s_[size, vocab:], _MARK_WEIGHT) if axes.marked else out


def _widen_fusion(axes: _Axes, source: jax.Array, out: jax.Array, padded: bool) -> jax.Array:
    """[3 E', E'] from [3 E, E]: three taps side by side; for padded ids the last one hands on its mark."""
    small, wide = axes.hidden
    taps = len(source) // small
    for tap in range(taps):
        first = tap * wide
        out = _set(out, np.s_[first : first + small], 0)
        out = _set(out, np.s_[first : first + small, :small], source[tap * small : (tap + 1) * small])
        if axes.marked:
            out = _set(out, first + small, 0)
            if padded and tap == taps - 1:
                out = _set(out, (first + small, small), 1)
    return out
