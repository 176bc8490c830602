"""The search of a selection on Hopper, in PTX: scores of a node's blocks, and the best of them.

`search` leaves in lane r the key and the block of the r-th best of the warp's blocks; `mosaic_select` says which those
are, and what becomes of them.
"""

from __future__ import annotations

from .ptx import Writer, reduce_lanes, reduce_registers
from .select_shape import SelectShape

TREE_TILE = 64  # completed entries in a tile of their masses
ROWS = 64
NONE = 1 << 28
START = "0fE0AD78EC"  # -1e20, the running maximum before any entry
HIDDEN = "0f7149F2CA"  # 1e30, log-sum-exp of a row that sees nothing: exp2(x - HIDDEN) = 0


def _log_sum_exp(ptx: Writer, s: SelectShape) -> list[str]:
    """Of every head: lanes hold splits."""
    tops, sums = ptx.many("f32", "mt", s.heads), ptx.many("f32", "ms", s.heads)
    highs, lses = ptx.many("f32", "mh", s.heads), ptx.many("f32", "lse", s.heads)
    ptx.new("b64", "ast")
    ptx.new("pred", "ps")
    ptx(
        f"mad.lo.u32 i0, xr, {s.splits}, lane",
        f"mul.wide.u32 ast, i0, {2 * ROWS * 4}",
        "add.u64 ast, ast, stats",
        "mul.wide.u32 w0, inside, 4",
        "add.u64 ast, ast, w0",
        f"setp.lt.u32 ps, lane, {s.splits}",
    )
    for h in range(s.heads):
        offset = h * s.per_tile_nodes * 4
        ptx(
            f"mov.f32 {tops[h]}, {START}",
            f"mov.f32 {sums[h]}, 0f00000000",
            f"@ps ld.global.f32 {tops[h]}, [ast+{offset}]",
            f"@ps ld.global.f32 {sums[h]}, [ast+{offset + ROWS * 4}]",
        )
    lanes = 1 << (s.splits - 1).bit_length()
    for h in range(s.heads):
        ptx(f"mov.f32 {highs[h]}, {tops[h]}")
    reduce_lanes(ptx, "max.f32", highs, lanes, "rl")
    for h in range(s.heads):
        ptx(
            f"sub.f32 {tops[h]}, {tops[h]}, {highs[h]}",
            f"ex2.approx.ftz.f32 {tops[h]}, {tops[h]}",
            f"mul.f32 {sums[h]}, {sums[h]}, {tops[h]}",
        )
    reduce_lanes(ptx, "add.f32", sums, lanes, "rl")
    for h in range(s.heads):
        ptx(
            f"setp.gt.f32 ps, {sums[h]}, 0f00000000",
            f"lg2.approx.f32 {lses[h]}, {sums[h]}",
            f"add.f32 {lses[h]}, {lses[h]}, {highs[h]}",
            f"selp.f32 {lses[h]}, {lses[h]}, {HIDDEN}, ps",
        )
    return lses


