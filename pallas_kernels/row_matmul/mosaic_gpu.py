"""The dense steps of a decoder layer on NVIDIA Hopper, one launch each.

Every result row depends on its own input row and on the shapes of the matrices, not on how many rows there are: a
node gives the same bits alone and in a tree. Repeated calls give the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..errors import UnsupportedKernelError
from .mosaic_product import BLOCKS, MAX_ROWS, STEP, TILE, Product, launch
from .mosaic_sum import block_sum, touch

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

LANES = 128
NORM_TEAMS = 4  # warpgroups of a thread block of the norm
CHUNK = 512  # columns that a thread block of the norm reads at once, four to a thread
F32 = jnp.float32


def require_rows(x: Array, *weights: Array) -> None:
    """Raises `UnsupportedKernelError` for shapes and dtypes that the products do not cover."""
    if x.dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedKernelError(f"needs bfloat16 or float16 rows, got {x.dtype}")
    if x.shape[0] > MAX_ROWS:
        raise UnsupportedKernelError(f"needs at most {MAX_ROWS} rows, got {x.shape[0]}")
    for weight in weights:
        if weight.dtype != x.dtype:
            raise UnsupportedKernelError(f"needs weights in the rows' {x.dtype}, got {weight.dtype}")
        if weight.shape[0] % STEP or (weight.shape[-1] % 8 and weight.shape[-1] > TILE):
            raise UnsupportedKernelError(
                f"needs weights of a multiple of {STEP} rows, and of 8 columns or {TILE} at most, got {weight.shape}"
            )


def _splits(steps: int, tiles: int) -> int:
    """Slices of the contracted axis: one block to a multiprocessor, of four steps at least.

    That many blocks have enough copies in flight, and every slice costs a write and a read of the whole result.
    """
    return max(1, min(steps // 4, BLOCKS // tiles))


def matmul_parts(
    x: Float[Array, "R E"],
    weights: tuple[Float[Array, "E _"], ...],
    dtypes: tuple[DTypeLike, ...] = (),
    *,
    splits: int | None = None,
    stages: int | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "S _ _"], ...]:
    """See `api.matmul_parts`; always float32 parts. Does not look at the device.

    Args:
      x, weights: as the op's.
      dtypes: not used.
      splits: slices of the contracted axis, by default as many as the device runs at once.
      stages: steps in flight, by default as many as fit.
      interpret: parameters of the interpreter, or None.
    """
    require_rows(x, *weights)
    # Copies need lines of 16 bytes: a small matrix of other columns (gates) is copied to where it has them.
    weights = tuple(jnp.pad(w, ((0, 0), (0, -w.shape[1] % 8))) for w in weights)
    product = Product(
        rows=x.shape[0],
        inputs=x.shape[1],
        columns=tuple(weight.shape[1] for weight in weights),
        gated=False,
    )
    product = dataclasses.replace(product, splits=splits or _splits(product.steps, product.tiles), depth=stages)
    if interpret is not None:
        return launch(product, x, weights, interpret=interpret)
    return _launch(product, x, weights)


def gated_matmul(
    x: Float[Array, "R E"], weight: Float[Array, "E 2 H"], *, stages: int | None = None, interpret: Any = None
) -> Float[Array, "_ H"]:
    """See `api.gated_matmul`; does not look at the device. `stages` as in `matmul_parts`."""
    hidden = weight.shape[2]
    require_rows(x, weight)
    if hidden % STEP:
        raise UnsupportedKernelError(f"needs a multiple of {STEP} hidden columns, got {hidden}")
    product = Product(rows=x.shape[0], inputs=x.shape[1], columns=(hidden,), gated=True, depth=stages)
    flat = weight.reshape(weight.shape[0], 2 * hidden)
    if interpret is not None:
        return launch(product, x, (flat,), interpret=interpret)[0]
    return _launch(product, x, (flat,))[0]


# Layers of one shape share a trace and a lowering.
_launch = functools.partial(jax.jit, static_argnums=0)(launch)


def residual_norm(
    x: Float[Array, "R E"],
    parts: Float[Array, "S _ _"] | None,
    scale: Float[Array, " E"],
    eps: float,
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "R E"], Float[Array, "R E"]]:
    """See `api.residual_norm`; does not look at the device."""
    if x.shape[1] % 8 or not CHUNK <= x.shape[1] <= 16 * CHUNK:
        raise UnsupportedKernelError(f"needs a multiple of 8 columns, {CHUNK} to {16 * CHUNK}, got {x.shape[1]}")
    if x.shape[0] > MAX_ROWS:
        raise UnsupportedKernelError(f"needs at most {MAX_ROWS} rows, got {x.shape[0]}")
    if interpret is not None:
        return _norm(x, parts, scale, eps, interpret)
    return _norm_shared(x, parts, scale, eps)


def _norm(
    x: Float[Array, "R E"],
    parts: Float[Array, "S _ _"] | None,
    scale: Float[Array, " E"],
    eps: float,
    interpret: Any = None,
) -> tuple[Float[Array, "R E"], Float[Array, "R E"]]:
    rows, width = x.shape
    slices = 0 if parts is None else parts.shape[0]
    # Short code for many threads: a kernel this short waits for its instructions as much as for its data.
    chunks, counted = -(-width // CHUNK), width % CHUNK or CHUNK  # the last chunk ends with the row, and counts so many
    teams = 1 if interpret is not None or counted < CHUNK else math.gcd(chunks, NORM_TEAMS)
    own = chunks // teams  # chunks of a warpgroup

    def read(ref: Any, *at: Any) -> Any:
        layout = plgpu.Layout.WG_STRIDED((CHUNK,), vec_size=4)
        return plgpu.load(ref.at[at], layout=layout, optimized=False).astype(F32)

    def body(x_ref: Any, *refs: Any) -> None:
        *added, scale_ref, sum_ref, norm_ref, sums = refs
        row = lax.axis_index("t")
        team: Any = 0 if teams == 1 else lax.axis_index("wg")
        starts: list[Any] = [pl.multiple_of((team * own + i) * CHUNK, CHUNK) for i in range(own)]
        if counted < CHUNK:
            starts[-1] = width - CHUNK
        places = [pl.ds(start, CHUNK) for start in starts]
        if teams > 1:
            touch(scale_ref, width * scale.dtype.itemsize)  # no cache holds it, and it is read last
        values = [read(x_ref, row, at) for at in places]
        more = [[read(added[0], part, row, at) for at in places] for part in range(slices)]
        scales = [read(scale_ref, at) for at in places]
        for part in more:
            values = [value + other for value, other in zip(values, part, strict=True)]
        stream = [value.astype(x.dtype) for value in values]
        values = [value.astype(F32) for value in stream]
        squares = [value * value for value in values]
        if counted < CHUNK:
            at = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=plgpu.Layout.WG_STRIDED((CHUNK,), vec_size=4))
            squares[-1] = jnp.where(at >= CHUNK - counted, squares[-1], 0.0)
        squares = functools.reduce(lambda a, b: a + b, squares)
        total = jnp.sum(squares) if teams == 1 else block_sum(squares, sums, CHUNK, teams)
        factor = lax.rsqrt(total / width + eps)
        for at, value, kept, weight in zip(places, values, stream, scales, strict=True):
            sum_ref[row, at] = kept
            norm_ref[row, at] = (value * factor * weight).astype(x.dtype)

    body.__name__ = "residual_norm"
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    total, normed = plgpu.kernel(
        body,
        out_type=[out, out],
        scratch_types=[plgpu.SMEM((32,), F32)],
        grid=(rows,),
        grid_names=("t",),
        **({"num_threads": teams, "thread_name": "wg"} if teams > 1 else {}),
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
        interpret=interpret,
    )(x, *([] if parts is None else [parts]), scale)
    return total, normed


_norm_shared = functools.partial(jax.jit, static_argnums=3)(_norm)
