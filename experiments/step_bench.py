"""Kernel times of the steps around attention on a GPU: products, norms, node inputs, commit; ours and XLA's.

    python experiments/step_bench.py [--smoke] [--output FILE] [--nodes 1 5 17 65 129] [--splits 1 2 4 8]
        [--stages 2 3 4 6]

Shapes are those of Llama 3.1 8B. Times are sums of kernel durations from a profile, medians over calls, divided by the
products in a call, which read matrices of their own, so that none comes from the L2 cache. The floor is the matrix over
4.55 TB/s, the HBM read rate measured on an H200. `--splits` and `--stages` also time other tile choices.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _harness as harness
import ar_decode
import jax
import jax.numpy as jnp
import verify_step

from ssv_jax.models.cache import geometry_of
from ssv_jax.pallas_kernels import completions
from ssv_jax.pallas_kernels.cache_append import RowMoves, append_rows
from ssv_jax.pallas_kernels.node_inputs import EntryRows, HeadShape, node_inputs
from ssv_jax.pallas_kernels.row_matmul import gated_matmul, matmul_parts, residual_norm
from ssv_jax.tree import DraftTree, queries_of

READ_RATE = 4.55e12  # bytes per second
REPEATS = 5
COLD = 200e6  # bytes of matrices in a call, several times the L2 cache


def random(*shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    """A random array; one seed is as good as another for times."""
    return jax.random.normal(jax.random.key(len(shape) + sum(shape)), shape, dtype)


def microseconds(function: Callable[..., Any], *arguments: Any, per_call: int = 1) -> float:
    """Median over calls of the sum of kernel times, divided by what a call does."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    found = []
    for _ in range(REPEATS):
        times = verify_step.kernels_of(lambda: jax.block_until_ready(compiled(*arguments)))
        found.append(sum(sum(durations) for durations in times.values()) / per_call)
    return statistics.median(found)


