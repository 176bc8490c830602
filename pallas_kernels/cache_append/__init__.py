"""Rows that a pass leaves behind, copied into the caches of all layers."""

from .api import RowMoves, append_rows

__all__ = ["RowMoves", "append_rows"]
