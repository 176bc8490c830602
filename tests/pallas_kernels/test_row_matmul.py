"""The dense steps of a layer: portable, interpreted as on a GPU, and lowered for one."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels.errors import ShapeError, UnsupportedKernelError
from ssv_jax.pallas_kernels.row_matmul import gated_matmul, matmul_parts, residual_norm, total
from tests.pallas_kernels.mosaic_inputs import op_module, relative_error

mosaic, reference = op_module("row_matmul.mosaic_gpu"), op_module("row_matmul.reference")
INTERPRET = plgpu.InterpretGPUParams()
TOLERANCE = 4e-3  # bfloat16 rounds to 2^-9


def random(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def test_interpreted_products_follow_the_definition():
    """A slice of the contraction left out or doubled, a tile past the matrix, rows that a padded one spoils."""
    x, weights = random(0, 5, 512), (random(1, 512, 192), random(2, 512, 27))
    got = jax.jit(lambda x, weights: mosaic.matmul_parts(x, weights, interpret=INTERPRET))(x, weights)
    want = reference.matmul_parts(x, weights, (jnp.float32, jnp.float32))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.shape[0] > 1, "the contraction is not split, so splits are not tested"
        assert relative_error(total(ours, *theirs.shape[1:], jnp.float32), theirs[0]) < 1e-5
    alone = jax.jit(lambda x, weights: mosaic.matmul_parts(x, weights, interpret=INTERPRET))(x[2:3], weights)
    for one, all_rows in zip(alone, got, strict=True):
        np.testing.assert_allclose(one[:, 0], all_rows[:, 2], rtol=1e-5, atol=1e-5)


def test_interpreted_gated_product_follows_the_definition():
    x, weight = random(3, 9, 128), random(4, 128, 2, 128)
    got = jax.jit(lambda x, weight: mosaic.gated_matmul(x, weight, interpret=INTERPRET))(x, weight)
    assert relative_error(got[:9], reference.gated_matmul(x, weight)) < TOLERANCE


@pytest.mark.parametrize(("parts", "width"), [("float32", 1024), ("whole", 1024), ("none", 1024), ("float32", 1096)])
def test_interpreted_norm_follows_the_definition(parts, width):
    """Columns left out or counted twice where the width is no multiple of a thread block's."""
    x, scale, added = random(5, 3, width), random(6, width), random(7, 4, 8, width, dtype=jnp.float32)
    added = {"float32": added, "whole": added[:1].astype(jnp.bfloat16), "none": None}[parts]
    got = jax.jit(lambda *arrays: mosaic.residual_norm(*arrays, 1e-5, interpret=INTERPRET))(x, added, scale)
    for ours, theirs in zip(got, reference.residual_norm(x, added, scale, 1e-5), strict=True):
        assert relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 65])
def test_steps_of_a_layer_lower_to_one_kernel_each(rows):
    """What the interpreter accepts and the compiler refuses."""

    def shape(*dims: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype)

    x, small, parts = shape(rows, 4096), shape(rows, 576), shape(8, -(-rows // 8) * 8, 4096, dtype=jnp.float32)
    calls = (
        (lambda x, *w: mosaic.matmul_parts(x, w), x, shape(4096, 6144), shape(4096, 96)),
        (mosaic.gated_matmul, x, shape(4096, 2, 14336)),
        (lambda x, p, s: mosaic.residual_norm(x, p, s, 1e-5), x, parts, shape(4096)),
        (lambda x, *w: mosaic.matmul_parts(x, w), small, shape(576, 960), shape(576, 27)),
        (
            lambda x, p, s: mosaic.residual_norm(x, p, s, 1e-5),
            small,
            shape(2, -(-rows // 8) * 8, 640, dtype=jnp.float32),
            shape(576),
        ),
    )
    for function, *arguments in calls:
        text = jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 1


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", ["xla", "reference"])
def test_portable_steps_follow_the_definition(name, rows):
    """A single row takes the path that XLA reads fast, where the matrix is large enough."""
    x, weights = random(8, rows, 2048), (random(9, 2048, 2048), random(10, 2048, 24))
    got = matmul_parts(x, weights, (jnp.bfloat16, jnp.float32), implementation=name)
    want = reference.matmul_parts(x, weights, (jnp.float32, jnp.float32))
    for ours, theirs in zip(got, want, strict=True):
        assert relative_error(total(ours, rows, theirs.shape[2], jnp.float32), theirs[0]) < TOLERANCE
    weight = random(11, 2048, 2, 64)
    ours = gated_matmul(x, weight, implementation=name)
    assert relative_error(ours, reference.gated_matmul(x, weight)) < 3 * TOLERANCE
    for ours, theirs in zip(
        residual_norm(x, got[0], random(12, 2048), eps=1e-5, implementation=name),
        reference.residual_norm(x, got[0], random(12, 2048), 1e-5),
        strict=True,
    ):
        assert relative_error(ours, theirs) < TOLERANCE


def test_what_does_not_fit_is_refused():
    with pytest.raises(ShapeError, match="expected 64 rows"):
        matmul_parts(random(0, 2, 64), (random(0, 32, 8),), (jnp.float32,))
    for x, weight, message in (
        (random(0, 2, 64, dtype=jnp.float32), random(0, 64, 64), "bfloat16"),
        (random(0, 161, 64), random(0, 64, 64), "at most 160 rows"),
        (random(0, 2, 96), random(0, 96, 64), "multiple of 64 rows"),
        (random(0, 2, 64), random(0, 64, 132), "8 columns"),
    ):
        with pytest.raises(UnsupportedKernelError, match=message):
            mosaic.matmul_parts(x, (weight,))
    with pytest.raises(UnsupportedKernelError, match="512 to 8192"):
        mosaic.residual_norm(random(0, 2, 448), None, random(0, 448), 1e-5)
