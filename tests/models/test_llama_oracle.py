"""The whole model against the float64 oracle: every option, from scratch and as trees over a cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from ssv_jax.models import llama
from ssv_jax.models.cache import Cache, geometry_of
from ssv_jax.models.config import NSA_PRESETS, LlamaConfig
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import LlamaOutput
from tests.golden import numpy_nsa as oracle
from tests.models.model_cases import (
    LLAMA3,
    Model,
    accept,
    build,
    close,
    config,
    empty,
    nsa,
    random_tokens,
    rope,
    run_chain,
    run_tree,
)
from tests.pallas_kernels.cases import STYLES, decided, random_parents, settings

LENGTH, NODES, CAPACITY = 43, 7, 56
ALL_BIASES = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}


def preset(name: str, **changes: Any) -> Any:
    """A preset with its sizes divided by 8 (and its block count by 4)."""
    full = NSA_PRESETS[name]
    sizes = {field: getattr(full, field) // 8 for field in ("kernel_size", "kernel_stride", "block_size")}
    return dataclasses.replace(full, **{**sizes, "n_selected": full.n_selected // 4, "window_keys": 9, **changes})


# Each option at least once, in unlike company.
CONFIGS = {
    "mean, tied": config(nsa(), tie_embeddings=True),
    "weighted, pe k, pre, token gate with bias, G 3, qk norm": config(
        nsa(cmp_fn="weighted", cmp_pe="k", cmp_rope="pre", gate_scope="token", gate_bias=True),
        num_heads=6,
        qk_norm=True,
    ),
    "weighted, pe kv, head gate with bias, qkv bias": config(
        nsa(cmp_fn="weighted", cmp_pe="kv", gate_bias=True), qkv_bias=True
    ),
    "mean, pe k": config(nsa(cmp_pe="k")),
    "linear, pe kv, head gate with bias, MQA of 4, all biases, llama3": config(
        nsa(cmp_fn="linear", cmp_pe="kv", gate_bias=True, kernel_size=8, kernel_stride=4, n_selected=3),
        num_kv_heads=1,
        rope=rope(500.0, LLAMA3),
        **ALL_BIASES,
    ),
    "mlp, pe kv, pre, G 1, K 3, wide blocks": config(
        nsa(cmp_fn="mlp", cmp_pe="kv", cmp_rope="pre", kernel_size=8, kernel_stride=4, block_size=16, n_selected=3),
        num_heads=3,
        num_kv_heads=3,
        tie_embeddings=True,
        qkv_bias=True,
    ),
    "mlp, pe k, post, stride 1": config(
        nsa(cmp_fn="mlp", cmp_pe="k", kernel_size=3, kernel_stride=1, block_size=4, n_selected=5, window_keys=1),
        num_heads=2,
        head_dim=16,
    ),
    "pooled, pe kv, 3 pools": config(nsa(cmp_fn="pooled", cmp_pe="kv", cmp_pools=3, gate_bias=True), num_heads=6),
    "fla preset, 3 rounded to 4": config(preset("fla", n_selected=3), num_heads=3, num_kv_heads=1),
    "fsa preset": config(preset("fsa"), num_heads=6),
    "dense, all biases, llama3, tied": config(None, rope=rope(500.0, LLAMA3), tie_embeddings=True, **ALL_BIASES),
    "dense, qk norm, G 3, K 1": config(None, num_heads=3, num_kv_heads=1, qk_norm=True),
}


@functools.cache
def from_scratch(which: LlamaConfig) -> tuple[Model, np.ndarray, Cache, LlamaOutput]:
    """One pass over all tokens and an empty cache."""
    model = build(which)
    tokens = random_tokens(LENGTH)
    cache = empty(model, CAPACITY)
    taps = tuple(range(which.num_layers + 1))
    return model, tokens, cache, run_chain(model, tokens[None], cache, taps=taps)


def check_selections(model: Model, output: LlamaOutput, want: dict[str, Any], refresh: tuple[bool, ...]) -> None:
    """Equal blocks wherever the oracle's own scores decide by more than 1e-6."""
    assert model.config.nsa is not None
    fields = settings(geometry_of(model.config.nsa))
    clear = total = 0
    for layer, fresh in enumerate(refresh):
        selection = output.selections[layer]
        if not fresh:
            assert selection is None
            continue
        assert selection is not None
        blocks = np.asarray(selection.blocks)
        for t, k in np.ndindex(LENGTH, model.config.num_kv_heads):
            ids = want["selection"][layer][t][k]
            total += 1
            if decided(want["importance"][layer][t][k], ids, t, fields, gap=1e-6):
                clear += 1
                assert [b for b in blocks[0, k, t] if b >= 0] == ids, f"layer {layer}, position {t}, KV head {k}"
    assert clear > 0.99 * total


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_streams_and_selections_equal_the_oracle(name):
    """A wrong formula anywhere in the model: compressor, rotation, gate order, norm, bias, head grouping."""
    model, tokens, _, output = from_scratch(CONFIGS[name])
    want = oracle.forward(model.fields, model.params, tokens)
    assert output.logits.dtype == np.float32
    close(output.logits[0], want["logits"])
    # Streams are numbered by the layers before them: 0 is the embeddings, the last is not normed (fault 10).
    assert len(output.taps) == model.config.num_layers + 1
    for stream, expected in zip(output.taps, want["hidden"], strict=True):
        close(stream[0], expected)
    if model.config.nsa is not None:
        check_selections(model, output, want, (True,) * model.config.num_layers)
    else:
        assert output.selections == (None,) * model.config.num_layers


