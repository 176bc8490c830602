"""What every experiment shares: provenance, timing with spread, progress, and results as JSON."""

from __future__ import annotations

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
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
