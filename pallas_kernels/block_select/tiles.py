"""Tile choices of the compressed-branch kernels: data per device, that of the H200 for devices without their own."""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

import jax

from .mosaic_attend import AttendConfig

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


def choose(*, row_tiles: int, heads: int, entries: int, nodes: int, bunch: int, blocks: int) -> AttendConfig:
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
    """
    table = _here()
    rows = table["warpgroups"]
    warpgroups = next(row["warpgroups"] for row in rows if row_tiles <= row["row_tiles_up_to"])
    thread_blocks = heads * -(-row_tiles // warpgroups)
    steps = -(-entries // table["tile"])
    splits = max(1, min(table["most_splits"], table["resident"] * table["processors"] // thread_blocks, steps))
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
        stages=table["stages"],
        select_warps=select_warps,
    )
