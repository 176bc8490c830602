"""The selection's instructions, emulated, against the portable selection; the emulator itself against known results."""

from __future__ import annotations

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import merge
from ssv_jax.pallas_kernels.block_select.mosaic_attend import TREE_TILE, Partials, mass_depth
from ssv_jax.pallas_kernels.block_select.mosaic_choose import SelectPlan, portable_select
from ssv_jax.pallas_kernels.block_select.mosaic_select import OPERANDS, select_ptx
from ssv_jax.pallas_kernels.block_select.select_shape import SelectShape
from tests.pallas_kernels.ptx_emulator import Memory, run_block, run_cluster

BASE = 1 << 33  # global addresses do not fit 32 bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One selection; `visible` and `completed` entries, and the block that most nodes stand in."""

    nodes: int = 5
    kv_heads: int = 1
    heads: int = 4
    per_tile_nodes: int = 8
    splits: int = 3
    per_tile: int = 32
    ratio: int = 4
    steps: int = 8
    spills: bool = True
    tree_width: int = 64
    extra: int = 2
    blocks: int = 250
    init: int = 1
    local: int = 2
    slots: int = 16
    group: int = 4
    bunch: int = 4
    warps: int = 1
    visible: int = 900
    completed: int = 3
    own: int = 225


CASES = {
    "one warp": Case(),
    "two warps, two heads": Case(warps=2, kv_heads=2),
    "four warps": Case(warps=4),
    "narrow tiles, pairs": Case(per_tile=16, steps=16, group=2, visible=1000, own=248),
    "one node, short context": Case(nodes=1, per_tile_nodes=4, group=1, warps=4, visible=100, own=25),
    "nothing visible": Case(visible=0, completed=0, own=0),
    "three heads, two row tiles, no group": Case(nodes=22, heads=3, per_tile_nodes=20, group=0, splits=1),
    "64K": Case(steps=32, blocks=1024, visible=4000, own=1000, warps=2),
    "many words, two chunks of completed entries": Case(
        steps=40, blocks=1270, visible=4990, own=1247, warps=4, tree_width=128, completed=70, extra=4
    ),
    "wide tiles, nothing spills": Case(per_tile=128, ratio=1, spills=False, steps=3, blocks=380, visible=370, own=371),
    "groups of eight": Case(nodes=9, group=8, bunch=8, warps=2, per_tile_nodes=16),
    "groups of sixteen": Case(
        nodes=18, group=16, bunch=16, per_tile_nodes=16, steps=4, blocks=128, visible=500, own=125
    ),
    "512K, more warps, pairs": Case(
        nodes=2, heads=1, steps=512, per_tile=16, blocks=8192, visible=32700, own=8170, warps=8, group=2
    ),
    "512K, short context": Case(
        nodes=1, heads=1, steps=512, per_tile=16, blocks=8192, visible=1990, own=497, warps=4, per_tile_nodes=4, group=1
    ),
    "384K, groups of eight": Case(
        nodes=8, heads=1, steps=192, blocks=6144, visible=24500, own=6125, warps=2, group=8, bunch=8
    ),
    "nodes beyond the cache": Case(own=260, warps=2),
    "only forced blocks": Case(slots=3, warps=2),
    "eight over two, some without nodes": Case(nodes=9, group=8, warps=2, kv_heads=2, heads=2),
    "sixteen over four, row tiles of twenty": Case(
        nodes=21, group=16, warps=4, heads=3, per_tile_nodes=20, steps=16, blocks=510, visible=2000, own=500
    ),
    "sixteen over two, one warp, short context": Case(
        nodes=13, group=16, bunch=8, heads=1, per_tile_nodes=16, visible=70, own=17
    ),
    "eight over two, one warp, only forced blocks": Case(nodes=7, group=8, slots=3),
    "sixteen over four, nothing visible": Case(nodes=18, group=16, warps=2, visible=0, completed=0, own=0, heads=1),
    "256K, eight over two, words in turns": Case(
        nodes=5, heads=1, steps=256, per_tile=16, blocks=4090, visible=16300, own=4080, warps=2, group=8
    ),
}


