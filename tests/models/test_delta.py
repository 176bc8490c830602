"""Deltas: what is written is read, merging is the stated sum, and everything that does not fit is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ssv_jax.models.config import NSA_PRESETS, NSAConfig, RopeConfig
from ssv_jax.models.delta import (
    LORA_A,
    LORA_B,
    DeltaBase,
    matrix_shape,
    merge,
    read_delta,
    read_delta_info,
    save_delta,
    weights_sha256,
)
from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.llama import param_shapes
from ssv_jax.models.loading import detect_format, load, read_model_config
from ssv_jax.models.saving import save_orbax
from tests.models.checkpoints import hf_config, hf_weights, write_gguf, write_hf, write_sharded
from tests.models.deltas import NSA, SCALE, random_arrays, trained_from, write_delta


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A base `hf` and its delta `delta` side by side; not to be changed."""
    home = tmp_path_factory.mktemp("home")
    base = write_hf(home / "hf", hf_config(), hf_weights())
    write_delta(
        home / "delta",
        "../hf",
        read_model_config(base),
        sha256=weights_sha256(base),
        refresh_intervals=(1, 2, 3),
        training={"steps": 7},
    )
    return home


@pytest.fixture
def copy(home, tmp_path):
    """The same, to be changed."""
    shutil.copytree(home, tmp_path / "home")
    return tmp_path / "home"


def change_config(directory, **fields) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_tensors(directory, change) -> None:
    tensors = load_file(directory / "delta.safetensors")
    change(tensors)
    save_file(tensors, directory / "delta.safetensors")


def test_what_is_saved_is_read(home):
    base = read_model_config(home / "hf")
    delta = read_delta(home / "delta")
    arrays = random_arrays(base, trained_from(base))
    assert delta.arrays.keys() == arrays.keys()
    for name, value in arrays.items():
        assert delta.arrays[name].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(delta.arrays[name].astype(np.float32), value)
    assert delta.info.config(base) == trained_from(base)
    assert delta.info.lora_scale == SCALE and delta.info.refresh_intervals == (1, 2, 3)
    assert delta.info.training == {"steps": 7}
    assert delta.info.base == DeltaBase(model="../hf", sha256=weights_sha256(home / "hf"))
    assert sorted(file.name for file in (home / "delta").iterdir()) == ["config.json", "delta.safetensors"]
    assert detect_format(home / "delta") == "delta"
    assert read_model_config(home / "delta") == trained_from(base)


