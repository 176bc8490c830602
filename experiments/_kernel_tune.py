"""Candidates for the kernels' tiles, and the tables of the winners, in the form of `pallas_kernels/*/tiles/*.json`."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from typing import Any
from unittest import mock

import _kernel_programs as programs
import _kernel_time as timing
from _kernel_cases import Case, module

GAIN = 0.03  # by less than this a winner is noise: runs of one configuration differ by 3 to 4%
MAX_SPLITS, MAX_TOTAL = 16, 32
GROUPS = {1: (1,), 5: (4, 8), 17: (8, 16), 65: (8, 13, 16), 129: (8, 16)}
MULTICAST = "two row tiles of a cluster with K/V multicast: the kernel has no such mode, so it is no candidate"


def attention_choices(case: Case, op: str) -> list[Any]:
    """Configurations around the library's choice, which is the first."""
    base = programs.tiles_of(case, op)
    last = base.last or base.selected
    found = [base]

    def add(**changes: int) -> None:
        config = dataclasses.replace(base, **changes)
        splits = config.selected, config.window, config.compressed if op == "reuse" else 0
        if max(splits) <= MAX_SPLITS and sum(splits) <= MAX_TOTAL and config not in found:
            found.append(config)

    for factor in (0.5, 0.7, 0.85, 1.2, 1.5):
        scaled = [max(1, round(factor * n)) for n in (base.selected, base.window, base.compressed, last)]
        add(selected=scaled[0], window=scaled[1], compressed=scaled[2], last=min(scaled[3], scaled[0]))
    for stages in (3, 4):
        add(stages=stages)
    for name in ("selected", "window", *(("compressed",) if op == "reuse" else ())):
        for step in (-1, 1):
            value = max(1, getattr(base, name) + step)
            add(**{name: value, "last": min(last, value if name == "selected" else base.selected)})
    for value in (1, base.selected):
        add(last=value)
    return found