def _gains(ptx: Writer, s: SelectShape, lses: list[str]) -> None:
    """Masses of completed entries by block, from the first that they can touch, to this warp's shared memory."""
    ptx.new("b64", "atr", "att", "awe")
    ptx.new("f32", "g0", "g1", "p0", "p1", "a0", "a1", "gf")
    ptx.new("pred", "pe", "pl")
    ptx(f"mad.lo.u32 gat, warp, {s.extra * 4}, gains")
    for start in range(0, s.extra, 32):
        ptx(
            f"add.u32 i0, lane, {start}",
            f"setp.lt.u32 pe, i0, {s.extra}",
            "shl.b32 i0, i0, 2",
            "add.u32 i0, i0, gat",
            "@pe st.shared.f32 [i0], 0f00000000",
        )
    ptx("bar.warp.sync 0xffffffff", "mov.u32 chunk, 0")
    ptx(
        f"mad.lo.u32 i0, xr, {ROWS}, inside",
        f"mul.wide.u32 atr, i0, {s.tree_width * 4}",
        "add.u64 atr, atr, tree",
        "mul.wide.u32 w0, lane, 8",
        "add.u64 atr, atr, w0",
        f"mad.lo.u32 i0, xr, {s.tops}, {s.depth}",
        f"mad.lo.u32 i0, i0, {ROWS}, inside",
        "mul.wide.u32 att, i0, 4",
        "add.u64 att, att, top",
    )
    again, done, each = ptx.label(), ptx.label(), ptx.label()
    ptx.at(again)
    ptx("setp.ge.s32 pe, chunk, chunks", f"@pe bra {done}", "mov.f32 g0, 0f00000000", "mov.f32 g1, 0f00000000")
    for h, lse in enumerate(lses):
        row = h * s.per_tile_nodes
        ptx(
            f"ld.global.v2.f32 {{p0, p1}}, [atr+{row * s.tree_width * 4}]",
            f"ld.global.f32 gf, [att+{row * 4}]",
            f"sub.f32 gf, gf, {lse}",
            "ex2.approx.ftz.f32 gf, gf",
            "fma.rn.f32 g0, p0, gf, g0",
            "fma.rn.f32 g1, p1, gf, g1",
        )
    ptx(
        f"mul.lo.u32 i0, b, {s.extra * s.tree_width * 4}",
        f"mad.lo.u32 i0, chunk, {TREE_TILE * 4}, i0",
        "mad.lo.u32 i0, lane, 8, i0",
        "cvt.u64.u32 awe, i0",
        "add.u64 awe, awe, weights",
        "mov.u32 e, 0",
        "mov.u32 i1, gat",
        "setp.eq.u32 pl, lane, 0",
    )
    ptx.at(each)
    ptx("ld.global.v2.f32 {a0, a1}, [awe]", "mul.f32 gf, g0, a0", "fma.rn.f32 gf, g1, a1, gf")
    reduce_lanes(ptx, "add.f32", ["gf"], 32, "rl")
    ptx(
        "@pl ld.shared.f32 a0, [i1]",
        "@pl add.f32 a0, a0, gf",
        "@pl st.shared.f32 [i1], a0",
        "add.u32 i1, i1, 4",
        f"add.u64 awe, awe, {s.tree_width * 4}",
        "add.u32 e, e, 1",
        f"setp.lt.u32 pe, e, {s.extra}",
        f"@pe bra {each}",
        "add.u32 chunk, chunk, 1",
        f"add.u64 atr, atr, {TREE_TILE * 4}",
        f"add.u64 att, att, {ROWS * 4}",
        f"bra {again}",
    )
    ptx.at(done)
    ptx("bar.warp.sync 0xffffffff")


def _addresses(ptx: Writer, s: SelectShape) -> None:
    """Of this lane's masses and their references, in load 0."""
    lanes, together = s.per_tile // 4, s.together  # lanes that a tile's blocks fill, tiles in one load
    ptx.new("b64", "ama", "ato")
    ptx.new("pred", "pz")
    inside_row, tile_bytes = s.width * 4, ROWS * s.width * 4
    ptx(
        f"shr.u32 i0, lane, {lanes.bit_length() - 1}",
        f"mad.lo.u32 tile, part, {together}, i0",  # of load 0
        f"and.b32 i1, lane, {lanes - 1}",  # place in the tile
        f"mul.lo.u32 i0, xr, {s.depth}",
        f"mul.wide.u32 ama, i0, {tile_bytes}",
        "add.u64 ama, ama, mass",
        "add.u32 i0, tile, 1",
        f"mul.wide.u32 w0, i0, {tile_bytes}",
        "add.u64 ama, ama, w0",
        f"mul.lo.u32 i2, inside, {inside_row}",
        "mad.lo.u32 i2, i1, 16, i2",
        "cvt.u64.u32 w0, i2",
        "add.u64 ama, ama, w0",
        f"mad.lo.u32 i0, xr, {s.tops}, i0",
        f"mad.lo.u32 i0, i0, {ROWS}, inside",
        "mul.wide.u32 ato, i0, 4",
        "add.u64 ato, ato, top",
        "setp.eq.u32 pz, i1, 0",
    )


