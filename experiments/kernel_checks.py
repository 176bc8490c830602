"""The kernels on a GPU against their float32 definitions: named boundaries, ties, short contexts, poisoned caches.

    python experiments/kernel_checks.py [--only TEXT ...] [--max-seconds 600] [--interpret] [--smoke]

A selection may differ from the definition's only where the scores of the blocks in question differ by less than the
kernel's stated tolerance. Cases that the output file holds for the same kernels are not run again. Random shapes are
`python -m tests.gpu.run`. `--interpret` runs the kernels in Pallas's interpreter on a CPU: minutes for a small case.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import _harness as harness
import _kernel_programs as programs
import _kernel_time as timing
import jax
import jax.numpy as jnp
import numpy as np
from _kernel_cases import PAPER, Case, caches, module, normal, point, queries_of, tree_of

from ssv_jax.pallas_kernels import Geometry, merge

REPEATS = 8  # calls that must give the same bits
PORTABLE_TOLERANCE = 1e-5  # of the portable code, in smoke runs


def sizes(**changes: int) -> Geometry:
    """The paper's geometry but for some sizes."""
    return dataclasses.replace(PAPER, **changes)


EQUAL_SIZES = sizes(kernel_size=16, kernel_stride=16, block_size=16, init_blocks=0, local_blocks=1)
SELECT: dict[str, Case] = {
    "T65": Case(nodes=65, group=4, tree="near"),
    "T1": Case(nodes=1),
    "T5 64": Case(nodes=5, group=2, dim=64, context=8192, tree="near"),
    "T17 chain 8 groups": Case(nodes=17, group=8, tree="chain", context=16384),
    "T65 star 16": Case(nodes=65, group=16, tree="star", context=8192, lengths=(8095,)),
    "T129 128K": Case(nodes=129, group=4, tree="chain", context=131072, lengths=(130940,)),
    "ties": Case(nodes=65, group=4, values="levels", context=32768, tree="near"),
    "G3 short": Case(nodes=21, group=3, heads=3, context=4096, lengths=(40,), tree="near"),
    "G1": Case(nodes=70, group=4, heads=1, context=8192, lengths=(5000,), tree="near"),
    "G16 l=d=l'": Case(nodes=9, heads=16, kv_heads=2, dim=64, context=16384, tree="near", geometry=EQUAL_SIZES),
    "stride 8": Case(nodes=17, group=4, context=8192, tree="near", geometry=sizes(kernel_stride=8)),
    "block 32": Case(nodes=17, group=2, context=8192, tree="near", geometry=sizes(block_size=32)),
    "empty": Case(nodes=4, group=4, context=4096, lengths=(5,), tree="near"),
    "batch fp16": Case(nodes=6, group=5, batch=3, lengths=(20, 4000, 8180), context=8192, dtype="float16", tree="near"),
    "all scores equal": Case(nodes=5, group=4, values="equal", tree="chain", context=32768, lengths=(32704,)),
    "ties D64": Case(nodes=17, group=8, values="levels", dim=64, context=16384, tree="star"),
    "forced blocks overlap": Case(
        nodes=5,
        group=4,
        batch=5,
        lengths=(3, 70, 130, 200, 270),
        tree="chain",
        context=4096,
        geometry=sizes(init_blocks=2, local_blocks=3),
    ),
    "only forced blocks": Case(
        nodes=9, group=8, tree="near", context=8192, geometry=sizes(n_blocks=3, init_blocks=1, local_blocks=2)
    ),
    "block 16": Case(
        nodes=17, group=4, context=8192, tree="near", geometry=sizes(kernel_size=16, kernel_stride=8, block_size=16)
    ),
    "more slots than blocks": Case(nodes=9, group=4, context=512, lengths=(450,), tree="near"),
    "more slots than seen": Case(nodes=9, group=8, context=4096, lengths=(300,), tree="chain"),
    "G3 64K": Case(nodes=65, group=5, heads=3, tree="near"),
    "G16": Case(nodes=17, group=4, heads=16, kv_heads=2, context=8192, tree="near"),
    "T129 64": Case(nodes=129, group=16, dim=64, context=8192, tree="near", lengths=(7900,)),
    "lengths at block boundaries": Case(
        nodes=17, group=4, batch=6, lengths=(4031, 4032, 4033, 4047, 4048, 4063), tree="chain", context=8192
    ),
    "last row of the cache": Case(nodes=17, group=8, tree="chain", context=8192, lengths=(8175,)),
}
ATTENTION: dict[str, tuple[str, Case]] = {
    "verify T65": ("verify", Case(nodes=65, group=16)),
    "verify T5": ("verify", Case(nodes=5, group=8)),
    "verify T65 of 13": ("verify", Case(nodes=65, group=13, context=8192)),
    "verify T129": ("verify", Case(nodes=129, group=16, context=16384)),
    "verify G3 block 32": (
        "verify",
        Case(nodes=17, group=5, dim=64, heads=3, context=8192, geometry=sizes(block_size=32)),
    ),
    "verify boundary": ("verify", Case(nodes=17, group=4, tree="chain", context=8192, lengths=(4032,))),
    "verify before boundary": ("verify", Case(nodes=17, group=4, tree="chain", context=8192, lengths=(4031,))),
    "verify short": ("verify", Case(nodes=9, group=4, context=4096, lengths=(100,))),
    "reuse T17": ("reuse", Case(nodes=17, group=8, context=8192)),
    "reuse T129": ("reuse", Case(nodes=129, group=16, context=8192)),
    "reuse G16 block 16": (
        "reuse",
        Case(nodes=7, group=3, heads=16, kv_heads=2, context=8192, geometry=sizes(block_size=16)),
    ),
    "reuse T1 G1": ("reuse", Case(nodes=1, heads=1, context=8192)),
    "reuse T65 64": ("reuse", Case(nodes=65, group=8, dim=64)),
    "reuse boundary": ("reuse", Case(nodes=17, group=4, tree="chain", context=8192, lengths=(4033,))),
}


