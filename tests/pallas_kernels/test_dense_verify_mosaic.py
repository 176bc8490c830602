"""The Hopper kernel of dense attention: interpreted on the CPU, lowered for CUDA, run on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import UnsupportedKernelError
from tests.pallas_kernels.mosaic_inputs import Call, abstract_call, make_call, op_module, relative_error

ops = op_module("dense_verify.mosaic_gpu")
reference = op_module("dense_verify.reference")
cases = op_module("dense_verify.cases")
tiles = op_module("dense_verify.tiles")


def arguments(call: Call, work: Any) -> tuple[Any, ...]:
    q = call.q[:, -work.asked :] if work.asked else call.q
    return q, call.cached.k, call.cached.v, call.tree.k, call.tree.v, call.queries


def run(call: Call, work: Any, interpret: Any = None) -> jax.Array:
    options = {"scale": call.scale, "window": work.reach, "config": work.config}
    return ops.lowered(*arguments(call, work), **options, interpret=interpret)


def definition(call: Call, work: Any) -> jax.Array:
    return reference.dense_verify(*arguments(call, work), scale=call.scale, window=work.reach)


@pytest.mark.parametrize("name", ["decode", "ragged", "in_turn", "one_left", "draft"])
def test_interpreted_kernel_follows_the_definition(name):
    """Masks at the edges of tiles, cache, window and tree; splits; barriers; poison past the length read anywhere."""
    work = cases.SMALL[name]
    call = make_call(work)
    got = run(call, work, plgpu.InterpretGPUParams())
    assert got.dtype == jnp.float32
    assert relative_error(got, definition(call, work)) < cases.TOLERANCE[work.dtype]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["left_over", "wide_tree", "before_the_window"])
def test_interpreted_kernel_with_larger_trees(name):
    """Warpgroups without a row tile, tree tiles that a block of rows sees nothing of, windows within the tree."""
    work = cases.SMALL[name]
    call = make_call(work)
    got = run(call, work, plgpu.InterpretGPUParams())
    assert relative_error(got, definition(call, work)) < cases.TOLERANCE[work.dtype]


@pytest.mark.parametrize("name", cases.LOWERED)
def test_kernel_lowers_for_cuda(name):
    """What the interpreter accepts and the compiler refuses: copies, layouts, operand shapes."""
    work = cases.LOWERED[name]
    call = abstract_call(work)
    lowered = jax.jit(lambda call: run(call, work)).trace(call).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_unsupported_calls_say_why():
    """A dtype, a head size or a device that the kernel has no code for."""
    work = cases.SMALL["decode"]
    call = make_call(work)
    with pytest.raises(UnsupportedKernelError, match="float32"):
        run(dataclasses.replace(call, q=call.q.astype(jnp.float32)), work)
    with pytest.raises(UnsupportedKernelError, match="head dim"):
        run(make_call(dataclasses.replace(work, dim=32)), work)
    if jax.default_backend() == "cpu":
        with pytest.raises(UnsupportedKernelError, match="GPU"):
            ops.dense_verify(*arguments(call, work), scale=1.0, window=None)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("heads", [1, 2, 3, 8, 32])
def test_every_choice_of_tiles_fits_the_device(heads, dim):
    """More shared memory than there is, stages that warpgroups cannot take in turn, more partial results than fit."""
    for row_tiles in (1, 2, 3, 4, 5, 7, 9, 32, 128):
        for keys in (64, 1000, 65536, 131072, 524288):
            config = tiles.heuristic(row_tiles=row_tiles, heads=heads, keys=keys, dim=dim)
            alone = row_tiles % config.warpgroups == 1 and config.warpgroups > 1
            assert not alone or config.stages % config.warpgroups == 0
            assert config.splits * (config.warpgroups if alone else 1) <= tiles.MOST_PARTIALS
            shared = config.warpgroups * 64 * dim * 2 + config.stages * config.tile * dim * 4
            assert shared + tiles.BARRIERS <= tiles.SHARED_MEMORY
            assert config.tile <= (64 if dim == 128 and config.warpgroups == 3 else 128)


def test_long_contexts_fill_the_device():
    """Splits that leave multiprocessors idle while others have all the keys."""
    for row_tiles, heads in ((1, 8), (1, 2), (2, 8), (5, 8), (9, 8), (32, 8)):
        config = tiles.heuristic(row_tiles=row_tiles, heads=heads, keys=65536, dim=128)
        blocks = heads * config.splits * -(-row_tiles // config.warpgroups)
        waves = -(-blocks // tiles.CORES)
        assert blocks / (waves * tiles.CORES) > 0.9 or config.splits * config.warpgroups == tiles.MOST_PARTIALS


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.SMALL)
def test_kernel_on_a_gpu(name):
    """Everything that the interpreter does not model: copies, barriers, registers."""
    work = cases.SMALL[name]
    call = make_call(work)
    function = jax.jit(lambda call: run(call, work))
    first = np.asarray(function(call))
    assert relative_error(first, definition(call, work)) < cases.TOLERANCE[work.dtype]
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(function(call)))
