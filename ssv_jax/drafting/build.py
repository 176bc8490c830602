"""From a strategy to its drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flax import nnx

from ..errors import UsageError
from ..models.config import LlamaConfig
from ..strategy import Strategy
from .ngram import NgramDrafter
from .none import NoDrafter
from .protocol import Drafter


def build_drafter(
    strategy: Strategy, config: LlamaConfig, draft_model: str | Path | None, dtype: Any
) -> tuple[Drafter, nnx.State | None]:
    """The strategy's drafter and its network's parameters.

    Args:
      strategy: says which drafter, and how large its tree is.
      config: of the target.
      draft_model: directory of the network, for drafters that have one.
      dtype: of the network.

    Raises:
      UsageError: a network where none is needed, or none where one is.
      CheckpointError: a network that cannot be read or does not fit the target.
    """
    size = strategy.size
    if strategy.draft != "eagle3" and draft_model is not None:
        raise UsageError(f"drafter {strategy.draft} has no network: drop the draft model, or choose eagle3")
    if size is None:
        return NoDrafter(), None
    if strategy.draft == "ngram":
        return NgramDrafter(depth=size.depth, branches=size.topk, num_nodes=size.nodes), None
    raise UsageError("drafter eagle3 needs a draft model: a directory with an EAGLE-3 head")
