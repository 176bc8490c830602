"""Hugging Face directories: dense families, dtypes, shards, llama-nsa and fla."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from ssv_jax.models.config import NSA_PRESETS, Llama3Scaling, NSAConfig, RopeConfig
from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.llama import param_shapes
from ssv_jax.models.loading import load
from tests.models.checkpoints import (
    DIM,
    FFN,
    GROUP,
    HEADS,
    HIDDEN,
    KERNEL,
    KV_HEADS,
    LAYERS,
    VOCAB,
    assert_layer,
    eq,
    hf_config,
    hf_weights,
    nsa_fields,
    write_hf,
    write_sharded,
)

LLAMA_NSA = {"model_type": "llama-nsa", "architectures": ["LlamaNSAForCausalLM"]}


def assert_complete(checkpoint) -> None:
    shapes = param_shapes(checkpoint.config)
    assert {name: array.shape for name, array in checkpoint.params.items()} == shapes


def test_llama_values_and_config(tmp_path):
    weights = hf_weights()
    checkpoint = load(write_hf(tmp_path / "m", hf_config(), weights))
    assert_complete(checkpoint)
    for i in range(LAYERS):
        assert_layer(checkpoint.params, weights, i)
    eq(checkpoint.params["embed/embedding"], weights["model.embed_tokens.weight"])
    eq(checkpoint.params["lm_head/kernel"], weights["lm_head.weight"].T)
    eq(checkpoint.params["norm/scale"], weights["model.norm.weight"])
    config = checkpoint.config
    assert (config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim) == (64, 6, 2, 16)
    assert (config.rms_eps, config.rope, config.max_position) == (1e-5, RopeConfig(theta=5000.0), 512)
    assert config.nsa is None and checkpoint.notes == () and checkpoint.tokenizer_source is None
    assert checkpoint.source == str(tmp_path / "m")


def test_projection_equals_hugging_face_layout(tmp_path):
    """The same queries as `q_proj(x).view(T, H, D)`, head h in group h // G."""
    weights = hf_weights()
    kernel = load(write_hf(tmp_path, hf_config(), weights)).params["layers/1/attn/qkv/kernel"]
    x = np.random.default_rng(1).standard_normal((5, HIDDEN)).astype(np.float32)
    theirs = (x @ weights["model.layers.1.self_attn.q_proj.weight"].T).reshape(5, HEADS, DIM)
    ours = np.einsum("te,ekgd->tkgd", x, kernel)[:, :, :GROUP].reshape(5, HEADS, DIM)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_dtypes(tmp_path, dtype):
    weights = {name: value.astype(dtype) for name, value in hf_weights().items()}
    path = write_hf(tmp_path, hf_config(), weights)
    kept = load(path, dtype=None)
    assert {array.dtype for array in kept.params.values()} == {np.dtype(dtype)}
    assert_layer(kept.params, weights, 0)
    widened = load(path)
    assert {array.dtype for array in widened.params.values()} == {np.dtype(np.float32)}
    assert_layer(widened.params, {name: value.astype(np.float32) for name, value in weights.items()}, 1)


def test_rounds_to_requested_dtype(tmp_path):
    weights = hf_weights()
    params = load(write_hf(tmp_path, hf_config(), weights), dtype="bfloat16").params
    assert_layer(params, {name: value.astype(ml_dtypes.bfloat16) for name, value in weights.items()}, 0)


def test_shards_equal_single_file(tmp_path):
    weights = hf_weights()
    one = load(write_hf(tmp_path / "one", hf_config(), weights))
    many = load(write_sharded(tmp_path / "many", hf_config(), weights))
    assert one.config == many.config and one.params.keys() == many.params.keys()
    for name, array in one.params.items():
        eq(array, many.params[name])


def test_tied_head_may_be_absent_or_equal(tmp_path):
    fields = hf_config(tie_word_embeddings=True)
    weights = hf_weights(tied=True)
    assert "lm_head/kernel" not in load(write_hf(tmp_path / "a", fields, weights)).params
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    assert load(write_hf(tmp_path / "b", fields, weights)).config.tie_embeddings
    weights["lm_head.weight"][3, 4] += 1
    with pytest.raises(CheckpointError, match="lm_head.weight differs from model.embed_tokens.weight"):
        load(write_hf(tmp_path / "c", fields, weights))


