"""The scale-up twin: logits, taps, selected blocks, drafts and tokens of a widened model are those of the small one."""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.drafting.eagle3 import Eagle3Drafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.models import eagle3
from ssv_jax.models.config import LlamaConfig
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.eagle3_loading import export_eagle3, load_eagle3
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import build, param_shapes
from ssv_jax.models.loading import load
from ssv_jax.pallas_kernels import chain
from ssv_jax.registry import resolve
from tests.e2e import harness
from tests.models import model_cases as cases
from tests.pallas_kernels.cases import random_parents
from tests.ssv_jax import tiny

pytestmark = pytest.mark.usefixtures("quick_programs")
FOLDER = Path(__file__).parents[2] / "experiments"
TOLERANCE = 1e-4  # of the largest logit, in float32
LENGTH, CAPACITY, NODES = 43, 64, 12
# The small model and what its twin changes.
CASES = {
    # What is trained here: everything grows, groups of 3 queries to 4.
    "weighted": (
        cases.config(
            cases.nsa(cmp_fn="weighted", cmp_pe="kv", gate_bias=True),
            num_heads=6,
            num_layers=3,
            tie_embeddings=True,
        ),
        {
            "vocab_size": 57,
            "hidden_size": 56,
            "intermediate_size": 48,
            "num_layers": 4,
            "num_heads": 20,
            "num_kv_heads": 5,
            "head_dim": 16,
        },
    ),
    "norms-and-biases": (
        cases.config(
            cases.nsa(cmp_fn="mlp", cmp_pe="kv"),
            qk_norm=True,
            qkv_bias=True,
            o_bias=True,
            mlp_bias=True,
            rope=cases.rope(10000.0, cases.LLAMA3),
            rms_eps=1e-2,
        ),
        {"hidden_size": 40, "num_layers": 3, "num_heads": 8, "num_kv_heads": 4, "head_dim": 24},
    ),
    "pooled": (
        cases.config(cases.nsa(cmp_fn="pooled", cmp_pe="kv", cmp_pools=2, gate_bias=True)),
        {"hidden_size": 40, "num_heads": 8, "num_kv_heads": 4, "head_dim": 24},
    ),
    "linear-token-gates": (
        cases.config(cases.nsa(cmp_fn="linear", cmp_pe="k", gate_scope="token"), num_heads=3, num_kv_heads=1),
        {"vocab_size": 60, "hidden_size": 25, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16},
    ),
    # No forced first block and one local one: neutral all the same, since entries do not overlap.
    "rotated-entries": (
        cases.config(
            cases.nsa(
                cmp_rope="pre",
                kernel_size=4,
                kernel_stride=4,
                block_size=4,
                n_selected=3,
                init_blocks=0,
                local_blocks=1,
            ),
            num_heads=3,
            num_kv_heads=1,
        ),
        {"hidden_size": 32, "num_heads": 8, "num_kv_heads": 2},
    ),
    "dense": (
        cases.config(None, num_heads=6),
        {"vocab_size": 64, "hidden_size": 64, "num_layers": 4, "num_heads": 16, "num_kv_heads": 4, "head_dim": 16},
    ),
}


