"""Row tiles and the masks of a tree, in the form that the Hopper kernels read.

A row tile is at most 64 (node, head) rows of one KV head, heads fastest. Selected rows come in tiles that never
cross a group of the schedule; dense rows (window and compressed branch) come in tiles of `dense_per_selected` of
those. Everything here depends on the queries alone, so the layers of a pass share it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from ..layout import Completions, Geometry, TreeQueries

ROWS = 64  # rows of a tile, and keys of a tile
WORDS = ROWS // 32
NOWHERE = 1 << 30  # window bound of a row without a node; negative, of a row without a window


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowTiles:
    """How the nodes of a pass split into row tiles.

    Args:
      nodes: T.
      heads: G, query heads per KV head.
      group: C, consecutive nodes that share a visit list.
      per_tile: nodes in a selected tile, a divisor of `group`.
      dense_per_selected: selected tiles in a dense tile.
    """

    nodes: int
    heads: int
    group: int
    per_tile: int
    dense_per_selected: int

    @property
    def tiles(self) -> int:
        """Selected tiles per KV head."""
        return -(-self.nodes // self.group) * (self.group // self.per_tile)

    @property
    def dense_tiles(self) -> int:
        """Dense tiles per KV head."""
        return -(-self.tiles // self.dense_per_selected)

    @property
    def per_dense(self) -> int:
        """Nodes in a dense tile."""
        return self.per_tile * self.dense_per_selected


def row_tiles(nodes: int, heads: int, group: int, max_nodes: int | None = None) -> RowTiles:
    """The largest tiles of 64 rows; `max_nodes` bounds the nodes of a dense tile."""
    fit = ROWS // heads
    per_tile = max(n for n in range(1, min(group, fit) + 1) if group % n == 0)
    limit = fit if max_nodes is None else max(per_tile, min(fit, max_nodes))
    needed = -(-nodes // group) * (group // per_tile)
    dense = max(1, min(limit // per_tile, needed))
    return RowTiles(nodes=nodes, heads=heads, group=group, per_tile=per_tile, dense_per_selected=dense)


def rows_of(tiles: int, per_tile: int, heads: int, nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Node of each row of each tile, and whether there is one."""
    row = np.arange(ROWS) // heads
    node = np.arange(tiles)[:, None] * per_tile + row
    valid = (row < per_tile) & (node < nodes)
    return np.where(valid, node, 0), valid


def _pack(bits: Bool[Array, "*dims X"]) -> Int[Array, "*dims W"]:
    """32 columns to a word, column 0 lowest, padded to whole key tiles."""
    columns = bits.shape[-1]
    padded = jnp.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, -columns % ROWS)])
    words = padded.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    words = jnp.sum(words << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(words, jnp.int32)


def row_words(bits: Bool[Array, "B T X"], tiles: int, per_tile: int, heads: int) -> Int[Array, "B tiles W 64"]:
    """What each row of each tile sees of X columns: a word for 32 columns, whole key tiles of 64."""
    node, valid = rows_of(tiles, per_tile, heads, bits.shape[1])
    words = _pack(bits)[:, node] * jnp.asarray(valid[..., None], jnp.int32)
    return jnp.swapaxes(words, 2, 3)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassMasks:
    """What the queries of a pass may see, as bits. X counts selected row tiles, dense ones, and dense ones again.

    Args:
      words: tree columns that each row sees, 32 to a word: its ancestors; those in its window; and, with a compressed
        branch, completed entries.
      below: the last cached position out of each row's window, far below all for rows of branches without one.
      block_columns: tree columns whose block is the e-th block from the one that holds the length.
      tree_range: first and last + 1 key tile of the tree that any row sees something of.
    """

    words: Int[Array, "B X W 64"]
    below: Int[Array, "B X 64"]
    block_columns: Int[Array, "B E W2"]
    tree_range: Int[Array, "B X 2"]


def tree_range(words: Int[Array, "B X W 64"]) -> Int[Array, "B X 2"]:
    """First and last + 1 key tile that has a bit in any row; 0 and 0 without one."""
    seen = (words != 0).any(-1).reshape(*words.shape[:2], -1, WORDS).any(-1)
    tiles = seen.shape[2]
    first = jnp.where(seen.any(2), jnp.argmax(seen, axis=2), 0)
    end = jnp.where(seen, jnp.arange(1, tiles + 1), 0).max(2)
    return jnp.stack([first, end], axis=2).astype(jnp.int32)


def pass_masks(queries: TreeQueries, completions: Completions | None, geometry: Geometry, tiles: RowTiles) -> PassMasks:
    """Masks of one pass; `completions` only for kernels with a compressed branch."""
    size, heads = geometry.block_size, tiles.heads
    dense, per_dense = tiles.dense_tiles, tiles.per_dense
    position = queries.position
    blocks = -(-(tiles.nodes + size - 1) // size)
    offset = position // size - (queries.length // size)[:, None]
    near = position[:, None] > position[:, :, None] - geometry.window
    node, valid = rows_of(dense, per_dense, heads, tiles.nodes)
    everywhere = jnp.full((position.shape[0], tiles.tiles, ROWS), -NOWHERE, jnp.int32)
    window = jnp.where(jnp.asarray(valid), position[:, node] - geometry.window, NOWHERE).astype(jnp.int32)
    words = [
        row_words(queries.ancestor, tiles.tiles, tiles.per_tile, heads),
        row_words(queries.ancestor & near, dense, per_dense, heads),
    ]
    below = [everywhere, window]
    if completions is not None:
        below.append(everywhere[:, :1].repeat(dense, axis=1))
    if completions is not None and completions.node.shape[1]:
        at = jnp.maximum(completions.node, 0)[:, None]
        sees = jnp.take_along_axis(queries.ancestor, at, axis=2) & (completions.node >= 0)[:, None]
        completed = row_words(sees, dense, per_dense, heads)
        words.append(jnp.pad(completed, [(0, 0), (0, 0), (0, words[0].shape[2] - completed.shape[2]), (0, 0)]))
    joined = jnp.concatenate(words, axis=1)
    return PassMasks(
        words=joined,
        below=jnp.concatenate(below, axis=1),
        block_columns=_pack(offset[:, None] == jnp.arange(blocks)[:, None]),
        tree_range=tree_range(joined),
    )
