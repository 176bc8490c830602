"""Times dense attention over a cache and a tree on a GPU, by tile configuration, against bytes and operations.

    python experiments/kernel_bench_dense.py OUT.json [--seconds 400] [--nodes 1 5 17 33 61 65 129 512]
        [--contexts 65536] [--dims 128 64] [--only-chosen] [--table TILES.json]

Kernel times are CUPTI medians over calls that rotate through several caches, so that the L2 cache holds none of them.
Every configuration is first compared with float32, with poison past the length. `--table` writes the fastest ones,
where they beat the library's choice, in the form of `pallas_kernels/dense_verify/tiles`. Random data; passes of 256
nodes and more are chunks of a prompt.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import time
import traceback
from pathlib import Path
from typing import Any

import _harness as harness
import _kernel_time as timing
import jax
import jax.numpy as jnp
import numpy as np
from _kernel_cases import Case, caches, module, normal, queries_of
from kernel_checks import error_of, same_bits, tolerance

CACHES, REPEATS = 4, 8
PEAK = 989e12  # operations a second of an H200's tensor cores in bfloat16, by its data sheet
GAIN = 0.03  # runs of one configuration differ by less
CHUNK = 256  # nodes from which a pass is a chunk of a prompt; of longer ones the last so many are compared


def case_of(nodes: int, context: int, dim: int) -> Case:
    """A workload of the 8B model's heads."""
    return Case(nodes=nodes, context=context, dim=dim, tree="chain" if nodes >= CHUNK else "broad")


def key_of(case: Case) -> str:
    """A case's key in the table."""
    return f"T{case.nodes} G{case.heads} K{case.batch * case.kv_heads} D{case.dim} L{case.context}"


def choose(case: Case) -> Any:
    """The library's configuration."""
    tiles = module("dense_verify.tiles")
    heads = case.batch * case.kv_heads
    return tiles.choose(nodes=case.nodes, heads=case.heads, kv_heads=heads, dim=case.dim, keys=case.context)


