"""Where each parameter of the model sits in a checkpoint: names, shapes and axis order, both ways.

One table serves reading and writing. A parameter is made of pieces, one per checkpoint tensor; a piece has a
`view` of the parameter array whose elements run in the checkpoint tensor's order. Reading assigns to the
view, writing copies from it, so the two directions cannot disagree.

Linear layers are stored `[out, in]` by PyTorch and ggml. Query head `h = k * G + g` belongs to KV head `k`,
so the rows of `q_proj`, `h * D + d`, unfold to `[K, G, D]`, and those of `g_proj`, `3 * h + branch`, to
`[K, G, 3]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from .config import LlamaConfig, NSAConfig

_Array = np.ndarray


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Naming:
    """How one family of checkpoints names its tensors.

    Args:
      templates: role -> name without `.weight` or `.bias`; `{i}` stands for the layer.
      interleaved_rope: the rows of q and k are stored with the two halves of each rotary pair side by side
        (`2 * i + half` for our `half * D / 2 + i`), as GGUF files of the llama architecture do.
      fused_gate_up: gate and up projection are one tensor, gate rows first.
    """

    templates: Mapping[str, str]
    interleaved_rope: bool = False
    fused_gate_up: bool = False


_LAYER = "model.layers.{i}."

HF = Naming(
    templates=MappingProxyType(
        {
            "embed": "model.embed_tokens",
            "norm": "model.norm",
            "head": "lm_head",
            "attn_norm": _LAYER + "input_layernorm",
            "mlp_norm": _LAYER + "post_attention_layernorm",
            "q": _LAYER + "self_attn.q_proj",
            "k": _LAYER + "self_attn.k_proj",
            "v": _LAYER + "self_attn.v_proj",
            "o": _LAYER + "self_attn.o_proj",
            "q_norm": _LAYER + "self_attn.q_norm",
            "k_norm": _LAYER + "self_attn.k_norm",
            "branch_gate": _LAYER + "self_attn.g_proj",
            "compress_k": _LAYER + "self_attn.compress_key",
            "compress_v": _LAYER + "self_attn.compress_value",
            "pe_k": _LAYER + "self_attn.intra_block_pe",
            "pe_v": _LAYER + "self_attn.intra_block_pe_value",
            "gate": _LAYER + "mlp.gate_proj",
            "up": _LAYER + "mlp.up_proj",
            "down": _LAYER + "mlp.down_proj",
        }
    )
)
"""Hugging Face Llama, Mistral, Qwen2 and Qwen3, and `llama-nsa` with its extra tensors.

Learned compressors are bare parameters: `compress_key` and `compress_value` are `[K, l]` (weighted) or
`[K, l * D, D]` (linear, rows `m * D + d`). The perceptron has four tensors each, `.w1 [K, l * D, Dh]`, `.b1
[K, Dh]`, `.w2 [K, Dh, D]` and `.b2 [K, D]`. The pooled one has `[K, l]` and, with P pools, `.pool_query [K, D,
P]`, `.pool_bias [K, l, P]` and `.pool_mix [K, P, D]`. Position embeddings `[K, l, D]` are `intra_block_pe` for keys and
`intra_block_pe_value` for values.
"""

FLA = Naming(
    templates=MappingProxyType(
        {
            "embed": "model.embeddings",
            "norm": "model.norm",
            "head": "lm_head",
            "attn_norm": _LAYER + "attn_norm",
            "mlp_norm": _LAYER + "mlp_norm",
            "q": _LAYER + "attn.q_proj",
            "k": _LAYER + "attn.k_proj",
            "v": _LAYER + "attn.v_proj",
            "o": _LAYER + "attn.o_proj",
            "branch_gate": _LAYER + "attn.g_proj",
            "gate": _LAYER + "mlp.gate_proj",
            "up": _LAYER + "mlp.up_proj",
            "down": _LAYER + "mlp.down_proj",
        }
    )
)
"""flash-linear-attention's `nsa` models; its mean compressor has no tensors."""

