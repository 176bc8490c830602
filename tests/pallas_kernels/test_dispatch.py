"""Choosing an implementation: by name, by preference, or the first that accepts."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from ssv_jax.pallas_kernels import UnsupportedKernelError, dispatch


def table(**answers: Any) -> dict[str, Any]:
    """Implementations that return a value, or raise it where it is an exception."""

    def make(value: Any) -> Any:
        def implementation(*args: Any, **kwargs: Any) -> Any:
            if isinstance(value, Exception):
                raise value
            return value, args, kwargs

        return implementation

    return {name: make(value) for name, value in answers.items()}


REFUSES = UnsupportedKernelError("head_dim 8 is not a multiple of 16")


def test_none_takes_the_first_that_accepts_and_never_the_reference():
    """The slow reference chosen silently where everything else refuses."""
    full = table(fast=REFUSES, xla="xla", reference="reference")
    assert dispatch.run("op", full, None, 1, a=2) == ("xla", (1,), {"a": 2})
    with pytest.raises(UnsupportedKernelError, match="no implementation accepts this call: fast: head_dim 8"):
        dispatch.run("op", table(fast=REFUSES, reference="reference"), None)


def test_a_name_never_falls_back():
    """A benchmark of a kernel that measured the fallback."""
    with pytest.raises(UnsupportedKernelError, match="head_dim 8"):
        dispatch.run("op", table(fast=REFUSES, xla="xla"), "fast")
    assert dispatch.run("op", table(fast=REFUSES, reference="r"), "reference")[0] == "r"


def test_a_sequence_is_an_order_of_preference():
    full = table(a="a", b="b", c=REFUSES)
    assert dispatch.run("op", full, ("c", "b", "a"))[0] == "b"
    assert dispatch.run("op", full, ["a", "b"])[0] == "a"


def test_all_refusals_are_reported():
    both = table(a=REFUSES, b=UnsupportedKernelError("no GPU"))
    with pytest.raises(UnsupportedKernelError, match=r"^op: .*a: head_dim 8 .*; b: no GPU$"):
        dispatch.run("op", both, ("a", "b"))


@pytest.mark.parametrize("name", ["cuda", ("xla", "cuda"), (), []])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(ValueError, match="op: unknown implementation .*known: xla, reference"):
        dispatch.run("op", table(xla="xla", reference="reference"), name)


def test_other_errors_are_not_refusals():
    """A bug inside a kernel hidden by falling back to another one."""
    with pytest.raises(ZeroDivisionError):
        dispatch.run("op", table(fast=ZeroDivisionError("bug"), xla="xla"), None)


def test_what_none_chose_is_logged_once_with_the_refusals(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_reported", set())
    full = table(fast=REFUSES, xla="xla")
    with caplog.at_level(logging.INFO, logger=dispatch.logger.name):
        dispatch.run("op", full, "xla")
        assert not caplog.records
        for _ in range(3):
            dispatch.run("op", full, None)
    assert [record.getMessage() for record in caplog.records] == [
        "op uses xla (fast: head_dim 8 is not a multiple of 16)"
    ]
