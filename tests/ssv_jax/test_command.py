"""How commands end: a status for every kind of error, one line for a user's mistake, a traceback for ours."""

import errno
import os
import subprocess
import sys

import pytest

from ssv_jax.command import leave, run_command, run_resumable
from ssv_jax.errors import ContextLengthError, UsageError


class JaxRuntimeError(RuntimeError):
    """Named as JAX names what a device refuses."""


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (UsageError("--n must be >= 1"), 2, "error: --n must be >= 1"),
        (ContextLengthError("too long"), 1, "error: too long"),
        (FileNotFoundError("x.json: no such file"), 1, "error: x.json: no such file"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "y.json"), 1, "error: y.json: No such file"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB"), 1, "error: out of memory: use fewer rows"),
        (KeyboardInterrupt(), 130, "\nstopped here"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(capsys, error: BaseException, status: int, says: str) -> None:
    def work() -> None:
        raise error

    assert run_command(work, smaller="fewer rows", interrupted="stopped here") == status
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.startswith(says) and len(shown.err.strip().splitlines()) == 1


@pytest.mark.parametrize("error", [ValueError("shape"), NotImplementedError("rule"), JaxRuntimeError("INTERNAL: x")])
def test_errors_of_the_program_are_not_swallowed(error: Exception) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)):
        run_command(work, smaller="")


def test_a_command_that_resumes_says_how(capsys) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    def refuse() -> None:
        raise ValueError("the loss is nan")

    assert run_resumable(stop, remains="from step 3", smaller="") == 130
    assert "the same command goes on from step 3" in capsys.readouterr().err
    assert run_resumable(refuse, remains="", smaller="") == 1
    assert run_resumable(lambda: None, remains="", smaller="") == 0


@pytest.mark.parametrize(("closed", "says"), [(True, ""), (False, "error: No space left on device\n")])
def test_output_that_cannot_be_written_ends_quietly(closed: bool, says: str) -> None:
    """The interpreter flushes again at its end, which must not fail a second time."""
    program = (
        "import sys; from ssv_jax.command import run_command\n"
        "def work():\n"
        "    print('text' * 9999); sys.stdout.flush()\n"
        "raise SystemExit(run_command(work, smaller=''))"
    )
    if closed:
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open("/dev/full", os.O_WRONLY)
    try:
        ended = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (1, says)


def test_an_interruption_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that still compile would be waited for."""
    left: list[int] = []
    monkeypatch.setattr("os._exit", left.append)
    for status in (130, 2):
        with pytest.raises(SystemExit) as ended:
            leave(status)
        assert ended.value.code == status
    assert left == [130]