GGUF = Naming(
    templates=MappingProxyType(
        {
            "embed": "token_embd",
            "norm": "output_norm",
            "head": "output",
            "attn_norm": "blk.{i}.attn_norm",
            "mlp_norm": "blk.{i}.ffn_norm",
            "q": "blk.{i}.attn_q",
            "k": "blk.{i}.attn_k",
            "v": "blk.{i}.attn_v",
            "o": "blk.{i}.attn_output",
            "gate": "blk.{i}.ffn_gate",
            "up": "blk.{i}.ffn_up",
            "down": "blk.{i}.ffn_down",
        }
    ),
    interleaved_rope=True,
)
"""GGUF files of the llama architecture."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor as a part of one parameter.

    Args:
      name: the tensor's name.
      shape: its shape in the checkpoint.
      view: from the parameter array, a view of the tensor's elements in the checkpoint's order; its shape
        refines `shape` (one checkpoint axis may be several axes of the view).
    """

    name: str
    shape: tuple[int, ...]
    view: Callable[[_Array], _Array]


def _same(a: _Array) -> _Array:
    return a


def _transposed(a: _Array) -> _Array:
    return a.reshape(-1, a.shape[-1]).T


def tensor_layout(config: LlamaConfig, naming: Naming) -> dict[str, tuple[Piece, ...]]:
    """The checkpoint tensors behind every parameter.

    Args:
      config: the model.
      naming: the family of checkpoints; it must name every part that `config` has.

    Returns:
      Flat parameter name -> its pieces, in the order of the parameter table.
    """
    e, v = config.hidden_size, config.vocab_size
    names = naming.templates
    layout: dict[str, tuple[Piece, ...]] = {}
    layout["embed/embedding"] = (Piece(names["embed"] + ".weight", (v, e), _same),)
    for i in range(config.num_layers):
        roles = {role: template.format(i=i) for role, template in names.items()}
        for name, pieces in _layer_layout(config, naming, roles).items():
            layout[f"layers/{i}/{name}"] = pieces
    layout["norm/scale"] = (Piece(names["norm"] + ".weight", (e,), _same),)
    if not config.tie_embeddings:
        layout["lm_head/kernel"] = (Piece(names["head"] + ".weight", (v, e), _transposed),)
    return layout