def data(case: Case, shape: SelectShape, seed: int) -> tuple[Partials, dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    pairs, rows = case.kv_heads, (case.kv_heads, shape.tiles)

    def positive(*sizes: int) -> np.ndarray:
        return rng.uniform(0.05, 1, (*rows, *sizes)).astype(np.float32)

    stats = np.stack([rng.normal(0, 3, (*rows, case.splits, 64)), positive(case.splits, 64)], axis=3)
    mass = positive(shape.depth, 64, shape.width)
    mass[:, :, 0] = mass[:, :, 1 + -(-case.visible // shape.tile_entries) :] = np.nan  # never written
    top = rng.normal(0, 3, (*rows, shape.tops, 64)).astype(np.float32)
    tree = positive(64, case.tree_width)
    near = case.own + rng.integers(0, 2, (1, shape.bunches * shape.bunch))
    arrays = {
        "stats": stats.astype(np.float32),
        "counts": np.array([[case.visible, case.completed, case.visible // case.ratio, 0]], np.int32),
        "mass": mass,
        "top": top,
        "tree": tree,
        "own": near.astype(np.int32),
        "weights": rng.integers(0, 3, (1, case.extra, case.tree_width)).astype(np.float32),
    }
    partials = Partials(
        out=jnp.zeros((pairs, shape.tiles, case.splits, 64, 64)),
        **{name: jnp.asarray(arrays[name]) for name in ("stats", "mass", "top", "tree")},
    )
    return partials, arrays


def shape_of(case: Case) -> SelectShape:
    depth = mass_depth(case.steps)
    return SelectShape(
        nodes=case.nodes,
        kv_heads=case.kv_heads,
        heads=case.heads,
        tiles=-(-case.nodes // case.per_tile_nodes),
        per_tile_nodes=case.per_tile_nodes,
        splits=case.splits,
        depth=depth,
        width=case.per_tile + 8 * case.spills,
        per_tile=case.per_tile,
        tile_entries=case.per_tile * case.ratio,
        steps=case.steps,
        tops=depth + case.tree_width // TREE_TILE,
        tree_width=case.tree_width,
        extra=case.extra,
        blocks=case.blocks,
        slots=case.slots,
        init=case.init,
        local=case.local,
        spills=case.spills,
        group=case.group,
        bunch=case.bunch,
        warps=case.warps,
    )


def emulate(shape: SelectShape, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the instructions write, over all thread blocks."""
    parts = -(-shape.nodes // shape.group) if shape.group else 0
    pairs = shape.kv_heads
    outputs = {
        "selected": (pairs, shape.nodes, shape.slots),
        "merged": (pairs, parts, shape.merged_width),
        "owners": (pairs, parts, shape.merged_width),
    }
    memory, at, address = Memory(1 << 26, BASE), BASE, {}
    for name, array in arrays.items():
        memory.place(at, array)
        address[name], at = at, at + -(-array.nbytes // 256) * 256
    for name, sizes in outputs.items():
        address[name], at = at, at + -(-int(np.prod(sizes)) * 4 // 256) * 256
    text = select_ptx(shape)
    for x in range(pairs):
        for bunch in range(0, shape.bunches, shape.cluster):
            where, sizes = [1024], shape.shared_words
            for words in sizes[:-1]:
                where.append(-(-(where[-1] + 4 * words) // 1024) * 1024)
            shared = [Memory(where[-1] + 4 * sizes[-1]) for _ in range(shape.cluster)]
            pointers = [address[name] for kind, name in OPERANDS if kind == "l"]
            run_cluster(text, [*pointers, *where, bunch, x], 32 * shape.bunch * shape.warps, memory, shared)
    return {name: memory.read(address[name], np.int32, sizes) for name, sizes in outputs.items()}


@pytest.mark.parametrize("name", CASES)
def test_emulated_instructions_choose_what_the_portable_selection_chooses(name: str) -> None:
    case = CASES[name]
    shape = shape_of(case)
    partials, arrays = data(case, shape, seed=len(name))
    plan = SelectPlan(
        slots=case.slots,
        blocks=case.blocks,
        init=case.init,
        local=case.local,
        ratio=case.ratio,
        steps=case.steps,
        per_tile=case.per_tile,
        spills=case.spills,
        group=case.group,
        bunch=case.bunch,
        warps=case.warps,
    )
    counts, own, weights = (jnp.asarray(arrays[name]) for name in ("counts", "own", "weights"))
    sizes = (1, case.nodes, case.kv_heads, case.heads, 64)
    want = portable_select(partials, counts, own, weights, sizes, case.per_tile_nodes, plan)
    got = emulate(shape, arrays)
    if case.own < case.blocks:
        np.testing.assert_array_equal(got["selected"], want)
    else:  # such nodes cannot be committed: nothing is promised but valid blocks in order
        assert got["selected"].max() < case.blocks
        want = jnp.asarray(got["selected"])
    if case.group:
        schedule = merge(want[None], case.group, case.blocks)
        np.testing.assert_array_equal(got["merged"], schedule.blocks[0])
        np.testing.assert_array_equal(got["owners"], schedule.owners[0])


@pytest.mark.parametrize("name", [name for name in CASES if "over" in name and CASES[name].blocks < 500])
def test_clusters_write_what_one_thread_block_for_the_group_writes(name: str) -> None:
    case = dataclasses.replace(CASES[name], per_tile_nodes=16, warps=1)
    whole = dataclasses.replace(case, bunch=case.group)
    _, arrays = data(case, shape_of(case), seed=3)
    arrays["mass"][~np.isnan(arrays["mass"])] = 1.0  # ties
    arrays["own"][0, ::2] = np.maximum(arrays["own"][0, ::2] - 3, 0)
    got, want = emulate(shape_of(case), arrays), emulate(shape_of(whole), arrays)
    for output in want:
        np.testing.assert_array_equal(got[output], want[output])


def test_thread_blocks_that_hold_their_groups_need_no_cluster() -> None:
    for name, case in CASES.items():
        assert ("cluster" in select_ptx(shape_of(case))) == (case.group > case.bunch) == ("over" in name), name


def test_the_emulator_finds_clusters_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = shape_of(CASES["eight over two, one warp, only forced blocks"])
    _, arrays = data(CASES["eight over two, one warp, only forced blocks"], shape, seed=0)
    right, lines = emulate(shape, arrays), select_ptx(shape).split("\n")
    barriers = [i for i, line in enumerate(lines) if line.startswith("barrier.cluster")]
    early, late = ("\n".join(np.delete(lines, barriers[i : i + 2])) for i in (0, 2))
    assert len(barriers) == 4
    monkeypatch.setattr(sys.modules[__name__], "select_ptx", lambda _: early)
    assert (emulate(shape, arrays)["owners"] != right["owners"]).any()  # of maps without marks
    monkeypatch.setattr(sys.modules[__name__], "select_ptx", lambda _: late)
    with pytest.raises(AssertionError, match="never stored"):  # of maps of a block that has ended
        emulate(shape, arrays)


def test_equal_scores_go_to_the_lower_block() -> None:
    case = Case(warps=2, spills=False, completed=0, own=240, nodes=1, group=1, per_tile_nodes=4)
    shape = shape_of(case)
    _, arrays = data(case, shape, seed=0)
    arrays["mass"][:, :, 1:-1] = 1.0
    arrays["top"][:] = 0.0
    got = emulate(shape, arrays)["selected"][0, 0]
    own = int(arrays["own"][0, 0])
    np.testing.assert_array_equal(got, [*range(14), own - 1, own])


@pytest.mark.parametrize(("order", "warps"), [("rising", 1), ("falling", 4), ("equal", 4), ("few", 1)])
def test_passes_find_the_best_in_any_order(order: str, warps: int) -> None:
    case = Case(
        nodes=1, heads=1, group=1, per_tile_nodes=4, splits=1, steps=160, blocks=5120, visible=20480, completed=0,
        own=5119, spills=False, warps=warps,
    )  # fmt: skip
    shape = shape_of(case)
    assert shape.passes > 1
    _, arrays = data(case, shape, seed=0)
    index = np.arange(5120)
    few = 2 * (index % 500 == 7)
    scores = {"rising": index + 1, "falling": 6000 - index, "equal": 0 * index + 1, "few": few}[order]
    arrays["mass"][:, :, 1:161, 0, :32] = scores.reshape(160, 32)
    arrays["top"][:] = 0.0
    arrays["own"][:] = 5119
    got = emulate(shape, arrays)["selected"][0, 0]
    best = np.argsort(-scores[1:-2], kind="stable")[:13] + 1
    np.testing.assert_array_equal(got, [0, *np.sort(best), 5118, 5119])


def test_the_emulator_runs_divergent_loops_and_shuffles() -> None:
    text = """{
    .reg .b32 n, lane;
    .reg .b64 at;
    .reg .pred p;
    mov.b64 at, $0;
    and.b32 lane, $1, 31;
    mov.u32 n, lane;
    AGAIN:
    setp.lt.u32 p, n, 40;
    @p add.u32 n, n, 7;
    @p bra AGAIN;
    bar.warp.sync 0xffffffff;
    shfl.sync.bfly.b32 n, n, 1, 31, 0xffffffff;
    mul.wide.u32 at, lane, 4;
    add.u64 at, at, $0;
    st.global.b32 [at], n;
    }"""
    memory = Memory(128, BASE)
    run_block(text, [BASE], 32, memory, Memory(0))
    want = [lane + 7 * -(-(40 - lane) // 7) for lane in range(32)]
    np.testing.assert_array_equal(memory.read(BASE, np.int32, (32,)), np.asarray(want)[np.arange(32) ^ 1])