def matrices(*shapes: tuple[int, ...]) -> list[tuple[jax.Array, ...]]:
    """Enough copies of some matrices to leave the cache cold."""
    count = sum(functools.reduce(lambda a, b: a * b, shape) * 2 for shape in shapes)
    copies = min(max(2, -(-int(COLD) // count)), 16)
    return [tuple(random(*shape) for shape in shapes) for _ in range(copies)]


def products(config: Any, nodes: int, names: list[str], choices: list[dict[str, int]]) -> list[dict[str, Any]]:
    """Times of the matrix products of a layer."""
    size, hidden = config.hidden_size, config.intermediate_size
    heads = config.num_kv_heads * config.group
    qkv, gates = (heads + 2 * config.num_kv_heads) * config.head_dim, 3 * heads
    shapes = {
        "qkv and gates": ((size, qkv), (size, gates)),
        "o": ((heads * config.head_dim, size),),
        "gate and up": ((size, 2, hidden),),
        "down": ((hidden, size),),
    }
    rows = []
    for what, wanted in shapes.items():
        weights = matrices(*wanted)
        count = sum(weight.size * 2 for weight in weights[0])
        x = random(nodes, wanted[0][0])
        dtypes = (jnp.bfloat16, jnp.float32)[: len(wanted)]

        def run(x: jax.Array, weights: Any, name: str, options: dict[str, int], dtypes: Any = dtypes) -> Any:
            if options:  # the kernel itself takes tile choices
                from ssv_jax.pallas_kernels.row_matmul import mosaic_gpu as kernels

                gated = functools.partial(kernels.gated_matmul, stages=options.get("stages"))
                plain = functools.partial(kernels.matmul_parts, **options)
                return [gated(x, w[0]) if w[0].ndim == 3 else plain(x, w) for w in weights]
            named = {"implementation": name}
            return [
                gated_matmul(x, w[0], **named) if w[0].ndim == 3 else matmul_parts(x, w, dtypes, **named)
                for w in weights
            ]

        floor = count / READ_RATE * 1e6
        for name, options in [*((name, {}) for name in names), *(("mosaic_gpu", choice) for choice in choices)]:
            if options.get("splits") and len(wanted[0]) == 3:
                continue
            time = microseconds(functools.partial(run, name=name, options=options), x, weights, per_call=len(weights))
            row = {"step": what, "nodes": nodes, "implementation": name, **options, "us": time, "floor_us": floor}
            rows.append(row)
            harness.say(f"{what:14} T={nodes:<4} {name:11} {options or ''} {time:7.1f} us, floor {floor:.1f}")
    return rows


def others(config: Any, nodes: int, names: list[str]) -> list[dict[str, Any]]:
    """Times of the steps between the products, and of the commit."""
    size, batch, steps = config.hidden_size, 1, 8
    parent, path = verify_step.binary_tree(nodes)
    length = jnp.full((batch,), 1021, jnp.int32)
    tree = DraftTree(tokens=parent, parent=parent, valid=parent > -2, rank=jnp.zeros_like(parent))
    geometry = geometry_of(config.nsa)
    done = completions(queries_of(tree, length), geometry)
    kv, dim, slots = config.num_kv_heads, config.head_dim, done.node.shape[1]
    shape = HeadShape(batch=batch, nodes=nodes, kv_heads=kv, group=config.group, dim=dim, gates=3 * kv * config.group)
    padded = -(-nodes // 8) * 8
    x, scale, parts = random(nodes, size), random(size), random(steps, padded, size, dtype=jnp.float32)
    tail = random(batch, kv, geometry.kernel_size, dim)
    angles = random(batch, nodes, dim // 2, dtype=jnp.float32), random(batch, slots, dim // 2, dtype=jnp.float32)
    entries = EntryRows(tail_k=tail, tail_v=tail, completions=done, cos=angles[1], sin=angles[1])
    qkv = random(5, padded, shape.columns, dtype=jnp.float32)
    gates = random(5, padded, 128, dtype=jnp.float32)
    move = RowMoves(source=path, target=jnp.arange(path.shape[1], dtype=jnp.int32)[None] + 100)
    old = [random(batch, kv, 4096, dim) for _ in range(6 * config.num_layers)]
    new = [random(batch, kv, nodes, dim) for _ in old]
    rows = []
    for name in names:
        named: dict[str, Any] = {"implementation": name}

        def norm(x: jax.Array, parts: jax.Array, scale: jax.Array, named: Any = named) -> Any:
            return residual_norm(x, parts, scale, eps=1e-5, **named)

        def inputs(*arrays: Any, named: Any = named) -> Any:
            return node_inputs(*arrays, shape=shape, dtype=jnp.bfloat16, **named)

        def commit(old: Any, new: Any, move: RowMoves, named: Any = named) -> Any:
            return append_rows(old, new, (move,), (0,) * len(old), **named)

        calls = (
            ("residual and norm", norm, (x, parts, scale)),
            ("node inputs", inputs, (qkv, gates, angles[0], angles[0], entries)),
            ("commit, with copies of its inputs", commit, (old, new, move)),
        )
        for what, function, arguments in calls:
            time = microseconds(function, *arguments)
            rows.append({"step": what, "nodes": nodes, "implementation": name, "us": time})
            harness.say(f"{what:14} T={nodes:<4} {name:11} {time:7.1f} us")
    return rows


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="tiny shapes and no times, seconds on a CPU")
    parser.add_argument("--output", type=Path, default=None)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 5, 17, 65, 129])
    parser.add_argument("--splits", type=int, nargs="*", default=[])
    parser.add_argument("--stages", type=int, nargs="*", default=[])
    args = parser.parse_args()
    if min([*args.nodes, *args.splits, *args.stages]) < 1:
        parser.error("--nodes, --splits and --stages must be positive")
    config, names = (ar_decode.SMOKE, ["xla"]) if args.smoke else (ar_decode.SHAPE_8B, ["mosaic_gpu", "xla"])
    if not args.smoke and jax.default_backend() != "gpu":
        parser.error("times kernels of a GPU: only --smoke runs elsewhere")
    choices = [{"splits": splits} for splits in args.splits] + [{"stages": stages} for stages in args.stages]
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    output = args.output or harness.RESULTS / "step_bench" / f"{'smoke' if args.smoke else device}.json"
    rows: list[dict[str, Any]] = []
    for nodes in [1, 5] if args.smoke else args.nodes:
        rows += products(config, nodes, names, choices) + others(config, nodes, names)
        harness.write(output, {"command": "python experiments/step_bench.py", "rows": rows})


if __name__ == "__main__":
    main()
