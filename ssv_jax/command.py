"""What all command lines share: streams, progress, how errors read, and how a command that resumes ends."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from .errors import UsageError


class Parser(argparse.ArgumentParser):
    """Reports usage errors in one line, exit status 2."""

    def error(self, message: str) -> Any:
        """Ends the program."""
        self.exit(2, f"error: {message} (see --help)\n")


class Progress:
    """One line per phase on stderr, rewritten in place on a terminal."""

    def __init__(self, stream: Any, enabled: bool) -> None:
        self._stream, self._enabled = stream, enabled
        self._terminal = stream.isatty()
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Shows how far a stage is."""
        if not self._enabled or stage == "decode":
            return
        if self._terminal:
            start = "\r" if stage == self._stage else ""
            self._stream.write(f"{start}{stage} {done}/{total}" + ("\n" if done == total else ""))
        elif done == total or stage == "compile":  # few steps, each of many seconds
            self._stream.write(f"{stage} {done}/{total}\n")
        elif stage != self._stage:
            self._stream.write(f"{stage} ...\n")
        self._stage = "" if done == total else stage
        self._stream.flush()

    def say(self, text: str) -> None:
        """One whole line."""
        if self._enabled:
            self._stream.write(f"{text}\n")
            self._stream.flush()


def usable_streams() -> None:
    """Closed standard streams become empty ones; text that the terminal's encoding lacks is replaced, not fatal."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def enable_compilation_cache() -> None:
    """Keeps compiled code between runs, so that a second start is fast."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "ssv-jax" / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def versions() -> dict[str, str]:
    """Installed versions of what decides speed and results."""
    names = ("ssv-jax", "jax", "jaxlib", "flax", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def out_of_memory(error: Exception) -> bool:
    """Whether an error is a device's refusal to allocate."""
    return type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)


def run_command(
    work: Callable[[], None], *, smaller: str, interrupted: str = "interrupted", plain_errors: bool = False
) -> int:
    """Runs a command; a user's mistake is one line on stderr, an error of the program a traceback.

    Args:
      work: the command.
      smaller: what to use when memory runs out.
      interrupted: said after an interruption.
      plain_errors: take any `ValueError` for a user's mistake, not only those of this package's own types.

    Returns:
      The exit status: 2 for usage errors, 1 for what cannot be read, written or run, 130 if interrupted.
    """
    try:
        work()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        _drop_output()
        return 1
    except OSError as error:  # missing files name themselves in the message, others in their fields
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error)
        print(f"error: {text}", file=sys.stderr)
        if error.errno is not None and not error.filename:
            _drop_output()
        return 1
    except (ValueError, NotImplementedError) as error:
        if not plain_errors and not type(error).__module__.startswith("ssv_jax"):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        print(f"error: out of memory: use {smaller}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\n{interrupted}", file=sys.stderr)
        return 130
    return 0


def leave(status: int) -> NoReturn:
    """Ends the process; after an interruption at once, without waiting for threads that still compile."""
    if status == 130:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(status)
    raise SystemExit(status)


def _drop_output() -> None:
    """What stdout still holds would fail again when the interpreter ends: nobody reads it, or its disk is full."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # not a file, or closed
        pass


def run_resumable(work: Callable[[], None], *, remains: str, smaller: str) -> int:
    """`run_command` of a command that a repetition resumes.

    Args:
      work, smaller: as `run_command`.
      remains: what the same command goes on with after an interruption.
    """
    interrupted = f"interrupted; the same command goes on {remains}"
    return run_command(work, smaller=smaller, interrupted=interrupted, plain_errors=True)
