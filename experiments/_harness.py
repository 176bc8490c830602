"""What every experiment shares: provenance, timing with spread, progress, and results as JSON."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

RESULTS = Path(__file__).parent / "results"


def commit() -> str:
    """The commit of the code that runs, `+changes` if the tree differs; SSV_JAX_COMMIT where there is no git."""
    if "SSV_JAX_COMMIT" in os.environ:
        return os.environ["SSV_JAX_COMMIT"]
    here = Path(__file__).parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+changes" if dirty.stdout.strip() else "")


def provenance() -> dict[str, Any]:
    """Device, versions, commit and date of a run."""
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "flax", "numpy")}
    return {
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "device": device.device_kind,
        "platform": device.platform,
        "devices": len(jax.devices()),
        "python": ".".join(map(str, sys.version_info[:3])),
        "versions": versions,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Median, extremes and count of repeated measurements."""
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "repeats": len(values),
    }


def timed(call: Callable[[], Any], repeats: int, warmup: int = 1) -> list[float]:
    """Wall seconds of blocking calls."""
    for _ in range(warmup):
        jax.block_until_ready(call())
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - began)
    return seconds


def say(text: str) -> None:
    """Progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    """Saves a result with its provenance."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"provenance": provenance(), **result}, indent=1) + "\n")
    say(f"wrote {path}")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Flat rows; nested values are left to the JSON."""
    flat = [{k: v for k, v in row.items() if not isinstance(v, (list, dict, tuple))} for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()
        table.writerows(flat)
    say(f"wrote {path}")


def plot(path: Path, draw: Callable[[Any], None], columns: int = 1, rows: int = 1) -> None:
    """`draw(axes)` as a PNG, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        say("no plot: matplotlib is not installed (extra `plot`)")
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 4.4 * rows), layout="constrained")
    draw(axes)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    say(f"wrote {path}")


def short(number: int) -> str:
    """65536 as 64K."""
    return f"{number // 1024}K" if number >= 1024 else str(number)


def ticks(axis: Any, values: Iterable[int]) -> None:
    """Marks these values of a logarithmic axis, and no others."""
    marks = sorted(set(values))
    axis.set_xscale("log")
    axis.minorticks_off()
    axis.set_xticks(marks, [short(mark) for mark in marks])


def columns(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> str:
    """Fields of rows as a text table."""
    lines = [list(names)]
    for row in rows:
        cells = [row.get(name) for name in names]
        lines.append(["-" if x is None else f"{x:.4g}" if isinstance(x, float) else str(x) for x in cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)
