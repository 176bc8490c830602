"""Caches of committed tokens, and the commit that appends an accepted path to them.

Everything derives from one length per sequence. Nodes of a pass stay in `LayerTree`s until `commit` copies the
accepted ones; rows at and after the length are never read, and rows before it never change.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ..pallas_kernels import CachedKV, Geometry, TreeKV
from ..pallas_kernels.cache_append import RowMoves, append_rows
from ..pallas_kernels.dispatch import Implementation, or_portable
from .config import LlamaConfig, NSAConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLayerCache:
    """Committed rotated keys, and values, of one dense layer."""

    k: Float[Array, "B K L D"]
    v: Float[Array, "B K L D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NSALayerCache:
    """One NSA layer: what its branches read, and what its compressor will read next.

    Args:
      kv: keys, values and compressed entries.
      tail_k, tail_v: the last l committed tokens' compressor inputs, that of position p in row p modulo l (garbage
        in rows that no token has reached).
    """

    kv: CachedKV
    tail_k: Float[Array, "B K l D"]
    tail_v: Float[Array, "B K l D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseLayerTree:
    """Keys and values of the nodes of one pass in a dense layer."""

    k: Float[Array, "B K T D"]
    v: Float[Array, "B K T D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NSALayerTree:
    """The nodes of one pass in an NSA layer; `raw_k` is the compressor's key input."""

    kv: TreeKV
    raw_k: Float[Array, "B K T D"]


LayerCache = DenseLayerCache | NSALayerCache
LayerTree = DenseLayerTree | NSALayerTree


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Cache:
    """All layers' caches and the number of committed tokens per sequence."""

    layers: tuple[LayerCache, ...]
    length: Int[Array, " B"]

    @property
    def capacity(self) -> int:
        """Tokens that fit."""
        layer = self.layers[0]
        return (layer.kv.k if isinstance(layer, NSALayerCache) else layer.k).shape[2]


def geometry_of(nsa: NSAConfig) -> Geometry:
    """The static sizes that kernels take."""
    return Geometry(
        kernel_size=nsa.kernel_size,
        kernel_stride=nsa.kernel_stride,
        block_size=nsa.block_size,
        n_blocks=nsa.n_blocks,
        init_blocks=nsa.init_blocks,
        local_blocks=nsa.local_blocks,
        window=nsa.window_keys,
    )


