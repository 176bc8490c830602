"""Commit against a cache that was built from the accepted tokens by hand."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.models.cache import (
    Cache,
    DenseLayerCache,
    DenseLayerTree,
    NSALayerCache,
    NSALayerTree,
    commit,
    geometry_of,
    init_cache,
)
from ssv_jax.models.config import NSAConfig
from ssv_jax.pallas_kernels import CachedKV, Geometry, TreeKV, completions
from tests.golden import numpy_nsa as oracle
from tests.models.model_cases import config, nsa
from tests.pallas_kernels.cases import GEOMETRIES, QUICK, STYLES, ancestry, queries_of, random_parents, same_bits

BATCH, HEADS, DIM, NODES, WIDTH, BLOCKS = 2, 2, 4, 7, 5, 5
_commit = jax.jit(commit, static_argnames="geometry", compiler_options=QUICK)
_completions = jax.jit(completions, static_argnums=1, compiler_options=QUICK)


class Text:
    """Random rows for every token of two growing sequences: what a prefill from scratch would have cached."""

    def __init__(self, rng: np.random.Generator, lengths: Any) -> None:
        self.rng = rng
        self.rows = [
            {name: self.draw(int(n)) for name in ("k", "v", "raw_k")} for n in np.broadcast_to(lengths, (BATCH,))
        ]

    def draw(self, count: int) -> np.ndarray:
        return self.rng.standard_normal((HEADS, count, DIM)).astype(np.float32)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([rows["k"].shape[1] for rows in self.rows], np.int32)

    def append(self, b: int, nodes: dict[str, np.ndarray], path: np.ndarray) -> None:
        self.rows[b] = {name: np.concatenate([x, nodes[name][b][:, path]], axis=1) for name, x in self.rows[b].items()}

    def entries(self, b: int, sizes: Geometry) -> tuple[np.ndarray, np.ndarray]:
        """Means of the compressor's inputs, [K, N, D]: the entries that the rows alone determine."""

        def compress(x: np.ndarray) -> np.ndarray:
            got = oracle.compress(x.swapaxes(0, 1).astype(float), "mean", {}, sizes.kernel_size, sizes.kernel_stride)
            return got.swapaxes(0, 1).astype(np.float32)

        return compress(self.rows[b]["raw_k"]), compress(self.rows[b]["v"])


