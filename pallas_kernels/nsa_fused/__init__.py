"""Refresh- and reuse-layer attention."""

from .api import refresh_attention, reuse_attention

__all__ = ["refresh_attention", "reuse_attention"]
