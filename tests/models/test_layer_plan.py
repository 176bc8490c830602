"""Which layers select and which inherit."""

from __future__ import annotations

import dataclasses

import pytest

from ssv_jax.models.layer_plan import LayerPlan


def test_every_refreshes_at_multiples():
    assert LayerPlan.every(5) == LayerPlan(refresh=(True,) * 5)
    assert LayerPlan.every(5, 2).refresh == (True, False, True, False, True)
    assert LayerPlan.every(4, 3).refresh == (True, False, False, True)
    assert LayerPlan.every(3, 99).refresh == (True, False, False)


def test_all_refresh():
    assert LayerPlan.every(3).all_refresh
    assert not LayerPlan.every(3, 2).all_refresh
    assert LayerPlan.every(1, 2).all_refresh


def test_layer_zero_must_select():
    """A first layer with nothing to inherit."""
    with pytest.raises(ValueError, match="layer plan: layer 0 must be a refresh layer, it has nothing to inherit"):
        LayerPlan(refresh=(False, True))


def test_a_plan_needs_layers():
    with pytest.raises(ValueError, match="layer plan: needs at least one layer"):
        LayerPlan(refresh=())


@pytest.mark.parametrize("interval", [0, -3])
def test_interval_must_be_positive(interval):
    with pytest.raises(ValueError, match=f"refresh-every must be >= 1, got {interval}"):
        LayerPlan.every(4, interval)


def test_a_plan_is_static():
    """A plan that cannot be a jit static argument, or that is mutated after compilation."""
    assert hash(LayerPlan.every(4, 2)) == hash(LayerPlan(refresh=(True, False, True, False)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        LayerPlan.every(2).refresh = (True,)


def test_refresh_at_given_layers():
    assert LayerPlan.at(4, (0, 3)).refresh == (True, False, False, True)
    assert LayerPlan.at(2, (1, 0, 0)) == LayerPlan.every(2)


@pytest.mark.parametrize("layer", [4, -1])
def test_a_layer_that_does_not_exist_is_refused(layer):
    """A typo in a plan that silently refreshes less often."""
    with pytest.raises(ValueError, match=f"layer plan: no layer {layer}, the model has layers 0 to 3"):
        LayerPlan.at(4, (0, layer))
    with pytest.raises(ValueError, match="layer 0 must be a refresh layer"):
        LayerPlan.at(4, (1,))
