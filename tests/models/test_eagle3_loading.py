"""Checkpoints of EAGLE-3 heads: both formats, every name, every map, and everything that is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from ssv_jax.models.config import Llama3Scaling, RopeConfig
from ssv_jax.models.eagle3_config import (
    Eagle3Config,
    check_against_target,
    eagle3_config_to_json,
    parse_eagle3_config,
    resolve_taps,
)
from ssv_jax.models.eagle3_loading import export_eagle3, load_eagle3
from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.torch_zip import TorchZipReader
from tests.models.eagle3_numpy import HEADS, PLAIN, TARGET, random_head, read_tensors


def write(directory: Path, tensors: dict[str, np.ndarray], fields: dict) -> Path:
    """A checkpoint directory with these tensors and fields."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.fixture
def saved(tmp_path):
    """Tensors and fields of the plain head."""
    export_eagle3(tmp_path / "plain", PLAIN, random_head(PLAIN))
    return read_tensors(tmp_path / "plain"), json.loads((tmp_path / "plain" / "config.json").read_text())


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and np.array_equal(a[n], b[n]) for n in a)


# --- round trips


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_an_exported_head_loads_bit_for_bit(tmp_path, name, dtype):
    config = dataclasses.replace(
        HEADS[name],
        rope=RopeConfig(
            theta=5e5,
            scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64),
        ),
    )
    params = {n: x if x.dtype == np.int32 else x.astype(dtype) for n, x in random_head(config).items()}
    export_eagle3(tmp_path / "head", config, params)
    loaded = load_eagle3(tmp_path / "head", TARGET, dtype=None)
    assert loaded.config == config and same(loaded.params, params)
    as_float = load_eagle3(tmp_path / "head", TARGET)
    assert {x.dtype for x in as_float.params.values()} <= {np.dtype(np.float32), np.dtype(np.int32)}
    with pytest.raises(CheckpointError, match="not empty"):
        export_eagle3(tmp_path / "head", config, params)
    export_eagle3(tmp_path / "head", config, params, overwrite=True)


def test_a_recommended_window_is_kept(tmp_path, saved):
    config = dataclasses.replace(PLAIN, draft_window=7)
    export_eagle3(tmp_path / "head", config, random_head(config))
    assert load_eagle3(tmp_path / "head", TARGET).config == config
    fields = json.loads((tmp_path / "head" / "config.json").read_text())
    assert fields["eagle_config"]["draft_window"] == 7
    tensors, fields = saved
    assert "draft_window" not in fields["eagle_config"]
    for bad in (0, 2.5, "all", True):
        fields["eagle_config"]["draft_window"] = bad
        with pytest.raises(CheckpointError, match="draft_window must be an integer"):
            load_eagle3(write(tmp_path / "bad", tensors, fields), TARGET)


def test_names_are_those_in_circulation(saved):
    tensors, fields = saved
    layer = "input_layernorm hidden_norm post_attention_layernorm"
    layer += "".join(f" self_attn.{p}_proj" for p in "qkvo") + " mlp.gate_proj mlp.up_proj mlp.down_proj"
    expected = {f"midlayer.{name}.weight" for name in layer.split()}
    assert set(tensors) == expected | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    assert tensors["fc.weight"].shape == (12, 36) and tensors["midlayer.self_attn.q_proj.weight"].shape == (24, 24)
    assert fields["draft_vocab_size"] == 17


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("layer", ["midlayer.", "layers.0."])
def test_aliases_load_the_same(tmp_path, saved, prefix, layer):
    tensors, fields = saved
    renamed = {
        (name if name in ("d2t", "t2d", "lm_head.weight") else prefix + name).replace("midlayer.", layer): x
        for name, x in tensors.items()
    }
    loaded = load_eagle3(write(tmp_path / "alias", renamed, fields), TARGET, dtype=None)
    assert same(loaded.params, random_head(PLAIN))