def attention_key(case: Case, op: str) -> str:
    """A case's key in the table of the sparse kernels."""
    rows = module("sparse_verify.mosaic_rows")
    tiles = rows.row_tiles(case.nodes, case.heads, case.group)
    lists = case.batch * case.kv_heads
    keys = -(-max(case.geometry.entries(case.context), 1) // rows.ROWS) + 1 if op == "reuse" else 0
    shape = f"T{case.nodes} C{case.group} D{case.dim}"
    return f"{shape} {lists * tiles.tiles} {lists * tiles.dense_tiles} {keys}"


def _current_table() -> dict[str, Any]:
    return module("block_select.tiles")._here()


def select_tables() -> list[dict[str, Any]]:
    """Tables of the selection to try: the current one first, then one thing changed at a time."""
    base = _current_table()
    changes: list[dict[str, Any]] = [{"stages": n} for n in (2, 3, 4)]
    changes += [{"most_splits": n} for n in (8, 12, 24, 32)] + [{"resident": n} for n in (1, 3)]
    paired = [{"row_tiles_up_to": 1, "warpgroups": 1}, {"row_tiles_up_to": 1000000, "warpgroups": 2}]
    changes += [{"select_bunch": n} for n in (4, 8, 16)]
    changes += [{"narrow_stages": n} for n in (0, 2, 3)]
    large = {"tile": 128, "narrow_stages": 2}  # more do not fit the shared memory
    changes += [{"warpgroups": paired}, large, {**large, "warpgroups": paired}]
    found = [base]
    found += [{**base, **change} for change in changes if {**base, **change} not in found]
    return found


def select_config(case: Case, table: dict[str, Any]) -> Any:
    """The configuration that a table gives a case, and None for what the kernel refuses."""
    tiles = module("block_select.tiles")
    with mock.patch.object(tiles, "_here", lambda: table):
        _, bunch, per_tile = tiles.bunch_of(
            nodes=case.nodes, heads=case.heads, group=case.group, most=tiles.most_bunch()
        )
        return tiles.choose(
            row_tiles=-(-case.nodes // per_tile),
            heads=case.batch * case.kv_heads,
            entries=max(case.geometry.entries(case.context), 1),
            nodes=case.nodes,
            bunch=bunch,
            blocks=case.blocks,
            rows=case.nodes * case.heads,
        )


def problems(nodes: Sequence[int], contexts: Sequence[int], dims: Sequence[int], groups: Sequence[int]) -> list[Case]:
    """Shapes to tune, the most important first; `groups` replace those of `GROUPS`."""
    order = [n for n in (65, 5, 1, 17, 129) if n in nodes] + [n for n in nodes if n not in GROUPS]
    return [
        Case(nodes=n, group=group, context=context, dim=dim)
        for dim in dims
        for context in contexts
        for n in order
        for group in (groups or GROUPS.get(n, (16,)))
        if group == 1 or n > 1
    ]


def jobs(cases: Sequence[Case], capacity: int, rate: float | None, portable: bool, few: int = 0) -> list[timing.Job]:
    """One for each candidate of each problem; `few` bounds the candidates of a problem."""
    found = []
    for case in cases:
        base = dataclasses.replace(case, context=max(capacity, case.context))
        for op in ("verify", "reuse"):
            for config in attention_choices(case, op)[: few or None]:
                fields = {"nodes": case.nodes, "group": case.group, "dim": case.dim, "context": case.context}
                key = programs.key_of(suite="tune", op=op, **fields, overlap=case.overlap, tiles=config)
                arguments: dict[str, Any] = {"op": op, "base": base, "config": config, "suite": "tune"}
                arguments |= {"points": [(case.context, case.overlap)], "rate": rate, "portable": portable}
                name = f"tune {op} T={case.nodes} C={case.group} D={case.dim} {case.context} {config}"
                found.append(timing.Job(name=name, work=programs.grid_attention, arguments=arguments, keys=(key,)))
        if portable:
            continue
        for config in dict.fromkeys(select_config(case, table) for table in select_tables()):
            fields = {"nodes": case.nodes, "group": case.group, "dim": case.dim, "context": case.context}
            key = programs.key_of(suite="tune", op="select", **fields, tiles=config)
            arguments = {"case": case, "config": config, "rate": rate, "portable": portable, "suite": "tune"}
            name = f"tune select T={case.nodes} C={case.group} D={case.dim} {case.context} {config}"
            found.append(timing.Job(name=name, work=programs.grid_select, arguments=arguments, keys=(key,)))
    return found


def _times(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {row["key"]: row["us"]["median"] for row in rows if "us" in row}


def attention_table(
    rows: Sequence[dict[str, Any]], cases: Sequence[Case], current: dict[str, Any]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The sparse kernels' table with the winners, and what each won by. A small win changes nothing."""
    table = json.loads(json.dumps(current)) or {}
    times, wins = _times(rows), []
    for case in cases:
        for op in ("verify", "reuse"):
            fields = {"nodes": case.nodes, "group": case.group, "dim": case.dim, "context": case.context}
            found = {}
            for config in attention_choices(case, op):
                key = programs.key_of(suite="tune", op=op, **fields, overlap=case.overlap, tiles=config)
                if key in times:
                    found[config] = times[key]
            library = programs.tiles_of(case, op)
            if library not in found:
                continue
            best = min(found, key=found.__getitem__)
            wins.append(
                {
                    "op": op,
                    **fields,
                    "tried": len(found),
                    "library_us": found[library],
                    "best_us": found[best],
                    "best": dataclasses.asdict(best),
                    "taken": found[best] < (1 - GAIN) * found[library],
                }
            )
            if wins[-1]["taken"]:
                default = {field.name: field.default for field in dataclasses.fields(best)}
                entry = {k: v for k, v in dataclasses.asdict(best).items() if v != default[k]}
                table.setdefault(op, {})[attention_key(case, op)] = entry
    return table, wins


def select_table(rows: Sequence[dict[str, Any]], cases: Sequence[Case]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The selection's table of the least time over all problems (geometric mean), and the means of all tables."""
    times, means = _times(rows), []
    for table in select_tables():
        ratios = []
        for case in cases:
            fields = {"nodes": case.nodes, "group": case.group, "dim": case.dim, "context": case.context}
            key = functools.partial(programs.key_of, suite="tune", op="select", **fields)
            now, then = (times.get(key(tiles=select_config(case, t))) for t in (table, _current_table()))
            if now and then:
                ratios.append(now / then)
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else math.inf
        means.append({"table": table, "problems": len(ratios), "time_over_current": mean})
    whole = max(entry["problems"] for entry in means)
    full = [entry for entry in means if whole and entry["problems"] == whole]
    best = min(full, key=lambda entry: entry["time_over_current"], default=means[0])
    return best["table"] if best["time_over_current"] < 1 - GAIN else _current_table(), means
