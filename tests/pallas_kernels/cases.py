"""Named workloads of the op tests: geometries, random trees over random caches, and their float64 answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax.pallas_kernels import CachedKV, Geometry, TreeKV, TreeQueries, completions
from tests.golden import numpy_nsa as oracle

GEOMETRIES = {
    # Overlapping entries, four to a block: the shape of the paper's 32/16/64.
    "paper": Geometry(
        kernel_size=4, kernel_stride=2, block_size=8, n_blocks=4, init_blocks=1, local_blocks=2, window=6
    ),
    # Entries as long as a block, so that half of them touch two blocks.
    "straddling": Geometry(
        kernel_size=8, kernel_stride=4, block_size=8, n_blocks=3, init_blocks=1, local_blocks=1, window=5
    ),
    "wide": Geometry(
        kernel_size=8, kernel_stride=4, block_size=16, n_blocks=2, init_blocks=0, local_blocks=1, window=11
    ),
    # l = d = l': one entry per block. A window of one key, shorter than every tree.
    "equal": Geometry(
        kernel_size=4, kernel_stride=4, block_size=4, n_blocks=3, init_blocks=0, local_blocks=1, window=1
    ),
    "unit_stride": Geometry(
        kernel_size=3, kernel_stride=1, block_size=4, n_blocks=5, init_blocks=2, local_blocks=2, window=9
    ),
}

# float32: both sides round differently ordered sums of at most ~100 terms of size 1 (a few eps, 1.2e-7).
# bfloat16: inputs are equal and products exact in float32, but the portable path rounds probabilities to
# bfloat16 (half an ulp, 2^-9) before weighing values of size up to 4, and sums of such errors partly add.
TOLERANCE = {"float32": 3e-6, "bfloat16": 2e-2}
# Block masses are sums of probabilities, at most G * l/d; two that are closer than this may swap in float32.
SCORE_GAP = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Static sizes of a family of passes; lengths and trees vary inside it without recompiling."""

    geometry: str
    nodes: int
    kv_heads: int
    group: int
    dim: int
    blocks: int
    batch: int = 1
    dtype: str = "float32"

    @property
    def sizes(self) -> Geometry:
        return GEOMETRIES[self.geometry]

    @property
    def capacity(self) -> int:
        return self.blocks * self.sizes.block_size

    @property
    def scale(self) -> float:
        return self.dim**-0.5

    @property
    def tolerance(self) -> float:
        return TOLERANCE[self.dtype]

    def __str__(self) -> str:
        return f"{self.geometry}-T{self.nodes}K{self.kv_heads}G{self.group}D{self.dim}B{self.batch}{self.dtype}"