def test_the_official_fields_suffice(tmp_path):
    # As in the released heads: no head_dim, theta or tap ids, a short position limit, a null draft vocabulary.
    wide = dataclasses.replace(PLAIN, num_heads=2, num_kv_heads=1, draft_vocab_size=31, rope=RopeConfig())
    export_eagle3(tmp_path / "wide", wide, random_head(wide))
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 12,
        "initializer_range": 0.02,
        "intermediate_size": 20,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
        "pad_token_id": 0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "transformers_version": "4.28.1",
        "use_cache": True,
        "vocab_size": 31,
        "draft_vocab_size": None,
    }
    loaded = load_eagle3(write(tmp_path / "official", read_tensors(tmp_path / "wide"), fields), TARGET)
    assert loaded.config == wide and loaded.config.rope.theta == 1e4 and not loaded.config.reduced_vocab


def test_a_head_without_output_matrix_takes_the_targets_rows(tmp_path):
    config = dataclasses.replace(PLAIN, own_head=False)
    params = random_head(config)
    table = np.arange(31 * 12, dtype=np.float32).reshape(31, 12)
    params["lm_head/kernel"] = table[params["target_ids"]].T.copy()
    export_eagle3(tmp_path / "head", config, params)
    assert "lm_head.weight" not in read_tensors(tmp_path / "head")
    with pytest.raises(CheckpointError, match="pass the target's parameters"):
        load_eagle3(tmp_path / "head", TARGET)
    tied = dataclasses.replace(TARGET, tie_embeddings=True)
    for target, named in ((tied, {"embed/embedding": table}), (TARGET, {"lm_head/kernel": table.T})):
        loaded = load_eagle3(tmp_path / "head", target, target_params=named)
        assert loaded.config == config and same(loaded.params, params)


# --- fault 10: tap ids


@pytest.mark.parametrize(
    ("ids", "layers", "convention", "taps"),
    [
        (None, 32, None, (2, 16, 29)),
        ([2, 16, 29], 32, None, (2, 16, 29)),
        ([1, 15, 28], 32, None, (2, 16, 29)),
        ([1, 46, 90], 94, None, (2, 47, 91)),
        ([1, 15, 28], 32, "residual", (1, 15, 28)),
        ([2, 16, 29], 32, "layer-output", (3, 17, 30)),
        ([0, 1, 2], 3, "layer-output", (1, 2, 3)),
        ([0, 1, 3], 3, "residual", (0, 1, 3)),
    ],
)
def test_fault_10_both_tap_conventions(ids, layers, convention, taps):
    assert resolve_taps(ids, layers, convention) == taps


@pytest.mark.parametrize(
    ("ids", "layers", "convention", "words"),
    [
        ([1, 16, 29], 32, None, "neither convention"),
        ([3, 5, 7], 32, None, "tap_convention 'residual'"),
        (None, 6, None, "need 7 layers"),
        ([2, 2, 29], 32, "residual", "3 different"),
        ([2, 29, 16], 32, "residual", "low to high"),
        ([2, 16], 32, "residual", "must be 3"),
        ([2, 16, 33], 32, "residual", "beyond the target's 32 layers"),
        ([2, 16, 32], 32, "layer-output", "beyond"),
        ([-1, 16, 32], 32, "layer-output", "must be 3"),
    ],
)
def test_fault_10_ambiguous_taps_are_refused(ids, layers, convention, words):
    with pytest.raises(ValueError, match=words):
        resolve_taps(ids, layers, convention)


def test_the_convention_can_be_given_or_stored(tmp_path, saved):
    tensors, fields = saved
    odd = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    where = write(tmp_path / "odd", tensors, fields | {"eagle_config": odd})
    with pytest.raises(CheckpointError, match=r"config\.json: .*neither convention"):
        load_eagle3(where, TARGET)
    assert load_eagle3(where, TARGET, tap_convention="residual").config.taps == (1, 3, 5)
    write(where, tensors, fields | {"eagle_config": odd | {"tap_convention": "layer-output"}})
    assert load_eagle3(where, TARGET).config.taps == (2, 4, 6)
    write(where, tensors, fields | {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]})
    with pytest.raises(CheckpointError, match="given twice"):
        load_eagle3(where, TARGET)


# --- faults 11 and 12: tensors and maps