def lengths_for(which: LlamaConfig) -> list[int]:
    if which.nsa is None:
        return [1, 20]
    size, block = which.nsa.kernel_size, which.nsa.block_size
    # No entry yet; the tree completes the first one; the last row of a block; deep in.
    return sorted({1, size - 1, LENGTH // block * block - 1, LENGTH - 4})


@pytest.mark.parametrize("name", CONFIGS)
def test_every_node_of_a_tree_equals_a_forward_over_its_path(name):
    """Siblings seen, an entry of the path missed, wrong positions, the window by index instead of depth (C)."""
    model, tokens, cache, output = from_scratch(CONFIGS[name])
    rng = np.random.default_rng(3)
    for i, length in enumerate(lengths_for(model.config)):
        filled = accept(model, cache, output, np.arange(LENGTH)[None], [length])
        parents = random_parents(rng, NODES, STYLES[(i + 1) % 4])
        nodes = rng.integers(0, model.config.vocab_size, NODES)
        got = run_tree(model, nodes[None], parents[None], filled)
        want = oracle.tree_path_logits(model.fields, model.params, tokens[:length], nodes, parents.tolist())
        close(got.logits[0], want, message=f"length {length}, parents {parents}")


def test_a_long_path_completes_several_entries_and_leaves_the_window():
    """A tree deeper than a block and than the window (fault 17): middle blocks are of the tree, and not forced."""
    which = config(nsa(n_selected=3, init_blocks=0, local_blocks=1, window_keys=3))
    model, tokens, cache, output = from_scratch(which)
    rng = np.random.default_rng(8)
    for i, length in enumerate((2, 9, 23)):
        filled = accept(model, cache, output, np.arange(LENGTH)[None], [length])
        parents = random_parents(rng, 21, ("deep", "chain", "deep")[i])
        nodes = rng.integers(0, which.vocab_size, 21)
        got = run_tree(model, nodes[None], parents[None], filled, group=4)
        want = oracle.tree_path_logits(model.fields, model.params, tokens[:length], nodes, parents.tolist())
        close(got.logits[0], want, message=f"length {length}, parents {parents}")
        assert (np.asarray(got.trees[0].kv.completions.node) >= 0).sum() >= 8


def test_a_reuse_layer_inherits_from_the_nearest_refresh_layer():
    """A reuse layer that selects, or inherits across a refresh; the same plan in prefill and on trees (E)."""
    refresh = (True, False, True, False)
    which = config(nsa(n_selected=3, init_blocks=0, local_blocks=1), num_layers=4)
    model, plan = build(which), LayerPlan(refresh=refresh)
    tokens, cache = random_tokens(LENGTH), empty(build(which), CAPACITY)
    output = run_chain(model, tokens[None], cache, plan=plan)
    want = oracle.forward(model.fields, model.params, tokens, refresh)
    close(output.logits[0], want["logits"])
    check_selections(model, output, want, refresh)
    other = oracle.forward(model.fields, model.params, tokens)
    assert np.abs(other["logits"] - want["logits"]).max() > 1e-2, "the plan makes no difference here"
    rng = np.random.default_rng(1)
    filled = accept(model, cache, output, np.arange(LENGTH)[None], [30])
    parents, nodes = random_parents(rng, NODES, "random"), rng.integers(0, which.vocab_size, NODES)
    got = run_tree(model, nodes[None], parents[None], filled, plan=plan)
    expected = oracle.tree_path_logits(model.fields, model.params, tokens[:30], nodes, parents.tolist(), refresh)
    close(got.logits[0], expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_parameter_table_is_the_oracles(name):
    """A parameter under another name, with other axes, or one that is never used."""
    which = CONFIGS[name]
    assert llama.param_shapes(which) == oracle.param_shapes(build(which).fields)
    assert len(jax.tree.leaves(build(which).state)) == len(oracle.param_shapes(build(which).fields))