def _scores(ptx: Writer, s: SelectShape, lses: list[str]) -> list[str]:
    """Registers with the bits of this lane's scores of a pass, -1 for blocks that may not be chosen."""
    together, count = s.together, s.loads
    values = ptx.many("f32", "v", 4 * count)
    keys = ptx.many("b32", "k", 4 * count)
    ptx.new("pred", "pq", "pg", "pc")
    row_step, tile_bytes = s.per_tile_nodes * s.width * 4, ROWS * s.width * 4
    seen, spilt = ptx.many("pred", "pv", count), ptx.many("pred", "pr", count)
    for j in range(count):
        first = j * s.warps * together
        ptx(
            f"add.u32 i0, tile, {first}",
            f"setp.lt.u32 {seen[j]}, i0, visited",
            f"setp.le.u32 {spilt[j]}, i0, visited",
            "setp.ne.and.u32 pq, i0, 0, pz",
            f"and.pred {spilt[j]}, {spilt[j]}, pq",
            f"setp.lt.and.u32 {spilt[j]}, i0, {s.steps}, {spilt[j]}",
        )
    ptx(*(f"mov.f32 {value}, 0f00000000" for value in values))
    for h, lse in enumerate(lses):
        own = "" if s.passes == 1 else f"{h}_"
        loaded, tops = ptx.many("f32", f"m{own}", 4 * count), ptx.many("f32", f"t{own}", count)
        rests, before = ptx.many("f32", f"s{own}", count), ptx.many("f32", f"u{own}", count)
        if own:  # otherwise a load under a condition waits for what its target held, the head before
            ptx(*(f"mov.f32 {x}, 0f00000000" for x in (*loaded, *tops, *rests, *before)))
        for j in range(count):
            ahead = j * s.warps * together
            mass, top = h * row_step + ahead * tile_bytes, (h * s.per_tile_nodes + ahead * ROWS) * 4
            four = ", ".join(loaded[4 * j : 4 * j + 4])
            ptx(
                f"@{seen[j]} ld.global.v4.f32 {{{four}}}, [ama+{mass}]",
                f"@{seen[j]} ld.global.f32 {tops[j]}, [ato+{top}]",
            )
            if s.spills:
                ptx(
                    f"@{spilt[j]} ld.global.f32 {rests[j]}, [ama+{mass - tile_bytes + s.per_tile * 4}]",
                    f"@{spilt[j]} ld.global.f32 {before[j]}, [ato+{top - ROWS * 4}]",
                )
        for j in range(count):
            ptx(f"sub.f32 {tops[j]}, {tops[j]}, {lse}", f"ex2.approx.ftz.f32 {tops[j]}, {tops[j]}")
            ptx(
                *(
                    f"@{seen[j]} fma.rn.f32 {values[i]}, {loaded[i]}, {tops[j]}, {values[i]}"
                    for i in range(4 * j, 4 * j + 4)
                )
            )
            if s.spills:
                ptx(
                    f"sub.f32 {before[j]}, {before[j]}, {lse}",
                    f"ex2.approx.ftz.f32 {before[j]}, {before[j]}",
                    f"@{spilt[j]} fma.rn.f32 {values[4 * j]}, {rests[j]}, {before[j]}, {values[4 * j]}",
                )
    ptx("shl.b32 i0, part, 7" if s.passes == 1 else "mov.b32 i0, ahead")
    ptx("mad.lo.u32 mine, lane, 4, i0")  # block of j = 0, e = 0
    for j in range(count):  # completed entries touch few blocks
        skip, low = ptx.label(), j * s.warps * 128
        ptx(
            f"add.s32 i1, i0, {low + 128}",
            "setp.ge.s32 pg, base, i1",
            f"@pg bra {skip}",
            f"add.s32 i1, base, {s.extra}",
            f"add.s32 i2, i0, {low}",
            "setp.le.s32 pg, i1, i2",
            f"@pg bra {skip}",
        )
        for e in range(4):
            ptx(
                f"add.s32 i1, mine, {low + e}",
                "sub.s32 i1, i1, base",
                f"setp.lt.u32 pg, i1, {s.extra}",
                "shl.b32 i1, i1, 2",
                "add.u32 i1, i1, gat",
                "@pg ld.shared.f32 gf, [i1]",
                f"@pg add.f32 {values[4 * j + e]}, {values[4 * j + e]}, gf",
            )
        ptx.at(skip)
    ptx(f"sub.s32 i0, own_block, {s.local}", f"min.s32 i0, i0, {s.blocks - 1}", "sub.s32 i0, i0, mine")
    for j in range(count):
        for e in range(4):
            offset = j * s.warps * 128 + e
            ptx(f"setp.ge.s32 pc, i0, {offset}")
            if offset < s.init:
                ptx(f"add.u32 i1, mine, {offset}", f"setp.ge.and.u32 pc, i1, {s.init}, pc")
            ptx(f"mov.b32 i1, {values[4 * j + e]}", f"selp.b32 {keys[4 * j + e]}, i1, -1, pc")
    return keys


def _highest(ptx: Writer, keys: list[str]) -> None:
    """The best key that is left, in all lanes."""
    best = reduce_registers(ptx, "max.s32", keys, "x")
    ptx(f"redux.sync.max.s32 best, {best}, 0xffffffff")


def _holder(ptx: Writer, keys: list[str], offsets: list[int]) -> None:
    """The lowest block that has the best key, in all lanes."""
    where = ptx.many("b32", "c", len(keys))
    for key, at, offset in zip(keys, where, offsets, strict=True):
        ptx(f"setp.eq.s32 pr_hit, {key}, best", f"selp.b32 {at}, {offset}, {NONE}, pr_hit")
    lowest = reduce_registers(ptx, "min.u32", where, "y")
    ptx(f"add.u32 i0, {lowest}, mine", "redux.sync.min.u32 block, i0, 0xffffffff")


