"""Decoding speed by system and context: a model as it is, and as its twin of the sizes of Llama-3.1-8B.

python experiments/throughput.py --model DIR --data HELDOUT... [--draft ngram] [--scales model twin] [--smoke]

Systems: autoregressive decoding and drafting over dense attention (the dense teacher, with the same rotary base);
autoregressive decoding over sparse attention; naive speculation over it (every node visits its own blocks, no reuse
between layers); the same tree verified in groups; SSV with the strategy that the profile ranks first, throughout; and
SSV with the planner. Batch 1, greedy. Prompts are held-out texts, cut such that each context is full when the new
tokens are there; the profile comes from other texts of the same sets, in the same run. A launch a query, as naive code
would have it, cannot be run: the kernels take all nodes of a tree, so `naive` is one launch with a visit list a node.

Times are wall time of decoding after a synchronisation, as the engine runs it: no compilation, no prefill (`prefill_s`
beside it). `verify_ms`: a round without drafting, see `_bench.verify_rounds`. `ratio`: tokens/s over those of
autoregressive sparse decoding from the same prompt. All contexts of the sparse model share the largest capacity,
which its kernels do not pay for; dense ones have their own. `distinct`: share of 4-grams of the continuation that are
new; near 0, it repeats itself, and drafting is flattered.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bench
import _evaluation as evaluation
import _harness as harness
import _speed as speed
import _subject
from _bench import PLAIN, Bench, Document, Run
from _prompts import Prompt
from _speed import Profiler
from _subject import Subject
from twin import parse_shape

from ssv_jax import Strategy, UsageError
from ssv_jax.controller import Controller, Fixed
from ssv_jax.profiles import Profile
from ssv_jax.strategy import PrecisionClass

SYSTEMS = {  # attention and name, and what people call it
    ("dense", "plain"): "dense AR",
    ("dense", "draft"): "drafting + dense",
    ("nsa", "plain"): "AR NSA",
    ("nsa", "naive"): "naive SD + NSA",
    ("nsa", "grouped"): "SSV, that tree",
    ("nsa", "fixed"): "SSV, best fixed",
    ("nsa", "full"): "SSV, planned",
}
NAIVE = {"eagle3": "eagle3:5x8x32", "ngram": "ngram:7x4x16"}
GROUP = 4
KEY = ("scale", "attention", "refresh", "system", "context", "document")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wing:
    """Systems that share a prefill."""

    scale: str
    attention: str
    refresh: int
    systems: tuple[str, ...]

    @property
    def fields(self) -> dict[str, Any]:
        return {"scale": self.scale, "attention": self.attention, "refresh": self.refresh}

    def __str__(self) -> str:
        return f"{self.scale} {self.attention}" + (f" refresh {self.refresh}" if self.refresh > 1 else "")


def held_out(paths: Sequence[str], length: int, counts: Sequence[int], vocab_size: int) -> list[list[Prompt]]:
    """For each count so many texts of `length` tokens, in turn from each set; no two overlap.

    Raises:
      UsageError: sets with too few.
    """
    found = evaluation.read_sets(paths, vocab_size)
    each = [
        [Prompt(name=f"{name} {i}", category=name, tokens=tuple(w.tokens.tolist())) for i, w in enumerate(windows)]
        for name, tokens in found.items()
        if (windows := evaluation.windows(tokens, length, -(-sum(counts) // len(found))))
    ]
    mixed = [texts[i] for i in range(max(map(len, each))) for texts in each if i < len(texts)]
    if len(mixed) < sum(counts):
        raise UsageError(f"--data: {len(mixed)} texts of {length} tokens, {sum(counts)} are needed")
    result = []
    for count in counts:
        result.append(mixed[:count])
        mixed = mixed[count:]
    return result


class Measurement:
    """Fills a ledger, one wing after the other."""

    def __init__(self, args: argparse.Namespace, ledger: evaluation.Ledger, texts: list[Prompt], other: list[Prompt]):
        self.args, self.ledger, self.texts, self.profile_texts = args, ledger, texts, other
        self.naive = speed.parse_strategy("--naive", args.naive)
        self.grouped = dataclasses.replace(self.naive, group=args.group)

    def missing(self, wing: Wing, text: Prompt) -> list[int]:
        """Contexts that are not all measured."""

        def has(system: str, context: int) -> bool:
            return self.ledger.has(**wing.fields, system=system, context=context, document=text.name)

        return [c for c in self.args.contexts if not all(has(system, c) for system in wing.systems)]

    def strategies(self, wing: Wing) -> list[Strategy]:
        if wing.attention == "dense":
            return [self.naive] if "draft" in wing.systems else [Strategy()]
        planned = [speed.parse_strategy("--strategies", label) for label in self.args.strategies]
        own = {"naive": [self.naive], "grouped": [self.grouped], "fixed": planned, "full": planned}
        asked = [s for system in wing.systems for s in own.get(system, [])]
        return [dataclasses.replace(s, refresh_every=wing.refresh) for s in asked or [Strategy()]]

    def run(self, wing: Wing, subject: Subject, steps: evaluation.Steps) -> None:
        args = self.args
        strategies = self.strategies(wing)
        largest = _bench.capacity_for(max(args.contexts))
        shared = {
            "dtype": args.dtype,
            "budget": args.max_new_tokens,
            "rounds": args.rounds,
            "chunk": args.chunk,
            "planned": bool({"fixed", "full"} & set(wing.systems)),
            "implementation": args.implementation,
        }
        verify = [PLAIN]
        if wing.refresh == 1 and not args.smoke:
            verify += [s.label for s in (self.naive, self.grouped) if s in strategies]
        if wing.attention == "nsa":
            main = Bench(subject, strategies, capacity=largest, verify=dict.fromkeys(verify), **shared)
            benches = dict.fromkeys(args.contexts, main)
        else:
            sizes = {c: _bench.capacity_for(c) for c in args.contexts}
            each = {
                size: Bench(subject, strategies, capacity=size, verify=dict.fromkeys(verify), **shared)
                for size in sizes.values()
            }
            benches, main = {c: each[size] for c, size in sizes.items()}, each[largest]
        unique = list(dict.fromkeys(benches.values()))
        seconds = _bench.compile_benches(unique, [bench is main for bench in unique], args.smoke)
        self.ledger.facts.setdefault("compile_s", {})[str(wing)] = seconds
        profile = self._profile(wing, main) if {"fixed", "full"} & set(wing.systems) else None
        warm = {bench: False for bench in unique}
        for text in self.texts:
            contexts = self.missing(wing, text)
            document = Document(main, text.tokens) if contexts else None
            prefill = 0.0
            for context in contexts:
                if steps.spent:
                    return
                assert document is not None
                prefill += document.reach(context - args.max_new_tokens)
                bench = benches[context]
                here = document if bench is main else document.moved(bench)
                if not warm[bench]:
                    warm[bench] = here.warm()
                self._measure(wing, here, context, text, profile, prefill)
                steps.step(f"{wing}, {text.name} at {context}")
                del here
            del document

    def _profile(self, wing: Wing, bench: Bench) -> Profile:
        """Every strategy from every context of texts of their own; gives costs and acceptance at once."""
        facts = self.ledger.facts.setdefault("profiles", {})
        if str(wing) in facts:
            return Profile.from_json(facts[str(wing)])
        labels = [label for label in bench.labels if label not in (self.naive.label, PLAIN)]
        depths = {label: bench.lanes.drafters[label].max_depth for label in labels}
        profiler = Profiler(labels, {label: bench.lanes.strategies[label] for label in labels}, depths)
        contexts = [c - self.args.max_new_tokens for c in (min(self.args.contexts), max(self.args.contexts))]
        steps = evaluation.Steps(f"profile {wing}", len(self.profile_texts) * len(set(contexts)))
        for number, text in enumerate(self.profile_texts):
            document = Document(bench, text.tokens)
            for context in dict.fromkeys(contexts):
                document.reach(context)
                if number == 0 and context == contexts[0]:
                    document.warm()
                for label in labels:
                    profiler.add(label, context, document.run(Fixed(label)))
                steps.step(f"{text.name} at {context}")
        profile = profiler.profile(
            bench.subject,
            dtype=self.args.dtype,
            rounds=self.args.rounds,
            budget=self.args.max_new_tokens,
            capacity=bench.capacity,
        )
        facts[str(wing)] = profile.to_json()
        self.ledger.facts.setdefault("profile_s", {})[str(wing)] = steps.seconds
        self.ledger.save()
        return profile

    def _measure(
        self, wing: Wing, document: Document, context: int, text: Prompt, profile: Profile | None, prefill: float
    ) -> None:
        args = self.args
        labels = {"plain": PLAIN, "naive": self._label(self.naive, wing), "draft": self.naive.label}
        labels["grouped"] = self._label(self.grouped, wing)
        candidates: tuple[str, ...] = ()
        if profile is not None:
            candidates = speed.candidates_of(profile)
            labels["fixed"] = speed.best_fixed(profile, candidates)
        runs: dict[str, list[Run]] = {system: [] for system in wing.systems}
        for _ in range(args.repeats):
            for system in wing.systems:
                if system == "full":
                    assert profile is not None
                    pilot = Controller(profile, candidates, allowed=PrecisionClass.STRICT, known=document.known)
                    runs[system].append(document.run(pilot))
                else:
                    runs[system].append(document.run(Fixed(labels[system])))
        plain = runs["plain"][0].tokens
        for system, each in runs.items():
            one = each[-1]
            times = harness.spread([run.tok_s for run in each])
            row = {**wing.fields, "system": system, "context": context, "document": text.name}
            row |= {"strategy": "planned" if system == "full" else labels[system]}
            row |= {"tok_s": times["median"], "tok_s_min": times["min"], "tok_s_max": times["max"]}
            row |= {"ms_a_round": statistics.median(run.ms_a_round for run in each)}
            row |= {"tokens_a_round": one.tokens_a_round, "new_tokens": len(one.tokens)}
            row |= {"same_tokens": _bench.same_tokens(plain, one.tokens), "distinct": _bench.distinct(one.tokens)}
            row |= {"prefill_s": prefill, "changes": len(one.changes) if system == "full" else None}
            if labels.get(system) in document.bench.verify:
                row |= {"verify_ms": statistics.median(document.verify_ms(labels[system], args.repeats))}
            row |= {"tok_s_each": [run.tok_s for run in each]}
            if system == "full":
                row |= {"calls": one.by_label, "decisions": [str(decision) for decision in one.changes]}
            self.ledger.add(row)

    @staticmethod
    def _label(strategy: Strategy, wing: Wing) -> str:
        return dataclasses.replace(strategy, refresh_every=wing.refresh).label


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with `ratio`: over autoregressive sparse decoding, lossless, from the same prompt."""

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["scale"], row["context"], row["document"]

    plain = {place(r): r["tok_s"] for r in rows if (r["attention"], r["system"], r["refresh"]) == ("nsa", "plain", 1)}
    return [row | {"ratio": row["tok_s"] / plain[place(row)] if place(row) in plain else None} for row in rows]


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Medians over documents, one row a system and context."""
    result = []
    names = [(scale, refresh) for scale in ("model", "twin") for refresh in dict.fromkeys(r["refresh"] for r in rows)]
    for scale, refresh in names:
        for attention, system in SYSTEMS:
            fields = {"scale": scale, "refresh": refresh, "attention": attention, "system": system}
            mine = [row for row in rows if all(row[name] == value for name, value in fields.items())]
            for context in dict.fromkeys(row["context"] for row in mine):
                here = [row for row in mine if row["context"] == context]
                row = {**fields, "name": SYSTEMS[attention, system], "context": context, "documents": len(here)}
                for name in ("tok_s", "ratio", "ms_a_round", "verify_ms", "tokens_a_round", "distinct"):
                    values = [r[name] for r in here if r.get(name) is not None]
                    row[name] = statistics.median(values) if values else None
                ratios = [r["ratio"] for r in here if r["ratio"] is not None]
                row |= {"ratio_min": min(ratios, default=None)}
                row |= {"differing": sum(r["same_tokens"] < r["new_tokens"] for r in here)}
                result.append(row)
    return result


def draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    found = [row for row in summary(rows) if row["tok_s"] is not None]
    for axis, scale in zip(axes, ("model", "twin"), strict=True):
        for name, refresh in dict.fromkeys((r["name"], r["refresh"]) for r in found if r["scale"] == scale):
            mine = [r for r in found if (r["scale"], r["name"], r["refresh"]) == (scale, name, refresh)]
            label = name if refresh == 1 else f"{name}, refresh {refresh}"
            axis.plot([r["context"] for r in mine], [r["tok_s"] for r in mine], marker="o", label=label)
        axis.set_xscale("log", base=2)
        axis.set(xlabel="context, tokens", ylabel="tokens/s, median of texts", title=scale, ylim=(0, None))
        if axis.lines:
            axis.legend(fontsize=7)


def finish(ledger: evaluation.Ledger) -> None:
    output = ledger.path
    ledger.rows = with_ratios(ledger.rows)
    ledger.facts["summary"] = summary(ledger.rows)
    ledger.save()
    harness.say(f"wrote {output}")
    evaluation.write_csv(output.with_suffix(".csv"), ledger.rows)
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, ledger.rows), columns=2)
    names = "scale name refresh context documents tok_s ratio ratio_min verify_ms ms_a_round tokens_a_round differing"
    evaluation.table(summary(ledger.rows), names.split())


def smoke_arguments(args: argparse.Namespace) -> None:
    args.scales, args.contexts, args.documents, args.profile_documents = ["model"], [64, 128], 1, 1
    args.strategies = ["ngram:3x2x6+group2"]
    args.naive, args.group = "ngram:3x2x6", 2
    args.max_new_tokens, args.repeats, args.rounds, args.chunk = 12, 1, 4, 64


def wings_of(args: argparse.Namespace) -> list[Wing]:
    """What the arguments ask for; sparse attention first, whose plain decoding is what ratios refer to."""
    wings = []
    for scale in args.scales:
        if "nsa" in args.attentions:
            systems = ("plain", "naive", "grouped", *(("fixed", "full") if 1 in args.refresh_every else ()))
            wings.append(Wing(scale=scale, attention="nsa", refresh=1, systems=systems))
            for plan in sorted(set(args.refresh_every) - {1}):
                wings.append(Wing(scale=scale, attention="nsa", refresh=plan, systems=("plain", "fixed", "full")))
        if "dense" in args.attentions:
            wings.append(Wing(scale=scale, attention="dense", refresh=1, systems=("plain", "draft")))
    return wings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser)
    evaluation.add_output_arguments(parser)
    speed.add_arguments(parser, new_tokens=128)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets")
    parser.add_argument("--scales", nargs="+", choices=("model", "twin"), default=["model", "twin"])
    parser.add_argument("--attentions", nargs="+", choices=("nsa", "dense"), default=["nsa", "dense"])
    parser.add_argument("--refresh-every", nargs="+", type=int, default=[1], help="layer plans of SSV; 1 is lossless")
    parser.add_argument(
        "--dense-draft-model", type=Path, default=None, help="head for dense; default: the sparse one's"
    )
    parser.add_argument("--contexts", nargs="+", type=int, default=[8192, 16384, 32768, 65536])
    parser.add_argument(
        "--theta", type=float, default=None, help="rotary base of the model, for contexts beyond its training's"
    )
    parser.add_argument("--documents", type=int, default=2)
    parser.add_argument("--profile-documents", type=int, default=2)
    parser.add_argument("--naive", default=None, metavar="LABEL", help="tree of naive speculation, and over dense")
    parser.add_argument("--group", type=int, default=GROUP, help="of that tree, where it is grouped")
    args = parser.parse_args()
    if args.smoke:
        args.draft = "ngram"
        smoke_arguments(args)
    args.naive = args.naive or NAIVE[args.draft]
    speed.settle_arguments(args)
    args.contexts = sorted(set(args.contexts))
    if args.contexts[0] <= args.max_new_tokens:
        raise UsageError(f"--contexts must exceed --max-new-tokens={args.max_new_tokens}, got {args.contexts[0]}")
    if min(args.refresh_every) < 1 or min(args.documents, args.profile_documents) < 1:
        raise UsageError("--refresh-every, --documents and --profile-documents must be positive")
    if not args.smoke:
        evaluation.require_files("--data", args.data)
    shape = None if args.smoke else parse_shape(args.shape)
    model = (
        evaluation.smoke_model() if args.smoke else evaluation.load_model(args.model, args.attention, args.nsa_config)
    )
    if args.theta is not None:
        own = model.config.rope.theta
        if not own <= args.theta < math.inf:
            raise UsageError(f"--theta must be finite and at least the model's own {own:g}, got {args.theta:g}")
        model = model.with_theta(args.theta)
    if "nsa" in args.attentions and model.config.nsa is None:
        raise UsageError(f"{args.model}: its attention is dense; name a sparse model, or --attentions dense")
    head = _subject.find_head(model, args.draft_model, args.random_head) if args.draft == "eagle3" else None
    longest, counts = max(args.contexts), (args.documents, args.profile_documents)
    if args.smoke:
        tokens = evaluation.smoke_set(2 * longest, model.config.vocab_size).document(0)
        parts = [
            Prompt(name=f"text {i}", category="smoke", tokens=tuple(tokens[i * longest :][:longest].tolist()))
            for i in range(2)
        ]
        texts, other = parts[:1], parts[1:]
    else:
        texts, other = held_out(args.data, longest, counts, model.config.vocab_size)
    about = speed.facts_of(args, ("documents", "profile_documents", "naive", "group", "contexts"))
    about |= {"model": model.facts, "head": None if head is None else head.kind}
    about |= {"dense_head": "its own" if args.dense_draft_model else "that of the sparse model"}
    about |= {"dense_model": Path(args.dense_model).name, "data": [Path(path).name for path in args.data]}
    output = evaluation.output_path("throughput", args.output, args.smoke)
    command = "python experiments/throughput.py"
    ledger = evaluation.Ledger(output, command, about, KEY, restart=args.restart or args.smoke)
    measurement = Measurement(args, ledger, texts, other)
    wings = wings_of(args)
    left = {wing: sum(len(measurement.missing(wing, text)) for text in texts) for wing in wings}
    missing = [wing for wing, count in left.items() if count]
    steps = evaluation.Steps("throughput", sum(left.values()), args.budget_s)
    subject, what = None, None
    for wing in missing:
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: the same command goes on with {wing}")
            break
        if what != (wing.scale, wing.attention):
            subject = None  # before the next one is made
            source = model
            if wing.attention == "dense":
                source = dense_teacher(args, model)
            wide, own = shape if wing.scale == "twin" else None, head
            if wing.attention == "dense" and args.dense_draft_model is not None:
                own = _subject.find_head(source, args.dense_draft_model, False)
            subject, _ = _subject.make_subject(source, own, args.dtype, wide, args.seed)
            what = wing.scale, wing.attention
        measurement.run(wing, subject, steps)
    finish(ledger)
    wrong = [row for row in ledger.rows if row["same_tokens"] < row["new_tokens"]]
    if args.dtype == "float32" and wrong:
        raise SystemExit(f"error: drafted tokens differ from those of plain decoding in {len(wrong)} rows")


def dense_teacher(args: argparse.Namespace, model: evaluation.Model) -> evaluation.Model:
    """The dense model, with the rotary base of the sparse one, which reaches as far."""
    if args.smoke:
        return evaluation.smoke_model(nsa=False)
    return evaluation.load_model(args.dense_model, "dense").with_theta(model.config.rope.theta)


if __name__ == "__main__":
    evaluation.guarded(main)
