"""What a planned run switches between: the strategies of a profile that fit, their drafters, and who decides.

All strategies of a run decode one state. Drafters without a state of their own (prompt lookup, none) need nothing
for that. At most one drafter has a network and a state; while another strategy runs, it goes on observing what is
committed (`drafting.observing`), which costs one pass of its head over the accepted tokens and makes every switch
free: nothing is replayed, and no token depends on when a switch happened.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from flax import nnx

from .controller import Controller, Decision, Observed, Pilot, Settings
from .drafting.build import build_drafter, check_drafter
from .drafting.eagle3 import Eagle3Drafter
from .drafting.ngram import NgramDrafter
from .drafting.none import NoDrafter
from .drafting.observing import Observing
from .drafting.protocol import Drafter
from .errors import UsageError
from .models.config import LlamaConfig
from .models.eagle3_config import TapConvention
from .models.layer_plan import LayerPlan
from .pallas_kernels.dispatch import Implementation
from .profiles import Profile, ProfileError
from .strategy import AUTO, PrecisionClass, Strategy

# Executables of a run: each takes seconds to minutes to compile.
MOST_STRATEGIES = 6


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Lanes:
    """Strategies that decode one state, by label.

    Args:
      strategies: at least one.
      drafters: of each; all with the same state.
      draft: parameters of the network, if one drafter has any.
      base: label of the strategy whose `Decoding` prefills.
    """

    strategies: Mapping[str, Strategy]
    drafters: Mapping[str, Drafter]
    draft: nnx.State | None
    base: str

    @property
    def depth(self) -> int:
        """Of the deepest tree: the statistics of every strategy must fit."""
        return max(drafter.max_depth for drafter in self.drafters.values())

    @property
    def precision(self) -> PrecisionClass:
        """The class of a run that may use any of them."""
        order = list(PrecisionClass)
        return max((s.precision for s in self.strategies.values()), key=order.index)


def build_lanes(
    strategies: Sequence[Strategy],
    config: LlamaConfig,
    draft_model: str | Path | None,
    dtype: Any,
    params: Mapping[str, Any],
    tap_convention: TapConvention | None = None,
    *,
    head: tuple[Drafter, nnx.State] | None = None,
    implementation: Implementation = None,
) -> Lanes:
    """Drafters for strategies that `check_drafter` accepts one by one; the head is read once.

    Args:
      strategies: the first autoregressive one prefills, else the first.
      config, draft_model, dtype, params, tap_convention: see `build_drafter`.
      head: an EAGLE-3 drafter and its parameters that are in memory already, in place of `draft_model`.
      implementation: of the head's attention, see `pallas_kernels.dispatch.run`.

    Raises:
      CheckpointError: a network that cannot be read or does not fit the target.
    """
    network, draft = head or (None, None)
    drafters: dict[str, Drafter] = {}
    for strategy in strategies:
        if strategy.draft == "eagle3" and network is None:
            network, draft = build_drafter(strategy, config, draft_model, dtype, params, tap_convention)
    if isinstance(network, Eagle3Drafter):
        network = dataclasses.replace(network, implementation=implementation)
    for strategy in strategies:
        size = strategy.size
        if size is None or strategy.draft == "ngram":
            own: Drafter = NoDrafter()
            if size is not None:
                own = NgramDrafter.of(size)
            drafters[strategy.label] = own if network is None else Observing(proposer=own, observer=network)
            continue
        assert isinstance(network, Eagle3Drafter)
        window = strategy.draft_window
        drafters[strategy.label] = dataclasses.replace(
            network,
            depth=size.depth,
            top_k=size.topk,
            num_nodes=size.nodes,
            window=network.config.draft_window if window is None else window or None,
        )
    named = {strategy.label: strategy for strategy in strategies}
    plain = [label for label, strategy in named.items() if strategy.draft == "none"]
    return Lanes(strategies=named, drafters=drafters, draft=draft, base=(plain or list(named))[0])


@runtime_checkable
class Planner(Protocol):
    """Which strategies an engine prepares, and who chooses among them."""

    def strategies(
        self, allowed: PrecisionClass, has_head: bool, fits: Callable[[Strategy], bool]
    ) -> tuple[Strategy, ...]:
        """What a run may use.

        Args:
          allowed: no strategy may deviate more.
          has_head: whether an EAGLE-3 head is at hand.
          fits: whether the model admits a strategy.
        """
        ...

    def pilot(self, labels: Sequence[str], allowed: PrecisionClass, greedy: bool, known: Sequence[int] = ()) -> Pilot:
        """Who chooses in one run.

        Args:
          labels: of the strategies that the run may use.
          allowed: no strategy may deviate more.
          greedy: whether tokens are the most likely ones.
          known: tokens before the first call.
        """
        ...

    @property
    def compiles_ahead(self) -> bool:
        """Whether every strategy is compiled before the first round."""
        ...


class ProfilePlanner:
    """Plans with a profile.

    Args:
      profile: complete.
      settings: of the controller.

    Raises:
      ProfileError: an incomplete profile.
    """

    compiles_ahead = True

    def __init__(self, profile: Profile, settings: Settings | None = None) -> None:
        if not profile.complete:
            raise ProfileError("the profile is incomplete: run its command again, it goes on where it stopped")
        self.profile, self._settings = profile, settings or Settings()

    def strategies(
        self, allowed: PrecisionClass, has_head: bool, fits: Callable[[Strategy], bool]
    ) -> tuple[Strategy, ...]:
        """See `Planner`; the best of each drafter at each context first, `MOST_STRATEGIES` in all.

        Raises:
          ProfileError: nothing fits, or no autoregressive strategy with the chosen layer plan.
        """
        profile = self.profile
        usable = [
            entry.strategy
            for entry in profile.entries
            if allowed.allows(entry.strategy.precision)
            and (has_head or entry.strategy.draft != "eagle3")
            and fits(entry.strategy)
        ]
        if not usable:
            raise ProfileError(
                f"the profile has no strategy that this model and precision {allowed.value} admit: measure others"
            )
        # A run keeps one layer plan: the one that is best at most contexts.
        labels = [strategy.label for strategy in usable]
        firsts = [profile.entry(profile.ranking(context, labels)[0]).strategy.plan for context in profile.contexts]
        plan = max(firsts, key=firsts.count)
        usable = [strategy for strategy in usable if strategy.plan == plan]
        plain = [strategy for strategy in usable if strategy.draft == "none"]
        if not plain:
            raise ProfileError("the profile lacks autoregressive decoding with this layer plan: measure none too")
        chosen = {plain[0].label: plain[0]}
        for strategy in self._by_merit([s for s in usable if s.draft != "none"]):
            if len(chosen) < MOST_STRATEGIES:
                chosen.setdefault(strategy.label, strategy)
        return tuple(chosen.values())

    def _by_merit(self, usable: Sequence[Strategy]) -> Iterable[Strategy]:
        profile = self.profile
        labels = [s.label for s in usable]
        kept = [s for s in usable if profile.entry(s.label).dominated_by not in labels]
        for rank in range(len(kept)):
            for context in profile.contexts:
                for drafter in dict.fromkeys(s.draft for s in kept):
                    ranked = profile.ranking(context, [s.label for s in kept if s.draft == drafter])
                    if rank < len(ranked):
                        yield profile.entry(ranked[rank]).strategy

    def verify(self, *, device: str, dtype: str, model_hash: str, head_hash: str | None) -> tuple[str, ...]:
        """Refuses a profile of another model; returns notes on what else differs.

        Raises:
          ProfileError: measured for other weights, settings or another head.
        """
        about = self.profile.provenance
        if about.dtype != dtype:
            raise ProfileError(
                f"the profile was measured in {about.dtype}, this run is {dtype}: choose that dtype, or measure again"
            )
        if about.model_hash != model_hash:
            raise ProfileError(
                f"the profile was measured for {about.model} with other weights or attention settings: "
                "measure this model"
            )
        if head_hash is not None and about.head_hash != head_hash:
            raise ProfileError("the profile was measured with another draft head: measure with this one")
        if about.device != device:
            return (f"the profile was measured on {about.device}, this is {device}: first choices may be poor",)
        return ()

    def pilot(self, labels: Sequence[str], allowed: PrecisionClass, greedy: bool, known: Sequence[int] = ()) -> Pilot:
        """A controller. Where tokens are drawn it does without the clock, so that a seed repeats its tokens."""
        settings = dataclasses.replace(self._settings, clock=self._settings.clock and greedy)
        return Controller(self.profile, labels, allowed=allowed, settings=settings, known=known)


class Manual:
    """Runs what it is told: to measure strategies, and to test switches.

    Args:
      strategies: what an engine prepares.
      choose: label for each call by its number, first 0; by default always the first strategy's.
    """

    compiles_ahead = False

    def __init__(self, strategies: Sequence[Strategy], choose: Callable[[int], str] | None = None) -> None:
        self._strategies = tuple(strategies)
        self.choose = choose or (lambda call: self._strategies[0].label)

    def strategies(
        self, allowed: PrecisionClass, has_head: bool, fits: Callable[[Strategy], bool]
    ) -> tuple[Strategy, ...]:
        """See `Planner`; all of them."""
        return self._strategies

    def pilot(self, labels: Sequence[str], allowed: PrecisionClass, greedy: bool, known: Sequence[int] = ()) -> Pilot:
        """See `Planner`."""
        return _ManualPilot(self)


class _ManualPilot:
    def __init__(self, manual: Manual) -> None:
        self._manual, self._call = manual, -1

    def decide(self, context: int) -> Decision:
        self._call += 1
        label = self._manual.choose(self._call)
        return Decision(label=label, kind="keep", reason="told so", context=context, bucket=context)

    def observe(self, seen: Observed) -> None:
        pass


def check_strategy(config: LlamaConfig, strategy: Strategy, allowed: PrecisionClass) -> None:
    """Refuses a strategy that the model or the user's precision class does not admit.

    Raises:
      UsageError: says what to change.
    """
    if config.nsa is None and (strategy.group > 1 or strategy.reuses):
        raise UsageError(
            "grouping and layer plans are about selected blocks, and this model's attention is dense: "
            "drop them, or run sparse attention"
        )
    if strategy.refresh_every > config.num_layers:
        raise UsageError(
            f"layer plan: refresh-every={strategy.refresh_every} exceeds the model's {config.num_layers} layers"
        )
    try:
        layer_plan(config, strategy)
        strategy.check(allowed)
    except ValueError as error:
        raise UsageError(str(error)) from None


def planned_strategies(
    planner: Planner,
    config: LlamaConfig,
    allowed: PrecisionClass,
    draft_model: str | Path | None,
    tap_convention: TapConvention | None,
) -> list[Strategy]:
    """What a planner chooses from, for this model.

    Raises:
      UsageError, ProfileError, CheckpointError: nothing that fits, or a strategy that does not.
    """

    def fits(strategy: Strategy) -> bool:
        try:
            check_strategy(config, strategy, allowed)
        except UsageError:
            return False
        return True

    strategies = list(planner.strategies(allowed, draft_model is not None, fits))
    for strategy in strategies:
        check_strategy(config, strategy, allowed)
        network = strategy.draft == "eagle3"
        check_drafter(strategy, config, draft_model if network else None, tap_convention if network else None)
    return strategies


def layer_plan(config: LlamaConfig, strategy: Strategy) -> LayerPlan:
    """The strategy's plan for this model.

    Raises:
      ValueError: a layer that the model does not have.
    """
    if strategy.refresh_layers is not None:
        return LayerPlan.at(config.num_layers, strategy.refresh_layers)
    return LayerPlan.every(config.num_layers, strategy.refresh_every)


def read_planner(planner: Planner | Profile | str | Path | None, strategy: Strategy | None) -> Planner | None:
    """The planner that a caller means.

    Raises:
      UsageError: a strategy beside it.
      ProfileError: a profile that cannot be read or is incomplete.
    """
    if planner is None:
        return None
    if strategy is not None and strategy != Strategy(draft=AUTO):
        raise UsageError(
            "a profile chooses drafter, tree, traversal, groups and layer plan: drop those options, or the profile"
        )
    if isinstance(planner, str | Path):
        planner = Profile.load(planner)
    return ProfilePlanner(planner) if isinstance(planner, Profile) else planner


class PlanLog:
    """What a planner did in one run.

    Args:
      explain: called with each decision.
    """

    def __init__(self, explain: Callable[[Decision], None] | None) -> None:
        self._explain = explain
        self._calls: dict[str, int] = {}
        self._changes: list[str] = []
        self._sums = (0.0, 0.0)
        self.overlap: float | None = None

    def add(self, decision: Decision, overlap: float, terms: float) -> None:
        """One call.

        Args:
          decision: that led to it.
          overlap, terms: the run's sums after it; `self.overlap` is then the call's own mean.
        """
        before, self._sums = self._sums, (overlap, terms)
        more = terms - before[1]
        self.overlap = (overlap - before[0]) / more if more > 0 else None
        self._calls[decision.label] = self._calls.get(decision.label, 0) + 1
        if decision.kind != "keep":
            self._changes.append(str(decision))
        if self._explain is not None:
            self._explain(decision)

    def summary(self) -> dict[str, Any]:
        """Calls by strategy, and every decision but those to go on."""
        return {"calls": self._calls, "decisions": self._changes}


def fingerprint(about: Any, leaves: Mapping[str, Any] | nnx.State | None, dtype: Any) -> str | None:
    """A hash of a model: its configuration, names, shapes, and the first values of every array.

    Args:
      about: configuration, hashed by its `repr`.
      leaves: arrays; None gives None.
      dtype: that they are used in.
    """
    if leaves is None:
        return None
    if isinstance(leaves, nnx.State):
        found = jax.tree_util.tree_leaves_with_path(leaves)
        named = {jax.tree_util.keystr(path): leaf for path, leaf in found}
    else:
        named = dict(leaves)
    digest = hashlib.sha256(f"{about!r} {np.dtype(dtype).name}".encode())
    for name in sorted(named):
        array = named[name]
        digest.update(f"{name}{array.shape}".encode())
        row = array[(0,) * (array.ndim - 1)][:8] if array.ndim else array
        digest.update(np.asarray(row).astype(np.float32).tobytes())
    return digest.hexdigest()[:16]
