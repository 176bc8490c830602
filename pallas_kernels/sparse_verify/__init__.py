"""Grouped sparse verification over selected blocks."""

from .api import sparse_verify
from .schedule import MergedSchedule, Selection, merge, owned_by
from .sharing import Overlap, overlap, share

__all__ = ["MergedSchedule", "Overlap", "Selection", "merge", "overlap", "owned_by", "share", "sparse_verify"]