def test_fault_11_every_tensor_is_consumed_or_named(tmp_path, saved):
    tensors, fields = saved
    changed = dict(tensors)
    changed["fc.bias"] = changed.pop("norm.weight")
    changed["midlayer.mlp.up_proj.weight"] = np.zeros((20, 13), np.float32)
    changed["fc_norm.0.weight"] = np.ones(12, np.float32)
    with pytest.raises(CheckpointError) as caught:
        load_eagle3(write(tmp_path / "bad", changed, fields), TARGET)
    message = str(caught.value)
    assert "1 missing: norm.weight" in message and "2 unknown: fc.bias, fc_norm.0.weight" in message
    assert "layers.0.mlp.up_proj.weight (expected [20, 12], found [20, 13])" in message


def test_fault_11_a_norm_flag_without_its_tensors_is_refused(tmp_path, saved):
    tensors, fields = saved
    for flag, missing in (("fc_norm", "fc_norm.0.weight"), ("norm_before_fc", "input_norm.weight")):
        with pytest.raises(CheckpointError, match=missing):
            load_eagle3(write(tmp_path / "bad", tensors, fields | {flag: True}), TARGET)


def test_one_parameter_under_two_names_is_refused(tmp_path, saved):
    tensors, fields = saved
    doubled = tensors | {"model.layers.0.hidden_norm.weight": tensors["midlayer.hidden_norm.weight"]}
    with pytest.raises(CheckpointError, match="are the same parameter"):
        load_eagle3(write(tmp_path / "bad", doubled, fields), TARGET)


def _shift(tensors, index, by):
    d2t = tensors["d2t"].copy()
    d2t[index] += by
    return tensors | {"d2t": d2t}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: {n: x for n, x in t.items() if n != "d2t"}, "tensor d2t is missing"),
        (lambda t: {n: x for n, x in t.items() if n != "t2d"}, "tensor t2d is missing"),
        (lambda t: _shift(t, 0, 31), "outside 0 to 30"),
        (lambda t: t | {"d2t": np.zeros(17, np.int64)}, "which are not the 17 that d2t names"),
        (lambda t: t | {"d2t": -np.arange(17)}, "only 1 different target ids"),
        (lambda t: t | {"d2t": t["d2t"].astype(np.float32)}, "expected integers"),
        (lambda t: t | {"d2t": t["d2t"][:-1]}, r"d2t has shape \[16\], expected \[17\]"),
        (lambda t: t | {"t2d": t["t2d"][:-1]}, r"t2d has shape \[30\]"),
        (lambda t: t | {"t2d": ~t["t2d"]}, "t2d marks 14 target ids"),
        (lambda t: t | {"t2d": np.ones(31, np.bool_)}, "t2d marks 31"),
        (lambda t: t | {"t2d": t["t2d"].astype(np.int64)}, "expected booleans"),
    ],
)
def test_fault_12_maps_must_agree(tmp_path, saved, change, words):
    tensors, fields = saved
    with pytest.raises(CheckpointError, match=words):
        load_eagle3(write(tmp_path / "bad", change(tensors), fields), TARGET)


def test_maps_of_a_whole_vocabulary_may_be_present_if_they_change_nothing(tmp_path):
    config = dataclasses.replace(PLAIN, draft_vocab_size=31)
    export_eagle3(tmp_path / "whole", config, random_head(config))
    tensors = read_tensors(tmp_path / "whole")
    fields = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert "d2t" not in tensors
    maps = {"d2t": np.zeros(31, np.int64), "t2d": np.ones(31, np.bool_)}
    assert load_eagle3(write(tmp_path / "maps", tensors | maps, fields), TARGET).config == config
    maps["d2t"][:2] = 1, -1
    with pytest.raises(CheckpointError, match="moves ids"):
        load_eagle3(write(tmp_path / "maps", tensors | maps, fields), TARGET)


def test_values_that_are_not_finite_are_refused(tmp_path, saved):
    tensors, fields = saved
    for value, dtype in ((np.nan, np.float32), (1e30, np.float16)):
        changed = tensors | {"norm.weight": np.full(12, value, np.float32)}
        with pytest.raises(CheckpointError, match=r"norm\.weight: not finite"):
            load_eagle3(write(tmp_path / "bad", changed, fields), TARGET, dtype=dtype)


