"""What it costs, and what it saves, if only every K-th layer selects blocks.

python experiments/refresh_interval.py --model NAME_OR_DIR --data HELDOUT... [--every 1 2 3 4 6] [--parts ...] [--smoke]
Every interval is a target of its own (class strict): prefill and decoding alike. Parts, each as its own script has it:

nll         loss of held-out text, beside that of the same windows with every layer selecting (model_quality.py)
tasks       exact answers to questions about long texts (needle.py); the first of --data hides them
acceptance  tokens a round on chats (acceptance.py)
speed       tokens per second of one sequence that continues held-out text, by tree and without drafts (acceptance.py)
"""

from __future__ import annotations

import argparse
import copy
import statistics
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import _tasks as tasks
import acceptance
import jax
import model_quality
import needle
import numpy as np
from _prompts import long_prompts, read_prompts, smoke_prompts

from ssv_jax import UsageError
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.training import forward

PARTS = ("nll", "tasks", "acceptance", "speed")
Row = dict[str, Any]


def measure_nll(model: evaluation.Model, found: dict[str, Any], args: argparse.Namespace) -> list[Row]:
    """Rows by (interval, set, length); `over` is paired by window."""
    variants = [
        model_quality.Variant(
            label=str(every),
            model=model,
            plan=LayerPlan.every(model.config.num_layers, every),
            longest=max(args.lengths),
        )
        for every in args.every
    ]
    sets = {name: evaluation.windows(tokens, max(args.lengths), args.windows) for name, tokens in found.items()}
    options = forward.SequenceOptions(chunk=args.chunk)
    losses = model_quality.measure(variants, sets, args.dtype, options, args.budget_s)
    rows = []
    for name, windows in sets.items():
        for length in args.lengths:
            means = {
                every: [
                    model_quality.mean_loss(losses[name, str(every), i], window.target, 0, length)
                    for i, window in enumerate(windows)
                    if (name, str(every), i) in losses
                ]
                for every in args.every
            }
            for every, each in means.items():
                if each:
                    over = [x - y for x, y in zip(each, means[args.every[0]], strict=False)]
                    row = {"part": "nll", "every": every, "set": name, "length": length, "windows": len(each)}
                    row |= {"nll": statistics.fmean(each), "over": statistics.fmean(over)}
                    rows.append(row | {"over_min": min(over), "over_max": max(over), "over_each": over})
    return rows


def measure_tasks(model: evaluation.Model, found: Any, args: argparse.Namespace) -> list[Row]:
    """Rows by (interval, kind, length)."""
    subjects = needle.make_subjects(args, model, model, max(args.task_lengths))
    every_of = dict(zip((subject.label for subject in subjects), args.refresh_every, strict=True))
    tools = tasks.tools_of(model.tokenizer, model.config.vocab_size)
    trials = {
        (kind, n): tasks.make_trials(tools, found, n, args.trials, kind, args.seed)
        for kind in args.kinds
        for n in args.task_lengths
    }
    rows = needle.summarise(needle.measure(args, subjects, trials, {}), subjects)
    return [{"part": "tasks", "every": every_of[row["subject"]], **row} for row in rows]


def measure_decoding(
    model: evaluation.Model, head: Path | None, args: argparse.Namespace, part: str, dtype: str
) -> list[Row]:
    """Rows by (interval, tree): acceptance on chats, or speed on held-out text."""
    on_cpu = jax.default_backend() == "cpu"
    if part == "speed" and not args.smoke:
        prompts = long_prompts(args.data, model, [max(args.lengths)], 1)
    else:
        prompts = smoke_prompts(model) if args.smoke else read_prompts([args.prompts], model, 512, args.most_prompts)
    rows: list[Row] = []
    for every in args.every[-1:] if args.smoke else args.every:
        each = copy.copy(args)
        each.refresh_every = every
        target = acceptance.Target(model, dtype, each, head)
        if part == "acceptance":
            found = acceptance.measure("chat", target, prompts, 0.0, args.batch, args.max_new_tokens, args.size)
            rows += [{"every": every, **row, "part": part} for row in found if row["category"] == "all"]
        else:
            setting = target.setting(prompts, 1, args.max_new_tokens, args.size if on_cpu else 512)
            target.prepare(setting, list(target.drafters))
            found = acceptance.measure_speed(target, setting, prompts, args.max_new_tokens, part)
            rows += [{"every": every, **row} for row in found]
        harness.say(f"{part}: every {every} done")
    return rows