CASES = (
    Case(geometry="paper", nodes=13, kv_heads=2, group=3, dim=8, blocks=9),
    Case(geometry="straddling", nodes=5, kv_heads=1, group=4, dim=16, blocks=7, batch=2),
    Case(geometry="wide", nodes=7, kv_heads=3, group=1, dim=8, blocks=5, batch=2),
    Case(geometry="equal", nodes=9, kv_heads=2, group=4, dim=8, blocks=13),
    Case(geometry="unit_stride", nodes=1, kv_heads=1, group=1, dim=16, blocks=10, batch=2),
)
BFLOAT16 = (
    Case(geometry="paper", nodes=6, kv_heads=2, group=3, dim=16, blocks=9, batch=2, dtype="bfloat16"),
    Case(geometry="equal", nodes=3, kv_heads=1, group=4, dim=8, blocks=11, dtype="bfloat16"),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """The arguments of one call of the ops."""

    q: jax.Array
    cached: CachedKV
    tree: TreeKV
    queries: TreeQueries
    gates: jax.Array


# --- trees --------------------------------------------------------------------------------------------------


def random_parents(rng: np.random.Generator, nodes: int, style: str) -> np.ndarray:
    """Parents of one tree, each before its children; -1 for children of the committed prefix.

    `forest` has several of those, as a drafter without a root node, or a tree with padding, would have.
    """
    index = np.arange(nodes)
    if style == "chain":
        return index - 1
    if style == "star":
        return np.where(index == 0, -1, 0)
    if style == "deep":  # mostly a path, with some short side branches
        return np.array([-1 if i == 0 else max(0, i - 1 - int(rng.random() < 0.3) * rng.integers(0, 3)) for i in index])
    if style == "random":
        return np.array([-1 if i == 0 else rng.integers(0, i) for i in index])
    if style == "forest":
        return np.array([rng.integers(-1, i) for i in index])
    raise ValueError(style)


STYLES = ("chain", "random", "deep", "star", "forest")


def ancestry(parents: np.ndarray) -> np.ndarray:
    """[T, T]: j is i or an ancestor of i, by walking up."""
    above = np.zeros((len(parents),) * 2, bool)
    for node in range(len(parents)):
        above[node, oracle.tree_path(parents.tolist(), node)] = True
    return above


def queries_of(parents: np.ndarray, lengths: np.ndarray) -> TreeQueries:
    """TreeQueries of a batch of trees, [B, T] parents."""
    above = np.stack([ancestry(p) for p in parents])
    position = lengths[:, None] + above.sum(-1) - 1
    return TreeQueries(
        length=jnp.asarray(lengths.astype(np.int32)),
        position=jnp.asarray(position.astype(np.int32)),
        ancestor=jnp.asarray(above),
        parent=jnp.asarray(parents.astype(np.int32)),
    )


# The same program, a third faster to compile: LLVM's own optimisations are not what is tested.
QUICK = {"xla_backend_optimization_level": 0}
_completions = jax.jit(completions, static_argnums=1, compiler_options=QUICK)


def jit(function: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """Compiles: the reference quickly, everything else as users do."""
    return jax.jit(function, compiler_options=QUICK if implementation == "reference" else None)


def interesting_lengths(sizes: Geometry, capacity: int, nodes: int) -> list[int]:
    """Nothing, one token, around every kind of boundary, and as full as the tree's depth allows."""
    marks = {0, sizes.kernel_size, sizes.kernel_stride, sizes.block_size, sizes.window, 3 * sizes.block_size}
    marks |= {sizes.n_blocks * sizes.block_size, 2 * sizes.block_size + sizes.kernel_size}
    wanted = {m + step for m in marks for step in (-1, 0, 1)} | {capacity - nodes - 1, capacity - nodes}
    return sorted(m for m in wanted if 0 <= m <= capacity - nodes)


def make_pass(case: Case, lengths: Any, parents: np.ndarray, seed: int, *, poison: float = 0.0) -> Pass:
    """A random pass. Rows and entries that nothing may read are `poison`; the rest does not depend on it."""
    sizes = case.sizes
    lengths = np.broadcast_to(np.asarray(lengths), (case.batch,)).copy()
    rng = np.random.default_rng(seed)
    queries = queries_of(parents, lengths)
    done = _completions(queries, sizes)
    entries = max(sizes.entries(case.capacity), 1)

    def draw(*shape: int, gain: float = 1.0) -> np.ndarray:
        return gain * rng.standard_normal(shape)

    def store(x: np.ndarray) -> jax.Array:
        return jnp.asarray(x.astype(np.float32).astype(jnp.dtype(case.dtype)))

    def spoil(x: np.ndarray, counts: Any) -> jax.Array:
        for b, count in enumerate(counts):
            sign = np.where(rng.random(x[b, :, count:].shape) < 0.5, -1, 1)
            x[b, :, count:] = poison * sign
        return store(x)

    b, k, t, d = case.batch, case.kv_heads, case.nodes, case.dim
    cached_counts = [sizes.entries(int(n)) for n in lengths]
    completed_counts = np.asarray(done.node >= 0).sum(1)
    return Pass(
        q=store(draw(b, t, k, case.group, d, gain=2.0)),
        cached=CachedKV(
            k=spoil(draw(b, k, case.capacity, d), lengths),
            v=spoil(draw(b, k, case.capacity, d), lengths),
            k_cmp=spoil(draw(b, k, entries, d), cached_counts),
            v_cmp=spoil(draw(b, k, entries, d), cached_counts),
        ),
        tree=TreeKV(
            k=store(draw(b, k, t, d)),
            v=store(draw(b, k, t, d)),
            k_cmp=spoil(draw(b, k, done.node.shape[1], d), completed_counts),
            v_cmp=spoil(draw(b, k, done.node.shape[1], d), completed_counts),
            completions=done,
        ),
        queries=queries,
        gates=jnp.asarray(rng.random((b, t, k, case.group, 3)).astype(np.float32)),
    )


def sweep(case: Case, *, count: int = 12, poison: float = 1e4, seed: int = 0) -> list[Pass]:
    """Passes of one case over the interesting lengths (ragged where B > 1) and all styles of trees."""
    rng = np.random.default_rng(seed)
    lengths = interesting_lengths(case.sizes, case.capacity, case.nodes)
    # The extremes always; the others in an order that differs from case to case.
    middle = rng.permutation(lengths[1:-1]).tolist()
    chosen = [lengths[0], lengths[-1], *middle][: max(count, 2)]
    out = []
    for i, length in enumerate(chosen):
        ragged = [length, *rng.choice(lengths, case.batch - 1).tolist()]
        parents = np.stack([random_parents(rng, case.nodes, STYLES[(i + b) % len(STYLES)]) for b in range(case.batch)])
        out.append(make_pass(case, ragged, parents, seed + i, poison=poison))
    return out


# --- float64 answers ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What the oracle says about every node: branch outputs [B, T, K, G, D], blocks, and whether they are clear."""

    cmp: np.ndarray
    slc: np.ndarray
    win: np.ndarray
    dense: np.ndarray
    blocks: np.ndarray  # B K T S, ascending, -1 padded
    decided: np.ndarray  # B K T: no free block was within SCORE_GAP of the selection's edge


def float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def settings(sizes: Geometry) -> dict[str, Any]:
    """The oracle's name for a geometry."""
    return oracle.nsa_settings(
        {
            "kernel_size": sizes.kernel_size,
            "kernel_stride": sizes.kernel_stride,
            "block_size": sizes.block_size,
            "n_selected": sizes.n_blocks,
            "init_blocks": sizes.init_blocks,
            "local_blocks": sizes.local_blocks,
            "window_keys": sizes.window,
        }
    )


def decided(scores: np.ndarray, ids: list[int], position: int, nsa: dict[str, Any], gap: float = SCORE_GAP) -> bool:
    """Whether float32 must find the same blocks: the worst chosen free block beats the best rejected one clearly.

    A tie of two masses that are exactly 0 is clear too: the lower index wins.
    """
    block = nsa["block_size"]
    forced = oracle.forced_blocks(position, block, nsa["init_blocks"], nsa["local_blocks"])
    chosen = [scores[j] for j in ids if j not in forced]
    rejected = [scores[j] for j in range(position // block + 1) if j not in ids]
    if not chosen or not rejected:
        return True
    return min(chosen) - max(rejected) > gap or (min(chosen) == 0.0 and max(rejected) == 0.0)


def node_keys(given: Pass, sizes: Geometry, b: int, node: int) -> tuple[np.ndarray, ...]:
    """Everything that a node may see, in order: keys, values [X, K, D], entries and their values [N, K, D]."""
    length = int(np.asarray(given.queries.length)[b])
    path = np.flatnonzero(np.asarray(given.queries.ancestor)[b, node])
    slots = [s for s in np.asarray(given.tree.completions.node_slot)[b, path] if s >= 0]
    count = sizes.entries(length)

    def join(old: jax.Array, keep: int, new: jax.Array, picked: Any) -> np.ndarray:
        rows = [float64(old)[b, :, :keep], float64(new)[b][:, np.asarray(picked, int)]]
        return np.concatenate(rows, axis=1).swapaxes(0, 1)

    return (
        join(given.cached.k, length, given.tree.k, path),
        join(given.cached.v, length, given.tree.v, path),
        join(given.cached.k_cmp, count, given.tree.k_cmp, slots),
        join(given.cached.v_cmp, count, given.tree.v_cmp, slots),
    )


def answer(given: Pass, sizes: Geometry, capacity: int) -> Answer:
    """The oracle's result, node by node, each from its own path alone."""
    nsa = settings(sizes)
    batch, nodes, kv_heads, _, _ = given.q.shape
    q = float64(given.q)
    position = np.asarray(given.queries.position)
    out = {name: np.zeros(q.shape) for name in ("cmp", "slc", "win", "dense")}
    blocks = np.full((batch, kv_heads, nodes, sizes.selection_width(capacity)), -1)
    clear = np.zeros((batch, kv_heads, nodes), bool)
    for b in range(batch):
        for node in range(nodes):
            t = int(position[b, node])
            k, v, ck, cv = node_keys(given, sizes, b, node)
            visible = oracle.num_visible(t, sizes.kernel_size, sizes.kernel_stride)
            assert len(k) == t + 1 and len(ck) == visible
            out["cmp"][b, node], p, _ = oracle.compressed_attention(q[b, node], ck, cv, visible)
            mass = oracle.block_importance(
                p, t // sizes.block_size + 1, sizes.kernel_size, sizes.kernel_stride, sizes.block_size
            )
            ids = [oracle.select_blocks(mass[h], t, nsa) for h in range(kv_heads)]
            for h in range(kv_heads):
                blocks[b, h, node, : len(ids[h])] = ids[h]
                clear[b, h, node] = decided(mass[h], ids[h], t, nsa)
            out["slc"][b, node], _ = oracle.selected_attention(q[b, node], k, v, ids, t, sizes.block_size)
            out["win"][b, node], _ = oracle.window_attention(q[b, node], k, v, t, sizes.window)
            out["dense"][b, node], _, _ = oracle.attend(q[b, node], k, v)
    return Answer(**out, blocks=blocks, decided=clear)


def on_host(function: Callable[..., Any], *arguments: Any) -> Any:
    """The function's results as numpy arrays, whose slices cost no compilation."""
    return jax.tree.map(np.asarray, function(*arguments))


def close(actual: Any, expected: Any, tolerance: float, message: str = "") -> None:
    """Absolute difference within tolerance; values are averages of unit normals, so this is relative to 1."""
    np.testing.assert_allclose(
        np.asarray(actual, np.float64), np.asarray(expected, np.float64), rtol=0, atol=tolerance, err_msg=message
    )


def same_bits(actual: Any, expected: Any, message: str = "") -> None:
    """Equal to the last bit, everywhere."""
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected), err_msg=message)


# --- selections ---------------------------------------------------------------------------------------------


def random_blocks(rng: np.random.Generator, shape: tuple[int, int, int], width: int, num_blocks: int) -> np.ndarray:
    """Arbitrary selections [B, K, T, S], ascending and -1 padded: empty ones, full ones, futures included."""
    out = np.full((*shape, width), -1, np.int32)
    for index in np.ndindex(shape):
        count = rng.choice([0, width, rng.integers(0, width + 1)])
        out[index][:count] = np.sort(rng.choice(num_blocks, count, replace=False))
    return out


def selected_rows(given: Pass, sizes: Geometry, blocks: np.ndarray) -> np.ndarray:
    """Selected branch [B, T, K, G, D] under any selection; 0 where a node's blocks hold none of its tokens."""
    q = float64(given.q)
    out = np.zeros(q.shape)
    for b, node in np.ndindex(q.shape[:2]):
        k, v, _, _ = node_keys(given, sizes, b, node)
        block = np.arange(len(k)) // sizes.block_size
        for h in range(q.shape[2]):
            keys = np.isin(block, blocks[b, h, node])
            if keys.any():
                one = slice(h, h + 1)
                out[b, node, h] = oracle.attend(q[b, node, one], k[keys, one], v[keys, one])[0][0]
    return out
