"""From a strategy to its drafter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from flax import nnx

from ..errors import UsageError
from ..models.config import LlamaConfig
from ..models.eagle3_config import TapConvention
from ..models.eagle3_loading import read_eagle3_config
from ..strategy import AUTO, Strategy, TreeSpec
from .dynamic_tree import check_tree
from .eagle3 import load_drafter
from .ngram import NgramDrafter
from .none import NoDrafter
from .protocol import Drafter

Platform = Literal["cpu", "gpu"]
# For heads that come without trees of their own. A CPU pays for every node, a GPU hardly.
DEFAULT_HEAD_TREES: Mapping[Platform, TreeSpec] = MappingProxyType(
    {"cpu": TreeSpec(depth=4, topk=2, nodes=8), "gpu": TreeSpec(depth=5, topk=8, nodes=32)}
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class OwnHead:
    """The EAGLE-3 head that comes with a model.

    Args:
      path: its directory.
      trees: the recommended draft tree by platform, for one sequence.
    """

    path: Path
    trees: Mapping[Platform, TreeSpec] = dataclasses.field(default_factory=lambda: DEFAULT_HEAD_TREES)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What is drafted with, and why.

    Args:
      strategy: with a drafter that is not `auto`.
      draft_model: directory of the drafter's network, if it has one.
      reason: of the choice, for people.
    """

    strategy: Strategy
    draft_model: str | Path | None
    reason: str


def settle(
    strategy: Strategy | None, draft_model: str | Path | None, own: OwnHead | None, platform: Platform
) -> Settled:
    """Chooses the drafter where that was left open, and the model's own head and its tree where none was named.

    Args:
      strategy: None for nothing but an open choice of the drafter.
      draft_model: a network that the caller names; it wins over the model's own.
      own: the model's own head.
      platform: where it will run.

    Raises:
      UsageError: a tree or a draft window without anything to draft with.
    """
    strategy = strategy or Strategy(draft=AUTO)
    if strategy.draft not in (AUTO, "eagle3"):
        return Settled(strategy=strategy, draft_model=draft_model, reason="asked for")
    if draft_model is not None:
        reason = "asked for" if strategy.draft != AUTO else "a draft model was given"
        return Settled(strategy=dataclasses.replace(strategy, draft="eagle3"), draft_model=draft_model, reason=reason)
    if own is not None:
        tree = strategy.tree or own.trees[platform]
        reason = "the model's own head"
        return Settled(
            strategy=dataclasses.replace(strategy, draft="eagle3", tree=tree), draft_model=own.path, reason=reason
        )
    if strategy.draft != AUTO:
        return Settled(strategy=strategy, draft_model=None, reason="asked for")
    try:
        plain = dataclasses.replace(strategy, draft="none")
    except ValueError as error:
        raise UsageError(f"{error} (this model has no head of its own)") from None
    return Settled(strategy=plain, draft_model=None, reason="the model has no head of its own")


def check_drafter(
    strategy: Strategy,
    config: LlamaConfig,
    draft_model: str | Path | None,
    tap_convention: TapConvention | None = None,
) -> None:
    """Refuses what `build_drafter` would, before any weights are read.

    Raises:
      UsageError: a network where none is needed, or none where one is, or a tree that cannot be built.
      CheckpointError: a network whose configuration cannot be read or does not fit the target.
    """
    if strategy.draft != "eagle3":
        if tap_convention is not None:
            raise UsageError(f"drafter {strategy.draft} has no taps: drop the tap convention, or choose eagle3")
        if draft_model is not None:
            raise UsageError(f"drafter {strategy.draft} has no network: drop the draft model, or choose eagle3")
        return
    if draft_model is None:
        raise UsageError(
            "drafter eagle3 needs a draft model: a directory with an EAGLE-3 head; this model has none of its own"
        )
    size = strategy.size
    assert size is not None
    try:
        check_tree(depth=size.depth, top_k=size.topk, nodes=size.nodes)
    except ValueError as error:
        raise UsageError(str(error)) from None
    read_eagle3_config(draft_model, config, tap_convention=tap_convention)


def build_drafter(
    strategy: Strategy,
    config: LlamaConfig,
    draft_model: str | Path | None,
    dtype: Any,
    params: Mapping[str, Any],
    tap_convention: TapConvention | None = None,
) -> tuple[Drafter, nnx.State | None]:
    """The strategy's drafter and its network's parameters, for a strategy that `check_drafter` accepts.

    Args:
      strategy: says which drafter, and how large its tree is.
      config: of the target.
      draft_model: directory of the network, for drafters that have one.
      dtype: of the network.
      params: of the target, whose output head some networks borrow.
      tap_convention: what the checkpoint's tap ids mean, where they are not the usual ones.

    Raises:
      CheckpointError: a network that cannot be read or does not fit the target.
    """
    size = strategy.size
    if size is None:
        return NoDrafter(), None
    if strategy.draft == "ngram":
        return NgramDrafter.of(size), None
    assert draft_model is not None
    return load_drafter(
        draft_model,
        config,
        depth=size.depth,
        top_k=size.topk,
        nodes=size.nodes,
        window=strategy.draft_window,
        dtype=dtype,
        target_params=params,
        tap_convention=tap_convention,
    )
