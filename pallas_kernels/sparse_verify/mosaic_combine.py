"""The sum over branches and splits of the Hopper kernels, as inline instructions; not for the interpreter.

A warp takes a row, lane l its columns 4 l to 4 l + 3 (or two columns); lane s also weighs partial result s. All loads
are independent of each other.
"""

from __future__ import annotations

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from .mosaic_problem import SELECTED, Problem
from .mosaic_rows import ROWS

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

LANES, WARPS = 32, 4


def _i32(value: int) -> Any:
    return mgpu.utils.c(value, ir.IntegerType.get_signless(32))


def _f32(value: float) -> Any:
    return mgpu.utils.c(value, ir.F32Type.get())


def _add(*values: Any) -> Any:
    total = values[0]
    for value in values[1:]:
        total = arith.addi(total, value)
    return total


def _times(value: Any, factor: int) -> Any:
    return arith.muli(value, _i32(factor))


def _less(a: Any, b: Any) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, a, b)


def _address(base: Any, index: Any) -> Any:
    """The address of a float32 element."""
    wide = arith.extsi(ir.IntegerType.get_signless(64), index)
    return mgpu.utils.getelementptr(base, [wide], ir.F32Type.get())


def _load(base: Any, index: Any, width: int = 1) -> Any:
    kind = ir.F32Type.get() if width == 1 else ir.VectorType.get((width,), ir.F32Type.get())
    return llvm.load(kind, _address(base, index), alignment=4 * width)


def _exp2(x: Any) -> Any:
    return llvm.inline_asm(x.type, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f")


def _from_lane(x: Any, lane: int) -> Any:
    mask, clamp = _i32(-1), _i32(LANES - 1)
    return nvvm.shfl_sync(mask, x, _i32(lane), clamp, nvvm.ShflKind.idx)


def _over_lanes(x: Any, operation: Any) -> Any:
    for step in (16, 8, 4, 2, 1):
        x = operation(x, mgpu.utils.shfl_bfly(x, step))
    return x


def combine(problem: Problem, at: tuple[Any, Any, Any, Any], refs: tuple[Any, ...]) -> None:
    """Adds the splits of some rows of a selected tile in split order, applies gates and writes the output.

    Args:
      problem: the call.
      at: sequence, KV head, selected tile, and which `WARPS` rows of it.
      refs: partial results [rows, D], statistics [2, rows], gates [B, T, K, G, 3], output [B, T, K, G, D].
    """
    tiling, dim = problem.rows, problem.dim
    heads, kv_heads = tiling.heads, problem.kv_heads
    scalar = plgpu.Layout.WG_SPLAT
    width = dim // LANES

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, *[scalar] * 4))
    def run(ctx: Any, partial: Any, stats: Any, gates: Any, out: Any, *scalars: Any) -> None:
        b, k, tile, chunk = (x.registers.flat[0] for x in scalars)
        padded = ir.MemRefType(stats.type).shape[1]
        partial, stats, gates, out = (mgpu.utils.memref_ptr(x) for x in (partial, stats, gates, out))
        thread = mgpu.utils.thread_idx()
        lane = arith.remui(thread, _i32(LANES))
        warp = arith.remui(arith.divui(thread, _i32(LANES)), _i32(WARPS))
        head = _add(_times(b, kv_heads), k)
        dense = arith.divui(tile, _i32(tiling.dense_per_selected))
        inside = _times(arith.remui(tile, _i32(tiling.dense_per_selected)), tiling.per_tile * heads)

        # First partial row and number of splits of each branch; where this lane's split begins.
        starts, counts, mine, first = [], [], None, 0
        kind = _i32(problem.branches[0])
        for branch, splits in enumerate(problem.splits):
            jobs, number, count = problem.jobs[branch], dense if branch else tile, _i32(splits)
            job = _add(_times(head, jobs), _times(number, splits), _i32(problem.first_partial(branch)))
            start = _add(_times(job, ROWS), *([inside] if branch else []))
            if branch == SELECTED:
                count = arith.select(_less(tile, _i32(tiling.tiles - 1)), count, _i32(problem.last))
            starts.append(start)
            counts.append(count)
            split = arith.subi(lane, _i32(first))
            own = _add(start, _times(arith.select(_less(split, count), split, _i32(0)), ROWS))
            if mine is None:
                mine = own
            else:
                here = arith.cmpi(arith.CmpIPredicate.sge, lane, _i32(first))
                mine = arith.select(here, own, mine)
                kind = arith.select(here, _i32(problem.branches[branch]), kind)
            first += splits

        row = _add(_times(chunk, WARPS), warp)
        node = _add(_times(tile, tiling.per_tile), arith.divui(row, _i32(heads)))
        valid = arith.andi(_less(row, _i32(tiling.per_tile * heads)), _less(node, _i32(tiling.nodes)))
        row = arith.select(valid, row, _i32(0))
        node = arith.select(valid, node, _i32(0))
        query = _times(_add(_times(_add(_times(b, tiling.nodes), node), kv_heads), k), heads)
        query = _add(query, arith.remui(row, _i32(heads)))
        top, norm = _load(stats, _add(mine, row)), _load(stats, _add(mine, row, _i32(padded)))
        gate = _load(gates, _add(_times(query, 3), kind))
        column = _times(lane, width)
        parts = []
        for branch, splits in enumerate(problem.splits):
            for split in range(splits):
                number = _i32(split)
                if branch == SELECTED and split >= problem.last:  # the first again, which weighs nothing here
                    number = arith.select(_less(number, counts[branch]), number, _i32(0))
                start = _add(starts[branch], _times(number, ROWS), row)
                parts.append(_load(partial, _add(_times(start, dim), column), width))

        low = _f32(-3e38)
        weight, first = _f32(0.0), 0
        for splits, count in zip(problem.splits, counts, strict=True):
            split = arith.subi(lane, _i32(first))
            here = arith.andi(arith.cmpi(arith.CmpIPredicate.sge, split, _i32(0)), _less(split, count))
            highest = _over_lanes(arith.select(here, top, low), arith.maximumf)
            factor = _exp2(arith.subf(arith.select(here, top, low), highest))
            share = arith.select(here, arith.mulf(factor, norm), _f32(0.0))
            whole = _over_lanes(share, arith.addf)
            seen = arith.andi(here, arith.cmpf(arith.CmpFPredicate.OGT, whole, _f32(0.0)))
            scaled = arith.divf(arith.mulf(factor, gate), arith.maximumf(whole, _f32(1e-30)))
            weight = arith.select(seen, scaled, weight)
            first += splits
        kind_of = ir.VectorType.get((width,), ir.F32Type.get())
        result = vector.broadcast(kind_of, _f32(0.0))
        for number, part in enumerate(parts):
            result = math_dialect.fma(vector.broadcast(kind_of, _from_lane(weight, number)), part, result)
        with mgpu.utils.when(valid):
            llvm.store(result, _address(out, _add(_times(query, dim), column)), alignment=4 * width)

    run(*refs, *at)
