"""Configurations: presets, JSON, and refusals that say what to do."""

from __future__ import annotations

import dataclasses
import inspect
import json

import pytest

from ssv_jax.models.config import (
    NSA_PRESETS,
    Llama3Scaling,
    LlamaConfig,
    NSAConfig,
    RopeConfig,
    nsa_from_json,
    nsa_from_mapping,
)
from tests.golden import numpy_nsa as oracle
from tests.models.model_cases import config


def test_presets_are_the_published_settings():
    """Windows: k_{t-w:t} of XunhaoLai and FSA counts w + 1 keys, ours counts the query's own among them."""
    paper, xunhao, fsa, fla = (NSA_PRESETS[name] for name in ("paper", "xunhao", "fsa", "fla"))
    for preset in (paper, xunhao, fsa):
        assert (preset.kernel_size, preset.kernel_stride, preset.block_size, preset.n_selected) == (32, 16, 64, 16)
        assert (preset.init_blocks, preset.local_blocks, preset.cmp_rope) == (1, 2, "post")
    assert (paper.cmp_fn, paper.cmp_pe, paper.window_keys, paper.gate_scope) == ("mean", "none", 512, "head")
    assert (xunhao.cmp_fn, xunhao.cmp_pe, xunhao.window_keys, xunhao.gate_scope) == ("linear", "k", 513, "head")
    assert (fsa.cmp_fn, fsa.cmp_pe, fsa.window_keys, fsa.gate_scope) == ("linear", "k", 513, "token")
    assert fla.kernel_size == fla.kernel_stride == fla.block_size
    assert (fla.cmp_fn, fla.cmp_rope, fla.init_blocks, fla.local_blocks) == ("mean", "pre", 0, 1)
    assert fla.round_n_pow2


def test_fields_and_defaults_are_the_oracles():
    """A default that silently differs from the definition."""
    assert dataclasses.asdict(NSAConfig()) == oracle.NSA_DEFAULTS


@pytest.mark.parametrize("n", range(3, 34))
def test_rounding_to_a_power_of_two(n):
    rounded = NSAConfig(n_selected=n, round_n_pow2=True)
    assert rounded.n_blocks == oracle.num_selected({"n_selected": n, "round_n_pow2": True})
    assert NSAConfig(n_selected=n).n_blocks == n


def test_rounding_counts_for_the_forced_blocks():
    assert NSAConfig(n_selected=3, round_n_pow2=True, init_blocks=2).n_blocks == 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cmp_fn": "max"}, "nsa cmp_fn must be one of mean, weighted, linear, mlp, pooled, got 'max'"),
        ({"cmp_pe": "v"}, "nsa cmp_pe must be one of none, k, kv, got 'v'"),
        ({"cmp_rope": "none"}, "nsa cmp_rope must be one of post, pre, got 'none'"),
        ({"gate_scope": "layer"}, "nsa gate_scope must be one of head, token, got 'layer'"),
        ({"cmp_visible": "lt"}, "nsa cmp_visible='lt' is not supported: only 'le' is implemented"),
        ({"score": "logit"}, "nsa score='logit' is not supported: only 'mass' is implemented"),
        ({"group_reduce": "mean"}, "nsa group_reduce='mean' is not supported: only 'sum' is implemented"),
        ({"branch_kv": "separate"}, "nsa branch_kv='separate' is not supported: only 'shared' is implemented"),
        ({"rope_layout": "interleaved"}, "nsa rope_layout='interleaved' is not supported: only 'half' is implemented"),
        ({"gate_bias": 1}, "nsa gate_bias must be true or false, got 1"),
        ({"round_n_pow2": "yes"}, "nsa round_n_pow2 must be true or false, got 'yes'"),
        ({"kernel_size": 0}, "nsa kernel_size must be an integer >= 1, got 0"),
        ({"window_keys": 0}, "nsa window_keys must be an integer >= 1, got 0"),
        ({"n_selected": 2.0}, "nsa n_selected must be an integer >= 1, got 2.0"),
        ({"block_size": True}, "nsa block_size must be an integer >= 1, got True"),
        ({"init_blocks": -1}, "nsa init_blocks must be an integer >= 0, got -1"),
        ({"kernel_stride": 12}, "nsa kernel_stride=12 must divide kernel_size=32 and block_size=64"),
        ({"block_size": 72}, "nsa kernel_stride=16 must divide kernel_size=32 and block_size=72"),
        ({"kernel_size": 128}, "nsa kernel_size=128 must not exceed block_size=64"),
        ({"local_blocks": 0}, "nsa local_blocks must be >= 1: a query always reads its own block"),
        ({"n_selected": 2}, "nsa n_selected=2 must hold the forced blocks: init_blocks + local_blocks = 3"),
    ],
)
def test_bad_nsa_values_are_refused(fields, message):
    """A setting of another codebase accepted and then ignored."""
    # Without the type checks of the test set-up, which users do not have.
    with pytest.raises(ValueError) as caught:
        inspect.unwrap(NSAConfig.__init__)(object.__new__(NSAConfig), **fields)
    assert str(caught.value) == message


