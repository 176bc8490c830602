"""Choice of the implementation of an op: by name, by preference, or the best that accepts the call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .errors import UnsupportedKernelError

logger = logging.getLogger(__name__)
_reported: set[tuple[str, str]] = set()

Implementation = str | Sequence[str] | None


def or_portable(implementation: Implementation) -> Implementation:
    """For the steps around attention: the implementation that attention was asked for where it fits, else XLA's."""
    if isinstance(implementation, str) and implementation not in ("xla", "reference"):
        return (implementation, "xla")
    return implementation


def run(
    op: str,
    table: Mapping[str, Callable[..., Any]],
    implementation: Implementation,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Calls the chosen implementation of `op`.

    Args:
      op: name for messages.
      table: implementations by name, fastest first; `reference` is never chosen unasked.
      implementation: a name (never falls back), a sequence of names in order of preference, or None for the
        first of the table that accepts the call. What None chose is logged once per process.

    Raises:
      ValueError: an unknown name; the known ones are listed.
      UnsupportedKernelError: every candidate refused; the message holds each reason.
    """
    if implementation is None:
        names = [name for name in table if name != "reference"]
    else:
        names = [implementation] if isinstance(implementation, str) else list(implementation)
    unknown = [name for name in names if name not in table]
    if unknown or not names:
        raise ValueError(f"{op}: unknown implementation {', '.join(unknown) or '(none)'}; known: {', '.join(table)}")
    refusals = []
    for name in names:
        try:
            result = table[name](*args, **kwargs)
        except UnsupportedKernelError as refusal:
            refusals.append(f"{name}: {refusal}")
            continue
        if implementation is None and (op, name) not in _reported:
            _reported.add((op, name))
            logger.info("%s uses %s%s", op, name, f" ({'; '.join(refusals)})" if refusals else "")
        return result
    raise UnsupportedKernelError(f"{op}: no implementation accepts this call: {'; '.join(refusals)}")