def error_of(got: Any, want: Any) -> float:
    """Relative error in Euclidean norm; NaN counts as infinite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    error = float(np.linalg.norm(got - want) / max(float(np.linalg.norm(want)), 1e-30))
    return error if np.isfinite(error) else float("inf")


def tolerance(case: Case, portable: bool) -> float:
    """Of an output: kernels round probabilities to the inputs' dtype."""
    return PORTABLE_TOLERANCE if portable else module("sparse_verify.cases").TOLERANCE[case.dtype]


def interpreter() -> Any:
    """Parameters of Pallas's interpreter."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    return plgpu.InterpretGPUParams()


def same_bits(call: Any, first: Any, times: int) -> bool:
    """Whether more calls give the same bits."""
    first = jax.tree.leaves(jax.tree.map(np.asarray, first))
    more = (jax.tree.leaves(call()) for _ in range(times))
    return all(np.array_equal(a, np.asarray(b)) for found in more for a, b in zip(first, found, strict=True))


def scores_of(case: Case, arguments: tuple[Any, ...]) -> jax.Array:
    """Float32 scores of all blocks, from the definition."""
    q, cached, tree, queries = arguments
    p, _ = module("block_select.reference")._probabilities(q, cached, tree, queries, case.geometry, case.scale)
    entries = jnp.broadcast_to(jnp.arange(cached.k_cmp.shape[2]), (case.batch, cached.k_cmp.shape[2]))
    entry = jnp.concatenate([entries, tree.completions.entry], axis=1)[..., None]
    ratio = case.geometry.block_size // case.geometry.kernel_stride
    reach = case.geometry.kernel_size // case.geometry.kernel_stride
    block = jnp.arange(case.blocks)
    common = jnp.minimum(entry + reach, (block + 1) * ratio) - jnp.maximum(entry, block * ratio)
    return jnp.einsum("bkte,beu->bktu", p.sum(3), jnp.maximum(common, 0).astype(jnp.float32))


def gaps_of(blocks: np.ndarray, chosen: np.ndarray, scores: np.ndarray) -> list[float]:
    """For each row whose sets differ, how far the scores of the blocks in question are apart, relatively."""
    gaps = []
    for at in map(tuple, np.argwhere((blocks != chosen).any(-1))):
        mine, theirs = set(blocks[at].tolist()) - {-1}, set(chosen[at].tolist()) - {-1}
        odd = [float(scores[at][block]) for block in mine ^ theirs]
        legal = len(odd) > 0 and len(mine) == len(theirs)  # otherwise a wrong order, or count
        gaps.append((max(odd) - min(odd)) / max(*odd, 1e-30) if legal else float("inf"))
    return gaps


def check_select(name: str, case: Case, mode: str) -> list[dict[str, Any]]:
    """Compressed branch, selection and merged lists of one case; `mode` is "gpu", "interpret" or "portable"."""
    rng = np.random.default_rng(1)
    (cached,) = caches(case, 1, entries_only=True, seed=1)
    queries = queries_of(case, rng)
    q = normal((case.batch, case.nodes, case.kv_heads, case.heads, case.dim), case.dtype, rng)
    arguments = jax.device_put((q, cached, tree_of(case, queries, rng), queries))
    options: dict[str, Any] = {"geometry": case.geometry, "scale": case.scale}

    def run(*arguments: Any) -> Any:
        if mode == "portable":
            out, blocks, schedule = programs.selecting(case, None, True)(*arguments)
            alone = programs.selecting(case, None, True, select=False)(*arguments)
            return out, alone, blocks, schedule.blocks, schedule.owners
        call = module("block_select.mosaic_gpu").select_and_attend
        more = options | ({"interpret": interpreter()} if mode == "interpret" else {})
        found = call(*arguments, **more, group=case.group)
        alone = call(*arguments, **more, select=False).out
        return found.out, alone, found.blocks, found.merged, found.owners

    call = run if mode == "interpret" else jax.jit(run)
    found = jax.tree.map(np.asarray, call(*arguments))
    repeats = same_bits(lambda: call(*arguments), found, 1 if mode == "interpret" else REPEATS)
    out, alone, blocks, lists, owners = found

    @jax.jit
    def definition(blocks: Any, *arguments: Any) -> Any:
        want, chosen = module("block_select.reference").block_select(*arguments, **options)
        return want, chosen, scores_of(case, arguments), merge(blocks, case.group, case.blocks)

    with jax.default_matmul_precision("highest"):
        want, chosen, scores, schedule = jax.tree.map(np.asarray, definition(blocks, *arguments))
    gaps = gaps_of(blocks, chosen, scores)
    error = error_of(out, want) if np.any(want) else float(np.abs(out).max())
    row = {
        "rows": int(np.prod(blocks.shape[:3])),
        "rows_differ": len(gaps),
        "worst_gap": max(gaps, default=0.0),
        "relative_error": error,
        "alone_relative_error": error_of(alone, out) if np.any(out) else float(np.abs(alone).max()),
        "schedule": bool(np.array_equal(schedule.blocks, lists) and np.array_equal(schedule.owners, owners)),
        "repeats": repeats,
    }
    allowed = 1e-5 if mode == "portable" else module("block_select.mosaic_gpu").SCORE_TOLERANCE
    passed = row["worst_gap"] <= allowed and error < tolerance(case, mode == "portable")
    passed &= row["schedule"] and repeats and row["alone_relative_error"] <= (0 if mode == "gpu" else 1e-5)
    if case.values == "equal":
        row["lowest_indices"] = lowest_taken(case, np.asarray(queries.position), blocks)
        passed &= row["lowest_indices"] or mode == "portable"  # its float32 sums need not tie
    return [{"key": f"select {name}", "name": name, "op": "select", "passed": bool(passed), **row}]


def lowest_taken(case: Case, position: np.ndarray, blocks: np.ndarray) -> bool:
    """Whether of blocks that all score the same the lowest were taken, beside those that are forced.

    Block 0 has an entry less than the others and is forced.
    """
    geometry, slots = case.geometry, blocks.shape[-1]
    for b, t in np.ndindex(*position.shape):
        own = position[b, t] // geometry.block_size
        forced = {0, *range(max(0, own - geometry.local_blocks + 1), own + 1)}
        free = [block for block in range(own) if block not in forced]
        want = sorted(forced | set(free[: slots - len(forced)]))
        if any(row[: len(want)].tolist() != want for row in blocks[b, :, t]):
            return False
    return True


def check_attention(name: str, op: str, case: Case, mode: str) -> list[dict[str, Any]]:
    """The selected, window and (reuse) compressed branch of one case under a random selection."""
    (cached,) = caches(case, 1, seed=2)
    x = point(case, 1)
    arguments = (x.q, cached, x.tree, x.queries, x.selections[0], x.gates)
    run = programs.attention(case, op, None, mode == "portable")
    if mode == "interpret":
        lowered = functools.partial(
            module("sparse_verify.mosaic_gpu").lowered, interpret=interpreter(), compressed=op == "reuse"
        )

        def run(q: Any, cached: Any, tree: Any, queries: Any, selection: Any, gates: Any) -> Any:
            rest = (queries, selection.schedule, gates)
            return lowered(q, cached, tree, *rest, geometry=case.geometry, scale=case.scale)

    call = run if mode == "interpret" else jax.jit(run)
    got = np.asarray(call(*arguments))
    repeats = same_bits(lambda: call(*arguments), got, 1 if mode == "interpret" else REPEATS)

    def wide(x: Any) -> Any:
        return x.astype(jnp.float32) if x.dtype == jnp.dtype(case.dtype) else x

    with jax.default_matmul_precision("highest"):
        exact = jax.jit(programs.attention(case, op, None, True))
        want = np.asarray(exact(*jax.tree.map(wide, arguments)))
    error = error_of(got, want)
    passed = bool(repeats and error < tolerance(case, mode == "portable"))
    return [{"key": name, "name": name, "op": op, "passed": passed, "relative_error": error, "repeats": repeats}]


def smoke_cases() -> list[timing.Job]:
    """Small cases for the portable code."""
    small = Geometry(
        kernel_size=8, kernel_stride=4, block_size=16, n_blocks=4, init_blocks=1, local_blocks=2, window=32
    )
    case = Case(nodes=5, group=2, context=256, dim=16, kv_heads=2, dtype="float32", lengths=(47,), geometry=small)
    equal = dataclasses.replace(case, values="equal", tree="chain", lengths=(200,))
    return [
        timing.Job(
            name="select boundary",
            work=check_select,
            arguments={"name": "boundary", "case": case, "mode": "portable"},
            keys=("select boundary",),
        ),
        timing.Job(
            name="reuse all equal",
            work=check_attention,
            arguments={"name": "reuse all equal", "op": "reuse", "case": equal, "mode": "portable"},
            keys=("reuse all equal",),
        ),
    ]


def all_cases(mode: str, only: list[str]) -> list[timing.Job]:
    """Checks whose name holds one of the texts."""
    found = [
        timing.Job(
            name=f"select {name}",
            work=check_select,
            arguments={"name": name, "case": case, "mode": mode},
            keys=(f"select {name}",),
        )
        for name, case in SELECT.items()
    ]
    found += [
        timing.Job(
            name=name,
            work=check_attention,
            arguments={"name": name, "op": op, "case": case, "mode": mode},
            keys=(name,),
        )
        for name, (op, case) in ATTENTION.items()
    ]
    return [job for job in found if not only or any(text in job.name for text in only)]


def main() -> None:
    """Command line."""
    timing.prepare("--smoke" in sys.argv)
    began = time.time()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, portable code, seconds on a CPU")
    parser.add_argument("--only", nargs="+", default=[], help="checks whose name holds one of these texts")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--max-seconds", type=float, default=600.0, help="for everything (default: %(default)g)")
    parser.add_argument("--workers", type=int, default=None, help="processes (default: cores - 2)")
    parser.add_argument("--cache", type=Path, default=None, help="folder for executables, for runs after this one")
    parser.add_argument("--restart", action="store_true", help="forget the rows of the output file")
    parser.add_argument("--interpret", action="store_true", help="Pallas's interpreter, on a CPU")
    args = parser.parse_args()
    mode = "portable" if args.smoke else "interpret" if args.interpret else "gpu"
    if mode == "gpu" and jax.default_backend() != "gpu":
        parser.error(f"needs an NVIDIA GPU, JAX runs on {jax.default_backend()}: --smoke and --interpret run anywhere")
    jobs = smoke_cases() if args.smoke else all_cases(mode, args.only)
    if not jobs:
        parser.error(f"--only {' '.join(args.only)}: no such check; known: {', '.join([*SELECT, *ATTENTION])}")
    workers = max(1, (os.cpu_count() or 4) - 2) if args.workers is None else args.workers
    workers = 0 if mode != "gpu" else workers
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    name = "smoke.checks" if args.smoke else f"checks-{device}{'-interpreted' if args.interpret else ''}"
    output = args.output or harness.RESULTS / "kernels" / f"{name}.json"
    try:
        rows = timing.Rows(output, {"command": "python experiments/kernel_checks.py", "mode": mode}, args.restart)
    except ValueError as error:
        sys.exit(f"error: {error}")
    jobs = [job for job in jobs if not all(key in rows.rows for key in job.keys)]
    folder = str(args.cache) if args.cache else None
    timing.keep_compiled(folder)

    def done(job: timing.Job, found: list[dict[str, Any]] | str, seconds: float) -> None:
        if isinstance(found, str):
            found = [{"key": job.keys[0], "name": job.name, "passed": False, "error": found[:500]}]
        rows.add(found)
        for row in found:
            values = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("key", "name", "passed", "op"))
            harness.say(f"{'pass' if row['passed'] else 'FAIL'} {job.name}: {values} ({seconds:.1f} s)")

    until = began + args.max_seconds
    left = timing.run(jobs, workers=workers, until=until - 20, patience=15, cache=folder, done=done)
    rows.about["not_run"] = [job.name for job in left]
    rows.save()
    failed = [row["name"] for row in rows.rows.values() if not row["passed"]]
    print(f"{len(rows.rows) - len(failed)} of {len(rows.rows)} checks pass, {len(left)} not run: {output}")
    if failed or left:
        sys.exit(f"error: {', '.join(failed) or 'out of time: the same command goes on'}")


if __name__ == "__main__":
    main()
