"""The static description of a call of the Hopper kernels, and the arrays that it reads."""

from __future__ import annotations

import dataclasses
from typing import Any

from .mosaic_rows import ROWS, RowTiles

SELECTED, WINDOW, COMPRESSED = 0, 1, 2  # branches, in the order of splits and of partial results
GATES = (1, 2, 0)  # where each branch's gate is


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How a call is cut into partial results; `mosaic_sum` adds them up.

    Args:
      batch, kv_heads, dim: B, K, D.
      rows: row tiles.
      splits: splits of each branch's keys.
      last: splits of the first branch's last row tile.
    """

    batch: int
    kv_heads: int
    dim: int
    rows: RowTiles
    splits: tuple[int, ...]
    last: int

    @property
    def chunks(self) -> int:
        """64-column pieces of a head; shared memory holds each piece as its own swizzled tile."""
        return self.dim // 64

    @property
    def branches(self) -> tuple[int, ...]:
        """Gate of each branch."""
        return GATES[: len(self.splits)]

    @property
    def row_tiles(self) -> tuple[int, ...]:
        """Row tiles per KV head, by branch."""
        return (self.rows.tiles, self.rows.dense_tiles, self.rows.dense_tiles)[: len(self.splits)]

    @property
    def most_splits(self) -> tuple[int, ...]:
        """Splits of the row tile that has most, by branch."""
        return (max(self.splits[0], self.last), *self.splits[1:])

    @property
    def jobs(self) -> tuple[int, ...]:
        """Partial results per KV head, by branch."""
        counts = [count * splits for count, splits in zip(self.row_tiles, self.splits, strict=True)]
        counts[0] += self.last - self.splits[0]
        return tuple(counts)

    @property
    def partials(self) -> int:
        """Partial results of the whole call."""
        return self.batch * self.kv_heads * sum(self.jobs)

    def first_partial(self, branch: int) -> int:
        """Index of a branch's first partial result."""
        return self.batch * self.kv_heads * sum(self.jobs[:branch])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Cut):
    """Static description of a call. A thread block makes each partial result.

    Args:
      block_size, stride, kernel_size: of the geometry.
      window: keys in reach of the window branch.
      union: U, width of a visit list.
      slots: M, completed entries a pass can have.
      scale: multiplies q . k.
      stages: key tiles in the ring.

    The splits are those of the selected, the window and (absent without that branch) the compressed branch; the last
    selected tile, which may hold few nodes, has at most as many as the others.
    """

    block_size: int
    stride: int
    kernel_size: int
    window: int
    union: int
    slots: int
    scale: float
    stages: int

    @property
    def pieces(self) -> int:
        """Blocks in a key tile."""
        return ROWS // self.block_size

    @property
    def tree_tiles(self) -> tuple[int, ...]:
        """Key tiles of the tree, by branch."""
        nodes = -(-self.rows.nodes // ROWS)
        return (nodes, nodes, -(-self.slots // ROWS))[: len(self.splits)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Arrays of a call, or their global references, in the order in which they are passed.

    Args:
      q, k, v, tree_k, tree_v, length: as the op's.
      blocks, owners: of the schedule.
      words, below, block_columns: as `mosaic_rows.PassMasks`.
      tree_range: as there; None where all trees are one key tile.
      k_cmp, v_cmp, tree_k_cmp, tree_v_cmp: as the op's; None where the branch or its tree entries are absent.
    """

    q: Any
    k: Any
    v: Any
    tree_k: Any
    tree_v: Any
    length: Any
    blocks: Any
    owners: Any
    words: Any
    below: Any
    block_columns: Any
    tree_range: Any = None
    k_cmp: Any = None
    v_cmp: Any = None
    tree_k_cmp: Any = None
    tree_v_cmp: Any = None

    def sources(self, b: Any, k: Any) -> dict[int, tuple[Any, Any]]:
        """[rows, D] references of keys and values, by 2 * (compressed) + (of the tree)."""
        pairs = [(self.k, self.v), (self.tree_k, self.tree_v), (self.k_cmp, self.v_cmp)]
        pairs.append((self.tree_k_cmp, self.tree_v_cmp))
        return {n: (x.at[b, k], y.at[b, k]) for n, (x, y) in enumerate(pairs) if x is not None}
