"""From a strategy to its drafter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from ..errors import UsageError
from ..models.config import LlamaConfig
from ..models.eagle3_config import TapConvention
from ..models.eagle3_loading import read_eagle3_config
from ..strategy import Strategy
from .dynamic_tree import check_tree
from .eagle3 import load_drafter
from .ngram import NgramDrafter
from .none import NoDrafter
from .protocol import Drafter


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
        raise UsageError("drafter eagle3 needs a draft model: a directory with an EAGLE-3 head")
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
        return NgramDrafter(depth=size.depth, branches=size.topk, num_nodes=size.nodes), None
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