@pytest.fixture
def twin(monkeypatch):
    """The script; it imports others by their plain names, and nothing of that stays behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    import twin

    yield twin
    for name in ("twin", "_widening", "_evaluation", "_harness"):
        if name not in before:
            sys.modules.pop(name, None)


def shape_of(twin, config: LlamaConfig, changes: dict[str, int]):
    same = {f.name: getattr(config, f.name) for f in dataclasses.fields(twin.Shape) if f.name != "draft_vocab_size"}
    return twin.Shape(**(same | changes))


def widened(twin, name: str):
    """The small model and its twin, ready to run."""
    small = cases.build(CASES[name][0])
    wide = twin.widen_config(small.config, shape_of(twin, *CASES[name]))
    params = twin.widen_params(small.config, small.params, wide)
    assert {key: value.shape for key, value in params.items()} == param_shapes(wide)
    return small, cases.Model(wide, {}, {}, *build(wide, params))


def check_pass(small, wide, ours, theirs, refresh: tuple[bool, ...]) -> None:
    """`theirs` is what the twin made of the pass that `ours` is of the small model."""
    vocab, size = small.config.vocab_size, small.config.hidden_size
    scale = np.abs(ours.logits).max()
    np.testing.assert_allclose(theirs.logits[..., :vocab], ours.logits, rtol=0, atol=TOLERANCE * scale)
    np.testing.assert_array_equal(theirs.logits.argmax(-1), ours.logits.argmax(-1))
    assert (theirs.logits[..., vocab:] < -1e6).all() and np.isfinite(theirs.logits).all()
    for tap, wide_tap in zip(ours.taps, theirs.taps, strict=True):
        np.testing.assert_allclose(wide_tap[..., :size], tap, rtol=0, atol=TOLERANCE * np.abs(tap).max())
        mark = 2.0**-20 if wide.config.vocab_size > vocab else 0
        np.testing.assert_array_equal(wide_tap[..., size : size + 1], mark)
        np.testing.assert_array_equal(wide_tap[..., size + 1 :], 0)
    kv, copies = small.config.num_kv_heads, np.arange(wide.config.num_kv_heads) % small.config.num_kv_heads
    for layer, is_refresh in enumerate(refresh):
        if small.config.nsa is not None and is_refresh:
            mine, other = ours.selections[layer].blocks, theirs.selections[layer].blocks
            np.testing.assert_array_equal(other[:, :kv], mine)
            np.testing.assert_array_equal(other, mine[:, copies])


@pytest.mark.parametrize("name", CASES)
def test_passes_equal_those_of_the_small_model(twin, name):
    """Prefill under a reuse plan, then trees over the committed tokens with every layer selecting."""
    small, wide = widened(twin, name)
    layers, wide_layers = small.config.num_layers, wide.config.num_layers
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, small.config.vocab_size, (2, LENGTH))
    plan, every = LayerPlan.every(layers, 2), LayerPlan.every(layers)
    taps = tuple(range(layers + 1))
    ours = cases.run_chain(small, tokens, cases.empty(small, CAPACITY, 2), plan=plan, taps=taps)
    theirs = cases.run_chain(
        wide, tokens, cases.empty(wide, CAPACITY, 2), plan=LayerPlan.every(wide_layers, 2), taps=(*taps, wide_layers)
    )
    np.testing.assert_array_equal(theirs.taps[-1], theirs.taps[-2])  # what layers were added change no bit
    check_pass(small, wide, ours, dataclasses.replace(theirs, taps=theirs.taps[:-1]), plan.refresh)
    path, count = np.tile(np.arange(LENGTH), (2, 1)), [LENGTH, LENGTH - 6]
    caches = [
        cases.accept(model, cases.empty(model, CAPACITY, 2), output, path, count)
        for model, output in ((small, ours), (wide, theirs))
    ]
    parents = np.stack([random_parents(rng, NODES, style) for style in ("deep", "random")])
    nodes = rng.integers(0, small.config.vocab_size, (2, NODES))
    ours, theirs = (cases.run_tree(m, nodes, parents, c, taps=taps) for m, c in zip((small, wide), caches, strict=True))
    check_pass(small, wide, ours, theirs, every.refresh)
    assert wide.config.num_layers == len(theirs.selections)


def head_config(config: LlamaConfig, **changes) -> Eagle3Config:
    fields = {
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.vocab_size - 7,
        "hidden_size": config.hidden_size,
        "target_hidden_size": config.hidden_size,
        "intermediate_size": 40,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "taps": (0, 1, 3),
        "own_head": False,
    }
    return Eagle3Config(**(fields | changes))


def head_params(config: Eagle3Config, seed: int = 3) -> dict[str, np.ndarray]:
    params = {name: np.asarray(x) for name, x in eagle3.random_params(config, seed).items()}
    rng = np.random.default_rng(seed)
    for name, array in params.items():
        if name == "target_ids":
            params[name] = np.sort(rng.permutation(config.vocab_size)[: len(array)]).astype(np.int32)
        elif name.endswith("scale"):
            params[name] = rng.uniform(0.5, 1.5, array.shape).astype(np.float32)
        else:
            params[name] = array * 8
    return params


@functools.partial(jax.jit, static_argnames="graphdef")
def run_head(graphdef, state, embedded, taps, cache):
    """Logits after fused taps, and after the head's own features."""
    head = nnx.merge(graphdef, state)
    queries = chain(cache.length, embedded.shape[1])
    first, _ = head(embedded, head.fuse(taps), queries, cache)
    second, _ = head(embedded, first, queries, cache)
    return head.logits(first), head.logits(second)


