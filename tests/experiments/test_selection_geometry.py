"""The study of geometries: it looks for the right tokens, and selects as the model does."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.models.config import NSAConfig
from ssv_jax.training import sparse

from ..ssv_jax.tiny import CONFIG

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def study():
    """The module; nothing of its plain names stays behind."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module("selection_geometry")
    sys.path.remove(str(FOLDER))
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and Path(str(sys.modules[name].__file__)).parent == FOLDER:
            del sys.modules[name]


def test_the_needle_is_found_in_the_text_not_in_the_answer(study):
    tokens = np.arange(100, 160, dtype=np.int32)
    tokens[30:33] = tokens[-3:] = [7, 8, 9]
    trial = study.tasks.Trial(tokens=tokens, item=np.array([-1, 0, 0, 0]), depth=0.5)
    asking, needle = study.where_needle_is(trial)
    assert asking.tolist() == [56, 57, 58]
    assert np.flatnonzero(needle).tolist() == list(range(30 - study.BEFORE, 33))


@pytest.mark.parametrize(("init", "local"), [(1, 2), (0, 1), (2, 1)])
def test_blocks_are_selected_as_in_the_model(study, init, local):
    """A forced block that takes the place of a free one, a block of the future, or a tie that goes the other way."""
    nsa = NSAConfig(kernel_size=8, kernel_stride=4, block_size=8, n_selected=5, init_blocks=init, local_blocks=local)
    config = dataclasses.replace(CONFIG, nsa=nsa)
    position = jnp.array([3, 8, 30, 77, 127])
    scores = jnp.round(8 * jax.random.uniform(jax.random.key(0), (2, len(position), 16)))
    wanted = sparse._choose(scores[None], position, config)[0]
    np.testing.assert_array_equal(study.selected(scores, position, config), wanted)
