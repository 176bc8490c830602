"""Tile choices of the dense kernel: tuned values by device, and an estimate for the rest."""

from __future__ import annotations

import dataclasses

from ..sparse_verify.tiles import CORES, tuned

ROWS = 64
SHARED_MEMORY = 227 * 1024  # bytes that a thread block can have
BARRIERS = 4 * 1024
MOST_PARTIALS = 128  # that the sum takes for one row
MOST_STAGES = 4
# Clock cycles of an H200 per key and piece of 64 columns: what the tensor cores need for a row tile at their peak, and
# what device memory needs for the key and its value, in each multiprocessor's share.
PRODUCT, MEMORY = 4.0, 13.0
START = 4000.0  # cycles of a thread block besides its keys
SUM, WRITTEN = 15.0, 5000.0  # cycles of one more split, and bytes a cycle that partial results are written and read at


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How a call is cut up.

    Args:
      splits: of the keys of a block of row tiles.
      warpgroups: that attend in a thread block, 1 to 3, with a row tile of 64 (node, head) rows each.
      tile: keys in a tile, a multiple of 64; at 3 warpgroups registers suffice for 64 of head dim 128.
      stages: key tiles in the shared-memory ring. Where the warpgroups of a block take key tiles in turn (one row
        tile left over), a multiple of them.
      alternate: whether two warpgroups take turns: one computes weights while the other has the tensor cores. Without
        effect where a thread block lacks a row tile.
    """

    splits: int
    warpgroups: int
    tile: int
    stages: int
    alternate: bool = False


# Warpgroups, keys of a tile by head dim, and the assumed share of the tensor cores' peak.
SHAPES = ((2, {64: 128, 128: 128}, 0.6), (3, {64: 128, 128: 64}, 0.66), (2, {64: 64, 128: 64}, 0.5))
# The same of two warpgroups that take turns at them, and of a block whose warpgroups take key tiles in turn.
TURNS, ALONE = 0.7, 0.5


def stages_of(*, warpgroups: int, tile: int, dim: int, alone: bool) -> int:
    """Key tiles that fit beside the queries, at most `MOST_STAGES`; `alone`: must be a multiple of `warpgroups`."""
    fit = (SHARED_MEMORY - BARRIERS - warpgroups * ROWS * dim * 2) // (4 * tile * dim)
    return max(1, min(fit, MOST_STAGES)) if not alone else max(1, min(fit, MOST_STAGES) // warpgroups) * warpgroups


def heuristic(*, row_tiles: int, heads: int, keys: int, dim: int, cores: int = CORES) -> TileConfig:
    """The configuration that an estimate finds fastest.

    Args:
      row_tiles: tiles of 64 query rows per KV head.
      heads: KV heads of the whole call, B * K.
      keys: in reach of a row.
      dim: head dim.
      cores: multiprocessors of the device.
    """
    pieces = dim // ROWS
    best: tuple[float, TileConfig] | None = None
    for warpgroups, tiles, share in SHAPES:
        blocks = -(-row_tiles // warpgroups)
        alone = row_tiles % warpgroups == 1
        most = row_tiles if blocks == 1 else warpgroups
        each = 1 if blocks == 1 and alone else most  # row tiles of the longest block
        turns = warpgroups == 2 and row_tiles % 2 == 0 and tiles[dim] == 128
        product = PRODUCT * pieces * each / (ALONE if blocks == 1 and alone else TURNS if turns else share)
        per_key = max(product, MEMORY * pieces / blocks)
        tile = tiles[dim]
        more = (SUM + heads * row_tiles * ROWS * dim * 8 / WRITTEN) * (warpgroups if blocks == 1 and alone else 1)
        limit = min(-(-keys // tile), MOST_PARTIALS // (warpgroups if alone else 1))
        for splits in range(1, limit + 1):
            waves = -(-heads * blocks * splits // cores)
            cost = waves * (START + per_key * keys / splits) + splits * more
            if best is None or cost < best[0]:
                config = TileConfig(
                    splits=splits,
                    warpgroups=warpgroups,
                    tile=tile,
                    stages=stages_of(warpgroups=warpgroups, tile=tile, dim=dim, alone=alone),
                    alternate=turns,
                )
                best = cost, config
    assert best is not None  # as one split is always possible
    return best[1]


def choose(*, nodes: int, heads: int, kv_heads: int, dim: int, keys: int, device: str = "nvidia_h200") -> TileConfig:
    """The measured configuration of a call on a device, or the heuristic's.

    Args:
      nodes, heads, dim: T, G, D.
      kv_heads: of the whole call, B * K.
      keys: in reach of a row, at most.
      device: name of the file of tuned values.
    """
    entry = tuned("dense_verify", device).get("dense", {}).get(f"T{nodes} G{heads} K{kv_heads} D{dim} L{keys}")
    if entry:
        return TileConfig(**entry)
    row_tiles = -(-nodes // (ROWS // heads))
    return heuristic(row_tiles=row_tiles, heads=kv_heads, keys=keys, dim=dim)