def test_attention_and_mlp_bias(tmp_path):
    weights = hf_weights(qkv_bias=True, o_bias=True, mlp_bias=True)
    checkpoint = load(write_hf(tmp_path, hf_config(attention_bias=True, mlp_bias=True), weights))
    assert_complete(checkpoint)
    layer = {name.removeprefix("layers/1/"): a for name, a in checkpoint.params.items()}
    prefix = "model.layers.1."
    bias = layer["attn/qkv/bias"]
    for k in range(KV_HEADS):
        for g in range(GROUP):
            rows = slice((k * GROUP + g) * DIM, (k * GROUP + g + 1) * DIM)
            eq(bias[k, g], weights[prefix + "self_attn.q_proj.bias"][rows])
        eq(bias[k, GROUP], weights[prefix + "self_attn.k_proj.bias"][k * DIM : (k + 1) * DIM])
        eq(bias[k, GROUP + 1], weights[prefix + "self_attn.v_proj.bias"][k * DIM : (k + 1) * DIM])
    eq(layer["attn/o/bias"], weights[prefix + "self_attn.o_proj.bias"])
    eq(layer["mlp/gate_up/bias"][0], weights[prefix + "mlp.gate_proj.bias"])
    eq(layer["mlp/gate_up/bias"][1], weights[prefix + "mlp.up_proj.bias"])
    eq(layer["mlp/down/bias"], weights[prefix + "mlp.down_proj.bias"])


def test_qwen2_and_qwen3(tmp_path):
    qwen2 = hf_config(model_type="qwen2", architectures=["Qwen2ForCausalLM"], use_sliding_window=False)
    config = load(write_hf(tmp_path / "2", qwen2, hf_weights(qkv_bias=True))).config
    assert (config.qkv_bias, config.o_bias, config.qk_norm) == (True, False, False)
    qwen3 = hf_config(model_type="qwen3", architectures=["Qwen3ForCausalLM"], layer_types=["full_attention"] * LAYERS)
    weights = hf_weights(qk_norm=True)
    checkpoint = load(write_hf(tmp_path / "3", qwen3, weights))
    assert (checkpoint.config.qkv_bias, checkpoint.config.o_bias, checkpoint.config.qk_norm) == (
        False,
        False,
        True,
    )
    eq(checkpoint.params["layers/0/attn/q_norm/scale"], weights["model.layers.0.self_attn.q_norm.weight"])
    eq(checkpoint.params["layers/0/attn/k_norm/scale"], weights["model.layers.0.self_attn.k_norm.weight"])


def test_mistral_without_window(tmp_path):
    fields = hf_config(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=None)
    assert load(write_hf(tmp_path / "a", fields, hf_weights())).config.nsa is None
    # A window that spans the whole context is no window.
    fields["sliding_window"] = 512
    assert load(write_hf(tmp_path / "b", fields, hf_weights())).config.nsa is None


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": ...}, RopeConfig(theta=10000.0)),
        ({"rope_scaling": None}, RopeConfig(theta=5000.0)),
        ({"rope_scaling": {"type": "default"}}, RopeConfig(theta=5000.0)),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3}}, "llama3"),
        ({"rope_scaling": {"type": "llama3", **LLAMA3}}, "llama3"),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "llama3", "rope_theta": 5000.0, **LLAMA3}},
            "llama3",
        ),
        (
            {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            RopeConfig(theta=7.0),
        ),
    ],
)
def test_rope_dialects(tmp_path, changes, expected):
    if expected == "llama3":
        scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=128)
        expected = RopeConfig(theta=5000.0, scaling=scaling)
    assert load(write_hf(tmp_path, hf_config(**changes), hf_weights())).config.rope == expected


