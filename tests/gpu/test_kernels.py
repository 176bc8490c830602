"""The kernels on a GPU against the definitions, and a small model with and without them."""

from __future__ import annotations

import pytest

from tests.gpu import checks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("seed", checks.SHAPES)
def test_ops_on_random_shapes(seed):
    """Boundaries of tiles and words, garbage past the length, unwritten outputs, races, any op's wrong branch."""
    assert checks.check_ops(seed)


@pytest.mark.parametrize("prompt", checks.PROMPTS)
def test_tokens_with_and_without_kernels(prompt):
    """A layer that hands a kernel other arguments than the portable op gets."""
    assert checks.check_tokens(prompt)["equal_tokens"] > 0
