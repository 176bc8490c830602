"""The online choice of a strategy: from a profile, and from what the run shows of acceptance, overlap and time.

Imports no jax. A run asks `Controller.decide` before every call to the device and reports what the call did to
`Controller.observe`.

Acceptance is modelled by drafter, not by tree: a text makes the drafter better or worse at each depth by the same
factor for all its trees, and the profile says how the trees differ. So a round of one tree tells about the others.
And what prompt lookup would have drafted follows from the text, so any round tells about that too (`hindsight`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol, runtime_checkable

from .hindsight import Hindsight
from .profiles import Profile, expected_tokens
from .strategy import LookupShape, PrecisionClass

Kind = Literal["start", "keep", "switch", "probe", "return"]
LOOKUP = "ngram"  # the drafter whose drafts follow from the text
MOST_ROUNDS = 1024  # of a call that is asked for; who runs it may have fewer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """How readily the controller moves. A call is several rounds on the device.

    Args:
      short: rounds of the first call: few, to change its mind early. What a call costs beside its rounds is worth some
        of them on a fast device, so they grow.
      growth: rounds of a call over those of the one before.
      half_life: rounds after which evidence counts half.
      trial: rounds of a probe.
      prior: rounds of evidence that the profile's acceptance is worth.
      gain: relative gain in tokens per second that a switch must promise.
      back_gain: the same for a return to a strategy that was left within `recent` calls.
      recent: see `back_gain`.
      dwell: calls after a switch before the next one.
      collapse: shortfall against autoregressive decoding at which `dwell` does not hold.
      probe_after: rounds until a drafter with a network that is not in use is tried for one call; doubles after each
        trial that changes nothing, up to `probe_limit`.
      probe_limit: see `probe_after`.
      sharing_off, sharing_on: overlaps below which shared strategies are out, and above which they are in again.
      overlap_memory: weight of the past in the overlap's moving average.
      clock: correct the profile's costs by the run's own times. Without it decisions depend on tokens alone.

    Raises:
      ValueError: rounds or a growth below 1.
    """

    short: int = 8
    growth: int = 2
    half_life: float = 32.0
    trial: int = 16
    prior: float = 8.0
    gain: float = 0.07
    back_gain: float = 0.15
    recent: int = 8
    dwell: int = 1
    collapse: float = 0.10
    probe_after: int = 64
    probe_limit: int = 4096
    sharing_off: float = 0.5
    sharing_on: float = 0.6
    overlap_memory: float = 0.75
    clock: bool = True

    def __post_init__(self) -> None:
        for name in ("short", "growth", "trial"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Decision:
    """What the next call runs.

    Args:
      label: of the strategy.
      kind: `start`; `keep`; `switch`; `probe`, a trial of one call; `return` from a probe that changed nothing.
      reason: for people.
      context: tokens known.
      bucket: context of the profile that this falls into.
      rounds: of the call at most, None for as many as a call can have.
      estimates: expected tokens per second, best first; 0 for strategies that are out.
    """

    label: str
    kind: Kind
    reason: str
    context: int
    bucket: int
    rounds: int | None = None
    estimates: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        shown = ", ".join(f"{label} {value:.1f}" for label, value in self.estimates[:4])
        return f"{self.kind} {self.label} at {self.context} tokens (bucket {self.bucket}): {self.reason}" + (
            f" [tok/s: {shown}]" if shown else ""
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """What one call did.

    Args:
      label: of its strategy.
      context: tokens known before it.
      accepted: drafts accepted in each of its rounds.
      seconds: wall time.
      overlap: mean block overlap of consecutive nodes, None where unknown.
      tokens: that it emitted; needed for prompt lookup in hindsight alone.
    """

    label: str
    context: int
    accepted: Sequence[int]
    seconds: float
    overlap: float | None = None
    tokens: Sequence[int] = ()


@runtime_checkable
class Pilot(Protocol):
    """Chooses a strategy for every call."""

    def decide(self, context: int) -> Decision:
        """The next call's, with `context` tokens known."""
        ...

    def observe(self, seen: Observed) -> None:
        """What the call did."""
        ...


