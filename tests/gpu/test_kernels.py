"""The kernels on a GPU against the definitions, and a small model with and without them."""

from __future__ import annotations

import pytest

from tests.gpu import checks, step_checks

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


@pytest.mark.parametrize("seed", checks.SHAPES + checks.FEW_ROWS)
def test_ops_on_random_shapes(seed):
    """Boundaries of tiles and words, garbage past the length, unwritten outputs, races, any op's wrong branch."""
    assert checks.check_ops(seed)


@pytest.mark.parametrize("seed", checks.SHAPES)
def test_dense_attention_on_random_shapes(seed):
    """Masks at the edges of tiles and windows, warpgroups without rows, garbage past the length, races."""
    assert checks.check_dense(seed)


@pytest.mark.parametrize("prompt", checks.PROMPTS)
def test_tokens_with_and_without_kernels(prompt):
    """A layer that hands a kernel other arguments than the portable op gets."""
    assert checks.check_tokens(prompt)["equal_tokens"] > 0


@pytest.mark.parametrize("seed", step_checks.SEEDS)
def test_steps_around_attention_on_random_shapes(seed):
    """Rows that depend on how many there are, reads past the end, a slice or a part left out, races."""
    assert step_checks.check_products(seed)
    step_checks.check_nodes(seed)


@pytest.mark.parametrize("nodes", step_checks.NODES)
def test_model_whose_layers_take_all_kernels(nodes):
    """Steps that hand each other padded rows, a stream added twice, entries or tails of rejected nodes."""
    assert step_checks.check_model(nodes)
