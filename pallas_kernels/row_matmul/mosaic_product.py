"""The product kernel: columns of the weights are the rows of the tensor cores' tiles, nodes their columns.

A thread block owns 128 columns (64 of the gate and the 64 of the up projection in a gated product) and a slice of the
contracted axis, and streams its part of the matrix through shared memory once. Where there are more blocks than
multiprocessors, two fit on one: the memory shares its bandwidth among all blocks alike, so they end together.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import memref
from jaxtyping import Array, Float

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

STEP = 64  # of the contracted axis, and columns of half a tile
TILE = 2 * STEP
MAX_ROWS = 160  # accumulators of more do not fit the registers of one warpgroup
BLOCKS = 132  # multiprocessors of an H200
SHARED = 200 * 1024  # bytes of a block that has a multiprocessor for itself
# The tensor cores read tiles of 8 rows; copies take the same bytes as plain rows, whose number need not divide by 8.
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
PLAIN = (plgpu.SwizzleTransform(128),)
F32 = jnp.float32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """Static description of a call.

    Args:
      rows: of x.
      inputs: contracted axis.
      columns: of every matrix; of either half of a gated one.
      gated: whether halves are joined as silu(first) * second, which needs the whole contraction in one block.
      splits: slices of the contracted axis.
      depth: steps in flight; None for as many as fit.
    """

    rows: int
    inputs: int
    columns: tuple[int, ...]
    gated: bool
    splits: int = 1
    depth: int | None = None

    @property
    def padded(self) -> int:
        """Rows as the tensor cores count them."""
        return -(-self.rows // 8) * 8

    @property
    def steps(self) -> int:
        """Steps of the whole contraction."""
        return self.inputs // STEP

    @property
    def width(self) -> int:
        """Result columns of a thread block."""
        return STEP if self.gated else TILE

    @property
    def tiles_of(self) -> tuple[int, ...]:
        """Tiles of every matrix."""
        return tuple(-(-count // self.width) for count in self.columns)

    @property
    def tiles(self) -> int:
        """Tiles of all matrices."""
        return sum(self.tiles_of)

    @property
    def stages(self) -> int:
        """Steps in flight."""
        longest = -(-self.steps // self.splits)
        shared = SHARED if self.splits * self.tiles <= BLOCKS else SHARED // 2
        most = self.depth or min(8, shared // (2 * STEP * (TILE + self.padded)))
        return max(2, min(most, longest))


def _store_transposed(ref: Any, value: Any) -> None:
    """ref[...] = value.T, one by one: lanes that hold neighbouring rows write neighbours in memory, 8 at a time."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def store(ctx: Any, target: Any, array: Any) -> None:
        array.foreach(lambda value, at: memref.store(value, target, (at[1], at[0])))

    store(ref, value)


def launch(
    product: Product, x: Float[Array, "R E"], weights: tuple[Float[Array, "E _"], ...], *, interpret: Any = None
) -> tuple[Array, ...]:
    """Runs the kernel.

    Returns:
      Float32 parts [S, padded rows, padded columns] of every matrix; of a gated product [padded rows, H] in the dtype
      of x.
    """
    count, stages, padded = len(weights), product.stages, product.padded
    if interpret is not None:  # it has no reads past the end
        x = jnp.pad(x, ((0, padded - product.rows), (0, 0)))
        if not product.gated:
            weights = tuple(
                jnp.pad(w, ((0, 0), (0, tiles * TILE - w.shape[1])))
                for w, tiles in zip(weights, product.tiles_of, strict=True)
            )
    if product.gated:
        out_type = [jax.ShapeDtypeStruct((padded, product.columns[0]), x.dtype)]
    else:
        shapes = [(product.splits, padded, tiles * TILE) for tiles in product.tiles_of]
        out_type = [jax.ShapeDtypeStruct(shape, F32) for shape in shapes]

    def body(x_ref: Any, *refs: Any) -> None:
        tile, split = lax.axis_index("n"), lax.axis_index("s")
        first = 0
        for index, tiles in enumerate(product.tiles_of):
            here = (tile >= first) & (tile < first + tiles)
            work = (x_ref, refs[index], refs[count + index], tile - first, split, refs[2 * count :])
            if count == 1:
                run(*work)
            else:
                pl.when(here)(lambda work=work: run(*work))
            first += tiles

    def run(x_ref: Any, w_ref: Any, out_ref: Any, tile: Any, split: Any, scratch: Any) -> None:
        *buffers, full = scratch
        views = [(x, x) if interpret is not None else tuple(x) for x in buffers]
        (x_s, x_copy), (low_s, low_copy), (high_s, high_copy) = views
        column = tile * product.width
        halves = (column, column + (product.columns[0] if product.gated else STEP))
        begin = split * product.steps // product.splits
        steps = (split + 1) * product.steps // product.splits - begin

        def fetch(step: Any) -> None:
            slot = lax.rem(step, stages)
            at = pl.ds(pl.multiple_of((begin + step) * STEP, STEP), STEP)
            for half, into in zip(halves, (low_copy, high_copy), strict=True):
                source = w_ref.at[at, pl.ds(pl.multiple_of(half, STEP), STEP)]
                plgpu.copy_gmem_to_smem(source, into.at[slot], full.at[slot])
            zero = pl.multiple_of(lax.min(split, 0), 8)  # a start that is not known: rows past the end read as 0
            plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(zero, padded), at], x_copy.at[slot], full.at[slot])

        for step in range(stages):
            pl.when(step < steps)(lambda step=step: fetch(jnp.int32(step)))

        def multiply(low: Any, high: Any) -> tuple[Any, Any]:
            def advance(step: Any, _: None) -> None:
                slot = lax.rem(step, stages)
                plgpu.barrier_wait(full.at[slot])
                nodes = x_s.at[slot].transpose((1, 0))
                plgpu.wgmma(low, low_s.at[slot].transpose((1, 0)), nodes)
                plgpu.wgmma(high, high_s.at[slot].transpose((1, 0)), nodes)
                plgpu.wgmma_wait(2)  # those of the step before are done
                pl.when((step > 0) & (step - 1 + stages < steps))(lambda: fetch(step - 1 + stages))

            lax.fori_loop(0, steps, advance, None)
            return low[...], high[...]

        kind = plgpu.ACC((STEP, padded), F32)
        low, high = pl.run_scoped(multiply, kind, kind)
        if product.gated:
            joined = (low / (1.0 + jnp.exp(-low)) * high).astype(x.dtype)
            results = [(column, joined)]
        else:
            results = list(zip(halves, (low, high), strict=True))
        for start, value in results:
            columns = pl.ds(start, STEP)
            target = out_ref.at[:, columns] if product.gated else out_ref.at[split, :, columns]
            if interpret is None:
                _store_transposed(target, value)
            else:
                target[...] = value.T

    body.__name__ = "gated_matmul" if product.gated else "row_matmul"

    def ring(rows: int) -> Any:
        tiled, plain = (plgpu.SMEM((stages, rows, STEP), x.dtype, transforms=kind) for kind in (TILED, PLAIN))
        return tiled if interpret is not None else plgpu.RefUnion(tiled, plain)  # it keeps the two apart

    return tuple(
        plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=[
                ring(padded),
                ring(STEP),
                ring(STEP),
                plgpu.Barrier(num_arrivals=3, num_barriers=stages),
            ],
            grid=(product.splits, product.tiles),
            grid_names=("s", "n"),
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=interpret,
        )(x, *weights)
    )