def init_cache(config: LlamaConfig, capacity: int, *, batch: int = 1, dtype: DTypeLike = jnp.float32) -> Cache:
    """An empty cache for at least `capacity` tokens (rounded up to whole blocks).

    Args:
      config: the model.
      capacity: tokens per sequence.
      batch: sequences.
      dtype: of keys and values.

    Raises:
      ValueError: capacity or batch below 1.
    """
    if capacity < 1 or batch < 1:
        raise ValueError(f"cache capacity and batch must be >= 1, got {capacity} and {batch}")
    unit = config.nsa.block_size if config.nsa else 64
    rows = -(-capacity // unit) * unit

    def zeros(count: int) -> Float[Array, "B K n D"]:
        return jnp.zeros((batch, config.num_kv_heads, count, config.head_dim), dtype)

    def layer() -> LayerCache:
        if config.nsa is None:
            return DenseLayerCache(k=zeros(rows), v=zeros(rows))
        entries = max(geometry_of(config.nsa).entries(rows), 1)
        kv = CachedKV(k=zeros(rows), v=zeros(rows), k_cmp=zeros(entries), v_cmp=zeros(entries))
        return NSALayerCache(kv=kv, tail_k=zeros(config.nsa.kernel_size), tail_v=zeros(config.nsa.kernel_size))

    return Cache(layers=tuple(layer() for _ in range(config.num_layers)), length=jnp.zeros((batch,), jnp.int32))


def commit(
    cache: Cache,
    trees: tuple[LayerTree, ...],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    geometry: Geometry | None,
    implementation: Implementation = None,
) -> Cache:
    """Appends the first `count` nodes of `path` to every layer.

    Args:
      cache: before the pass.
      trees: the pass's nodes, by layer.
      path: node indices along one path of the tree, from a child of the committed prefix downwards; entries at
        and after `count` are ignored.
      count: accepted nodes per sequence; 0 leaves the sequence as it was.
      geometry: of NSA layers, None for dense models.
      implementation: of the copies, see `pallas_kernels.dispatch.run`; one that does not fit is no error.

    Returns:
      The cache with `length + count` tokens and the compressed entries that they complete.
    """
    source = jnp.maximum(path, 0)
    moves = [_token_moves(source, cache.length, count, cache.capacity)]
    old: list[Array] = []
    new: list[Array] = []
    which: list[int] = []
    for layer, tree in zip(cache.layers, trees, strict=True):
        if isinstance(layer, DenseLayerCache):
            assert isinstance(tree, DenseLayerTree)
            old, new, which = [*old, layer.k, layer.v], [*new, tree.k, tree.v], [*which, 0, 0]
            continue
        assert isinstance(tree, NSALayerTree)
        assert geometry is not None
        if len(moves) == 1:  # the same in every layer
            node_slot, entries = tree.kv.completions.node_slot, layer.kv.k_cmp.shape[2]
            moves.append(_entry_moves(node_slot, source, cache.length, count, geometry, entries))
            moves.append(_tail_moves(source, cache.length, count, geometry.kernel_size))
        kv = layer.kv
        old += [kv.k, kv.v, kv.k_cmp, kv.v_cmp, layer.tail_k, layer.tail_v]
        new += [tree.kv.k, tree.kv.v, tree.kv.k_cmp, tree.kv.v_cmp, tree.raw_k, tree.kv.v]
        which += [0, 0, 1, 1, 2, 2]
    arrays = iter(append_rows(old, new, moves, which, implementation=or_portable(implementation)))
    layers: list[LayerCache] = []
    for layer in cache.layers:
        if isinstance(layer, DenseLayerCache):
            layers.append(DenseLayerCache(k=next(arrays), v=next(arrays)))
        else:
            kv = CachedKV(k=next(arrays), v=next(arrays), k_cmp=next(arrays), v_cmp=next(arrays))
            layers.append(NSALayerCache(kv=kv, tail_k=next(arrays), tail_v=next(arrays)))
    return Cache(layers=tuple(layers), length=cache.length + count)


def _token_moves(path: Int[Array, "B P"], length: Int[Array, " B"], count: Int[Array, " B"], rows: int) -> RowMoves:
    """The accepted nodes, to the rows after the committed ones."""
    index = jnp.arange(path.shape[1])
    target = jnp.where(index < count[:, None], length[:, None] + index, rows)
    return RowMoves(source=path, target=target, ascending=True)


def _entry_moves(
    node_slot: Int[Array, "B T"],
    path: Int[Array, "B P"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    geometry: Geometry,
    rows: int,
) -> RowMoves:
    """The entries that the accepted nodes complete."""
    size, stride = geometry.kernel_size, geometry.kernel_stride
    last = path.shape[1] - 1
    first = geometry.num_entries(length)[:, None]
    completed = geometry.num_entries(length + count)[:, None] - first
    index = jnp.arange(last // stride + 1)
    # Entry c is completed by the path's node at position c * d + l - 1.
    at_path = (first + index) * stride + size - 1 - length[:, None]
    node = jnp.take_along_axis(path, jnp.clip(at_path, 0, last), axis=1)
    source = jnp.maximum(jnp.take_along_axis(node_slot, node, axis=1), 0)
    return RowMoves(source=source, target=jnp.where(index < completed, first + index, rows), ascending=True)


def _tail_moves(path: Int[Array, "B P"], length: Int[Array, " B"], count: Int[Array, " B"], size: int) -> RowMoves:
    """The last of the accepted nodes, at most as many as the tail has rows, to their places in the ring."""
    last = path.shape[1] - 1
    accepted = count[:, None] - min(last + 1, size) + jnp.arange(min(last + 1, size))
    source = jnp.take_along_axis(path, jnp.clip(accepted, 0, last), axis=1)
    return RowMoves(source=source, target=jnp.where(accepted >= 0, (length[:, None] + accepted) % size, size))