class Fixed:
    """One strategy for ever."""

    def __init__(self, label: str) -> None:
        self._label = label

    def decide(self, context: int) -> Decision:
        """See `Pilot`."""
        return Decision(label=self._label, kind="keep", reason="fixed", context=context, bucket=context)

    def observe(self, seen: Observed) -> None:
        """Nothing to learn."""


@dataclasses.dataclass(slots=True)
class _Evidence:
    """Of one drafter, by depth: drafts tried, accepted, and how many of them the profile would have accepted."""

    tried: list[float]
    kept: list[float]
    foreseen: list[float]
    stale: float = 0.0  # rounds of other drafters since

    def add(self, chances: Sequence[float], accepted: Sequence[int], half_life: float) -> None:
        rounds = len(accepted)
        # Old evidence gives way to a probe, but never wholly: one probe is a few rounds.
        fade = 0.5 ** ((rounds + min(self.stale, 2 * half_life)) / half_life)
        for values in (self.tried, self.kept, self.foreseen):
            values[:] = [fade * value for value in values]
        self.stale = 0.0
        before = rounds
        for depth, chance in enumerate(chances):
            reached = sum(kept > depth for kept in accepted)
            self.tried[depth] += before
            self.kept[depth] += reached
            self.foreseen[depth] += before * chance
            before = reached

    def chances(self, profiled: Sequence[float], prior: float) -> list[float]:
        """The profile's chances of a tree, moved as the evidence says: for all depths together, then for each."""
        tried, kept, foreseen = sum(self.tried), sum(self.kept), sum(self.foreseen)
        mean = foreseen / tried if tried > 0 else _HALF
        whole = (tried + prior, kept + prior * mean, foreseen + prior * mean)
        moved: list[float] = []
        for depth, chance in enumerate(profiled):
            own = self.tried[depth]
            expected = _moved(self.foreseen[depth] / own if own > 0 else mean, *whole)
            total = own + prior
            moved.append(_moved(_moved(chance, *whole), total, self.kept[depth] + prior * expected, total * expected))
        return moved


_HALF = 0.5


def _moved(chance: float, tried: float, kept: float, foreseen: float) -> float:
    """A chance after evidence: fewer hits than foreseen scale hits, more scale misses; stays within [0, 1]."""
    if kept <= foreseen:
        return chance * kept / foreseen if foreseen > 0 else chance
    return 1 - (1 - chance) * (tried - kept) / (tried - foreseen) if tried > foreseen else chance


