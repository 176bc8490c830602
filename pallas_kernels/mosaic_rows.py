"""How the threads of a block hold one row of a head, in kernels that copy or rotate rows."""

from __future__ import annotations

from typing import Any

import jax.experimental.pallas.mosaic_gpu
from jax.experimental.mosaic.gpu.fragmented_array import Replicated, Tiling

from .errors import UnsupportedKernelError

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

LANES = 128  # threads of a block
HALF = 64
# Two elements to a lane, the same ones in each of the four warps: a copy of less than four bytes is refused.
PAIRS = {
    "tiling": Tiling(((HALF,), (2,))),
    "warp_dims": (Replicated(4),),
    "lane_dims": (-2,),
    "vector_dim": -1,
}


def row_layout(dim: int) -> Any:
    """Neighbouring elements to neighbouring threads; every warp holds a row of 64.

    Raises:
      UnsupportedKernelError: rows that are neither 64 nor a multiple of 128 long.
    """
    if dim == HALF:
        return plgpu.Layout.TILED(**PAIRS)
    if dim % LANES:
        raise UnsupportedKernelError(f"needs rows of {HALF} or a multiple of {LANES}, got {dim}")
    return plgpu.Layout.WG_STRIDED((dim,), vec_size=1)


def read_row(ref: Any, *at: Any) -> Any:
    """The row `ref[*at]`, whose last axis is the whole row or a slice of one."""
    view = ref.at[at]
    return plgpu.load(view, layout=row_layout(view.shape[-1]), optimized=False)
