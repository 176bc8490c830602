"""What choosing a strategy while decoding gains over the best fixed one, prompt by prompt, on a mixed set.

python experiments/planner_gain.py --model DIR --data HELDOUT_DOCS... [--draft ngram] [--twin] [--smoke]

Four kinds of prompts: to copy a text, to chat, to go on with code (files of this project), and a question about a long
document. Every second prompt of each kind serves the profile, in the same run; the others are measured: each with
every strategy by itself, autoregressive decoding among them, and with the planner. Batch 1, greedy, end tokens end an
answer. Times are wall time of decoding, without compilation and prefill.

`gain` of a set is its tokens/s (all tokens over all seconds) with the planner over those with one strategy: the one
that the profile ranks first (`offline`, what one could have known), and the best one in hindsight (`hindsight`).
`oracle`: the best strategy for each prompt, in hindsight. `ratio`: per prompt, over autoregressive decoding.
`probe_s`: seconds lost in trials of another strategy, against going on; `first_call`: time a round of the first
call after a change over that of the later calls of the same strategy; `host_us`: what a decision costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bench
import _evaluation as evaluation
import _harness as harness
import _speed as speed
import _subject
import numpy as np
import throughput
from _bench import PLAIN, Bench, Document, Run
from _prompts import Prompt, pick, read_prompts
from _speed import Profiler
from acceptance import PROMPTS
from twin import SMOKE_SHAPE, parse_shape

from ssv_jax import UsageError
from ssv_jax.controller import Controller, Decision, Fixed, Observed
from ssv_jax.profiles import Profile

KINDS = ("copying", "chat", "code", "document")
COPY = "Repeat the following text word for word.\n\n"
ASK = "\n\nWhat is the text above about? Answer in three sentences."
CODE = sorted((Path(__file__).parents[1] / "ssv_jax").glob("*.py"))


class Timed:
    """A pilot, and the seconds that it takes."""

    def __init__(self, pilot: Any) -> None:
        self._pilot, self.seconds, self.calls = pilot, 0.0, 0

    def decide(self, context: int) -> Decision:
        began = time.perf_counter()
        decision = self._pilot.decide(context)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        return decision

    def observe(self, seen: Observed) -> None:
        began = time.perf_counter()
        self._pilot.observe(seen)
        self.seconds += time.perf_counter() - began


def prompts_of(args: argparse.Namespace, model: evaluation.Model) -> list[Prompt]:
    """`args.prompts_per_kind` of each kind.

    Raises:
      UsageError: no tokenizer, or held-out sets that are too short.
    """
    count, tokenizer = args.prompts_per_kind, model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise UsageError(f"{model.name} has no chat template, which these prompts need")

    def ask(text: str) -> tuple[int, ...]:
        return tuple(tokenizer.apply_chat([{"role": "user", "content": text}]))

    found = {"chat": pick(read_prompts(args.prompts, model, args.longest_prompt, None), count)}
    (texts,) = throughput.held_out(args.data, args.document_tokens, [2 * count], model.config.vocab_size)
    short = [tokenizer.decode(text.tokens[: args.copy_tokens]) for text in texts[:count]]
    found["copying"] = [Prompt(name=f"copy {i}", category="", tokens=ask(COPY + text)) for i, text in enumerate(short)]
    long = [tokenizer.decode(text.tokens) for text in texts[count:]]
    found["document"] = [Prompt(name=f"document {i}", category="", tokens=ask(t + ASK)) for i, t in enumerate(long)]
    files = [CODE[i] for i in np.linspace(0, len(CODE) - 1, count).round().astype(int)]
    codes = [(file.name, tokenizer.encode(file.read_text(encoding="utf-8"))[: args.code_tokens]) for file in files]
    found["code"] = [Prompt(name=name, category="", tokens=tuple(tokens)) for name, tokens in codes]
    return [dataclasses.replace(prompt, category=kind) for kind in KINDS for prompt in found[kind][:count]]


def smoke_prompts(model: evaluation.Model) -> list[Prompt]:
    """Two of each kind: text that repeats itself, and text that does not."""
    vocab, rng = model.config.vocab_size, np.random.default_rng(3)
    tokens = evaluation.smoke_set(400, vocab).document(0).tolist()
    shapes = [("copying", tokens[:120]), ("chat", rng.integers(0, vocab, 30).tolist())]
    return [
        Prompt(name=f"{kind} {i}", category=kind, tokens=tuple(text[i:])) for kind, text in shapes for i in range(2)
    ]


def switch_costs(run: Run) -> dict[str, Any]:
    """What changes of strategy cost in one decoding; None where there were none."""
    probe_s, first = 0.0, []
    calls = run.calls
    for number, call in enumerate(calls):
        label = call.decision.label
        if number == 0 or label == calls[number - 1].decision.label or not call.accepted:
            continue
        later = [c for c in calls[number + 1 :] if c.decision.label == label and len(c.accepted) == len(call.accepted)]
        if later:
            first.append(call.seconds / statistics.median(c.seconds for c in later))
        if call.decision.kind == "probe":
            home = [c for c in calls[:number] if c.decision.label == calls[number - 1].decision.label]
            rate = sum(c.emitted for c in home) / sum(c.seconds for c in home)
            probe_s += call.seconds - call.emitted / rate
    return {"probe_s": probe_s, "first_call": statistics.median(first) if first else None}


def make_profile(
    args: argparse.Namespace, bench: Bench, prompts: Sequence[Prompt], ledger: evaluation.Ledger
) -> Profile:
    """From decodings of its own prompts with every strategy, costs at two lengths."""
    if "profile" in ledger.facts:
        return Profile.from_json(ledger.facts["profile"])
    depths = {label: bench.lanes.drafters[label].max_depth for label in bench.labels}
    profiler = Profiler(bench.labels, dict(bench.lanes.strategies), depths)
    steps = evaluation.Steps("profile", len(prompts))
    sizes = [len(prompt.tokens) for prompt in prompts]
    middle = (min(sizes) + max(sizes)) / 2
    groups = [[n for n in sizes if n <= middle], [n for n in sizes if n > middle]]
    place = {n: round(statistics.fmean(group)) for group in groups for n in group}
    for number, prompt in enumerate(prompts):
        document = Document(bench, prompt.tokens)
        document.reach(len(prompt.tokens))
        if number == 0:
            document.warm()
        for label in bench.labels:
            profiler.add(label, place[len(prompt.tokens)], document.run(Fixed(label)))
        steps.step(f"{prompt.category}: {prompt.name}")
    profile = profiler.profile(
        bench.subject, dtype=args.dtype, rounds=args.rounds, budget=args.max_new_tokens, capacity=bench.capacity
    )
    ledger.facts |= {"profile": profile.to_json(), "profile_s": steps.seconds}
    ledger.save()
    return profile


def measure(
    args: argparse.Namespace, bench: Bench, prompt: Prompt, profile: Profile, warm: bool
) -> list[dict[str, Any]]:
    """Rows of one prompt: every strategy by itself, and planned."""
    document = Document(bench, prompt.tokens)
    prefill = document.reach(len(prompt.tokens))
    if warm:
        document.warm()
    candidates = speed.candidates_of(profile)
    fixed = [PLAIN, *(label for label in candidates if label != bench.lanes.base)]
    runs: dict[str, list[Run]] = {name: [] for name in (*fixed, "planned")}
    host = []
    for _ in range(args.repeats):
        for label in fixed:
            runs[label].append(document.run(Fixed(label)))
        pilot = Timed(Controller(profile, candidates, known=document.known))
        runs["planned"].append(document.run(pilot))
        host.append(1e6 * pilot.seconds / max(pilot.calls, 1))
    plain = runs[PLAIN][0].tokens
    if len(plain) < 2:
        harness.say(f"{prompt.category}, {prompt.name}: its answer is empty, left out")
        return []
    rows = []
    for strategy, each in runs.items():
        times = harness.spread([run.seconds for run in each])
        one = min(each, key=lambda run: abs(run.seconds - times["median"]))
        row: dict[str, Any] = {"kind": prompt.category, "prompt": prompt.name, "strategy": strategy}
        row |= {"prompt_tokens": len(prompt.tokens), "emitted": one.emitted, "seconds": times["median"]}
        row |= {"seconds_min": times["min"], "seconds_max": times["max"], "tok_s": one.emitted / times["median"]}
        row |= {"tokens_a_round": one.tokens_a_round, "same_tokens": _bench.same_tokens(plain, one.tokens)}
        row |= {"new_tokens": len(one.tokens), "distinct": _bench.distinct(one.tokens), "prefill_s": prefill}
        if strategy == "planned":
            row |= switch_costs(one) | {"changes": len(one.changes), "host_us": statistics.median(host)}
            row |= {"calls": one.by_label, "decisions": [str(decision) for decision in one.changes]}
        rows.append(row)
    plain_speed = rows[0]["tok_s"]
    return [row | {"ratio": row["tok_s"] / plain_speed} for row in rows]


def summary(rows: Sequence[dict[str, Any]], offline: str) -> list[dict[str, Any]]:
    """One row a kind, and one for all."""
    result = []
    for kind in ("all", *dict.fromkeys(row["kind"] for row in rows)):
        mine = [row for row in rows if kind in ("all", row["kind"])]
        speeds = {}
        for label in dict.fromkeys(row["strategy"] for row in mine):
            own = [row for row in mine if row["strategy"] == label]
            speeds[label] = sum(row["emitted"] for row in own) / sum(row["seconds"] for row in own)
        fixed = {label: value for label, value in speeds.items() if label != "planned"}
        best = {
            name: max((r for r in mine if r["prompt"] == name and r["strategy"] != "planned"), key=lambda r: r["tok_s"])
            for name in dict.fromkeys(row["prompt"] for row in mine)
        }
        oracle = sum(row["emitted"] for row in best.values()) / sum(row["seconds"] for row in best.values())
        planned = [row for row in mine if row["strategy"] == "planned"]
        hindsight = max(fixed, key=lambda label: fixed[label])
        row = {"kind": kind, "prompts": len(planned), "planned_tok_s": speeds["planned"]}
        row |= {"offline": offline, "offline_tok_s": fixed[offline], "hindsight": hindsight}
        row |= {"hindsight_tok_s": fixed[hindsight], "oracle_tok_s": oracle, "plain_tok_s": fixed[PLAIN]}
        row |= {f"gain_{n}": speeds["planned"] / row[f"{n}_tok_s"] - 1 for n in ("offline", "hindsight", "oracle")}
        each = [r["tok_s"] / s["tok_s"] for r in planned for s in mine if _same(r, s, offline)]
        row |= {f"gain_each_{name}": value - 1 for name, value in _spread(each).items()}
        row |= {f"ratio_{name}": value for name, value in _spread([row["ratio"] for row in planned]).items()}
        for name in ("changes", "probe_s", "host_us", "first_call"):
            values = [r[name] for r in planned if r[name] is not None]
            row[f"{name}_mean"] = statistics.fmean(values) if values else None
        row["seconds"] = sum(r["seconds"] for r in planned)
        row["differing"] = sum(r["same_tokens"] < r["new_tokens"] for r in mine)
        result.append(row)
    return result


def _same(planned: dict[str, Any], row: dict[str, Any], label: str) -> bool:
    return row["prompt"] == planned["prompt"] and row["kind"] == planned["kind"] and row["strategy"] == label


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: value for name, value in harness.spread(list(values)).items() if name != "repeats"}


def draw(axes: Any, rows: Sequence[dict[str, Any]], offline: str) -> None:
    """Per prompt, in rising order: planned over the offline choice, and over autoregressive decoding."""
    planned = [row for row in rows if row["strategy"] == "planned"]
    for axis, label, name in zip(axes, (offline, PLAIN), (f"{offline}, throughout", "plain decoding"), strict=True):
        for kind in dict.fromkeys(row["kind"] for row in planned):
            mine = [row for row in planned if row["kind"] == kind]
            values = sorted(r["tok_s"] / s["tok_s"] for r in mine for s in rows if _same(r, s, label))
            axis.plot(np.linspace(0, 1, len(values)), values, marker="o", label=kind)
        axis.axhline(1, color="grey", linewidth=0.8)
        axis.set(xlabel="share of prompts", ylabel=f"planned over {name}")
        axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    evaluation.add_output_arguments(parser)
    speed.add_arguments(parser, new_tokens=256)
    parser.add_argument("--twin", action="store_true", help="widened to --shape")
    parser.add_argument("--prompts", nargs="+", type=Path, default=[PROMPTS], help="chats")
    parser.add_argument("--longest-prompt", type=int, default=1024, help="tokens of a chat; longer ones are left out")
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets, to copy and to ask about")
    parser.add_argument("--prompts-per-kind", type=int, default=8, help="half of them for the profile")
    parser.add_argument("--copy-tokens", type=int, default=200)
    parser.add_argument("--code-tokens", type=int, default=1024)
    parser.add_argument("--document-tokens", type=int, default=7168)
    args = parser.parse_args()
    if args.smoke:
        args.draft, args.strategies = "ngram", ["ngram:3x1x4"]
        args.max_new_tokens, args.repeats, args.rounds, args.chunk = 24, 1, 4, 64
    speed.settle_arguments(args)
    for name in ("prompts_per_kind", "copy_tokens", "code_tokens", "document_tokens", "longest_prompt"):
        least = 2 if name == "prompts_per_kind" else 1
        if getattr(args, name) < least:
            raise UsageError(f"--{name.replace('_', '-')} must be >= {least}, got {getattr(args, name)}")
    if not args.smoke:
        evaluation.require_files("--data", args.data)
        evaluation.require_files("--prompts", args.prompts)
    shape = None
    if args.twin:
        shape = SMOKE_SHAPE if args.smoke else parse_shape(args.shape)
    model = (
        evaluation.smoke_model() if args.smoke else evaluation.load_model(args.model, args.attention, args.nsa_config)
    )
    head = _subject.find_head(model, args.draft_model, args.random_head) if args.draft == "eagle3" else None
    prompts = smoke_prompts(model) if args.smoke else prompts_of(args, model)
    names = ("twin", "prompts_per_kind", "copy_tokens", "code_tokens", "document_tokens", "longest_prompt")
    about = speed.facts_of(args, names) | {"model": model.facts, "head": None if head is None else head.kind}
    about |= {"data": [Path(path).name for path in args.data], "prompts": [path.name for path in args.prompts]}
    output = evaluation.output_path("planner_gain", args.output, args.smoke)
    if args.twin and args.output is None:
        output = output.with_stem(f"{output.stem}-twin")
    key = ("kind", "prompt", "strategy")
    command = "python experiments/planner_gain.py"
    ledger = evaluation.Ledger(output, command, about, key, restart=args.restart or args.smoke)
    of_kind = {kind: [p for p in prompts if p.category == kind] for kind in KINDS}
    for_profile = [prompt for kind in KINDS for prompt in of_kind[kind][::2]]
    measured = [prompt for kind in KINDS for prompt in of_kind[kind][1::2]]
    missing = [p for p in measured if not ledger.has(kind=p.category, prompt=p.name, strategy="planned")]
    if missing:
        subject, _ = _subject.make_subject(model, head, args.dtype, shape, args.seed)
        bench = Bench(
            subject,
            [speed.parse_strategy("--strategies", label) for label in args.strategies],
            dtype=args.dtype,
            capacity=_bench.capacity_for(max(len(prompt.tokens) for prompt in prompts) + args.max_new_tokens),
            budget=args.max_new_tokens,
            rounds=args.rounds,
            chunk=args.chunk,
            stops=True,
            implementation=args.implementation,
        )
        ledger.facts |= {"compile_s": _bench.compile_benches([bench], quick=args.smoke), "subject": subject.name}
        steps = evaluation.Steps("planner", len(missing), args.budget_s)
        cold = "profile" in ledger.facts
        profile = make_profile(args, bench, for_profile, ledger)
        for prompt in missing:
            if steps.spent:
                harness.say(f"budget of {args.budget_s:g} s spent: the same command goes on with {prompt.name}")
                break
            for row in measure(args, bench, prompt, profile, cold):
                ledger.add(row)
            cold = False
            steps.step(f"{prompt.category}: {prompt.name}")
    profile = Profile.from_json(ledger.facts["profile"])
    offline = speed.best_fixed(profile, speed.candidates_of(profile))
    offline = PLAIN if speed.parse_strategy("the profile", offline).draft == "none" else offline
    rows = summary(ledger.rows, offline) if ledger.rows else []
    ledger.facts |= {"offline": offline, "summary": rows}
    ledger.save()
    harness.say(f"wrote {output}")
    evaluation.write_csv(output.with_suffix(".csv"), ledger.rows)
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, ledger.rows, offline), columns=2)
    shown = "kind prompts planned_tok_s offline offline_tok_s gain_offline gain_hindsight gain_oracle ratio_min"
    evaluation.table(rows, [*shown.split(), "ratio_median", "changes_mean", "probe_s_mean", "differing"])
    wrong = [row for row in ledger.rows if row["same_tokens"] < row["new_tokens"]]
    if args.dtype == "float32" and wrong:
        raise SystemExit(f"error: tokens differ from those of plain decoding in {len(wrong)} rows")


if __name__ == "__main__":
    evaluation.guarded(main)
