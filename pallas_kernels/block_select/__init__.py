"""Compressed-branch attention and block selection."""

from .api import block_select, compressed_attention

__all__ = ["block_select", "compressed_attention"]