# --- configs


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_sclaing": None}, r"unknown field\(s\) rope_sclaing"),
        ({"eagle_config": {"layers": 3}}, r"eagle_config\.layers"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"parallel_drafting": True}, "parallel_drafting"),
        ({"sliding_window": 2048}, "sliding_window=2048"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ({"fc_norm": 1}, "must be true or false"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_attention_heads": 3}, "multiple of num_kv_heads"),
        ({"draft_vocab_size": 40}, "exceeds vocab_size"),
        ({"vocab_size": 32}, "another target: its vocab_size is 32, the target's is 31"),
        ({"hidden_size": 16, "target_hidden_size": None}, "target_hidden_size is 16, the target's is 12"),
        ({"hidden_size": 16}, "cannot share the target's embeddings"),
    ],
)
def test_unknown_or_unfit_configs_are_refused(tmp_path, saved, change, words):
    tensors, fields = saved
    shapes = {name.replace("midlayer.", "layers.0."): x.shape for name, x in tensors.items()}
    with pytest.raises(CheckpointError, match=words) as caught:
        parse_eagle3_config(tmp_path / "config.json", fields | change, shapes, TARGET)
    assert str(caught.value).startswith(str(tmp_path / "config.json")) and "\n" not in str(caught.value)


def test_the_target_is_checked_before_weights_are_read(tmp_path, saved, monkeypatch):
    tensors, fields = saved
    where = write(tmp_path / "head", tensors, fields | {"vocab_size": 32})
    monkeypatch.setattr("ssv_jax.models.eagle3_loading._AnyDtypeReader.read", lambda *_: pytest.fail("read"))
    with pytest.raises(CheckpointError, match="another target"):
        load_eagle3(where, TARGET)
    check_against_target(PLAIN, TARGET)
    with pytest.raises(CheckpointError, match="after 4 layers, but the target has 3"):
        check_against_target(PLAIN, dataclasses.replace(TARGET, num_layers=3))


@pytest.mark.parametrize("name", HEADS)
def test_config_json_reads_back_equal(name):
    config = dataclasses.replace(HEADS[name], taps=(0, 3, 7))
    shapes = {"lm_head.weight": (1, 1)} | ({"embed_tokens.weight": (1, 1)} if config.own_embedding else {})
    fields = json.loads(json.dumps(eagle3_config_to_json(config, "float32")))
    assert parse_eagle3_config(Path("config.json"), fields, shapes, TARGET) == config


