"""How much the selected blocks of neighbouring tokens, and of neighbouring layers, agree on held-out text.

python experiments/selection_overlap.py --model NAME_OR_DIR --data FILE.npz.xz... [--smoke]
Every layer selects for itself. Free overlaps leave out the blocks that a position forces (first and local ones), which
agree anyway; `chance` is what independent uniform choices of the free blocks would give.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax import UsageError
from ssv_jax.models.cache import geometry_of
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.pallas_kernels import overlap
from ssv_jax.training import forward

LAGS = (1, 2, 3)
GROUPS = (2, 4, 8, 16)


def forced_blocks(nsa: NSAConfig, length: int, blocks: int) -> np.ndarray:
    """Blocks that each position selects whatever its scores, bool [S, N]."""
    own = np.arange(length)[:, None] // nsa.block_size
    index = np.arange(blocks)
    return ((index < nsa.init_blocks) | (index > own - nsa.local_blocks)) & (index <= own)


def agreement(a: jax.Array, b: jax.Array) -> jax.Array:
    """|A & B| / min(|A|, |B|) over the last axis, 1 where one is empty."""
    smaller = jnp.minimum(a.sum(-1), b.sum(-1))
    return jnp.where(smaller == 0, 1.0, (a & b).sum(-1) / jnp.maximum(smaller, 1))


def measures(
    config: LlamaConfig, options: forward.SequenceOptions, stacked: Any, tokens: jax.Array, forced: jax.Array
) -> dict[str, jax.Array]:
    """Overlaps, means over KV heads, by layer and position, float32 [L, S]; 1 where there is no such neighbour.

    Returns:
      `adjacent` and `adjacent_free`: with the token before; `lag D` and `lag D free`: with D layers before;
      `union C` [L, S / C]: blocks that C consecutive tokens read together, over the sum of their numbers.
    """
    found = forward.hidden_states(config, stacked, tokens, None, options).selected
    assert found is not None
    chosen = found[:, 0]  # L K S N
    result = {}
    for suffix, sets in (("", chosen), (" free", chosen & ~forced)):
        near = agreement(sets[:, :, 1:], sets[:, :, :-1]).mean(1)
        result[f"adjacent{suffix}"] = jnp.pad(near, ((0, 0), (1, 0)), constant_values=1.0)
        for lag in LAGS:
            if lag < config.num_layers:
                over = agreement(sets[lag:], sets[:-lag]).mean(1)
                result[f"lag {lag}{suffix}"] = jnp.pad(over, ((lag, 0), (0, 0)), constant_values=1.0)
    layers, heads, length, blocks = chosen.shape
    for size in GROUPS:
        parts = chosen[:, :, : length // size * size].reshape(layers, heads, -1, size, blocks)
        result[f"union {size}"] = (parts.any(3).sum(-1) / parts.sum((3, 4))).mean(1)
    return result


def chance(nsa: NSAConfig, length: int) -> np.ndarray:
    """Expected free overlap of independent uniform choices at each position [S]; 1 where there is no free block."""
    existing = np.arange(length) // nsa.block_size + 1
    forced = forced_blocks(nsa, length, -(-length // nsa.block_size)).sum(1)
    candidates, wanted = existing - forced, np.minimum(nsa.n_blocks - forced, existing - forced)
    return np.where(candidates > 0, wanted / np.maximum(candidates, 1), 1.0)


def check_definitions(config: LlamaConfig, stacked: Any, tokens: np.ndarray, options: forward.SequenceOptions) -> None:
    """Adjacent overlaps equal those of `pallas_kernels.overlap`.

    Raises:
      SystemExit: they do not.
    """
    assert config.nsa is not None
    ids = jnp.asarray(tokens[None])
    found = jax.jit(lambda params: forward.hidden_states(config, params, ids, None, options).selected)(stacked)
    length, blocks = found.shape[-2:]
    forced = jnp.asarray(forced_blocks(config.nsa, length, blocks))
    mine = jax.jit(measures, static_argnums=(0, 1))(config, options, stacked, ids, forced)
    chosen = found[-1]  # B K S N
    slots = jnp.sort(jnp.where(chosen, jnp.arange(blocks), blocks), axis=-1)[..., : config.nsa.n_blocks]
    slots = jnp.where(slots == blocks, -1, slots).astype(jnp.int32)
    position, valid = jnp.arange(length)[None], jnp.ones((1, length), bool)
    theirs = overlap(slots, position, valid, geometry=geometry_of(config.nsa), group=1)
    for name, total in (("adjacent", theirs.raw), ("adjacent free", theirs.free)):
        own, other = float(mine[name][-1, 1:].mean()), float(total / theirs.count)
        if abs(own - other) > 1e-5:
            raise SystemExit(f"error: {name} is {own} here and {other} in the library")


def measure(
    config: LlamaConfig,
    params: Any,
    sets: dict[str, list[evaluation.Window]],
    args: argparse.Namespace,
) -> dict[str, list[dict[str, np.ndarray]]]:
    assert config.nsa is not None
    stacked = forward.stack_params(config, params, jnp.dtype(args.dtype))
    longest = max(args.lengths)
    options = forward.SequenceOptions(selected=True, chunk=args.chunk)
    forced = jnp.asarray(forced_blocks(config.nsa, longest, -(-longest // config.nsa.block_size)))
    shape = jax.ShapeDtypeStruct((1, longest), jnp.int32)
    jitted = jax.jit(measures, static_argnums=(0, 1))
    label = f"{longest} tokens"
    call = evaluation.compile_all({label: lambda: jitted.lower(config, options, stacked, shape, forced)})[label]
    found: dict[str, list[dict[str, np.ndarray]]] = {name: [] for name in sets}
    most = max(len(x) for x in sets.values())
    jobs = [(name, i) for i in range(most) for name, x in sets.items() if i < len(x)]
    steps = evaluation.Steps("overlap", len(jobs), args.budget_s)
    for name, i in jobs:
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: {name}, window {i} and later ones left out")
            break
        result = jax.device_get(call(stacked, jnp.asarray(sets[name][i].tokens[None]), forced))
        found[name].append(result)
        steps.step(f"{name} {i}: free overlap {result['adjacent free'][:, longest // 2 :].mean():.3f}")
    return found


def summarise(
    config: LlamaConfig, found: dict[str, list[dict[str, np.ndarray]]], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows by (set, length, measure), the same by layer, and curves over positions.

    A length stands for the last bucket of positions below it.
    """
    assert config.nsa is not None
    luck = chance(config.nsa, max(args.lengths))
    rows, layers, curves = [], [], []
    for name, each in found.items():
        for key in each[0] if each else ():
            first = int(key.split()[1]) if key.startswith("lag") else 0  # layers that have such a neighbour
            scale = int(key.split()[1]) if key.startswith("union") else 1
            for length in args.lengths:
                part = slice((length - min(args.bucket, length)) // scale, length // scale)
                values = [float(x[key][first:, part].mean()) for x in each]
                row = {"set": name, "length": length, "measure": key, "windows": len(each)}
                row |= {k: v for k, v in harness.spread(values).items() if k != "repeats"}
                row["mean"] = statistics.fmean(values)
                if key.endswith("free"):
                    row["chance"] = float(luck[length - min(args.bucket, length) : length].mean())
                rows.append(row)
                by_layer = np.array([x[key][first:, part].mean(1) for x in each])
                layers.append(
                    {
                        "set": name,
                        "length": length,
                        "measure": key,
                        "layer": list(range(first, first + by_layer.shape[1])),
                        "median": np.median(by_layer, axis=0).tolist(),
                        "min": by_layer.min(axis=0).tolist(),
                        "max": by_layer.max(axis=0).tolist(),
                    }
                )
            edges = list(range(0, max(args.lengths), args.bucket))
            curve = [
                [float(x[key][first:, at // scale : (at + args.bucket) // scale].mean()) for at in edges] for x in each
            ]
            curves.append({"set": name, "measure": key, "from": edges, "median": np.median(curve, axis=0).tolist()})
    edges = range(0, max(args.lengths), args.bucket)
    curves.append(
        {
            "set": "",
            "measure": "chance",
            "from": list(edges),
            "median": [float(luck[at : at + args.bucket].mean()) for at in edges],
        }
    )
    return rows, layers, curves


def draw(axes: Any, layers: list[dict[str, Any]], curves: list[dict[str, Any]], length: int) -> None:
    by_layer, by_position = axes
    shown = ["adjacent free", *(f"lag {lag} free" for lag in LAGS)]
    for entry in layers:
        if entry["length"] == length and entry["measure"] in shown:
            style = "-o" if entry["measure"].startswith("adjacent") else "--o"
            by_layer.plot(entry["layer"], entry["median"], style, ms=3, label=f"{entry['set']}, {entry['measure']}")
    by_layer.set(xlabel="layer", ylabel="overlap, forced blocks left out", title=f"last tokens below {length}")
    for entry in curves:
        if entry["measure"] in (*shown, "chance"):
            style = ":" if entry["measure"] == "chance" else "-"
            by_position.plot(entry["from"], entry["median"], style, label=f"{entry['set']} {entry['measure']}".strip())
    by_position.set(xlabel="position (tokens)", ylabel="overlap, forced blocks left out", title="mean of layers")
    for axis in axes:
        axis.legend(fontsize=6)
        axis.set_ylim(0, 1.03)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--windows", type=int, default=4, help="per set")
    parser.add_argument("--bucket", type=int, default=1024, help="tokens that a figure is a mean over")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk", type=int, default=128, help="queries in a tile of sparse attention")
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.windows, args.bucket, args.dtype, args.chunk = [128, 256], 2, 64, "float32", 64
        model, found = evaluation.smoke_model(), {"smoke": evaluation.smoke_set()}
    else:
        evaluation.require_files("--data", args.data)
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        found = evaluation.read_sets(args.data, model.config.vocab_size)
    if model.config.nsa is None:
        raise UsageError(f"{args.model} is dense and selects nothing: give a sparse model, or --attention nsa")
    if args.windows < 1 or args.bucket < max(GROUPS) or min(args.lengths) < args.bucket:
        raise UsageError(f"--windows: at least 1; --bucket: {max(GROUPS)} to the shortest of --lengths")
    longest = max(args.lengths)
    sets = {name: evaluation.windows(tokens, longest, args.windows) for name, tokens in found.items()}
    if args.smoke:
        stacked = forward.stack_params(model.config, model.params, jnp.float32)
        options = forward.SequenceOptions(selected=True, chunk=args.chunk)
        check_definitions(model.config, stacked, sets["smoke"][0].tokens, options)
    rows, layers, curves = summarise(model.config, measure(model.config, model.params, sets, args), args)
    output = evaluation.output_path("selection_overlap", args.output, args.smoke)
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("model", "output", "data")}
    harness.write(
        output,
        {
            "command": "python experiments/selection_overlap.py",
            "model": model.facts,
            "settings": settings | {"data": [Path(path).name for path in args.data]},
            "rows": rows,
            "layers": layers,
            "curves": curves,
        },
    )
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, layers, curves, longest), columns=2)
    evaluation.table(rows, ("set", "length", "measure", "windows", "median", "min", "max", "chance"))


if __name__ == "__main__":
    evaluation.guarded(main)
