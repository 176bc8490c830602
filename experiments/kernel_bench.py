"""Kernel times on a GPU: the whole grid against bytes over the read rate, baselines, layers side by side, tiles.

    python experiments/kernel_bench.py [--suite grid layers] [--max-seconds 250] [--cache FOLDER] [--plan] [--smoke]
    python experiments/kernel_bench.py --suite tune

grid: selected and window branch (verify), all branches under a given selection (reuse), and the compressed branch with
its selection (select), for every number of nodes, context, overlap, group and head dim; beside it a launch a query.
layers: fused refresh and reuse layers, the same with a launch for each branch, XLA, and dense attention.
tune: tile choices; the winners are written as a table beside the rows, to be looked at and copied by hand.

Times are CUPTI medians over calls that rotate through caches and selections, on random data. Processes compile side by
side and time in turn. Points that the output file holds for the same kernels are not measured again: run the command
again to go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import _harness as harness
import _kernel_programs as programs
import _kernel_report as report
import _kernel_time as timing
import _kernel_tune as tune
import jax
from _kernel_cases import Case

from ssv_jax.pallas_kernels import Geometry

NODES, GROUPS, DIMS = (65, 5, 1, 17, 129), (16, 8, 4, 1, 2), (128, 64)
CONTEXTS, OVERLAPS = (65536, 131072, 8192, 32768, 16384), (0.75, 0.5, 0.9)
SMALL = Geometry(kernel_size=8, kernel_stride=4, block_size=16, n_blocks=4, init_blocks=1, local_blocks=2, window=32)
# Seconds of one core for a program and its inputs, and seconds alone on the device: estimates, for `--plan` only.
COST = {"verify": (3.0, 0.4), "reuse": (3.8, 0.3), "select": (4.5, 0.3), "per query": (6.0, 1.5), "layers": (7.5, 0.4)}


def layer_group(nodes: int, largest: int) -> int:
    """Groups that were fastest in earlier runs: 8 of few nodes, 16 of many."""
    return 1 if nodes == 1 else min(8 if nodes < 16 else 16, largest)


class Plan:
    """Jobs of the suites `grid` and `layers`, the most important first."""

    def __init__(self, args: argparse.Namespace, rate: float | None, portable: bool) -> None:
        self.args, self.rate, self.portable = args, rate, portable
        self.capacity = max(args.contexts)
        self.jobs: list[timing.Job] = []

    def case(self, nodes: int, group: int, dim: int, context: int) -> Case:
        """A case; small ones in smoke runs."""
        small = {"kv_heads": 2, "heads": 2, "geometry": SMALL} if self.portable else {}
        return Case(nodes=nodes, group=group, dim=dim, context=context, **small)  # type: ignore[arg-type]

    def add(self, name: str, work: Any, keys: list[str], **arguments: Any) -> None:
        """One more job."""
        arguments |= {"portable": self.portable}
        self.jobs.append(timing.Job(name=name, work=work, arguments=arguments, keys=tuple(keys)))

    def by_tiles(self, op: str, case: Case, contexts: tuple[int, ...]) -> dict[Any, list[int]]:
        """Contexts by the tiles that the library chooses there: those of one choice share a program."""
        found: dict[Any, list[int]] = {}
        for context in contexts:
            config = None if self.portable else programs.tiles_of(dataclasses.replace(case, context=context), op)
            found.setdefault(config, []).append(context)
        return found

    def grid(self, op: str, dim: int, contexts: tuple[int, ...]) -> None:
        """Every group and tree of an op at some contexts."""
        for nodes in self.args.nodes:
            for group in self.args.groups:
                if nodes == 1 and group != min(self.args.groups):
                    continue  # one node is one node, in groups of any size
                group = 1 if nodes == 1 else group
                fields = {"nodes": nodes, "group": group, "dim": dim}
                if op == "select":
                    for context in contexts:
                        case = self.case(nodes, group, dim, context)
                        key = programs.key_of(suite="grid", op=op, **fields, context=context)
                        name = f"select T={nodes} C={group} D={dim} {context}"
                        self.add(name, programs.grid_select, [key], case=case, config=None, rate=self.rate)
                    continue
                base = self.case(nodes, group, dim, self.capacity)
                for config, some in self.by_tiles(op, base, contexts).items():
                    points = [(context, share) for context in some for share in self.args.overlaps]
                    keys = [
                        programs.key_of(suite="grid", op=op, **fields, context=context, overlap=share)
                        for context, share in points
                    ]
                    arguments = {"op": op, "base": base, "config": config, "points": points, "rate": self.rate}
                    name = f"{op} T={nodes} C={group} D={dim} {','.join(map(str, some))}"
                    self.add(name, programs.grid_attention, keys, **arguments)

    def per_query(self, dim: int) -> None:
        """A launch a query: every context at one overlap, the others at the first context."""
        trees = [nodes for nodes in self.args.nodes if nodes > 1]
        shared = report.SHARED if report.SHARED in self.args.overlaps else self.args.overlaps[0]
        first = self.args.contexts[0]
        for op in ("verify", "reuse", "select"):
            if op == "select":
                groups: list[tuple[Any, list[int]]] = [(None, [context]) for context in self.args.contexts]
            else:
                base = self.case(1, 1, dim, self.capacity)
                groups = list(self.by_tiles(op, base, self.args.contexts).items())
            for config, some in groups:
                capacity = some[0] if op == "select" else self.capacity
                points = [(nodes, context, shared) for context in some for nodes in trees]
                if op != "select" and first in some:
                    points += [(nodes, first, x) for x in self.args.overlaps if x != shared for nodes in trees]
                keys = []
                for nodes, context, share in points:
                    fields: dict[str, Any] = {"nodes": nodes, "group": 1, "dim": dim, "context": context}
                    fields |= {} if op == "select" else {"overlap": share}
                    keys.append(programs.key_of(suite="per query", op=op, **fields))
                name = f"per query {op} D={dim} {','.join(map(str, some))}"
                arguments = {"op": op, "base": self.case(1, 1, dim, capacity), "config": config, "points": points}
                self.add(name, programs.per_query, keys, **arguments)

    def layers(self, context: int, peers: bool) -> None:
        """Layers side by side at one context, or their peers: XLA at the first context, and dense attention."""
        dim = self.args.dims[0]
        for nodes in self.args.nodes:
            group = layer_group(nodes, max(self.args.groups))
            case = self.case(nodes, group, dim, context)
            fields = {"nodes": nodes, "group": group, "dim": dim, "context": context}
            for kind in ("refresh", "reuse") if not self.portable else ("refresh",):
                variants = ("fused", "separate")
                if peers:
                    variants = ("xla",) if context == self.args.contexts[0] and not self.portable else ()
                for variant in variants:
                    key = programs.key_of(suite="layers", op=kind, variant=variant, **fields)
                    arguments = {"case": case, "kind": kind, "variant": variant, "rate": self.rate}
                    name = f"layers {kind} {variant} T={nodes} C={group} D={dim} {context}"
                    self.add(name, programs.layers, [key], **arguments)
            if peers:
                key = programs.key_of(suite="layers", op="dense", nodes=nodes, dim=dim, context=context)
                name = f"layers dense T={nodes} D={dim} {context}"
                self.add(name, programs.dense_peer, [key], case=case, rate=self.rate)

    def all(self, suites: list[str]) -> list[timing.Job]:
        """Jobs of the suites in order."""
        contexts, dims = self.args.contexts, self.args.dims
        first, others = contexts[:1], contexts[1:]
        for index, dim in enumerate(dims):
            if index == 0 and "layers" in suites:
                self.layers(contexts[0], peers=False)
            if "grid" in suites:
                self.grid("verify", dim, contexts)
                self.per_query(dim)
                for op in ("select", "reuse"):
                    self.grid(op, dim, first)
            if index == 0 and "layers" in suites:
                for context in others:
                    self.layers(context, peers=False)
            if "grid" in suites:
                for context in others:
                    for op in ("select", "reuse"):
                        self.grid(op, dim, (context,))
        if "layers" in suites:
            for context in contexts:
                self.layers(context, peers=True)
        return self.jobs


def without_known(jobs: list[timing.Job], known: Any) -> list[timing.Job]:
    """Jobs with a point that is not known."""
    return [job for job in jobs if not all(key in known for key in job.keys)]


def estimate(jobs: list[timing.Job], workers: int) -> float:
    """Seconds that the jobs may take: compilation side by side, or the device, whichever is more."""
    compiling = device = 0.0
    for job in jobs:
        text = job.name.replace("tune ", "")
        name = next(name for name in ("per query", "layers", "verify", "reuse", "select") if text.startswith(name))
        compiling, device = compiling + COST[name][0], device + COST[name][1]
    return 20.0 + max(compiling / max(workers, 1), device) if jobs else 0.0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, portable code, seconds on a CPU")
    parser.add_argument("--suite", nargs="+", choices=["grid", "layers", "tune"], default=["grid", "layers"])
    parser.add_argument("--output", type=Path, default=None, help="JSON file; CSV, plots and tables lie beside it")
    parser.add_argument(
        "--max-seconds", type=float, default=None, help="for everything (default: 250, a smoke run: 600)"
    )
    parser.add_argument("--workers", type=int, default=None, help="processes (default: cores - 2; smoke: 0, itself)")
    parser.add_argument("--cache", type=Path, default=None, help="folder for executables, for runs after this one")
    parser.add_argument("--restart", action="store_true", help="forget the rows of the output file")
    parser.add_argument("--plan", action="store_true", help="say what would run, and how long that may take")
    for name, kind, default in (
        ("nodes", int, NODES),
        ("groups", int, GROUPS),
        ("dims", int, DIMS),
        ("contexts", int, CONTEXTS),
        ("overlaps", float, OVERLAPS),
    ):
        parser.add_argument(f"--{name}", type=kind, nargs="+", default=None, help=f"default: {default}")
        parser.set_defaults(**{f"_{name}": default})
    args = parser.parse_args()
    if args.smoke:
        small = {"nodes": [3], "groups": [2], "dims": [16], "contexts": [256], "overlaps": [0.75]}
        vars(args).update(small)
    for name in ("nodes", "groups", "dims", "contexts", "overlaps"):
        given = getattr(args, name)
        if given is None and name in ("groups", "contexts", "dims") and args.suite == ["tune"]:
            given = {"groups": (), "contexts": (65536,), "dims": (128,)}[name]
        setattr(args, name, tuple(getattr(args, f"_{name}") if given is None else given))
    if min(*args.nodes, *args.contexts, *args.dims, 1) < 1:
        parser.error("--nodes, --contexts and --dims must be positive")
    if any(not 1 <= group <= 32 for group in args.groups):
        parser.error("--groups must be between 1 and 32: an ownership mask has 32 bits")
    if any(not 0 <= share <= 1 for share in args.overlaps):
        parser.error("--overlaps must be between 0 and 1")
    if args.max_seconds is None:
        args.max_seconds = 600.0 if args.smoke else 250.0
    if args.workers is not None and args.workers < 0:
        parser.error(f"--workers must not be negative, got {args.workers}")
    if args.max_seconds <= 0:
        parser.error("--max-seconds must be positive")
    if not args.smoke and not args.plan and jax.default_backend() != "gpu":
        parser.error(f"needs an NVIDIA GPU, JAX runs on {jax.default_backend()}: --smoke and --plan run anywhere")
    if args.workers is None:
        args.workers = 0 if args.smoke else max(1, (os.cpu_count() or 4) - 2)
    return args


def save_tables(rows: timing.Rows, cases: list[Case]) -> None:
    """Tables of the winners beside the rows."""
    folder = Path(programs.__file__).parent.parent / "pallas_kernels"
    device = jax.devices()[0].device_kind.lower().replace(" ", "_")
    known = folder / "sparse_verify" / "tiles" / f"{device}.json"
    current = json.loads(known.read_text()) if known.exists() else {}
    table, wins = tune.attention_table(list(rows.rows.values()), cases, current)
    tables = {"sparse_verify": table}
    rows.about |= {"attention": wins, "left_out": tune.MULTICAST}
    if any(row.get("op") == "select" for row in rows.rows.values()):
        tables["block_select"], rows.about["select"] = tune.select_table(list(rows.rows.values()), cases)
    for op, found in tables.items():
        path = rows.path.with_name(f"{rows.path.stem}.tiles-{op}.json")
        path.write_text(json.dumps(found, indent=2) + "\n")
        harness.say(f"wrote {path}: to use it, copy it to pallas_kernels/{op}/tiles/{device}.json")
    for win in wins:
        taken = "taken" if win["taken"] else "kept"
        print(
            f"{win['op']} T={win['nodes']} C={win['group']} D={win['dim']} {win['context']}: library "
            f"{win['library_us']:.2f} us, best of {win['tried']} {win['best_us']:.2f} us, {taken}"
        )


def save_report(rows: timing.Rows) -> None:
    """Ratios, CSV and plots."""
    found = list(rows.rows.values())
    rows.about |= {"speedups": report.speedups(found), "side_by_side": report.side_by_side(found)}
    harness.write_csv(rows.path.with_suffix(".csv"), report.flat(found))
    harness.plot(rows.path.with_suffix(".grid.png"), lambda axes: report.draw_grid(axes, found), columns=3)
    harness.plot(rows.path.with_suffix(".ratios.png"), lambda axes: report.draw_ratios(axes, found), columns=2)
    for name in ("speedups", "side_by_side"):
        table = rows.about[name]
        shown = dict.fromkeys(field for row in table for field in row if not field.endswith("all_launches"))
        print(f"{name}\n{harness.columns(table, list(shown))}\n")


def run_suites(args: argparse.Namespace, name: str, output: Path, until: float) -> None:
    """Runs jobs and saves what came of them; `name` is "bench" or "tune"."""
    about = {"command": f"python experiments/kernel_bench.py --suite {' '.join(args.suite)}", "suite": name}
    rows = timing.Rows(output, about, args.restart)
    rate = None
    if jax.default_backend() == "gpu":
        rows.about["read_rate"] = timing.read_rate()
        rate = rows.about["read_rate"]["median"]
        harness.say(f"read rate {rate / 1e9:.0f} GB/s")
    cases: list[Case] = []
    if name == "tune":
        cases = tune.problems(args.nodes, args.contexts, args.dims, args.groups)
        if args.smoke:
            cases = [Plan(args, None, True).case(3, 2, 16, 256)]
        jobs = tune.jobs(cases, max(args.contexts), rate, args.smoke, few=1 if args.smoke else 0)
        if args.smoke:
            jobs = [job for job in jobs if job.arguments["op"] == "verify"]
    else:
        jobs = Plan(args, rate, args.smoke).all(args.suite)
    total, jobs = len(jobs), without_known(jobs, rows.rows)
    points = sum(len(job.keys) for job in jobs)
    seconds = estimate(jobs, args.workers)
    harness.say(f"{name}: {len(jobs)} of {total} programs to run, {points} points, about {seconds:.0f} s")
    if args.plan:
        for job in jobs:
            print(f"{len(job.keys):>4}  {job.name}")
        return
    finished = 0

    def done(job: timing.Job, found: list[dict[str, Any]] | str, seconds: float) -> None:
        nonlocal finished
        finished += 1
        if isinstance(found, str):
            harness.say(f"{job.name} failed: {found}")
            rows.add([{"key": key, "error": found[:500]} for key in job.keys])
            return
        rows.add(found)
        shown = " ".join(f"{row['us']['median']:.2f}" for row in found[:3])
        harness.say(f"[{finished}/{len(jobs)}] {job.name}: {shown} us ({seconds:.1f} s)")

    folder = str(args.cache) if args.cache else None
    timing.keep_compiled(folder)
    patience = min(15.0, 0.06 * args.max_seconds)
    left = timing.run(
        jobs, workers=args.workers, until=until - 2 * patience, patience=patience, cache=folder, done=done
    )
    rows.about["not_measured"] = [job.name for job in left]
    if left:
        harness.say(f"{len(left)} programs were not run: the same command goes on")
    rows.save()
    if name == "tune":
        save_tables(rows, cases)
    else:
        save_report(rows)
    rows.save()
    harness.say(f"wrote {output}")
    failed = [row["error"] for row in rows.rows.values() if "error" in row]
    if failed:
        sys.exit(f"error: {len(failed)} points failed, the first with {failed[0]}")


def main() -> None:
    """Command line."""
    timing.prepare("--smoke" in sys.argv)
    began = time.time()
    args = parse()
    until = began + args.max_seconds
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    kinds = ["bench"] if set(args.suite) - {"tune"} else []
    kinds += ["tune"] if args.smoke or "tune" in args.suite else []
    for kind in kinds:
        name = "smoke" if args.smoke else f"{kind}-{device}"
        output = args.output or harness.RESULTS / "kernels" / f"{name}.json"
        if kind == "tune" and (args.output or args.smoke):
            output = output.with_name(f"{output.stem}.tune.json")
        try:
            run_suites(args, kind, output, until)
        except ValueError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
