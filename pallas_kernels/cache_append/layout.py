"""Which rows move where."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowMoves:
    """P rows of the new arrays and the rows of the old ones that they replace, per sequence.

    Args:
      source: rows to read; any that exist where the target says that nothing is written.
      target: rows to write; those outside the array are dropped. The others are distinct.
      ascending: whether the targets ascend, static.
    """

    source: Int[Array, "B P"]
    target: Int[Array, "B P"]
    ascending: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def width(self) -> int:
        """P."""
        return self.source.shape[1]
