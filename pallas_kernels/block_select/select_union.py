"""The visit list of a group whose nodes are in several thread blocks of a cluster, in PTX.

Every block marks its nodes' maps, and their OR, in its own shared memory. When all have, the warps of the cluster
divide the words of the maps: each counts the union's bits before its words, and writes its own words' blocks, a lane a
bit. Lane c loads the words of the group's node c, from whichever block has them. No block exits before the others have
read its maps.
"""

from __future__ import annotations

from .ptx import Writer
from .select_shape import SelectShape

MOST_HELD = 4  # words of a warp that are loaded before the first is used
ARRIVE, WAIT = "barrier.cluster.arrive.release.aligned", "barrier.cluster.wait.acquire.aligned"


def clear_union(ptx: Writer, s: SelectShape) -> None:
    """Clears the block's union; `both` is the way from a word of the node's map to that of the union."""
    ptx.new("b32", "both")
    ptx.new("pred", "pu")
    threads, start = 32 * s.bunch * s.warps, 4 * s.bunch * s.words
    for first in range(0, s.words, threads):
        ptx(
            f"add.u32 i0, tid, {first}",
            f"setp.lt.u32 pu, i0, {s.words}",
            "shl.b32 i0, i0, 2",
            "add.u32 i0, i0, bits",
            f"@pu st.shared.b32 [i0+{start}], 0",
        )
    ptx("sub.u32 both, bits, map", f"add.u32 both, both, {start}")


def mark_union(ptx: Writer, wanted: str) -> None:
    """Sets the bit `i1` of the word at `i0` in the block's union too."""
    ptx("add.u32 i0, i0, both", f"@{wanted} red.shared.or.b32 [i0], i1")


def meet(ptx: Writer, s: SelectShape) -> None:
    """Waits until all blocks have marked; warps that then read no other block's maps say so at once."""
    ptx.new("pred", "p_own")
    ptx(ARRIVE, WAIT)
    if s.warps > 1:
        ptx("setp.eq.u32 p_own, part, 0", f"@p_own {ARRIVE}")