def test_merged_values_by_their_indices(home):
    """A kernel flattened in another order, a scale that is left out, a change added twice."""
    calls = []
    base, loaded = load(home / "hf"), load(home / "delta", progress=lambda *at: calls.append(at))
    assert calls and calls[-1][0] == calls[-1][1]
    config, arrays = loaded.config, read_delta(home / "delta").arrays
    assert {name: x.shape for name, x in loaded.params.items()} == param_shapes(config)
    assert loaded.refresh_intervals == (1, 2, 3)
    e, k, g, d, f = config.hidden_size, config.num_kv_heads, config.group, config.head_dim, config.intermediate_size
    for i in range(config.num_layers):
        for part, a_axes, b_axes, pattern in (
            ("attn/qkv/kernel", (e,), (k, g + 2, d), "er,rkgd->ekgd"),
            ("attn/o/kernel", (k, g, d), (e,), "kgdr,re->kgde"),
            ("mlp/gate_up/kernel", (e,), (2, f), "er,rtf->etf"),
            ("mlp/down/kernel", (f,), (e,), "fr,re->fe"),
        ):
            name = f"layers/{i}/{part}"
            a, b = (arrays[name + end].astype(np.float32) for end in (LORA_A, LORA_B))
            change = np.einsum(pattern, a.reshape(*a_axes, -1), b.reshape(-1, *b_axes))
            assert np.abs(change).max() > 0
            expected = base.params[name] + np.float32(SCALE) * change
            np.testing.assert_array_equal(loaded.params[name], expected)
    for name in param_shapes(config):
        if name in arrays:
            np.testing.assert_array_equal(loaded.params[name], arrays[name].astype(np.float32))
        elif name + LORA_A not in arrays:
            np.testing.assert_array_equal(loaded.params[name], base.params[name])
    assert "norm/scale" in arrays and "layers/0/attn/compress_k/pe" in arrays


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, None])
def test_every_base_format_and_dtype_gives_the_same_model(home, tmp_path, dtype):
    """A format whose tensors are rounded before the change is added, or not merged at all."""
    base = load(home / "hf")
    write_sharded(tmp_path / "sharded", hf_config(), hf_weights())
    write_gguf(tmp_path / "m.gguf", hf_weights())
    save_orbax(tmp_path / "orbax", base.config, base.params)
    merged = merge(base.config, base.params, read_delta(home / "delta"), dtype=dtype)
    for path in (None, tmp_path / "sharded", tmp_path / "orbax", tmp_path / "m.gguf"):
        shutil.rmtree(tmp_path / "delta", ignore_errors=True)
        shutil.copytree(home / "delta", tmp_path / "delta")
        if path is not None:
            change_config(tmp_path / "delta", base={"model": "elsewhere", "sha256": None})
        found = load(tmp_path / "delta", base=path or home / "hf", dtype=dtype)
        assert found.params.keys() == merged.keys()
        for name, value in merged.items():
            assert found.params[name].dtype == value.dtype == (value.dtype if dtype is None else dtype)
            np.testing.assert_array_equal(found.params[name], value)
    # Rounded once, from the float32 sum.
    name = "layers/0/attn/o/kernel"
    wide = merge(base.config, base.params, read_delta(home / "delta"))[name]
    np.testing.assert_array_equal(merged[name], wide if dtype is None else wide.astype(dtype))


def test_values_beyond_the_dtype_are_refused(copy):
    change_tensors(copy / "delta", lambda t: t.update({"norm/scale": np.full_like(t["norm/scale"], 1e6)}))
    with pytest.raises(CheckpointError, match="norm/scale has values beyond the range of float16"):
        load(copy / "delta", dtype=np.float16)


def test_overrides(home):
    """Dense attention keeps what was trained into the matrices; other sparse settings must need the same parameters."""
    whole = load(home / "delta")
    dense = load(home / "delta", nsa=None)
    assert dense.config == whole.config.dense()
    assert dense.params.keys() == param_shapes(dense.config).keys()
    for name, value in dense.params.items():
        np.testing.assert_array_equal(value, whole.params[name])
    assert any("dense attention" in note for note in dense.notes)
    wider = load(home / "delta", nsa=dataclasses.replace(NSA, n_selected=8), rope_theta=9000.0)
    assert wider.config.nsa == dataclasses.replace(NSA, n_selected=8) and wider.config.rope.theta == 9000.0
    assert len(wider.notes) == 2
    with pytest.raises(CheckpointError, match="need other parameters than this delta has.*compress_k/pe"):
        load(home / "delta", nsa=dataclasses.replace(NSA, cmp_pe="none"))


def test_a_delta_of_a_dense_model_can_run_sparse(home, tmp_path):
    """Low-rank changes alone, without sparse attention."""
    base = read_model_config(home / "hf")
    write_delta(tmp_path / "delta", str(home / "hf"), base, config=base)
    assert load(tmp_path / "delta").config == base
    sparse = load(tmp_path / "delta", nsa=NSA_PRESETS["paper"])
    assert sparse.params.keys() == param_shapes(sparse.config).keys()


def test_tensors_that_do_not_fit_are_listed_together(copy):
    def spoil(t):
        t["layers/7/attn/gate/kernel"] = t.pop("layers/1/attn/gate/kernel")
        t["norm/scale.lora_a"] = t["norm/scale"]
        del t["layers/0/attn/o/kernel.lora_b"]
        t["layers/1/mlp/down/kernel.lora_b"] = t["layers/1/mlp/down/kernel.lora_b"][:-1]
        t["layers/0/attn/gate/bias"] = t["layers/0/attn/gate/bias"][..., :2]

    change_tensors(copy / "delta", spoil)
    with pytest.raises(CheckpointError) as caught:
        load(copy / "delta")
    text = str(caught.value)
    assert "2 missing: layers/1/attn/gate/kernel, layers/0/attn/o/kernel.lora_b" in text
    assert "2 unknown: layers/7/attn/gate/kernel, norm/scale.lora_a" in text
    assert "2 of a wrong shape: " in text
    assert "layers/0/attn/gate/bias (expected [2, 3, 3], found [2, 3, 2])" in text
    assert "layers/1/mlp/down/kernel.lora_b (expected [3, 64], found [2, 64])" in text
    assert "\n" not in text


