"""Profiles: what strategies cost on a device and how often their drafts are accepted; schema, file, ranking.

Imports no jax: a profile is read, ranked and pruned in milliseconds. `profile.py` measures one.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from .strategy import Strategy

SCHEMA = 1
# Rounds in which a deeper node counts as seen: keeps conditional acceptances off 0 and 1.
_SMOOTHING, _UNSEEN = 1.0, 0.5


class ProfileError(ValueError):
    """A profile that cannot be read, or that was measured for something else."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RoundCost:
    """Wall time of one round at one context length, compilation excluded.

    Args:
      context: committed tokens at the start of the measurement.
      capacity: tokens that the cache holds.
      median_ms, low_ms, high_ms: median, 10th and 90th percentile over the repeats, milliseconds.
      repeats: calls that were timed.
    """

    context: int
    capacity: int
    median_ms: float
    low_ms: float
    high_ms: float
    repeats: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Acceptance:
    """What a prompt set showed of a strategy.

    Args:
      rounds: verification rounds.
      accepted_at: rounds that accepted at least 1, 2, ... drafts; as many entries as the tree is deep.
      overlap: mean block overlap of consecutive nodes, None where nothing was selected.
      prompts: prompts done so far.
    """

    rounds: int = 0
    accepted_at: tuple[int, ...] = ()
    overlap: float | None = None
    prompts: int = 0

    def conditional(self) -> tuple[float, ...]:
        """Chance of accepting depth d + 1 after depth d, for d = 0, 1, ...; smoothed towards the depth above."""
        chances: list[float] = []
        before, above = self.rounds, _UNSEEN
        for count in self.accepted_at:
            above = (count + _SMOOTHING * above) / (before + _SMOOTHING)
            chances.append(above)
            before = count
        return tuple(chances)

    def add(self, accepted: Sequence[int], overlap: float | None) -> Acceptance:
        """After one more prompt.

        Args:
          accepted: drafts accepted in each round.
          overlap: of this prompt.
        """
        counts = [old + sum(kept > depth for kept in accepted) for depth, old in enumerate(self.accepted_at)]
        rounds = self.rounds + len(accepted)
        if overlap is not None and rounds:
            share = len(accepted) / rounds
            overlap = overlap if self.overlap is None else self.overlap + share * (overlap - self.overlap)
        else:
            overlap = self.overlap
        return Acceptance(rounds=rounds, accepted_at=tuple(counts), overlap=overlap, prompts=self.prompts + 1)


