"""Likelihood of held-out text under a sparse model, over lengths and layer plans, beside its dense teacher.

python experiments/model_quality.py --model NAME_OR_DIR --data FILE.npz.xz... [--dense-model NAME_OR_DIR] [--smoke]
One pass over the longest length gives the shorter ones too, as no token depends on a later one. All models read the
same windows, so that differences are paired.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import math
import statistics
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import jax
import jax.numpy as jnp
import numpy as np
from _served import Served

from ssv_jax import UsageError
from ssv_jax.models.cache import Cache
from ssv_jax.models.config import LlamaConfig
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.training import forward

LOGIT_ROWS = 1024  # rows of logits in memory at a time
TOLERANCE = 1e-3  # nats per token between the two paths, in float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One curve: a model, its layer plan, and the length up to which it runs."""

    label: str
    model: evaluation.Model
    plan: LayerPlan
    longest: int

    @property
    def computation(self) -> tuple[LlamaConfig, int]:
        """Variants with equal ones share compiled code: the plan is an argument."""
        return self.model.config, self.longest


def token_losses(
    config: LlamaConfig, options: forward.SequenceOptions, stacked: Any, tokens: jax.Array, refresh: jax.Array
) -> jax.Array:
    """-log p of tokens 1 ... S - 1 of [1, S] under a model, float32 [S - 1]."""
    final = forward.hidden_states(config, stacked, tokens, refresh, options).final[0]

    def loss(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        logits = forward.logits_of(config, stacked, row[0])
        return jax.nn.logsumexp(logits) - logits[row[1]]

    return jax.lax.map(loss, (final[:-1], tokens[0, 1:]), batch_size=LOGIT_ROWS)


def served_losses(model: evaluation.Model, plan: LayerPlan, tokens: np.ndarray, size: int) -> np.ndarray:
    """The same by the path that serves: passes of `size` tokens over a cache, as `loop.prefill_chunk` makes them."""
    served = Served(model, jnp.float32, size, plan)
    return chain_losses(served, served.cache(len(tokens)), tokens, 0, size)[:-1]


def chain_losses(served: Served, cache: Cache, tokens: np.ndarray, begin: int, size: int, share: int = 0) -> np.ndarray:
    """-log p of tokens `begin` + 1 ... S in passes of `size` after `begin` cached ones; the last one is no loss.

    `share` consecutive nodes of a pass read the blocks of their first one; 0: each its own.
    """
    following, losses = np.append(tokens[1:], 0), []
    for at in range(begin, len(tokens), size):
        part = slice(at, at + size)
        loss, _, cache = served.score(cache, tokens[None, part], following[None, part], max(share, 1), share > 0)
        losses.append(loss[0])
    return np.concatenate(losses)


def measure_sharing(
    model: evaluation.Model, sets: dict[str, list[evaluation.Window]], length: int, args: argparse.Namespace, dtype: str
) -> list[dict[str, Any]]:
    """Loss of the last `--share-tokens` below `length` if they are verified in groups that share blocks.

    Passes are chains of `--share-nodes`, as of a perfect drafter: every token is verified and committed with what its
    group's first node selected, and so read by later ones. The tokens before are read exactly.
    """
    served = Served(model, jnp.dtype(dtype), args.check_pass)
    begin, shares = length - args.share_tokens, (0, *args.share)
    found: dict[tuple[str, int], list[float]] = {}
    total = sum(map(len, sets.values())) * len(shares)
    steps = evaluation.Steps(f"sharing {dtype}", total, args.budget_s)
    for i, name in ((i, name) for i in range(max(map(len, sets.values()))) for name in sets if i < len(sets[name])):
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: sharing in {name}, window {i} and later ones left out")
            break
        window = sets[name][i]
        cache = served.read(served.cache(length), window.tokens[None, :begin])
        for share in shares:
            loss = chain_losses(served, cache, window.tokens[:length], begin, args.share_nodes, share)
            kept = loss[:-1][window.target[begin + 1 : length]]
            found.setdefault((name, share), []).append(float(kept.mean()))
            steps.step(f"{name} {i}, {share or 'none'} share: {kept.mean():.4f}")
    rows = []
    for (name, share), each in found.items():
        label = f"nsa, refresh every 1, {share} share" if share else "nsa, refresh every 1, in passes"
        row = {"set": name, "variant": label, "length": length, "tokens": args.share_tokens, "windows": len(each)}
        row |= {f"nll_{key}": value for key, value in harness.spread(each).items() if key != "repeats"}
        over = [x - y for x, y in zip(each, found[name, 0], strict=False)]
        row |= {f"over_lossless_{key}": value for key, value in harness.spread(over).items() if key != "repeats"}
        rows.append(row | {"nll_mean": statistics.fmean(each), "nll_each": each})
    return rows


def check_paths(variants: list[Variant], window: evaluation.Window, length: int, size: int) -> list[dict[str, Any]]:
    """Mean loss of both paths in float32 on one window, for the last dense variant and the last sparse one."""
    chosen = {v.model.config.nsa is None: v for v in variants if v.longest >= length}.values()
    tokens = window.tokens[: length // size * size]

    def check(variant: Variant) -> dict[str, Any]:
        config, params = variant.model.config, forward.stack_params(variant.model.config, variant.model.params)
        refresh = jnp.asarray(variant.plan.refresh)
        fast = jax.jit(token_losses, static_argnums=(0, 1))(
            config, forward.SequenceOptions(), params, jnp.asarray(tokens[None]), refresh
        )
        fast, slow = np.asarray(fast), served_losses(variant.model, variant.plan, tokens, size)
        row = {
            "variant": variant.label,
            "tokens": len(tokens),
            "sequence_pass": float(fast.mean()),
            "served": float(slow.mean()),
            "difference": abs(float(fast.mean() - slow.mean())),
            "largest_token_difference": float(np.abs(fast - slow).max()),
        }
        harness.say(f"check {variant.label}: {row['sequence_pass']:.5f} and {row['served']:.5f} nats")
        return row

    with concurrent.futures.ThreadPoolExecutor() as pool:  # compiles one while the other one compiles
        return list(pool.map(check, chosen))


def make_variants(args: argparse.Namespace, model: evaluation.Model, dense: evaluation.Model) -> list[Variant]:
    """Dense teachers by rotary base, then the sparse model by layer plan.

    Raises:
      UsageError: a plan or a base that cannot be.
    """
    layers, longest, variants = model.config.num_layers, max(args.lengths), []
    for text in args.dense_theta:
        theta, _, limit = text.partition(":")
        try:
            base, most = float(theta), int(limit or longest)
            based = dense.with_theta(base)
        except ValueError as error:
            raise UsageError(f"--dense-theta {text}: expected THETA or THETA:LONGEST ({error})") from None
        plan = LayerPlan.every(dense.config.num_layers)
        label = f"dense, theta {base:g}"
        variants.append(Variant(label=label, model=based, plan=plan, longest=min(most, longest)))
    if model.config.nsa is None:
        return variants
    try:
        plans = {f"nsa, refresh every {k}": LayerPlan.every(layers, k) for k in args.refresh_every}
        for text in args.refresh_layers:
            plans[f"nsa, refresh at {text}"] = LayerPlan.at(layers, tuple(int(x) for x in text.split(",")))
    except ValueError as error:
        raise UsageError(str(error)) from None
    return variants + [Variant(label=n, model=model, plan=p, longest=longest) for n, p in plans.items()]


def measure(
    variants: list[Variant],
    sets: dict[str, list[evaluation.Window]],
    dtype: str,
    options: forward.SequenceOptions,
    budget_s: float,
) -> dict[tuple[str, str, int], np.ndarray]:
    """Losses by (set, variant, window), windows outermost, so that a spent budget leaves complete ones."""
    stacked: dict[int, Any] = {}
    for variant in variants:
        key = id(variant.model.params)
        if key not in stacked:
            stacked[key] = forward.stack_params(variant.model.config, variant.model.params, jnp.dtype(dtype))
    jitted = jax.jit(token_losses, static_argnums=(0, 1))

    def lower(variant: Variant) -> Any:
        tokens = jax.ShapeDtypeStruct((1, variant.longest), jnp.int32)
        refresh = jax.ShapeDtypeStruct((len(variant.plan.refresh),), bool)
        return jitted.lower(variant.model.config, options, stacked[id(variant.model.params)], tokens, refresh)

    distinct = {v.computation: v for v in variants}
    labels = {key: f"{dtype} {v.label} {v.longest}" for key, v in distinct.items()}
    compiled = evaluation.compile_all({labels[key]: lambda v=v: lower(v) for key, v in distinct.items()})
    losses = {}
    most = max(len(found) for found in sets.values())
    jobs = [(name, i) for i in range(most) for name, found in sets.items() if i < len(found)]
    steps = evaluation.Steps(f"nll {dtype}", len(jobs) * len(variants), budget_s)
    for name, i in jobs:
        if steps.spent:
            harness.say(f"budget of {budget_s:g} s spent: {name}, window {i} and later ones left out")
            break
        for variant in variants:
            call = compiled[labels[variant.computation]]
            part = jnp.asarray(sets[name][i].tokens[None, : variant.longest])
            loss = call(stacked[id(variant.model.params)], part, jnp.asarray(variant.plan.refresh))
            losses[name, variant.label, i] = np.asarray(loss)
            steps.step(f"{name} {i} {variant.label} {losses[name, variant.label, i].mean():.4f}")
    return losses


def mean_loss(loss: np.ndarray, target: np.ndarray, begin: int, end: int) -> float:
    """Mean over the targets among tokens begin ... end - 1."""
    kept = loss[max(begin - 1, 0) : end - 1][target[max(begin, 1) : end]]
    return float(kept.mean()) if kept.size else math.nan


def summarise(
    variants: list[Variant],
    sets: dict[str, list[evaluation.Window]],
    losses: dict[tuple[str, str, int], np.ndarray],
    lengths: list[int],
    bucket: int,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows by (set, variant, length), and curves over positions."""
    dense = [v for v in variants if v.model.config.nsa is None]
    rows, curves = [], []
    for name, found in sets.items():
        for variant in variants:
            seen = [i for i in range(len(found)) if (name, variant.label, i) in losses]
            if not seen:
                continue

            def mean(label: str, i: int, begin: int, end: int, name: str = name) -> float:
                return mean_loss(losses[name, label, i], sets[name][i].target, begin, end)

            for length in (x for x in lengths if x <= variant.longest):
                each = [mean(variant.label, i, 0, length) for i in seen]
                row = {"set": name, "variant": variant.label, "length": length, "windows": len(seen)}
                row |= {f"nll_{key}": value for key, value in harness.spread(each).items() if key != "repeats"}
                row["nll_mean"], row["nll_each"] = statistics.fmean(each), each
                for teacher in dense:
                    if length <= teacher.longest and teacher is not variant:
                        over = [x - mean(teacher.label, i, 0, length) for x, i in zip(each, seen, strict=True)]
                        short = teacher.label.rpartition(" ")[2]
                        row |= {f"over_dense_{short}_{k}": v for k, v in harness.spread(over).items() if k != "repeats"}
                rows.append(row)
            edges = range(0, variant.longest, bucket)
            each_curve = [[mean(variant.label, i, at, at + bucket) for at in edges] for i in seen]
            curves.append(
                {
                    "set": name,
                    "variant": variant.label,
                    "from": list(edges),
                    "nll_median": np.nanmedian(each_curve, axis=0).tolist(),
                    "nll_each": each_curve,
                }
            )
    return rows, curves


def draw(axes: Any, curves: list[dict[str, Any]], bucket: int) -> None:
    names = list(dict.fromkeys(curve["set"] for curve in curves))
    for axis, name in zip(np.atleast_1d(axes), names, strict=False):
        for curve in (c for c in curves if c["set"] == name):
            style = "--" if curve["variant"].startswith("dense") else "-"
            centres = [at + bucket / 2 for at in curve["from"]]
            axis.plot(centres, curve["nll_median"], style, label=curve["variant"])
        axis.set(title=name, xlabel="position (tokens)", ylabel="NLL (nats per token), median of windows")
        axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets")
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192, 16384, 24576])
    parser.add_argument("--dense-theta", nargs="+", default=["1e5:8192", "4e5"], metavar="THETA[:LONGEST]")
    parser.add_argument("--refresh-every", nargs="*", type=int, default=[1, 2, 3, 4])
    parser.add_argument("--refresh-layers", nargs="*", default=[], metavar="0,I,J...", help="further layer plans")
    parser.add_argument("--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--windows", nargs="+", type=int, default=[4], help="per set, for each dtype or for all")
    parser.add_argument("--bucket", type=int, default=1024, help="tokens of a point of the curves")
    parser.add_argument("--chunk", type=int, default=128, help="queries in a tile of sparse attention")
    parser.add_argument("--share", nargs="*", type=int, default=[], help="nodes that share blocks (class approx)")
    parser.add_argument("--share-tokens", type=int, default=1024, help="last tokens below the shortest length")
    parser.add_argument("--share-nodes", type=int, default=16, help="nodes of a pass over them")
    parser.add_argument("--check-length", type=int, default=4096, help="tokens of the check of both paths; 0: none")
    parser.add_argument("--check-pass", type=int, default=512, help="tokens of a serving pass in that check")
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.dense_theta, args.bucket, args.chunk = [64, 192], ["1e4:64", "4e4"], 32, 64
        args.dtypes, args.windows, args.check_length, args.check_pass = ["float32"], [2], 128, 64
        args.refresh_every, args.share, args.share_tokens, args.share_nodes = [1, 2], [2], 32, 8
        model, dense = evaluation.smoke_model(), evaluation.smoke_model(nsa=False)
        found = {"smoke": evaluation.smoke_set()}
    else:
        evaluation.require_files("--data", args.data)
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        found = evaluation.read_sets(args.data, model.config.vocab_size)
        dense = evaluation.load_model(args.dense_model, "dense")
    if len(args.windows) not in (1, len(args.dtypes)) or min(args.windows) < 1 or min(args.lengths) < 2:
        raise UsageError("--windows: one positive number, or one for each of --dtypes; --lengths: at least 2")
    shortest = min(args.lengths)
    if any(not 2 <= share <= 32 for share in args.share):
        raise UsageError("--share: numbers of nodes from 2 to 32")
    if args.share and (model.config.nsa is None or not 1 < args.share_tokens < shortest or args.share_nodes < 1):
        raise UsageError("--share needs a sparse model, --share-tokens below the shortest length, and --share-nodes")
    if args.share and args.share_tokens % args.share_nodes:
        raise UsageError(f"--share-tokens must be a multiple of --share-nodes ({args.share_nodes})")
    counts = args.windows * (len(args.dtypes) if len(args.windows) == 1 else 1)
    variants = make_variants(args, model, dense)
    options = forward.SequenceOptions(chunk=args.chunk)
    longest = max(args.lengths)
    output = evaluation.output_path("model_quality", args.output, args.smoke)
    result: dict[str, Any] = {
        "command": "python experiments/model_quality.py",
        "model": model.facts,
        "dense": dense.facts,
        "settings": {key: str(value) for key, value in vars(args).items() if key not in ("model", "output", "data")}
        | {"data": [Path(path).name for path in args.data]},
        "runs": [],
    }
    table = []
    for dtype, count in zip(args.dtypes, counts, strict=True):
        sets = {name: evaluation.windows(tokens, longest, count) for name, tokens in found.items()}
        losses = measure(variants, sets, dtype, options, args.budget_s)
        rows, curves = summarise(variants, sets, losses, args.lengths, args.bucket)
        table += [{"dtype": dtype, **row} for row in rows]
        result["runs"].append({"dtype": dtype, "rows": rows, "bucket": args.bucket, "curves": curves})
        harness.write(output, result)  # a time limit must not lose it
        if args.share:
            shared = measure_sharing(model, sets, shortest, args, dtype)
            table += [{"dtype": dtype, **row} for row in shared]
            result["runs"][-1]["sharing"] = shared
            harness.write(output, result)
    evaluation.write_csv(output.with_suffix(".csv"), table)
    curves = result["runs"][0]["curves"]
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, curves, args.bucket), columns=len(found))
    evaluation.table(table, ("dtype", "set", "variant", "length", "windows", "nll_median", "nll_min", "nll_max"))
    if args.check_length:
        first = evaluation.windows(next(iter(found.values())), longest, 1)[0]
        result["check"] = check_paths(variants, first, min(args.check_length, longest), args.check_pass)
        harness.write(output, result)
        worst = max((row["difference"] for row in result["check"]), default=0.0)
        if worst > TOLERANCE:
            raise SystemExit(f"error: the two paths differ by {worst:.2g} nats per token in float32")


if __name__ == "__main__":
    evaluation.guarded(main)
