"""Tokens a round, losslessness and speed of a drafter, by draft tree, on chat prompts and on long text.

python experiments/acceptance.py --model NAME_OR_DIR [--draft-model DIR] [--prompts FILE.jsonl...] [--smoke]
Prompts are JSON lines of `question_id`, `category`, `turns`; the first turn is asked. Sequences of a batch do not
influence each other, so tokens a round are those of one sequence alone; prefill is shared by all trees. `--parts`:
chat (batches of prompts), long (`--data`: held-out text that is continued), speed (one sequence at a time).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import jax
import jax.numpy as jnp
import numpy as np
from _prompts import Prompt, long_prompts, pick, read_prompts, smoke_prompts

from ssv_jax import Strategy, UsageError, loop
from ssv_jax.drafting.build import build_drafter, check_drafter
from ssv_jax.drafting.eagle3 import Eagle3Drafter
from ssv_jax.drafting.ngram import NgramDrafter
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Drafter, Params
from ssv_jax.models.eagle3 import build as build_head
from ssv_jax.models.eagle3 import random_params as random_head
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import build
from ssv_jax.sampling import Sampling
from ssv_jax.state import RUNNING, DecodeState, RoundStats
from ssv_jax.strategy import TreeSpec

PROMPTS = Path(__file__).parent / "prompts" / "chat.jsonl"
TREES = {
    "eagle3": ["3x1x5", "4x2x8", "4x4x16", "5x8x32", "7x10x60"],
    "ngram": ["4x1x5", "7x1x8", "7x4x16"],
}
PARTS = ("chat", "long", "speed", "speed-long")
UNIT = 256  # capacities are multiples of it
ROUNDS = {"cpu": 8, "gpu": 32}  # rounds a call of one sequence, as the engine does


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """What came of a prompt: all new tokens, the rounds after the first one, and how many they emitted."""

    tokens: tuple[int, ...]
    rounds: int
    emitted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What a set of executables is compiled for."""

    batch: int
    capacity: int
    dtype: str
    temperature: float
    size: int
    rounds: int

    def __str__(self) -> str:
        return f"batch {self.batch}, capacity {self.capacity}, {self.dtype}, T={self.temperature:g}"


