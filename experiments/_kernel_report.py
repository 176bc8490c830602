"""What the rows of the kernel benchmark say: ratios to baselines, CSV rows, plots."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import _harness as harness

SHARED = 0.75  # overlap of the main tables
INTERVALS = (1, 2, 4)  # a refresh layer, then so many less one that reuse its selection
PAPER_RATIO = 6.86  # grouped verification with reuse over a launch a query, by the paper


class Table:
    """Median microseconds by op and shape."""

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self.rows = [row for row in rows if "us" in row]

    def find(self, **fields: Any) -> list[dict[str, Any]]:
        """Rows with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in fields.items())]

    def us(self, **fields: Any) -> float | None:
        """Median of the one row with these values."""
        found = self.find(**fields)
        return found[0]["us"]["median"] if found else None

    def values(self, name: str, **fields: Any) -> list[Any]:
        """All values of a field."""
        return sorted({row[name] for row in self.find(**fields) if row.get(name) is not None})

    def refresh(self, suite: str, overlap: float, **shape: Any) -> float | None:
        """Selection and verification of a shape, measured apart."""
        parts = self.us(suite=suite, op="select", **shape), self.us(suite=suite, op="verify", overlap=overlap, **shape)
        return None if None in parts else sum(filter(None, parts))


def speedups(rows: Iterable[dict[str, Any]], overlap: float = SHARED) -> list[dict[str, Any]]:
    """For each tree, context and head dim: the best group, and its layers against the two baselines.

    `per_query` is a launch of the same kernels for each node, `ungrouped` one launch with groups of one. Both select in
    every layer; `reuse over ...` compares them without selection. Ratios of a plan are by the mean time of its layers.
    """
    table, found = Table(rows), []
    for dim in table.values("dim", suite="grid", op="verify"):
        for context in table.values("context", suite="grid", op="verify", dim=dim):
            for nodes in table.values("nodes", suite="grid", op="verify", dim=dim, context=context):
                shape = {"nodes": nodes, "dim": dim, "context": context}
                each: dict[int, tuple[float | None, float | None]] = {}
                for group in table.values("group", suite="grid", **shape):
                    reuse = table.us(suite="grid", op="reuse", group=group, overlap=overlap, **shape)
                    each[group] = table.refresh("grid", overlap, group=group, **shape), reuse
                # One query of one node is the same launch in both.
                where = "grid" if nodes == 1 else "per query"
                single = {
                    "refresh": table.refresh(where, overlap, group=1, **shape),
                    "reuse": table.us(suite=where, op="reuse", group=1, overlap=overlap, **shape),
                }
                whole = {group: pair for group, pair in each.items() if None not in pair}
                if not whole:
                    continue
                group = min(whole, key=lambda g: sum(n * x for n, x in zip((1, 3), whole[g], strict=True) if x))
                refresh, reuse = (x or 0.0 for x in whole[group])
                row = {**shape, "overlap": overlap, "group": group, "refresh_us": refresh, "reuse_us": reuse}
                row |= {f"per_query_{name}_us": us for name, us in single.items()}
                if 1 in whole:
                    row |= {"ungrouped_refresh_us": whole[1][0], "ungrouped_reuse_us": whole[1][1]}
                for interval in INTERVALS:
                    mean = (refresh + (interval - 1) * reuse) / interval
                    for base in ("per_query", "ungrouped"):
                        if row.get(f"{base}_refresh_us"):
                            row[f"every_{interval}_over_{base}"] = row[f"{base}_refresh_us"] / mean
                if single["reuse"]:
                    row["reuse_over_per_query"] = single["reuse"] / reuse
                found.append({name: round(x, 3) if isinstance(x, float) else x for name, x in row.items()})
    return found


