"""Tile choices of the compressed-branch kernels: measured ones per device, a heuristic for the rest."""

from __future__ import annotations

from .mosaic_attend import AttendConfig

PROCESSORS = 132  # of an H200


def choose(*, row_tiles: int, heads: int, entries: int, dim: int, score: bool) -> AttendConfig:
    """Tiles for `row_tiles` tiles of 64 query rows over `entries` compressed entries, `heads` = B * K."""
    tile = 128
    warpgroups = min(row_tiles, 3)
    blocks = heads * -(-row_tiles // warpgroups)
    splits = max(1, min(16, PROCESSORS // blocks, -(-entries // tile)))
    return AttendConfig(tile=tile, splits=splits, warpgroups=warpgroups, stages=2)
