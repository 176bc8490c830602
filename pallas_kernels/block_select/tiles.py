"""Tile choices of the compressed-branch kernels: data per device, that of the H200 for devices without their own."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

import jax

from .mosaic_attend import AttendConfig
from .mosaic_common import ROWS
from .mosaic_narrow import COLUMNS
from .select_shape import QUAD

DEFAULT = "nvidia_h200"


@functools.cache
def _table(device: str) -> dict[str, Any]:
    folder = importlib.resources.files(__package__).joinpath("tiles")
    file = folder.joinpath(f"{device}.json")
    if not file.is_file():
        file = folder.joinpath(f"{DEFAULT}.json")
    return json.loads(file.read_text())


def _here() -> dict[str, Any]:
    return _table(jax.devices()[0].device_kind.lower().replace(" ", "_"))


def entries_per_tile() -> int:
    """Compressed entries of a tile on this device."""
    return _here()["tile"]


def most_bunch() -> int:
    """Most nodes of a thread block of the selection on this device; see `AttendConfig.select_bunch`."""
    return _here()["select_bunch"]


def bunch_of(*, nodes: int, heads: int, group: int, most: int) -> tuple[int, int, int]:
    """How nodes are divided for the selection, and into tiles of query rows.

    Args:
      nodes: T.
      heads: G.
      group: nodes that share a visit list, or 0.
      most: nodes of a thread block; larger groups take a cluster of 2 or 4. 0 for a thread block per group.

    Returns:
      The group if the selection's launch merges it, else 0; the nodes of a thread block; the nodes of a row tile.

    Raises:
      ValueError: a `most` that is none of 0, 4, 8 and 16.
    """
    if most not in (0, QUAD, 8, 16):
        raise ValueError(f"select_bunch must be 0, {QUAD}, 8 or 16, got {most}: choose one of these")
    limit = ROWS // heads // QUAD * QUAD
    bunch = max(group, QUAD) if group in (1, 2, 4, 8, 16) else QUAD
    if most:
        bunch = min(bunch, most)
        while limit % bunch:  # nodes of a thread block share a row tile; QUAD divides them all
            bunch //= 2
    merges = group in (1, 2, 4, 8, 16) and bunch <= limit and limit % bunch == 0
    bunch = bunch if merges else QUAD
    unit = max(bunch, 8)  # rows of a swizzled tile
    return group if merges else 0, bunch, min(limit, -(-nodes // unit) * unit)


def choose(*, row_tiles: int, heads: int, entries: int, nodes: int, bunch: int, blocks: int, rows: int) -> AttendConfig:
    """Tiles for `row_tiles` tiles of 64 query rows over `entries` compressed entries.

    Row tiles share loads of keys and values as far as registers allow; the entries are split so that the thread blocks
    fill the device once.

    Args:
      row_tiles: tiles of query rows.
      heads: KV heads of all sequences, B * K.
      entries: capacity in compressed entries.
      nodes: T.
      bunch: nodes that a thread block of the selection serves.
      blocks: capacity in selection blocks.
      rows: query rows of a KV head, T * G.
    """
    table = _here()
    warpgroups = next(row["warpgroups"] for row in table["warpgroups"] if row_tiles <= row["row_tiles_up_to"])
    thread_blocks = heads * -(-row_tiles // warpgroups)
    steps = -(-entries // table["tile"])
    splits = max(1, min(table["most_splits"], table["resident"] * table["processors"] // thread_blocks, steps))
    narrow = rows <= COLUMNS and table["narrow_stages"] > 0
    # Few rows leave shared memory for more tiles in flight, while every thread block has a multiprocessor of its own.
    deep = narrow and thread_blocks * splits <= table["processors"]
    # Four warps a node are fastest while every thread block has a multiprocessor of its own, two when they share. Eight
    # fill a multiprocessor: an estimate for long caches, which few nodes read faster with more loads in flight.
    bunches = heads * -(-nodes // bunch)
    most = 4 if bunches <= table["processors"] else 2
    most = 8 if blocks > 4096 and 2 * bunches <= table["processors"] else most
    most = min(most, 32 // bunch)
    select_warps = next(warps for warps in (8, 4, 2, 1) if warps <= most and (warps == 1 or blocks >= 128 * warps))
    return AttendConfig(
        tile=table["tile"],
        splits=splits,
        warpgroups=warpgroups,
        stages=table["narrow_stages" if deep else "stages"],
        select_warps=select_warps,
        select_bunch=bunch if table["select_bunch"] else 0,
        narrow=narrow,
    )
