"""Tiny models beside their float64 oracle, and the few compiled passes that the model tests share."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ssv_jax.models import cache as caches
from ssv_jax.models import llama
from ssv_jax.models.config import Llama3Scaling, LlamaConfig, NSAConfig, RopeConfig
from ssv_jax.pallas_kernels import TreeQueries, chain
from tests.golden import numpy_nsa as oracle
from tests.pallas_kernels.cases import QUICK, queries_of

# Largest difference of logits from float64, relative to the largest logit. Errors of a few eps (1.2e-7) per
# operation grow through two layers of sharp attention.
TOLERANCE = 1e-4
VOCAB = 41
LLAMA3 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=24)


def nsa(**changes: Any) -> NSAConfig:
    """The paper's proportions, an eighth of its size; the window is shorter than most contexts here."""
    base = {"kernel_size": 4, "kernel_stride": 2, "block_size": 8, "n_selected": 4, "window_keys": 6}
    return NSAConfig(**(base | changes))


def rope(theta: float, scaling: Llama3Scaling | None = None) -> RopeConfig:
    return RopeConfig(theta=theta, scaling=scaling)


def config(sparse: NSAConfig | None, **changes: Any) -> LlamaConfig:
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "max_position": 256,
        "nsa": sparse,
    }
    return LlamaConfig(**(base | changes))


@dataclasses.dataclass(frozen=True)
class Model:
    """One model in both worlds."""

    config: LlamaConfig
    fields: dict[str, Any]  # the oracle's config
    params: dict[str, np.ndarray]  # float64, exact in float32
    graphdef: nnx.GraphDef
    state: nnx.State


@functools.cache
def build(which: LlamaConfig, seed: int = 0) -> Model:
    fields = dataclasses.asdict(which)
    params = oracle.random_params(fields, seed)
    return with_params(which, params)


def with_params(which: LlamaConfig, params: dict[str, np.ndarray]) -> Model:
    graphdef, state = llama.build(which, {name: x.astype(np.float32) for name, x in params.items()})
    return Model(which, dataclasses.asdict(which), params, graphdef, state)


@functools.partial(jax.jit, static_argnames=("graphdef", "options"), compiler_options=QUICK)
def forward(
    graphdef: nnx.GraphDef,
    state: nnx.State,
    tokens: jax.Array,
    queries: TreeQueries,
    cache: caches.Cache,
    options: llama.PassOptions,
) -> llama.LlamaOutput:
    return nnx.merge(graphdef, state)(tokens, queries, cache, options)


commit = jax.jit(caches.commit, static_argnames="geometry", compiler_options=QUICK)
_chain = jax.jit(chain, static_argnums=1, compiler_options=QUICK)


def geometry(model: Model) -> Any:
    return None if model.config.nsa is None else caches.geometry_of(model.config.nsa)


def run(model: Model, tokens: Any, queries: TreeQueries, cache: caches.Cache, **options: Any) -> llama.LlamaOutput:
    """One pass, nothing committed. tokens [B, T]."""
    tokens = jnp.asarray(np.asarray(tokens, np.int32))
    return forward(model.graphdef, model.state, tokens, queries, cache, llama.PassOptions(**options))


def run_chain(model: Model, tokens: Any, cache: caches.Cache, **options: Any) -> llama.LlamaOutput:
    """Consecutive tokens [B, T], nothing committed."""
    return run(model, tokens, _chain(cache.length, np.shape(tokens)[1]), cache, is_chain=True, **options)


def run_tree(model: Model, tokens: Any, parents: np.ndarray, cache: caches.Cache, **options: Any) -> llama.LlamaOutput:
    """A tree [B, T], nothing committed."""
    return run(model, tokens, queries_of(np.asarray(parents), np.asarray(cache.length)), cache, **options)


def accept(model: Model, cache: caches.Cache, output: llama.LlamaOutput, path: Any, count: Any) -> caches.Cache:
    """Commits the first `count` nodes of a path, [B, P] and [B]."""
    path = jnp.asarray(np.asarray(path, np.int32))
    count = jnp.asarray(np.asarray(count, np.int32))
    return commit(cache, output.trees, path, count, geometry(model))


def extend(
    model: Model, cache: caches.Cache, tokens: Any, chunk: int, **options: Any
) -> tuple[caches.Cache, np.ndarray]:
    """Commits all tokens [B, T] in chunks, the last one padded; the cache, and the logits [B, T, V]."""
    tokens = np.asarray(tokens)
    batch, total = tokens.shape
    logits = []
    for start in range(0, total, chunk):
        part = tokens[:, start : start + chunk]
        count = part.shape[1]
        padded = np.pad(part, [(0, 0), (0, chunk - count)])
        output = run_chain(model, padded, cache, **options)
        logits.append(np.asarray(output.logits)[:, :count])
        path = np.broadcast_to(np.arange(chunk), (batch, chunk))
        cache = accept(model, cache, output, path, [count] * batch)
    return cache, np.concatenate(logits, axis=1)


def empty(model: Model, capacity: int, batch: int = 1) -> caches.Cache:
    return caches.init_cache(model.config, capacity, batch=batch)


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, VOCAB, count)


def close(actual: Any, expected: Any, tolerance: float = TOLERANCE, message: str = "") -> None:
    """Within tolerance of the largest expected value."""
    expected = np.asarray(expected, np.float64)
    scale = max(np.abs(expected).max(), 1.0)
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), expected, rtol=0, atol=tolerance * scale, err_msg=message
    )
