"""Top-n selection and merged visit lists on Hopper, written in PTX: Pallas has no warp-level operations.

A thread block serves a bunch of consecutive nodes of one KV head, `warps` warps each. Lane l of part p of a node
holds the scores of blocks 128 (j warps + p) + 4 l + e, for e < 4 and all j: so masses load as 16 bytes, and an index is
a constant plus 4 l. Scores are not negative, so their bits order as integers, and each round of the selection is two
`redux`: the largest score, and the lowest block that has it. Scores of long caches come in passes over the blocks that
the node may select: lanes keep the best so far in order, and a round puts one more among them. Every part finds its own
best blocks; then one warp ranks the parts' finds by comparing all pairs. Chosen and forced blocks are bits of a map in
shared memory: population counts give each block's place in the ascending list, and the OR of a group's maps is the
union that its nodes visit. A group larger than a bunch takes a cluster of thread blocks (`select_union`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .ptx import Writer
from .select_search import TREE_TILE, search
from .select_shape import MOST_WORDS, SelectShape
from .select_union import clear_union, mark_union, meet, union_of_cluster

OPERANDS = (  # of the instructions, in order; "l" is an address in global memory, "s" one in shared memory
    *(("l", name) for name in ("stats", "counts", "mass", "top", "tree", "own", "weights")),
    *(("l", name) for name in ("selected", "merged", "owners")),
    *(("s", name) for name in ("bits", "gains", "found")),
    *(("r", name) for name in ("bunch", "x", "tid")),
)


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
    if s.cluster > 1:
        mark_union(ptx, wanted)


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
    looped = maps * each > MOST_WORDS  # one after the other then, and read twice
    held = 1 if looped else each
    ptx.new("pred", "pn", "ph")
    ptx.new("b64", "slot")
    words = [ptx.many("b32", f"w{c}_", held) for c in range(maps)]
    unions = ptx.many("b32", "un", held)

    def load(number: int | str, i: int) -> None:
        """The lane's words of that number, and their OR."""
        ptx(f"mad.lo.u32 i1, lane, {each}, {number}", f"setp.lt.u32 pn, i1, {s.words}", f"mov.b32 {unions[i]}, 0")
        for c in range(maps):
            ptx(
                f"mov.b32 {words[c][i]}, 0",
                f"@pn ld.shared.b32 {words[c][i]}, [{'at' if looped else 'i0'}+{4 * (c * s.words + i)}]",
                f"or.b32 {unions[i]}, {unions[i]}, {words[c][i]}",
            )

    def write(number: int | str, i: int) -> None:
        again, done = ptx.label(), ptx.label()
        ptx.at(again)
        ptx(f"setp.eq.b32 pn, {unions[i]}, 0", f"@pn bra {done}")
        ptx(
            f"neg.s32 i0, {unions[i]}",
            f"and.b32 i0, i0, {unions[i]}",  # the lowest bit
            f"xor.b32 {unions[i]}, {unions[i]}, i0",
            "bfind.u32 block, i0",
            f"mad.lo.u32 i1, lane, {each}, {number}",
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

    def every(body: Callable[[int | str, int], None]) -> None:
        """Something for each word of the lane."""
        if not looped:
            for i in range(each):
                body(i, i)
            return
        again = ptx.label()
        ptx.new("pred", "pi")
        ptx.new("b32", "word", "at")
        ptx(f"mad.lo.u32 at, lane, {4 * each}, map", "mov.u32 word, 0")
        ptx.at(again)
        body("word", 0)
        ptx("add.u32 at, at, 4", "add.u32 word, word, 1", f"setp.lt.u32 pi, word, {each}", f"@pi bra {again}")

    def count(number: int | str, i: int) -> None:
        load(number, i)
        ptx(f"popc.b32 i1, {unions[i]}", "add.u32 place, place, i1")

    def reread(number: int | str, i: int) -> None:
        if looped:
            load(number, i)
        write(number, i)

    ptx(f"mad.lo.u32 i0, lane, {4 * each}, map", "mov.u32 place, 0")
    every(count)
    ptx("mov.u32 i2, place")
    for distance in (1, 2, 4, 8, 16):
        ptx(
            f"shfl.sync.up.b32 i1, place, {distance}, 0, 0xffffffff",
            f"setp.ge.u32 pn, lane, {distance}",
            "@pn add.u32 place, place, i1",
        )
    ptx("shfl.sync.idx.b32 total, place, 31, 31, 0xffffffff", "sub.u32 place, place, i2")
    every(reread)
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
    if s.cluster > 1:
        ptx.new("b32", "rank")
        ptx("mov.u32 rank, %cluster_ctarank", "add.u32 bunch, bunch, rank")
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
    if s.cluster > 1:
        clear_union(ptx, s)
    if s.rounds:
        searched = ptx.label()
        ptx(f"@!p_in bra {searched}")
        search(ptx, s)
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
    if s.cluster > 1 or (s.rounds and s.warps > 1):
        ptx("bar.sync 0")
    marked = ptx.label()
    ptx(f"@!p_part bra {marked}")
    if s.rounds:
        _choose(ptx, s)
    _force(ptx, s)
    ptx("bar.warp.sync 0xffffffff")
    ptx.at(marked)
    if s.cluster > 1:
        meet(ptx, s)
    elif s.group and (s.group > 1 or s.warps > 1):
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
    if s.cluster > 1:
        union_of_cluster(ptx, s)
    elif s.group:
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
      bunch, x: the thread block's bunch of nodes, or the first of its cluster's; and its KV head among those of all
        sequences.
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
