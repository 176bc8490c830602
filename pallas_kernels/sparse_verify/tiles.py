"""Split counts and ring depth of the sparse kernels: tuned values by device, and a heuristic for the rest."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from typing import Any

ROWS = 64  # rows of a row tile and keys of a key tile
RESIDENT = 2  # thread blocks that fit on a multiprocessor
CORES = 132  # multiprocessors of an H200
LEAST_KEYS = 6  # key tiles below which a split costs more than it saves
MAX_SPLITS = 16


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How a call is cut up.

    Args:
      selected, window, compressed: splits of each branch's keys.
      stages: key tiles in the shared-memory ring.
      dense_nodes: bound on the nodes of a dense row tile; None for as many as 64 rows hold.
      fused: whether the splits are summed in the same launch, or in one of its own.
    """

    selected: int
    window: int
    compressed: int = 1
    stages: int = 2
    dense_nodes: int | None = None
    fused: bool = True


def heuristic(
    *,
    selected_tiles: int,
    dense_tiles: int,
    selected_keys: int,
    window_keys: int,
    compressed_keys: int,
    pieces: int = 1,
    dim: int = 128,
    cores: int = CORES,
) -> TileConfig:
    """Splits for a workload without tuned values.

    Args:
      selected_tiles, dense_tiles: row tiles of the whole call.
      selected_keys, window_keys, compressed_keys: expected key tiles of a row tile in each branch.
      pieces: blocks in a key tile.
      dim: head dim.
      cores: multiprocessors of the device.
    """
    slots = cores * RESIDENT
    work = selected_tiles * selected_keys + dense_tiles * (window_keys + compressed_keys)
    branches = ((selected_tiles, selected_keys), (dense_tiles, window_keys), (dense_tiles, compressed_keys))
    each = max(LEAST_KEYS, -(-work // slots))  # key tiles that a thread block should get
    while True:
        splits = [max(1, min(MAX_SPLITS, round(keys / each))) for _, keys in branches]
        blocks = sum(count * n for (count, keys), n in zip(branches, splits, strict=True) if keys)
        if blocks <= slots or max(splits) == 1:  # a second wave of thread blocks would take as long as the first
            break
        each += 1
    # Two blocks of 128-wide heads fit on a multiprocessor with two stages, not with three.
    stages = 3 if pieces == 1 and (dim <= 64 or blocks <= cores) else 2
    return TileConfig(selected=splits[0], window=splits[1], compressed=splits[2], stages=stages)


@functools.cache
def _tuned(device: str) -> dict[str, dict[str, dict[str, Any]]]:
    path = pathlib.Path(__file__).parent / "tiles" / f"{device}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def choose(op: str, *, nodes: int, group: int, dim: int, device: str = "nvidia_h200", **workload: int) -> TileConfig:
    """The measured configuration of an op ("verify" or "reuse") on a device, or the heuristic's.

    Args:
      op: kernel.
      nodes, group, dim: T, C, D.
      device: name of the file of tuned values.
      workload: arguments of `heuristic`.
    """
    keys = workload["selected_tiles"], workload["dense_tiles"], workload["compressed_keys"]
    entry = _tuned(device).get(op, {}).get(f"T{nodes} C{group} D{dim} " + " ".join(map(str, keys)))
    return TileConfig(**entry) if entry else heuristic(dim=dim, **workload)
