"""Runs the GPU checks without pytest and writes what passed.

python -m tests.gpu.run [experiments/results/gpu_tests.json]
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the processes share the GPU

import jax  # noqa: E402

from tests.gpu import checks  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))
import _harness as harness  # noqa: E402

WORKERS = min(10, os.cpu_count() or 1)  # compiling is most of the work


def attempt(name: str, case: int) -> dict[str, Any]:
    """The outcome of one check."""
    began = time.perf_counter()
    row: dict[str, Any] = {"check": name, "case": case}
    try:
        row |= {"passed": True, "values": checks.CHECKS[name][0](case)}
    except Exception as error:  # one failure must not hide the others
        row |= {"passed": False, "error": f"{type(error).__name__}: {error}"[:1000]}
        traceback.print_exc(limit=4)
    row["seconds"] = round(time.perf_counter() - began, 1)
    print(row, file=sys.stderr, flush=True)
    return row


def main() -> int:
    """Writes the counts; 1 if a check failed or there is no GPU."""
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else harness.RESULTS / "gpu_tests.json"
    if jax.default_backend() != "gpu":
        print(f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()} here", file=sys.stderr)
        return 1
    rows: list[dict[str, Any]] = []
    todo = [(name, case) for name, (_, cases) in checks.CHECKS.items() for case in cases]
    # The model's runs are the longest.
    todo.sort(key=lambda item: item[0] != "tokens")
    workers = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(WORKERS, mp_context=workers) as pool:
        for job in concurrent.futures.as_completed([pool.submit(attempt, *item) for item in todo]):
            rows.append(job.result())
            passed = sum(row["passed"] for row in rows)
            counts = {"checks": len(todo), "passed": passed, "failed": len(rows) - passed}
            result = {"provenance": harness.provenance(), "counts": counts, "rows": rows}
            output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(counts))
    return int(counts["passed"] < len(todo))


if __name__ == "__main__":
    sys.exit(main())
