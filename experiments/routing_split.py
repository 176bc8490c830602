"""How the time of sparse attention is split between routing and attention, by context, from a profile.

python experiments/routing_split.py [--profiled FILE.json] [--smoke]
Reads the profiles that `verify_step.py` took of whole verification steps at 8B shapes on a Hopper GPU: of its committed
result, or of another one (`verify_step.py --grid --output FILE.json`). Needs no GPU itself.

routing    scores of the compressed entries, the compressed branch's own output, selection and merging of blocks, in
           layers that select
attention  selected and window branches, and in layers that inherit the compressed branch as well
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import numpy as np

from ssv_jax import UsageError

PROFILED = harness.RESULTS / "verify_step" / "before-nvidia-h200.json"
NAMES = {"selection": "routing", "attention": "attention", "matmuls": "matmuls", "rest": "rest"}


def split(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each profiled step of the kernels that the profile can tell apart, by plan, nodes and context."""
    rows = []
    for row in found["rows"]:
        if "profile" not in row or row["implementation"] != "mosaic_gpu" or row["plan"] == "dense":
            continue
        parts = {name: row["profile"][kind]["ms"] for kind, name in NAMES.items()}
        sparse = parts["routing"] + parts["attention"]
        rows.append(
            {name: row.get(name) for name in ("plan", "nodes", "context", "group", "overlap_of_neighbours")}
            | {"step_ms": row["ms_per_step"]["median"]}
            | {f"{name}_ms": value for name, value in parts.items()}
            | {f"{name}_launches": row["profile"][kind]["launches"] for kind, name in NAMES.items()}
            | {"routing_of_both": parts["routing"] / sparse, "both_of_step": sparse / sum(parts.values())}
        )
    return sorted(rows, key=lambda row: (row["plan"] != "lossless", row["nodes"], row["context"]))


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    for axis, plan in zip(axes, dict.fromkeys(row["plan"] for row in rows), strict=False):
        mine = [row for row in rows if row["plan"] == plan]
        for nodes in dict.fromkeys(row["nodes"] for row in mine):
            each = [row for row in mine if row["nodes"] == nodes]
            contexts = [row["context"] for row in each]
            (line,) = axis.plot(contexts, [row["routing_ms"] for row in each], "-o", label=f"routing, {nodes} nodes")
            values = [row["attention_ms"] for row in each]
            axis.plot(contexts, values, "--s", color=line.get_color(), label=f"attention, {nodes} nodes")
        axis.set(title=f"layer plan: {plan}", xlabel="context (tokens)", xscale="log", ylabel="ms a step, all layers")
        known = sorted({row["context"] for row in rows})
        axis.set(xlim=(known[0] / 1.3, known[-1] * 1.3), ylim=(0, None))
        axis.set_xticks(known, [f"{context // 1024}K" for context in known])
        axis.minorticks_off()
        axis.legend(fontsize=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiled", type=Path, default=PROFILED, help="result of verify_step.py")
    parser.add_argument("--smoke", action="store_true", help="reads the committed result")
    parser.add_argument("--output", type=Path, default=None, help="JSON; a CSV and a plot are written beside it")
    args = parser.parse_args()
    evaluation.require_files("--profiled", [args.profiled])
    try:
        found = json.loads(args.profiled.read_text())
        rows = split(found)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--profiled {args.profiled}: no result of verify_step.py ({error!r})") from None
    if not rows:
        raise UsageError(f"--profiled {args.profiled}: holds no profile of our kernels, which a Hopper GPU would give")
    device = found["provenance"]["device"].lower().replace(" ", "-")
    output = args.output or harness.RESULTS / "routing_split" / f"{'smoke' if args.smoke else device}.json"
    result = {
        "command": "python experiments/routing_split.py",
        "measured": found["provenance"],  # the provenance beside it is that of this evaluation
        **{
            key: found[key]
            for key in ("model", "dtype", "tree", "embedding_correlation", "overlap_wanted")
            if key in found
        },
        "rows": rows,
    }
    harness.write(output, result)
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    plans = len({row["plan"] for row in rows})
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(np.ravel(axes), rows), columns=plans)
    names = "plan nodes context step_ms routing_ms attention_ms matmuls_ms rest_ms routing_of_both both_of_step"
    evaluation.table(rows, names.split())


if __name__ == "__main__":
    evaluation.guarded(main)