def union_of_cluster(ptx: Writer, s: SelectShape) -> None:
    """Writes the group's merged blocks and their owners; the warps that list a node's own blocks have no part in it."""
    helpers = max(s.warps - 1, 1)  # warps of a node
    units = s.cluster * s.bunch * helpers
    each = -(-s.words // units)
    held = min(each, MOST_HELD)
    turns = -(-each // held)
    each = turns * held
    ended = ptx.label()
    ptx.new("b64", "slot")
    ptx.new("b32", "unit", "far", "first", "bit", "below", "un", "at", "own_bits", "one")
    ptx.new("pred", "pn", "ph", "pu", "p_map")
    if s.warps > 1:
        ptx(f"@p_own bra {ended}")
    bits_of_bunch = s.bunch.bit_length() - 1
    ptx(
        f"mad.lo.u32 unit, rank, {s.bunch}, node",
        *((f"mad.lo.u32 unit, unit, {helpers}, part", "sub.u32 unit, unit, 1") if s.warps > 1 else ()),
        f"mul.lo.u32 first, unit, {each}",
        # Where lane c finds the map of node c.
        f"and.b32 i0, lane, {s.bunch - 1}",
        f"mad.lo.u32 i0, i0, {4 * s.words}, bits",
        f"shr.u32 i1, lane, {bits_of_bunch}",
        f"and.b32 i1, i1, {s.cluster - 1}",
        "mapa.shared::cluster.u32 far, i0, i1",
        "mad.lo.u32 far, first, 4, far",
        f"setp.lt.u32 p_map, lane, {s.group}",
        "shl.b32 bit, 1, lane",
        "sub.u32 below, bit, 1",
    )
    own = ptx.many("b32", "wd", held)

    def load() -> None:
        for i, word in enumerate(own):
            ptx(
                f"add.u32 i0, first, {i}",
                f"setp.lt.and.u32 pn, i0, {s.words}, p_map",
                f"mov.b32 {word}, 0",
                f"@pn ld.shared::cluster.b32 {word}, [far+{4 * i}]",
            )

    if turns == 1:
        load()
    _places(ptx, s)
    if turns == 1:
        ptx(ARRIVE)
    parts = -(-s.nodes // s.group)
    ptx(
        f"shr.u32 i0, t, {s.group.bit_length() - 1}",
        f"mad.lo.u32 i0, x, {parts}, i0",
        f"mul.wide.u32 w0, i0, {s.merged_width * 4}",
        "add.u64 amer, merged, w0",
        "add.u64 aown, owners, w0",
    )
    # Behind the last block.
    for start in range(0, s.merged_width, 32 * units):
        ptx(
            "mad.lo.u32 i0, unit, 32, lane",
            f"add.u32 i0, i0, {start}",
            f"setp.lt.u32 pn, i0, {s.merged_width}",
            "setp.ge.and.u32 pn, i0, total, pn",
            "mul.wide.u32 w0, i0, 4",
            "add.u64 slot, amer, w0",
            "@pn st.global.b32 [slot], -1",
            "add.u64 slot, aown, w0",
            "@pn st.global.b32 [slot], 0",
        )
    if turns == 1:
        for i, word in enumerate(own):
            _write(ptx, s, word, i)
    else:
        again = ptx.label()
        ptx("mov.u32 turn, 0")
        ptx.at(again)
        load()
        for i, word in enumerate(own):
            _write(ptx, s, word, i)
        ptx(
            f"add.u32 first, first, {held}",
            f"add.u32 far, far, {4 * held}",
            "add.u32 turn, turn, 1",
            f"setp.lt.u32 pn, turn, {turns}",
            f"@pn bra {again}",
            ARRIVE,
        )
    ptx.at(ended)
    ptx(WAIT)


def _places(ptx: Writer, s: SelectShape) -> None:
    """Counts the union's blocks before the word `first`, in `place`, and all, in `total`."""
    unions, words = ptx.many("b32", "au", s.cluster), ptx.many("b32", "wu", s.cluster)
    ptx("mad.lo.u32 i0, lane, 4, bits", "mov.u32 place, 0", "mov.u32 total, 0")
    for r, union in enumerate(unions):
        ptx(f"mapa.shared::cluster.u32 {union}, i0, {r}")
    for start in range(0, s.words, 32):
        ptx(f"add.u32 i0, lane, {start}", f"setp.lt.u32 pn, i0, {s.words}", "setp.lt.u32 ph, i0, first")
        for union, word in zip(unions, words, strict=True):
            offset = 4 * (s.bunch * s.words + start)
            ptx(f"mov.b32 {word}, 0", f"@pn ld.shared::cluster.b32 {word}, [{union}+{offset}]")
        for word in words[1:]:
            ptx(f"or.b32 {words[0]}, {words[0]}, {word}")
        ptx(f"popc.b32 i1, {words[0]}", "add.u32 total, total, i1", "@ph add.u32 place, place, i1")
    ptx("redux.sync.add.u32 total, total, 0xffffffff", "redux.sync.add.u32 place, place, 0xffffffff")


def _write(ptx: Writer, s: SelectShape, word: str, i: int) -> None:
    """The blocks of the word `first + i`, of which lane c has node c's; moves `place` behind them."""
    empty = ptx.label()
    ptx(f"redux.sync.or.b32 un, {word}, 0xffffffff", "setp.eq.u32 pn, un, 0", f"@pn bra {empty}", "mov.u32 own_bits, 0")
    for c in range(s.group):
        ptx(
            f"shfl.sync.idx.b32 one, {word}, {c}, 31, 0xffffffff",
            "and.b32 one, one, bit",
            "setp.ne.u32 pu, one, 0",
            f"@pu or.b32 own_bits, own_bits, {1 << c}",
        )
    ptx(
        "and.b32 at, un, below",
        "popc.b32 at, at",
        "add.u32 at, at, place",
        "popc.b32 i1, un",
        "add.u32 place, place, i1",
        "setp.ne.u32 ph, own_bits, 0",
        f"setp.lt.and.u32 ph, at, {s.merged_width}, ph",
        "mul.wide.u32 w0, at, 4",
        f"add.u32 i0, first, {i}",
        "mad.lo.u32 i0, i0, 32, lane",
        "add.u64 slot, amer, w0",
        "@ph st.global.b32 [slot], i0",
        "add.u64 slot, aown, w0",
        "@ph st.global.b32 [slot], own_bits",
    )
    ptx.at(empty)
