"""The Hopper kernel of the selected and window branch: interpreted on the CPU, lowered for CUDA, run on a GPU."""

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

ops = op_module("sparse_verify.mosaic_gpu")
reference = op_module("sparse_verify.reference")
cases = op_module("sparse_verify.cases")
tiles = op_module("sparse_verify.tiles")
rows = op_module("sparse_verify.mosaic_rows")


def config_of(work: Any) -> Any:
    selected, window, compressed = work.splits
    return tiles.TileConfig(selected=selected, window=window, compressed=compressed, last=1, stages=work.stages)


def run(call: Call, config: Any, interpret: Any = None) -> jax.Array:
    return ops.lowered(
        call.q,
        call.cached,
        call.tree,
        call.queries,
        call.selection.schedule,
        call.gates,
        geometry=call.geometry,
        scale=call.scale,
        config=config,
        interpret=interpret,
    )


def definition(call: Call) -> jax.Array:
    return reference.sparse_verify(
        call.q,
        call.cached,
        call.tree,
        call.queries,
        call.selection.schedule,
        call.gates,
        geometry=call.geometry,
        scale=call.scale,
    )


@pytest.mark.parametrize("name", ["block_end", "crosses_block", "ragged", "chunk"])
def test_interpreted_kernel_follows_the_definition(name):
    """Masks at the edges of blocks, cache, window and tree; splits; poison past the length read anywhere."""
    work = cases.SMALL[name]
    call = make_call(work)
    got = run(call, config_of(work), plgpu.InterpretGPUParams())
    assert got.dtype == jnp.float32
    assert relative_error(got, definition(call)) < cases.TOLERANCE[work.dtype]


@pytest.mark.parametrize("name", cases.LOWERED)
def test_kernel_lowers_for_cuda(name):
    """What the interpreter accepts and the compiler refuses: copies, layouts, operand shapes."""
    call = abstract_call(cases.LOWERED[name])
    lowered = jax.jit(lambda call: run(call, None)).trace(call).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


def test_unsupported_calls_say_why():
    """A dtype, a head size or a device that the kernel has no code for."""
    call = make_call(cases.SMALL["decode"])
    with pytest.raises(UnsupportedKernelError, match="float32"):
        run(dataclasses.replace(call, q=call.q.astype(jnp.float32)), None)
    with pytest.raises(UnsupportedKernelError, match="head dim"):
        run(dataclasses.replace(call, q=call.q[..., :32]), None)
    if jax.default_backend() == "cpu":
        with pytest.raises(UnsupportedKernelError, match="GPU"):
            ops.sparse_verify(
                call.q,
                call.cached,
                call.tree,
                call.queries,
                call.selection.schedule,
                call.gates,
                geometry=call.geometry,
                scale=call.scale,
            )


@pytest.mark.parametrize("group", [1, 3, 4, 8, 24, 32])
@pytest.mark.parametrize("heads", [1, 3, 4, 16])
@pytest.mark.parametrize("nodes", [1, 5, 65, 129])
def test_row_tiles_hold_every_node_once(nodes, heads, group):
    """Tiles that cross a group, hold more than 64 rows, or leave a node out."""
    tiling = rows.row_tiles(nodes, heads, group)
    assert group % tiling.per_tile == 0
    assert tiling.per_dense * heads <= rows.ROWS
    assert tiling.tiles * tiling.per_tile >= nodes
    assert tiling.dense_tiles * tiling.per_dense >= nodes


def test_heuristic_fills_the_device_without_tiny_splits():
    """Splits that leave most of the device idle, that only add partial results, or more than a warp can weigh."""
    few = {"lists": 8, "selected_tiles": 8, "dense_tiles": 8, "selected_keys": 17, "last_keys": 17, "window_keys": 10}
    small = tiles.heuristic(**few, compressed_keys=0)
    assert 60 <= 8 * (small.selected + small.window) <= tiles.CORES
    many = few | {"selected_tiles": 512, "dense_tiles": 256, "selected_keys": 40, "window_keys": 12}
    assert tiles.heuristic(**many, compressed_keys=65).selected <= 3
    long = tiles.heuristic(**few, compressed_keys=1024)
    assert long.selected + long.window + long.compressed <= tiles.MAX_TOTAL
    ragged = tiles.heuristic(**few | {"selected_tiles": 40, "selected_keys": 78, "last_keys": 18}, compressed_keys=0)
    assert ragged.last < ragged.selected


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.SMALL)
def test_kernel_on_a_gpu(name):
    """Everything that the interpreter does not model: copies, barriers, the arrival of the last block."""
    call = make_call(cases.SMALL[name])
    function = jax.jit(lambda call: run(call, config_of(cases.SMALL[name])))
    first = np.asarray(function(call))
    assert relative_error(first, definition(call)) < cases.TOLERANCE[cases.SMALL[name].dtype]
    for _ in range(20):
        np.testing.assert_array_equal(first, np.asarray(function(call)))