class Controller:
    """Chooses the strategy that promises most tokens per second.

    Args:
      profile: of the model on this device, with costs for every candidate.
      labels: the candidates; one must be autoregressive, and all must share one layer plan.
      allowed: no candidate may deviate more.
      settings: see `Settings`.
      known: tokens before the first call: the prompt, and what prefill emitted. Without them, prompt lookup is tried
        like any other drafter.

    Raises:
      ValueError: candidates that do not fit that.
    """

    def __init__(
        self,
        profile: Profile,
        labels: Iterable[str],
        *,
        allowed: PrecisionClass = PrecisionClass.LOSSLESS,
        settings: Settings | None = None,
        known: Sequence[int] = (),
    ) -> None:
        self._settings = settings or Settings()
        self._profile = profile
        self._entries = {label: profile.entry(label) for label in labels}
        strategies = [entry.strategy for entry in self._entries.values()]
        for strategy in strategies:
            strategy.check(allowed)
        plain = [label for label, entry in self._entries.items() if entry.strategy.draft == "none"]
        if not plain:
            raise ValueError("candidates must include autoregressive decoding: add none")
        if len({strategy.plan for strategy in strategies}) > 1:
            raise ValueError("candidates must share one layer plan: the cache depends on it")
        self._plain = plain[0]
        depth = max(entry.max_depth for entry in self._entries.values())
        self._chances = {label: entry.acceptance.conditional() for label, entry in self._entries.items()}
        self._evidence = {
            strategy.draft: _Evidence([0.0] * depth, [0.0] * depth, [0.0] * depth)
            for strategy in strategies
            if strategy.draft != "none"
        }
        self._speed: dict[str, float] = {}  # log of the measured cost over the profile's
        self._overlap: float | None = None
        self._sharing = True
        self._call = 0
        self._current: str | None = None
        self._since = 0  # call of the last switch
        self._left: dict[str, int] = {}  # last call of strategies that were left
        self._home: str | None = None  # where a running probe returns to
        self._rounds = 0  # done
        self._length = self._home_length = self._settings.short  # rounds of the next call
        self._hindsight: Hindsight | None = None
        lookups = {
            label: LookupShape.of(size)
            for label, entry in self._entries.items()
            if entry.strategy.draft == LOOKUP and (size := entry.strategy.size)
        }
        if len(known) and lookups:
            label = max(lookups, key=lambda label: lookups[label].num_nodes)
            self._hindsight, self._foreseen = Hindsight(lookups[label], known), self._chances[label]
        # Drafters that only trials tell about, while they are not in use: rounds between trials, and when one is due.
        tried = [name for name in self._evidence if name != LOOKUP or self._hindsight is None]
        self._interval = dict.fromkeys(tried, self._settings.probe_after)
        self._due = dict(self._interval)

    def decide(self, context: int) -> Decision:
        """The next call's strategy, with `context` tokens known."""
        estimates = self.estimates(context)
        label, kind, reason = self._choose(estimates, context)
        if kind == "probe":
            self._home_length, self._length = self._length, self._settings.trial
        elif kind == "return":
            self._length = self._home_length
        elif kind != "start":
            self._length = min(self._settings.growth * self._length, MOST_ROUNDS)
        if label != self._current:
            if self._current is not None:
                self._left[self._current] = self._call
            if kind != "return":
                self._since = self._call
        self._current = label
        return Decision(
            label=label,
            kind=kind,
            reason=reason,
            context=context,
            bucket=self._profile.bucket(context),
            rounds=self._length,
            estimates=tuple(sorted(estimates.items(), key=lambda item: -item[1])),
        )

    def observe(self, seen: Observed) -> None:
        """What the call did; calls of no round are ignored."""
        rounds, settings = len(seen.accepted), self._settings
        if rounds == 0:
            return
        self._call += 1
        self._rounds += rounds
        entry = self._entries[seen.label]
        drafter = entry.strategy.draft
        for name in self._due:
            if name != drafter:
                self._evidence[name].stale += rounds
        if drafter in self._evidence:
            self._evidence[drafter].add(self._chances[seen.label], seen.accepted, settings.half_life)
            if self._home is None and drafter in self._due:
                self._due[drafter] = self._rounds + self._interval[drafter]
        if self._hindsight is not None:
            if drafter == LOOKUP:
                self._hindsight.pass_over(seen.tokens)
            elif played := self._hindsight.add(seen.tokens):
                self._evidence[LOOKUP].add(self._foreseen, played, settings.half_life)
        if seen.overlap is not None:
            memory = settings.overlap_memory
            past = seen.overlap if self._overlap is None else self._overlap
            self._overlap = memory * past + (1 - memory) * seen.overlap
            self._sharing = (
                self._overlap >= settings.sharing_off if self._sharing else self._overlap > settings.sharing_on
            )
        # What a call costs beside its rounds makes short ones look slow: they count where no longer ones are to be had.
        whole = 2 * rounds >= self._profile.provenance.rounds_per_call or rounds < self._length
        if settings.clock and seen.seconds > 0 and whole:
            sample = math.log(1000 * seen.seconds / rounds / entry.round_ms(seen.context))
            past = self._drift(seen.label)
            # A call that the machine delayed may not decide alone.
            self._speed[seen.label] = past + 0.25 * max(-0.7, min(0.7, sample - past))

    def estimates(self, context: int) -> dict[str, float]:
        """Expected tokens per second of every candidate, from profile and evidence; 0 for those that are out."""
        return {label: self._estimate(label, context) for label in self._entries}

    def _drift(self, label: str) -> float:
        if label in self._speed:
            return self._speed[label]
        # Of a drift that others show, half is taken for the machine's and half for their own.
        return 0.5 * sum(self._speed.values()) / len(self._speed) if self._speed else 0.0

    def _round_ms(self, label: str, context: int) -> float:
        return self._entries[label].round_ms(context) * math.exp(self._drift(label))

    def _out(self, label: str) -> bool:
        return not self._sharing and self._entries[label].strategy.precision is PrecisionClass.APPROX

    def _estimate(self, label: str, context: int) -> float:
        if self._out(label):
            return 0.0
        chances: Sequence[float] = self._chances[label]
        evidence = self._evidence.get(self._drafter(label))
        if evidence is not None:
            chances = evidence.chances(chances, self._settings.prior)
        return 1000 * expected_tokens(chances) / self._round_ms(label, context)

    def _ceiling(self, drafter: str, context: int) -> float:
        """Tokens per second if everything were accepted."""
        return max(
            1000 * (entry.max_depth + 1) / self._round_ms(label, context)
            for label, entry in self._entries.items()
            if entry.strategy.draft == drafter
        )

    def _drafter(self, label: str) -> str:
        return self._entries[label].strategy.draft

    def _choose(self, estimates: dict[str, float], context: int) -> tuple[str, Kind, str]:
        settings, current = self._settings, self._current
        best = max(estimates, key=lambda label: estimates[label])
        if current is None:
            return best, "start", "best of the profile here"
        if self._home is not None:
            return self._after_probe(estimates, best)
        if self._out(current):
            return best, "switch", f"overlap fell to {self._overlap or 0:.2f}, sharing is out"
        plain = estimates[self._plain]
        if estimates[current] < plain * (1 - settings.collapse):
            return best, "switch", "drafting loses to autoregressive decoding"
        if self._call - self._since < settings.dwell:
            return current, "keep", "just switched"
        need = settings.gain
        if best in self._left and self._call - self._left[best] < settings.recent:
            need = settings.back_gain
        if estimates[best] > estimates[current] * (1 + need):
            gain = estimates[best] / estimates[current] - 1
            return best, "switch", f"{100 * gain:.0f}% faster than {current} by what was accepted"
        probe = self._probe(estimates, context)
        if probe is not None:
            self._home = current
            return probe, "probe", f"{self._drafter(probe)} has not been seen for a while"
        return current, "keep", "nothing is clearly faster"

    def _probe(self, estimates: dict[str, float], context: int) -> str | None:
        """A strategy of a drafter that is due and could win at all."""
        current = self._current
        assert current is not None
        for drafter, due in self._due.items():
            if drafter == self._drafter(current) or self._rounds < due:
                continue
            if self._ceiling(drafter, context) <= estimates[current] * (1 + self._settings.gain):
                continue
            own = [label for label in estimates if self._drafter(label) == drafter and not self._out(label)]
            if own:
                return max(own, key=lambda label: estimates[label])
        return None

    def _after_probe(self, estimates: dict[str, float], best: str) -> tuple[str, Kind, str]:
        home, probed = self._home, self._current
        assert home is not None and probed is not None
        self._home = None
        drafter, settings = self._drafter(probed), self._settings
        if self._out(home) or (
            self._drafter(best) == drafter and estimates[best] > estimates[home] * (1 + settings.gain)
        ):
            self._interval[drafter] = settings.probe_after
            self._due[drafter] = self._rounds + self._interval[drafter]
            return best, "switch", "the probe paid"
        self._interval[drafter] = min(2 * self._interval[drafter], settings.probe_limit)
        self._due[drafter] = self._rounds + self._interval[drafter]
        return home, "return", f"{drafter} does not pay now; next probe in {self._interval[drafter]} rounds"
