"""Pieces of the Hopper kernels that Pallas has no operation for, as inline instructions; not for the interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

I32 = jnp.int32
WGMMA = plgpu.Layout.WGMMA


def store_rows(ref: Any, value: jax.Array, rows: jax.Array) -> None:
    """Stores the first rows of a tile, in steps of the 16 rows that a warp holds."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA, plgpu.Layout.WG_SPLAT))
    def store(ctx: Any, target: Any, array: Any, count: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        warp = arith.remui(mgpu.utils.warp_idx(sync=False), mgpu.utils.c(4, i32))
        first = arith.muli(warp, mgpu.utils.c(16, i32))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.slt, first, count.registers.flat[0])):
            array.store_untiled(target, optimized=False)

    store(ref, value, rows)


def store_partial(
    partial_ref: Any, stats_ref: Any, first: Any, acc: Any, top: Any, norm: Any, used: Any, *, interpret: bool
) -> None:
    """A row tile's partial result to the rows from `first`: accumulators by 64 columns, maxima and sums.

    Of the accumulators the first `used` rows count.
    """
    rows = pl.ds(first, top.shape[0])
    for chunk, value in enumerate(acc):
        target = partial_ref.at[rows, pl.ds(64 * chunk, 64)]
        if interpret:
            target[...] = value
        else:
            store_rows(target, value, used)
    stats_ref[0, rows] = top
    stats_ref[1, rows] = norm


def sync() -> None:
    """Barrier of the block's one warpgroup."""

    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    barrier()


def list_count(blocks: Any, union: int, interpret: bool) -> jax.Array:
    """Entries of a visit list before its padding."""
    if interpret:
        return sum(((blocks[at] >= 0).astype(I32) for at in range(union)), jnp.int32(0))

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),),
        return_type=plgpu.ShapeDtypeStruct((), I32, layout=plgpu.Layout.WG_SPLAT),
    )
    def ballot(ctx: Any, ref: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        index = ir.IndexType.get()

        def constant(value: int) -> Any:
            return mgpu.utils.c(value, i32)

        lane = arith.remui(mgpu.utils.thread_idx(), constant(32))
        found = []
        for first in range(0, union, 32):
            at = arith.addi(lane, constant(first))
            clamped = arith.minui(at, constant(union - 1))
            block = memref.load(ref, [arith.index_cast(index, clamped)])
            found.append(arith.select(arith.cmpi(arith.CmpIPredicate.ult, at, constant(union)), block, constant(-1)))
        total = constant(0)
        for block in found:
            text = """{
                .reg .pred p; .reg .b32 votes;
                setp.ge.s32 p, $1, 0;
                vote.sync.ballot.b32 votes, p, 0xffffffff;
                popc.b32 $0, votes; }"""
            total = arith.addi(total, llvm.inline_asm(i32, [block], text, "=r,r", has_side_effects=True))
        return mgpu.FragmentedArray.splat(total, (), is_signed=True)

    return ballot(blocks)
