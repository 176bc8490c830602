"""How much selected blocks agree: between neighbouring tokens, between nodes of draft trees, and between layers.

python experiments/selection_overlap.py --model NAME_OR_DIR --data FILE.npz.xz... [--trees 8] [--smoke]
Every layer selects for itself. Neighbours are consecutive tokens of held-out text (at every place) and consecutive
nodes of trees in breadth-first and depth-first order (at some places; the model drafts for itself, see `_trees`). Free
overlaps leave out the blocks that a position forces (first and local ones), which agree anyway; `chance` is what
independent uniform choices of the free blocks would give. Measures:

adjacent   |A & B| / min(|A|, |B|) of neighbours
led C      |A & B| / |B| of the first of C consecutive ones and each other one: what approximate sharing relies on
union C    |union| / sum of sizes of C consecutive ones: the share of block visits that exact grouping leaves
lag D      agreement of a layer's blocks with those of D layers before, for the same token
inherit K  the same with the layer that it inherits from if every K-th one selects, over inheriting layers
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import _trees as trees
import acceptance
import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax import UsageError
from ssv_jax.models.cache import geometry_of
from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.pallas_kernels import overlap
from ssv_jax.strategy import TreeSpec
from ssv_jax.training import forward

LAGS = (1, 2, 3, 4, 5, 6, 8, 12)
INTERVALS = (2, 3, 4, 6)
GROUPS = (2, 4, 8, 16, 32)
Found = dict[str, np.ndarray]


def forced_blocks(nsa: NSAConfig, position: np.ndarray, blocks: int) -> np.ndarray:
    """Blocks that each position selects whatever its scores, bool [S, N]."""
    own = position[:, None] // nsa.block_size
    index = np.arange(blocks)
    return ((index < nsa.init_blocks) | (index > own - nsa.local_blocks)) & (index <= own)


def agreement(a: jax.Array, b: jax.Array) -> jax.Array:
    """|A & B| / min(|A|, |B|) over the last axis, 1 where one is empty."""
    smaller = jnp.minimum(a.sum(-1), b.sum(-1))
    return jnp.where(smaller == 0, 1.0, (a & b).sum(-1) / jnp.maximum(smaller, 1))


def neighbours(chosen: jax.Array, forced: jax.Array) -> dict[str, jax.Array]:
    """Measures of consecutive rows of sets [L, K, S, N], means over KV heads.

    Returns:
      `adjacent` and `adjacent free` [L, S - 1]; `led C` and `union C` [L, S // C], which leave out the last, smaller
      group. `forced` broadcasts against the sets.
    """
    result = {}
    for suffix, sets in (("", chosen), (" free", chosen & ~forced)):
        result[f"adjacent{suffix}"] = agreement(sets[:, :, 1:], sets[:, :, :-1]).mean(1)
    layers, heads, length, blocks = chosen.shape
    for size in (size for size in GROUPS if size <= length):
        parts = chosen[:, :, : length // size * size].reshape(layers, heads, -1, size, blocks)
        result[f"union {size}"] = (parts.any(3).sum(-1) / parts.sum((3, 4))).mean(1)
        shared = (parts[:, :, :, 1:] & parts[:, :, :, :1]).sum(-1) / parts[:, :, :, 1:].sum(-1)
        result[f"led {size}"] = shared.mean((1, 3))
    return result


def measures(
    config: LlamaConfig,
    options: forward.SequenceOptions,
    bucket: int,
    stacked: Any,
    tokens: jax.Array,
    forced: jax.Array,
) -> dict[str, jax.Array]:
    """Those of `neighbours`, and `layers` and `layers free` [L, L, S / bucket]: agreements of all pairs of layers."""
    found = forward.hidden_states(config, stacked, tokens, None, options).selected
    assert found is not None
    chosen = found[:, 0]  # L K S N
    result = neighbours(chosen, forced)

    def against(sets: jax.Array, one: jax.Array) -> jax.Array:
        return agreement(sets, one).mean(1).reshape(len(sets), -1, bucket).mean(-1)

    for suffix, sets in (("", chosen), (" free", chosen & ~forced)):
        result[f"layers{suffix}"] = jax.lax.map(lambda one, sets=sets: against(sets, one), sets)
    return result


def by_layer(found: Found, bucket: int) -> dict[str, tuple[np.ndarray, list[int], int]]:
    """Values [layers, places], layers that have such a neighbour, and tokens of a place, by measure."""
    result = {}
    for key, values in found.items():
        count = len(values)
        if not key.startswith("layers"):
            result[key] = values, list(range(count)), int(key.split()[1]) if key[:3] in ("uni", "led") else 1
            continue
        suffix = key.removeprefix("layers")
        pairs = {f"lag {lag}": [(i, i - lag) for i in range(lag, count)] for lag in LAGS if lag < count}
        for every in INTERVALS:
            pairs[f"inherit {every}"] = [(i, i - i % every) for i in range(count) if i % every]
        for name, each in pairs.items():
            result[name + suffix] = np.array([values[pair] for pair in each]), [i for i, _ in each], bucket
    return result


def chance(nsa: NSAConfig, position: np.ndarray) -> np.ndarray:
    """Expected free overlap of independent uniform choices at each position; 1 where there is no free block."""
    existing = position // nsa.block_size + 1
    forced = forced_blocks(nsa, position, int(existing.max())).sum(1)
    candidates, wanted = existing - forced, np.minimum(nsa.n_blocks - forced, existing - forced)
    return np.where(candidates > 0, wanted / np.maximum(candidates, 1), 1.0)


def check_definitions(config: LlamaConfig, stacked: Any, tokens: np.ndarray, options: forward.SequenceOptions) -> None:
    """Adjacent and led overlaps equal those of `pallas_kernels.overlap`.

    Raises:
      SystemExit: they do not.
    """
    assert config.nsa is not None
    ids = jnp.asarray(tokens[None])
    found = jax.jit(lambda params: forward.hidden_states(config, params, ids, None, options).selected)(stacked)
    length, blocks = found.shape[-2:]
    forced = jnp.asarray(forced_blocks(config.nsa, np.arange(length), blocks))
    mine = neighbours(found[:, 0], forced)
    chosen = found[-1]  # B K S N
    slots = jnp.sort(jnp.where(chosen, jnp.arange(blocks), blocks), axis=-1)[..., : config.nsa.n_blocks]
    slots = jnp.where(slots == blocks, -1, slots).astype(jnp.int32)
    position, valid = jnp.arange(length)[None], jnp.ones((1, length), bool)
    theirs = overlap(slots, position, valid, geometry=geometry_of(config.nsa), group=4)
    for name, total, count in (
        ("adjacent", theirs.raw, theirs.count),
        ("adjacent free", theirs.free, theirs.count),
        ("led 4", theirs.group, theirs.group_count),
    ):
        own, other = float(mine[name][-1].mean()), float(total / count)
        if abs(own - other) > 1e-5:
            raise SystemExit(f"error: {name} is {own} here and {other} in the library")


def measure_text(
    config: LlamaConfig, params: Any, sets: dict[str, list[evaluation.Window]], args: argparse.Namespace
) -> dict[str, list[Found]]:
    """`measures` of every window, by set."""
    assert config.nsa is not None
    stacked = forward.stack_params(config, params, jnp.dtype(args.dtype))
    longest = max(args.lengths)
    options = forward.SequenceOptions(selected=True, chunk=args.chunk)
    forced = jnp.asarray(forced_blocks(config.nsa, np.arange(longest), -(-longest // config.nsa.block_size)))
    shape = jax.ShapeDtypeStruct((1, longest), jnp.int32)
    jitted = jax.jit(measures, static_argnums=(0, 1, 2))
    label = f"{longest} tokens"
    jobs = {label: lambda: jitted.lower(config, options, args.bucket, stacked, shape, forced)}
    call = evaluation.compile_all(jobs)[label]
    found: dict[str, list[Found]] = {name: [] for name in sets}
    steps = evaluation.Steps("overlap in text", sum(map(len, sets.values())), args.budget_s)
    for name, i in rounds(sets):
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: {name}, window {i} and later ones left out")
            break
        result = jax.device_get(call(stacked, jnp.asarray(sets[name][i].tokens[None]), forced))
        found[name].append(result)
        steps.step(f"{name} {i}: free overlap {result['adjacent free'][:, longest // 2 :].mean():.3f}")
    return found


def rounds(sets: dict[str, list[evaluation.Window]]) -> list[tuple[str, int]]:
    """(set, window), the first windows of all sets first, so that a spent budget leaves some of each."""
    return [(name, i) for i in range(max(map(len, sets.values()))) for name, x in sets.items() if i < len(x)]


def measure_trees(
    model: evaluation.Model, sets: dict[str, list[evaluation.Window]], spec: TreeSpec, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """`neighbours` of the nodes of trees: one entry by (set, length, tree, traversal), with values [L] by measure."""
    nsa = model.config.nsa
    assert nsa is not None
    reader = trees.Reader(
        model,
        jnp.dtype(args.dtype),
        capacity=max(args.lengths),
        size=args.read,
        nodes=trees.looked_at(spec),
        best=spec.topk,
    )
    found = []
    total = sum(map(len, sets.values())) * len(args.lengths) * args.trees
    steps = evaluation.Steps("overlap in trees", total, args.budget_s)
    for name, i in rounds(sets):
        tokens = sets[name][i].tokens
        reader.restart()
        for length in sorted(args.lengths):
            if steps.spent:
                harness.say(f"budget of {args.budget_s:g} s spent: trees of {name}, window {i} and later left out")
                return found
            for at in trees.places(length, args.read, args.trees):
                if at < reader.length:
                    continue
                reader.read(tokens[reader.length : at])
                tree = trees.own_tree(reader, int(tokens[at]), spec)
                _, _, chosen = reader.look(tree)
                forced = forced_blocks(nsa, at + tree.depth, chosen.shape[-1])
                for traversal in ("bfs", "dfs"):
                    order = tree.order(traversal)
                    values = neighbours(jnp.asarray(chosen[:, :, order]), jnp.asarray(forced[order]))
                    found.append(
                        {"set": name, "length": length, "at": at, "traversal": traversal, "nodes": len(order)}
                        | {"values": {key: np.asarray(value).mean(1) for key, value in values.items()}}
                    )
                bfs, dfs = (x["values"]["adjacent free"].mean() for x in found[-2:])
                steps.step(f"{name} {i}, after {at} tokens: free overlap bfs {bfs:.3f}, dfs {dfs:.3f}")
    return found


def layer_entry(labels: dict[str, Any], key: str, layer: list[int], values: np.ndarray) -> dict[str, Any]:
    """Spread over windows or trees of values [them, layers]."""
    spread = {name: np.round(f(values, axis=0), 3).tolist() for name, f in SPREAD.items()}
    return labels | {"measure": key, "layer": layer} | spread


SPREAD = {"median": np.median, "min": np.min, "max": np.max}


def row_of(labels: dict[str, Any], key: str, values: list[float], luck: float) -> dict[str, Any]:
    row = labels | {"measure": key} | {k: v for k, v in harness.spread(values).items() if k != "repeats"}
    row["mean"] = statistics.fmean(values)
    return row | ({"chance": luck} if key.endswith("free") else {})


def summarise_text(
    config: LlamaConfig, found: dict[str, list[Found]], args: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows by (set, length, measure), the same by layer, and curves over positions.

    A length stands for the last bucket of positions below it.
    """
    assert config.nsa is not None
    luck = chance(config.nsa, np.arange(max(args.lengths)))
    edges = list(range(0, max(args.lengths), args.bucket))
    rows, layers, curves = [], [], []
    for name, windows in found.items():
        each = [by_layer(x, args.bucket) for x in windows]
        for key in each[0] if each else ():
            layer, scale = each[0][key][1:]
            for length in args.lengths:
                part = slice((length - args.bucket) // scale, length // scale)
                values = np.array([x[key][0][:, part].mean(1) for x in each])
                labels = {"neighbours": "text", "set": name, "length": length, "windows": len(each)}
                lucky = float(luck[length - args.bucket : length].mean())
                rows.append(row_of(labels, key, values.mean(1).tolist(), lucky))
                if f"{key} free" not in each[0]:  # which says more
                    layers.append(layer_entry(labels, key, layer, values))
            curve = [
                [float(x[key][0][:, at // scale : (at + args.bucket) // scale].mean()) for at in edges] for x in each
            ]
            curves.append({"set": name, "measure": key, "from": edges, "median": np.median(curve, axis=0).tolist()})
    mean = [float(luck[at : at + args.bucket].mean()) for at in edges]
    curves.append({"set": "", "measure": "chance", "from": edges, "median": mean})
    return rows, layers, curves


def summarise_trees(
    config: LlamaConfig, found: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows by (set, length, traversal, measure), and the same by layer; spreads are over trees."""
    assert config.nsa is not None
    rows, layers = [], []
    for name, length, traversal in dict.fromkeys((x["set"], x["length"], x["traversal"]) for x in found):
        each = [x for x in found if (x["set"], x["length"], x["traversal"]) == (name, length, traversal)]
        labels = {"neighbours": f"tree, {traversal}", "set": name, "length": length, "trees": len(each)}
        labels["nodes"] = each[0]["nodes"]
        luck = float(chance(config.nsa, np.array([x["at"] for x in each])).mean())
        for key in each[0]["values"]:
            values = np.array([x["values"][key] for x in each])
            rows.append(row_of(labels, key, values.mean(1).tolist(), luck))
            if f"{key} free" not in each[0]["values"]:
                layers.append(layer_entry(labels, key, list(range(values.shape[1])), values))
    return rows, layers


def pairs_of_layers(found: dict[str, list[Found]], length: int, bucket: int) -> list[dict[str, Any]]:
    """Mean free agreement of all pairs of layers in the last bucket below a length."""
    return [
        {
            "set": name,
            "length": length,
            "free": np.round(np.mean([x["layers free"][..., length // bucket - 1] for x in each], axis=0), 3).tolist(),
        }
        for name, each in found.items()
        if each
    ]


def draw(axes: Any, result: dict[str, Any], length: int) -> None:
    depth, groups, lags, matrix = axes.flat
    entries = [x for x in result["layers"] if x["length"] == length]
    for x in entries:
        if x["measure"] == "adjacent free":
            depth.plot(x["layer"], x["median"], "-o", ms=3, label=f"{x['neighbours']}, {x['set']}")
    rows = [row for row in result["rows"] if row["length"] == length]
    for kind in dict.fromkeys((row["neighbours"], row["set"]) for row in rows):
        mine = {row["measure"]: row["median"] for row in rows if (row["neighbours"], row["set"]) == kind}
        sizes = [size for size in GROUPS if f"union {size}" in mine]
        groups.plot(sizes, [mine[f"union {size}"] for size in sizes], "-o", ms=3, label=", ".join(kind))
    text = [row for row in rows if row["neighbours"] == "text"]
    for name in dict.fromkeys(row["set"] for row in text):
        mine = {row["measure"]: row for row in text if row["set"] == name}
        for word, style, numbers in (("lag", "-o", LAGS), ("inherit", "--s", INTERVALS)):
            known = [x for x in numbers if f"{word} {x} free" in mine]
            values = [mine[f"{word} {x} free"]["median"] for x in known]
            lags.plot(known, values, style, ms=4, label=f"{name}, {word}")
    lags.axhline(text[0]["chance"] if "chance" in text[0] else result["chance"], color="grey", ls=":", label="chance")
    depth.axhline(result["chance"], color="grey", ls=":", label="chance")
    if result["pairs_of_layers"]:
        first = result["pairs_of_layers"][0]
        image = matrix.imshow(np.array(first["free"]), vmin=0, vmax=1, origin="lower")
        matrix.figure.colorbar(image, ax=matrix)
        matrix.set(title=f"pairs of layers, {first['set']}: free overlap", xlabel="layer", ylabel="layer")
    depth.set(title=f"neighbours, {length} tokens", xlabel="layer", ylabel="free overlap", ylim=(0, 1.03))
    groups.set(title="exact grouping", xlabel="nodes in a group", ylabel="block visits left", xscale="log")
    groups.set(xlim=(min(GROUPS) / 1.2, max(GROUPS) * 1.2), ylim=(0, 1.03))
    groups.set_xticks(GROUPS, [str(size) for size in GROUPS])
    groups.minorticks_off()
    lags.set(title="layers before; interval of layers that select", xlabel="lag or interval", ylim=(0, 1.03))
    lags.set_ylabel("free overlap")
    for axis in (depth, groups, lags):
        axis.legend(fontsize=6)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384], help="multiples of --bucket")
    parser.add_argument("--windows", type=int, default=4, help="per set")
    parser.add_argument("--bucket", type=int, default=1024, help="tokens that a figure is a mean over")
    parser.add_argument("--trees", type=int, default=8, help="per window and length; 0: none")
    parser.add_argument("--tree", default="6x8x64", metavar="DEPTHxTOPKxNODES", help="their size")
    parser.add_argument("--read", type=int, default=500, help="tokens of a pass that reads up to a tree")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--chunk", type=int, default=128, help="queries in a tile of sparse attention")
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.windows, args.bucket, args.dtype, args.chunk = [128, 256], 2, 64, "float32", 64
        args.trees, args.tree, args.read = 2, "2x3x8", 50
        model, found = evaluation.smoke_model(), {"smoke": evaluation.smoke_set()}
    else:
        evaluation.require_files("--data", args.data)
    spec = acceptance.parse_tree(args.tree)
    if args.windows < 1 or args.trees < 0 or args.bucket < max(GROUPS):
        raise UsageError(f"--windows: at least 1; --trees: at least 0; --bucket: at least {max(GROUPS)}")
    if any(length < 1 or length % args.bucket for length in args.lengths):
        raise UsageError(f"--lengths must be multiples of --bucket ({args.bucket})")
    if args.trees and (min(args.lengths) - 1) // args.read < args.trees:
        raise UsageError(f"--lengths {min(args.lengths)}: too short for {args.trees} --trees after passes of --read")
    if not args.smoke:
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        found = evaluation.read_sets(args.data, model.config.vocab_size)
    config = model.config
    if config.nsa is None:
        raise UsageError(f"{args.model} is dense and selects nothing: give a sparse model, or --attention nsa")
    longest = max(args.lengths)
    sets = {name: evaluation.windows(tokens, longest, args.windows) for name, tokens in found.items()}
    if args.smoke:
        stacked = forward.stack_params(config, model.params, jnp.float32)
        options = forward.SequenceOptions(selected=True, chunk=args.chunk)
        check_definitions(config, stacked, sets["smoke"][0].tokens, options)
    text = measure_text(config, model.params, sets, args)
    output = evaluation.output_path("selection_overlap", args.output, args.smoke)
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("model", "output", "data")}
    rows, layers, curves = summarise_text(config, text, args)
    result: dict[str, Any] = {
        "command": "python experiments/selection_overlap.py",
        "model": model.facts,
        "settings": settings | {"data": [Path(path).name for path in args.data]},
        "chance": float(chance(config.nsa, np.arange(longest))[longest - args.bucket :].mean()),
        "rows": rows,
        "layers": layers,
        "curves": curves,
        "pairs_of_layers": pairs_of_layers(text, longest, args.bucket),
    }
    harness.write(output, result)  # a time limit must not lose it
    if args.trees:
        more, deeper = summarise_trees(config, measure_trees(model, sets, spec, args))
        result["rows"], result["layers"] = rows + more, layers + deeper
        harness.write(output, result)
    evaluation.write_csv(output.with_suffix(".csv"), result["rows"])
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, result, longest), columns=2, rows=2)
    evaluation.table(result["rows"], ("neighbours", "set", "length", "measure", "median", "min", "max", "chance"))


if __name__ == "__main__":
    evaluation.guarded(main)
