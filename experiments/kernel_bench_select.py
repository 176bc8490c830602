"""Checks and times the compressed-branch and selection kernels on a GPU, beside the XLA implementation.

    python experiments/kernel_bench_select.py results.json --suite check,tune,table --seconds 400

Kernel times are CUPTI medians from `jax.profiler` over calls that rotate through several caches, so that the L2 cache
holds none of them. Floors: the entries' bytes over the read rate measured in the same run. Random data.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import glob
import importlib
import json
import pathlib
import tempfile
import time
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax.pallas_kernels import CachedKV, Geometry, TreeKV, TreeQueries, completions, merge

PACKAGE = "ssv_jax.pallas_kernels.block_select"
GEOMETRY = Geometry(
    kernel_size=32, kernel_stride=16, block_size=64, n_blocks=16, init_blocks=1, local_blocks=2, window=512
)
KV_HEADS, HEADS = 8, 4
CACHE_BYTES = 120e6  # of all rotating caches together: twice the L2


def module(name: str) -> Any:
    """A module of the op (the package's functions shadow the op packages as attributes)."""
    return importlib.import_module(f"{PACKAGE}.{name}")


def random_tree(rng: np.random.Generator, batch: int, nodes: int, kind: str) -> tuple[np.ndarray, ...]:
    """Parents, depths and ancestors of `nodes` nodes: a chain, a star below the root, or a random tree."""
    parent = np.full((batch, nodes), -1, np.int32)
    depth = np.zeros((batch, nodes), np.int32)
    ancestor = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for t in range(nodes):
            ancestor[b, t, t] = True
            if t:
                parent[b, t] = {"chain": t - 1, "star": 0}.get(kind, int(rng.integers(max(0, t - 4), t)))
                depth[b, t] = depth[b, parent[b, t]] + 1
                ancestor[b, t] |= ancestor[b, parent[b, t]]
    return parent, depth, ancestor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One workload."""

    nodes: int
    context: int = 65536
    length: int | tuple[int, ...] | None = None
    dim: int = 128
    kv_heads: int = KV_HEADS
    heads: int = HEADS
    tree: str = "random"
    geometry: Geometry = GEOMETRY
    dtype: Any = jnp.bfloat16
    batch: int = 1
    values: str = "normal"  # or "levels": few distinct keys, so that scores tie

    def make(self, seed: int = 0, caches: int = 1) -> tuple[list[Any], list[CachedKV], TreeKV, TreeQueries]:
        """Queries and caches that rotate, the tree, and where its nodes stand. Unseen entries are poisoned."""
        rng = np.random.default_rng(seed)
        keys = iter(jax.random.split(jax.random.key(seed), 6 * caches + 6))
        geometry, batch, heads, dim = self.geometry, self.batch, self.kv_heads, self.dim
        length = self.context - self.nodes - 3 if self.length is None else self.length
        lengths = np.broadcast_to(np.asarray(length), (batch,))
        parent, depth, ancestor = random_tree(rng, batch, self.nodes, self.tree)
        queries = TreeQueries(
            length=jnp.asarray(lengths, jnp.int32),
            position=jnp.asarray(lengths[:, None] + depth, jnp.int32),
            ancestor=jnp.asarray(ancestor),
            parent=jnp.asarray(parent),
        )
        done = completions(queries, geometry)
        entries = max(geometry.entries(self.context), 1)
        seen = jnp.arange(entries) < geometry.num_entries(queries.length)[:, None]
        blank = jnp.zeros((batch, heads, self.context, dim), self.dtype)

        def draw(count: int, mask: Any) -> Any:
            x = jax.random.normal(next(keys), (batch, heads, count, dim))
            if self.values == "levels":
                x = jnp.round(x[:, :, :4])[:, :, jax.random.randint(next(keys), (count,), 0, 4)]
            return jnp.where(mask[:, None, :, None], x, 3e4).astype(self.dtype)

        q = [
            jax.random.normal(next(keys), (batch, self.nodes, heads, self.heads, dim)).astype(self.dtype)
            for _ in range(caches)
        ]
        cached = [CachedKV(k=blank, v=blank, k_cmp=draw(entries, seen), v_cmp=draw(entries, seen)) for _ in q]
        mine = jnp.zeros((batch, heads, self.nodes, dim), self.dtype)
        slots = done.node.shape[1]
        tree = TreeKV(
            k=mine, v=mine, k_cmp=draw(slots, done.node >= 0), v_cmp=draw(slots, done.node >= 0), completions=done
        )
        return q, cached, tree, queries

    @property
    def bytes(self) -> int:
        """Of the compressed keys and values."""
        return 2 * self.batch * self.kv_heads * self.geometry.entries(self.context) * self.dim * 2


def profile(call: Any, repeats: int = 3) -> dict[str, list[float]]:
    """Microseconds of every kernel by name over `repeats` calls."""
    jax.block_until_ready(call())
    times = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(call())
        for path in glob.glob(folder + "/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                if "/device:GPU" in plane.name:
                    for line in plane.lines:
                        if "Stream" in line.name:
                            for event in line.events:
                                times[event.name].append(event.duration_ns / 1e3)
    return dict(times)


def spread_of(times: list[float]) -> dict[str, float]:
    """Median with 10th and 90th percentiles."""
    return {
        "median_us": round(float(np.median(times)), 2),
        "p10_us": round(float(np.percentile(times, 10)), 2),
        "p90_us": round(float(np.percentile(times, 90)), 2),
    }


def ceiling() -> float:
    """Measured read rate, bytes per second."""
    x = jnp.ones((1 << 30,), jnp.bfloat16)
    read = jax.jit(lambda x: jnp.max(x.reshape(-1, 4096), axis=1))
    times = profile(lambda: read(x), 5)
    return 2.0 * x.size / (max(np.median(t) for t in times.values()) * 1e-6)


def scores_of(case: Case, args: tuple[Any, ...]) -> Any:
    """Float32 scores per block, from the definition."""
    q, cached, tree, queries = args
    reference = module("reference")
    p, _ = reference._probabilities(q, cached, tree, queries, case.geometry, case.dim**-0.5)
    entries = cached.k_cmp.shape[2]
    entry = jnp.concatenate(
        [jnp.broadcast_to(jnp.arange(entries), (q.shape[0], entries)), tree.completions.entry], axis=1
    )
    blocks = jnp.arange(case.context // case.geometry.block_size)
    weight = module("mosaic_gpu")._overlap(entry[..., None], blocks, case.geometry, jnp)
    return jnp.einsum("bkte,beu->bktu", p.sum(3), weight.astype(jnp.float32))


def check(case: Case, group: int, config: Any = None, seed: int = 1) -> dict[str, Any]:
    """One case against the float32 definition, twice for repeatability."""
    gpu = module("mosaic_gpu")
    (q,), (cached,), tree, queries = case.make(seed)
    args = (q, cached, tree, queries)
    scale = case.dim**-0.5

    def run(*args: Any) -> Any:
        result = gpu.select_and_attend(*args, geometry=case.geometry, scale=scale, group=group, config=config)
        alone = gpu.select_and_attend(*args, geometry=case.geometry, scale=scale, select=False, config=config).out
        return result.out, result.blocks, result.merged, result.owners, alone

    run = jax.jit(run)
    first, second = run(*args), run(*args)
    out, blocks, merged, owners, alone = first
    repeats = all(bool((a == b).all()) for a, b in zip(first, second, strict=True) if a is not None)
    with jax.default_matmul_precision("highest"):
        want, chosen = jax.jit(lambda *a: module("reference").block_select(*a, geometry=case.geometry, scale=scale))(
            *args
        )
        scores = scores_of(case, args)
    error = float(jnp.linalg.norm(out - want) / jnp.maximum(jnp.linalg.norm(want), 1e-30))
    differ = np.argwhere(np.asarray((blocks != chosen).any(-1)))
    gaps = []
    for b, k, t in differ:
        values = np.asarray(scores[b, k, t])
        mine, theirs = set(np.asarray(blocks[b, k, t])) - {-1}, set(np.asarray(chosen[b, k, t])) - {-1}
        odd = [values[x] for x in mine ^ theirs]
        odd = odd or [float("inf"), 0.0]  # the same set, in a wrong order
        gaps.append(float((max(odd) - min(odd)) / max(max(odd), 1e-30)) if len(mine) == len(theirs) else float("inf"))
    schedule = None
    if group:
        want_schedule = merge(blocks, group, case.context // case.geometry.block_size)
        schedule = bool((want_schedule.blocks == merged).all() & (want_schedule.owners == owners).all())
    return {
        "rows": int(np.prod(blocks.shape[:3])),
        "rows_differ": len(differ),
        "worst_gap": max(gaps, default=0.0),
        "rel_err": error,
        "alone_max_diff": float(jnp.abs(alone - out).max()),
        "nan": bool(jnp.isnan(out).any()),
        "schedule": schedule,
        "repeats": repeats,
        "example": None
        if not len(differ)
        else [x[tuple(differ[0])].tolist() for x in map(np.asarray, (blocks, chosen))],
    }


class Timing:
    """One workload with its compiled launches; compiling and timing are apart, so that compiling can be parallel."""

    def __init__(self, case: Case, group: int, config: Any = None, whole: bool = False) -> None:
        self.gpu = module("mosaic_gpu")
        self.case, self.group, self.config, self.whole = case, group, config, whole
        self.caches = max(1, min(12, round(CACHE_BYTES / case.bytes)))

    def compile(self) -> "Timing":
        """Everything that takes the host's time."""
        case, gpu = self.case, self.gpu
        q, cached, tree, queries = case.make(0, self.caches)
        scale, shape = case.dim**-0.5, q[0].shape
        self.args = [(*a, tree, queries) for a in zip(q, cached, strict=True)]
        self.ready = [
            gpu.lay_out(*a, geometry=case.geometry, scale=scale, select=True, group=self.group, config=self.config)
            for a in self.args
        ]
        names = [f.name for f in dataclasses.fields(self.ready[0])]
        names = [n for n in names if isinstance(getattr(self.ready[0], n), jax.Array)]
        self.arrays = [{n: getattr(r, n) for n in names} for r in self.ready]
        first = self.ready[0]

        def attend(values: dict[str, Any]) -> list[Any]:
            parts = dataclasses.replace(first, **values).attend(scale=scale)
            return [parts.out, parts.stats, parts.mass, parts.top, parts.tree]

        def finish(values: dict[str, Any], parts: list[Any]) -> Any:
            partials = module("mosaic_attend").Partials(
                out=parts[0], stats=parts[1], mass=parts[2], top=parts[3], tree=parts[4]
            )
            return dataclasses.replace(first, **values).finish(partials, shape)

        self.attend = jax.jit(attend).lower(self.arrays[0]).compile()
        self.ops = {}
        parts = jax.eval_shape(attend, self.arrays[0])
        self.finish = jax.jit(finish).lower(self.arrays[0], parts).compile()
        if self.whole:

            def ours(*a: Any) -> Any:
                r = gpu.select_and_attend(*a, geometry=case.geometry, scale=scale, group=self.group, config=self.config)
                return r.out, r.blocks, r.merged, r.owners

            def theirs(*a: Any) -> Any:
                out, blocks = module("xla").block_select(*a, geometry=case.geometry, scale=scale)
                return out, merge(blocks, self.group, case.context // case.geometry.block_size)

            self.ops = {n: jax.jit(f).lower(*self.args[0]).compile() for n, f in (("op", ours), ("xla_op", theirs))}
        return self

    def time(self) -> dict[str, Any]:
        """Kernel times by launch, and of whole ops."""
        result: dict[str, Any] = {"config": dataclasses.asdict(self.ready[0].config), "caches": self.caches}
        times = profile(lambda: [self.finish(values, self.attend(values)) for values in self.arrays])
        for kernel in ("nsa_compressed_scores", "nsa_select", "nsa_merge"):
            found = [t for name, ts in times.items() if name.startswith(kernel) for t in ts]
            if found:
                result[kernel] = spread_of(found)
        result["sum_us"] = round(sum(v["median_us"] for k, v in result.items() if k.startswith("nsa")), 2)
        for name, op in self.ops.items():
            times = profile(lambda op=op: [op(*a) for a in self.args])
            calls = 3 * self.caches
            result[name] = {
                "us_per_call": round(sum(map(sum, times.values())) / calls, 2),
                "kernels_per_call": round(sum(map(len, times.values())) / calls, 2),
            }
        return result


def config_of(spec: str) -> tuple[int, int, int, Any]:
    """Nodes, context, head dim and tiles of a `--tune` or `--checks` item."""
    nodes, context, dim, tile, splits, warpgroups, stages, select_warps = map(int, spec.split(":"))
    config = module("mosaic_attend").AttendConfig(
        tile=tile, splits=splits, warpgroups=warpgroups, stages=stages, select_warps=select_warps
    )
    return nodes, context, dim, config


def check_cases() -> list[tuple[str, Case, int, Any]]:
    """Shapes, boundaries and ties."""

    def with_sizes(**sizes: int) -> Geometry:
        return dataclasses.replace(GEOMETRY, **sizes)

    nsa1b = with_sizes(kernel_size=16, kernel_stride=16, block_size=16, init_blocks=0, local_blocks=1)
    return [
        ("T65", Case(nodes=65), 4, None),
        ("T1", Case(nodes=1), 1, None),
        ("T5 64", Case(nodes=5, dim=64, context=8192), 2, None),
        ("T17 chain 8 groups", Case(nodes=17, tree="chain", context=16384), 8, None),
        ("T65 star 16", Case(nodes=65, tree="star", context=8192, length=8192 - 97), 16, None),
        ("T129 128K", Case(nodes=129, tree="chain", context=131072), 4, None),
        ("ties", Case(nodes=65, values="levels", context=32768), 4, None),
        ("G3 short", Case(nodes=21, heads=3, context=4096, length=40), 3, None),
        ("G1", Case(nodes=70, heads=1, context=8192, length=5000), 4, None),
        ("G16 l=d=l'", Case(nodes=9, heads=16, kv_heads=2, dim=64, context=16384, geometry=nsa1b), 1, None),
        ("stride 8", Case(nodes=17, context=8192, geometry=with_sizes(kernel_stride=8)), 4, None),
        ("block 32", Case(nodes=17, context=8192, geometry=with_sizes(block_size=32)), 2, None),
        ("empty", Case(nodes=4, context=4096, length=5), 4, None),
        ("batch fp16", Case(nodes=6, batch=3, length=(20, 4000, 8180), context=8192, dtype=jnp.float16), 5, None),
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=pathlib.Path)
    parser.add_argument("--suite", default="check,table", help="comma-separated: check, tune, table")
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--tune", default="", help="nodes:context:dim:tile:splits:warpgroups:stages:select_warps,...")
    parser.add_argument("--checks", default="", help="checks of tile choices, as --tune")
    parser.add_argument("--rows", type=int, default=99, help="rows of the table, the most telling first")
    parser.add_argument("--after", type=pathlib.Path, help="start timing once this file exists")
    parser.add_argument("--shard", default="0/1", help="i/n: every n-th check from i on")
    arguments = parser.parse_args()
    shard, shards = map(int, arguments.shard.split("/"))
    began = time.time()
    result: dict[str, Any] = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}

    def attempt(section: str, name: str, call: Any) -> None:
        if time.time() - began > arguments.seconds:
            return
        start = time.time()
        try:
            value = call()
        except Exception as error:  # noqa: BLE001 - one bad case must not cost the others
            traceback.print_exc()
            value = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        result.setdefault(section, {})[name] = value
        print(f"{section} {name}: {json.dumps(value)[:900]} [{time.time() - start:.1f} s]", flush=True)
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")

    suites = arguments.suite.split(",")
    if "table" in suites and jax.default_backend() == "gpu":
        attempt("ceiling", "bytes_per_second", ceiling)
    if "check" in suites:
        for name, case, group, config in check_cases()[shard::shards]:
            attempt("check", name, lambda case=case, group=group, config=config: check(case, group, config))
    for spec in filter(None, arguments.checks.split(",")):
        nodes, context, dim, config = config_of(spec)
        case = Case(nodes=nodes, context=context, dim=dim)
        attempt("check", spec, lambda case=case, config=config: check(case, min(case.nodes, 4), config))
    timings: dict[tuple[str, str], Timing] = {}
    for spec in filter(None, arguments.tune.split(",")):
        nodes, context, dim, config = config_of(spec)
        timings["tune", spec] = Timing(Case(nodes=nodes, context=context, dim=dim), min(nodes, 4), config)
    if "table" in suites:
        for dim, context, nodes in [
            *((128, 65536, n) for n in (65, 1, 5, 17, 129)),
            *((128, c, n) for c in (8192, 131072, 16384, 32768) for n in (65, 1, 5, 17, 129)),
            *((64, c, n) for c in (65536, 8192) for n in (65, 1, 5, 17, 129)),
        ][: arguments.rows]:
            name = f"T={nodes} context={context} D={dim}"
            whole = context == 65536 and dim == 128
            timings["table", name] = Timing(Case(nodes=nodes, context=context, dim=dim), min(nodes, 4), whole=whole)
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        compiled = {key: pool.submit(timing.compile) for key, timing in timings.items()}
        for section, name in timings:
            attempt("compiled", f"{section} {name}", lambda k=(section, name): bool(compiled[k].result()))
    while arguments.after and not arguments.after.exists() and time.time() - began < arguments.seconds:
        time.sleep(0.2)
    for (section, name), timing in timings.items():
        attempt(section, name, timing.time)


if __name__ == "__main__":
    main()
