"""Grouped sparse verification over selected blocks."""

from .api import sparse_verify
from .schedule import MergedSchedule, Selection, merge, owned_by

__all__ = ["MergedSchedule", "Selection", "merge", "owned_by", "sparse_verify"]
