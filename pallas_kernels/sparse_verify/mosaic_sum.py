"""The second launch of a Hopper attention: adds partial results in split order, applies gates, writes the output.

On an H200 the last block to arrive at a row tile took longer than this launch for the sum.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..errors import UnsupportedKernelError
from .mosaic_combine import WARPS, combine
from .mosaic_problem import Cut
from .mosaic_rows import ROWS

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

PARAMETERS = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def _sum(cut: Cut, partial: Array, stats: Array, gates: Array | None) -> Array:
    """What `combine` computes, for the interpreter."""
    rows, total = cut.rows, 0.0
    count = rows.per_tile * rows.heads
    lead = (cut.batch, cut.kv_heads)
    for branch, (splits, most, tiles) in enumerate(zip(cut.splits, cut.most_splits, cut.row_tiles, strict=True)):
        first = cut.first_partial(branch) * ROWS
        last = first + cut.batch * cut.kv_heads * cut.jobs[branch] * ROWS
        job = np.arange(tiles)[:, None] * splits + np.arange(most)
        used = np.full((tiles, 1), splits)
        used[-1] = splits if branch else cut.last
        there = np.arange(most) < used
        job = np.where(there, job, 0)
        acc = partial[first:last].reshape(*lead, -1, ROWS, cut.dim)[:, :, job]
        top, norm = (x[first:last].reshape(*lead, -1, ROWS)[:, :, job] for x in stats)
        top = jnp.where(there[..., None], top, -3e38)
        factor = jnp.where(there[..., None], jnp.exp2(top - top.max(axis=3, keepdims=True)), 0.0)
        norm = (factor * norm).sum(axis=3)[..., None]
        mine = jnp.where(norm > 0, (factor[..., None] * acc).sum(axis=3) / jnp.maximum(norm, 1e-30), 0.0)
        if branch:  # dense tiles to those of the first branch
            mine = mine[..., : rows.dense_per_selected * count, :]
            mine = mine.reshape(*lead, -1, count, mine.shape[-1])[:, :, : rows.tiles]
        mine = mine[..., :count, :].reshape(*lead, -1, rows.heads, mine.shape[-1])[:, :, : rows.nodes]
        mine = jnp.moveaxis(mine, 1, 2)
        total += mine if gates is None else gates[..., cut.branches[branch], None] * mine
    return jnp.asarray(total)


def add_partials(
    cut: Cut,
    partial: Float[Array, "rows D"],
    stats: Float[Array, "2 rows"],
    gates: Float[Array, "B T K G 3"] | None,
    *,
    name: str,
    added: Float[Array, "B T K G D"] | None = None,
    dtype: DTypeLike = jnp.float32,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """The attention output.

    Args:
      cut: which partial results belong together.
      partial: unnormalised accumulators, 64 rows for each partial result.
      stats: running maxima in base-2 exponents, and sums.
      gates: of the branches; None for one branch without a gate.
      name: of the kernel.
      added: output of one more branch, float32, which has the first gate.
      dtype: of the output.
      interpret: parameters of the interpreter, where XLA adds; or None.

    Raises:
      UnsupportedKernelError: more partial results than the kernel's indices of 32 bits can number.
    """
    elements = max(partial.size, cut.batch * cut.rows.nodes * cut.kv_heads * cut.rows.heads * cut.dim)
    if elements >= 1 << 31:
        raise UnsupportedKernelError(f"needs fewer than 2**31 numbers in partial results and output, got {elements}")
    if interpret is not None:
        out = _sum(cut, partial, stats, gates)
        if added is not None and gates is not None:
            out += gates[..., :1] * added
        return out.astype(dtype)
    rows = cut.rows

    def add(*refs: Any) -> None:
        b, k, tile, chunk = (lax.axis_index(axis) for axis in ("b", "k", "i", "r"))
        combine(cut, (b, k, tile, chunk), refs)

    add.__name__ = name
    out = jax.ShapeDtypeStruct((cut.batch, rows.nodes, cut.kv_heads, rows.heads, cut.dim), dtype)
    return plgpu.kernel(
        add,
        out_type=out,
        grid=(-(-rows.per_tile * rows.heads // WARPS), rows.tiles, cut.kv_heads, cut.batch),
        grid_names=("r", "i", "k", "b"),
        compiler_params=PARAMETERS,
    )(partial, stats, *(x for x in (gates, added) if x is not None))
