"""The sum over branches and splits of the Hopper kernels, as inline instructions; not for the interpreter.

A warp takes a row, lane l its columns 4 l to 4 l + 3 (or two columns); lane s also weighs partial results s, s + 32 and
so on. All loads are independent of each other, and those of the first partial results come first.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from .mosaic_problem import Cut
from .mosaic_rows import ROWS

plgpu: Any = jax.experimental.pallas.mosaic_gpu  # its type hints do not describe what it accepts

LANES, WARPS = 32, 4
AHEAD = 36  # of them that are loaded before the weights are known; registers hold no more


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


def _address(base: Any, index: Any, kind: Any = None) -> Any:
    """The address of an element, float32 by default."""
    wide = arith.extsi(ir.IntegerType.get_signless(64), index)
    return mgpu.utils.getelementptr(base, [wide], ir.F32Type.get() if kind is None else kind)


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


def combine(cut: Cut, at: tuple[Any, Any, Any, Any], refs: tuple[Any, ...]) -> None:
    """Adds the splits of some rows of a row tile in split order, applies gates and writes the output.

    Args:
      cut: the call.
      at: sequence, KV head, tile of the first branch, and which `WARPS` rows of it.
      refs: partial results [rows, D], statistics [2, rows], gates [B, T, K, G, 3] if there are any, after them perhaps
        the output of one more branch under the first gate, output [B, T, K, G, D].
    """
    tiling, dim = cut.rows, cut.dim
    heads, kv_heads = tiling.heads, cut.kv_heads
    scalar = plgpu.Layout.WG_SPLAT
    width = dim // LANES

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), *[scalar] * 4))
    def run(ctx: Any, *arguments: Any) -> None:
        b, k, tile, chunk = (x.registers.flat[0] for x in arguments[len(refs) :])
        padded = ir.MemRefType(arguments[1].type).shape[1]
        stored = ir.MemRefType(arguments[len(refs) - 1].type).element_type
        partial, stats, *gates, out = (mgpu.utils.memref_ptr(x) for x in arguments[: len(refs)])
        thread = mgpu.utils.thread_idx()
        lane = arith.remui(thread, _i32(LANES))
        warp = arith.remui(arith.divui(thread, _i32(LANES)), _i32(WARPS))
        head = _add(_times(b, kv_heads), k)
        dense = arith.divui(tile, _i32(tiling.dense_per_selected))
        inside = _times(arith.remui(tile, _i32(tiling.dense_per_selected)), tiling.per_tile * heads)
        numbers = [_add(lane, _i32(first)) for first in range(0, sum(cut.most_splits), LANES)]

        # First partial row and number of splits of each branch; where this lane's splits begin.
        starts, counts, first = [], [], 0
        mine, kinds = [], [_i32(cut.branches[0])] * len(numbers)
        for branch, splits in enumerate(cut.splits):
            jobs, tile_number, count = cut.jobs[branch], dense if branch else tile, _i32(splits)
            job = _add(_times(head, jobs), _times(tile_number, splits), _i32(cut.first_partial(branch)))
            start = _add(_times(job, ROWS), *([inside] if branch else []))
            if not branch:
                count = arith.select(_less(tile, _i32(tiling.tiles - 1)), count, _i32(cut.last))
            starts.append(start)
            counts.append(count)
            for index, number in enumerate(numbers):
                split = arith.subi(number, _i32(first))
                own = _add(start, _times(arith.select(_less(split, count), split, _i32(0)), ROWS))
                if not branch:
                    mine.append(own)
                else:
                    here = arith.cmpi(arith.CmpIPredicate.sge, number, _i32(first))
                    mine[index] = arith.select(here, own, mine[index])
                    kinds[index] = arith.select(here, _i32(cut.branches[branch]), kinds[index])
            first += cut.most_splits[branch]

        row = _add(_times(chunk, WARPS), warp)
        node = _add(_times(tile, tiling.per_tile), arith.divui(row, _i32(heads)))
        valid = arith.andi(_less(row, _i32(tiling.per_tile * heads)), _less(node, _i32(tiling.nodes)))
        row = arith.select(valid, row, _i32(0))
        node = arith.select(valid, node, _i32(0))
        query = _times(_add(_times(_add(_times(b, tiling.nodes), node), kv_heads), k), heads)
        query = _add(query, arith.remui(row, _i32(heads)))
        tops = [_load(stats, _add(own, row)) for own in mine]
        norms = [_load(stats, _add(own, row, _i32(padded))) for own in mine]
        shares = [_load(gates[0], _add(_times(query, 3), kind)) if gates else _f32(1.0) for kind in kinds]
        column = _times(lane, width)
        parts = []
        for branch, splits in enumerate(cut.most_splits):
            for split in range(splits):
                number = _i32(split)
                if split >= min(cut.splits[branch], splits if branch else cut.last):
                    number = arith.select(_less(number, counts[branch]), number, _i32(0))  # the first weighs 0 then
                start = _add(starts[branch], _times(number, ROWS), row)
                place = _add(_times(start, dim), column)
                ahead = len(parts) < AHEAD
                parts.append((place, _load(partial, place, width) if ahead else None))

        low = _f32(-3e38)
        weights, first = [_f32(0.0)] * len(numbers), 0
        for splits, count in zip(cut.most_splits, counts, strict=True):
            there, factors, masses = [], [], []
            for number in numbers:
                split = arith.subi(number, _i32(first))
                there.append(arith.andi(arith.cmpi(arith.CmpIPredicate.sge, split, _i32(0)), _less(split, count)))
            highest = [arith.select(here, top, low) for here, top in zip(there, tops, strict=True)]
            peak = _over_lanes(functools.reduce(arith.maximumf, highest), arith.maximumf)
            for here, top, norm in zip(there, highest, norms, strict=True):
                factors.append(_exp2(arith.subf(top, peak)))
                masses.append(arith.select(here, arith.mulf(factors[-1], norm), _f32(0.0)))
            whole = _over_lanes(functools.reduce(arith.addf, masses), arith.addf)
            positive = arith.cmpf(arith.CmpFPredicate.OGT, whole, _f32(0.0))
            for index, here in enumerate(there):
                scaled = arith.divf(arith.mulf(factors[index], shares[index]), arith.maximumf(whole, _f32(1e-30)))
                weights[index] = arith.select(arith.andi(here, positive), scaled, weights[index])
            first += splits
        kind_of = ir.VectorType.get((width,), ir.F32Type.get())
        result = vector.broadcast(kind_of, _f32(0.0))
        for number, (place, part) in enumerate(parts):
            if part is None:
                part = _load(partial, place, width)
            weight = _from_lane(weights[number // LANES], number % LANES)
            result = math_dialect.fma(vector.broadcast(kind_of, weight), part, result)
        if len(gates) > 1:
            other = _load(gates[1], _add(_times(query, dim), column), width)
            gate = vector.broadcast(kind_of, _load(gates[0], _times(query, 3)))
            result = math_dialect.fma(gate, other, result)
        if stored != ir.F32Type.get():
            result = arith.truncf(ir.VectorType.get((width,), stored), result)
        size = 4 if stored == ir.F32Type.get() else 2
        with mgpu.utils.when(valid):
            llvm.store(result, _address(out, _add(_times(query, dim), column), stored), alignment=size * width)

    run(*refs, *at)