def configurations(case: Case) -> list[Any]:
    """What the library chooses, and others around it."""
    tiles = module("dense_verify.tiles")
    found = [choose(case)]
    row_tiles = -(-case.nodes // (tiles.ROWS // case.heads))
    for warpgroups in (2, 3):
        alone = row_tiles % warpgroups == 1
        once = max(1, tiles.CORES // (case.batch * case.kv_heads * -(-row_tiles // warpgroups)))
        for tile in (64, 128):
            if case.dim == 128 and warpgroups == 3 and tile == 128:
                continue  # too many registers
            stages = tiles.stages_of(warpgroups=warpgroups, tile=tile, dim=case.dim, alone=alone)
            for splits in sorted({once, max(1, 2 * once // 3), 2 * once}):
                for alternate in (False, True) if warpgroups == 2 and row_tiles % 2 == 0 else (False,):
                    config = tiles.TileConfig(
                        splits=splits, warpgroups=warpgroups, tile=tile, stages=stages, alternate=alternate
                    )
                    if splits * (warpgroups if alone else 1) <= tiles.MOST_PARTIALS and config not in found:
                        found.append(config)
    return found


@functools.lru_cache(maxsize=2)
def inputs(case: Case) -> tuple[Any, ...]:
    """Queries, the nodes' keys and values, and where they stand, on the device."""
    rng = np.random.default_rng(case.nodes)
    queries = queries_of(case, rng)
    rows = (case.batch, case.kv_heads, case.nodes, case.dim)
    q = normal((case.batch, case.nodes, case.kv_heads, case.heads, case.dim), case.dtype, rng)
    tree = [normal(rows, case.dtype, rng) for _ in range(2)]
    return jax.device_put((q, *tree, queries))


@functools.lru_cache(maxsize=1)
def pool(case: Case) -> list[Any]:
    """Caches that rotate."""
    return caches(case, CACHES)


def units(case: Case) -> list[list[tuple[Any, ...]]]:
    """Calls over the caches."""
    q, k, v, queries = inputs(case)
    return [[(q, cache.k, cache.v, k, v, queries)] for cache in pool(case)]


def program_of(case: Case, config: Any, shapes: tuple[Any, ...]) -> tuple[Any, dict[str, float]]:
    """The kernel under a configuration, or (None) the portable code."""
    if config is None:
        run = functools.partial(module("dense_verify.xla").dense_verify, scale=case.scale, window=None)
    else:
        run = functools.partial(module("dense_verify.mosaic_gpu").lowered, scale=case.scale, config=config)
    return timing.compiled(run, shapes)


@functools.lru_cache(maxsize=1)
def expected(case: Case) -> np.ndarray:
    """The output in float32."""
    q, *rest, queries = units(case)[0][0]
    wide = [x.astype(jnp.float32) for x in (q[:, -CHUNK:], *rest)]
    run = functools.partial(module("dense_verify.xla").dense_verify, scale=case.scale, window=None)
    with jax.default_matmul_precision("highest"):
        return np.asarray(jax.jit(run)(*wide, queries))


def measure(case: Case, program: Any, rate: float) -> dict[str, Any]:
    """Error, repeatability and time."""
    calls = units(case)
    first = np.asarray(program(*calls[0][0]))
    error = error_of(first[:, -CHUNK:], expected(case))
    repeats = same_bits(lambda: program(*calls[0][0]), first, REPEATS)
    (timed,) = timing.measure(program, [calls], 4)
    length, us = sum(case.committed), timed["us"]["median"]
    read = 2.0 * case.kv_heads * length * case.dim * case.item
    operations = 4.0 * case.nodes * case.heads * case.kv_heads * (length + case.nodes / 2) * case.dim
    return {
        "passed": repeats and error < tolerance(case, False),
        "error": error,
        "us": us,
        **{name: timed[name] for name in ("kernels", "all_us") if name in timed},
        "share_of_read_rate": round(read / (us * 1e-6) / rate, 3),
        "share_of_peak": round(operations / (us * 1e-6) / PEAK, 3),
    }


def winners(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """By case, the fastest configuration where it beats the library's choice."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(row["case"] for row in rows):
        ours = [row for row in rows if row["case"] == name and row.get("passed") and row["config"]]
        chosen = [row["us"] for row in ours if row["chosen"]]
        fastest = min(ours, key=lambda row: row["us"], default=None)
        if fastest and (not chosen or fastest["us"] < (1 - GAIN) * chosen[0]):
            found[name] = fastest["config"]
    return found


def main() -> None:
    """Measures until the time is up, and writes after every configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--nodes", type=int, nargs="+", default=[65, 1, 512, 129, 33, 17, 5, 61])
    parser.add_argument("--contexts", type=int, nargs="+", default=[65536])
    parser.add_argument("--dims", type=int, nargs="+", choices=(64, 128), default=[128, 64])
    parser.add_argument("--only-chosen", action="store_true", help="the library's configuration and XLA only")
    parser.add_argument("--threads", type=int, default=8, help="that compile ahead")
    parser.add_argument("--table", type=Path, help="write the fastest configurations here")
    args = parser.parse_args()
    if jax.default_backend() != "gpu":
        parser.error(f"needs an NVIDIA GPU; JAX runs on {jax.default_backend()} here")
    began, rows = time.time(), []
    rate = timing.read_rate()
    executor = concurrent.futures.ThreadPoolExecutor(args.threads)
    for case in [case_of(n, length, dim) for dim in args.dims for length in args.contexts for n in args.nodes]:
        choices = [choose(case)] if args.only_chosen else configurations(case)
        shapes = jax.eval_shape(lambda x: x, units(case)[0][0])
        programs = [(config, executor.submit(program_of, case, config, shapes)) for config in (*choices, None)]
        for config, waiting in programs:
            if time.time() - began > args.seconds:
                break
            row: dict[str, Any] = {
                "case": key_of(case),
                "implementation": "xla" if config is None else "mosaic_gpu",
                "config": None if config is None else dataclasses.asdict(config),
                "chosen": config == choices[0],
            }
            try:
                program, seconds = waiting.result()
                row |= measure(case, program, rate["median"]) | seconds
            except Exception as error:  # one failure must not hide the others
                traceback.print_exc(limit=3)
                row["error"] = f"{type(error).__name__}: {error}"[:500]
            rows.append(row)
            harness.write(args.output, {"read_rate": rate, "rows": rows})
            harness.say(str({key: value for key, value in row.items() if key != "kernels"}))
        if time.time() - began > args.seconds:
            harness.say("out of time")
            break
    executor.shutdown(wait=False, cancel_futures=True)
    if args.table:
        args.table.write_text(json.dumps({"dense": winners(rows)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
