"""Dense attention over a tree of queries."""

from .api import dense_verify

__all__ = ["dense_verify"]