@pytest.mark.parametrize(
    ("changes", "draft_vocab"),
    [
        ({"tap_norm": "each"}, 49),
        ({"tap_norm": "concat", "num_layers": 2, "own_embedding": True, "rms_eps": 1e-3}, 40),
        ({"draft_vocab_size": 41}, 57),
        ({"normed_output": True, "normed_residual": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}, None),
    ],
    ids=["each", "concat", "whole-vocabulary", "normed"],
)
def test_heads_equal_the_small_one(twin, changes, draft_vocab):
    """Draft logits after target features and after the head's own."""
    config, changed = CASES["weighted"]
    shape = shape_of(twin, config, changed | {"draft_vocab_size": draft_vocab})
    head = head_config(config, **changes)
    params = head_params(head)
    wide = twin.widen_config(config, shape)
    wide_head = twin.widen_head_config(head, config, wide, shape)
    wide_params = twin.widen_head(head, params, config, wide_head)
    rng = np.random.default_rng(5)
    real, size = rng.standard_normal((4, 1, 9, config.hidden_size)).astype(np.float32), config.hidden_size
    more = np.zeros((4, 1, 9, wide.hidden_size), np.float32)
    more[..., :size], more[..., size] = real, 2.0**-20
    logits = []
    for which, values, streams in ((head, params, real), (wide_head, wide_params, more)):
        cache = eagle3.init_draft_cache(which, 64, batch=1, dtype=jnp.float32)
        logits.append(run_head(*eagle3.build(which, values), streams[0], tuple(streams[1:]), cache))
    vocab = head.draft_vocab_size
    for ours, theirs in zip(*logits, strict=True):
        np.testing.assert_allclose(theirs[..., :vocab], ours, rtol=0, atol=TOLERANCE * np.abs(ours).max())
        assert (theirs[..., vocab:] < -1e6).all() and np.isfinite(theirs).all()
    if wide_head.reduced_vocab:
        ids = wide_params["target_ids"]
        assert len(set(ids.tolist())) == wide_head.draft_vocab_size and ids.max() < wide.vocab_size
        np.testing.assert_array_equal(ids[:vocab], params.get("target_ids", np.arange(vocab)))
        assert (ids[vocab:] >= config.vocab_size).all()


