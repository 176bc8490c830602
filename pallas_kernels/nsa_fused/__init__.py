"""Refresh- and reuse-layer attention."""

from .api import implementations, refresh_attention, reuse_attention

__all__ = ["implementations", "refresh_attention", "reuse_attention"]
