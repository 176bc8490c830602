"""Phases of a run and its learning rate."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Sequence

import optax


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Optimiser steps on batches of one shape; every new shape compiles once.

    Args:
      length: tokens per sequence.
      batch: sequences per step.
      steps: optimiser steps.

    Raises:
      ValueError: a number that is not positive.
    """

    length: int
    batch: int
    steps: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) < 1:
                raise ValueError(f"{field.name} must be a positive integer, got {getattr(self, field.name)}")

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.length * self.batch


def parse_phase(text: str) -> Phase:
    """A phase from `length=2048,batch=8,steps=500`, for argparse."""
    names = [field.name for field in dataclasses.fields(Phase)]
    try:
        fields = {name.strip(): int(value) for name, value in (part.split("=") for part in text.split(","))}
        if sorted(fields) != sorted(names):
            raise ValueError(f"got {', '.join(fields)}")
        return Phase(**fields)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must look like length=2048,batch=8,steps=500, got {text!r}: {error}"
        ) from None


def phase_at(phases: Sequence[Phase], step: int) -> Phase:
    """The phase of the step after `step` steps."""
    for phase in phases:
        if step < phase.steps:
            return phase
        step -= phase.steps
    raise ValueError(f"step {step} is beyond the last phase")


def tokens_before(phases: Sequence[Phase], step: int) -> int:
    """Tokens of the first `step` steps."""
    total = 0
    for phase in phases:
        done = min(step, phase.steps)
        total, step = total + done * phase.tokens, step - done
    return total


def total_steps(phases: Sequence[Phase]) -> int:
    """Steps of all phases."""
    return sum(phase.steps for phase in phases)


def learning_rate(step: int, peak: float, warmup: int, steps: int) -> float:
    """Linear warm-up, then a cosine decay to a twentieth of the peak.

    Computed on the host and passed to the compiled step, which so serves runs of any length.

    Args:
      step: steps done.
      peak: highest learning rate.
      warmup: steps until it is reached.
      steps: in all.
    """
    warmup = min(warmup, max(steps - 1, 0))
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(steps - warmup, 1)
    return peak * (1 + 19 * 0.5 * (1 + math.cos(math.pi * done))) / 20


def adamw(*, weight_decay: float, clip: float) -> optax.GradientTransformation:
    """AdamW on clipped gradients, before the learning rate: add `-learning_rate * update` to the parameters.

    Args:
      weight_decay: decoupled.
      clip: largest global gradient norm.
    """
    return optax.chain(
        optax.clip_by_global_norm(clip),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(weight_decay),
    )