@pytest.mark.slow
def test_decoding_emits_the_same_tokens_from_the_same_drafts(twin):
    """Plain decoding and trees of the head, under a reuse plan: tokens, rounds, acceptance by depth."""
    small = cases.build(CASES["weighted"][0])
    head = head_config(small.config, tap_norm="each")
    shape = shape_of(twin, *CASES["weighted"])
    shape = dataclasses.replace(shape, draft_vocab_size=49)
    pair = head, head_params(head)
    wide = twin.build_twin(small.config, small.params, shape, pair, put=jnp.asarray)
    rng = np.random.default_rng(7)
    prompts = [rng.integers(0, small.config.vocab_size, count).tolist() for count in (40, 33, 18)]
    found = []
    for config, params, one, values in (
        (small.config, {k: v.astype(np.float32) for k, v in small.params.items()}, *pair),
        (wide.config, wide.params, wide.head_config, wide.head_params),
    ):
        graphdef, state = build(config, params)
        draft_graph, draft = eagle3.build(one, values)
        drafter = Eagle3Drafter(graphdef=draft_graph, config=one, depth=2, top_k=12, num_nodes=40)
        target = harness.Model(config, graphdef, Params(target=state, draft=draft))
        plan = LayerPlan.every(config.num_layers, 2)
        options = {"max_new_tokens": 32, "capacity": 128}
        found.append(harness.run(harness.decoding(target, drafter, plan=plan), target.params, prompts, **options))
        plain, _ = harness.run(harness.decoding(target, plan=plan), target.params, prompts, **options)
        assert plain == found[0][0] == found[-1][0]
    (_, ours), (_, theirs) = found
    assert len(set(sum(plain, []))) > 8, "nothing but repetition shows nothing"
    for name in ("rounds", "drafted", "accepted", "emitted", "offered_at", "accepted_at"):
        np.testing.assert_array_equal(getattr(theirs.stats, name), getattr(ours.stats, name), err_msg=name)
    assert int(ours.stats.accepted) > 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("weighted", {"head_dim": 12}, "head_dim=12 must be a multiple of 8"),
        ("weighted", {"num_layers": 2}, "num_layers=2 is below"),
        ("weighted", {"num_kv_heads": 10}, "queries per KV head=2 is below"),
        ("weighted", {"hidden_size": 24}, "need a hidden_size above 24"),
        ("linear-token-gates", {"num_heads": 8}, None),
    ],
)
def test_refusals(twin, name, changes, message):
    config, changed = CASES[name]
    shape = shape_of(twin, config, changed | changes)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            twin.widen_config(config, shape)
        return
    # A zero query where blocks that lack entries compete.
    for forced in ({"init_blocks": 0}, {"local_blocks": 1}):
        nsa = dataclasses.replace(config.nsa, **forced)
        with pytest.raises(ValueError, match="zero query"):
            twin.widen_config(dataclasses.replace(config, nsa=nsa), shape)


def test_heads_that_cannot_be_padded(twin):
    config, changed = CASES["weighted"]
    shape = shape_of(twin, config, changed)
    wide = twin.widen_config(config, shape)
    for changes, vocab, message in (
        ({"normed_output": True}, 49, "normed features"),
        ({}, 51, "17 padded ids"),
        ({}, 57, "23 padded ids"),
    ):
        with pytest.raises(ValueError, match=message):
            wanted = dataclasses.replace(shape, draft_vocab_size=vocab)
            twin.widen_head_config(head_config(config, **changes), config, wide, wanted)


def test_smoke(twin, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["twin.py", "--smoke", "--check", "128"])
    twin.main()  # which checks itself
    assert "argmax" in capsys.readouterr().out


def test_command_writes_a_model_with_its_head(twin, tmp_path, monkeypatch, capsys):
    config = dataclasses.replace(tiny.CONFIG, num_heads=6, hidden_size=24)
    source = tiny.write_checkpoint(tmp_path / "small", config=config)
    head = dataclasses.replace(head_config(config), own_head=True, taps=(0, 1, 2))
    export_eagle3(source / "eagle3", head, head_params(head))
    shape = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 80,
        "num_layers": 3,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 16,
        "draft_vocab_size": 300,
    }
    arguments = ["--model", str(source), "--shape", json.dumps(shape), "--output", str(tmp_path / "wide")]
    monkeypatch.setattr(sys, "argv", ["twin.py", *arguments])
    twin.main()
    found = resolve(tmp_path / "wide")
    assert found.head is not None
    loaded = load(found.path, dtype=None)
    assert loaded.config == twin.widen_config(config, twin.Shape(**shape))
    assert {str(x.dtype) for x in loaded.params.values()} == {"bfloat16"}
    small = load(source).params["embed/embedding"].astype(jnp.bfloat16)
    np.testing.assert_array_equal(loaded.params["embed/embedding"][:300, :24], small)
    assert load_eagle3(found.head.path, loaded.config).config.draft_vocab_size == 300
    with pytest.raises(twin.UsageError, match="not empty"):
        twin.main()
    monkeypatch.setattr(sys, "argv", ["twin.py", *arguments[:2], "--shape", "9b", "--check", "9"])
    with pytest.raises(twin.UsageError, match="9b"):
        twin.main()
    monkeypatch.setattr(sys, "argv", ["twin.py"])
    with pytest.raises(SystemExit) as stopped:
        twin.main()
    assert stopped.value.code == 2
    capsys.readouterr()
