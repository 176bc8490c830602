"""Workloads of the sparse-attention kernels: trees, selections of a stated overlap, rotating caches, and their bytes.

What does not depend on the device is numpy: a benchmark of hundreds of points must not compile its inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax.pallas_kernels import CachedKV, Geometry, MergedSchedule, Selection, TreeKV, TreeQueries, completions

PAPER = Geometry(
    kernel_size=32, kernel_stride=16, block_size=64, n_blocks=16, init_blocks=1, local_blocks=2, window=512
)
SPARE = 21  # rows of the cache after the committed ones: the tree's nodes complete compressed entries there
L2_BYTES = 60e6  # of an H200
CALLS = 32  # of a measurement: their selections differ, and together are more than the L2 cache holds
POISON = 3e4  # in rows that nothing may read; float16 holds it


def module(name: str) -> Any:
    """A module of the kernel package (the package's functions shadow the op packages as attributes)."""
    return importlib.import_module(f"ssv_jax.pallas_kernels.{name}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload.

    Args:
      nodes, group: T and C.
      context: capacity of the cache in tokens.
      overlap: share of a node's blocks that its neighbour has too.
      dim, heads, kv_heads, batch: D, G, K, B.
      lengths: committed tokens of each sequence; None for nearly all that fit.
      tree: "broad" (breadth-first, up to 8 deep), "near" (parents among the four nodes before), "chain" or "star".
      values: of the compressed entries: "normal", "levels" (few distinct ones) or "equal" (all the same).
      dtype: of queries, keys and values.
      geometry: static sizes.
    """

    nodes: int
    group: int = 1
    context: int = 65536
    overlap: float = 0.75
    dim: int = 128
    heads: int = 4
    kv_heads: int = 8
    batch: int = 1
    lengths: tuple[int, ...] | None = None
    tree: str = "broad"
    values: str = "normal"
    dtype: str = "bfloat16"
    geometry: Geometry = PAPER

    @property
    def committed(self) -> tuple[int, ...]:
        """Committed tokens of each sequence."""
        spare = SPARE if self.tree == "broad" else self.nodes + 3  # a cache has room for the longest path
        return (self.context - spare,) * self.batch if self.lengths is None else self.lengths

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return self.context // self.geometry.block_size

    @property
    def scale(self) -> float:
        """Of q . k."""
        return self.dim**-0.5

    @property
    def item(self) -> int:
        """Bytes of a number."""
        return jnp.dtype(self.dtype).itemsize

    @property
    def block_bytes(self) -> int:
        """Keys and values of one block of one KV head."""
        return 2 * self.geometry.block_size * self.dim * self.item

    @property
    def entry_bytes(self) -> int:
        """Compressed keys and values that are visible, of all KV heads and sequences."""
        visible = sum(map(self.geometry.entries, self.committed))
        return 2 * self.kv_heads * visible * self.dim * self.item


def unchecked(kind: Any, **arrays: Any) -> Any:
    """One of the library's dataclasses, of numpy arrays or shapes: its hints, which tests check, want JAX's arrays."""
    found = object.__new__(kind)
    for name, value in arrays.items():
        object.__setattr__(found, name, value)
    return found


def _parents(case: Case, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Parent and depth of each node."""
    parent, depth = [-1], [0]
    for node in range(1, case.nodes):
        if case.tree == "broad":
            level = min(1 + (node - 1) * 8 // case.nodes, depth[-1] + 1)
            parent.append(int(rng.choice([other for other in range(node) if depth[other] == level - 1])))
        else:
            near = int(rng.integers(max(0, node - 4), node))
            parent.append({"chain": node - 1, "star": 0, "near": near}[case.tree])
        depth.append(depth[parent[-1]] + 1)
    return parent, depth


def queries_of(case: Case, rng: np.random.Generator) -> TreeQueries:
    """Where the nodes of a random tree stand, as numpy arrays."""
    shape = (case.batch, case.nodes)
    parent, position = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    ancestor = np.zeros((*shape, case.nodes), bool)
    for b, length in enumerate(case.committed):
        parents, depths = _parents(case, rng)
        parent[b], position[b] = parents, length + np.array(depths)
        for node, above in enumerate(parents):
            ancestor[b, node, node] = True
            if above >= 0:
                ancestor[b, node] |= ancestor[b, above]
    length = np.array(case.committed, np.int32)
    return unchecked(TreeQueries, length=length, position=position, ancestor=ancestor, parent=parent)


def selections_of(case: Case, position: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Selections of `count` calls, [count, K, T, S]: forced blocks, and free ones of which neighbours share some.

    So many that |I & I'| / S of adjacent nodes is the case's overlap, as far as forced blocks allow.
    """
    geometry = case.geometry
    slots, lists = geometry.selection_width(case.context), count * case.kv_heads
    last = case.blocks  # stands for an empty slot while sorting
    found = np.full((lists, case.nodes, slots), last, np.int32)
    own = position // geometry.block_size
    low, high = geometry.init_blocks, int(own[0]) - geometry.local_blocks + 1  # free blocks of every node
    pool = max(0, high - low)
    width = min(pool, 128)  # candidates of a node, evenly spaced from a random one on: fast, and spread over the cache
    free = np.zeros((lists, 0), np.int32)
    for node in range(case.nodes):
        first = np.arange(geometry.init_blocks)
        local = np.arange(own[node] - geometry.local_blocks + 1, own[node] + 1)
        forced = np.unique(np.concatenate([first[first <= own[node]], local[local >= 0]]))
        want = min(slots - len(forced), pool)
        common = case.overlap * slots  # on average: 14 or 15 of 16 for an overlap of 0.9
        common = int((node + 1) * common) - int(node * common)
        keep = max(0, min(free.shape[1], want, common - len(forced)))
        keep = max(keep, want - (pool - free.shape[1]))  # a short context has too few others
        kept = np.take_along_axis(free, rng.random(free.shape).argsort(axis=1)[:, :keep], axis=1)
        if want > keep:
            start, step = (rng.integers(a, b, (lists, 1)) for a, b in ((0, pool), (1, pool // width + 1)))
            candidates = (low + (start + step * np.arange(width)) % pool).astype(np.int32)
            draw = rng.random(candidates.shape, np.float32)
            draw[(candidates[:, :, None] == free[:, None, :]).any(axis=-1)] = 2.0
            first = np.argpartition(draw, want - keep - 1, axis=1)[:, : want - keep]
            kept = np.concatenate([kept, np.take_along_axis(candidates, first, axis=1)], axis=1)
        free = kept
        found[:, node, : len(forced)] = forced
        found[:, node, len(forced) : len(forced) + want] = free
    found.sort(axis=2)
    found[found == last] = -1
    return found.reshape(count, case.kv_heads, case.nodes, slots)


def merged(blocks: np.ndarray, group: int, num_blocks: int) -> tuple[np.ndarray, np.ndarray]:
    """Visit lists and owners of selections [..., T, S] as `merge` makes them, without a device."""
    *lead, nodes, slots = blocks.shape
    parts = -(-nodes // group)
    padded = np.full((*lead, parts * group, slots), -1, np.int32)
    padded[..., :nodes, :] = blocks
    flat = padded.reshape(-1, group * slots)
    flat = np.where(flat < 0, num_blocks, flat)
    order = flat.argsort(axis=1, kind="stable")
    ordered = np.take_along_axis(flat, order, axis=1)
    new = np.ones_like(ordered, bool)
    new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    row, column = np.nonzero(ordered < num_blocks)
    slot = (np.cumsum(new, axis=1) - 1)[row, column]
    width = min(group * slots, num_blocks)
    lists = np.full((len(flat), width), -1, np.int32)
    owners = np.zeros((len(flat), width), np.uint32)
    lists[row, slot] = ordered[row, column]
    np.bitwise_or.at(owners, (row, slot), np.uint32(1) << (order[row, column] // slots).astype(np.uint32))
    shape = (*lead, parts, width)
    return lists.reshape(shape), owners.view(np.int32).reshape(shape)


def selected_bytes(case: Case, blocks: np.ndarray, lists: np.ndarray) -> tuple[float, float]:
    """(distinct, loaded) bytes of keys and values of a call, on average.

    Distinct: blocks of a KV head that some node selected or has in its window. Loaded: those in visit lists.
    """
    count, heads = blocks.shape[:2]
    size, length = case.geometry.block_size, case.committed[0]
    seen = np.zeros((count * heads, case.blocks + 1), bool)
    flat = blocks.reshape(count * heads, -1)
    seen[np.arange(len(flat))[:, None], flat] = True  # -1 marks the last column
    first = max(0, length - case.geometry.window + 1) // size
    seen[:, first : length // size + 1] = True
    distinct = seen[:, : case.blocks].sum() / count
    loaded = (lists >= 0).sum() / count
    return float(distinct * case.block_bytes), float(loaded * case.block_bytes)


def normal(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Normal numbers of a dtype that numpy alone does not know."""
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def _host() -> Any:
    """The CPU as a device, unless the environment leaves it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@functools.lru_cache(maxsize=8)
def _completed(geometry: Geometry) -> Any:
    return jax.jit(functools.partial(completions, geometry=geometry))


def tree_of(case: Case, queries: TreeQueries, rng: np.random.Generator) -> TreeKV:
    """The nodes' own keys and values; entries that nobody completes are poison."""
    with jax.default_device(_host()):  # no kernel beside a measurement
        done = jax.tree.map(np.asarray, _completed(case.geometry)(queries))
    rows = (case.batch, case.kv_heads, case.nodes, case.dim)
    used = (done.node >= 0)[:, None, :, None]
    k, v, k_cmp, v_cmp = (normal(rows, case.dtype, rng) for _ in range(4))
    poison = np.asarray(POISON, k.dtype)
    k_cmp, v_cmp = (np.where(used, x, poison) for x in (k_cmp, v_cmp))
    return unchecked(TreeKV, k=k, v=v, k_cmp=k_cmp, v_cmp=v_cmp, completions=done)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """Inputs of a case but the caches, on the device, and the bytes of a call.

    Args:
      q: [B, T, K, G, D] queries.
      gates: of the three branches.
      tree, queries: of the pass.
      selections: one for each call.
      distinct_bytes, loaded_bytes: see `selected_bytes`.
    """

    q: Any
    gates: Any
    tree: TreeKV
    queries: TreeQueries
    selections: list[Selection]
    distinct_bytes: float
    loaded_bytes: float


@functools.lru_cache(maxsize=64)
def _chosen(case: Case, count: int) -> tuple[TreeQueries, np.ndarray]:
    """A tree and selections, the same for groups and head dims."""
    rng = np.random.default_rng(case.nodes)
    queries = queries_of(case, rng)
    return queries, selections_of(case, np.asarray(queries.position[0]), count, rng)


@functools.lru_cache(maxsize=64)
def _drawn(case: Case, count: int) -> tuple[Any, ...]:
    """What the groups of a case share."""
    queries, chosen = _chosen(dataclasses.replace(case, dim=64), count)
    rng = np.random.default_rng(case.dim)
    shape = (case.batch, case.nodes, case.kv_heads, case.heads)
    q = normal((*shape, case.dim), case.dtype, rng)
    gates = rng.uniform(0.1, 1.0, (*shape, 3)).astype(np.float32)
    return q, gates, tree_of(case, queries, rng), queries, chosen


def point(case: Case, count: int) -> Point:
    """Random inputs of a case of one sequence, for `count` calls."""
    q, gates, tree, queries, chosen = _drawn(dataclasses.replace(case, group=1), count)
    lists, owners = merged(chosen, case.group, case.blocks)
    q, gates, tree, queries, blocks, visit, own = jax.device_put(
        (q, gates, tree, queries, list(chosen[:, None]), list(lists[:, None]), list(owners[:, None]))
    )
    distinct, loaded = selected_bytes(case, chosen, lists)
    return Point(
        q=q,
        gates=gates,
        tree=tree,
        queries=queries,
        selections=[
            Selection(blocks=b, schedule=MergedSchedule(blocks=m, owners=o, group=case.group))
            for b, m, o in zip(blocks, visit, own, strict=True)
        ],
        distinct_bytes=distinct,
        loaded_bytes=loaded,
    )


@functools.lru_cache(maxsize=16)
def _filler(case: Case, entries_only: bool, poison: bool) -> Callable[[jax.Array], list[jax.Array]]:
    geometry, dtype = case.geometry, jnp.dtype(case.dtype)
    entries = max(geometry.entries(case.context), 1)

    def draw(key: jax.Array, rows: int, valid: jax.Array, compressed: bool) -> jax.Array:
        own, which = jax.random.split(key)
        x = jax.random.normal(own, (case.batch, case.kv_heads, rows, case.dim), dtype)
        if compressed and case.values == "levels":
            x = jnp.round(x[:, :, :4])[:, :, jax.random.randint(which, (rows,), 0, 4)]
        if compressed and case.values == "equal":
            x = jnp.broadcast_to(x[:, :, :1], x.shape)
        if not poison:
            return x
        return jnp.where((jnp.arange(rows) < valid[:, None])[:, None, :, None], x, jnp.asarray(POISON, dtype))

    @jax.jit
    def make(key: jax.Array) -> list[jax.Array]:
        length = jnp.asarray(case.committed, jnp.int32)
        k, v, k_cmp, v_cmp = jax.random.split(key, 4)
        short = [draw(x, entries, geometry.num_entries(length), True) for x in (k_cmp, v_cmp)]
        return short if entries_only else [draw(x, case.context, length, False) for x in (k, v)] + short

    return make


def caches(case: Case, count: int, *, entries_only: bool = False, poison: bool = True, seed: int = 0) -> list[CachedKV]:
    """Random caches of a case's shape; rows after the length are poison, or as random as the others.

    With `entries_only` keys and values are a shared block of zeros, for ops that read nothing of them.
    """
    make, found = _filler(case, entries_only, poison), []
    blank = jnp.zeros((case.batch, case.kv_heads, case.context, case.dim), case.dtype) if entries_only else None
    for index in range(count):
        arrays = make(jax.random.key(seed * 1000 + index))
        k, v = (blank, blank) if entries_only else arrays[:2]
        found.append(CachedKV(k=k, v=v, k_cmp=arrays[-2], v_cmp=arrays[-1]))  # type: ignore[arg-type]
    return found


def agreement(blocks: np.ndarray) -> list[float]:
    """For each of [N, B, K, T, S] selections: |I & I'| / min(|I|, |I'|) of consecutive nodes, on average."""
    one, other = blocks[..., 1:, :], blocks[..., :-1, :]
    shared = ((one[..., :, None] == other[..., None, :]) & (one[..., :, None] >= 0)).any(-1).sum(-1)
    size = np.minimum((one >= 0).sum(-1), (other >= 0).sum(-1))
    ratio = np.where(size == 0, 1.0, shared / np.maximum(size, 1))
    return [float(x) for x in ratio.reshape(len(blocks), -1).mean(axis=1)] if ratio.size else []
