"""A training run's folder: settings, checkpoints, metrics and the learning curve.

A run can be killed at any moment: checkpoints are written beside the old ones and renamed into place, and metrics
logged after the last checkpoint are dropped when the run goes on from it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from ..errors import UsageError

_SETTINGS, _METRICS, _CHECKPOINTS, _CURVE = "settings.json", "metrics.jsonl", "checkpoints", "curve.png"


class Run:
    """One run, new or resumed.

    Args:
      directory: created; an existing run's folder resumes that run.
      settings: whatever decides the result, JSON values; a resumed run must have the same.
      total_steps: optimiser steps in all.
      save_every: steps between checkpoints.

    Raises:
      UsageError: a folder with other contents, or a run with other settings; the differing ones are named.
    """

    def __init__(
        self, directory: str | os.PathLike[str], settings: Mapping[str, Any], total_steps: int, save_every: int
    ) -> None:
        import orbax.checkpoint as ocp

        self.directory = Path(directory).absolute()
        self.total_steps = total_steps
        start_folder(self.directory, settings)
        self._ocp = ocp
        self._manager = ocp.CheckpointManager(
            self.directory / _CHECKPOINTS,
            options=ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=save_every),
        )
        self._started, self._start_step, self._start_tokens = time.monotonic(), 0, 0
        self._line = False

    def restore(self, state: Any) -> tuple[Any, int]:
        """The newest complete checkpoint and the steps done, or `state` and 0.

        Args:
          state: arrays in the structure, shapes, dtypes and shardings to restore.
        """
        step = self._manager.latest_step()
        if step is None:
            (self.directory / _METRICS).unlink(missing_ok=True)
            return state, 0
        abstract = jax.tree.map(ocp_shape, state)
        state = self._manager.restore(step, args=self._ocp.args.StandardRestore(abstract))
        kept = [line for line in self.metrics() if line["step"] <= step]
        _write_atomically(self.directory / _METRICS, "".join(json.dumps(line) + "\n" for line in kept))
        self._start_step = step
        self._start_tokens = kept[-1].get("tokens", 0) if kept else 0
        self._started = time.monotonic()
        self.say(f"resuming after step {step}")
        return state, step

    def save(self, step: int, state: Any, force: bool = False) -> None:
        """Writes a checkpoint if one is due, or if forced."""
        if not (force and self._manager.latest_step() == step):
            self._manager.save(step, args=self._ocp.args.StandardSave(state), force=force)

    def log(self, step: int, tokens: int, **values: float) -> None:
        """Appends metrics and shows them with tokens per second and the time left.

        Args:
          step: steps done.
          tokens: tokens trained on so far.
          values: what was measured.
        """
        now = time.monotonic()
        seconds = max(now - self._started, 1e-9)
        rate = (tokens - self._start_tokens) / seconds
        left = (self.total_steps - step) * seconds / max(step - self._start_step, 1)
        with (self.directory / _METRICS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "tokens": tokens, "tokens_per_second": rate, **values}) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in values.items())
        text = f"step {step}/{self.total_steps}  {shown}  {rate:,.0f} tok/s  {_clock(left)} left"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
            self._line = True
        else:
            sys.stderr.write(text + "\n")
        sys.stderr.flush()

    def say(self, text: str) -> None:
        """One whole line of progress."""
        sys.stderr.write(("\n" if self._line else "") + text + "\n")
        sys.stderr.flush()
        self._line = False

    def metrics(self) -> list[dict[str, Any]]:
        """All metrics so far; a last line that a kill cut short is left out."""
        try:
            lines = (self.directory / _METRICS).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return []
        read = []
        for line in lines:
            try:
                read.append(json.loads(line))
            except ValueError:
                break
        return read

    def finish(self, plotted: tuple[str, ...] = ("loss",)) -> None:
        """Waits for checkpoints, and plots the learning curve if matplotlib is installed."""
        self._manager.wait_until_finished()
        self._manager.close()
        if _plot(self.metrics(), plotted, self.directory / _CURVE):
            self.say(f"learning curve: {self.directory / _CURVE}")


def check_folder(directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Whether a run with these settings may use a folder, and the settings as JSON holds them; writes nothing.

    Raises:
      UsageError: as `Run`.
    """
    folder = Path(directory).absolute()
    wanted = json.loads(json.dumps(dict(settings)))
    if not folder.exists():
        return wanted
    if not folder.is_dir():
        raise UsageError(f"--out {folder}: a file, not a folder")
    if not any(folder.iterdir()):
        return wanted
    try:
        found = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise UsageError(
            f"--out {folder}: not empty, and no training run; give a new folder or one to resume"
        ) from None
    names = sorted({*found, *wanted})
    changed = [f"{n}: {found.get(n)!r} -> {wanted.get(n)!r}" for n in names if found.get(n) != wanted.get(n)]
    if changed:
        raise UsageError(
            f"--out {folder}: holds a run with other settings ({'; '.join(changed)}); "
            "use them again, or give a new folder"
        )
    return wanted


def start_folder(directory: str | os.PathLike[str], settings: Mapping[str, Any]) -> None:
    """Makes a run's folder and writes its settings, which a resumed run must have too.

    Raises:
      UsageError: as `Run`.
    """
    folder = Path(directory).absolute()
    wanted = check_folder(folder, settings)
    folder.mkdir(parents=True, exist_ok=True)
    _write_atomically(folder / _SETTINGS, json.dumps(wanted, indent=2) + "\n")


def ocp_shape(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array, without its values."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _plot(metrics: list[dict[str, Any]], names: tuple[str, ...], path: Path) -> bool:
    lines = {name: [(line["tokens"] / 1e6, line[name]) for line in metrics if name in line] for name in names}
    try:
        import matplotlib
    except ImportError:
        return False
    if not any(lines.values()):
        return False
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for name, points in lines.items():
        if points:
            axes.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axes.set_xlabel("tokens (millions)")
    axes.set_ylabel(", ".join(names))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return True
