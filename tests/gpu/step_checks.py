"""Checks of the kernels around attention against their definitions, over random shapes; free of pytest."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ssv_jax.models.cache import commit, geometry_of, init_cache
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.llama import PassOptions, build, random_params
from ssv_jax.pallas_kernels import Geometry, chain, completions
from ssv_jax.pallas_kernels.cache_append import RowMoves, append_rows
from ssv_jax.pallas_kernels.node_inputs import EntryRows, HeadShape, node_inputs
from ssv_jax.pallas_kernels.row_matmul import gated_matmul, matmul_parts, residual_norm, total
from tests.pallas_kernels.cases import STYLES, queries_of, random_parents
from tests.pallas_kernels.mosaic_inputs import relative_error

KERNEL = "mosaic_gpu"
REPEATS = 8
SEEDS = tuple(range(12))
NODES = (1, 5, 65)  # of trees
TOLERANCE = 5e-3  # bfloat16 rounds to 2^-9
SUM_TOLERANCE = 1e-4  # of float32 sums of thousands of products in the tensor cores


def _twice(run: Any, *arguments: Any) -> Any:
    """Results, in memory that was full of NaN before, the same bits every time."""
    compiled = jax.jit(run).lower(*arguments).compile()
    jax.block_until_ready(jnp.full((1 << 26,), jnp.nan, jnp.float32)).delete()
    first = jax.tree.map(np.asarray, compiled(*arguments))
    for _ in range(REPEATS):
        jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, compiled(*arguments)), first)
    return first


def check_products(seed: int) -> dict[str, float]:
    """Products, gated products and norms of one random shape; a row alone must give the bits that it gives here."""
    rng = np.random.default_rng(seed)

    def random(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), dtype)

    rows = int(rng.choice([1, 2, 5, 8, 9, 16, 33, 64, 65, 72, 129, 160]))
    inputs, columns = 64 * int(rng.choice([4, 9, 64, 224])), 8 * int(rng.integers(1, 800))
    x, weights = random(rows, inputs), (random(inputs, columns), random(inputs, int(rng.choice([96, 27]))))

    def products(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        return matmul_parts(x, weights, (jnp.float32,) * 2, implementation=KERNEL)

    got, errors = _twice(products, x, *weights), {}
    for name, ours, weight in zip(("product", "second"), got, weights, strict=True):
        want = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
        errors[name] = relative_error(total(jnp.asarray(ours), *want.shape, jnp.float32), want)
        assert errors[name] < SUM_TOLERANCE, f"{name}: {errors[name]:.2e} at {x.shape} by {weight.shape}"
    alone = _twice(products, x[rows // 2][None], *weights)
    for one, ours in zip(alone, got, strict=True):
        np.testing.assert_array_equal(one[:, 0], ours[:, rows // 2])

    hidden = 64 * int(rng.choice([1, 3, 24, 224]))
    weight = random(inputs, 2, hidden) / inputs**0.5
    gated = _twice(lambda x, weight: gated_matmul(x, weight, implementation=KERNEL), x, weight)[:rows]
    gate, up = (np.asarray(x, np.float64) @ np.asarray(weight[:, i], np.float64) for i in (0, 1))
    errors["gated"] = relative_error(gated, gate / (1 + np.exp(-gate)) * up)

    width = int(rng.choice([512, 576, 1024, 1992, 4096]))
    x, scale = random(rows, width), random(width)
    parts = random(int(rng.integers(1, 9)), rows + int(rng.integers(8)), width, dtype=jnp.float32)
    ours = _twice(lambda *a: residual_norm(*a, eps=1e-5, implementation=KERNEL), x, parts, scale)
    theirs = residual_norm(x, parts, scale, eps=1e-5, implementation="reference")
    errors |= {name: relative_error(a, b) for name, a, b in zip(("stream", "norm"), ours, theirs, strict=True)}
    assert max(errors.values()) < TOLERANCE, errors
    return errors


def check_nodes(seed: int) -> dict[str, float]:
    """What attention reads of its nodes, and the commit, of one random shape."""
    rng = np.random.default_rng(seed)
    batch, nodes = int(rng.choice([1, 1, 2])), int(rng.choice([1, 2, 5, 17, 65, 129]))
    size, kv_heads, group = int(rng.choice([8, 32])), int(rng.choice([1, 3, 8])), int(rng.choice([1, 3, 4, 8]))
    dim = int(rng.choice([64, 128]))
    gates = int(rng.choice([0, 3, 3 * kv_heads * group]))
    shape = HeadShape(batch=batch, nodes=nodes, kv_heads=kv_heads, group=group, dim=dim, gates=gates)
    parents = np.stack([random_parents(rng, nodes, STYLES[seed % len(STYLES)]) for _ in range(batch)])
    lengths = rng.integers(0, 5 * size, batch)
    sizes = Geometry(
        kernel_size=size,
        kernel_stride=size // 2,
        block_size=size,
        n_blocks=4,
        init_blocks=1,
        local_blocks=1,
        window=8,
    )
    done = completions(queries_of(parents, lengths), sizes)

    def random(*dims: int, dtype: Any = jnp.bfloat16) -> jax.Array:
        return jnp.asarray(rng.standard_normal(dims), dtype)

    def angles(count: int) -> tuple[jax.Array, jax.Array]:
        angle = rng.uniform(0, 6, (batch, count, dim // 2))
        return jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)

    cos, sin = angles(done.node.shape[1])
    tail = (batch, kv_heads, size, dim)
    weight = (random(kv_heads, size), random(kv_heads, size)) if seed % 3 else (None, None)
    entries = EntryRows(
        tail_k=random(*tail),
        tail_v=random(*tail),
        completions=done,
        cos=cos,
        sin=sin,
        weight_k=weight[0],
        weight_v=weight[1],
        position_k=random(kv_heads, size, dim) if seed % 2 else None,
        position_v=random(kv_heads, size, dim) if seed % 4 == 1 else None,
    )
    parts, rows = int(rng.integers(1, 7)), batch * nodes + int(rng.integers(8))
    qkv = random(parts, rows, shape.columns + 64, dtype=jnp.float32)
    raw = random(3, rows, gates, dtype=jnp.float32) if gates else None
    arguments = (qkv, raw, *angles(nodes), entries)
    bias = random(gates) if gates and seed % 2 else None
    named: dict[str, Any] = {"shape": shape, "dtype": jnp.bfloat16, "gate_bias": bias}
    ours = _twice(lambda *a: node_inputs(*a, **named, implementation=KERNEL), *arguments)
    theirs = jax.jit(lambda *a: node_inputs(*a, **named, implementation="reference"))(*arguments)
    exists, errors = np.asarray(done.node >= 0)[:, None, :, None], {}
    for name in ("q", "k", "v", "raw_k", "gates", "k_cmp", "v_cmp"):
        if getattr(theirs, name) is None:
            continue
        mine, want = (np.asarray(getattr(x, name), np.float64) for x in (ours, theirs))
        assert np.isfinite(mine).all(), name
        if name.endswith("cmp"):
            mine, want = np.where(exists, mine, 0), np.where(exists, want, 0)
        if want.any():
            errors[name] = relative_error(mine, want)
            assert errors[name] < TOLERANCE, f"{name}: {errors[name]:.2e} of {shape}"

    layers, width, capacity = int(rng.integers(1, 5)), int(rng.integers(1, 9)), 256
    old = tuple(random(batch, kv_heads, capacity, dim) for _ in range(6 * layers))
    new = tuple(random(batch, kv_heads, nodes, dim) for _ in old)
    target = np.stack([rng.permutation(capacity + 64)[:width] for _ in range(batch)])
    move = RowMoves(
        source=jnp.asarray(rng.integers(0, nodes, (batch, width)), jnp.int32), target=jnp.asarray(target, jnp.int32)
    )
    which = (0,) * len(old)
    got = _twice(lambda old, new: append_rows(old, new, (move,), which, implementation=KERNEL), old, new)
    want = append_rows(old, new, (move,), which, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, got, jax.tree.map(np.asarray, want))
    return errors


MODEL = LlamaConfig(
    vocab_size=256,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=3,
    num_heads=8,
    num_kv_heads=2,
    head_dim=128,
    # All blocks are selected: nearly equal scores must not decide what is compared.
    nsa=NSAConfig(kernel_size=32, kernel_stride=16, block_size=64, n_selected=16, window_keys=128),
)
MODEL_TOLERANCE = 0.05  # of the logits; bfloat16 rounds to 2^-9 at every step of every layer


def check_model(nodes: int) -> dict[str, float]:
    """Logits and caches of a model whose layers take all kernels, after a prompt, two trees and their commits."""
    params = {name: x * (4.0 if x.ndim > 1 else 1.0) for name, x in random_params(MODEL, 0).items()}
    graphdef, target = build(MODEL, params, jnp.bfloat16)
    rng = np.random.default_rng(nodes)
    assert MODEL.nsa is not None
    geometry = geometry_of(MODEL.nsa)
    parents = random_parents(rng, nodes, "random")
    path = [nodes - 1]
    while parents[path[0]] >= 0:
        path.insert(0, int(parents[path[0]]))
    route = jnp.asarray([path], jnp.int32)

    def one(name: str) -> list[np.ndarray]:
        cache, found = init_cache(MODEL, 1024, dtype=jnp.bfloat16), []

        def step(target: Any, cache: Any, tokens: jax.Array, queries: Any, path: jax.Array) -> Any:
            options = PassOptions(group=4, implementation=name)
            output = nnx.merge(graphdef, target)(tokens, queries, cache, options)
            count = jnp.full((1,), path.shape[1], jnp.int32)
            return output.logits, commit(cache, output.trees, path, count, geometry, name)

        run = jax.jit(step)
        draws = np.random.default_rng(0)
        for turn in range(4):
            first = turn == 0
            count = 300 if first else nodes
            tokens = jnp.asarray(draws.integers(0, MODEL.vocab_size, (1, count)), jnp.int32)
            queries = chain(cache.length, 300) if first else queries_of(parents[None], np.asarray(cache.length))
            logits, cache = run(target, cache, tokens, queries, jnp.arange(300)[None] if first else route)
            found.append(np.asarray(logits, np.float64))
        used = int(cache.length[0])
        for layer in cache.layers:
            found += [np.asarray(layer.kv.k[:, :, :used], np.float64), np.asarray(layer.tail_v, np.float64)]
            entries = geometry.entries(used)
            found += [np.asarray(x[:, :, :entries], np.float64) for x in (layer.kv.k_cmp, layer.kv.v_cmp)]
        return found

    errors = [relative_error(ours, theirs) for ours, theirs in zip(one(KERNEL), one("xla"), strict=True)]
    assert max(errors) < MODEL_TOLERANCE, [f"{error:.1e}" for error in errors]
    return {"largest": max(errors)}
