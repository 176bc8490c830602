"""What the two bodies of the compressed-branch kernel share: for full row tiles, and for those of few rows."""

from __future__ import annotations

import math
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxtyping import Array

LOG2E = math.log2(math.e)
ROWS = 64  # query rows of one warpgroup, the M of wgmma
TREE_TILE = 64  # completed entries that are attended to at a time (the least K of wgmma on a 128-byte swizzle)
MASKED = -1e30
START = -1e20  # of the running maximum: above MASKED, so that a masked score gives exp2(...) = 0
PANEL = 64  # columns of a swizzled panel: 128 bytes
pallas: Any = plgpu  # for names that its type information leaves out or takes for abstract
Accumulator = pallas.ACC
TILED = (pallas.TilingTransform((8, PANEL)), pallas.SwizzleTransform(128))
# A copy into a tiled buffer needs a row count that is a multiple of 8, and the number of entries is not. A panel of 64
# columns lies in memory the same way without the tiling, so copies go to such an alias.
PLAIN = (pallas.SwizzleTransform(128),)


def put(ref: Any, x: Array, interpret: Any) -> None:
    """A store that may have bank conflicts or touch parts of cache lines; a plain one may not where `store` exists."""
    if interpret is None and hasattr(plgpu, "store"):
        pallas.store(ref, x, optimized=False)
    else:
        ref[...] = x
