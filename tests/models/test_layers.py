"""Projections, norm, rotary embedding and feed-forward against numpy."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.models.config import Llama3Scaling, RopeConfig
from ssv_jax.models.layers import Projection, RMSNorm, SwiGLU, rope_angles, rope_frequencies, rotate
from tests.golden import numpy_nsa as oracle

RNG = np.random.default_rng(0)
LLAMA31 = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)


def normal(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("bias", [False, True])
def test_projection_contracts_all_its_input_axes(bias):
    """Axes flattened in another order than the kernel's."""
    layer = Projection((2, 3, 4), (5, 6), bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0))
    kernel, offset, x = normal(2, 3, 4, 5, 6), normal(5, 6), normal(2, 7, 2, 3, 4)
    layer.kernel[...] = jnp.asarray(kernel)
    if bias:
        assert layer.bias is not None
        layer.bias[...] = jnp.asarray(offset)
    want = np.einsum("btkgd,kgdef->btef", x, kernel) + (offset if bias else 0)
    np.testing.assert_allclose(layer(jnp.asarray(x)), want, atol=1e-4)


def test_projection_accumulates_in_the_asked_dtype():
    """Gates and logits rounded to bfloat16 before anyone asked for float32."""
    layer = Projection((64,), (3,), bias=True, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = jnp.asarray(normal(1, 2, 64), jnp.bfloat16)
    assert layer(x).dtype == jnp.bfloat16
    wide = layer(x, dtype=jnp.float32)
    assert wide.dtype == jnp.float32
    exact = np.asarray(x, np.float64) @ np.asarray(layer.kernel[...], np.float64)
    np.testing.assert_allclose(wide, exact, atol=1e-6)


def test_rms_norm():
    norm = RMSNorm(16, eps=1e-5, dtype=jnp.float32)
    scale, x = normal(16), normal(2, 3, 16) * 1e-3  # small, so that eps matters
    norm.scale[...] = jnp.asarray(scale)
    np.testing.assert_allclose(
        norm(jnp.asarray(x)), oracle.rms_norm(x.astype(float), scale, 1e-5), rtol=1e-5, atol=1e-7
    )


def test_rms_norm_is_computed_in_float32():
    """A sum of squares that overflows or loses its digits in half precision."""
    norm = RMSNorm(256, eps=1e-5, dtype=jnp.bfloat16)
    x = jnp.asarray(normal(1, 256) + 3, jnp.bfloat16)
    got = norm(x)
    assert got.dtype == jnp.bfloat16
    want = oracle.rms_norm(np.asarray(x, np.float64), 1.0, 1e-5)
    # Half an ulp of bfloat16: rounded once, at the end.
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8)


@pytest.mark.parametrize("bias", [False, True])
def test_swiglu(bias):
    """Gate and up swapped."""
    layer = SwiGLU(8, 12, bias=bias, dtype=jnp.float32, rngs=nnx.Rngs(0))
    gate_up, down, x = normal(8, 2, 12), normal(12, 8), normal(2, 3, 8)
    layer.gate_up.kernel[...], layer.down.kernel[...] = jnp.asarray(gate_up), jnp.asarray(down)
    b1, b2 = normal(2, 12), normal(8)
    if bias:
        assert layer.gate_up.bias is not None and layer.down.bias is not None
        layer.gate_up.bias[...], layer.down.bias[...] = jnp.asarray(b1), jnp.asarray(b2)
    hidden = np.einsum("bte,esf->btsf", x, gate_up) + (b1 if bias else 0)
    want = (oracle.silu(hidden[..., 0, :].astype(float)) * hidden[..., 1, :]) @ down + (b2 if bias else 0)
    np.testing.assert_allclose(layer(jnp.asarray(x)), want, atol=2e-5)


@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(),
        RopeConfig(theta=5e5, scaling=LLAMA31),
        RopeConfig(theta=5e5, scaling=dataclasses.replace(LLAMA31, factor=32.0)),
        RopeConfig(theta=1e4, scaling=dataclasses.replace(LLAMA31, original_max_position=500)),
    ],
)
def test_frequencies_equal_the_oracles(rope, dim):
    """Llama 3 scaling with the bounds swapped, or blended the wrong way (fault 29)."""
    want = oracle.rope_frequencies(dataclasses.asdict(rope), dim)
    np.testing.assert_allclose(rope_frequencies(dim, rope), want, rtol=1e-6)


def test_llama_3_frequencies_by_hand():
    """Llama 3.1's own values: pairs 0 to 28 keep their frequency, 36 and up have an eighth (fault 29)."""
    plain = 5e5 ** (-np.arange(64) / 64)
    got = rope_frequencies(128, RopeConfig(theta=5e5, scaling=LLAMA31))
    np.testing.assert_allclose(got[:29], plain[:29], rtol=1e-6)
    np.testing.assert_allclose(got[36:], plain[36:] / 8, rtol=1e-6)
    assert np.all((got[29:35] < plain[29:35]) & (got[29:35] > plain[29:35] / 8))


@pytest.mark.parametrize("position", [0, 1, 2047, 2048, 2049, 16383, 131071])
def test_rotation_has_no_length_limit(position):
    """A table of angles sized by some configuration: garbage from 2,048 on (fault 8)."""
    rope, x = RopeConfig(theta=5e5), normal(1, 1, 64)
    cos, sin = rope_angles(jnp.array([position]), 64, rope)
    got = rotate(jnp.asarray(x), cos[:, None], sin[:, None])
    want = oracle.apply_rope(x.astype(float), [position], dataclasses.asdict(rope))
    # The angle is a float32: up to half an ulp of the position, in radians.
    np.testing.assert_allclose(got, want, atol=1e-5 + 4 * position * 2.0**-24)


def test_rotation_is_half_split_and_relative():
    """Interleaved pairs: every loaded checkpoint speaks nonsense after a few tokens."""
    x = np.zeros((1, 8), np.float32)
    x[0, 1] = 1.0
    cos, sin = rope_angles(jnp.array([3]), 8, RopeConfig(theta=100.0))
    angle = 3 * 100.0 ** (-2 / 8)
    want = np.zeros(8)
    want[1], want[5] = math.cos(angle), math.sin(angle)
    np.testing.assert_allclose(rotate(jnp.asarray(x), cos, sin)[0], want, atol=1e-6)
    q, k = normal(1, 8), normal(1, 8)
    dots = []
    for shift in (0, 100):
        angles = rope_angles(jnp.array([[11 + shift], [4 + shift]]), 8, RopeConfig())
        a, b = (rotate(jnp.asarray(y), angles[0][i], angles[1][i]) for i, y in enumerate((q, k)))
        dots.append(float(jnp.sum(a * b)))
    assert abs(dots[0] - dots[1]) < 1e-4


def test_rotation_keeps_the_dtype():
    cos, sin = jax.eval_shape(lambda: rope_angles(jnp.arange(4), 8, RopeConfig()))
    assert cos.dtype == sin.dtype == jnp.float32
    rotated = jax.eval_shape(lambda c, s: rotate(jnp.zeros((4, 8), jnp.bfloat16), c, s), cos, sin)
    assert rotated.dtype == jnp.bfloat16