def test_replaced_and_adapted_at_once_is_refused(copy):
    whole = load(copy / "hf").params["layers/0/mlp/down/kernel"]
    change_tensors(copy / "delta", lambda t: t.update({"layers/0/mlp/down/kernel": whole}))
    with pytest.raises(CheckpointError, match="1 both replaced and adapted: layers/0/mlp/down/kernel"):
        load(copy / "delta")


def test_another_base_is_refused(copy):
    weights = hf_weights()
    weights["model.norm.weight"] += 1
    write_hf(copy / "hf", hf_config(), weights)
    with pytest.raises(CheckpointError, match="sha256 .* use the same base"):
        load(copy / "delta")
    change_config(copy / "delta", base={"model": "../hf", "sha256": None})
    load(copy / "delta")
    write_hf(copy / "hf", hf_config(num_hidden_layers=1), {n: x for n, x in weights.items() if "layers.1" not in n})
    with pytest.raises(CheckpointError, match="does not fit its base.*unknown: layers/1/attn/compress_k/pe"):
        load(copy / "delta")


def test_digest_of_weights(home, tmp_path):
    data = (home / "hf" / "model.safetensors").read_bytes()
    assert weights_sha256(home / "hf") == hashlib.sha256(data).hexdigest()
    (tmp_path / "m.gguf").write_bytes(b"some weights")
    assert weights_sha256(tmp_path / "m.gguf") == hashlib.sha256(b"some weights").hexdigest()
    sharded = write_sharded(tmp_path / "sharded", hf_config(), hf_weights())
    parts = b"".join(file.read_bytes() for file in sorted(sharded.glob("*.safetensors")))
    assert weights_sha256(sharded) == hashlib.sha256(parts).hexdigest()
    (tmp_path / "empty").mkdir()
    assert weights_sha256(tmp_path / "empty") is None


def test_a_missing_base_says_what_to_do(copy):
    change_config(copy / "delta", base={"model": "somewhere", "sha256": None})
    for call in (load, read_model_config):
        with pytest.raises(CheckpointError, match="base 'somewhere' .* neither a known model nor a path.*base.model"):
            call(copy / "delta")
    change_config(copy / "delta", base={"model": ".", "sha256": None})
    with pytest.raises(CheckpointError, match="is a delta too"):
        read_model_config(copy / "delta")


def test_damaged_files(copy):
    file = copy / "delta" / "delta.safetensors"
    data = file.read_bytes()
    for size in (len(data) - 1, 100, 5, 0):
        file.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match="delta.safetensors: not a complete safetensors file"):
            load(copy / "delta")
    file.unlink()
    with pytest.raises(CheckpointError, match="no delta.safetensors in this directory"):
        load(copy / "delta")


