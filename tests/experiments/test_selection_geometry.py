"""The study of geometries looks at the right tokens."""

from __future__ import annotations

import importlib

import numpy as np
import pytest


@pytest.fixture(scope="module")
def study(plain_names):
    """The script."""
    return importlib.import_module("selection_geometry")


def test_the_needle_is_found_in_the_text_not_in_the_answer(study):
    tokens = np.arange(100, 160, dtype=np.int32)
    tokens[30:33] = tokens[-3:] = [7, 8, 9]
    trial = study.tasks.Trial(tokens=tokens, item=np.array([-1, 0, 0, 0]), depth=0.5)
    asking, needle = study.where_needle_is(trial)
    assert asking.tolist() == [56, 57, 58]
    assert np.flatnonzero(needle).tolist() == list(range(30 - study.BEFORE, 33))