def _layer_layout(config: LlamaConfig, naming: Naming, roles: Mapping[str, str]) -> dict[str, tuple[Piece, ...]]:
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv_heads, g = config.num_heads, config.num_kv_heads, config.group

    def pairs(view: Callable[[_Array], _Array], axis: int) -> Callable[[_Array], _Array]:
        """`view` with the head dim, at `axis` counted from the end, in the order of this family."""
        if not naming.interleaved_rope:
            return view

        def interleaved(a: _Array) -> _Array:
            rows = view(a)
            at = rows.ndim + axis
            halves = rows.reshape(*rows.shape[:at], 2, d // 2, *rows.shape[at + 1 :])
            return halves.swapaxes(at, at + 1)

        return interleaved

    layout: dict[str, tuple[Piece, ...]] = {}
    layout["attn_norm/scale"] = (Piece(roles["attn_norm"] + ".weight", (e,), _same),)
    layout["attn/qkv/kernel"] = (
        Piece(roles["q"] + ".weight", (heads * d, e), pairs(lambda a: a[:, :, :g].transpose(1, 2, 3, 0), -2)),
        Piece(roles["k"] + ".weight", (kv_heads * d, e), pairs(lambda a: a[:, :, g].transpose(1, 2, 0), -2)),
        Piece(roles["v"] + ".weight", (kv_heads * d, e), lambda a: a[:, :, g + 1].transpose(1, 2, 0)),
    )
    if config.qkv_bias:
        layout["attn/qkv/bias"] = (
            Piece(roles["q"] + ".bias", (heads * d,), pairs(lambda a: a[:, :g], -1)),
            Piece(roles["k"] + ".bias", (kv_heads * d,), pairs(lambda a: a[:, g], -1)),
            Piece(roles["v"] + ".bias", (kv_heads * d,), lambda a: a[:, g + 1]),
        )
    if config.qk_norm:
        layout["attn/q_norm/scale"] = (Piece(roles["q_norm"] + ".weight", (d,), _same),)
        layout["attn/k_norm/scale"] = (Piece(roles["k_norm"] + ".weight", (d,), _same),)
    layout["attn/o/kernel"] = (Piece(roles["o"] + ".weight", (e, heads * d), _transposed),)
    if config.o_bias:
        layout["attn/o/bias"] = (Piece(roles["o"] + ".bias", (e,), _same),)
    if config.nsa is not None:
        layout.update(_nsa_layout(config, config.nsa, roles))
    layout["mlp_norm/scale"] = (Piece(roles["mlp_norm"] + ".weight", (e,), _same),)
    layout["mlp/gate_up/kernel"] = _gate_up(roles, naming, ".weight", (f, e), lambda a: a.transpose(1, 2, 0))
    if config.mlp_bias:
        layout["mlp/gate_up/bias"] = _gate_up(roles, naming, ".bias", (f,), _same)
    layout["mlp/down/kernel"] = (Piece(roles["down"] + ".weight", (e, f), _transposed),)
    if config.mlp_bias:
        layout["mlp/down/bias"] = (Piece(roles["down"] + ".bias", (e,), _same),)
    return layout


def _gate_up(
    roles: Mapping[str, str],
    naming: Naming,
    suffix: str,
    shape: tuple[int, ...],
    view: Callable[[_Array], _Array],
) -> tuple[Piece, ...]:
    """Gate and up projection; `view` gives `[2, *shape]`."""
    if naming.fused_gate_up:
        return (Piece(roles["gate"] + suffix, (2 * shape[0], *shape[1:]), view),)
    return (
        Piece(roles["gate"] + suffix, shape, lambda a: view(a)[0]),
        Piece(roles["up"] + suffix, shape, lambda a: view(a)[1]),
    )


def _nsa_layout(config: LlamaConfig, nsa: NSAConfig, roles: Mapping[str, str]) -> dict[str, tuple[Piece, ...]]:
    """Branch gates and compressors."""
    e, d, k, length = config.hidden_size, config.head_dim, config.num_kv_heads, nsa.kernel_size
    rows = 3 * config.num_heads if nsa.gate_scope == "head" else 3

    def gate_rows(a: _Array) -> _Array:
        return a.transpose(1, 2, 3, 0) if a.ndim == 4 else a.T

    layout: dict[str, tuple[Piece, ...]] = {}
    layout["attn/gate/kernel"] = (Piece(roles["branch_gate"] + ".weight", (rows, e), gate_rows),)
    if nsa.gate_bias:
        layout["attn/gate/bias"] = (Piece(roles["branch_gate"] + ".bias", (rows,), _same),)
    for part, pe, with_pe in (
        ("compress_k", "pe_k", nsa.cmp_pe in ("k", "kv")),
        ("compress_v", "pe_v", nsa.cmp_pe == "kv"),
    ):
        parts: dict[str, tuple[str, tuple[int, ...]]] = {}
        if nsa.cmp_fn in ("weighted", "pooled"):
            parts["weight"] = (roles[part], (k, length))
        elif nsa.cmp_fn == "linear":
            parts["weight"] = (roles[part], (k, length * d, d))
        elif nsa.cmp_fn == "mlp":
            parts["w1"] = (roles[part] + ".w1", (k, length * d, d))
            parts["b1"] = (roles[part] + ".b1", (k, d))
            parts["w2"] = (roles[part] + ".w2", (k, d, d))
            parts["b2"] = (roles[part] + ".b2", (k, d))
        if nsa.cmp_fn == "pooled":
            parts["pool_query"] = (roles[part] + ".pool_query", (k, d, nsa.cmp_pools))
            parts["pool_bias"] = (roles[part] + ".pool_bias", (k, length, nsa.cmp_pools))
            parts["pool_mix"] = (roles[part] + ".pool_mix", (k, nsa.cmp_pools, d))
        if with_pe:
            parts["pe"] = (roles[pe], (k, length, d))
        for name, (tensor, shape) in parts.items():
            layout[f"attn/{part}/{name}"] = (Piece(tensor, shape, _same),)
    return layout


# Rows of a block of `copy_tensor`.
_COPY_ROWS = 64


def copy_tensor(target: _Array, source: _Array) -> None:
    """Copies `source` into `target` (same shape, any strides), converting the dtype.

    A transposing copy in one piece misses the cache on nearly every element; by blocks of rows it is an order
    of magnitude faster.
    """
    if source.ndim < 2:
        target[...] = source
    elif source.ndim > 2 and source[0].size // source.shape[-1] >= _COPY_ROWS:
        for to, frm in zip(target, source, strict=True):
            copy_tensor(to, frm)
    else:
        step = max(1, _COPY_ROWS // max(1, source[0].size // source.shape[-1]))
        for start in range(0, source.shape[0], step):
            target[start : start + step] = source[start : start + step]