def test_rope_theta_override_is_noted(tmp_path):
    path = write_hf(tmp_path, hf_config(), hf_weights())
    checkpoint = load(path, rope_theta=4e5)
    assert checkpoint.config.rope.theta == 4e5
    assert checkpoint.notes == ("rope theta 400000 instead of the checkpoint's 5000",)
    assert load(path, rope_theta=5000.0).notes == ()


def test_defaults_of_absent_fields(tmp_path):
    fields = hf_config(rms_norm_eps=..., head_dim=..., num_key_value_heads=..., max_position_embeddings=...)
    fields |= {"num_attention_heads": 4}
    weights = hf_weights()
    for i in range(LAYERS):
        for name in "qkv":
            weights.add(f"model.layers.{i}.self_attn.{name}_proj.weight", HIDDEN, HIDDEN)
        weights.add(f"model.layers.{i}.self_attn.o_proj.weight", HIDDEN, HIDDEN)
    config = load(write_hf(tmp_path, fields, weights)).config
    assert (config.rms_eps, config.head_dim, config.num_kv_heads, config.max_position) == (1e-6, 16, 4, 2048)


def test_rotary_buffers_of_old_files_are_not_unknown(tmp_path):
    weights = hf_weights()
    weights.add("model.layers.0.self_attn.rotary_emb.inv_freq", DIM // 2)
    assert_complete(load(write_hf(tmp_path, hf_config(), weights)))


def test_progress_counts_every_tensor(tmp_path):
    weights = hf_weights()
    calls = []
    load(write_hf(tmp_path, hf_config(), weights), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (len(weights), len(weights))
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)


# Sparse attention


def gated(weights, rows=3 * HEADS, bias=False):
    for i in range(LAYERS):
        weights.add(f"model.layers.{i}.self_attn.g_proj.weight", rows, HIDDEN)
        if bias:
            weights.add(f"model.layers.{i}.self_attn.g_proj.bias", rows)
    return weights


def test_nsa_1b_fields(tmp_path):
    fields = hf_config(**LLAMA_NSA, block_size=16, block_counts=16, window_size=128)
    weights = gated(hf_weights())
    checkpoint = load(write_hf(tmp_path, fields, weights))
    assert_complete(checkpoint)
    assert checkpoint.config.nsa == NSAConfig(
        cmp_fn="mean",
        cmp_pe="none",
        cmp_rope="pre",
        kernel_size=16,
        kernel_stride=16,
        block_size=16,
        n_selected=16,
        round_n_pow2=True,
        init_blocks=0,
        local_blocks=1,
        window_keys=128,
    )
    gate = checkpoint.params["layers/1/attn/gate/kernel"]
    assert gate.shape == (HIDDEN, KV_HEADS, GROUP, 3)
    for h in range(HEADS):
        for branch in range(3):
            row = weights["model.layers.1.self_attn.g_proj.weight"][3 * h + branch]
            eq(gate[:, h // GROUP, h % GROUP, branch], row)


def test_own_nsa_config_wins_over_the_three_fields(tmp_path):
    fields = hf_config(
        **LLAMA_NSA,
        block_size=64,
        block_counts=2,
        window_size=9,
        nsa_config=nsa_fields(gate_scope="token", gate_bias=True),
    )
    weights = gated(hf_weights(), rows=3, bias=True)
    checkpoint = load(write_hf(tmp_path, fields, weights))
    assert_complete(checkpoint)
    assert checkpoint.config.nsa == NSAConfig(**nsa_fields(gate_scope="token", gate_bias=True))
    eq(checkpoint.params["layers/0/attn/gate/kernel"], weights["model.layers.0.self_attn.g_proj.weight"].T)
    eq(checkpoint.params["layers/0/attn/gate/bias"], weights["model.layers.0.self_attn.g_proj.bias"])


def test_gate_bias_per_head(tmp_path):
    fields = hf_config(**LLAMA_NSA, nsa_config=nsa_fields(gate_bias=True))
    weights = gated(hf_weights(), bias=True)
    bias = load(write_hf(tmp_path, fields, weights)).params["layers/0/attn/gate/bias"]
    stored = weights["model.layers.0.self_attn.g_proj.bias"]
    for h in range(HEADS):
        eq(bias[h // GROUP, h % GROUP], stored[3 * h : 3 * h + 3])


@pytest.mark.parametrize("cmp_fn", ["weighted", "linear", "mlp", "pooled"])
def test_learned_compressors(tmp_path, cmp_fn):
    fields = hf_config(**LLAMA_NSA, nsa_config=nsa_fields(cmp_fn=cmp_fn, cmp_pe="kv", cmp_pools=3))
    weights = gated(hf_weights())
    for i in range(LAYERS):
        attention = f"model.layers.{i}.self_attn."
        for name in ("compress_key", "compress_value"):
            if cmp_fn in ("weighted", "pooled"):
                weights.add(attention + name, KV_HEADS, KERNEL)
            if cmp_fn == "pooled":
                weights.add(f"{attention}{name}.pool_query", KV_HEADS, DIM, 3)
                weights.add(f"{attention}{name}.pool_bias", KV_HEADS, KERNEL, 3)
                weights.add(f"{attention}{name}.pool_mix", KV_HEADS, 3, DIM)
            elif cmp_fn == "linear":
                weights.add(attention + name, KV_HEADS, KERNEL * DIM, DIM)
            elif cmp_fn == "mlp":
                weights.add(f"{attention}{name}.w1", KV_HEADS, KERNEL * DIM, DIM)
                weights.add(f"{attention}{name}.b1", KV_HEADS, DIM)
                weights.add(f"{attention}{name}.w2", KV_HEADS, DIM, DIM)
                weights.add(f"{attention}{name}.b2", KV_HEADS, DIM)
        weights.add(attention + "intra_block_pe", KV_HEADS, KERNEL, DIM)
        weights.add(attention + "intra_block_pe_value", KV_HEADS, KERNEL, DIM)
    checkpoint = load(write_hf(tmp_path, fields, weights))
    assert_complete(checkpoint)
    attention, params = "model.layers.1.self_attn.", checkpoint.params
    for ours, theirs in (("compress_k", "compress_key"), ("compress_v", "compress_value")):
        at = f"layers/1/attn/{ours}/"
        if cmp_fn in ("weighted", "pooled"):
            eq(params[at + "weight"], weights[attention + theirs])
        if cmp_fn == "pooled":
            for part in ("pool_query", "pool_bias", "pool_mix"):
                eq(params[at + part], weights[f"{attention}{theirs}.{part}"])
        elif cmp_fn == "linear":
            for m in range(KERNEL):
                for d in range(DIM):
                    eq(params[at + "weight"][:, m, d], weights[attention + theirs][:, m * DIM + d])
        elif cmp_fn == "mlp":
            for m in range(KERNEL):
                eq(params[at + "w1"][:, m], weights[f"{attention}{theirs}.w1"][:, m * DIM : (m + 1) * DIM])
            for part in ("b1", "w2", "b2"):
                eq(params[at + part], weights[f"{attention}{theirs}.{part}"])
    eq(params["layers/1/attn/compress_k/pe"], weights[attention + "intra_block_pe"])
    eq(params["layers/1/attn/compress_v/pe"], weights[attention + "intra_block_pe_value"])


def test_given_nsa_config_wins_over_the_checkpoint(tmp_path):
    fields = hf_config(**LLAMA_NSA, nsa_config=nsa_fields())
    path = write_hf(tmp_path, fields, gated(hf_weights()))
    stored = NSAConfig(**nsa_fields())
    assert load(path, nsa=stored).notes == ()
    other = dataclasses.replace(stored, window_keys=64)
    checkpoint = load(path, nsa=other)
    assert checkpoint.config.nsa == other and "differ" in checkpoint.notes[0]
    with pytest.raises(CheckpointError, match=r"2 of a wrong shape: .*g_proj.weight \(expected \[3, 64\]"):
        load(path, nsa=dataclasses.replace(stored, gate_scope="token"))
    with pytest.raises(CheckpointError, match="missing: model.layers.0.self_attn.compress_key,"):
        load(path, nsa=dataclasses.replace(stored, cmp_fn="linear"))


def test_sparse_checkpoint_as_dense(tmp_path):
    fields = hf_config(**LLAMA_NSA, nsa_config=nsa_fields())
    weights = gated(hf_weights())
    checkpoint = load(write_hf(tmp_path, fields, weights), nsa=None)
    assert checkpoint.config.nsa is None and "not used" in checkpoint.notes[0]
    assert_complete(checkpoint)
    assert_layer(checkpoint.params, weights, 0)


def test_dense_checkpoint_gets_selected_only_gates(tmp_path):
    path = write_hf(tmp_path, hf_config(), hf_weights())
    checkpoint = load(path, nsa=NSAConfig(**nsa_fields()))
    assert_complete(checkpoint)
    assert checkpoint.config.nsa == NSAConfig(**nsa_fields(gate_bias=True))
    for i in range(LAYERS):
        assert not checkpoint.params[f"layers/{i}/attn/gate/kernel"].any()
        bias = checkpoint.params[f"layers/{i}/attn/gate/bias"]
        assert bias.shape == (KV_HEADS, GROUP, 3) and bias.flags.writeable
        eq(bias, np.broadcast_to(np.float32([-40, 40, -40]), bias.shape))
    assert len(checkpoint.notes) == 1 and "only the selected branch is open" in checkpoint.notes[0]
    token = load(path, nsa=NSAConfig(**nsa_fields(gate_scope="token")), dtype="bfloat16")
    eq(token.params["layers/0/attn/gate/bias"], np.array([-40, 40, -40], ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"cmp_fn": "linear"}, "the linear compressor"), ({"cmp_pe": "k"}, "the position embedding")],
)
def test_dense_checkpoint_cannot_feed_a_learned_compressor(tmp_path, fields, what):
    path = write_hf(tmp_path, hf_config(), hf_weights())
    with pytest.raises(CheckpointError, match=f"no weights for {what}.*train them first"):
        load(path, nsa=NSAConfig(**nsa_fields(**fields)))


# fla


def fla_checkpoint(fused: bool):
    fields = {
        "architectures": ["NSAForCausalLM"],
        "model_type": "nsa",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": 999,  # not passed on by its code: the shapes decide
        "hidden_ratio": 4,
        "intermediate_size": None,
        "hidden_act": "swish",
        "norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "block_size": 32,
        "block_counts": 5,
        "window_size": 48,
        "tie_word_embeddings": False,
    }
    dense = gated(hf_weights())
    rename = {
        "model.embed_tokens.": "model.embeddings.",
        ".input_layernorm.": ".attn_norm.",
        ".post_attention_layernorm.": ".mlp_norm.",
        ".self_attn.": ".attn.",
    }
    weights = {}
    for name, value in dense.items():
        for old, new in rename.items():
            name = name.replace(old, new)
        weights[name] = value
    if fused:
        for i in range(LAYERS):
            mlp = f"model.layers.{i}.mlp."
            gate, up = weights.pop(mlp + "gate_proj.weight"), weights.pop(mlp + "up_proj.weight")
            weights[mlp + "gate_proj.weight"] = np.concatenate([gate, up])
    return fields, weights, dense


@pytest.mark.parametrize("fused", [False, True])
def test_fla(tmp_path, fused):
    fields, weights, dense = fla_checkpoint(fused)
    checkpoint = load(write_hf(tmp_path, fields, weights))
    assert_complete(checkpoint)
    config = checkpoint.config
    assert (config.head_dim, config.intermediate_size, config.rms_eps) == (DIM, FFN, 1e-6)
    expected = dataclasses.replace(
        NSA_PRESETS["fla"], kernel_size=32, kernel_stride=32, block_size=32, n_selected=5, window_keys=48
    )
    assert config.nsa == expected and config.nsa.n_blocks == 8
    for i in range(LAYERS):
        assert_layer(checkpoint.params, dense, i)
        gate = checkpoint.params[f"layers/{i}/attn/gate/kernel"]
        eq(gate[:, 1, 2, 1], dense[f"model.layers.{i}.self_attn.g_proj.weight"][3 * (GROUP + 2) + 1])
    eq(checkpoint.params["lm_head/kernel"], dense["lm_head.weight"].T)
