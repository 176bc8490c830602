"""Every way in which a directory can be wrong, and the message that says so."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.loading import load
from tests.models.checkpoints import (
    HIDDEN,
    LAYERS,
    VOCAB,
    hf_config,
    hf_weights,
    nsa_fields,
    write_gguf,
    write_hf,
    write_sharded,
)

LLAMA_NSA = {"model_type": "llama-nsa", "architectures": ["LlamaNSAForCausalLM"]}


def message_of(path, **options) -> str:
    """The one-line message with which loading fails."""
    with pytest.raises(CheckpointError) as error:
        load(path, **options)
    message = str(error.value)
    assert "\n" not in message and str(path) in message
    return message


def test_nothing_there(tmp_path):
    assert "no such file or directory" in message_of(tmp_path / "nowhere")


def test_directory_without_config(tmp_path):
    assert message_of(tmp_path).endswith("no config.json in this directory")
    write_gguf(tmp_path / "m.gguf", hf_weights())
    assert f"give its path, such as {tmp_path / 'm.gguf'}" in message_of(tmp_path)


def test_safetensors_file_instead_of_its_directory(tmp_path):
    write_hf(tmp_path, hf_config(), hf_weights())
    assert "give the directory" in message_of(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: not valid JSON: Expecting property name"),
        ("", "not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        ("{}", "without model_type and architectures"),
        ('{"model_type": "gpt2"}', "unsupported model 'gpt2'; supported: llama (LlamaForCausalLM), mistral"),
        ('{"architectures": "LlamaForCausalLM"}', "architectures must be a list"),
        ('{"architectures": ["OPTForCausalLM"]}', "unsupported model ['OPTForCausalLM']"),
        (
            '{"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]}',
            "unsupported architecture LlamaForSequenceClassification",
        ),
    ],
)
def test_bad_config_text(tmp_path, text, message):
    write_hf(tmp_path, hf_config(), hf_weights())
    (tmp_path / "config.json").write_text(text)
    assert message in message_of(tmp_path)


def test_config_that_is_not_text(tmp_path):
    write_hf(tmp_path, hf_config(), hf_weights())
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    assert "config.json: cannot be read" in message_of(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "field hidden_size is missing"),
        ({"vocab_size": "40"}, "field vocab_size must be an integer, got '40'"),
        ({"num_hidden_layers": True}, "field num_hidden_layers must be an integer, got True"),
        ({"rms_norm_eps": "small"}, "field rms_norm_eps must be a number"),
        ({"tie_word_embeddings": 1}, "field tie_word_embeddings must be true or false"),
        ({"num_attention_heads": 0}, "num_attention_heads must be positive"),
        ({"num_key_value_heads": 4}, "must be a multiple of num_kv_heads=4"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised checkpoints"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "only full_attention is supported"),
        ({"layer_types": [["odd"]]}, "only full_attention is supported"),
        ({"layer_types": 5}, "only full_attention is supported"),
        (
            {"model_type": "mistral", "architectures": [], "sliding_window": "x"},
            "sliding_window must be an integer",
        ),
        ({"rope_scaling": "linear"}, "field rope_scaling must be an object or null"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling of type 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "supported: default, llama3"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters of type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor is missing"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                    "original_max_position_embeddings": 128,
                }
            },
            "need 0 < low_freq_factor < high_freq_factor",
        ),
        ({"rope_theta": 0}, "rope theta must be greater than 1"),
        ({"head_dim": 32}, "head_dim 32 and num_attention_heads 6 give 192 query rows, but"),
        ({"head_dim": ...}, "give 60 query rows"),
        (
            {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 64},
            "window 64",
        ),
        (
            {"model_type": "mistral", "architectures": [], "max_position_embeddings": 32768},
            "sliding_window 4096 is not supported; only null, or at least 32768",
        ),
        ({"model_type": "qwen2", "architectures": [], "use_sliding_window": True}, "use_sliding_window"),
    ],
)
def test_bad_fields(tmp_path, changes, message):
    path = write_hf(tmp_path, hf_config(**changes), hf_weights())
    found = message_of(path)
    assert message in found and "config.json: " in found


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cmp_visible": "lt"}, "cmp_visible='lt' is not supported"),
        ({"branch_kv": "separate"}, "branch_kv='separate' is not supported"),
        ({"kernel": 3}, "unknown nsa field(s) kernel; known: "),
        ({"kernel_stride": 3}, "kernel_stride=3 must divide"),
    ],
)
def test_unsupported_sparse_attention(tmp_path, changes, message):
    fields = hf_config(**LLAMA_NSA, nsa_config=nsa_fields(**changes))
    assert message in message_of(write_hf(tmp_path, fields, hf_weights()))


def test_sparse_checkpoint_without_its_gates(tmp_path):
    path = write_hf(tmp_path, hf_config(**LLAMA_NSA, nsa_config=nsa_fields()), hf_weights())
    gates = ", ".join(f"model.layers.{i}.self_attn.g_proj.weight" for i in range(LAYERS))
    assert f"2 missing: {gates}." in message_of(path)


def test_fla_sizes_that_do_not_fit(tmp_path):
    fields = {
        "model_type": "nsa",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_heads": 7,
    }
    weights = {"model.layers.0.attn.q_proj.weight": np.zeros((96, 64), np.float32)}
    assert "num_heads 7 does not divide" in message_of(write_hf(tmp_path, fields, weights))


# Tensors


def test_missing_unknown_and_wrong_shapes_are_all_listed(tmp_path):
    weights = hf_weights()
    del weights["model.norm.weight"]
    weights.add("model.layers.0.mlp.expert.weight", 3)
    weights.add("model.layers.1.mlp.down_proj.weight", HIDDEN, 95)
    message = message_of(write_hf(tmp_path, hf_config(), weights))
    assert "1 missing: model.norm.weight; " in message
    assert "1 unknown: model.layers.0.mlp.expert.weight; " in message
    assert "1 of a wrong shape: model.layers.1.mlp.down_proj.weight (expected [64, 96], found [64, 95])" in message


def test_long_lists_are_cut_with_a_count(tmp_path):
    message = message_of(write_hf(tmp_path, hf_config(num_hidden_layers=4), hf_weights()))
    assert "18 missing: model.layers.2.input_layernorm.weight, " in message and " and 8 more" in message


def test_absurd_number_of_layers(tmp_path):
    message = message_of(write_hf(tmp_path, hf_config(num_hidden_layers=1 << 40), hf_weights()))
    assert "1099511627776 layers cannot be made of its 21 tensors" in message


def test_missing_head_without_tying(tmp_path):
    assert "1 missing: lm_head.weight" in message_of(write_hf(tmp_path, hf_config(), hf_weights(tied=True)))


def test_biases_that_the_config_does_not_announce(tmp_path):
    message = message_of(write_hf(tmp_path, hf_config(), hf_weights(qkv_bias=True)))
    assert "6 unknown: model.layers.0.self_attn.k_proj.bias" in message


def test_unsupported_dtypes(tmp_path):
    weights = {name: value.astype(np.float64) for name, value in hf_weights().items()}
    assert "has dtype F64; supported: F32, F16, BF16" in message_of(write_hf(tmp_path, hf_config(), weights))


def test_values_beyond_float16(tmp_path):
    weights = hf_weights()
    weights["model.norm.weight"][5] = 1e6
    path = write_hf(tmp_path, hf_config(), weights)
    assert "model.norm.weight has values beyond the range of float16" in message_of(path, dtype=np.float16)
    assert load(path, dtype="bfloat16").params["norm/scale"][5] > 9e5


def test_mixed_dtypes_inside_one_parameter(tmp_path):
    weights = hf_weights()
    name = "model.layers.0.self_attn.k_proj.weight"
    weights[name] = weights[name].astype(np.float16)
    path = write_hf(tmp_path, hf_config(), weights)
    assert "load with an explicit dtype" in message_of(path, dtype=None)
    assert load(path).config.num_layers == LAYERS


def test_bad_arguments(tmp_path):
    path = write_hf(tmp_path, hf_config(), hf_weights())
    with pytest.raises(ValueError, match="dtype must be float32, bfloat16 or float16, got int32"):
        load(path, dtype=np.int32)
    with pytest.raises(ValueError, match="rope theta must be greater than 1, got 0.5"):
        load(path, rope_theta=0.5)


# Files


def test_no_weights(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    assert "neither model.safetensors nor model.safetensors.index.json" in message_of(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert pytorch_model.bin to safetensors first" in message_of(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 8, 9, 100, 0.5, -1])
def test_truncated_safetensors(tmp_path, keep):
    path = write_hf(tmp_path, hf_config(), hf_weights())
    file = path / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if isinstance(keep, float) else keep])
    assert "model.safetensors: not a complete safetensors file" in message_of(path)


def test_garbage_in_safetensors_header(tmp_path):
    path = write_hf(tmp_path, hf_config(), hf_weights())
    file = path / "model.safetensors"
    intact = file.read_bytes()
    for damage in (
        struct.pack("<Q", 1 << 62) + intact[8:],
        struct.pack("<Q", 5) + intact[8:],
        intact[:8] + b"\x00" * 64 + intact[72:],
        intact.replace(b'"F32"', b'"X32"', 1),
        intact.replace(b'"data_offsets":[0,', b'"data_offsets":[9,', 1),
        b"not safetensors at all, but longer than eight bytes",
    ):
        assert damage != intact
        file.write_bytes(damage)
        assert "model.safetensors: not a complete safetensors file" in message_of(path)


def test_flipped_header_bits_never_escape_as_other_errors(tmp_path):
    path = write_hf(tmp_path, hf_config(), hf_weights())
    file = path / "model.safetensors"
    intact = file.read_bytes()
    (header,) = struct.unpack("<Q", intact[:8])
    rng = np.random.default_rng(1)
    failures = 0
    for _ in range(150):
        data = bytearray(intact)
        data[rng.integers(8 + header)] ^= 1 << rng.integers(8)
        file.write_bytes(data)
        try:
            load(path)
        except CheckpointError as error:
            failures += 1
            assert "\n" not in str(error)
    assert failures > 100


def test_missing_shard(tmp_path):
    path = write_sharded(tmp_path / "m", hf_config(), hf_weights())
    (path / "model-00002-of-00002.safetensors").unlink()
    message = message_of(path)
    assert "1 of 2 shards missing: model-00002-of-00002.safetensors; download them into" in message


def test_truncated_shard(tmp_path):
    path = write_sharded(tmp_path / "m", hf_config(), hf_weights())
    shard = path / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-7])
    assert "model-00002-of-00002.safetensors: not a complete safetensors file" in message_of(path)


def test_index_and_shards_disagree(tmp_path):
    path = write_sharded(tmp_path / "m", hf_config(), hf_weights())
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    assert "lists 1 tensors that their shards do not hold: model.extra.weight;" in message_of(path)
    save_file({"lm_head.weight": np.zeros(1, np.float32)}, path / "model-00002-of-00002.safetensors")
    assert "is also in" in message_of(path) or "shards do not hold" in message_of(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "index.json: not valid JSON"),
        ("{}", "no weight_map object"),
        (
            '{"weight_map": {"a": "../other.safetensors"}}',
            "'../other.safetensors', which is not a plain file name",
        ),
        ('{"weight_map": {"a": 3}}', "points to 3, which is not a plain file name"),
    ],
)
def test_bad_index(tmp_path, text, message):
    path = write_sharded(tmp_path / "m", hf_config(), hf_weights())
    (path / "model.safetensors.index.json").write_text(text)
    assert message in message_of(path)