def _take_out(ptx: Writer, keys: list[str], offsets: list[int]) -> None:
    """Removes that block."""
    ptx("sub.u32 i0, block, mine")
    for key, offset in zip(keys, offsets, strict=True):
        ptx(f"setp.eq.u32 pr_hit, i0, {offset}", f"selp.b32 {key}, -1, {key}, pr_hit")


def _rounds(ptx: Writer, s: SelectShape, keys: list[str]) -> None:
    """Lane r gets this part's r-th best key and block."""
    offsets = [j * s.warps * 128 + e for j in range(len(keys) // 4) for e in range(4)]
    ptx.new("pred", "pr_hit", "pr_lane")
    ptx("mov.u32 turn, 0", "mov.b32 my_key, -1", "mov.b32 my_block, 0")
    again = ptx.label()
    ptx.at(again)
    _highest(ptx, keys)
    _holder(ptx, keys, offsets)
    ptx(
        "setp.eq.u32 pr_lane, lane, turn",
        "selp.b32 my_key, best, my_key, pr_lane",
        "selp.b32 my_block, block, my_block, pr_lane",
    )
    _take_out(ptx, keys, offsets)
    ptx("add.u32 turn, turn, 1", f"setp.lt.u32 pr_hit, turn, {s.rounds}", f"@pr_hit bra {again}")


def _passes(ptx: Writer, s: SelectShape, lses: list[str]) -> None:
    """As `_rounds`, over blocks that come in passes: what is no better than the last of the best is left where it is.

    Blocks of later passes are higher, so of equal keys the one that is there stays before the new one.
    """
    step = s.loads * s.warps  # loads of all warps in a pass
    ptx.new("pred", "pr_hit", "pr_move", "pr_shift")
    ptx.new("b32", "ahead", "last", "floor", "key_below", "block_below")
    ptx(
        "mov.b32 my_key, -1",
        "mov.b32 my_block, 0",
        "mov.b32 floor, -1",
        "shl.b32 ahead, part, 7",  # first block of the pass
        f"sub.s32 last, own_block, {s.local}",
        f"min.s32 last, last, {s.blocks - 1}",
        "shfl.sync.idx.b32 last, last, 0, 31, 0xffffffff",  # so that the compiler knows that it is uniform
    )
    again, ended = ptx.label(), ptx.label()
    ptx.at(again)
    ptx("setp.gt.s32 pr_hit, ahead, last", f"@pr_hit bra {ended}")
    keys = _scores(ptx, s, lses)
    offsets = [j * s.warps * 128 + e for j in range(s.loads) for e in range(4)]
    more, passed = ptx.label(), ptx.label()
    ptx.at(more)
    _highest(ptx, keys)
    ptx("setp.le.s32 pr_hit, best, floor", f"@pr_hit bra {passed}")
    _holder(ptx, keys, offsets)
    ptx(
        "shfl.sync.up.b32 key_below, my_key, 1, 0, 0xffffffff",
        "shfl.sync.up.b32 block_below, my_block, 1, 0, 0xffffffff",
        "setp.lt.s32 pr_move, my_key, best",
        "setp.lt.s32 pr_shift, key_below, best",
        "setp.ne.and.u32 pr_shift, lane, 0, pr_shift",
        "selp.b32 key_below, key_below, best, pr_shift",
        "selp.b32 block_below, block_below, block, pr_shift",
        "selp.b32 my_key, key_below, my_key, pr_move",
        "selp.b32 my_block, block_below, my_block, pr_move",
        f"shfl.sync.idx.b32 floor, my_key, {s.rounds - 1}, 31, 0xffffffff",
    )
    _take_out(ptx, keys, offsets)
    ptx(f"bra {more}")
    ptx.at(passed)
    ptx(
        f"add.u32 ahead, ahead, {step * 128}",
        f"add.u32 tile, tile, {step * s.together}",
        f"add.u64 ama, ama, {step * s.together * ROWS * s.width * 4}",
        f"add.u64 ato, ato, {step * s.together * ROWS * 4}",
        f"bra {again}",
    )
    ptx.at(ended)


def search(ptx: Writer, s: SelectShape) -> None:
    """Lane r gets this part's r-th best key, in `my_key`, and its block, in `my_block`."""
    lses = _log_sum_exp(ptx, s)
    _gains(ptx, s, lses)
    _addresses(ptx, s)
    if s.passes == 1:
        _rounds(ptx, s, _scores(ptx, s, lses))
    else:
        _passes(ptx, s, lses)
