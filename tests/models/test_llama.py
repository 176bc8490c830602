"""The model against itself: cached decoding, chunks, causality, batches, rejected nodes, dense equivalents."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.models import llama
from ssv_jax.models.cache import Cache, NSALayerTree, init_cache
from ssv_jax.models.config import LlamaConfig
from ssv_jax.pallas_kernels import chain
from tests.golden import numpy_nsa as oracle
from tests.models.model_cases import (
    Model,
    accept,
    build,
    close,
    config,
    empty,
    extend,
    nsa,
    random_tokens,
    run_chain,
    run_tree,
    with_params,
)
from tests.pallas_kernels.cases import ancestry, random_parents, same_bits

LENGTH, CAPACITY = 43, 48
CONFIGS = {
    # Boundaries of blocks at 8, strides at 2, the window at 6: all offsets between them occur before 43.
    "overlapping": config(nsa(cmp_fn="linear", cmp_pe="k")),
    # One entry per block, rotated keys compressed, a window of one key.
    "equal": config(
        nsa(
            cmp_rope="pre",
            kernel_size=4,
            kernel_stride=4,
            block_size=4,
            n_selected=3,
            init_blocks=0,
            local_blocks=1,
            window_keys=1,
        ),
        num_heads=3,
        num_kv_heads=1,
    ),
    "dense": config(None, num_heads=6, qkv_bias=True),
}
OVERLAPPING = CONFIGS["overlapping"]


@functools.cache
def full(which: LlamaConfig) -> tuple[Model, np.ndarray, Cache, llama.LlamaOutput]:
    """One pass over all tokens: what every other way of running must reproduce."""
    model, tokens = build(which), random_tokens(LENGTH)
    cache = empty(model, CAPACITY)
    return model, tokens, cache, run_chain(model, tokens[None], cache)


# --- cached decoding ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_equals_recomputation_at_every_offset(name):
    """The next token after any prefix: wrong around some block, stride or window boundary (faults 15, 23)."""
    model, tokens, cache, output = full(CONFIGS[name])
    for length in range(LENGTH):
        filled = accept(model, cache, output, np.arange(LENGTH)[None], [length])
        step = run_chain(model, tokens[None, length : length + 1], filled)
        close(step.logits[0, 0], output.logits[0, length], message=f"length {length}")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("chunk", [1, 3])
def test_logits_do_not_depend_on_the_chunks(name, chunk):
    """State carried from chunk to chunk: an entry across a chunk border, a padded last chunk, a full cache."""
    model, tokens, _, output = full(CONFIGS[name])
    whole = np.asarray(output.logits)
    cache, logits = extend(model, empty(model, CAPACITY), tokens[None], chunk)
    close(logits, whole)
    assert np.asarray(cache.length).tolist() == [LENGTH]
    if chunk == 3:  # borders at every offset of the stride
        for shift in (1, 2):
            cache, first = extend(model, empty(model, CAPACITY), tokens[None, :shift], chunk)
            _, rest = extend(model, cache, tokens[None, shift:], chunk)
            close(np.concatenate([first, rest], axis=1), whole, message=f"shift {shift}")


def test_logits_do_not_depend_on_large_chunks_either():
    """Several blocks per chunk, the last chunk mostly padding that stands beyond the capacity."""
    model, tokens, _, output = full(OVERLAPPING)
    close(extend(model, empty(model, CAPACITY), tokens[None], 20)[1], output.logits)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_future_token_changes_no_bit_of_the_past(name):
    """A causal leak, through a key, an entry that is not complete, or a block score (fault 20)."""
    model, tokens, cache, output = full(CONFIGS[name])
    for changed in (1, 7, 8, 20, LENGTH - 1):
        other = tokens.copy()
        other[changed:] = (other[changed:] + 1 + np.arange(LENGTH - changed) % 5) % model.config.vocab_size
        logits = run_chain(model, other[None], cache).logits
        same_bits(np.asarray(logits)[0, :changed], np.asarray(output.logits)[0, :changed])
        assert np.abs(np.asarray(logits)[0, changed] - np.asarray(output.logits)[0, changed]).max() > 1e-3


def test_group_size_does_not_change_the_logits():
    """Grouped verification that mixes up queries of a group, or loses a block of the union."""
    model, tokens, cache, output = full(OVERLAPPING)
    close(run_chain(model, tokens[None], cache, group=4).logits, output.logits, 1e-5)


# --- sparse attention that is dense -------------------------------------------------------------------------


def test_open_window_and_open_selection_are_dense_attention():
    """Window off by one, a block lost, a wrong gate column: with everything in reach both must be dense (7)."""
    sparse = config(nsa(gate_bias=True, window_keys=LENGTH, n_selected=CAPACITY // 8))
    dense = build(sparse.dense())
    tokens = random_tokens(LENGTH)
    want = run_chain(dense, tokens[None], empty(dense, CAPACITY)).logits
    for branch in (1, 2):
        params = dict(dense.params)
        for name, shape in llama.param_shapes(sparse).items():
            if name.endswith("gate/kernel"):
                params[name] = np.zeros(shape)
            elif name.endswith("gate/bias"):
                params[name] = np.full(shape, -60.0)
                params[name][..., branch] = 60.0
        model = with_params(sparse, params)
        close(run_chain(model, tokens[None], empty(model, CAPACITY)).logits, want, 2e-5)


# --- batches and trees --------------------------------------------------------------------------------------


@functools.cache
def batch_of_two() -> tuple[Model, np.ndarray, Cache, llama.LlamaOutput]:
    model = build(OVERLAPPING)
    tokens = np.stack([random_tokens(LENGTH, 1), random_tokens(LENGTH, 2)])
    cache = empty(model, CAPACITY, batch=2)
    return model, tokens, cache, run_chain(model, tokens, cache)


def prefix(lengths: Any) -> Cache:
    """Two sequences of different lengths."""
    model, _, cache, output = batch_of_two()
    return accept(model, cache, output, np.broadcast_to(np.arange(LENGTH), (2, LENGTH)), lengths)


def random_path(rng: np.random.Generator, parents: np.ndarray, width: int) -> tuple[np.ndarray, int]:
    """A path from the root down, padded with arbitrary nodes, and how much of it is accepted."""
    path = oracle.tree_path(parents.tolist(), int(rng.integers(len(parents))))[:width]
    filler = rng.integers(-1, len(parents), width - len(path))
    return np.concatenate([path, filler]).astype(np.int32), int(rng.integers(0, len(path) + 1))


NODES, WIDTH = 7, 5


def poisoned(trees: tuple[Any, ...], paths: np.ndarray, counts: Any) -> tuple[Any, ...]:
    """The same trees with 1e4 in everything that was not accepted."""
    keep = np.zeros((2, NODES), bool)
    for b, count in enumerate(counts):
        keep[b, paths[b, :count]] = True

    def spoil(x: jax.Array, kept: np.ndarray, value: float) -> jax.Array:
        return jnp.asarray(np.where(kept[:, None, :, None], np.asarray(x), np.float32(value)))

    def one(tree: Any) -> Any:
        assert isinstance(tree, NSALayerTree)
        node = np.asarray(tree.kv.completions.node)
        entry = np.take_along_axis(keep, np.maximum(node, 0), axis=1) & (node >= 0)
        kv = dataclasses.replace(
            tree.kv,
            k=spoil(tree.kv.k, keep, 1e4),
            v=spoil(tree.kv.v, keep, -1e4),
            k_cmp=spoil(tree.kv.k_cmp, entry, 1e4),
            v_cmp=spoil(tree.kv.v_cmp, entry, 1e4),
        )
        return NSALayerTree(kv=kv, raw_k=spoil(tree.raw_k, keep, -1e4))

    return tuple(map(one, trees))


@pytest.mark.parametrize("seed", range(4))
def test_ragged_acceptance_equals_recomputation_and_forgets_what_was_rejected(seed):
    """One offset for the whole batch (fault 26); rejected rows or entries that come back later (faults 16, 18)."""
    model, tokens, _, _ = batch_of_two()
    rng = np.random.default_rng(seed)
    lengths = [(3, 30), (8, 17), (LENGTH - 5, 1), (0, 15)][seed]
    cache = clean = prefix(lengths)
    texts = [tokens[b, : lengths[b]].tolist() for b in range(2)]
    for step in range(5):
        room = CAPACITY - np.asarray(cache.length)
        parents = np.stack([random_parents(rng, NODES, ("random", "deep", "chain")[(step + b) % 3]) for b in range(2)])
        nodes = rng.integers(0, model.config.vocab_size, (2, NODES))
        output, reference = run_tree(model, nodes, parents, cache), run_tree(model, nodes, parents, clean)
        same_bits(output.logits, reference.logits, f"step {step}: poison was read")
        for b in range(2):
            fits = [n for n in range(NODES) if ancestry(parents[b])[n].sum() <= room[b]]
            want = oracle.tree_path_logits(model.fields, model.params, texts[b], nodes[b], parents[b].tolist())
            close(output.logits[b, fits], want[fits], message=f"step {step}, sequence {b}, length {len(texts[b])}")
        paths, counts = zip(*(random_path(rng, p, WIDTH) for p in parents), strict=True)
        counts = np.minimum(counts, room)
        cache = accept(
            model,
            cache,
            dataclasses.replace(output, trees=poisoned(output.trees, np.stack(paths), counts)),
            np.stack(paths),
            counts,
        )
        clean = accept(model, clean, reference, np.stack(paths), counts)
        for b in range(2):
            texts[b] += nodes[b, paths[b][: counts[b]]].tolist()
        assert np.asarray(cache.length).tolist() == [len(text) for text in texts]


def test_each_sequence_of_a_batch_is_alone():
    """A neighbour's tokens in a sequence's logits."""
    _, _, _, output = batch_of_two()
    for b in range(2):
        model, _, cache, _ = full(OVERLAPPING)
        alone = run_chain(model, random_tokens(LENGTH, b + 1)[None], cache)
        close(output.logits[b], alone.logits[0], 1e-5)


# --- the rest of the interface ------------------------------------------------------------------------------


def test_logits_of_requested_rows_only():
    """Prefill that needs one row of logits must get the right one."""
    model, tokens, cache, output = full(CONFIGS["dense"])
    queries = chain(cache.length, LENGTH)

    @jax.jit
    def some(state: Any, rows: jax.Array) -> jax.Array:
        decoder = nnx.merge(model.graphdef, state)
        return decoder(jnp.asarray(tokens[None]), queries, cache, llama.PassOptions(is_chain=True), rows).logits

    rows = np.array([[LENGTH - 1, 0, 17]])
    close(some(model.state, jnp.asarray(rows)), np.asarray(output.logits)[:, rows[0]], 1e-5)


def test_taps_are_the_streams_asked_for_in_that_order():
    """Draft features from the neighbouring layer: acceptance collapses (fault 10)."""
    model, tokens, cache, _ = full(CONFIGS["dense"])
    want = oracle.forward(model.fields, model.params, tokens)["hidden"]
    taps = run_chain(model, tokens[None], cache, taps=(2, 0, 1, 1)).taps
    assert len(taps) == 4
    for got, k in zip(taps, (2, 0, 1, 1), strict=True):
        close(got[0], want[k])


def test_bfloat16_runs_in_batches_and_stays_near_float32():
    """A product that the backend refuses in bfloat16, or bfloat16 where float32 is promised."""
    model, tokens, _, output = batch_of_two()
    graphdef, state = llama.build(
        model.config, {k: v.astype(np.float32) for k, v in model.params.items()}, jnp.bfloat16
    )
    low = dataclasses.replace(model, graphdef=graphdef, state=state)
    cache = init_cache(model.config, CAPACITY, batch=2, dtype=jnp.bfloat16)
    got = run_chain(low, tokens, cache)
    assert got.logits.dtype == jnp.float32 and got.trees[0].kv.k.dtype == jnp.bfloat16
    # 8 bits of mantissa through two layers of sharp attention; a few positions may select other blocks.
    difference = np.abs(np.asarray(got.logits) - np.asarray(output.logits))
    assert np.median(difference) < 0.02 * np.abs(np.asarray(output.logits)).max()


def test_parameters_that_do_not_fit_are_all_listed():
    """A typo in a checkpoint mapping that leaves a random tensor in place."""
    good = {name: np.zeros(shape, np.float32) for name, shape in llama.param_shapes(OVERLAPPING).items()}
    bad = dict(good, extra=np.zeros(2, np.float32))
    del bad["norm/scale"]
    bad["lm_head/kernel"] = np.zeros((41, 24), np.float32)
    with pytest.raises(ValueError) as caught:
        llama.build(OVERLAPPING, bad)
    assert "missing norm/scale; unknown extra; lm_head/kernel has shape (41, 24), expected (24, 41)" in str(
        caught.value
    )
    llama.build(OVERLAPPING, good)


def test_random_parameters_have_the_tables_shapes_and_differ_by_seed():
    one, two, other = (llama.random_params(OVERLAPPING, seed) for seed in (0, 0, 1))
    assert {name: x.shape for name, x in one.items()} == llama.param_shapes(OVERLAPPING)
    name = "layers/0/attn/qkv/kernel"
    same_bits(one[name], two[name])
    assert np.abs(np.asarray(one[name]) - np.asarray(other[name])).max() > 0.01
    assert not np.array_equal(one[name], one["layers/1/attn/qkv/kernel"])
