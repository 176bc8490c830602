"""Times the sparse verification and reuse kernels on a GPU against bytes over the measured read rate.

    python experiments/kernel_bench_sparse.py results.json --suite quick --seconds 200

Kernel times are CUPTI medians from `jax.profiler` over calls that rotate through several caches and selections, so
that the L2 cache holds none of them; each call's queries come from the call before. Random data.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import glob
import importlib
import itertools
import json
import math
import pathlib
import statistics
import tempfile
import threading
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax.pallas_kernels import (
    CachedKV,
    Geometry,
    MergedSchedule,
    Selection,
    TreeKV,
    TreeQueries,
    completions,
    merge,
)

PACKAGE = "ssv_jax.pallas_kernels"
KERNEL = "sparse_"  # names of the kernels begin with it
KV_HEADS, HEADS, BLOCKS = 8, 4, 16
CACHES, CALLS = 4, 16


def module(name: str) -> Any:
    """A module of the kernel package (its functions shadow the op packages as attributes)."""
    return importlib.import_module(f"{PACKAGE}.{name}")


_lock = threading.RLock()


def once(function: Any) -> Any:
    """`functools.cache` of which no two threads compute the same entry."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _lock:
            return cached(*args, **kwargs)

    return locked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload."""

    nodes: int
    group: int
    dim: int = 128
    context: int = 65536
    overlap: float = 0.75
    op: str = "verify"  # or "reuse"
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    block_size: int = 64
    window: int = 512


def geometry(case: Case) -> Geometry:
    """The geometry of the paper, with the case's block size and window."""
    return Geometry(
        kernel_size=32,
        kernel_stride=16,
        block_size=case.block_size,
        n_blocks=BLOCKS,
        init_blocks=1,
        local_blocks=2,
        window=case.window,
    )


