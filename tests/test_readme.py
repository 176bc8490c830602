"""The README's Python examples run as they stand, and its commands are the ones that are tested."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ssv_jax.models.errors import CheckpointError
from ssv_jax.registry import DEFAULT_MODEL, resolve

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def run(source: str) -> str:
    """Output of an example in a process of its own, as a user runs it: without the tests' shape checks."""
    command = [sys.executable, "-W", "error", "-c", source]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_engine_example():
    """The first thing a user copies fails, or answers nonsense."""
    try:
        resolve(DEFAULT_MODEL)
    except CheckpointError as error:
        pytest.skip(str(error))
    out = run(EXAMPLES[0])
    assert "The capital of France is Paris. stop" in out


def test_pure_function_example():
    """The pipeline example drifts from the signatures."""
    assert re.match(r"\[[\d ,]+\] \d+$", run(EXAMPLES[1]).strip().replace("\n", " "))


def test_all_examples_are_run():
    """An example that nobody checks."""
    assert len(EXAMPLES) == 2
