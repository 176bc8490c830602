"""Refresh and reuse layers on Hopper: interpreted on the CPU, lowered for CUDA, run on a GPU."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

from ssv_jax.pallas_kernels import UnsupportedKernelError, implementations, refresh_attention, reuse_attention
from tests.pallas_kernels.mosaic_inputs import Call, abstract_call, make_call, op_module, relative_error

ops = op_module("nsa_fused.mosaic_gpu")
reference = op_module("nsa_fused.reference")
cases = op_module("nsa_fused.cases")
tiles = op_module("sparse_verify.tiles")


def config_of(work: Any) -> Any:
    selected, window, compressed = work.splits
    return tiles.TileConfig(selected=selected, window=window, compressed=compressed, last=1, stages=work.stages)


def reuse(call: Call, config: Any, interpret: Any = None) -> jax.Array:
    arguments = (call.q, call.cached, call.tree, call.queries, call.gates, call.selection)
    options = {"geometry": call.geometry, "scale": call.scale}
    return ops.lowered_reuse(*arguments, **options, config=config, interpret=interpret)


def definition(call: Call) -> jax.Array:
    arguments = (call.q, call.cached, call.tree, call.queries, call.gates, call.selection)
    return reference.reuse_attention(*arguments, geometry=call.geometry, scale=call.scale)


@pytest.mark.parametrize("name", ["full_cache", "one_row"])
def test_interpreted_reuse_layer_follows_the_definition(name):
    """Entries past the length or of another path; a branch without keys; gates in another order."""
    work = cases.SMALL[name]
    call = make_call(work)
    got = reuse(call, config_of(work), plgpu.InterpretGPUParams())
    assert relative_error(got, definition(call)) < cases.TOLERANCE[work.dtype]


KERNEL = "custom_call @mosaic_gpu"


@pytest.mark.parametrize("name", ["decode_64k", "tree5_64k", "tree65_64k", "sixteen_heads"])
def test_reuse_layer_lowers_to_few_kernels(name):
    """What the interpreter accepts and the compiler refuses; launches that nobody counted."""
    call = abstract_call(cases.LOWERED[name])
    text = jax.jit(lambda call: reuse(call, None)).trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert 1 <= text.count(KERNEL) <= 2


@pytest.mark.parametrize("name", ["decode_64k", "tree65_64k"])
def test_refresh_layer_lowers(name):
    """Shapes of the selection's kernels that do not fit the next kernel; more launches than were counted."""
    work = cases.LOWERED[name]
    call = abstract_call(work)

    def refresh(call: Call) -> Any:
        arguments = (call.q, call.cached, call.tree, call.queries, call.gates)
        return ops.lowered_refresh(*arguments, geometry=call.geometry, scale=call.scale, group=work.group)

    text = jax.jit(refresh).trace(call).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count(KERNEL) <= (4 if work.group in (1, 2, 4) else 5)


def test_chunks_of_prompts_fill_row_tiles():
    """A visit list for every token of a prompt, whose few heads leave a row tile nearly empty; regrouped trees."""
    call = abstract_call(cases.LOWERED["chunk_64k"])

    def refresh(call: Call) -> Any:
        arguments = (call.q, call.cached, call.tree, call.queries, call.gates)
        return ops.lowered_refresh(*arguments, geometry=call.geometry, scale=call.scale, group=1)

    traced = jax.jit(refresh).trace(call)
    assert traced.out_info[1].schedule.group == 16
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count(KERNEL) == 4
    assert [ops.visit_group(129, 4, group) for group in (1, 5)] == [1, 5]
    assert [ops.visit_group(512, heads, 2) for heads in (1, 3, 16)] == [16, 16, 4]


def test_layers_share_their_kernels():
    """A model that takes minutes to compile, as every layer lowers kernels of its own."""
    work = cases.LOWERED["tree5_64k"]
    call = abstract_call(work)
    options = {"geometry": call.geometry, "scale": call.scale}

    def layers(call: Call, count: int) -> Any:
        q = call.q
        for _ in range(count):
            arguments = (q, call.cached, call.tree, call.queries, call.gates)
            q, selection = ops.lowered_refresh(*arguments, **options, group=work.group)
            q = ops.lowered_reuse(q.astype(call.q.dtype), *arguments[1:], selection, **options).astype(call.q.dtype)
        return q

    def text(count: int) -> str:
        return jax.jit(layers, static_argnums=1).trace(call, count).lower(lowering_platforms=("cuda",)).as_text()

    one, three = text(1), text(3)
    assert one.count(KERNEL) == three.count(KERNEL) <= (6 if work.group in (1, 2, 4) else 7)
    assert len(three) < 1.2 * len(one)
    assert len(one) < 4e6  # escaped; a third of it in the program


def test_other_devices_are_refused_with_a_reason():
    """A crash, or a silent portable run, where a kernel was asked for by name."""
    if jax.default_backend() != "cpu":
        pytest.skip("needs a machine without a GPU")
    call = make_call(cases.SMALL["decode"])
    arguments = (call.q, call.cached, call.tree, call.queries, call.gates, call.selection)
    options = {"geometry": call.geometry, "scale": call.scale}
    with pytest.raises(UnsupportedKernelError, match="GPU"):
        ops.reuse_attention(*arguments, **options)
    with pytest.raises(UnsupportedKernelError, match="reuse_attention: .* mosaic_gpu: needs an NVIDIA GPU"):
        reuse_attention(*arguments, **options, implementation="mosaic_gpu")
    with pytest.raises(UnsupportedKernelError, match="refresh_attention: .* mosaic_gpu: needs an NVIDIA GPU"):
        refresh_attention(*arguments[:5], **options, implementation="mosaic_gpu")
    assert implementations()[0] == "mosaic_gpu"


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.SMALL)
def test_reuse_layer_on_a_gpu(name):
    """Everything that the interpreter does not model: copies, barriers, the arrival of the last block."""
    call = make_call(cases.SMALL[name])
    function = jax.jit(lambda call: reuse(call, config_of(cases.SMALL[name])))
    first = np.asarray(function(call))
    assert relative_error(first, definition(call)) < cases.TOLERANCE[cases.SMALL[name].dtype]
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(function(call)))