def side_by_side(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fused layers, the same with branches in launches of their own, and XLA: microseconds and launches."""
    table, found = Table(rows), []
    for row in table.find(suite="layers", variant="fused"):
        shape = {name: row[name] for name in ("op", "nodes", "group", "dim", "context")}
        flat: dict[str, Any] = {**shape, "overlap": row.get("overlap")}
        for variant in ("fused", "separate", "xla"):
            for other in table.find(suite="layers", variant=variant, **shape):
                flat |= {f"{variant}_us": other["us"]["median"], f"{variant}_launches": other.get("launches")}
                flat |= {f"{variant}_all_us": other.get("all_us"), f"{variant}_all_launches": other.get("all_launches")}
        for variant in ("separate", "xla"):
            if f"{variant}_us" in flat:
                flat[f"{variant}_over_fused"] = round(flat[f"{variant}_us"] / flat["fused_us"], 3)
        found.append(flat)
    return found


def flat(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a CSV file."""
    names = ("suite", "op", "variant", "nodes", "group", "dim", "context", "overlap", "launches", "all_launches")
    names += ("all_us", "distinct_mb", "loaded_selected_mb", "floor_us", "share_of_read_rate", "lower_s", "compile_s")
    found = []
    for row in rows:
        if "us" in row:
            spread = {f"us_{name}": value for name, value in row["us"].items()}
            found.append({name: row.get(name) for name in names} | spread)
    return found


def _context(table: Table, **fields: Any) -> int | None:
    contexts = table.values("context", **fields)
    return 65536 if 65536 in contexts else contexts[-1] if contexts else None


def draw_grid(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Time against nodes at one context: groups, a launch a query, and bytes over the read rate."""
    table = Table(rows)
    for axis, op in zip(axes, ("verify", "reuse", "select"), strict=True):
        dim = max(table.values("dim", suite="grid", op=op), default=None)
        context = _context(table, suite="grid", op=op, dim=dim)
        extra = {} if op == "select" else {"overlap": SHARED}
        shape = {"op": op, "dim": dim, "context": context, **extra}
        lines = [(f"groups of {g}", {"suite": "grid", "group": g}) for g in table.values("group", suite="grid", op=op)]
        for label, fields in [*lines, ("a launch a query", {"suite": "per query"})]:
            points = sorted((row["nodes"], row["us"]["median"]) for row in table.find(**shape, **fields))
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=label)
        floors = {row["nodes"]: row["floor_us"] for row in table.find(suite="grid", **shape) if "floor_us" in row}
        if floors:
            axis.plot(*zip(*sorted(floors.items()), strict=True), "k--", label="bytes / read rate")
        axis.set(title=f"{op}, context {context}, D={dim}", xlabel="nodes", yscale="log")
        harness.ticks(axis, (row["nodes"] for row in table.find(**shape)))
        axis.grid(alpha=0.3)
        axis.set_ylabel("microseconds")
        if lines:
            axis.legend(fontsize=7)


def draw_ratios(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    """Grouped layers with reuse against a launch a query; fused layers against separate branches."""
    left, right = axes
    ratios = speedups(rows)
    name = f"every_{INTERVALS[-1]}_over_per_query"
    dim = max((row["dim"] for row in ratios), default=None)
    for nodes in sorted({row["nodes"] for row in ratios}):
        of_tree = [row for row in ratios if row["dim"] == dim and row["nodes"] == nodes and name in row]
        points = sorted((row["context"], row[name]) for row in of_tree)
        if points:
            left.plot(*zip(*points, strict=True), marker="o", label=f"{nodes} nodes")
    left.axhline(PAPER_RATIO, color="black", linestyle="--", label=f"the paper's {PAPER_RATIO}")
    left.set(title="a launch a query / grouped, refresh every 4", xlabel="context", ylabel="times faster")
    left.set_ylim(bottom=0)
    harness.ticks(left, (row["context"] for row in ratios))
    left.legend(fontsize=7)
    beside = [row for row in side_by_side(rows) if "separate_over_fused" in row]
    context = max((row["context"] for row in beside if row["context"] <= 65536), default=None)
    labels, heights = [], []
    for row in sorted(beside, key=lambda row: (row["op"], row["nodes"])):
        if row["context"] == context:
            labels.append(f"{row['op']}\nT={row['nodes']}")
            heights.append(row["separate_over_fused"])
    right.bar(range(len(labels)), heights)
    right.set_xticks(range(len(labels)), labels, fontsize=6)
    right.axhline(1.0, color="black", linestyle="--")
    right.set(title=f"separate branches / fused, context {context}", ylabel="times faster")