def draw(axes: Any, rows: list[Row]) -> None:
    loss, right, rounds, speed = axes.flat

    def lines(axis: Any, part: str, key: str, names: tuple[str, ...]) -> None:
        mine = [row for row in rows if row["part"] == part]
        for label in dict.fromkeys(tuple(str(row[name]) for name in names) for row in mine):
            each = [row for row in mine if tuple(str(row[name]) for name in names) == label]
            axis.plot([row["every"] for row in each], [row[key] for row in each], "-o", ms=4, label=", ".join(label))
        axis.set_xlabel("every K-th layer selects")
        if mine:
            axis.legend(fontsize=6)

    lines(loss, "nll", "over", ("set", "length"))
    lines(right, "tasks", "share", ("kind", "length"))
    lines(rounds, "acceptance", "tokens_a_round", ("tree",))
    lines(speed, "speed", "tok_s_median", ("tree", "context"))
    loss.set_ylabel("NLL over that of K = 1 (nats)")
    right.set_ylabel("exact answers")
    right.set_ylim(-0.03, 1.03)
    rounds.set_ylabel("tokens a round")
    speed.set_ylabel("tokens/s of one sequence")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets")
    parser.add_argument("--every", nargs="+", type=int, default=[1, 2, 3, 4, 6])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[8192], help="of nll; speed continues the longest")
    parser.add_argument("--windows", type=int, default=4, help="per set")
    parser.add_argument("--kinds", nargs="+", choices=tuple(tasks.KINDS), default=["single", "multi-key"])
    parser.add_argument("--task-lengths", nargs="+", type=int, default=[4096, 8192])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--prompts", type=Path, default=acceptance.PROMPTS)
    parser.add_argument("--most-prompts", type=int, default=None)
    parser.add_argument("--draft", choices=("eagle3", "ngram"), default="ngram")
    parser.add_argument("--draft-model", type=Path, default=None, help="directory of a head; default: the model's own")
    parser.add_argument("--draft-window", type=int, default=None)
    parser.add_argument("--trees", nargs="+", default=None, metavar="DEPTHxTOPKxNODES")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--repeats", type=int, default=3, help="of each speed")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default=None, help="default: float32 on a CPU")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a batch of tasks")
    parser.add_argument("--chunk", type=int, default=128, help="queries in a tile of sparse attention")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    args.size, args.rounds = 64 if on_cpu else 256, None
    args.dense_theta, args.share, args.path, args.pass_size = [], [], "sequence", 512  # of needle.py
    if args.smoke:
        args.every, args.lengths, args.windows, args.chunk, args.dtype = [1, 2], [128], 1, 64, "float32"
        args.kinds, args.task_lengths, args.trials, args.batch_tokens = ["single"], [256], 1, 256
        args.draft, args.trees, args.batch, args.max_new_tokens, args.repeats = "ngram", ["2x1x3"], 3, 6, 1
        args.parts = ["nll", "tasks", "acceptance"]
    args.trees = args.trees or acceptance.TREES[args.draft]
    for text in args.trees:
        acceptance.parse_tree(text)
    if args.every[0] != 1 or min(args.every) < 1:
        raise UsageError(f"--every: positive, the first one 1, which the others are compared with; got {args.every}")
    if args.smoke:
        model, head, found = evaluation.smoke_model(), None, {"smoke": evaluation.smoke_set()}
    else:
        evaluation.require_files("--data", args.data)
        evaluation.require_files("--prompts", [args.prompts])
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        found = evaluation.read_sets(args.data, model.config.vocab_size)
        head = args.draft_model or model.head
        if args.draft == "eagle3" and head is None:
            raise UsageError(f"{args.model} has no draft head of its own: name one with --draft-model")
    if model.config.nsa is None:
        raise UsageError(f"{args.model} is dense and selects nothing: give a sparse model, or --attention nsa")
    if max(args.every) > model.config.num_layers:
        raise UsageError(f"--every: at most {model.config.num_layers}, the layers of the model")
    args.refresh_every = args.every
    output = evaluation.output_path("refresh_interval", args.output, args.smoke)
    hidden = ("model", "output", "data", "prompts", "draft_model")
    result: Row = {
        "command": "python experiments/refresh_interval.py",
        "model": model.facts,
        "head": head.name if head else None,
        "settings": {key: str(value) for key, value in vars(args).items() if key not in hidden}
        | {"data": [Path(path).name for path in args.data], "prompts": args.prompts.name},
        "rows": [],
    }
    rows: list[Row] = result["rows"]
    for part in args.parts:
        if part == "nll":
            rows += measure_nll(model, found, args)
        elif part == "tasks":
            rows += measure_tasks(model, next(iter(found.values())), args)
        else:
            rows += measure_decoding(model, head, args, part, args.dtype)
        harness.write(output, result)  # a time limit must not lose it
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(np.asarray(axes), rows), columns=2, rows=2)
    names = "part every set kind tree length over share tokens_a_round tok_s_median"
    evaluation.table(rows, names.split())


if __name__ == "__main__":
    evaluation.guarded(main)
