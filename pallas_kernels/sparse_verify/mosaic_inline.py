"""Pieces of the Hopper kernels that Pallas has no operation for, as inline instructions; not for the interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

I32 = jnp.int32
WGMMA = plgpu.Layout.WGMMA


def arrive(counter_ref: Any, flag_ref: Any) -> jax.Array:
    """Adds one to a global counter after the whole block's writes; all threads get the value before."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), I32, layout=plgpu.Layout.WG_SPLAT),
    )
    def add(ctx: Any, counter: Any, flag: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        zero = mgpu.utils.c(0, ir.IndexType.get())
        mgpu.utils.warpgroup_barrier()
        with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
            llvm.inline_asm(None, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True)
            before = llvm.inline_asm(
                i32,
                [mgpu.utils.memref_ptr(counter), mgpu.utils.c(1, i32)],
                "atom.add.relaxed.gpu.global.s32 $0, [$1], $2;",
                "=r,l,r,~{memory}",
                has_side_effects=True,
            )
            memref.store(before, flag, [zero])
        mgpu.utils.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(memref.load(flag, [zero]), (), is_signed=True)

    return add(counter_ref, flag_ref)


def acquire() -> None:
    """Makes the writes of blocks that arrived earlier visible to every thread of this one."""

    @plgpu.inline_mgpu()
    def fence(ctx: Any) -> None:
        llvm.inline_asm(None, [], "fence.acq_rel.gpu;", "~{memory}", has_side_effects=True)

    fence()


def store_rows(ref: Any, value: jax.Array, rows: int) -> None:
    """Stores the first rows of a tile, in steps of the 16 rows that a warp holds."""
    warps = -(-rows // 16)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WGMMA))
    def store(ctx: Any, target: Any, array: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        warp = arith.remui(mgpu.utils.warp_idx(sync=False), mgpu.utils.c(4, i32))
        with mgpu.utils.when(arith.cmpi(arith.CmpIPredicate.ult, warp, mgpu.utils.c(warps, i32))):
            array.store_untiled(target, optimized=False)

    store(ref, value)


def reset(counter_ref: Any) -> None:
    """Leaves the counter at 0 for the next launch."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def store(ctx: Any, counter: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        with mgpu.utils.when(mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP)):
            llvm.inline_asm(
                None,
                [mgpu.utils.memref_ptr(counter), mgpu.utils.c(0, i32)],
                "st.relaxed.gpu.global.s32 [$0], $1;",
                "l,r",
                has_side_effects=True,
            )

    store(counter_ref)


def sync() -> None:
    """Barrier of the block's one warpgroup."""

    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    barrier()


def list_counts(blocks: Any, union: int, border: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Entries of a visit list before its padding, and those below `border`."""
    if interpret:
        found = [blocks[at] for at in range(union)]
        count = sum(((block >= 0).astype(I32) for block in found), jnp.int32(0))
        return count, sum((((block >= 0) & (block < border)).astype(I32) for block in found), jnp.int32(0))
    splat_type = plgpu.ShapeDtypeStruct((), I32, layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT), return_type=(splat_type, splat_type))
    def ballot(ctx: Any, ref: Any, limit: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)
        index = ir.IndexType.get()

        def constant(value: int) -> Any:
            return mgpu.utils.c(value, i32)

        lane = arith.remui(mgpu.utils.thread_idx(), constant(32))
        (bound,) = limit.registers.flat
        found = []
        for first in range(0, union, 32):
            at = arith.addi(lane, constant(first))
            clamped = arith.minui(at, constant(union - 1))
            block = memref.load(ref, [arith.index_cast(index, clamped)])
            found.append(arith.select(arith.cmpi(arith.CmpIPredicate.ult, at, constant(union)), block, constant(-1)))
        totals = [constant(0), constant(0)]
        for block in found:
            for which, operator in enumerate(("ge", "lt")):
                text = f"""{{
                    .reg .pred p; .reg .b32 votes;
                    setp.ge.s32 p, $1, 0;
                    setp.{operator}.and.s32 p, $1, $2, p;
                    vote.sync.ballot.b32 votes, p, 0xffffffff;
                    popc.b32 $0, votes; }}"""
                against = constant(0) if which == 0 else bound
                votes = llvm.inline_asm(i32, [block, against], text, "=r,r,r", has_side_effects=True)
                totals[which] = arith.addi(totals[which], votes)
        return tuple(mgpu.FragmentedArray.splat(total, (), is_signed=True) for total in totals)

    return ballot(blocks, border)
