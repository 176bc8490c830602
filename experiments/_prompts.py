"""Prompts that drafters are measured on: chats from JSON lines, and held-out texts that are continued."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import _evaluation as evaluation
import _harness as harness
import numpy as np

from ssv_jax import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """What is asked: an id, a category to report under, and tokens."""

    name: str
    category: str
    tokens: tuple[int, ...]


def read_prompts(paths: Sequence[Path], model: evaluation.Model, longest: int, most: int | None) -> list[Prompt]:
    """The first turns of the files' prompts as chats; those beyond `longest` tokens are left out.

    Raises:
      UsageError: no chat template, a line that is no such prompt, or no prompt left.
    """
    tokenizer = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise UsageError(f"{model.name} has no chat template, which chat prompts need: use --parts long")
    prompts, left_out = [], 0
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                entry = json.loads(line)
                text, category = str(entry["turns"][0]), str(entry.get("category", path.stem))
            except (ValueError, KeyError, IndexError, TypeError, AttributeError):
                raise UsageError(f'{path}, line {number}: expected an object with "turns"') from None
            tokens = tokenizer.apply_chat([{"role": "user", "content": text}])
            if len(tokens) > longest:
                left_out += 1
                continue
            name = f"{path.stem} {entry.get('question_id', number)}"
            prompts.append(Prompt(name=name, category=category, tokens=tuple(tokens)))
    if left_out:
        harness.say(f"{left_out} prompts of more than {longest} tokens left out (--longest-prompt)")
    if not prompts:
        raise UsageError("--prompts: no prompt left")
    if most and len(prompts) > most:
        prompts = [prompts[i] for i in np.linspace(0, len(prompts) - 1, most).round().astype(int)]
    return prompts


def long_prompts(paths: Sequence[str], model: evaluation.Model, lengths: Sequence[int], count: int) -> list[Prompt]:
    """Held-out windows as plain prompts."""
    found = evaluation.read_sets(paths, model.config.vocab_size)
    return [
        Prompt(name=f"{name} {i}", category=f"{name} {length}", tokens=tuple(window.tokens.tolist()))
        for length in lengths
        for name, tokens in found.items()
        for i, window in enumerate(evaluation.windows(tokens, length, count))
    ]


def smoke_prompts(model: evaluation.Model) -> list[Prompt]:
    rng = np.random.default_rng(0)
    shapes = [("a", 9), ("a", 40), ("b", 17)]
    vocab = model.config.vocab_size
    return [
        Prompt(name=str(i), category=c, tokens=tuple(rng.integers(0, vocab, n).tolist()))
        for i, (c, n) in enumerate(shapes)
    ]


def pick(prompts: list[Prompt], count: int) -> list[Prompt]:
    """Evenly spread."""
    return [prompts[i] for i in np.linspace(0, len(prompts) - 1, min(count, len(prompts))).round().astype(int)]
