"""Whole verification steps: how far selections agree and how to make them, an order of cases, tables and plots."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import _harness as harness
import numpy as np

KINDS = ("matmuls", "selection", "attention", "rest")
NODES = (1, 5, 17, 65, 129)
CONTEXTS = (8192, 16384, 32768, 65536, 131072)
MIDDLE = 65536  # the context of the main table


def calibrate(
    measured: Callable[[float], float],
    wanted: float,
    *,
    start: float | None = None,
    within: float = 0.02,
    tries: int = 9,
) -> tuple[float, float]:
    """The correlation of token embeddings, and the overlap that it gives, nearest to a wanted overlap.

    By bisection over the digits of 1 - correlation: overlaps of interest lie between 0.9 and 0.9999.

    Args:
      measured: overlap at a correlation; it grows with it.
      wanted: overlap.
      start: a first guess.
      within: distance at which to stop.
      tries: measurements.
    """
    low, high = 0.0, 6.0
    digits = 2.0 if start is None else float(np.clip(-np.log10(1 - start), low, high))
    found: list[tuple[float, float, float]] = []
    for attempt in range(tries):
        correlation = 1 - 10.0**-digits
        value = measured(correlation)
        found.append((abs(value - wanted), correlation, value))
        if found[-1][0] <= within:
            break
        low, high = (digits, high) if value < wanted else (low, digits)
        # Near the guess at first: from case to case it moves little.
        digits = (low + high) / 2
        if attempt == 0 and start is not None:
            digits = low + 0.3 if value < wanted else high - 0.3
            digits = float(np.clip(digits, 0.0, 6.0))
    _, correlation, value = min(found)
    return correlation, value


def grid() -> list[tuple[int, int, str, str]]:
    """(nodes, context, plan, implementation) of the whole table, the most telling first."""
    name = "mosaic_gpu"
    others = [context for context in CONTEXTS if context != MIDDLE]
    order = [(nodes, MIDDLE, "lossless", name) for nodes in (65, 1, 5, 17, 129)]
    order += [(nodes, context, "lossless", name) for nodes in (1, 65) for context in others]
    order += [(nodes, MIDDLE, "every4", name) for nodes in (65, 1, 5, 17, 129)]
    order += [(nodes, context, "every4", name) for nodes in (65, 1) for context in others]
    order += [(nodes, c, plan, name) for plan in ("lossless", "every4") for c in others for nodes in (5, 17, 129)]
    return order


def by_nodes(nodes: int) -> int:
    """Nodes that share a visit list: the groups that were fastest in earlier runs of the kernels."""
    return 1 if nodes == 1 else 8 if nodes < 16 else 16


def text(rows: Iterable[dict[str, Any]]) -> str:
    """Milliseconds and where they go, a line for each configuration."""
    names = ["implementation", "plan", "nodes", "context", "overlap_of_neighbours", "ms", *(f"{k}_ms" for k in KINDS)]
    order = sorted(rows, key=lambda row: (row["implementation"], row["plan"], row["context"], row["nodes"]))
    return harness.columns(order, names)


def draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Milliseconds by nodes for each context, and where the time goes at the largest tree but one."""
    left, right = np.ravel(axes)
    best = "mosaic_gpu" if any(row["implementation"] == "mosaic_gpu" for row in rows) else None
    lines: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    for row in rows:
        if best in (None, row["implementation"]):
            lines[f"{row['plan']}, {harness.short(row['context'])}"].append((row["nodes"], row["ms"]))
    for label, points in sorted(lines.items()):
        style = "--" if label.startswith("every") else ":" if label.startswith("dense") else "-"
        left.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, linestyle=style, label=label)
    left.set(xlabel="nodes", ylabel="ms per step", ylim=(0, None))
    harness.ticks(left, (row["nodes"] for row in rows))
    left.legend(fontsize=7)
    left.grid(alpha=0.3)
    split = [row for row in rows if row["plan"] == "lossless" and best in (None, row["implementation"])]
    trees = sorted({row["nodes"] for row in split})
    nodes = 65 if 65 in trees else trees[-1] if trees else None
    shown = sorted((row for row in split if row["nodes"] in (1, nodes)), key=lambda r: (r["nodes"], r["context"]))
    bottom = np.zeros(len(shown))
    for kind in KINDS:
        heights = np.array([row.get(f"{kind}_ms") or 0.0 for row in shown])
        right.bar(range(len(shown)), heights, bottom=bottom, label=kind)
        bottom += heights
    labels = [f"T={row['nodes']}\n{harness.short(row['context'])}" for row in shown]
    right.set_xticks(range(len(shown)), labels, fontsize=6)
    right.set(ylabel="ms of kernels per step", title="lossless")
    right.legend(fontsize=7)
