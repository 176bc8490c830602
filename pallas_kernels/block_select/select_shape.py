"""Static sizes of a selection on Hopper."""

from __future__ import annotations

import dataclasses

QUAD = 4  # nodes that a warpgroup adds up together; a bunch is some quads


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SelectShape:
    """Static sizes of one selection; see `mosaic_choose.finish` for the arrays.

    Args:
      nodes, kv_heads, heads: T, K, G.
      tiles, per_tile_nodes: tiles of query rows, and nodes in each.
      splits: parts that the entries were divided into.
      depth, width: of the array of masses: tiles of entries (from index 1), and columns.
      per_tile, tile_entries: blocks and entries of a tile.
      steps: tiles of entries.
      tops: rows of the array of maxima.
      tree_width: columns of the completed entries' masses.
      extra: blocks that completed entries can touch.
      blocks, slots, init, local: of the cache and of a selection.
      spills: whether an entry can overlap two blocks.
      group: nodes that share a visit list, 0 for none; divides `bunch`.
      bunch: nodes of a thread block, 4, 8 or 16.
      warps: that serve a node, 1, 2 or 4.
    """

    nodes: int
    kv_heads: int
    heads: int
    tiles: int
    per_tile_nodes: int
    splits: int
    depth: int
    width: int
    per_tile: int
    tile_entries: int
    steps: int
    tops: int
    tree_width: int
    extra: int
    blocks: int
    slots: int
    init: int
    local: int
    spills: bool
    group: int
    bunch: int
    warps: int

    @property
    def rounds(self) -> int:
        """Blocks to choose beside the forced ones."""
        return max(self.slots - self.init - self.local, 0)

    @property
    def words(self) -> int:
        """Of a node's bit map."""
        return -(-self.blocks // 32)

    @property
    def bunches(self) -> int:
        """Thread blocks per KV head."""
        return -(-self.nodes // self.bunch)

    @property
    def merged_width(self) -> int:
        """Slots of a merged list."""
        return min(self.group * self.slots, self.blocks)

    @property
    def shared_words(self) -> tuple[int, int, int]:
        """Shared memory in words: bit maps, gains of completed entries, candidates (two words each)."""
        candidates = 2 * self.bunch * self.warps * max(self.rounds, 1)
        return self.bunch * self.words, self.bunch * self.warps * self.extra, candidates
