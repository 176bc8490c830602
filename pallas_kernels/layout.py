"""What the ops agree on: block geometry, the tree of queries, cached and in-flight keys and values.

A pass verifies T tree nodes after L committed tokens: decoding is T=1, prefill is a chain of T tokens. The
nodes' own keys and values travel beside the cache (`TreeKV`) and enter it only on commit, so a rejected node
cannot be read by a later pass.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .errors import ShapeError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """Static sizes of Native Sparse Attention, in tokens or blocks.

    Args:
      kernel_size, kernel_stride: compression block length l and stride d.
      block_size: selection block length l'.
      n_blocks: selected blocks per query, forced ones included.
      init_blocks, local_blocks: forced blocks at the start, and ending with the query's own block.
      window: keys in the sliding window, the query's own included.
    """

    kernel_size: int
    kernel_stride: int
    block_size: int
    n_blocks: int
    init_blocks: int
    local_blocks: int
    window: int

    def entries(self, length: int) -> int:
        """Compressed entries visible after `length` tokens (NSA eq. 7, with block 0)."""
        if length < self.kernel_size:
            return 0
        return (length - self.kernel_size) // self.kernel_stride + 1

    def num_entries(self, length: Int[Array, "..."]) -> Int[Array, "..."]:
        """`entries` of traced lengths."""
        count = (length - self.kernel_size) // self.kernel_stride + 1
        return jnp.where(length < self.kernel_size, 0, count)

    def selection_width(self, capacity: int) -> int:
        """Selected-block slots per query in a cache of `capacity` tokens."""
        return min(self.n_blocks, capacity // self.block_size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeQueries:
    """Where the T nodes of a pass stand.

    Args:
      length: committed tokens L, the number of readable cache rows.
      position: absolute position of each node, L + depth.
      ancestor: `ancestor[b, i, j]` says that node j is node i or an ancestor of it.
      parent: index of each node's parent among the nodes, -1 for children of the committed prefix.
    """

    length: Int[Array, " B"]
    position: Int[Array, "B T"]
    ancestor: Bool[Array, "B T T"]
    parent: Int[Array, "B T"]

    @property
    def num_nodes(self) -> int:
        """T."""
        return self.position.shape[1]


def chain(length: Int[Array, " B"], num_nodes: int) -> TreeQueries:
    """`num_nodes` consecutive tokens after `length` committed ones: prefill, or decoding with one node."""
    index = jnp.arange(num_nodes, dtype=jnp.int32)
    batch = length.shape[0]
    return TreeQueries(
        length=length,
        position=length[:, None] + index[None],
        ancestor=jnp.broadcast_to(index[:, None] >= index[None], (batch, num_nodes, num_nodes)),
        parent=jnp.broadcast_to(index - 1, (batch, num_nodes)),
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Completions:
    """Which nodes complete a compression block, and the rows that block is made of.

    Node a completes entry c = (position + 1 - l) / d when that is a non-negative integer; the entry's rows are
    the last l tokens of a's own path. Rows index `concat(tail, tree)`: the last l committed tokens, position p in
    row p modulo l, then the nodes.

    Args:
      node: completing nodes in index order, -1 padded.
      entry: compressed entry that each completes, 0 where padded.
      rows: the l rows of each entry.
      node_slot: for every node its index in `node`, -1 for nodes that complete nothing.
    """

    node: Int[Array, "B M"]
    entry: Int[Array, "B M"]
    rows: Int[Array, "B M l"]
    node_slot: Int[Array, "B T"]


def completions(queries: TreeQueries, geometry: Geometry, max_entries: int | None = None) -> Completions:
    """Entries completed by the nodes of a pass.

    Args:
      queries: the nodes.
      geometry: block sizes.
      max_entries: static bound M on completing nodes, by default T (a star of siblings can complete T). A chain
        of T tokens completes at most ceil(T / d).
    """
    size, stride = geometry.kernel_size, geometry.kernel_stride
    nodes = queries.num_nodes
    bound = nodes if max_entries is None else min(max_entries, nodes)
    offset = queries.position + 1 - size
    completing = (offset >= 0) & (offset % stride == 0)
    slot = jnp.where(completing, jnp.cumsum(completing, axis=1) - 1, -1).astype(jnp.int32)

    def compact(slots: Int[Array, " T"]) -> Int[Array, " M"]:
        target = jnp.where(slots < 0, bound, slots)
        return jnp.full((bound,), -1, jnp.int32).at[target].set(jnp.arange(nodes, dtype=jnp.int32), mode="drop")

    node = jax.vmap(compact)(slot)
    at = jnp.maximum(node, 0)
    position = jnp.take_along_axis(queries.position, at, axis=1)
    entry = jnp.where(node < 0, 0, (position + 1 - size) // stride)
    wanted = position[..., None] - size + 1 + jnp.arange(size)  # B M l
    path = jnp.take_along_axis(queries.ancestor, at[..., None], axis=1)  # B M T
    hit = path[:, :, None] & (queries.position[:, None, None] == wanted[..., None])
    in_tree = size + jnp.argmax(hit, axis=-1)
    rows = jnp.where(wanted < queries.length[:, None, None], wanted % size, in_tree)
    return Completions(node=node, entry=entry, rows=rows.astype(jnp.int32), node_slot=slot)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedKV:
    """Committed keys and values of one layer. Rows at and after the length are garbage that nothing reads.

    Args:
      k, v: rotated keys, and values; `capacity` is a multiple of the block size.
      k_cmp, v_cmp: compressed entries.
    """

    k: Float[Array, "B K L D"]
    v: Float[Array, "B K L D"]
    k_cmp: Float[Array, "B K N D"]
    v_cmp: Float[Array, "B K N D"]

    @property
    def capacity(self) -> int:
        """Rows that the cache holds."""
        return self.k.shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeKV:
    """Keys and values of the nodes of one pass, in one layer, before any of them is committed.

    Args:
      k, v: rotated keys, and values.
      k_cmp, v_cmp: entries that the nodes complete, in the order of `completions.node`.
      completions: which node completes which entry.
    """

    k: Float[Array, "B K T D"]
    v: Float[Array, "B K T D"]
    k_cmp: Float[Array, "B K M D"]
    v_cmp: Float[Array, "B K M D"]
    completions: Completions


def check_pass(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    geometry: Geometry,
) -> None:
    """Shapes of one pass fit each other.

    Raises:
      ShapeError: names the argument, what it is and what was expected.
    """
    batch, nodes, kv_heads, _, dim = q.shape
    capacity = cached.k.shape[2]
    entries = max(geometry.entries(capacity), 1)
    slots = tree.k_cmp.shape[2]
    for name, got, want in (
        ("cached.k", cached.k.shape, (batch, kv_heads, capacity, dim)),
        ("cached.v", cached.v.shape, (batch, kv_heads, capacity, dim)),
        ("cached.k_cmp", cached.k_cmp.shape, (batch, kv_heads, entries, dim)),
        ("cached.v_cmp", cached.v_cmp.shape, (batch, kv_heads, entries, dim)),
        ("tree.k", tree.k.shape, (batch, kv_heads, nodes, dim)),
        ("tree.v", tree.v.shape, (batch, kv_heads, nodes, dim)),
        ("tree.k_cmp", tree.k_cmp.shape, (batch, kv_heads, slots, dim)),
        ("tree.v_cmp", tree.v_cmp.shape, (batch, kv_heads, slots, dim)),
        ("tree.completions.node", tree.completions.node.shape, (batch, slots)),
        ("queries.position", queries.position.shape, (batch, nodes)),
        ("queries.ancestor", queries.ancestor.shape, (batch, nodes, nodes)),
        ("queries.length", queries.length.shape, (batch,)),
    ):
        if tuple(got) != want:
            raise ShapeError(f"{name} has shape {tuple(got)}, expected {want} beside q of shape {q.shape}")
    if capacity % geometry.block_size:
        raise ShapeError(
            f"cached.k holds {capacity} rows, which is no multiple of block_size={geometry.block_size}: "
            "allocate the cache with init_cache, which rounds up"
        )
