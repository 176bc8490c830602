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
MAX_SPLITS = 16
MAX_TOTAL = 32  # splits of all branches: a lane of a warp weighs each
# Measured on an H200, in key tiles of a block that has a multiprocessor to itself (0.7 microseconds): what a block
# takes besides, a key tile where two blocks share a multiprocessor, and one more split in the sum.
BLOCK_COST, SHARED_COST, SPLIT_COST = 6.0, 1.6, 0.05


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How a call is cut up.

    Args:
      selected, window, compressed: splits of each branch's keys.
      last: selected splits of the last row tile, which may hold few nodes; 0 for as many as the others.
      stages: key tiles in the shared-memory ring. On an H200 two were faster than three even where a block has a
        multiprocessor to itself (T = 1: 6.4 against 6.8 microseconds).
      dense_nodes: bound on the nodes of a dense row tile; None for as many as 64 rows hold.
    """

    selected: int
    window: int
    compressed: int = 1
    last: int = 0
    stages: int = 2
    dense_nodes: int | None = None


def heuristic(
    *,
    lists: int,
    selected_tiles: int,
    dense_tiles: int,
    selected_keys: int,
    last_keys: int,
    window_keys: int,
    compressed_keys: int,
    cores: int = CORES,
) -> TileConfig:
    """Splits for a workload without tuned values: those that an estimate finds fastest.

    Args:
      lists: KV heads of the whole call.
      selected_tiles, dense_tiles: row tiles of the whole call.
      selected_keys, window_keys, compressed_keys: expected key tiles of a row tile in each branch.
      last_keys: the same for the last selected row tile of a KV head.
      cores: multiprocessors of the device.
    """
    branches = (
        (selected_tiles - lists, selected_keys),
        (dense_tiles, window_keys),
        (dense_tiles, compressed_keys),
        (lists, last_keys),
    )
    best: tuple[float, list[int]] | None = None
    for each in range(1, max(keys for _, keys in branches) + 1):  # key tiles that a thread block gets at most
        splits = [max(1, min(MAX_SPLITS, -(-keys // each))) for _, keys in branches]
        splits[0] = max(splits[0], splits[3])
        if sum(splits[:3]) > MAX_TOTAL:
            continue
        jobs = [(count * n, -(-keys // n)) for (count, keys), n in zip(branches, splits, strict=True) if keys]
        blocks = sum(count for count, _ in jobs)
        slots, step = (cores, 1.0) if blocks <= cores else (cores * RESIDENT, SHARED_COST)
        costs = [(count, BLOCK_COST + step * keys) for count, keys in jobs if count]
        longest = max(cost for _, cost in costs)
        if blocks > slots:  # more than one wave
            longest = max(longest, sum(count * cost for count, cost in costs) / slots + longest / 2)
        estimate = longest + SPLIT_COST * sum(splits[:3])
        if best is None or estimate < best[0]:
            best = estimate, splits
    assert best is not None  # as one split each is always possible
    splits = best[1]
    return TileConfig(selected=splits[0], window=splits[1], compressed=splits[2], last=splits[3])


@functools.cache
def tuned(op: str, device: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Measured configurations of an op's folder, by kernel and workload; empty for a device without them."""
    path = pathlib.Path(__file__).parents[1] / op / "tiles" / f"{device}.json"
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
    entry = tuned("sparse_verify", device).get(op, {}).get(f"T{nodes} C{group} D{dim} " + " ".join(map(str, keys)))
    return TileConfig(**entry) if entry else heuristic(**workload)
