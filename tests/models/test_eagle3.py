"""The EAGLE-3 network against an independent numpy head, its taps, and its shape checks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.models import eagle3
from ssv_jax.models.cache import Cache, init_cache
from ssv_jax.models.eagle3_config import Eagle3Config, default_taps, resolve_taps
from ssv_jax.models.eagle3_loading import export_eagle3
from ssv_jax.models.llama import PassOptions, build
from ssv_jax.pallas_kernels import ShapeError, chain
from tests.models.eagle3_numpy import (
    HEADS,
    PLAIN,
    TARGET,
    NumpyHead,
    as_jax,
    random_embedding,
    random_head,
    random_target,
)

LENGTH = 7


def merged(config: Eagle3Config, params: dict[str, np.ndarray]) -> eagle3.Eagle3:
    graphdef, state = eagle3.build(config, params)
    return nnx.merge(graphdef, state)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("window", [None, 3])
def test_a_chain_of_pairs_equals_the_numpy_head(tmp_path, name, window):
    config, params = HEADS[name], random_head(HEADS[name])
    export_eagle3(tmp_path / "head", config, params)
    embedding = random_embedding(config)
    oracle = NumpyHead(tmp_path / "head", embedding)
    rng = np.random.default_rng(5)
    taps = rng.normal(size=(3, LENGTH, config.target_hidden_size)).astype(np.float32)
    tokens = rng.integers(0, config.vocab_size, LENGTH)
    head = merged(config, params)
    table = params["embed/embedding"] if config.own_embedding else embedding

    @jax.jit
    def run(embedded, taps):
        queries = chain(jnp.zeros((1,), jnp.int32), LENGTH)
        cache = eagle3.init_draft_cache(config, 16, batch=1, dtype=jnp.float32)
        options = eagle3.DraftOptions(window=window)
        features, trees = head(embedded, head.fuse(taps), queries, cache, options=options)
        return features, trees, head.logits(features)

    features, trees, logits = run(jnp.asarray(table[tokens])[None], tuple(jnp.asarray(tap)[None] for tap in taps))
    pairs = oracle.prefill(taps, tokens, window or 10**9)
    np.testing.assert_allclose(features[0], [pair.feature for pair in pairs], rtol=5e-5, atol=2e-3)
    log_p = jax.nn.log_softmax(logits)
    np.testing.assert_allclose(log_p[0], [oracle.log_p(pair.feature) for pair in pairs], rtol=5e-5, atol=2e-3)
    for layer, tree in enumerate(trees):
        keys = np.stack([pair.keys[layer] for pair in pairs], axis=1)
        np.testing.assert_allclose(tree.k[0], keys, rtol=5e-5, atol=2e-3)
    assert logits.dtype == jnp.float32
    np.testing.assert_array_equal(head.to_target(jnp.arange(config.draft_vocab_size)), oracle.ids)


def test_fault_8_rotary_angles_beyond_the_trained_length(tmp_path):
    # The position is the second pair's; what the file says about positions is not obeyed.
    params = random_head(PLAIN)
    export_eagle3(tmp_path / "head", PLAIN, params)
    oracle = NumpyHead(tmp_path / "head", random_embedding(PLAIN))
    rng = np.random.default_rng(0)
    tokens, taps = rng.integers(0, 31, 2), rng.normal(size=(3, 2, 12)).astype(np.float32)
    head = merged(PLAIN, params)

    @jax.jit
    def run(position):
        queries = chain(position - 1, 2)
        features, _ = head(
            jnp.asarray(oracle.embedding[tokens], jnp.float32)[None],
            head.fuse(tuple(jnp.asarray(tap)[None] for tap in taps)),
            dataclasses.replace(queries, length=jnp.zeros((1,), jnp.int32)),
            eagle3.init_draft_cache(PLAIN, 16, batch=1, dtype=jnp.float32),
        )
        return features

    for position in (2047, 2048, 2049, 16000):
        first = oracle.pair(oracle.fuse(list(taps[:, 0])), tokens[0], position - 1, [])
        second = oracle.pair(oracle.fuse(list(taps[:, 1])), tokens[1], position, [first])
        features = run(jnp.asarray([position], jnp.int32))
        np.testing.assert_allclose(features[0, 1], second.feature, rtol=1e-4, atol=1e-3)


def test_fault_10_taps_are_the_streams_after_so_many_layers():
    # A target cut after k layers ends with the stream that tap k names; both conventions lead to the same streams.
    params = as_jax(random_target())
    tokens = jnp.asarray([[5, 9, 2, 30]])
    taps = default_taps(TARGET.num_layers)
    assert resolve_taps(None, 7) == resolve_taps([2, 3, 4], 7) == resolve_taps([1, 2, 3], 7) == taps == (2, 3, 4)

    def run(config, named, wanted):
        graphdef, state = build(config, named)
        queries = chain(jnp.zeros((1,), jnp.int32), 4)

        def taps_of(state):
            return nnx.merge(graphdef, state)(tokens, queries, init_cache(config, 8), PassOptions(taps=wanted)).taps

        return jax.jit(taps_of)(state)

    streams = run(TARGET, params, (1, *taps))
    kept = {n: x for n, x in params.items() if not n.startswith("layers/") or int(n.split("/")[1]) < 3}
    short = run(dataclasses.replace(TARGET, num_layers=3), kept, (1, 2, 3))
    for stream, cut in zip(streams, short, strict=False):
        np.testing.assert_allclose(stream, cut, rtol=1e-6, atol=1e-6)
    assert all(np.abs(a - b).max() > 1e-4 for a, b in zip(streams, streams[1:], strict=False))


def test_fault_28_widths_are_checked():
    wide = dataclasses.replace(PLAIN, hidden_size=8, own_embedding=True)
    head = merged(wide, random_head(wide))
    tap, own = jnp.zeros((1, 2, 12)), jnp.zeros((1, 2, 8))
    assert head.fuse((tap, tap, tap)).shape == (1, 2, 8)
    with pytest.raises(ShapeError, match="expected 3 of width 12"):
        head.fuse((own, own, own))
    with pytest.raises(ShapeError, match="expected 3 of width 12"):
        head.fuse((tap, tap))
    cache = eagle3.init_draft_cache(wide, 16, batch=1, dtype=jnp.float32)
    queries = chain(jnp.zeros((1,), jnp.int32), 2)
    with pytest.raises(ShapeError, match="embedded .* expected width 8"):
        head(tap, tap, queries, cache)
    assert head(own, own, queries, cache)[0].shape == (1, 2, 8)


def test_parameters_that_do_not_fit_are_listed():
    params = random_head(PLAIN)
    params["fc/kernel"] = params["fc/kernel"][:12]
    params["extra"] = params.pop("norm/scale")
    with pytest.raises(ValueError, match=r"missing norm/scale; unknown extra; fc/kernel has shape \(12, 12\)"):
        eagle3.build(PLAIN, params)


def test_the_vocabulary_map_stays_an_integer_table():
    graphdef, state = eagle3.build(PLAIN, random_head(PLAIN), jnp.bfloat16)
    head = nnx.merge(graphdef, state)
    assert head.target_ids[...].dtype == jnp.int32 and head.fc.kernel[...].dtype == jnp.bfloat16
    assert hash(graphdef) == hash(eagle3.build(PLAIN, random_head(PLAIN, seed=1), jnp.bfloat16)[0])
    trained = nnx.to_flat_state(nnx.state(head, nnx.Param))
    assert all("target_ids" not in path for path, _ in trained)


def test_training_sees_finite_gradients():
    params = as_jax(random_head(PLAIN))
    ids = params.pop("target_ids")

    def loss(trained):
        head = merged(PLAIN, trained | {"target_ids": ids})
        cache = eagle3.init_draft_cache(PLAIN, 4, batch=1, dtype=jnp.float32)
        taps = tuple(jnp.full((1, 3, 12), 0.1 * i) for i in range(1, 4))
        out, _ = head(jnp.ones((1, 3, 12)), head.fuse(taps), chain(jnp.zeros((1,), jnp.int32), 3), cache)
        return jax.nn.log_softmax(head.logits(out))[..., 0].sum()

    gradients = jax.jit(jax.grad(loss))(params)
    assert all(np.isfinite(x).all() and np.abs(x).max() > 0 for x in gradients.values())


def test_random_parameters_have_the_documented_names():
    params = eagle3.random_params(PLAIN, seed=1)
    assert {name: x.shape for name, x in params.items()} == eagle3.param_shapes(PLAIN)
    assert params["target_ids"].tolist() == list(range(17))


def test_cache_is_the_targets_kind():
    cache = eagle3.init_draft_cache(HEADS["three-layers"], 5, batch=2, dtype=jnp.bfloat16)
    assert isinstance(cache, Cache) and len(cache.layers) == 3 and cache.capacity == 5
    assert cache.layers[2].k.shape == (2, 2, 5, 6) and cache.layers[2].v.dtype == jnp.bfloat16
