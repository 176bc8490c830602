"""What a user asks of an engine, and what comes back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from .errors import UsageError
from .sampling import Sampling

FinishReason = Literal["stop", "stop_string", "length", "context"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerationOptions:
    """What to generate.

    Args:
      max_new_tokens: tokens to emit at most.
      temperature, top_k, top_p: see `Sampling`.
      seed: of every random draw.
      stop: strings that end the text; they are not part of it.
      ignore_eos: go on after end tokens.

    Raises:
      UsageError: a value out of range.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if not 0 <= self.seed < 2**32:
            raise UsageError(f"seed must be in [0, 2**32), got {self.seed}")
        if isinstance(self.stop, str) or any(not text for text in self.stop):
            raise UsageError("stop must be a sequence of non-empty strings")
        self.sampling  # noqa: B018  validates

    @property
    def sampling(self) -> Sampling:
        """The choice of tokens."""
        try:
            return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        except ValueError as error:
            raise UsageError(str(error)) from None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A piece of a stream: the text that has become final, and the tokens emitted since the last piece."""

    text: str
    tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """A finished generation.

    Args:
      prompt_ids: the prompt's tokens.
      tokens: emitted tokens, a final end token included.
      text: their text, without end tokens and without a stop string; None without a tokenizer.
      finish_reason: `stop` (end token), `stop_string`, `length` (max_new_tokens) or `context` (full).
      timings_s: seconds by phase: load, compile, prefill, decode.
      decode_tok_s: tokens per second of decoding, without the first token, which prefill emits.
      stats: what drafting and verification did.
    """

    prompt_ids: tuple[int, ...]
    tokens: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    timings_s: Mapping[str, float]
    decode_tok_s: float
    stats: Mapping[str, Any]
