"""Static sizes of a selection on Hopper."""

from __future__ import annotations

import dataclasses

QUAD = 4  # nodes that a warpgroup adds up together; a bunch is some quads
# Loads of four blocks that a lane holds at once, and of a pass where there are more: passes take fewer registers, and
# what is below the best blocks so far costs no round. Thread blocks of 1024 have 64 registers a thread.
MOST_LOADS, PASS_LOADS = 8, 4
WIDE, WIDE_MOST_LOADS, WIDE_PASS_LOADS = 1024, 4, 3
MOST_WORDS = 32  # of bit maps, that a lane holds at once


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
      group: nodes that share a visit list, 0 for none; it divides `bunch`, or `bunch` it.
      bunch: nodes of a thread block, 4, 8 or 16.
      warps: that serve a node, 1, 2, 4 or 8.
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
    def together(self) -> int:
        """Tiles of entries that a warp loads at once, 128 blocks."""
        return 128 // self.per_tile

    @property
    def passes(self) -> int:
        """Passes over a lane's blocks."""
        wide = 32 * self.bunch * self.warps >= WIDE
        most, each = (WIDE_MOST_LOADS, WIDE_PASS_LOADS) if wide else (MOST_LOADS, PASS_LOADS)
        return 1 if self._all_loads <= most else -(-self._all_loads // each)

    @property
    def loads(self) -> int:
        """Loads of four blocks that a lane does in a pass, for every head."""
        return -(-self._all_loads // self.passes)

    @property
    def _all_loads(self) -> int:
        return -(-self.steps // (self.together * self.warps))

    @property
    def words(self) -> int:
        """Of a node's bit map."""
        return -(-self.blocks // 32)

    @property
    def cluster(self) -> int:
        """Thread blocks that serve a group together."""
        return max(self.group // self.bunch, 1)

    @property
    def bunches(self) -> int:
        """Thread blocks per KV head, in whole clusters."""
        return -(-self.nodes // (self.bunch * self.cluster)) * self.cluster

    @property
    def merged_width(self) -> int:
        """Slots of a merged list."""
        return min(self.group * self.slots, self.blocks)

    @property
    def shared_words(self) -> tuple[int, int, int]:
        """Shared memory in words: bit maps, gains of completed entries, candidates (two words each).

        In a cluster, the OR of a thread block's maps comes after them.
        """
        candidates = 2 * self.bunch * self.warps * max(self.rounds, 1)
        return (self.bunch + (self.cluster > 1)) * self.words, self.bunch * self.warps * self.extra, candidates
