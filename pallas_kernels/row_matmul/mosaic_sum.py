"""Inline instructions of the norm's thread blocks, of several warpgroups; not for the interpreter."""

from __future__ import annotations

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

WARPS = 4  # of a warpgroup
LINE = 128  # bytes that memory moves at once


def touch(ref: Any, size: int) -> None:
    """Asks for the first bytes of an array, a line a thread; waits for nothing.

    Compilers move loads to where their values are needed, this they leave in its place.

    Args:
      ref: in global memory.
      size: bytes, at most a line for each thread.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def run(ctx: Any, source: Any) -> None:
        address = llvm.ptrtoint(ir.IntegerType.get_signless(64), mgpu.utils.memref_ptr(source))
        text = (
            "{\n.reg .pred p;\n.reg .b64 a;\n"
            f"setp.lt.u32 p, $1, {size // LINE};\nmad.wide.u32 a, $1, {LINE}, $0;\n"
            "@p prefetch.global.L2 [a];\n}"
        )
        llvm.inline_asm(None, [address, mgpu.utils.thread_idx()], text, "l,r,~{memory}", has_side_effects=True)

    run(ref)


def block_sum(values: jax.Array, scratch: Any, size: int, teams: int) -> jax.Array:
    """The sum of all threads' values, in one order, for every thread; in `Lane` semantics.

    Args:
      values: float32 [size], strided by 4 over a warpgroup.
      scratch: shared memory of a float32 for each warp, for nothing else.
      size: of the values.
      teams: warpgroups, each of which has values of its own.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_STRIDED((size,), vec_size=4), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT),
    )
    def run(ctx: Any, array: Any, into: Any) -> Any:
        f32, i32 = ir.F32Type.get(), ir.IntegerType.get_signless(32)
        own = [vector.extract(x, [], [i]) for x in array.registers.flat for i in range(4)]
        total = _tree(own)
        for step in (16, 8, 4, 2, 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, step))
        base = mgpu.utils.memref_ptr(into)
        warp = arith.divui(mgpu.utils.thread_idx(), mgpu.utils.c(32, i32))
        # All lanes hold the same bits.
        llvm.store(total, mgpu.utils.getelementptr(base, [warp], f32))
        llvm.inline_asm(None, [], "bar.sync 0;", "~{memory}", has_side_effects=True)
        sums = []
        for first in range(0, WARPS * teams, 4):
            kind = ir.VectorType.get((4,), f32)
            four = llvm.load(kind, mgpu.utils.getelementptr(base, [first], f32), alignment=16)
            sums += [vector.extract(four, [], [i]) for i in range(4)]
        return mgpu.FragmentedArray.splat(_tree(sums), ())

    return run(values, scratch)


def _tree(values: list[Any]) -> Any:
    """The sum, neighbours first."""
    while len(values) > 1:
        values = [arith.addf(a, b) for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]
