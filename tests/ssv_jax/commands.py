"""Running a command line in the test process."""

from __future__ import annotations


def run(main, capsys, *argv: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr; a traceback on stderr fails the test."""
    try:
        status = main(argv)
    except SystemExit as end:  # argparse
        status = end.code
    out = capsys.readouterr()
    assert "Traceback" not in out.err
    return status, out.out, out.err