def test_values_that_are_not_finite_are_refused(copy):
    change_tensors(copy / "delta", lambda t: t.update({"norm/scale": np.full_like(t["norm/scale"], np.nan)}))
    with pytest.raises(CheckpointError, match="1 not finite: norm/scale"):
        load(copy / "delta")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"version": 2}, "version 2 is unsupported"),
        ({"format": "lora"}, "format 'lora'"),
        ({"base": None}, "field base must be"),
        ({"base": {"model": 3}}, "field base must be"),
        ({"base": {"model": "x", "sha256": 3}}, "field base must be"),
        ({"base": {"model": "x", "revision": "y"}}, "unknown field.* base.revision"),
        ({"extra": 1}, "unknown field.* extra"),
        ({"config": {"hidden_size": 8}}, "unknown field.* config.hidden_size"),
        ({"config": {"nsa": {"kernel_size": 7}}}, "must divide"),
        ({"config": {"nsa": {"kernels": 7}}}, "unknown nsa field"),
        ({"config": {"rope_theta": "big"}}, "config.rope_theta must be a number"),
        ({"config": {"rope_theta": 0.5}}, "rope theta must be greater"),
        ({"config": {"max_position": 0}}, "config.max_position must be a positive"),
        ({"lora": {"scale": "x"}}, "lora.scale must be a number"),
        ({"lora": {"scale": float("inf")}}, "lora.scale must be finite"),
        ({"lora": {"alpha": 1}}, "unknown field.* lora.alpha"),
        ({"trained_refresh_intervals": [0]}, "trained_refresh_intervals must be a list"),
        ({"training": 5}, "training must be an object"),
    ],
)
def test_bad_configurations(copy, fields, message):
    change_config(copy / "delta", **fields)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_model_config(copy / "delta")
    assert str(copy / "delta" / "config.json") in str(caught.value)


def test_saving_refuses_what_could_not_be_loaded(home, tmp_path):
    base = read_model_config(home / "hf")
    good = {
        "base": DeltaBase(model="../hf"),
        "base_config": base,
        "config": trained_from(base),
        "arrays": random_arrays(base, trained_from(base)),
    }

    def refused(message, **changes):
        with pytest.raises(CheckpointError, match=message):
            save_delta(tmp_path / "new", **(good | changes))
        assert not (tmp_path / "new").exists()

    refused("differs from its base in more", config=dataclasses.replace(trained_from(base), rms_eps=0.1))
    less = {name: value for name, value in good["arrays"].items() if name != "layers/0/attn/gate/bias"}
    refused("1 missing: layers/0/attn/gate/bias", arrays=less)
    refused("1 not finite as bfloat16: norm/scale", arrays=good["arrays"] | {"norm/scale": np.full(64, np.inf)})
    save_delta(tmp_path / "new", **good)
    with pytest.raises(CheckpointError, match="not empty"):
        save_delta(tmp_path / "new", **good)
    save_delta(tmp_path / "new", **good, overwrite=True)
    assert read_delta_info(tmp_path / "new").config(base) == trained_from(base)


def test_a_delta_over_a_sparse_base(home, tmp_path):
    """Parameters of the base whose shape the trained model changes come from the delta."""
    sparse = load(home / "delta")
    save_orbax(tmp_path / "sparse", sparse.config, sparse.params)
    nsa = NSAConfig(**(dataclasses.asdict(NSA) | {"cmp_pe": "k", "kernel_size": 4}))
    config = dataclasses.replace(sparse.config, nsa=nsa, rope=RopeConfig(theta=7e4))
    arrays = random_arrays(sparse.config, config)
    with pytest.raises(CheckpointError, match="4 missing|6 missing"):
        write_delta(tmp_path / "delta", "../sparse", sparse.config, config=config, arrays=arrays)
    shapes, before = param_shapes(config), param_shapes(sparse.config)
    arrays |= {n: np.ones(s, np.float32) for n, s in shapes.items() if before.get(n) != s}
    write_delta(tmp_path / "delta", "../sparse", sparse.config, config=config, arrays=arrays)
    loaded = load(tmp_path / "delta")
    assert {n: x.shape for n, x in loaded.params.items()} == shapes
    assert (loaded.params["layers/0/attn/compress_k/pe"] == 1).all()


def test_matrices():
    assert matrix_shape("layers/0/attn/o/kernel", (2, 3, 4, 5)) == (24, 5)
    assert matrix_shape("layers/0/attn/qkv/kernel", (5, 2, 5, 4)) == (5, 40)
    assert matrix_shape("lm_head/kernel", (5, 9)) == (5, 9)
    for name, shape in (("norm/scale", (5,)), ("layers/0/attn/compress_k/weight", (2, 8)), ("x/kernel", (3,))):
        with pytest.raises(ValueError, match="no matrix"):
            matrix_shape(name, shape)
