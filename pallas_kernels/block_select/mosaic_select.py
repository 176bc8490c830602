"""Top-n selection and merged visit lists on Hopper, written in PTX: Pallas has no warp-level operations.

A thread block serves a bunch of consecutive nodes of one KV head, `warps` warps each. Lane l of part p of a node
holds the scores of blocks 128 (j warps + p) + 4 l + e, for e < 4 and all j: so masses load as 16 bytes, and an index is
a constant plus 4 l. Scores are not negative, so their bits order as integers, and each round of the selection is two
`redux`: the largest score, and the lowest block that has it. Every part finds its own best blocks; then one warp ranks
the parts' finds by comparing all pairs. Chosen and forced blocks are bits of a map in shared memory: population counts
give each block's place in the ascending list, and the OR of a group's maps is the union that its nodes visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .ptx import Writer, reduce_lanes, reduce_registers
from .select_shape import SelectShape

TREE_TILE = 64  # completed entries in a tile of their masses
ROWS = 64
NONE = 1 << 28
START = "0fE0AD78EC"  # -1e20, the running maximum before any entry
HIDDEN = "0f7149F2CA"  # 1e30, log-sum-exp of a row that sees nothing: exp2(x - HIDDEN) = 0


OPERANDS = (  # of the instructions, in order; "l" is an address in global memory, "s" one in shared memory
    *(("l", name) for name in ("stats", "counts", "mass", "top", "tree", "own", "weights")),
    *(("l", name) for name in ("selected", "merged", "owners")),
    *(("s", name) for name in ("bits", "gains", "found")),
    *(("r", name) for name in ("bunch", "x", "tid")),
)


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


def _scores(ptx: Writer, s: SelectShape, lses: list[str]) -> list[str]:
    """Registers with the bits of this lane's scores, -1 for blocks that may not be chosen."""
    lanes = s.per_tile // 4  # that a tile's blocks fill
    together = 32 // lanes  # tiles in one load
    count = -(-s.steps // (together * s.warps))
    values = ptx.many("f32", "v", 4 * count)
    keys = ptx.many("b32", "k", 4 * count)
    ptx.new("b64", "ama", "ato")
    ptx.new("pred", "pq", "pz", "pg", "pc")
    inside_row, row_step = s.width * 4, s.per_tile_nodes * s.width * 4
    tile_bytes = ROWS * s.width * 4
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
        loaded, tops = ptx.many("f32", "m", 4 * count), ptx.many("f32", "t", count)
        rests, before = ptx.many("f32", "s", count), ptx.many("f32", "u", count)
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
    ptx("shl.b32 i0, part, 7", "mad.lo.u32 mine, lane, 4, i0")  # block of j = 0, e = 0
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


def _rounds(ptx: Writer, s: SelectShape, keys: list[str]) -> None:
    """Lane r gets this part's r-th best key and block."""
    offsets = [j * s.warps * 128 + e for j in range(len(keys) // 4) for e in range(4)]
    ptx.new("pred", "pr_hit", "pr_lane")
    where = ptx.many("b32", "c", len(keys))
    ptx("mov.u32 turn, 0", "mov.b32 my_key, -1", "mov.b32 my_block, 0")
    again = ptx.label()
    ptx.at(again)
    best = reduce_registers(ptx, "max.s32", keys, "x")
    ptx(f"redux.sync.max.s32 best, {best}, 0xffffffff")
    for key, at, offset in zip(keys, where, offsets, strict=True):
        ptx(f"setp.eq.s32 pr_hit, {key}, best", f"selp.b32 {at}, {offset}, {NONE}, pr_hit")
    lowest = reduce_registers(ptx, "min.u32", where, "y")
    ptx(
        f"add.u32 i0, {lowest}, mine",
        "redux.sync.min.u32 block, i0, 0xffffffff",
        "setp.eq.u32 pr_lane, lane, turn",
        "selp.b32 my_key, best, my_key, pr_lane",
        "selp.b32 my_block, block, my_block, pr_lane",
        "sub.u32 i0, block, mine",
    )
    for key, offset in zip(keys, offsets, strict=True):
        ptx(f"setp.eq.u32 pr_hit, i0, {offset}", f"selp.b32 {key}, -1, {key}, pr_hit")
    ptx("add.u32 turn, turn, 1", f"setp.lt.u32 pr_hit, turn, {s.rounds}", f"@pr_hit bra {again}")


def _mark(ptx: Writer, s: SelectShape, block: str, wanted: str) -> None:
    """Sets a block's bit in the node's map."""
    ptx(
        f"shr.u32 i0, {block}, 5",
        "shl.b32 i0, i0, 2",
        "add.u32 i0, i0, map",
        f"and.b32 i1, {block}, 31",
        "shl.b32 i1, 1, i1",
        f"@{wanted} red.shared.or.b32 [i0], i1",
    )


def _choose(ptx: Writer, s: SelectShape) -> None:
    """Marks the chosen blocks: with several parts, the best of their finds."""
    ptx.new("pred", "pw", "pb")
    if s.warps == 1:
        ptx(f"setp.lt.u32 pw, lane, {s.rounds}", "setp.ge.and.s32 pw, my_key, 0, pw")
        _mark(ptx, s, "my_block", "pw")
        return
    total = s.warps * s.rounds
    held = -(-total // 32)
    mine, ranks = ptx.many("b64", "q", held), ptx.many("b32", "rank", held)
    ptx.new("b64", "other")
    ptx(f"mad.lo.u32 i2, node, {8 * total}, found")
    for i in range(held):
        ptx(
            f"add.u32 i0, lane, {32 * i}",
            f"setp.lt.u32 pw, i0, {total}",
            "shl.b32 i0, i0, 3",
            "add.u32 i0, i0, i2",
            f"mov.b64 {mine[i]}, -1",
            f"@pw ld.shared.b64 {mine[i]}, [i0]",
            f"mov.u32 {ranks[i]}, 0",
        )
    for i in range(total):
        ptx(f"ld.shared.b64 other, [i2+{8 * i}]")
        for own, rank in zip(mine, ranks, strict=True):
            ptx(f"setp.gt.s64 pb, other, {own}", f"@pb add.u32 {rank}, {rank}, 1")
    for own, rank in zip(mine, ranks, strict=True):
        ptx(
            f"setp.lt.u32 pw, {rank}, {s.rounds}",
            f"setp.ge.and.s64 pw, {own}, 0, pw",
            f"cvt.u32.u64 block, {own}",
            "not.b32 block, block",
        )
        _mark(ptx, s, "block", "pw")


def _force(ptx: Writer, s: SelectShape) -> None:
    """Marks the forced blocks: lanes hold the first ones, then the local ones."""
    ptx.new("pred", "pf")
    ptx(
        "mov.u32 block, lane",
        f"setp.ge.u32 pf, lane, {s.init}",
        "sub.s32 i0, own_block, lane",
        f"add.s32 i0, i0, {s.init}",
        "selp.b32 block, i0, lane, pf",
        f"setp.lt.u32 pf, lane, {s.init + s.local}",
        "setp.le.and.s32 pf, block, own_block, pf",
        f"setp.lt.and.u32 pf, block, {s.blocks}, pf",
    )
    _mark(ptx, s, "block", "pf")


def _enumerate(ptx: Writer, s: SelectShape, maps: int, width: int, targets: Sequence[str]) -> None:
    """Writes the blocks of the OR of `maps` maps from `map` on to `targets[0]`, and who has them to `targets[1]`."""
    each = -(-s.words // 32)  # words of a lane
    ptx.new("pred", "pn", "ph")
    ptx.new("b64", "slot")
    words = [ptx.many("b32", f"w{c}_", each) for c in range(maps)]
    unions = ptx.many("b32", "un", each)
    ptx(f"mad.lo.u32 i0, lane, {4 * each}, map", "mov.u32 place, 0")
    for i in range(each):
        ptx(f"mad.lo.u32 i1, lane, {each}, {i}", f"setp.lt.u32 pn, i1, {s.words}", f"mov.b32 {unions[i]}, 0")
        for c in range(maps):
            ptx(
                f"mov.b32 {words[c][i]}, 0",
                f"@pn ld.shared.b32 {words[c][i]}, [i0+{4 * (c * s.words + i)}]",
                f"or.b32 {unions[i]}, {unions[i]}, {words[c][i]}",
            )
        ptx(f"popc.b32 i1, {unions[i]}", "add.u32 place, place, i1")
    ptx("mov.u32 i2, place")
    for distance in (1, 2, 4, 8, 16):
        ptx(
            f"shfl.sync.up.b32 i1, place, {distance}, 0, 0xffffffff",
            f"setp.ge.u32 pn, lane, {distance}",
            "@pn add.u32 place, place, i1",
        )
    ptx("shfl.sync.idx.b32 total, place, 31, 31, 0xffffffff", "sub.u32 place, place, i2")
    for i in range(each):
        again, done = ptx.label(), ptx.label()
        ptx.at(again)
        ptx(f"setp.eq.b32 pn, {unions[i]}, 0", f"@pn bra {done}")
        ptx(
            f"neg.s32 i0, {unions[i]}",
            f"and.b32 i0, i0, {unions[i]}",  # the lowest bit
            f"xor.b32 {unions[i]}, {unions[i]}, i0",
            "bfind.u32 block, i0",
            f"mad.lo.u32 i1, lane, {each}, {i}",
            "mad.lo.u32 block, i1, 32, block",
            f"setp.lt.u32 ph, place, {width}",
            "mul.wide.u32 w0, place, 4",
            f"add.u64 slot, {targets[0]}, w0",
            "@ph st.global.b32 [slot], block",
            "add.u32 place, place, 1",
        )
        if len(targets) > 1:
            ptx("mov.u32 i2, 0")
            for c in range(maps):
                ptx(f"and.b32 i1, {words[c][i]}, i0", "setp.ne.b32 pn, i1, 0", f"@pn or.b32 i2, i2, {1 << c}")
            ptx(f"add.u64 slot, {targets[1]}, w0", "@ph st.global.b32 [slot], i2")
        ptx(f"bra {again}")
        ptx.at(done)
    ptx("bar.warp.sync 0xffffffff")
    for start in range(0, width, 32):
        ptx(
            f"add.u32 i0, lane, {start}",
            f"setp.lt.u32 pn, i0, {width}",
            "setp.ge.and.u32 pn, i0, total, pn",
            "mul.wide.u32 w0, i0, 4",
        )
        for target, value in zip(targets, (-1, 0), strict=False):
            ptx(f"add.u64 slot, {target}, w0", f"@pn st.global.b32 [slot], {value}")


def select_ptx(s: SelectShape) -> str:
    """The instructions of one thread block; their operands are those of `OPERANDS`."""
    ptx = Writer()
    ptx.new("b64", "w0", "asel", "amer", "aown")
    for i, (kind, name) in enumerate(OPERANDS):
        wide = kind == "l"
        ptx.new("b64" if wide else "b32", name)
        ptx(f"mov.b64 {name}, ${i}" if wide else f"mov.b32 {name}, ${i}")
    ptx.new("b32", "i0", "i1", "i2", "lane", "warp", "node", "part", "t", "b", "rowtile", "inside", "xr", "own_block")
    ptx.new("b32", "visited", "chunks", "base", "gat", "chunk", "e", "tile", "mine", "turn", "best", "block")
    ptx.new("b32", "my_key", "my_block", "map", "place", "total")
    ptx.new("pred", "p_in", "p_part", "p_lead", "p_any")
    shift = s.warps.bit_length() - 1
    ptx(
        "and.b32 lane, tid, 31",
        "shr.u32 warp, tid, 5",
        "shfl.sync.idx.b32 warp, warp, 0, 31, 0xffffffff",  # so that the compiler knows that it is uniform
        f"shr.u32 node, warp, {shift}",
        f"and.b32 part, warp, {s.warps - 1}",
        f"mad.lo.u32 t, bunch, {s.bunch}, node",
        f"div.u32 b, x, {s.kv_heads}",
        f"mul.lo.u32 i0, bunch, {s.bunch}",
        f"div.u32 rowtile, i0, {s.per_tile_nodes}",
        f"mul.lo.u32 i1, rowtile, {s.per_tile_nodes}",
        "sub.u32 i0, i0, i1",
        "add.u32 inside, i0, node",
        f"mad.lo.u32 xr, x, {s.tiles}, rowtile",
        f"mad.lo.u32 map, node, {4 * s.words}, bits",
        f"setp.lt.u32 p_in, t, {s.nodes}",
        "setp.eq.and.u32 p_part, part, 0, p_in",
        # What depends on the call's lengths.
        "mul.wide.u32 w0, b, 16",
        "add.u64 w0, w0, counts",
        "ld.global.b32 i0, [w0]",
        "ld.global.b32 i1, [w0+4]",
        "ld.global.b32 base, [w0+8]",
        f"add.u32 i0, i0, {s.tile_entries - 1}",
        f"shr.u32 visited, i0, {s.tile_entries.bit_length() - 1}",
        f"add.u32 i1, i1, {TREE_TILE - 1}",
        f"shr.u32 chunks, i1, {TREE_TILE.bit_length() - 1}",
        f"mad.lo.u32 i0, b, {s.bunches * s.bunch}, t",
        "mul.wide.u32 w0, i0, 4",
        "add.u64 w0, w0, own",
        "ld.global.b32 own_block, [w0]",
    )
    for start in range(0, s.words, 32):
        ptx(
            f"add.u32 i0, lane, {start}",
            f"setp.lt.u32 p_any, i0, {s.words}",
            "setp.eq.and.u32 p_any, part, 0, p_any",
            "shl.b32 i0, i0, 2",
            "add.u32 i0, i0, map",
            "@p_any st.shared.b32 [i0], 0",
        )
    ptx("bar.warp.sync 0xffffffff")
    if s.rounds:
        searched = ptx.label()
        ptx(f"@!p_in bra {searched}")
        lses = _log_sum_exp(ptx, s)
        _gains(ptx, s, lses)
        _rounds(ptx, s, _scores(ptx, s, lses))
        if s.warps > 1:  # key, then the lower block first
            ptx.new("b64", "pair")
            ptx(
                f"mad.lo.u32 i0, warp, {s.rounds}, lane",
                "shl.b32 i0, i0, 3",
                "add.u32 i0, i0, found",
                "not.b32 i1, my_block",
                "mov.b64 pair, {i1, my_key}",
                f"setp.lt.u32 p_any, lane, {s.rounds}",
                "@p_any st.shared.b64 [i0], pair",
            )
        ptx.at(searched)
        if s.warps > 1:
            ptx("bar.sync 0")
    marked = ptx.label()
    ptx(f"@!p_part bra {marked}")
    if s.rounds:
        _choose(ptx, s)
    _force(ptx, s)
    ptx("bar.warp.sync 0xffffffff")
    ptx.at(marked)
    if s.group and (s.group > 1 or s.warps > 1):
        ptx("bar.sync 0")
    listed = ptx.label()
    ptx(
        f"@!p_part bra {listed}",
        f"mad.lo.u32 i0, x, {s.nodes}, t",
        f"mul.wide.u32 asel, i0, {s.slots * 4}",
        "add.u64 asel, asel, selected",
    )
    _enumerate(ptx, s, 1, s.slots, ("asel",))
    ptx.at(listed)
    if s.group:
        ended = ptx.label()
        parts = -(-s.nodes // s.group)
        ptx(
            f"and.b32 i0, node, {s.group - 1}",
            "setp.eq.and.u32 p_lead, i0, 0, p_in",
            f"setp.eq.and.u32 p_lead, part, {1 if s.warps > 1 else 0}, p_lead",
            f"@!p_lead bra {ended}",
            f"shr.u32 i0, t, {s.group.bit_length() - 1}",
            f"mad.lo.u32 i0, x, {parts}, i0",
            f"mul.wide.u32 w0, i0, {s.merged_width * 4}",
            "add.u64 amer, merged, w0",
            "add.u64 aown, owners, w0",
        )
        _enumerate(ptx, s, s.group, s.merged_width, ("amer", "aown"))
        ptx.at(ended)
    return ptx.text()


def emit(s: SelectShape, references: dict[str, Any], bunch: Any, x: Any) -> None:
    """Inserts the instructions into the Pallas kernel that is being traced.

    Args:
      s: sizes.
      references: of the kernel, by name as in `OPERANDS`.
      bunch, x: thread block's bunch of nodes, and its KV head among those of all sequences.
    """
    import jax.experimental.mosaic.gpu as mgpu
    import jax.experimental.pallas.mosaic_gpu
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    plgpu: Any = jax.experimental.pallas.mosaic_gpu
    names = [name for kind, name in OPERANDS if kind != "r"]
    splat = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(names), splat, splat))
    def insert(ctx: Any, *arguments: Any) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        values = []
        for (kind, _), argument in zip(OPERANDS, arguments, strict=False):
            if kind == "r":
                (register,) = argument.registers.flat
                values.append(register)
            else:
                address = mgpu.utils.memref_ptr(argument)
                values.append(llvm.ptrtoint(i64 if kind == "l" else i32, address))
        values.append(mgpu.utils.thread_idx())
        constraints = ",".join("l" if kind == "l" else "r" for kind, _ in OPERANDS)
        llvm.inline_asm(None, values, select_ptx(s), constraints + ",~{memory}", has_side_effects=True)

    insert(*[references[name] for name in names], bunch, x)