def tree_of(case: Case, length: int, rng: np.random.Generator) -> TreeQueries:
    """A random tree in breadth-first order, up to 8 deep."""
    nodes = case.nodes
    parent, depth = np.full(nodes, -1), np.zeros(nodes, int)
    ancestor = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        depth[node] = min(1 + (node - 1) * 8 // nodes, depth[node - 1] + 1)
        parent[node] = rng.choice(np.flatnonzero(depth[:node] == depth[node] - 1))
        ancestor[node] |= ancestor[parent[node]]
    return TreeQueries(
        length=jnp.full((1,), length, jnp.int32),
        position=jnp.asarray(length + depth, jnp.int32)[None],
        ancestor=jnp.asarray(ancestor)[None],
        parent=jnp.asarray(parent, jnp.int32)[None],
    )


def selection_of(case: Case, position: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Forced blocks plus free ones, of which adjacent nodes share so many that the overlap is as stated."""
    size, nodes = case.block_size, case.nodes
    chosen = np.full((1, case.kv_heads, nodes, BLOCKS), -1, np.int32)
    own = position // size
    for head in range(case.kv_heads):
        free = np.zeros(0, int)
        for node in range(nodes):
            forced = np.unique([0, max(own[node] - 1, 0), own[node]])
            pool = np.setdiff1d(np.arange(own[0] - 1), [0])
            want = min(BLOCKS - len(forced), len(pool))
            keep = min(len(free), want, max(0, round(case.overlap * BLOCKS) - len(forced)))
            kept = rng.permutation(free)[:keep]
            rest = np.setdiff1d(pool, free)
            if len(rest) < want - keep:
                rest = np.setdiff1d(pool, kept)
            free = np.concatenate([kept, rng.choice(rest, want - keep, replace=False)])
            blocks = np.sort(np.concatenate([forced, free]))
            chosen[0, head, node, : len(blocks)] = blocks
    return chosen


def random_arrays(key: jax.Array, *shapes: tuple[int, ...]) -> list[jax.Array]:
    """Normal bfloat16 arrays."""
    keys = jax.random.split(key, len(shapes))
    return [jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True)]


@once
def caches(case: Case) -> list[CachedKV]:
    """The rotating caches of a shape."""
    geo = geometry(case)
    full = (1, case.kv_heads, case.context, case.dim)
    short = (1, case.kv_heads, geo.entries(case.context), case.dim)
    make = jax.jit(lambda key: random_arrays(key, full, full, short, short))
    found = []
    for index in range(CACHES):
        k, v, k_cmp, v_cmp = make(jax.random.key(index))
        found.append(CachedKV(k=k, v=v, k_cmp=k_cmp, v_cmp=v_cmp))
    return found


def shared_caches(case: Case) -> list[CachedKV]:
    """As `caches`, one allocation for all cases of a shape."""
    return caches(dataclasses.replace(case, nodes=1, group=1, overlap=0.0, op="verify"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Inputs of a case, and its bytes."""

    q: jax.Array
    gates: jax.Array
    tree: TreeKV
    queries: TreeQueries
    selections: list[Selection]
    unique_bytes: float
    loaded_bytes: float


@once
def workload(case: Case, calls: int = CALLS) -> Workload:
    """Random inputs of a case."""
    rng = np.random.default_rng(case.nodes)
    length = case.context - case.nodes - 8 - 13
    queries = tree_of(case, length, rng)
    shape = (1, case.kv_heads, case.nodes, case.dim)
    k, v, q, gates, k_cmp, v_cmp = random_arrays(
        jax.random.key(7),
        shape,
        shape,
        (1, case.nodes, case.kv_heads, case.heads, case.dim),
        (1, case.nodes, case.kv_heads, case.heads, 3),
        shape,
        shape,
    )
    geo = geometry(case)
    tree = TreeKV(k=k, v=v, k_cmp=k_cmp, v_cmp=v_cmp, completions=completions(queries, geo))
    fused = jax.jit(functools.partial(merge, group=case.group, num_blocks=case.context // case.block_size))
    block_bytes = case.block_size * case.dim * 2 * 2
    window = -(-(case.window + case.block_size) // case.block_size)
    selections, unique, loaded = [], [], []
    for _ in range(calls):
        chosen = selection_of(case, np.asarray(queries.position[0]), rng)
        schedule = fused(jnp.asarray(chosen))
        selections.append(Selection(blocks=jnp.asarray(chosen), schedule=schedule))
        loaded.append(int((np.asarray(schedule.blocks) >= 0).sum()) * block_bytes)
        near = np.arange(length // case.block_size - window + 1, length // case.block_size + 1)
        for head in range(case.kv_heads):
            seen = np.union1d(chosen[0, head], near)
            unique.append(int((seen >= 0).sum()) * block_bytes)
    total = statistics.mean(unique) * case.kv_heads
    if case.op == "reuse":
        total += case.kv_heads * geo.entries(length) * case.dim * 2 * 2
    return Workload(
        q=q,
        gates=jax.nn.sigmoid(gates.astype(jnp.float32)),
        tree=tree,
        queries=queries,
        selections=selections,
        unique_bytes=total,
        loaded_bytes=statistics.mean(loaded),
    )


def kernel_times(function: Any, arguments: tuple[Any, ...], repeats: int = 1) -> dict[str, list[float]]:
    """CUPTI durations in microseconds by kernel name."""
    jax.block_until_ready(function(*arguments))
    times: dict[str, list[float]] = collections.defaultdict(list)
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(repeats):
                jax.block_until_ready(function(*arguments))
        for path in glob.glob(folder + "/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if "/device:GPU" not in plane.name:
                    continue
                for line in plane.lines:
                    if "Stream" in line.name:
                        for event in line.events:
                            times[event.name].append(event.duration_ns / 1e3)
    return times


def read_rate() -> float:
    """Measured read rate of device memory in bytes a second: row maxima of 4 GiB."""
    x = jax.random.normal(jax.random.key(0), (16384, 131072), jnp.bfloat16)
    times = kernel_times(jax.jit(lambda x: x.max(axis=1)), (x,), repeats=5)
    longest = max(times.values(), key=sum)
    return x.nbytes / (statistics.median(longest) * 1e-6)


def call(case: Case, config: Any) -> Any:
    """The kernel of a case, under a tile configuration (None: the one that the library chooses)."""
    lowered = module("sparse_verify.mosaic_gpu").lowered

    def run(
        q: jax.Array,
        cached: CachedKV,
        tree: TreeKV,
        queries: TreeQueries,
        schedule: MergedSchedule,
        gates: jax.Array,
    ) -> jax.Array:
        arguments = (q, cached, tree, queries, schedule, gates)
        options = {"geometry": geometry(case), "scale": case.dim**-0.5, "compressed": case.op == "reuse"}
        return lowered(*arguments, **options, config=config)

    return run


def config_of(case: Case, config: Any) -> dict[str, Any]:
    """What a call is really cut up like, for the record."""
    if config is None:
        work, choose = workload(case, calls=1), module("sparse_verify.mosaic_gpu").choose
        schedule = work.selections[0].schedule
        config = choose(work.q, shared_caches(case)[0], schedule, geometry(case), compressed=case.op == "reuse")
    return dataclasses.asdict(config)


def oracle(case: Case) -> Any:
    """The portable implementation in float32."""

    def run(
        q: jax.Array,
        cached: CachedKV,
        tree: TreeKV,
        queries: TreeQueries,
        selection: Selection,
        gates: jax.Array,
    ) -> jax.Array:
        q, cached, tree = jax.tree.map(
            lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, (q, cached, tree)
        )
        options = {"geometry": geometry(case), "scale": case.dim**-0.5}
        if case.op == "reuse":
            ops = module("nsa_fused.xla")
            return ops.reuse_attention(q, cached, tree, queries, gates, selection, **options)
        ops = module("sparse_verify.xla")
        return ops.sparse_verify(q, cached, tree, queries, selection.schedule, gates, **options)

    return run


def poisoned(case: Case, clean: bool) -> CachedKV:
    """A cache whose rows past the length are zero, or as large as finite numbers get."""
    work, cached, geo = workload(case, calls=1), shared_caches(case)[0], geometry(case)
    length = work.queries.length[0]
    past = {"k": length, "v": length, "k_cmp": geo.num_entries(length), "v_cmp": geo.num_entries(length)}

    def fill(name: str, sign: int) -> jax.Array:
        x = getattr(cached, name)
        unread = (jnp.arange(x.shape[2]) >= past[name])[:, None]
        return jnp.where(unread, 0.0 if clean else sign * 3e38, x).astype(x.dtype)

    return CachedKV(k=fill("k", 1), v=fill("v", -1), k_cmp=fill("k_cmp", -1), v_cmp=fill("v_cmp", 1))


@once
def expected(case: Case) -> np.ndarray:
    """The case's output, in float32 by portable code."""
    work = workload(case, calls=1)
    arguments = (work.q, poisoned(case, True), work.tree, work.queries, work.selections[0], work.gates)
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(oracle(case))(*arguments), np.float64)


def compiled(kind: str, case: Case, config: Any) -> tuple[Any, tuple[Any, ...], list[float]]:
    """A case's program, its arguments, and the seconds to lower and to compile it."""
    work = workload(case, calls=1 if kind == "checks" else CALLS)
    run = call(case, config)
    schedules = [selection.schedule for selection in work.selections]
    if kind == "checks":
        function, rotating = run, poisoned(case, False)
        arguments = (work.q, rotating, work.tree, work.queries, schedules[0], work.gates)
    else:

        def function(q: jax.Array, caches: Any, tree: Any, queries: Any, schedules: Any, gates: Any) -> jax.Array:
            for index, schedule in enumerate(schedules):
                out = run(q, caches[index % len(caches)], tree, queries, schedule, gates)
                q = out.astype(q.dtype)
            return q

        arguments = (work.q, shared_caches(case), work.tree, work.queries, schedules, work.gates)
    began = time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    between = time.perf_counter()
    program = lowered.compile()
    return program, arguments, [between - began, time.perf_counter() - between]


def check(case: Case, config: Any, program: Any, arguments: tuple[Any, ...]) -> dict[str, Any]:
    """Relative error against float32, with poison past the length, and bitwise repeatability."""
    first = np.asarray(program(*arguments))
    same = all(np.array_equal(first, np.asarray(program(*arguments))) for _ in range(20))
    want = expected(case)
    error = float(np.linalg.norm(first - want) / np.linalg.norm(want))
    return {"case": dataclasses.asdict(case), "config": config_of(case, config), "error": error, "repeats": same}


def bench(case: Case, config: Any, program: Any, arguments: tuple[Any, ...], rate: float) -> dict[str, Any]:
    """Kernel time of a case over rotating caches."""
    work = workload(case)
    times = kernel_times(program, arguments, repeats=2)
    count = 2 * len(work.selections)
    ours = {name: found for name, found in times.items() if name.startswith(KERNEL)}
    total = sum(map(sum, times.values())) / count
    median, low, high = (sum(map(function, ours.values())) for function in (statistics.median, min, max))
    return {
        "case": dataclasses.asdict(case),
        "config": config_of(case, config),
        "kernel_us": median,
        "kernel_min_us": low,
        "kernel_max_us": high,
        "launches_per_call": sum(map(len, ours.values())) / count,
        "kernels": {name[:24]: statistics.median(found) for name, found in ours.items()},
        "all_kernels_us": total,
        "other_kernels": {
            name[:40]: [len(found) / count, sum(found) / count] for name, found in times.items() if name not in ours
        },
        "unique_mb": work.unique_bytes / 1e6,
        "loaded_selected_mb": work.loaded_bytes / 1e6,
        "unique_share_of_read_rate": work.unique_bytes / (median * 1e-6) / rate,
    }


def suite(name: str) -> tuple[list[tuple[Case, Any]], list[tuple[Case, Any]]]:
    """(checks, benches) of a suite, as cases with options of `TileConfig` (None: the library's choice).

    A file holds {"checks": [[case, config], ...], "benches": [...]}.
    """
    if name.endswith(".json"):
        found = json.loads(pathlib.Path(name).read_text())
        read = {part: [(Case(**case), tiles) for case, tiles in found.get(part, [])] for part in ("checks", "benches")}
        return read["checks"], read["benches"]
    small = Case(nodes=17, group=8, context=8192, op="reuse")
    checks: list[tuple[Case, Any]] = [
        (small, {"selected": 3, "window": 2, "compressed": 2, "last": last}) for last in (0, 1)
    ]
    main_cases = [
        Case(nodes=65, group=16),
        Case(nodes=5, group=8),
        Case(nodes=65, group=16, op="reuse"),
        Case(nodes=1, group=1),
        Case(nodes=5, group=4),
        Case(nodes=65, group=8),
        Case(nodes=65, group=1),
        Case(nodes=129, group=16),
        Case(nodes=5, group=8, op="reuse"),
        Case(nodes=1, group=1, op="reuse"),
    ]
    benches: list[tuple[Case, Any]] = [(case, None) for case in main_cases]
    if name == "quick":
        return checks, benches
    checks += [
        (Case(nodes=65, group=8, context=8192), None),
        (Case(nodes=17, group=5, dim=64, heads=3, block_size=32, context=8192), None),
        (Case(nodes=129, group=16, context=8192, op="reuse"), None),
        (Case(nodes=7, group=3, heads=16, block_size=16, context=8192, op="reuse"), None),
        (Case(nodes=1, group=1, context=8192, heads=1, op="reuse"), None),
    ]
    for dim, context, overlap, nodes in itertools.product(
        (128, 64), (65536, 8192, 16384, 32768, 131072), (0.75, 0.5, 0.9), (1, 5, 17, 65, 129)
    ):
        for group in (1, 2, 4, 8, 16) if nodes > 1 else (1,):
            case = Case(nodes=nodes, group=group, dim=dim, context=context, overlap=overlap)
            benches += [(case, None), (dataclasses.replace(case, op="reuse"), None)]
    return checks, list(dict.fromkeys((case, None) for case, tiles in benches if tiles is None))


def add_baselines(rows: list[dict[str, Any]]) -> None:
    """Times of one launch per node, and of ungrouped nodes, beside the rows for which they were measured too."""

    def key(row: dict[str, Any], **changes: Any) -> str:
        return json.dumps(row["case"] | changes, sort_keys=True)

    times: dict[str, float] = {}
    for row in rows:
        if "kernel_us" in row:
            times[key(row)] = min(row["kernel_us"], times.get(key(row), math.inf))
    for row in rows:
        nodes = row["case"]["nodes"]
        for name, changes, factor in (("per_query_us", {"nodes": 1}, nodes), ("ungrouped_us", {}, 1)):
            found = times.get(key(row, group=1, **changes))
            if "kernel_us" in row and found is not None:
                row[name] = factor * found


def main() -> None:
    """Runs a suite within a time limit and writes what was measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--suite", default="quick", help="quick, full, or a JSON file of cases")
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--threads", type=int, default=4, help="that compile ahead; tracing takes turns")
    options = parser.parse_args()
    start = time.time()
    config_type = module("sparse_verify.tiles").TileConfig
    checks, benches = suite(options.suite)
    device = jax.devices()[0]
    results: dict[str, Any] = {
        "device": device.device_kind,
        "jax": jax.__version__,
        "checks": [],
        "benches": [],
    }
    rate = read_rate()
    results["read_rate_gb_s"] = rate / 1e9
    print(f"read rate {rate / 1e9:.0f} GB/s", flush=True)
    items = [("checks", *item) for item in checks] + [("benches", *item) for item in benches]
    pool = concurrent.futures.ThreadPoolExecutor(options.threads)
    programs = []
    for kind, case, tiles in items:
        config = None if tiles is None else config_type(**tiles)
        programs.append((kind, case, tiles, config, pool.submit(compiled, kind, case, config)))
    for number, (kind, case, tiles, config, program) in enumerate(programs):
        if time.time() - start > options.seconds:
            print(f"out of time before {case} ({len(programs) - number} left)", flush=True)
            break
        began = time.time()
        try:
            ready, arguments, seconds = program.result()
            programs[number] = ()  # so that the program and its inputs can go
            waited = time.time() - began
            if kind == "checks":
                row = check(case, config, ready, arguments)
            else:
                row = bench(case, config, ready, arguments, rate)
            row |= {"lower_s": seconds[0], "compile_s": seconds[1]}
        except Exception as error:
            waited = time.time() - began
            traceback.print_exc(limit=3)
            row = {"case": dataclasses.asdict(case), "config": tiles, "failed": str(error)[:500]}
        results[kind].append(row)
        options.output.write_text(json.dumps(results, indent=1))
        shown = {k: round(v, 5) for k, v in row.items() if isinstance(v, float | int)}
        others = {k: [round(x, 2) for x in v] for k, v in row.get("other_kernels", {}).items()}
        print(
            f"{case.op} T={case.nodes} C={case.group} D={case.dim} L={case.context} ov={case.overlap} {tiles} {shown} "
            f"{row.get('kernels', '')} {others if case.nodes == 5 else ''} [{waited:.1f}+{time.time() - began:.1f}s]",
            flush=True,
        )
    pool.shutdown(wait=False, cancel_futures=True)
    add_baselines(results["benches"])
    options.output.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