def fill(buffer: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The buffer with the rows at its start."""
    out = buffer.copy()
    out[:, : rows.shape[1]] = rows
    return out


def tail(rows: np.ndarray, size: int) -> np.ndarray:
    """The last `size` rows as a ring; rows that no position has reached are NaN, for nobody may compare them."""
    ring = np.full((HEADS, size, DIM), np.nan, np.float32)
    last = np.arange(max(rows.shape[1] - size, 0), rows.shape[1])
    ring[:, last % size] = rows[:, last]
    return ring


def cache_of(text: Text, sizes: Geometry, garbage: dict[str, np.ndarray]) -> Cache:
    """A one-layer cache whose unused rows hold recognisable garbage."""
    layer = {name: [] for name in ("k", "v", "k_cmp", "v_cmp", "tail_k", "tail_v")}
    for b in range(BATCH):
        rows, (k_cmp, v_cmp) = text.rows[b], text.entries(b, sizes)
        layer["k"].append(fill(garbage["k"][b], rows["k"]))
        layer["v"].append(fill(garbage["v"][b], rows["v"]))
        layer["k_cmp"].append(fill(garbage["k_cmp"][b], k_cmp))
        layer["v_cmp"].append(fill(garbage["v_cmp"][b], v_cmp))
        layer["tail_k"].append(np.nan_to_num(tail(rows["raw_k"], sizes.kernel_size), nan=77.0))
        layer["tail_v"].append(np.nan_to_num(tail(rows["v"], sizes.kernel_size), nan=77.0))
    arrays = {name: jnp.asarray(np.stack(x)) for name, x in layer.items()}
    kv = CachedKV(**{name: arrays[name] for name in ("k", "v", "k_cmp", "v_cmp")})
    layers = (NSALayerCache(kv=kv, tail_k=arrays["tail_k"], tail_v=arrays["tail_v"]),)
    return Cache(layers=layers, length=jnp.asarray(text.lengths))


def garbage_of(rng: np.random.Generator, sizes: Geometry) -> dict[str, np.ndarray]:
    capacity = BLOCKS * sizes.block_size
    counts = {"k": capacity, "v": capacity, "k_cmp": sizes.entries(capacity), "v_cmp": sizes.entries(capacity)}
    return {name: 1e4 + rng.random((BATCH, HEADS, n, DIM)).astype(np.float32) for name, n in counts.items()}


def tree_of(text: Text, cache: Cache, parents: np.ndarray, sizes: Geometry) -> tuple[NSALayerTree, dict[str, Any]]:
    """Random nodes, with the entries that they complete: means over their own paths."""
    nodes = {name: np.stack([text.draw(NODES) for _ in range(BATCH)]) for name in ("k", "v", "raw_k")}
    done = jax.tree.map(np.asarray, _completions(queries_of(parents, text.lengths), sizes))
    layer = cache.layers[0]
    assert isinstance(layer, NSALayerCache)

    def compress(old: jax.Array, new: np.ndarray) -> jax.Array:
        rows = np.concatenate([np.asarray(old), new], axis=2)
        return jnp.asarray(np.stack([rows[b][:, done.rows[b]].mean(2) for b in range(BATCH)]))

    kv = TreeKV(
        k=jnp.asarray(nodes["k"]),
        v=jnp.asarray(nodes["v"]),
        k_cmp=compress(layer.tail_k, nodes["raw_k"]),
        v_cmp=compress(layer.tail_v, nodes["v"]),
        completions=jax.tree.map(jnp.asarray, done),
    )
    return NSALayerTree(kv=kv, raw_k=jnp.asarray(nodes["raw_k"])), nodes


def random_path(rng: np.random.Generator, parents: np.ndarray, room: int) -> tuple[np.ndarray, int]:
    """A path padded with anything to WIDTH, and a count of accepted nodes from none to all that fit."""
    deepest = int(ancestry(parents).sum(1).argmax())
    node = rng.choice([deepest, int(rng.integers(NODES))])
    path = oracle.tree_path(parents.tolist(), int(node))[:WIDTH]
    fits = min(len(path), room)
    count = int(rng.choice([0, fits, rng.integers(0, fits + 1)]))
    return np.concatenate([path, rng.integers(-1, NODES, WIDTH - len(path))]).astype(np.int32), count


def check(cache: Cache, text: Text, sizes: Geometry, before: Cache, message: str) -> None:
    """Committed rows and entries as from scratch, every other row as it was."""
    layer, old = cache.layers[0], before.layers[0]
    assert isinstance(layer, NSALayerCache) and isinstance(old, NSALayerCache)
    same_bits(cache.length, text.lengths, message)
    for b in range(BATCH):
        rows, entries = text.rows[b], text.entries(b, sizes)
        for name in ("k", "v"):
            same_bits(getattr(layer.kv, name)[b], fill(np.asarray(getattr(old.kv, name))[b], rows[name]), message)
        for name, want in zip(("k_cmp", "v_cmp"), entries, strict=True):
            got, stale = np.asarray(getattr(layer.kv, name))[b], np.asarray(getattr(old.kv, name))[b]
            count, had = want.shape[1], sizes.entries(int(before.length[b]))
            # The same mean, summed in another order.
            np.testing.assert_allclose(got[:, :count], want, rtol=0, atol=1e-6, err_msg=message)
            same_bits(got[:, :had], stale[:, :had], message)
            same_bits(got[:, count:], stale[:, count:], message)
        for name, source in (("tail_k", "raw_k"), ("tail_v", "v")):
            want = tail(rows[source], sizes.kernel_size)
            got = np.asarray(getattr(layer, name))[b]
            same_bits(np.where(np.isnan(want), 0, got), np.nan_to_num(want), message)


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_commits_of_random_paths_equal_a_prefill_of_the_accepted_tokens(name):
    """Rows at wrong offsets (faults 15, 16, 26), a lost or doubled entry, a tail of rejected nodes, clobbering."""
    sizes = GEOMETRIES[name]
    rng = np.random.default_rng(0)
    capacity = BLOCKS * sizes.block_size
    seen = {0: 0, WIDTH: 0}
    for trial, start in enumerate((0, 1, sizes.kernel_size - 1, sizes.block_size, capacity - 6)):
        text = Text(rng, [start, rng.integers(0, capacity - 5)])
        cache = cache_of(text, sizes, garbage_of(rng, sizes))
        for step in range(5):
            parents = np.stack([random_parents(rng, NODES, STYLES[(trial + step + b) % 5]) for b in range(BATCH)])
            tree, nodes = tree_of(text, cache, parents, sizes)
            paths, counts = zip(
                *(random_path(rng, parents[b], capacity - int(text.lengths[b])) for b in range(BATCH)), strict=True
            )
            before = cache
            cache = _commit(
                cache, (tree,), jnp.asarray(np.stack(paths)), jnp.asarray(counts, jnp.int32), geometry=sizes
            )
            for b in range(BATCH):
                text.append(b, nodes, paths[b][: counts[b]])
                seen[counts[b]] = seen.get(counts[b], 0) + 1
            check(cache, text, sizes, before, f"start {start}, step {step}, counts {counts}")
    assert all(seen[count] for count in (0, 1, WIDTH)), seen


def test_a_cache_fills_to_its_last_row_and_no_further():
    """A full cache: the slice that commit writes is clamped, and would land on committed rows (fault 9)."""
    sizes = GEOMETRIES["paper"]
    rng = np.random.default_rng(1)
    capacity = BLOCKS * sizes.block_size
    for missing in range(WIDTH + 1):
        text = Text(rng, [capacity - missing, capacity - WIDTH])
        cache = cache_of(text, sizes, garbage_of(rng, sizes))
        parents = np.broadcast_to(np.arange(NODES) - 1, (BATCH, NODES))
        tree, nodes = tree_of(text, cache, parents, sizes)
        path = np.broadcast_to(np.arange(WIDTH, dtype=np.int32), (BATCH, WIDTH))
        counts = np.array([missing, WIDTH], np.int32)
        after = _commit(cache, (tree,), jnp.asarray(path), jnp.asarray(counts), geometry=sizes)
        for b in range(BATCH):
            text.append(b, nodes, path[b][: counts[b]])
        check(after, text, sizes, cache, f"missing {missing}")


def test_a_batch_of_one_takes_its_own_path_through_commit():
    """The in-place update without a batch axis must write what the batched one writes."""
    sizes = GEOMETRIES["paper"]
    rng = np.random.default_rng(2)
    text = Text(rng, [17, 17])
    cache = cache_of(text, sizes, garbage_of(rng, sizes))
    parents = np.stack([random_parents(rng, NODES, "deep")] * BATCH)
    tree, _ = tree_of(text, cache, parents, sizes)
    path = np.stack([random_path(rng, parents[0], 99)[0]] * BATCH)
    both = _commit(cache, (tree,), jnp.asarray(path), jnp.array([2, 2], jnp.int32), geometry=sizes)
    for b in range(BATCH):
        first = functools.partial(jax.tree.map, lambda x, b=b: jnp.asarray(np.asarray(x)[b : b + 1]))
        one = _commit(first(cache), (first(tree),), jnp.asarray(path[:1]), jnp.array([2], jnp.int32), geometry=sizes)
        jax.tree.map(same_bits, one, first(both))


def test_dense_commit():
    """The dense cache of a drafter or a teacher."""
    rng = np.random.default_rng(3)
    text = Text(rng, [3, 60])
    layers = []
    for _ in range(2):
        rows = {name: 1e4 + rng.random((BATCH, HEADS, 64, DIM)).astype(np.float32) for name in ("k", "v")}
        filled = {name: np.stack([fill(rows[name][b], text.rows[b][name]) for b in range(BATCH)]) for name in rows}
        layers.append(DenseLayerCache(k=jnp.asarray(filled["k"]), v=jnp.asarray(filled["v"])))
    cache = Cache(layers=tuple(layers), length=jnp.asarray(text.lengths))
    trees = [{name: np.stack([text.draw(NODES) for _ in range(BATCH)]) for name in ("k", "v")} for _ in range(2)]
    path, count = np.array([[0, 2, 5, -1], [1, 3, 4, 6]], np.int32), np.array([2, 4], np.int32)
    after = _commit(
        cache,
        tuple(DenseLayerTree(k=jnp.asarray(t["k"]), v=jnp.asarray(t["v"])) for t in trees),
        jnp.asarray(path),
        jnp.asarray(count),
        geometry=None,
    )
    same_bits(after.length, [5, 64])
    for i, name in np.ndindex(2, 2):
        field = ("k", "v")[name]
        want = np.asarray(getattr(layers[i], field)).copy()
        for b in range(BATCH):
            start = int(text.lengths[b])
            want[b, :, start : start + count[b]] = trees[i][field][b][:, path[b, : count[b]]]
        same_bits(getattr(after.layers[i], field), want)


def test_init_cache_rounds_up_to_whole_blocks():
    """A cache that the ops refuse, or one that holds less than was asked for."""
    sparse = config(nsa())
    for asked, rows in ((1, 8), (8, 8), (9, 16)):
        cache = init_cache(sparse, asked, batch=3)
        layer = cache.layers[0]
        assert isinstance(layer, NSALayerCache)
        assert cache.capacity == rows and layer.kv.k.shape == layer.kv.v.shape == (3, 2, rows, 8)
        entries = oracle.num_visible(rows - 1, 4, 2)
        assert layer.kv.k_cmp.shape == layer.kv.v_cmp.shape == (3, 2, entries, 8)
        assert layer.tail_k.shape == layer.tail_v.shape == (3, 2, 4, 8)
        assert cache.length.tolist() == [0, 0, 0] and len(cache.layers) == 2
    dense = init_cache(config(None), 65, dtype=jnp.bfloat16)
    assert dense.capacity == 128 and dense.layers[0].k.dtype == jnp.bfloat16


@pytest.mark.parametrize(("capacity", "batch"), [(0, 1), (-5, 1), (8, 0)])
def test_an_empty_cache_is_refused(capacity, batch):
    with pytest.raises(ValueError, match=f"capacity and batch must be >= 1, got {capacity} and {batch}"):
        init_cache(config(None), capacity, batch=batch)


def test_geometry_is_the_configurations():
    """A field that does not reach the kernels, such as the rounded number of blocks."""
    fields = NSAConfig(
        kernel_size=8,
        kernel_stride=4,
        block_size=16,
        n_selected=5,
        round_n_pow2=True,
        init_blocks=2,
        local_blocks=3,
        window_keys=77,
    )
    assert dataclasses.astuple(geometry_of(fields)) == (8, 4, 16, 8, 2, 3, 77)
