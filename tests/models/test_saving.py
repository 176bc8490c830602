"""Export and save: what is written, bit for bit round trips, and saves that fail half way."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from ssv_jax.models import saving
from ssv_jax.models.config import Llama3Scaling, LlamaConfig, NSAConfig, RopeConfig
from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.llama import param_shapes
from ssv_jax.models.loading import load
from ssv_jax.models.saving import export_hf, save_orbax
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
    eq,
    nsa_fields,
)

DTYPES = (np.float32, np.float16, ml_dtypes.bfloat16)


def tiny(**changes) -> LlamaConfig:
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "rms_eps": 1e-6,
        "rope": RopeConfig(theta=5e5),
        "max_position": 1000,
    }
    return LlamaConfig(**{**fields, **changes})


def random_params(config, dtype=np.float32):
    rng = np.random.default_rng(5)
    return {
        name: rng.standard_normal(shape).astype(np.float32).astype(dtype)
        for name, shape in param_shapes(config).items()
    }


def bits(array):
    return np.asarray(array).view(np.uint8 if array.dtype.itemsize == 1 else f"u{array.dtype.itemsize}")


def assert_same(checkpoint, config, params):
    assert checkpoint.config == config
    assert checkpoint.params.keys() == params.keys()
    for name, array in params.items():
        assert checkpoint.params[name].dtype == array.dtype
        eq(bits(checkpoint.params[name]), bits(array))


LLAMA3 = RopeConfig(
    theta=5e5,
    scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
)
CONFIGS = {
    "llama": tiny(),
    "llama_tied_llama3": tiny(tie_embeddings=True, rope=LLAMA3),
    "llama_biases": tiny(qkv_bias=True, o_bias=True, mlp_bias=True),
    "qwen2": tiny(qkv_bias=True, tie_embeddings=True),
    "qwen3": tiny(qk_norm=True),
    "nsa_mean": tiny(nsa=NSAConfig(**nsa_fields())),
    "nsa_token_gate": tiny(nsa=NSAConfig(**nsa_fields(gate_scope="token", gate_bias=True, cmp_rope="pre"))),
    "nsa_weighted": tiny(nsa=NSAConfig(**nsa_fields(cmp_fn="weighted", gate_bias=True))),
    "nsa_pooled": tiny(nsa=NSAConfig(**nsa_fields(cmp_fn="pooled", cmp_pe="kv", cmp_pools=2))),
    "nsa_linear_pe": tiny(nsa=NSAConfig(**nsa_fields(cmp_fn="linear", cmp_pe="k"))),
    "nsa_mlp_pe": tiny(
        nsa=NSAConfig(**nsa_fields(cmp_fn="mlp", cmp_pe="kv", round_n_pow2=True)), qkv_bias=True, qk_norm=True
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_export_round_trip(tmp_path, name):
    config = CONFIGS[name]
    params = random_params(config)
    export_hf(tmp_path / "m", config, params)
    assert_same(load(tmp_path / "m"), config, params)
    model_type = json.loads((tmp_path / "m" / "config.json").read_text())["model_type"]
    assert model_type == ("llama-nsa" if config.nsa else name.split("_")[0])
    assert sorted(os.listdir(tmp_path)) == ["m"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("save", [export_hf, save_orbax])
def test_dtypes_are_kept(tmp_path, save, dtype):
    config = CONFIGS["nsa_linear_pe"]
    params = random_params(config, dtype)
    params["norm/scale"][:4] = np.array([np.inf, -0.0, np.nan, 6e-8], np.float32).astype(dtype)
    save(tmp_path / "m", config, params)
    assert_same(load(tmp_path / "m", dtype=None), config, params)
    assert_same(load(tmp_path / "m", dtype=dtype), config, params)


@pytest.mark.parametrize("name", ["llama_biases", "nsa_mlp_pe"])
def test_orbax_round_trip(tmp_path, name):
    config = CONFIGS[name]
    params = random_params(config)
    save_orbax(tmp_path / "m", config, params)
    calls = []
    checkpoint = load(tmp_path / "m", progress=lambda done, total: calls.append((done, total)))
    assert_same(checkpoint, config, params)
    assert calls[-1] == (len(params), len(params)) and checkpoint.tokenizer_source is None


def test_orbax_holds_what_no_hugging_face_class_can(tmp_path):
    config = tiny(o_bias=True, qk_norm=True)
    params = random_params(config)
    with pytest.raises(CheckpointError, match="no Hugging Face architecture has qkv_bias=False, o_bias=True"):
        export_hf(tmp_path / "a", config, params)
    save_orbax(tmp_path / "b", config, params)
    assert_same(load(tmp_path / "b"), config, params)


def test_mixed_dtypes_and_jax_arrays(tmp_path):
    config = CONFIGS["nsa_mean"]
    params = {name: jnp.asarray(value) for name, value in random_params(config).items()}
    for name in params:
        if "norm" not in name:
            params[name] = params[name].astype(jnp.bfloat16)
    for index, save in enumerate((export_hf, save_orbax)):
        save(tmp_path / str(index), config, params)
        assert_same(load(tmp_path / str(index), dtype=None), config, params)


def test_exported_values_by_row(tmp_path):
    """Rows of the file against indices of the parameters; the reader here is not ours."""
    config = CONFIGS["nsa_linear_pe"]
    params = random_params(config)
    export_hf(tmp_path, config, params)
    with safe_open(tmp_path / "model.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        assert file.metadata() == {"format": "pt"}
    assert len(tensors) == 3 + LAYERS * (9 + 1 + 2 + 1)
    source, target = "model.layers.1.", "layers/1/"
    qkv, gate = params[target + "attn/qkv/kernel"], params[target + "attn/gate/kernel"]
    for h in range(HEADS):
        k, g = divmod(h, GROUP)
        for d in range(DIM):
            eq(tensors[source + "self_attn.q_proj.weight"][h * DIM + d], qkv[:, k, g, d])
            eq(
                tensors[source + "self_attn.o_proj.weight"][:, h * DIM + d],
                params[target + "attn/o/kernel"][k, g, d],
            )
        for branch in range(3):
            eq(tensors[source + "self_attn.g_proj.weight"][3 * h + branch], gate[:, k, g, branch])
    for k in range(KV_HEADS):
        for d in range(DIM):
            eq(tensors[source + "self_attn.k_proj.weight"][k * DIM + d], qkv[:, k, GROUP, d])
            eq(tensors[source + "self_attn.v_proj.weight"][k * DIM + d], qkv[:, k, GROUP + 1, d])
    eq(tensors[source + "mlp.gate_proj.weight"], params[target + "mlp/gate_up/kernel"][:, 0].T)
    eq(tensors[source + "mlp.up_proj.weight"], params[target + "mlp/gate_up/kernel"][:, 1].T)
    eq(tensors[source + "mlp.down_proj.weight"], params[target + "mlp/down/kernel"].T)
    for m in range(KERNEL):
        rows = slice(m * DIM, (m + 1) * DIM)
        weight = params[target + "attn/compress_v/weight"]
        eq(tensors[source + "self_attn.compress_value"][:, rows], weight[:, m])
    eq(tensors[source + "self_attn.intra_block_pe"], params[target + "attn/compress_k/pe"])
    eq(tensors["lm_head.weight"], params["lm_head/kernel"].T)


def test_config_json_is_what_hugging_face_reads(tmp_path):
    transformers = pytest.importorskip("transformers")
    # Its class wants heads that divide the hidden size.
    config = tiny(num_heads=4, tie_embeddings=True, rope=LLAMA3)
    export_hf(tmp_path, config, random_params(config))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path, local_files_only=True)
    assert type(theirs).__name__ == "LlamaConfig" and theirs.architectures == ["LlamaForCausalLM"]
    assert (theirs.hidden_size, theirs.head_dim, theirs.num_key_value_heads) == (HIDDEN, DIM, KV_HEADS)
    assert theirs.tie_word_embeddings and theirs.max_position_embeddings == 1000
    rope = theirs.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 8.0, 5e5)


def test_shards_and_index(tmp_path):
    config = CONFIGS["nsa_mean"]
    params = random_params(config, np.float16)
    limit = 20_000
    export_hf(tmp_path, config, params, max_shard_bytes=limit)
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in params.values())
    for file in files:
        with safe_open(tmp_path / file, framework="np") as shard:
            sizes = [shard.get_tensor(name).nbytes for name in shard.keys()]
        assert sum(sizes) <= limit or len(sizes) == 1
    assert_same(load(tmp_path, dtype=None), config, params)


def test_tokenizer_files_travel_along(tmp_path):
    source = tmp_path / "tokenizer.json"
    source.write_text("{}")
    config = CONFIGS["llama"]
    params = random_params(config)
    for index, save in enumerate((export_hf, save_orbax)):
        target = tmp_path / str(index)
        save(target, config, params, tokenizer_files=[source])
        assert (target / "tokenizer.json").read_text() == "{}"
        assert load(target).tokenizer_source == str(target)
    with pytest.raises(CheckpointError, match="absent.json: no such tokenizer file"):
        export_hf(tmp_path / "x", config, params, tokenizer_files=[tmp_path / "absent.json"])
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="would replace a part of"):
        export_hf(tmp_path / "x", config, params, tokenizer_files=[tmp_path / "config.json"])
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("save", [export_hf, save_orbax])
def test_overwriting(tmp_path, save):
    config = CONFIGS["llama"]
    old, new = random_params(config), random_params(config, np.float16)
    target = tmp_path / "m"
    target.mkdir()
    save(target, config, old)  # an empty directory is free
    (target / "stale.txt").write_text("old")
    with pytest.raises(CheckpointError, match="m: not empty; choose another directory or pass overwrite=True"):
        save(target, config, new)
    assert_same(load(target, dtype=None), config, old)
    save(target, config, new, overwrite=True)
    assert_same(load(target, dtype=None), config, new)
    assert not (target / "stale.txt").exists() and os.listdir(tmp_path) == ["m"]


def test_only_checkpoints_are_overwritten(tmp_path):
    config = CONFIGS["llama"]
    params = random_params(config)
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(CheckpointError, match="not empty and no checkpoint, so it is kept"):
        export_hf(tmp_path, config, params, overwrite=True)
    assert (tmp_path / "thesis.tex").read_text() == "precious"
    with pytest.raises(CheckpointError, match="exists and is not a directory"):
        save_orbax(tmp_path / "thesis.tex", config, params, overwrite=True)


@pytest.mark.parametrize("save", [export_hf, save_orbax])
def test_params_that_do_not_fit(tmp_path, save):
    config = CONFIGS["llama"]
    params = random_params(config)
    params["norm/scale"] = params["norm/scale"][:-1]
    params["extra"] = np.zeros(2, np.float32)
    params["embed/embedding"] = params["embed/embedding"].astype(np.float64)
    del params["layers/0/mlp/down/kernel"]
    with pytest.raises(CheckpointError) as error:
        save(tmp_path / "m", config, params)
    message = str(error.value)
    assert "1 missing: layers/0/mlp/down/kernel; 1 unknown: extra; " in message
    assert "1 of a wrong shape: norm/scale (expected [64], found [63])" in message
    assert "1 not float32, bfloat16, float16: embed/embedding (float64)" in message
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("save", [export_hf, save_orbax])
def test_failing_save_keeps_the_old_one(tmp_path, save, monkeypatch):
    config = CONFIGS["llama"]
    params = random_params(config)
    save(tmp_path / "m", config, params)

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(saving, "write_safetensors", full)
    monkeypatch.setattr(saving, "write_checkpoint", full)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path / "m", config, params, overwrite=True)
    with pytest.raises(OSError, match="no space left"):
        save(tmp_path / "fresh", config, params)
    assert os.listdir(tmp_path) == ["m"]
    assert_same(load(tmp_path / "m"), config, params)


def _stall(target):
    """Child process: writes everything, then hangs before the rename."""
    real = saving.write_safetensors

    def slow(directory, *args):
        real(directory, *args)
        (directory.parent / "written").touch()
        time.sleep(3600)

    saving.write_safetensors = slow
    config = CONFIGS["llama"]
    export_hf(target, config, random_params(config))


def test_killed_save_leaves_no_checkpoint(tmp_path):
    child = multiprocessing.get_context("spawn").Process(target=_stall, args=(tmp_path / "m",), daemon=True)
    child.start()
    try:
        limit = time.monotonic() + 600
        while not list(tmp_path.glob("*/written")):
            assert child.is_alive() and time.monotonic() < limit
            time.sleep(0.05)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert not (tmp_path / "m").exists()
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".m.") and leftover.name.endswith(".incomplete")
    with pytest.raises(CheckpointError, match="no such file or directory"):
        load(tmp_path / "m")
    # Nor does the leftover stand in the way.
    config = CONFIGS["llama"]
    export_hf(tmp_path / "m", config, random_params(config))
    assert load(tmp_path / "m").config == config


# Damaged checkpoints of the own format


def saved(tmp_path):
    config = CONFIGS["llama"]
    save_orbax(tmp_path / "m", config, random_params(config))
    return tmp_path / "m"


def message_of(path):
    with pytest.raises(CheckpointError) as error:
        load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    return str(error.value)


def test_damaged_manifest(tmp_path):
    path = saved(tmp_path)
    manifest = path / "ssv_jax_checkpoint.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "version": 9}))
    assert "version 9 is unsupported; this release reads 'ssv-jax', version 1" in message_of(path)
    manifest.write_text(json.dumps({**content, "config": {"vocab_size": 3}}))
    assert "no valid config in it" in message_of(path)
    manifest.write_text(json.dumps({**content, "config": {**content["config"], "head_dim": 8}}))
    message = message_of(path)
    assert "4 of a wrong shape: " in message
    assert "layers/0/attn/qkv/kernel (expected [64, 2, 5, 8], found [64, 2, 5, 16])" in message
    manifest.write_text("{")
    assert "not valid JSON" in message_of(path)


def test_damaged_params(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    path = saved(tmp_path)

    def damaged(*_, **__):
        raise RuntimeError("checksum\nmismatch")

    # Orbax fails in several threads at once; their noise is not for a test suite.
    with monkeypatch.context() as patch:
        patch.setattr(ocp.PyTreeCheckpointer, "restore", damaged)
        assert "params: orbax cannot read it (RuntimeError: checksum mismatch); save it again" in message_of(path)
    data = max((path / "params").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    intact = data.read_bytes()
    data.write_bytes(intact[:-1])
    relative = data.relative_to(path / "params")
    message = message_of(path)
    assert "damaged or incomplete checkpoint, copy it again; 1 of a wrong size in params: " in message
    assert f"{relative} (expected {len(intact)} bytes, found {len(intact) - 1})" in message
    data.unlink()
    assert f"1 missing in params: {relative}" in message_of(path)
    data.write_bytes(intact)
    assert load(path).config == CONFIGS["llama"]
    manifest = path / "ssv_jax_checkpoint.json"
    content = json.loads(manifest.read_text())
    del content["files"]
    manifest.write_text(json.dumps(content))
    assert "no list of files in it" in message_of(path)


def test_own_format_with_other_sparse_attention(tmp_path):
    config = CONFIGS["nsa_linear_pe"]
    params = random_params(config)
    save_orbax(tmp_path / "m", config, params)
    dense = load(tmp_path / "m", nsa=None)
    assert dense.config == config.dense() and "not used" in dense.notes[0]
    assert dense.params.keys() == param_shapes(config.dense()).keys()
    dense_dir = saved(tmp_path / "d")
    sparse = load(dense_dir, nsa=NSAConfig(**nsa_fields()), rope_theta=9e3)
    assert sparse.config.nsa == NSAConfig(**nsa_fields(gate_bias=True)) and len(sparse.notes) == 2
    assert sparse.params.keys() == param_shapes(sparse.config).keys()
