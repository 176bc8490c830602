"""Sparse-attention ops for speculative verification, with interchangeable implementations."""

from .block_select import block_select, compressed_attention
from .dense_verify import dense_verify
from .errors import ShapeError, UnsupportedKernelError
from .layout import CachedKV, Completions, Geometry, TreeKV, TreeQueries, chain, completions
from .nsa_fused import implementations, refresh_attention, reuse_attention
from .sparse_verify import MergedSchedule, Overlap, Selection, merge, overlap, share, sparse_verify

__all__ = [
    "CachedKV",
    "Completions",
    "Geometry",
    "MergedSchedule",
    "Overlap",
    "Selection",
    "ShapeError",
    "TreeKV",
    "TreeQueries",
    "UnsupportedKernelError",
    "block_select",
    "chain",
    "completions",
    "compressed_attention",
    "dense_verify",
    "implementations",
    "merge",
    "overlap",
    "refresh_attention",
    "reuse_attention",
    "share",
    "sparse_verify",
]