def test_bad_values_in_json_are_refused():
    with pytest.raises(ValueError, match="nsa kernel_size=128 must not exceed block_size=64"):
        nsa_from_json('{"kernel_size": 128}')


def test_json_is_a_preset_or_an_object_over_one():
    assert nsa_from_json("paper") == NSAConfig()
    assert nsa_from_json("{}") == NSAConfig()
    assert nsa_from_json('{"window_keys": 8}') == NSAConfig(window_keys=8)
    want = dataclasses.replace(NSA_PRESETS["fla"], n_selected=8)
    assert nsa_from_json('{"preset": "fla", "n_selected": 8}') == want
    assert nsa_from_mapping({"n_selected": 8}, NSA_PRESETS["fla"]) == want
    assert nsa_from_json(json.dumps(dataclasses.asdict(want))) == want


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("papr", r"nsa config 'papr' is neither a preset \(fla, fsa, paper, xunhao\) nor JSON: .* at column 1"),
        ('{"block_size": 64', "neither a preset .* nor JSON"),
        ("[1]", r"must be a JSON object or a preset \(fla, .*\), got list"),
        ('{"preset": "gpt"}', "unknown nsa preset 'gpt'; known: fla, fsa, paper, xunhao"),
        ('{"blok_size": 64, "a": 1}', r"unknown nsa field\(s\) a, blok_size; known: cmp_fn, .*rope_layout"),
    ],
)
def test_bad_json_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        nsa_from_json(text)


def test_trained_parts_name_what_a_dense_checkpoint_lacks():
    assert NSAConfig().trained_parts == ()
    assert NSA_PRESETS["xunhao"].trained_parts == (
        "the linear compressor",
        "the position embedding of the compressor",
    )
    assert NSAConfig(cmp_pe="kv").trained_parts == ("the position embedding of the compressor",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "num_heads=3 must be a multiple of num_kv_heads=2"),
        ({"head_dim": 7}, "head_dim=7 must be even: rotary embedding rotates pairs"),
        ({"vocab_size": 0}, "vocab_size must be a positive integer, got 0"),
        ({"num_layers": -1}, "num_layers must be a positive integer, got -1"),
        ({"max_position": True}, "max_position must be a positive integer, got True"),
    ],
)
def test_bad_llama_values_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(None, **changes)


def test_bad_rope_values_are_refused():
    with pytest.raises(ValueError, match="rope theta must be greater than 1, got 1.0"):
        RopeConfig(theta=1.0)
    good = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 8192}
    for changes, message in (
        ({"factor": 0.5}, "factor must be >= 1 .* got 0.5 and 8192"),
        ({"original_max_position": 0}, "original_max_position > 0, got 8.0 and 0"),
        ({"low_freq_factor": 4.0}, "need 0 < low_freq_factor < high_freq_factor, got 4.0 and 4.0"),
        ({"low_freq_factor": 0.0}, "got 0.0 and 4.0"),
    ):
        with pytest.raises(ValueError, match=message):
            Llama3Scaling(**(good | changes))
    assert Llama3Scaling(**good).factor == 8.0


def test_derived_values():
    model = config(NSAConfig(), num_heads=6)
    assert model.group == 3
    assert model.dense().nsa is None
    assert dataclasses.replace(model.dense(), nsa=model.nsa) == model


def test_configs_are_static_arguments():
    """Recompilation for every equal config, or a TypeError from jit."""
    assert hash(config(NSAConfig())) == hash(config(NSAConfig()))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config(None).num_heads = 2  # pyright: ignore[reportAttributeAccessIssue]
    assert {f.name for f in dataclasses.fields(LlamaConfig)} >= {"rope", "nsa"}
