"""Where sparse attention starts to pay: rounds of a dense and of a sparse model of one size, by context.

python experiments/crossover.py --model DIR [--contexts 8192 ... 524288] [--throughput FILE] [--smoke]

The caches hold random rows, not a text: nothing of tokens or acceptance means anything here, and all costs are real.
What is timed is a whole round, drafting and host included, of autoregressive decoding and of a draft tree, over dense
attention (in XLA) and over sparse attention (naive: one visit list a node; SSV: in groups). Random keys agree less
about blocks than those of a text, so trees over sparse attention cost somewhat more than they would.

Tokens/s are tokens a round over the round's time. Tokens a round come from `--throughput`, the file that
throughput.py wrote: of the longest context there, each system its own; or `--tokens-per-round` sets one figure for all
trees. `crossover`: the context from which the sparse side is faster, between two measured ones by the logarithm.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bench
import _evaluation as evaluation
import _harness as harness
import _speed as speed
import _subject
import throughput
from _bench import PLAIN, Bench, Document
from twin import parse_shape

from ssv_jax import UsageError
from ssv_jax.command import out_of_memory

LINES = {  # attention and line: how it reads
    ("dense", "plain"): "dense, autoregressive",
    ("dense", "draft"): "dense, draft tree",
    ("nsa", "plain"): "NSA, autoregressive",
    ("nsa", "naive"): "NSA, draft tree, a visit list a node",
    ("nsa", "grouped"): "NSA, draft tree, grouped",
}
PAIRS = {"autoregressive": ("plain", "plain"), "draft tree": ("draft", "grouped")}  # dense and sparse line


def crossing(points: Sequence[tuple[int, float]]) -> str:
    """Where a ratio of speeds by rising context passes 1 for good.

    Args:
      points: (context, sparse over dense).
    """
    last = next((i for i in reversed(range(len(points))) if points[i][1] < 1), None)
    if last is None:
        return f"below {points[0][0]}"
    if last == len(points) - 1:
        return f"above {points[-1][0]}"
    (low, a), (high, b) = points[last], points[last + 1]
    share = -math.log(a) / (math.log(b) - math.log(a))
    return f"{low * (high / low) ** share:.0f}"


def tokens_a_round(args: argparse.Namespace) -> dict[tuple[str, str], float]:
    """By line, of trees; autoregressive rounds give one.

    Raises:
      UsageError: a file without what is needed.
    """
    result = {line: 1.0 if line[1] == "plain" else args.tokens_per_round for line in LINES}
    if args.throughput is None:
        return result
    try:
        rows = json.loads(args.throughput.read_text(encoding="utf-8"))["facts"]["summary"]
        for line in LINES:
            mine = [r for r in rows if (r["attention"], r["system"], r["refresh"]) == (*line, 1)]
            result[line] = max(mine, key=lambda row: (row["scale"] == "twin", row["context"]))["tokens_a_round"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--throughput {args.throughput}: not a result of throughput.py ({error!r})") from None
    return result


def measure(
    args: argparse.Namespace,
    ledger: evaluation.Ledger,
    attention: str,
    subject: _subject.Subject,
    steps: evaluation.Steps,
) -> None:
    """All lines of one attention, the longest contexts last."""
    naive = speed.parse_strategy("--tree", args.tree)
    grouped = dataclasses.replace(naive, group=args.group)
    labels = {"plain": PLAIN, "naive": naive.label, "draft": naive.label, "grouped": grouped.label}
    lines = [line for kind, line in LINES if kind == attention]
    wanted = [c for c in args.contexts if not all(ledger.has(attention=attention, line=x, context=c) for x in lines)]
    assert naive.tree is not None
    room = args.rounds * (naive.tree.depth + 2)  # all rounds of a call must happen
    sizes = {}
    for context in wanted:
        own = _bench.capacity_for(context)
        if attention == "nsa" and context <= args.kernel_limit:  # kernels do not pay for what is not there
            own = _bench.capacity_for(max(c for c in wanted if c <= args.kernel_limit))
        sizes[context] = own
    benches = {
        size: Bench(
            subject,
            [naive] if attention == "dense" else [naive, grouped],
            dtype=args.dtype,
            capacity=size,
            budget=room,
            rounds=args.rounds,
            chunk=args.chunk,
            planned=False,
            implementation=args.implementation,
        )
        for size in dict.fromkeys(sizes.values())
    }
    ledger.facts.setdefault("compile_s", {})[attention] = _bench.compile_benches(
        list(benches.values()), [False] * len(benches), args.smoke
    )
    document, shown = None, None
    for context in wanted:
        bench = benches[sizes[context]]
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: the same command goes on with {attention} at {context}")
            return
        if document is None or bench is not shown:
            document = None  # before the next one is made
            document, shown = Document(bench, [0], _bench.fill(bench.first_state([0]), subject.vocab_size)), bench
        document.filled(context - room)
        for line in lines:
            run = [document.timed(labels[line]) for _ in range(args.repeats + 1)][1:]  # the first is slow
            times = harness.spread([1e3 * seconds / args.rounds for seconds in run])
            row = {"attention": attention, "line": line, "context": context, "ms": times["median"]}
            row |= {"ms_min": times["min"], "ms_max": times["max"], "repeats": args.repeats}
            ledger.add(row | {"name": LINES[attention, line], "capacity": bench.capacity})
        steps.step(f"{attention} at {context}: {row['ms']:.2f} ms a round of {line}")


def run_attention(args: argparse.Namespace, ledger: evaluation.Ledger, attention: str, make: Any, steps: Any) -> None:
    """As `measure`; a device that is too small ends it, with a word in the result."""
    try:
        measure(args, ledger, attention, make()[0], steps)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        ledger.facts.setdefault("out_of_memory", {})[attention] = str(error).splitlines()[0][:200]
        harness.say(f"{attention}: out of memory, longer contexts are left out")


def summary(ledger: evaluation.Ledger, tokens: dict[tuple[str, str], float]) -> list[dict[str, Any]]:
    """One row a context: milliseconds of every line, tokens/s, and how much faster the sparse side is."""
    times = {(row["attention"], row["line"], row["context"]): row["ms"] for row in ledger.rows}
    result = []
    for context in sorted({row["context"] for row in ledger.rows}):
        row: dict[str, Any] = {"context": context}
        for line in LINES:
            ms = times.get((*line, context))
            row[f"{'_'.join(line)}_ms"] = ms
            row[f"{'_'.join(line)}_tok_s"] = None if ms is None else 1e3 * tokens[line] / ms
        for name, (dense, sparse) in PAIRS.items():
            a, b = row[f"dense_{dense}_tok_s"], row[f"nsa_{sparse}_tok_s"]
            row[f"{name.replace(' ', '_')}_gain"] = None if a is None or b is None else b / a
        result.append(row)
    return result


def draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    for axis, unit, text in zip(axes, ("ms", "tok_s"), ("milliseconds a round", "tokens/s"), strict=True):
        for line, name in LINES.items():
            key = f"{'_'.join(line)}_{unit}"
            points = [(row["context"], row[key]) for row in rows if row[key] is not None]
            if points:
                axis.plot(*zip(*points, strict=True), marker="o", label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set(xlabel="context, tokens (synthetic)", ylabel=text)
        if axis.lines:
            axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser)
    evaluation.add_output_arguments(parser)
    speed.add_arguments(parser, new_tokens=1)
    parser.add_argument("--contexts", nargs="+", type=int, default=[1 << n for n in range(13, 20)])
    parser.add_argument("--attentions", nargs="+", choices=("dense", "nsa"), default=["nsa", "dense"])
    parser.add_argument("--tree", default=None, metavar="LABEL", help="drafter and tree of all draft lines")
    parser.add_argument("--group", type=int, default=throughput.GROUP)
    parser.add_argument("--throughput", type=Path, default=None, help="result of throughput.py: its tokens a round")
    parser.add_argument("--tokens-per-round", type=float, default=3.0, help="of every tree, without --throughput")
    parser.add_argument("--kernel-limit", type=int, default=1 << 20, help="longest cache that the sparse kernels take")
    args = parser.parse_args()
    if args.smoke:
        args.draft, args.contexts, args.tree, args.group = "ngram", [128, 256], "ngram:3x1x4", 2
        args.repeats, args.rounds, args.random_head = 1, 2, False
    args.tree = args.tree or throughput.NAIVE[args.draft]
    speed.settle_arguments(args)
    args.contexts = sorted(set(args.contexts))
    if args.contexts[0] < 128 or not args.tokens_per_round > 0:
        raise UsageError("--contexts must be at least 128, and --tokens-per-round above 0")
    tokens = tokens_a_round(args)
    shape = None if args.smoke else parse_shape(args.shape)
    model = (
        evaluation.smoke_model() if args.smoke else evaluation.load_model(args.model, args.attention, args.nsa_config)
    )
    if model.config.nsa is None:
        raise UsageError(f"{args.model}: its attention is dense; name a sparse model")
    head = _subject.find_head(model, args.draft_model, args.random_head) if args.draft == "eagle3" else None
    about = speed.facts_of(args, ("tree", "group"))
    about = {name: value for name, value in about.items() if name not in ("strategies", "max_new_tokens")}
    about |= {"model": model.facts, "head": None if head is None else head.kind, "caches": "random rows, not a text"}
    output = evaluation.output_path("crossover", args.output, args.smoke)
    key = ("attention", "line", "context")
    command = "python experiments/crossover.py"
    ledger = evaluation.Ledger(output, command, about, key, restart=args.restart or args.smoke)
    ledger.facts["tokens_a_round"] = {" ".join(line): value for line, value in tokens.items()}
    ledger.facts["tokens_a_round_from"] = args.throughput.name if args.throughput else "--tokens-per-round"
    steps = evaluation.Steps("crossover", len(args.attentions) * len(args.contexts), args.budget_s)
    for attention in args.attentions:
        lines = [line for kind, line in LINES if kind == attention]
        if all(ledger.has(attention=attention, line=line, context=c) for line in lines for c in args.contexts):
            continue
        if steps.spent:
            break
        source = model if attention == "nsa" else throughput.dense_teacher(args, model)
        make = functools.partial(_subject.make_subject, source, head, args.dtype, shape, args.seed)
        run_attention(args, ledger, attention, make, steps)
    rows = summary(ledger, tokens)
    for name in PAIRS:
        key = f"{name.replace(' ', '_')}_gain"
        points = [(row["context"], row[key]) for row in rows if row[key] is not None]
        if points:
            ledger.facts.setdefault("crossover", {})[name] = found = crossing(points)
            print(f"{name}: sparse attention pays from a context of {found} tokens on")
    ledger.facts["summary"] = rows
    ledger.save()
    harness.say(f"wrote {output}")
    evaluation.write_csv(output.with_suffix(".csv"), ledger.rows)
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, rows), columns=2)
    names = ["context", *(f"{'_'.join(line)}_ms" for line in LINES), "autoregressive_gain", "draft_tree_gain"]
    evaluation.table(rows, names)


if __name__ == "__main__":
    evaluation.guarded(main)