def expected_tokens(conditional: Iterable[float]) -> float:
    """Tokens per round, the bonus included: 1 + p1 + p1 p2 + ..."""
    total, survival = 1.0, 1.0
    for chance in conditional:
        survival *= chance
        total += survival
    return total


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """All that is known of one strategy.

    Args:
      strategy: with its tree spelled out.
      max_depth: drafts that a round can accept at most.
      costs: by ascending context.
      acceptance: on the prompt set.
      dominated_by: label of a strategy that is never worse, see `Profile.prune`.
    """

    strategy: Strategy
    max_depth: int
    costs: tuple[RoundCost, ...] = ()
    acceptance: Acceptance = Acceptance()
    dominated_by: str | None = None

    @property
    def label(self) -> str:
        """See `Strategy.label`."""
        return self.strategy.label

    @property
    def tokens_per_round(self) -> float:
        """Expected on the prompt set."""
        return expected_tokens(self.acceptance.conditional())

    def round_ms(self, context: int) -> float:
        """Cost at a context length: between measured ones linear, beyond them as the nearest."""
        places = [cost.context for cost in self.costs]
        at = bisect.bisect_right(places, context)
        if at == 0 or at == len(places):
            return self.costs[min(at, len(places) - 1)].median_ms
        low, high = self.costs[at - 1], self.costs[at]
        share = (context - low.context) / (high.context - low.context)
        return low.median_ms + share * (high.median_ms - low.median_ms)

    def tokens_per_second(self, context: int) -> float:
        """Expected on the prompt set at a context length."""
        return 1000.0 * self.tokens_per_round / self.round_ms(context)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """What a profile holds for, and how it was measured. Profiles with equal provenance can be merged.

    Args:
      device, platform, dtype: where and in what it ran.
      model, draft_model: names, for people.
      model_hash, head_hash: fingerprints of the weights, see `planning.fingerprint`; None without a head.
      implementation: of the attention ops, None for the fastest that fits.
      rounds_per_call: rounds between two decisions.
      seed, max_new_tokens, prompts_hash: of the acceptance measurement.
      versions: of the packages.
    """

    device: str
    platform: str
    dtype: str
    model: str
    model_hash: str
    draft_model: str | None
    head_hash: str | None
    implementation: str | None
    rounds_per_call: int
    seed: int
    max_new_tokens: int
    prompts_hash: str
    versions: Mapping[str, str]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """Measurements of several strategies of one model on one device.

    Args:
      provenance: see `Provenance`.
      contexts: context lengths at which costs were asked for, ascending.
      entries: in the order asked for.
      complete: whether everything asked for was measured.
    """

    provenance: Provenance
    contexts: tuple[int, ...]
    entries: tuple[Entry, ...]
    complete: bool = False

    @property
    def labels(self) -> tuple[str, ...]:
        """All strategies."""
        return tuple(entry.label for entry in self.entries)

    def entry(self, label: str) -> Entry:
        """One strategy's.

        Raises:
          KeyError: not in the profile.
        """
        for entry in self.entries:
            if entry.label == label:
                return entry
        raise KeyError(label)

    def replace(self, entry: Entry) -> Profile:
        """With one entry renewed."""
        entries = tuple(entry if old.label == entry.label else old for old in self.entries)
        return dataclasses.replace(self, entries=entries)

    def bucket(self, context: int) -> int:
        """The largest measured context that is not above this one, or the smallest."""
        return max((c for c in self.contexts if c <= context), default=self.contexts[0])

    def ranking(self, context: int, labels: Iterable[str] | None = None) -> tuple[str, ...]:
        """Strategies by expected tokens per second at a context length, best first."""
        entries = [self.entry(label) for label in (self.labels if labels is None else labels)]
        return tuple(e.label for e in sorted(entries, key=lambda e: -e.tokens_per_second(context)))

    def prune(self) -> Profile:
        """Marks the strategies that another is never worse than.

        Another of the same drafter and layer plan, whose class deviates no more, that costs no more at any
        context and whose trees are accepted at least as far at every depth: whatever a text does to the drafter,
        it wins. Autoregressive decoding is never marked.
        """
        entries: list[Entry] = []
        for entry in self.entries:
            winner = next((other.label for other in self.entries if _dominates(other, entry)), None)
            entries.append(dataclasses.replace(entry, dominated_by=winner))
        return dataclasses.replace(self, entries=tuple(entries))

    def to_json(self) -> dict[str, Any]:
        """As stored."""
        return {
            "schema": SCHEMA,
            "complete": self.complete,
            "provenance": dataclasses.asdict(self.provenance) | {"versions": dict(self.provenance.versions)},
            "contexts": list(self.contexts),
            "strategies": [
                {
                    "label": e.label,
                    "max_depth": e.max_depth,
                    "costs": [dataclasses.asdict(cost) for cost in e.costs],
                    "acceptance": dataclasses.asdict(e.acceptance) | {"accepted_at": list(e.acceptance.accepted_at)},
                    "tokens_per_round": round(e.tokens_per_round, 4),
                    "dominated_by": e.dominated_by,
                }
                for e in self.entries
            ],
            "ranking": {str(c): list(self.ranking(c)) for c in self.contexts} if self.complete else {},
        }

    def save(self, path: str | Path) -> None:
        """Writes JSON, whole or not at all.

        Raises:
          OSError: a path that cannot be written.
        """
        path = Path(path)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads what `save` wrote.

        Raises:
          ProfileError: a file that cannot be read or is not a profile of this schema.
        """
        try:
            data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ProfileError(f"profile {path}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"profile {path} is not JSON ({type(error).__name__}): measure it again") from None
        try:
            return cls.from_json(data)
        except ProfileError as error:
            raise ProfileError(f"profile {path}: {error}") from None

    @classmethod
    def from_json(cls, data: Any) -> Profile:
        """From what `to_json` gives.

        Raises:
          ProfileError: says which field is wrong.
        """
        top = _mapping(data, "the file")
        if top.get("schema") != SCHEMA:
            raise ProfileError(f"schema is {top.get('schema')!r}, expected {SCHEMA}: measure it again")
        try:
            raw = dict(_mapping(top["provenance"], "provenance"))
            versions = {name: str(value) for name, value in _mapping(raw.pop("versions"), "versions").items()}
            provenance = Provenance(**raw, versions=versions)
            contexts = tuple(_whole(c, "contexts", 1) for c in _items(top["contexts"], "contexts"))
            entries = tuple(_entry(_mapping(item, "strategies")) for item in _items(top["strategies"], "strategies"))
            complete = top["complete"] is True
        except (KeyError, TypeError) as error:
            raise ProfileError(f"lacks or misspells a field ({error}): measure it again") from None
        if not contexts or sorted(set(contexts)) != list(contexts):
            raise ProfileError("contexts must be ascending and not empty: measure it again")
        labels = [entry.label for entry in entries]
        if len(set(labels)) < len(labels):
            raise ProfileError("a strategy occurs twice: measure it again")
        if complete and any(not entry.costs for entry in entries):
            raise ProfileError("says complete, but a strategy has no costs: measure it again")
        return cls(provenance=provenance, contexts=contexts, entries=entries, complete=complete)


def _dominates(winner: Entry, loser: Entry) -> bool:
    a, b = winner.strategy, loser.strategy
    if a == b or b.draft == "none" or a.draft != b.draft or a.plan != b.plan or a.draft_window != b.draft_window:
        return False
    if not b.precision.allows(a.precision) or not winner.costs or not loser.costs:
        return False
    contexts = {cost.context for cost in (*winner.costs, *loser.costs)}
    cheaper = [winner.round_ms(c) - loser.round_ms(c) for c in contexts]
    reach_a, reach_b = (_survival(e.acceptance.conditional()) for e in (winner, loser))
    if len(reach_a) < len(reach_b):
        return False
    further = [x - y for x, y in zip(reach_a, reach_b, strict=False)]
    tie = not any(cheaper) and not any(further) and len(reach_a) == len(reach_b)
    if tie:  # of two equals the first by name stays
        return winner.label < loser.label
    return max(cheaper) <= 0 and min(further, default=0.0) >= 0


def _survival(conditional: Sequence[float]) -> list[float]:
    return [math.prod(conditional[: depth + 1]) for depth in range(len(conditional))]


def _mapping(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{name} must be an object: measure it again")
    return cast("dict[str, Any]", value)


def _items(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ProfileError(f"{name} must be a list: measure it again")
    return cast("list[Any]", value)


def _whole(value: object, name: str, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ProfileError(f"{name} must be integers >= {least}, got {value!r}: measure it again")
    return value


def _positive(value: object, name: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ProfileError(f"{name} must be a number above 0, got {value!r}: measure it again")
    return float(value)


def _entry(item: dict[str, Any]) -> Entry:
    try:
        strategy = Strategy.parse(str(item["label"]))
    except ValueError as error:
        raise ProfileError(str(error)) from None
    costs: list[RoundCost] = []
    for raw in _items(item["costs"], "costs"):
        cost = _mapping(raw, "costs")
        times = {name: _positive(cost[name], name) for name in ("median_ms", "low_ms", "high_ms")}
        sizes = {name: _whole(cost[name], name, 1) for name in ("context", "capacity", "repeats")}
        costs.append(RoundCost(**times, **sizes))
    if sorted({cost.context for cost in costs}) != [cost.context for cost in costs]:
        raise ProfileError(f"costs of {strategy.label} must be at ascending contexts: measure it again")
    seen = _mapping(item["acceptance"], "acceptance")
    depth = _whole(item["max_depth"], "max_depth", 0)
    overlap = seen["overlap"]
    acceptance = Acceptance(
        rounds=_whole(seen["rounds"], "rounds", 0),
        accepted_at=tuple(_whole(n, "accepted_at", 0) for n in _items(seen["accepted_at"], "accepted_at")),
        overlap=None if overlap is None else float(overlap),
        prompts=_whole(seen["prompts"], "prompts", 0),
    )
    chain = (acceptance.rounds, *acceptance.accepted_at)
    if len(acceptance.accepted_at) != depth or any(a < b for a, b in zip(chain, chain[1:], strict=False)):
        raise ProfileError(f"accepted_at of {strategy.label} must have {depth} falling counts: measure it again")
    dominated = item.get("dominated_by")
    return Entry(
        strategy=strategy,
        max_depth=depth,
        costs=tuple(costs),
        acceptance=acceptance,
        dominated_by=None if dominated is None else str(dominated),
    )
