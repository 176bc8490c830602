"""Trained values start as the dense model and merge by the formula that the delta format states."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.models.config import LlamaConfig, NSAConfig
from ssv_jax.models.delta import Delta, DeltaBase, DeltaInfo
from ssv_jax.models.delta import merge as merge_delta
from ssv_jax.models.llama import param_shapes, random_params
from ssv_jax.training.forward import hidden_states, stack_params, unstack_params
from ssv_jax.training.lora import TARGETS, init_trained, merge

NSA = NSAConfig(
    cmp_fn="weighted", cmp_pe="kv", kernel_size=4, kernel_stride=2, block_size=8, n_selected=4, gate_bias=True
)
DENSE = LlamaConfig(
    vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8
)
SPARSE = dataclasses.replace(DENSE, nsa=NSA)


def trained(rank: int = 3, gate_bias: tuple[float, float, float] = (-4.0, 2.0, -2.0), seed: int = 0) -> dict:
    values = init_trained(SPARSE, rank, gate_bias, seed)
    rng = np.random.default_rng(seed)
    return {k: v + jnp.asarray(rng.standard_normal(v.shape, np.float32)) * 0.1 for k, v in values.items()}


def test_a_closed_start_is_the_dense_model() -> None:
    """Gates that pass the selected branch alone, with every block selected, change nothing."""
    params = random_params(DENSE, 1)
    dense = stack_params(DENSE, {k: v * 10 for k, v in params.items()})
    everything = dataclasses.replace(SPARSE, nsa=dataclasses.replace(NSA, n_selected=64))
    start = init_trained(everything, 4, (-60.0, 60.0, -60.0), 0)
    tokens = jnp.arange(50)[None] % 31
    want = hidden_states(DENSE, dense, tokens).final
    got = hidden_states(everything, merge(dense, start, 1.0), tokens).final
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)


def test_merged_values_are_those_of_the_delta_format() -> None:
    params, values = random_params(DENSE, 2), trained()
    merged = unstack_params(SPARSE, merge(stack_params(DENSE, params), values, 0.5))
    arrays = {
        f"layers/{i}/{name.removeprefix('layers/')}": np.asarray(row)
        for name, value in values.items()
        for i, row in enumerate(value)
    }
    info = DeltaInfo(base=DeltaBase(model="x"), nsa=NSA, lora_scale=0.5)
    want = merge_delta(DENSE, params, Delta(info=info, arrays=arrays, source="test"))
    assert set(want) == set(param_shapes(SPARSE))
    changed = [name for name in params if not np.array_equal(want[name], params[name])]
    assert len(changed) == len(TARGETS) * DENSE.num_layers
    for name, value in want.items():
        np.testing.assert_allclose(merged[name], value, atol=1e-6, err_msg=name)


def test_rank_zero_trains_only_what_is_new() -> None:
    assert not [name for name in init_trained(SPARSE, 0, (0.0, 0.0, 0.0), 0) if "lora" in name]


@pytest.mark.parametrize("function", ["linear", "mlp", "mean", "pooled"])
def test_every_compressor_can_start(function: str) -> None:
    config = dataclasses.replace(SPARSE, nsa=dataclasses.replace(NSA, cmp_fn=function))
    merged = merge(stack_params(DENSE, random_params(DENSE, 3)), init_trained(config, 2, (0.0, 0.0, 0.0), 0), 1.0)
    assert set(unstack_params(config, merged)) == set(param_shapes(config))
    assert np.isfinite(hidden_states(config, merged, jnp.arange(40)[None] % 31).final).all()


def test_gates_need_a_bias() -> None:
    config = dataclasses.replace(SPARSE, nsa=dataclasses.replace(NSA, gate_bias=False))
    with pytest.raises(ValueError, match="gate_bias=true"):
        init_trained(config, 2, (0.0, 0.0, 0.0), 0)
    with pytest.raises(ValueError, match="rank"):
        init_trained(SPARSE, -1, (0.0, 0.0, 0.0), 0)