def test_configs_are_validated_and_static():
    assert hash(PLAIN) == hash(dataclasses.replace(PLAIN))
    for change, words in (
        ({"num_layers": 0}, "num_layers must be a positive integer"),
        ({"head_dim": 5}, "must be even"),
        ({"taps": (1, 2)}, "must be 3"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(PLAIN, **change)
    with pytest.raises(TypeError):
        Eagle3Config()  # pyright: ignore[reportCallIssue]


# --- PyTorch's format


class _FakeStorage:
    def __init__(self, kind: type, key: str, data: np.ndarray) -> None:
        self.kind, self.key, self.data = kind, key, data


class _FakeTensor:
    """Pickles as a tensor of PyTorch does; torch itself is not installed."""

    def __init__(self, storage: _FakeStorage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        self.arguments = storage, offset, shape, strides, False, OrderedDict()

    def __reduce__(self):
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        if isinstance(obj, _FakeStorage):
            return "storage", obj.kind, obj.key, "cpu", obj.data.size
        return None


@pytest.fixture
def torch_stub(monkeypatch):
    """Modules that only lend their names to the pickle."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in ("FloatStorage", "BFloat16Storage", "LongStorage", "BoolStorage", "DoubleStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch", "__qualname__": name}))

    def _rebuild_tensor_v2(*_):
        raise AssertionError

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return torch


def tensor(torch, key: str, x: np.ndarray, transposed: bool = False) -> _FakeTensor:
    name = {"f": "FloatStorage", "i": "LongStorage", "b": "BoolStorage"}.get(x.dtype.kind, "BFloat16Storage")
    data = np.ascontiguousarray(x.T if transposed else x)
    strides = tuple(s // x.itemsize for s in (data.T if transposed else data).strides)
    return _FakeTensor(_FakeStorage(getattr(torch, name), key, data), 0, x.shape, strides)


def save_torch(path: Path, state, storages: dict[str, np.ndarray], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file, file.open("archive/data.pkl", "w") as stream:
        _Pickler(stream, protocol=2).dump(state)
    with zipfile.ZipFile(path, "a", compression) as file:
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
        for key, data in storages.items():
            file.writestr(f"archive/data/{key}", data.tobytes())
    return path


def test_the_official_binary_loads_the_same_bits(tmp_path, saved, torch_stub):
    tensors, fields = saved
    where = tmp_path / "official"
    where.mkdir()
    (where / "config.json").write_text(json.dumps(fields))
    rounded = {n: x.astype(ml_dtypes.bfloat16) if n == "fc.weight" else x for n, x in tensors.items()}
    state = OrderedDict(
        (name, tensor(torch_stub, str(i), x, transposed=name == "lm_head.weight"))
        for i, (name, x) in enumerate(rounded.items())
    )
    state._metadata = OrderedDict()
    save_torch(where / "pytorch_model.bin", state, {t.arguments[0].key: t.arguments[0].data for t in state.values()})
    loaded = load_eagle3(where, TARGET, dtype=None)
    expected = random_head(PLAIN)
    expected["fc/kernel"] = expected["fc/kernel"].astype(ml_dtypes.bfloat16)
    assert same(loaded.params, expected)


def test_a_pickle_that_wants_more_is_refused(tmp_path, torch_stub):
    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    path = tmp_path / "model.bin"
    ones = np.ones(4, np.float32)
    float_storage = _FakeStorage(torch_stub.FloatStorage, "0", ones)
    cases = [
        ({"x": Evil()}, "asks for"),
        ({"x": _FakeTensor(_FakeStorage(torch_stub.DoubleStorage, "0", ones), 0, (4,), (1,))}, "torch.DoubleStorage"),
        ({"x": _FakeTensor(float_storage, 0, (5,), (1,))}, "beyond its storage"),
        ({"x": _FakeTensor(float_storage, 2, (2,), (2,))}, "beyond its storage"),
        ({"x": _FakeTensor(float_storage, -1, (2,), (1,))}, "bad shape"),
        ({"x": _FakeTensor(float_storage, 0, (1 << 40,), (0,))}, "beyond its storage"),
        ({"x": 3}, "not a plain state dict"),
        ([1, 2], "not a plain state dict"),
    ]
    for state, words in cases:
        save_torch(path, state, {"0": ones})
        with pytest.raises(CheckpointError, match=words) as caught:
            TorchZipReader(path)
        assert "safetensors" in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_damaged_and_old_files_say_what_to_do(tmp_path, torch_stub):
    path = tmp_path / "model.bin"
    path.write_bytes(pickle.dumps({"x": 1}))
    with pytest.raises(CheckpointError, match=r"no complete file of PyTorch's zip format .*convert it"):
        TorchZipReader(path)
    ones = np.ones(4, np.float32)
    state = {"x": tensor(torch_stub, "0", ones)}
    for storages, compression in (({}, 0), ({"0": ones[:3]}, 0), ({"0": ones}, zipfile.ZIP_DEFLATED)):
        save_torch(path, state, storages, compression)
        with pytest.raises(CheckpointError, match="the data of tensor x"):
            TorchZipReader(path).read("x")
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", b"\x80\x02garbage")
    with pytest.raises(CheckpointError, match="its pickle cannot be read"):
        TorchZipReader(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/other", b"")
    with pytest.raises(CheckpointError, match="holds no state dict"):
        TorchZipReader(path)


def test_a_directory_without_weights_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_eagle3(tmp_path, TARGET)
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        (tmp_path / "config.json").unlink()
        load_eagle3(tmp_path, TARGET)
