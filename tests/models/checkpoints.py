"""Tiny checkpoints of every format, written without the package's own writers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import save_file

HIDDEN, FFN, VOCAB, LAYERS = 64, 96, 40, 2
HEADS, KV_HEADS, DIM = 6, 2, 16
GROUP = HEADS // KV_HEADS
KERNEL = 8


def hf_config(**changes: Any) -> dict[str, Any]:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
    return {key: value for key, value in {**fields, **changes}.items() if value is not ...}


def nsa_fields(**changes: Any) -> dict[str, Any]:
    return {
        "kernel_size": KERNEL,
        "kernel_stride": 4,
        "block_size": 16,
        "n_selected": 4,
        "window_keys": 32,
        **changes,
    }


class Weights(dict):
    """Random tensors under checkpoint names; every call draws anew."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)

    def add(self, name: str, *shape: int) -> None:
        self[name] = self._rng.standard_normal(shape).astype(np.float32)


def hf_weights(
    *,
    tied: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> Weights:
    w = Weights()
    w.add("model.embed_tokens.weight", VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        w.add(layer + "input_layernorm.weight", HIDDEN)
        w.add(layer + "post_attention_layernorm.weight", HIDDEN)
        rows = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
        for name, size in rows.items():
            w.add(f"{layer}self_attn.{name}_proj.weight", size, HIDDEN)
            if qkv_bias:
                w.add(f"{layer}self_attn.{name}_proj.bias", size)
        w.add(layer + "self_attn.o_proj.weight", HIDDEN, HEADS * DIM)
        if o_bias:
            w.add(layer + "self_attn.o_proj.bias", HIDDEN)
        if qk_norm:
            w.add(layer + "self_attn.q_norm.weight", DIM)
            w.add(layer + "self_attn.k_norm.weight", DIM)
        for name, shape in (("gate", (FFN, HIDDEN)), ("up", (FFN, HIDDEN)), ("down", (HIDDEN, FFN))):
            w.add(f"{layer}mlp.{name}_proj.weight", *shape)
            if mlp_bias:
                w.add(f"{layer}mlp.{name}_proj.bias", shape[0])
    w.add("model.norm.weight", HIDDEN)
    if not tied:
        w.add("lm_head.weight", VOCAB, HIDDEN)
    return w


def write_hf(directory: Path, fields: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(fields))
    save_file(dict(weights), directory / "model.safetensors")
    return directory


def write_sharded(directory: Path, fields: Mapping[str, Any], weights: Mapping[str, np.ndarray]) -> Path:
    """Two shards with an index."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(fields))
    names = sorted(weights)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in halves.items():
        save_file({name: weights[name] for name in part}, directory / file)
    index = {"weight_map": {name: file for file, part in halves.items() for name in part}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.{suffix}"
    return f"{_GGUF_NAMES[stem]}.{suffix}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows as GGUF files have them: within a head, row 2 i + half is our row half * D / 2 + i."""
    dim = rows.shape[0] // heads
    order = [h * dim + half * dim // 2 + i for h in range(heads) for i in range(dim // 2) for half in (0, 1)]
    return rows[order]


def write_gguf(
    path: Path,
    weights: Mapping[str, np.ndarray],
    *,
    quantise: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    metadata: Mapping[str, Any] | None = None,
    architecture: str = "llama",
    extra: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Writes tensors with Hugging Face names; `quantise` maps such names to a storage type, else float32.

    Returns:
      The values that the file stands for, under Hugging Face names.
    """
    writer = gguf.GGUFWriter(str(path), architecture)
    values = {
        "block_count": LAYERS,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": DIM,
        "attention.value_length": DIM,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5000.0,
        "rope.dimension_count": DIM,
        **(metadata or {}),
    }
    for key, value in values.items():
        if value is ...:
            continue
        key = f"{architecture}.{key}"
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    meant: dict[str, np.ndarray] = {}
    for name, value in weights.items():
        heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2], 0)
        stored = interleave(value, heads) if heads else value
        kind = (quantise or {}).get(name, gguf.GGMLQuantizationType.F32)
        raw = gguf.quantize(np.ascontiguousarray(stored), kind)
        writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
        values_ = gguf.dequantize(raw, kind).reshape(value.shape)
        if heads:
            # Undo the order by looking up where each of our rows went.
            position = interleave(np.arange(value.shape[0]), heads)
            back = np.empty_like(values_)
            back[position] = values_
            values_ = back
        meant[name] = values_
    for name, value in (extra or {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def assert_layer(params: Mapping[str, np.ndarray], weights: Mapping[str, np.ndarray], i: int) -> None:
    """Every value of a dense layer, by its indices: query head h = k * G + g, row h * D + d."""
    source, target = f"model.layers.{i}.", f"layers/{i}/"
    qkv = params[target + "attn/qkv/kernel"]
    o = params[target + "attn/o/kernel"]
    assert qkv.shape == (HIDDEN, KV_HEADS, GROUP + 2, DIM)
    assert o.shape == (KV_HEADS, GROUP, DIM, HIDDEN)
    for k in range(KV_HEADS):
        for d in range(DIM):
            row = k * DIM + d
            eq(qkv[:, k, GROUP, d], weights[source + "self_attn.k_proj.weight"][row])
            eq(qkv[:, k, GROUP + 1, d], weights[source + "self_attn.v_proj.weight"][row])
            for g in range(GROUP):
                row = (k * GROUP + g) * DIM + d
                eq(qkv[:, k, g, d], weights[source + "self_attn.q_proj.weight"][row])
                eq(o[k, g, d], weights[source + "self_attn.o_proj.weight"][:, row])
    eq(params[target + "attn_norm/scale"], weights[source + "input_layernorm.weight"])
    eq(params[target + "mlp_norm/scale"], weights[source + "post_attention_layernorm.weight"])
    gate_up = params[target + "mlp/gate_up/kernel"]
    for f in range(FFN):
        eq(gate_up[:, 0, f], weights[source + "mlp.gate_proj.weight"][f])
        eq(gate_up[:, 1, f], weights[source + "mlp.up_proj.weight"][f])
        eq(params[target + "mlp/down/kernel"][f], weights[source + "mlp.down_proj.weight"][:, f])


def eq(ours: np.ndarray, theirs: np.ndarray) -> None:
    np.testing.assert_array_equal(ours, theirs)
