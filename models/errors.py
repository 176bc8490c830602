"""Errors of the model package."""


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written.

    The message is one line: which file, what is wrong with it, what to do.
    """


def quote_names(names: list[str], limit: int = 10) -> str:
    """Names joined for a message: the first `limit`, then how many are left out."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def list_faults(faults: dict[str, list[str]]) -> str:
    """What is wrong with which names, such as `2 missing: a, b; 1 unknown: c`; empty if nothing is."""
    return "; ".join(f"{len(names)} {what}: {quote_names(names)}" for what, names in faults.items() if names)
