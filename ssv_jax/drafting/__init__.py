"""Drafters: what proposes the tree that a verify pass scores."""

from .ngram import NgramDrafter
from .none import NoDrafter
from .protocol import Drafter, Observation, Params

__all__ = ["Drafter", "NgramDrafter", "NoDrafter", "Observation", "Params"]
