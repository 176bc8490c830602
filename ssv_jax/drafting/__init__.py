"""Drafters: what proposes the tree that a verify pass scores."""

from .protocol import Drafter, Observation, Params

__all__ = ["Drafter", "Observation", "Params"]
