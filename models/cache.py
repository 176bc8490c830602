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
      tail_k, tail_v: the last l committed tokens' compressor inputs, at positions length - l ... length - 1
        (garbage where negative).
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


def _append(
    old: Float[Array, "K L D"],
    new: Float[Array, "K X D"],
    source: Int[Array, " P"],
    start: Int[Array, ""],
    count: Int[Array, ""],
) -> Float[Array, "K L D"]:
    """Writes new[:, source[i]] to row start + i for i < count; every other row keeps its bits."""
    # Two rows at least: XLA makes a read, a choice and an update of a scatter of one row, on GPUs two kernels for one.
    source = jnp.pad(source, (0, max(0, 2 - source.shape[0])))
    rows, index = old.shape[1], jnp.arange(source.shape[0])
    # Rows that are not written get indices of their own beyond the end, so that all are distinct and ascending.
    target = jnp.where(index < count, start + index, rows + index)
    picked = jnp.take(new, source, axis=1, mode="clip").astype(old.dtype)
    return old.at[:, target].set(picked, mode="drop", indices_are_sorted=True, unique_indices=True)


def _per_sequence(function, *arguments: Array) -> Array:
    """vmap over the batch axis; without one where the batch is 1, so that updates stay in place."""
    if arguments[0].shape[0] == 1:
        return function(*(x[0] for x in arguments))[None]
    return jax.vmap(function)(*arguments)


def commit(
    cache: Cache,
    trees: tuple[LayerTree, ...],
    path: Int[Array, "B P"],
    count: Int[Array, " B"],
    geometry: Geometry | None,
) -> Cache:
    """Appends the first `count` nodes of `path` to every layer.

    Args:
      cache: before the pass.
      trees: the pass's nodes, by layer.
      path: node indices along one path of the tree, from a child of the committed prefix downwards; entries at
        and after `count` are ignored.
      count: accepted nodes per sequence; 0 leaves the sequence as it was.
      geometry: of NSA layers, None for dense models.

    Returns:
      The cache with `length + count` tokens and the compressed entries that they complete.
    """
    source = jnp.maximum(path, 0)
    length = cache.length

    def append_tokens(old: Array, new: Array) -> Array:
        return _per_sequence(_append, old, new, source, length, count)

    moves: _EntryMoves | None = None
    layers: list[LayerCache] = []
    for layer, tree in zip(cache.layers, trees, strict=True):
        if isinstance(layer, DenseLayerCache):
            assert isinstance(tree, DenseLayerTree)
            layers.append(DenseLayerCache(k=append_tokens(layer.k, tree.k), v=append_tokens(layer.v, tree.v)))
            continue
        assert isinstance(tree, NSALayerTree)
        assert geometry is not None
        if moves is None:  # the same in every layer
            moves = _entry_moves(tree.kv.completions.node_slot, source, length, count, geometry)
        kv = CachedKV(
            k=append_tokens(layer.kv.k, tree.kv.k),
            v=append_tokens(layer.kv.v, tree.kv.v),
            k_cmp=moves.append_entries(layer.kv.k_cmp, tree.kv.k_cmp),
            v_cmp=moves.append_entries(layer.kv.v_cmp, tree.kv.v_cmp),
        )
        tail_k, tail_v = moves.new_tail(layer.tail_k, tree.raw_k), moves.new_tail(layer.tail_v, tree.kv.v)
        layers.append(NSALayerCache(kv=kv, tail_k=tail_k, tail_v=tail_v))
    return Cache(layers=tuple(layers), length=length + count)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _EntryMoves:
    """Where the compressed entries and the tail of a commit come from.

    Args:
      source: slots of the completed entries, in order.
      first, completed: index of the first, and their number.
      tail: for each row of the new tail, its row among the old tail and then the nodes.
    """

    source: Int[Array, "B S"]
    first: Int[Array, " B"]
    completed: Int[Array, " B"]
    tail: Int[Array, "B l"]

    def append_entries(self, old: Array, new: Array) -> Array:
        return _per_sequence(_append, old, new, self.source, self.first, self.completed)

    def new_tail(self, old: Array, new: Array) -> Array:
        rows = jnp.concatenate([old, new.astype(old.dtype)], axis=2)
        return jnp.take_along_axis(rows, self.tail[:, None, :, None], axis=2)


def _entry_moves(
    node_slot: Int[Array, "B T"],
    path: Int[Array, "B P"],
    length: Int[Array, " B"],
    count: Int[Array, " B"],
    geometry: Geometry,
) -> _EntryMoves:
    size, stride = geometry.kernel_size, geometry.kernel_stride
    last = path.shape[1] - 1
    first = geometry.num_entries(length)
    # Entry c is completed by the path's node at position c * d + l - 1.
    at_path = (first[:, None] + jnp.arange(last // stride + 1)) * stride + size - 1 - length[:, None]
    node = jnp.take_along_axis(path, jnp.clip(at_path, 0, last), axis=1)
    # Row r of the new tail is position length + count - l + r: an old tail row, or a node of the path.
    row = count[:, None] + jnp.arange(size)
    tail_node = jnp.take_along_axis(path, jnp.clip(row - size, 0, last), axis=1)
    return _EntryMoves(
        source=jnp.maximum(jnp.take_along_axis(node_slot, node, axis=1), 0),
        first=first,
        completed=geometry.num_entries(length + count) - first,
        tail=jnp.where(row < size, row, size + tail_node),
    )
