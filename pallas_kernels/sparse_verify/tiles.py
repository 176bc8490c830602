"""Split counts and ring depth of the sparse kernels: tuned values by device, and a heuristic for the rest."""

from __future__ import annotations

import dataclasses
import json
import pathlib

ROWS = 64  # rows of a row tile and keys of a key tile
RESIDENT = 2  # thread blocks that fit on a multiprocessor


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TileConfig:
    """How a call is cut up.

    Args:
      selected, window, compressed: splits of each branch's keys.
      stages: key tiles in the shared-memory ring.
      dense_nodes: bound on the nodes of a dense row tile; None for as many as 64 rows hold.
    """

    selected: int
    window: int
    compressed: int = 1
    stages: int = 3
    dense_nodes: int | None = None


def _splits(tiles: int, keys: int, slots: int, least: int) -> int:
    """Splits of `keys` key tiles that fill `slots` thread blocks with at least `least` key tiles each."""
    return max(1, min(slots // max(tiles, 1), keys // least, 32))


def heuristic(
    *,
    selected_tiles: int,
    dense_tiles: int,
    selected_keys: int,
    window_keys: int,
    compressed_keys: int,
    cores: int,
) -> TileConfig:
    """Splits for a device without tuned values.

    Args:
      selected_tiles, dense_tiles: row tiles of the whole call.
      selected_keys, window_keys, compressed_keys: expected key tiles of a row tile in each branch.
      cores: multiprocessors of the device.
    """
    slots = cores * RESIDENT
    work = selected_tiles * selected_keys + dense_tiles * (window_keys + compressed_keys)
    each = max(3, -(-work // slots))  # key tiles a thread block should get

    def splits(keys: int) -> int:
        return max(1, min(32, round(keys / each)))

    return TileConfig(
        selected=splits(selected_keys),
        window=splits(window_keys),
        compressed=splits(compressed_keys) if compressed_keys else 1,
    )


def tuned(op: str, device: str, key: str) -> TileConfig | None:
    """The measured best for a workload, if this device has one."""
    path = pathlib.Path(__file__).parent / "tiles" / f"{device.lower().replace(' ', '_')}.json"
    if not path.exists():
        return None
    entry = json.loads(path.read_text()).get(op, {}).get(key)
    return None if entry is None else TileConfig(**entry)
