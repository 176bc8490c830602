"""What the experiments on decoding speed share: arguments, and profiles from the same runs."""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _bench import Run
from _subject import Subject

from ssv_jax import Strategy, UsageError
from ssv_jax.command import enable_compilation_cache, versions
from ssv_jax.drafting.dynamic_tree import check_tree
from ssv_jax.planning import ProfilePlanner
from ssv_jax.profiles import Acceptance, Entry, Profile, Provenance, RoundCost
from ssv_jax.strategy import PrecisionClass

STRATEGIES = {
    "eagle3": (
        "eagle3:2x2x5",
        "eagle3:4x4x16+group4",
        "eagle3:5x8x32+group4",
        "eagle3:7x10x60+group8",
        "ngram:7x1x8+group4",
    ),
    "ngram": ("ngram:3x1x4", "ngram:7x1x8+group4", "ngram:7x4x16+group4", "ngram:15x4x32+group4"),
}


def add_arguments(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """What the experiments on speed share, beside the arguments of `_evaluation`."""
    parser.add_argument("--draft", choices=("eagle3", "ngram"), default="eagle3")
    parser.add_argument("--draft-model", type=Path, default=None, help="directory of a head; default: the model's own")
    parser.add_argument("--random-head", action="store_true", help="where there is no head: its costs are real")
    parser.add_argument("--shape", default="8b", help="of the twin: a name or JSON, see twin.py")
    parser.add_argument("--strategies", nargs="+", default=None, metavar="LABEL", help="what the planner chooses from")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default=None)
    parser.add_argument("--implementation", default=None, help="of the attention; default: the fastest that fits")
    parser.add_argument("--max-new-tokens", type=int, default=new_tokens)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=32, help="rounds a call at most; the planner asks for fewer")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a prefill pass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--restart", action="store_true", help="measure again what the output holds")


def settle_arguments(args: argparse.Namespace) -> None:
    """Defaults that depend on the machine.

    Raises:
      UsageError: a number below 1, a head where none drafts, or a strategy that cannot be.
    """
    on_cpu = jax.default_backend() == "cpu"
    args.dtype = args.dtype or ("float32" if on_cpu else "bfloat16")
    for name in ("max_new_tokens", "repeats", "rounds", "chunk"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    if args.draft == "ngram" and (args.draft_model is not None or args.random_head):
        raise UsageError("--draft ngram has no network: drop --draft-model and --random-head")
    args.strategies = args.strategies or list(STRATEGIES[args.draft])
    for label in args.strategies:
        strategy = parse_strategy("--strategies", label)
        if strategy.draft == "eagle3" and args.draft == "ngram":
            raise UsageError(f"--strategies {label}: no head with --draft ngram")
        if strategy.draft == "none" or strategy.reuses:
            raise UsageError(f"--strategies {label}: name drafters and trees; plain decoding and layer plans are added")
        if strategy.precision is PrecisionClass.APPROX:
            raise UsageError(f"--strategies {label}: shared groups change tokens; choose exact ones")
    if not args.smoke:
        enable_compilation_cache()


def parse_strategy(option: str, label: str) -> Strategy:
    """A strategy that says all.

    Raises:
      UsageError: none such.
    """
    try:
        strategy = Strategy.parse(label)
        if strategy.draft == "eagle3" and strategy.size:
            check_tree(depth=strategy.size.depth, top_k=strategy.size.topk, nodes=strategy.size.nodes)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
    if strategy.draft == "auto":
        raise UsageError(f"{option} {label}: name its drafter")
    return dataclasses.replace(strategy, tree=strategy.size)


def facts_of(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Arguments for a result."""
    shared = ("draft", "shape", "strategies", "dtype", "implementation", "max_new_tokens", "repeats", "rounds", "chunk")
    return {name: getattr(args, name) for name in (*shared, "seed", *names)}


class Profiler:
    """Costs and acceptance of strategies from the same decodings, for the planner.

    Args:
      labels, strategies, depths: the candidates, by label.
    """

    def __init__(self, labels: Sequence[str], strategies: dict[str, Strategy], depths: dict[str, int]) -> None:
        self._labels, self._strategies, self._depths = labels, strategies, depths
        self._acceptance = {label: Acceptance(accepted_at=(0,) * depths[label]) for label in labels}
        self._ms: dict[tuple[str, int], list[float]] = {}

    def add(self, label: str, context: int, run: Run) -> None:
        """One decoding."""
        whole = max((len(call.accepted) for call in run.calls), default=0)
        times = [call.seconds / len(call.accepted) * 1e3 for call in run.calls if 2 * len(call.accepted) >= whole > 0]
        self._ms.setdefault((label, context), []).extend(times)
        if self._depths[label]:
            self._acceptance[label] = self._acceptance[label].add(run.accepted, None)

    def profile(self, subject: Subject, *, dtype: str, rounds: int, budget: int, capacity: int) -> Profile:
        contexts = sorted({context for _, context in self._ms})
        entries = []
        for label in self._labels:
            costs = []
            for context in contexts:
                times = sorted(self._ms[label, context])
                low, middle, high = (float(np.quantile(times, q)) for q in (0.1, 0.5, 0.9))
                costs.append(
                    RoundCost(
                        context=context,
                        capacity=capacity,
                        median_ms=middle,
                        low_ms=low,
                        high_ms=high,
                        repeats=len(times),
                    )
                )
            entries.append(
                Entry(
                    strategy=self._strategies[label],
                    max_depth=self._depths[label],
                    costs=tuple(costs),
                    acceptance=self._acceptance[label],
                )
            )
        device = jax.devices()[0]
        about = Provenance(
            device=device.device_kind,
            platform=device.platform,
            dtype=dtype,
            model=subject.name,
            model_hash="not taken",
            draft_model=subject.head_kind,
            head_hash=None,
            implementation=None,
            rounds_per_call=rounds,
            seed=0,
            max_new_tokens=budget,
            prompts_hash="not taken",
            versions=versions(),
        )
        return Profile(provenance=about, contexts=tuple(contexts), entries=tuple(entries), complete=True).prune()


def candidates_of(profile: Profile) -> tuple[str, ...]:
    """What the planner chooses from."""
    chosen = ProfilePlanner(profile).strategies(PrecisionClass.STRICT, True, lambda strategy: True)
    return tuple(strategy.label for strategy in chosen)


def best_fixed(profile: Profile, labels: Sequence[str]) -> str:
    """The strategy with the highest expected speed over the profile's contexts, by geometric mean."""

    def merit(label: str) -> float:
        return statistics.fmean(math.log(profile.entry(label).tokens_per_second(c)) for c in profile.contexts)

    return max(labels, key=merit)