class Target:
    """A model with its drafters, in one dtype; compiles each (setting, tree) once.

    Args:
      model: the target.
      trees: by name; `none` is added.
      drafter: `eagle3` or `ngram`.
      head: directory of the eagle3 head; None for a random one.
      args: command line.
    """

    def __init__(self, model: evaluation.Model, dtype: str, args: argparse.Namespace, head: Path | None) -> None:
        self.model, self.config, self.args = model, model.config, args
        self.dtype = jnp.dtype(dtype)
        self.graphdef, target = build(model.config, model.params, self.dtype)
        self.drafters, draft = make_drafters(model, args, self.dtype, head)
        self.params = Params(target=target, draft=draft)
        self.stop = () if model.tokenizer is None else tuple(model.tokenizer.eos_ids)
        self._compiled: dict[Any, Any] = {}

    def decoding(self, tree: str, temperature: float) -> loop.Decoding:
        plan = LayerPlan.every(self.config.num_layers, self.args.refresh_every)
        return loop.Decoding(
            model=self.graphdef,
            config=self.config,
            drafter=self.drafters[tree],
            sampling=Sampling(temperature=temperature),
            stop_ids=self.stop,
            plan=plan,
        )

    def first_state(self, setting: Setting, prompts: Sequence[Sequence[int]], tree: str, budget: int) -> DecodeState:
        padded = np.zeros((setting.batch, setting.capacity), np.int32)
        lengths = np.ones(setting.batch, np.int32)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        return loop.init_state(
            self.decoding(tree, setting.temperature),
            jnp.asarray(padded),
            jnp.asarray(lengths),
            max_new_tokens=budget,
            key=jax.random.key(self.args.seed),
            capacity=setting.capacity,
            dtype=self.dtype,
        )

    def setting(
        self, prompts: Sequence[Prompt], batch: int, budget: int, size: int, temperature: float = 0.0
    ) -> Setting:
        """For these prompts and `budget` new tokens, in passes of `size`."""
        longest = max(len(prompt.tokens) for prompt in prompts) + budget
        return Setting(
            batch=batch,
            capacity=-(-longest // UNIT) * UNIT,
            dtype=self.dtype.name,
            temperature=temperature,
            size=size,
            rounds=self.args.rounds or ROUNDS["cpu" if jax.default_backend() == "cpu" else "gpu"],
        )

    @property
    def any_tree(self) -> str:
        """A tree whose prefill serves all."""
        return next(name for name in self.drafters if name != "none")

    def prepare(self, setting: Setting, trees: Sequence[str]) -> None:
        """Compiles what is missing, all at once."""
        jobs: dict[Any, Any] = {}

        def shapes(tree: str) -> Any:
            return jax.eval_shape(lambda: self.first_state(setting, [[0]], tree, 1))

        def prefill() -> Any:
            jitted = jax.jit(loop.prefill_chunk, static_argnames=("decoding", "size"), donate_argnames="state")
            decoding = self.decoding(self.any_tree, setting.temperature)
            return jitted.lower(decoding=decoding, params=self.params, state=shapes(self.any_tree), size=setting.size)

        def decode(tree: str) -> Any:
            jitted = jax.jit(loop.decode_until, static_argnames=("decoding", "rounds"), donate_argnames="state")
            decoding = self.decoding(tree, setting.temperature)
            return jitted.lower(decoding=decoding, params=self.params, state=shapes(tree), rounds=setting.rounds)

        if (setting, "prefill") not in self._compiled:
            jobs[setting, "prefill"] = prefill
        for tree in trees:
            if (setting, tree) not in self._compiled:
                jobs[setting, tree] = functools.partial(decode, tree)
        if jobs:
            self._compiled |= evaluation.compile_all(jobs)

    def prefill(
        self, setting: Setting, prompts: Sequence[Sequence[int]], budget: int
    ) -> tuple[DecodeState, np.ndarray]:
        """The state after the prompts, and the logits that chose each one's first token [B, V]."""
        state = self.first_state(setting, prompts, self.any_tree, budget)
        last = {}
        ends = [(len(prompt) - 1) // setting.size for prompt in prompts]
        for number in range(max(ends) + 1):
            state, logits = self._compiled[setting, "prefill"](params=self.params, state=state)
            if number in ends:
                last[number] = np.asarray(logits)
        return state, np.stack([last[end][row] for row, end in enumerate(ends)])

    def decode(self, setting: Setting, state: DecodeState, tree: str, real: int) -> tuple[list[Answer], Any, float]:
        """Runs a copy of a prefilled state to its end: answers of the first `real` rows, statistics, seconds."""
        drafter = self.drafters[tree]
        state = jax.tree.map(jnp.copy, state)
        stats = RoundStats.zero(drafter.max_depth)
        state = dataclasses.replace(state, stats=stats, drafter=None if tree == "none" else state.drafter)
        jax.block_until_ready(state.count)
        began, outs = time.perf_counter(), []
        while bool((state.status == RUNNING).any()):
            state, out = self._compiled[setting, tree](params=self.params, state=state)
            outs.append(jax.device_get(out.emitted))
        seconds = time.perf_counter() - began
        emitted = np.concatenate(outs, axis=1) if outs else np.zeros((setting.batch, 1), int)
        history, begin, count = map(np.asarray, (state.history, state.prompt, state.count))
        answers = [
            Answer(
                tokens=tuple(history[row, begin[row] : count[row]].tolist()),
                rounds=int((emitted[row] > 0).sum()),
                emitted=int(emitted[row].sum()),
            )
            for row in range(real)
        ]
        return answers, jax.device_get(state.stats), seconds


def make_drafters(
    model: evaluation.Model, args: argparse.Namespace, dtype: Any, head: Path | None
) -> tuple[dict[str, Drafter], Any]:
    """The drafter of every tree, `none` first, and the head's parameters.

    Raises:
      UsageError: a tree that cannot be drafted.
      CheckpointError: a head that cannot be read or does not fit.
    """
    trees = {text: parse_tree(text) for text in args.trees}
    drafters: dict[str, Drafter] = {"none": NoDrafter()}
    if args.draft == "ngram":
        for name, tree in trees.items():
            drafters[name] = NgramDrafter.of(tree)
        return drafters, None
    strategies = {
        name: Strategy(draft="eagle3", tree=tree, draft_window=args.draft_window) for name, tree in trees.items()
    }
    if args.smoke:
        config = Eagle3Config(
            vocab_size=model.config.vocab_size,
            draft_vocab_size=model.config.vocab_size,
            hidden_size=model.config.hidden_size,
            target_hidden_size=model.config.hidden_size,
            intermediate_size=48,
            num_heads=4,
            num_kv_heads=2,
            head_dim=8,
            taps=(0, 1, 2),
        )
        graphdef, draft = build_head(config, random_head(config), dtype)
        for name, tree in trees.items():
            drafters[name] = Eagle3Drafter(
                graphdef=graphdef, config=config, depth=tree.depth, top_k=tree.topk, num_nodes=tree.nodes
            )
        return drafters, draft
    for strategy in strategies.values():
        check_drafter(strategy, model.config, head)
    first, draft = build_drafter(next(iter(strategies.values())), model.config, head, dtype, model.params)
    assert isinstance(first, Eagle3Drafter)
    for name, tree in trees.items():
        drafters[name] = dataclasses.replace(first, depth=tree.depth, top_k=tree.topk, num_nodes=tree.nodes)
    return drafters, draft


def parse_tree(text: str) -> TreeSpec:
    """DEPTHxTOPKxNODES.

    Raises:
      UsageError: anything else.
    """
    try:
        depth, topk, nodes = (int(part) for part in text.split("x"))
        return TreeSpec(depth=depth, topk=topk, nodes=nodes)
    except ValueError as error:
        raise UsageError(f"--trees {text}: expected DEPTHxTOPKxNODES ({error})") from None


def measure(
    part: str,
    target: Target,
    prompts: list[Prompt],
    temperature: float,
    batch: int,
    budget: int,
    size: int,
) -> list[dict[str, Any]]:
    """Rows by (tree, category): tokens a round, and, greedily, whether the tokens are those of plain decoding."""
    args = target.args
    trees = [name for name in target.drafters if name != "none" or temperature == 0]
    setting = target.setting(prompts, min(batch, len(prompts)), budget, size, temperature)
    target.prepare(setting, trees)
    ordered = sorted(prompts, key=lambda prompt: len(prompt.tokens))
    groups = [ordered[at : at + setting.batch] for at in range(0, len(ordered), setting.batch)]
    steps = evaluation.Steps(f"{part} {setting.dtype} T={temperature:g}", len(groups) * len(trees), args.budget_s)
    answers: dict[str, dict[Prompt, Answer]] = {name: {} for name in trees}
    depths: dict[str, list[Any]] = {name: [] for name in trees}
    margins: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for group in groups:
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: {part}, some prompts left out")
            break
        filled = [prompt.tokens for prompt in group] + [group[-1].tokens] * (setting.batch - len(group))
        state, _ = target.prefill(setting, filled, budget)
        for tree in trees:
            found, stats, seconds = target.decode(setting, state, tree, len(group))
            answers[tree] |= dict(zip(group, found, strict=True))
            depths[tree].append(stats)
            rounds = sum(answer.rounds for answer in found)
            steps.step(f"{tree}: {sum(a.emitted for a in found) / max(rounds, 1):.2f} tokens a round, {seconds:.1f} s")
        del state
        if temperature == 0:
            for tree in trees:
                pairs = [(p, answers["none"][p].tokens, answers[tree][p].tokens) for p in group]
                margins[tree] += first_margins(target, setting, [pair for pair in pairs if pair[1] != pair[2]])
    rows = []
    for tree in trees:
        each = answers[tree]
        for category in ["all", *dict.fromkeys(prompt.category for prompt in prompts)]:
            mine = [a for p, a in each.items() if category in ("all", p.category) and a.rounds]
            if not mine:
                continue
            row = {"part": part, "dtype": setting.dtype, "temperature": temperature, "tree": tree, "category": category}
            row |= {"prompts": len(mine), "new_tokens": sum(len(a.tokens) for a in mine)}
            row["tokens_a_round"] = sum(a.emitted for a in mine) / sum(a.rounds for a in mine)
            row |= {f"per_prompt_{k}": v for k, v in prompt_spread([a.emitted / a.rounds for a in mine]).items()}
            if temperature == 0:
                row["differing"] = sum(
                    answers["none"][p].tokens != a.tokens for p, a in each.items() if category in ("all", p.category)
                )
            if category == "all":
                row["per_prompt"] = {p.name: [a.emitted, a.rounds] for p, a in each.items()}
                row["by_category"] = by_category(each)
                row["variance_between_categories"] = between(row["by_category"])
                kept, offered = (sum(np.asarray(getattr(s, n)) for s in depths[tree]) for n in DEPTH_FIELDS)
                row["acceptance_by_depth"] = [
                    int(k) / int(o) if o else 0.0
                    for k, o in zip(np.atleast_1d(kept), np.atleast_1d(offered), strict=True)
                ]
                row["first_differences"] = margins[tree]
            rows.append(row)
    return rows


def prompt_spread(each: list[float]) -> dict[str, float]:
    """Of tokens a round, over prompts: quartiles, extremes, and standard deviation (0 for one prompt)."""
    low, middle, high = np.percentile(each, [25, 50, 75]).tolist()
    stdev = statistics.stdev(each) if len(each) > 1 else 0.0
    return {"median": middle, "min": min(each), "q1": low, "q3": high, "max": max(each), "stdev": stdev}


def by_category(answers: dict[Prompt, Answer]) -> dict[str, list[float]]:
    """Tokens a round of every prompt that had rounds."""
    found: dict[str, list[float]] = {}
    for prompt, answer in answers.items():
        if answer.rounds:
            found.setdefault(prompt.category, []).append(answer.emitted / answer.rounds)
    return found


def between(groups: dict[str, list[float]]) -> float | None:
    """Share of the variance over prompts that lies between categories; None without variance."""
    every = np.array([x for each in groups.values() for x in each])
    total = float(((every - every.mean()) ** 2).sum()) if len(every) else 0.0
    parts = sum(len(each) * (statistics.fmean(each) - float(every.mean())) ** 2 for each in groups.values())
    return parts / total if total else None


DEPTH_FIELDS = ("accepted_at", "offered_at")


def first_margins(
    target: Target, setting: Setting, pairs: list[tuple[Prompt, tuple[int, ...], tuple[int, ...]]]
) -> list[dict[str, Any]]:
    """For answers that differ: where first, and the gap of the two best logits there, from a prefill up to it."""
    result = []
    for at in range(0, len(pairs), setting.batch):
        part = pairs[at : at + setting.batch]
        same = [
            next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            for _, a, b in part
        ]
        known = [prompt.tokens + a[:i] for (prompt, a, _), i in zip(part, same, strict=True)]
        known += [known[-1]] * (setting.batch - len(known))
        _, logits = target.prefill(setting, known, 1)
        for (prompt, _, _), i, row in zip(part, same, logits, strict=False):
            second, best = np.partition(row, -2)[-2:]
            result.append({"prompt": prompt.name, "token": i, "margin": float(best - second)})
    return result


def measure_speed(
    target: Target, setting: Setting, prompts: list[Prompt], budget: int, part: str
) -> list[dict[str, Any]]:
    """Tokens per second of one sequence at a time, without compilation and prefill, by tree; all is compiled."""
    args, trees = target.args, list(target.drafters)
    steps = evaluation.Steps(f"{part} {setting.dtype}", len(prompts) * len(trees), args.budget_s)
    speeds: dict[str, dict[Prompt, list[float]]] = {name: {} for name in trees}
    rounds: dict[str, list[float]] = {name: [] for name in trees}
    for number, prompt in enumerate(prompts):
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: {part}, some prompts left out")
            break
        state, _ = target.prefill(setting, [prompt.tokens], budget)
        for tree in trees:
            for turn in range(args.repeats + (number == 0)):  # one to warm up
                (answer,), _, seconds = target.decode(setting, state, tree, 1)
                if answer.rounds and (turn or number):
                    speeds[tree].setdefault(prompt, []).append(answer.emitted / seconds)
                    rounds[tree].append(seconds / answer.rounds * 1e3)
            steps.step(f"{tree}: {speeds[tree].get(prompt, [0.0])[-1]:.1f} tok/s")
    rows = []
    for tree in trees:
        if not speeds[tree]:
            continue
        medians = {prompt: statistics.median(each) for prompt, each in speeds[tree].items()}
        ratios = [medians[p] / statistics.median(each) for p, each in speeds["none"].items() if p in medians]
        row = {"part": part, "dtype": setting.dtype, "temperature": 0.0, "tree": tree, "category": "all"}
        row |= {"prompts": len(medians), "repeats": args.repeats, "context": max(len(p.tokens) for p in prompts)}
        for name, values in (("tok_s", list(medians.values())), ("speedup", ratios), ("ms_a_round", rounds[tree])):
            row |= {f"{name}_{k}": v for k, v in harness.spread(values).items() if k != "repeats"}
        row["tok_s_each"] = {prompt.name: each for prompt, each in speeds[tree].items()}
        rows.append(row)
    return rows


def draw(axes: Any, rows: list[dict[str, Any]]) -> None:
    for axis, key in zip(axes[:2], ("per_prompt", "tok_s"), strict=True):
        shown = [r for r in rows if r["category"] == "all" and f"{key}_median" in r and r["tree"] != "none"]
        shown += [r for r in rows if key == "tok_s" and r["tree"] == "none" and "tok_s_median" in r]
        trees = list(dict.fromkeys(r["tree"] for r in shown))
        for group in dict.fromkeys((r["part"], r["dtype"], r["temperature"]) for r in shown):
            mine = [r for r in shown if (r["part"], r["dtype"], r["temperature"]) == group]
            middle = np.array([r[f"{key}_median"] for r in mine])
            spans = [middle - [r[f"{key}_min"] for r in mine], np.array([r[f"{key}_max"] for r in mine]) - middle]
            label = f"{group[0]}, {group[1]}, T={group[2]:g}"
            axis.errorbar([trees.index(r["tree"]) for r in mine], middle, spans, fmt="o", capsize=3, label=label)
        axis.set_xticks(range(len(trees)), trees)
        axis.set(xlabel="tree: depth x topk x nodes", ylim=(0, None))
        if shown:
            axis.legend(fontsize=7)
    axes[0].set_ylabel("tokens a round: median and range of prompts")
    axes[1].set_ylabel("tokens/s of one sequence: median and range of prompts")
    known = [r for r in rows if r.get("by_category") and r["tree"] != "none"]
    if known:
        best = max(known, key=lambda r: (r["temperature"] == 0, r["tokens_a_round"]))
        groups = dict(sorted(best["by_category"].items(), key=lambda item: -statistics.median(item[1])))
        axes[2].boxplot(list(groups.values()), orientation="horizontal", tick_labels=list(groups))
        axes[2].set(title=f"{best['part']}, {best['tree']}, T={best['temperature']:g}", xlim=(1, None))
        axes[2].set_xlabel("tokens a round of single prompts; boxes: quartiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser, dense=False)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--draft", choices=("eagle3", "ngram"), default="eagle3")
    parser.add_argument("--draft-model", type=Path, default=None, help="directory of a head; default: the model's own")
    parser.add_argument("--draft-window", type=int, default=None)
    parser.add_argument("--trees", nargs="+", default=None, metavar="DEPTHxTOPKxNODES")
    parser.add_argument("--refresh-every", type=int, default=1, help="layer plan, of plain decoding too")
    parser.add_argument(
        "--parts", nargs="+", choices=("chat", "long", "speed", "speed-long"), default=["chat", "speed"]
    )
    parser.add_argument("--prompts", nargs="+", type=Path, default=[PROMPTS])
    parser.add_argument("--most-prompts", type=int, default=None, help="evenly spread over the files")
    parser.add_argument("--longest-prompt", type=int, default=512, help="tokens; longer ones are left out")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=None)
    parser.add_argument("--speed-dtype", choices=("float32", "bfloat16"), default=None)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=40)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets of the long parts")
    parser.add_argument("--long-lengths", nargs="+", type=int, default=[8192, 16384])
    parser.add_argument("--long-windows", type=int, default=4, help="per set and length")
    parser.add_argument("--long-new-tokens", type=int, default=128)
    parser.add_argument("--long-batch", type=int, default=8)
    parser.add_argument("--speed-prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3, help="of each speed measurement")
    parser.add_argument("--rounds", type=int, default=None, help="rounds a call; default: as the engine")
    parser.add_argument(
        "--wait-for", type=Path, help="time speed only once this file exists: others may use the device"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    on_cpu = jax.default_backend() == "cpu"
    args.dtypes = args.dtypes or (["float32"] if on_cpu else ["float32", "bfloat16"])
    args.speed_dtype = args.speed_dtype or ("float32" if on_cpu else "bfloat16")
    if args.smoke:
        # A random head is right now and then if it proposes half the vocabulary.
        args.trees, args.batch, args.max_new_tokens, args.repeats = ["1x64x65"], 1, 12, 1
        args.temperatures = [0.0]
        model, head = evaluation.smoke_model(), None
    else:
        args.trees = args.trees or TREES[args.draft]
        for text in args.trees:
            parse_tree(text)
        if {"chat", "speed"} & set(args.parts):
            evaluation.require_files("--prompts", args.prompts)
        if {"long", "speed-long"} & set(args.parts):
            evaluation.require_files("--data", args.data)
        if args.draft == "ngram" and args.draft_model is not None:
            raise UsageError("--draft ngram has no network: drop --draft-model")
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        head = args.draft_model or model.head
        if args.draft == "eagle3" and head is None:
            raise UsageError(f"{args.model} has no draft head of its own: name one with --draft-model")
    if args.refresh_every > 1 and model.config.nsa is None:
        raise UsageError("--refresh-every is about selected blocks, and this model's attention is dense: drop it")
    chat, far = [], []
    if {"chat", "speed"} & set(args.parts):
        chat = (
            smoke_prompts(model)
            if args.smoke
            else read_prompts(args.prompts, model, args.longest_prompt, args.most_prompts)
        )
    if {"long", "speed-long"} & set(args.parts):
        far = long_prompts(args.data, model, args.long_lengths, args.long_windows)
    output = evaluation.output_path("acceptance", args.output, args.smoke)
    hidden = ("model", "output", "data", "prompts", "draft_model", "wait_for")
    chosen = {key: str(value) for key, value in vars(args).items() if key not in hidden}
    chosen |= {"data": [Path(path).name for path in args.data], "prompts": [path.name for path in args.prompts]}
    result: dict[str, Any] = {
        "command": "python experiments/acceptance.py",
        "model": model.facts,
        "head": head.name if head else None,
        "settings": chosen,
        "rows": [],
    }
    rows: list[dict[str, Any]] = result["rows"]
    size = 64 if on_cpu else 256
    for dtype in dict.fromkeys([*args.dtypes, args.speed_dtype]):
        target = Target(model, dtype, args, head)
        if dtype in args.dtypes:
            for temperature in args.temperatures:
                if "chat" in args.parts:
                    rows += measure("chat", target, chat, temperature, args.batch, args.max_new_tokens, size)
                    harness.write(output, result)  # a time limit must not lose it
                if "long" in args.parts:
                    rows += measure("long", target, far, temperature, args.long_batch, args.long_new_tokens, 512)
                    harness.write(output, result)
        if dtype == args.speed_dtype:
            far_few = pick([p for p in far if len(p.tokens) == max(args.long_lengths)], 2)
            jobs = {
                "speed": (pick(chat, args.speed_prompts), args.max_new_tokens, size),
                "speed-long": (far_few, args.long_new_tokens, 512),
            }
            jobs = {part: job for part, job in jobs.items() if part in args.parts}
            settings = {part: target.setting(found, 1, new, step) for part, (found, new, step) in jobs.items()}
            for setting in settings.values():
                target.prepare(setting, list(target.drafters))
            if args.wait_for and jobs:
                harness.say(f"waiting for {args.wait_for}")
                while not args.wait_for.exists():
                    time.sleep(0.2)
            for part, (found, new, _) in jobs.items():
                rows += measure_speed(target, settings[part], found, new, part)
                harness.write(output, result)
    harness.write(output, result)
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, rows), columns=3)
    names = "part dtype temperature tree prompts tokens_a_round per_prompt_median per_prompt_stdev"
    names += " variance_between_categories differing tok_s_median speedup_median"
    evaluation.table([row for row in rows if row["category"] == "all"], names.split())
    if args.smoke and any(row.get("differing") for row in rows):
        raise SystemExit("error: drafted tokens differ from those of plain decoding")


if __name__ == "__main__":
    evaluation.guarded(main)
