"""SSV-JAX: speculative decoding over Native Sparse Attention.

`Engine` serves text on a host; `loop` holds the pure functions for jitted pipelines. Imports jax only on use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine import Engine
    from .errors import ContextLengthError, NumericsError, UsageError
    from .generation import Chunk, Generation, GenerationOptions
    from .strategy import PrecisionClass, Strategy, TreeSpec

_HOMES = {
    "Chunk": "generation",
    "ContextLengthError": "errors",
    "Engine": "engine",
    "Generation": "generation",
    "GenerationOptions": "generation",
    "NumericsError": "errors",
    "PrecisionClass": "strategy",
    "Strategy": "strategy",
    "TreeSpec": "strategy",
    "UsageError": "errors",
}

__all__ = [
    "Chunk",
    "ContextLengthError",
    "Engine",
    "Generation",
    "GenerationOptions",
    "NumericsError",
    "PrecisionClass",
    "Strategy",
    "TreeSpec",
    "UsageError",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
