"""The commit's copies: portable, interpreted as on a GPU, and lowered for one."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels.cache_append import RowMoves, append_rows
from ssv_jax.pallas_kernels.errors import ShapeError, UnsupportedKernelError
from tests.pallas_kernels.mosaic_inputs import op_module

mosaic = op_module("cache_append.mosaic_gpu")


def moves_of(*pairs: tuple[Any, Any], ascending: bool = False) -> tuple[RowMoves, ...]:
    return tuple(
        RowMoves(source=jnp.asarray(source, jnp.int32), target=jnp.asarray(target, jnp.int32), ascending=ascending)
        for source, target in pairs
    )


def arrays(
    rng: np.random.Generator, *rows: int, batch: int = 2, dtype: Any = jnp.bfloat16, dim: int = 128
) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(rng.standard_normal((batch, 2, count, dim)), dtype) for count in rows)


def by_hand(old: Any, new: Any, moves: Any, which: Any) -> list[np.ndarray]:
    out = []
    for into, rows, index in zip(old, new, which, strict=True):
        after = np.asarray(into).copy()
        for b, p in np.ndindex(*moves[index].target.shape):
            at = int(moves[index].target[b, p])
            if 0 <= at < after.shape[2]:
                after[b, :, at] = np.asarray(rows)[b, :, int(moves[index].source[b, p])]
        out.append(after)
    return out


OLD, NEW, WHICH = (64, 64, 8, 8, 16, 16, 64), (5, 5, 3, 3, 5, 5, 5), (0, 0, 1, 1, 2, 2, 0)
MOVES = (  # all, some and none of a path; the last row; a ring that wraps
    ([[0, 2, 4], [1, 3, 0]], [[10, 11, 64], [62, 63, 64]]),
    ([[2], [0]], [[3], [-1]]),
    ([[0, 2, 4], [1, 3, 0]], [[15, 0, 99], [3, 4, -1]]),
)


@pytest.mark.parametrize(("name", "dim"), [("xla", 128), ("reference", 128), ("mosaic_gpu", 128), ("mosaic_gpu", 64)])
def test_rows_go_where_they_belong_and_nowhere_else(name, dim):
    """A dropped row that lands somewhere, a row of another head or sequence, clobbered rows."""
    rng = np.random.default_rng(0)
    old, new, moves = arrays(rng, *OLD, dim=dim), arrays(rng, *NEW, dim=dim), moves_of(*MOVES)
    if name == "mosaic_gpu":
        got = jax.jit(lambda old, new, moves: mosaic.append_rows(old, new, moves, WHICH, interpret=INTERPRET))(
            old, new, moves
        )
    else:
        got = append_rows(old, new, moves, WHICH, implementation=name)
    for ours, want in zip(got, by_hand(old, new, moves, WHICH), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), want)


INTERPRET = plgpu.InterpretGPUParams()


@pytest.mark.parametrize("dim", [64, 128])
def test_all_layers_are_one_launch_in_place(dim):
    """A launch per layer, or caches that are copied."""
    layers, shape = 8, jax.ShapeDtypeStruct

    def rows(*counts: int) -> tuple[Any, ...]:
        return tuple(shape((1, 8, count, dim), jnp.bfloat16) for _ in range(layers) for count in counts)

    moves = moves_of(*((np.zeros((1, width)), np.zeros((1, width))) for width in (7, 1, 7)))
    which = (0, 0, 1, 1, 2, 2) * layers
    run = jax.jit(lambda old, new, moves: mosaic.append_rows(old, new, moves, which), donate_argnums=0)
    lowered = run.trace(rows(67584, 67584, 4223, 4223, 32, 32), rows(*[65] * 6), moves)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 1
    assert text.count("output_operand_alias<") == 6 * layers


def test_what_does_not_fit_is_refused():
    rng = np.random.default_rng(1)
    old, new, moves = arrays(rng, 8), arrays(rng, 4), moves_of(([[0], [0]], [[1], [1]]))
    with pytest.raises(ShapeError, match="pair up"):
        append_rows(old, new, moves, (0, 0))
    with pytest.raises(ShapeError, match=r"new\[0\] has shape"):
        append_rows(old, (new[0][:1],), moves, (0,))
    with pytest.raises(UnsupportedKernelError, match="old dtype"):
        mosaic.append_rows(old, arrays(rng, 4, dtype=jnp.float32), moves, (0,))
    long = moves_of((np.zeros((2, 65)), np.zeros((2, 65))))
    with pytest.raises(UnsupportedKernelError, match="at most 64 rows"):
        mosaic.append_rows(old, new, long, (0,))
