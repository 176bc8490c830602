"""The Hopper kernels of the compressed branch: interpreted against the definition, lowered for CUDA, run on a GPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import (
    CachedKV,
    Geometry,
    TreeKV,
    TreeQueries,
    UnsupportedKernelError,
    completions,
    merge,
)
from ssv_jax.pallas_kernels.block_select import cases, mosaic_gpu, reference, tiles
from ssv_jax.pallas_kernels.block_select.cases import Case
from ssv_jax.pallas_kernels.block_select.mosaic_attend import AttendConfig

POISON = 3e4  # where nothing may read: large, but finite in float16


def random_tree(
    rng: np.random.Generator, batch: int, nodes: int, kind: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    parent = np.full((batch, nodes), -1, np.int32)
    depth = np.zeros((batch, nodes), np.int32)
    ancestor = np.zeros((batch, nodes, nodes), bool)
    for b in range(batch):
        for t in range(nodes):
            ancestor[b, t, t] = True
            if t:
                parent[b, t] = {"chain": t - 1, "star": 0}.get(kind, int(rng.integers(max(0, t - 3), t)))
                depth[b, t] = depth[b, parent[b, t]] + 1
                ancestor[b, t] |= ancestor[b, parent[b, t]]
    return parent, depth, ancestor


def inputs(case: Case, seed: int = 0) -> tuple[jax.Array, CachedKV, TreeKV, TreeQueries]:
    """Random arguments; what nothing may read is poisoned."""
    rng = np.random.default_rng(seed)
    geometry, batch, dtype = case.geometry, len(case.lengths), jnp.dtype(case.dtype)
    parent, depth, ancestor = random_tree(rng, batch, case.nodes, case.tree)
    length = np.asarray(case.lengths, np.int32)
    queries = TreeQueries(
        length=jnp.asarray(length),
        position=jnp.asarray(length[:, None] + depth, jnp.int32),
        ancestor=jnp.asarray(ancestor),
        parent=jnp.asarray(parent),
    )
    done = completions(queries, geometry)

    def draw(seen: np.ndarray) -> jax.Array:
        values = rng.standard_normal((batch, case.kv_heads, seen.shape[1], case.dim))
        return jnp.asarray(np.where(seen[:, None, :, None], values, POISON), dtype)

    entries = geometry.entries(case.capacity)
    seen = np.arange(entries) < np.asarray([geometry.entries(int(n)) for n in length])[:, None]
    blank = jnp.zeros((batch, case.kv_heads, case.capacity, case.dim), dtype)
    cached = CachedKV(k=blank, v=blank, k_cmp=draw(seen), v_cmp=draw(seen))
    mine = jnp.zeros((batch, case.kv_heads, case.nodes, case.dim), dtype)
    present = np.asarray(done.node) >= 0
    tree = TreeKV(k=mine, v=mine, k_cmp=draw(present), v_cmp=draw(present), completions=done)
    q = jnp.asarray(rng.standard_normal((batch, case.nodes, case.kv_heads, case.heads, case.dim)), dtype)
    return q, cached, tree, queries


def check(case: Case, result: mosaic_gpu.Selected, args: tuple, scale: float) -> None:
    want, blocks = reference.block_select(*args, geometry=case.geometry, scale=scale)
    error = jnp.linalg.norm(result.out - want) / jnp.maximum(jnp.linalg.norm(want), 1e-30)
    assert float(error) < cases.OUTPUT_TOLERANCE[case.dtype]
    np.testing.assert_array_equal(result.blocks, blocks)  # the seeds leave no gap below the tolerance
    if case.group:
        schedule = merge(blocks, case.group, case.capacity // case.geometry.block_size)
        np.testing.assert_array_equal(result.merged, schedule.blocks)
        np.testing.assert_array_equal(result.owners, schedule.owners)


def config_of(case: Case) -> AttendConfig:
    return AttendConfig(tile=case.tile, splits=case.splits, warpgroups=case.warpgroups, stages=2, narrow=case.narrow)


@pytest.mark.parametrize("name", cases.INTERPRETED)
def test_interpreted_kernels_equal_the_definition(name: str) -> None:
    # Not under jit: the interpreter's threads and a jitted caller can wait for each other on two cores.
    case = cases.INTERPRETED[name]
    args = inputs(case)
    scale = case.dim**-0.5
    result = mosaic_gpu.select_and_attend(
        *args,
        geometry=case.geometry,
        scale=scale,
        group=case.group,
        config=config_of(case),
        interpret=plgpu.InterpretGPUParams(),
    )
    check(case, result, args, scale)


def test_interpreted_masses_of_few_rows_equal_those_of_a_full_tile() -> None:
    case = cases.INTERPRETED["narrow: three heads, stride 8"]
    args, blocks = inputs(case), case.tile // 8

    def parts(narrow: bool) -> dict[str, jax.Array]:
        config = dataclasses.replace(config_of(case), narrow=narrow)
        laid = mosaic_gpu.lay_out(
            *args, geometry=case.geometry, scale=0.1, select=True, group=case.group, config=config
        )
        found = laid.attend(scale=0.1, interpret=plgpu.InterpretGPUParams())
        rows = jnp.asarray([h * laid.per_tile_nodes + n for h in range(case.heads) for n in range(case.nodes)])
        return {
            "mass": found.mass[:, :, 1:3, rows, : blocks + 1],  # the last is the next tile's first
            "top": jnp.concatenate([found.top[:, :, 1:3, rows], found.top[:, :, 32:, rows]], 2),
            "tree": found.tree[:, :, rows],
            "stats": found.stats[..., rows],
        }

    few, full = parts(True), parts(False)
    assert 0 < jnp.count_nonzero(full["tree"]) < case.heads * case.nodes
    for name, want in full.items():
        np.testing.assert_allclose(few[name], want, rtol=mosaic_gpu.SCORE_TOLERANCE, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("name", ["no entry", "narrow: no entry"])
def test_interpreted_attention_alone_has_the_same_bits(name: str) -> None:
    case = cases.INTERPRETED[name]
    args = inputs(case)
    run = functools.partial(
        mosaic_gpu.select_and_attend,
        *args,
        geometry=case.geometry,
        scale=0.1,
        config=config_of(case),
        interpret=plgpu.InterpretGPUParams(),
    )
    np.testing.assert_array_equal(run(select=False).out, run().out)
    np.testing.assert_array_equal(run(select=False).out, 0)


@pytest.mark.parametrize("select", [True, False], ids=["select", "attention alone"])
@pytest.mark.parametrize("name", cases.LOWERED)
def test_kernels_lower_for_cuda(name: str, select: bool) -> None:
    case = cases.LOWERED[name]
    arguments = jax.eval_shape(functools.partial(inputs_abstract, case))

    def run(*args: object) -> object:
        result = mosaic_gpu.select_and_attend(
            *args, geometry=case.geometry, scale=0.1, group=case.group if select else 0, select=select
        )
        return result.out, result.blocks, result.merged, result.owners

    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def test_layers_share_one_lowering() -> None:
    case = cases.LOWERED["T=1"]
    arguments = jax.eval_shape(functools.partial(inputs_abstract, case))

    def layers(q: jax.Array, *rest: object) -> jax.Array:
        for _ in range(3):
            found = mosaic_gpu.select_and_attend(q, *rest, geometry=case.geometry, scale=0.1, group=case.group)
            q = found.out.astype(q.dtype)
        return q

    text = jax.jit(layers).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu_v2") == 2  # two launches, however many layers


def inputs_abstract(case: Case) -> tuple[jax.Array, CachedKV, TreeKV, TreeQueries]:
    """Arguments of a case's shapes, without values worth looking at."""
    batch, dtype, geometry = len(case.lengths), jnp.dtype(case.dtype), case.geometry
    queries = TreeQueries(
        length=jnp.zeros((batch,), jnp.int32),
        position=jnp.zeros((batch, case.nodes), jnp.int32),
        ancestor=jnp.zeros((batch, case.nodes, case.nodes), bool),
        parent=jnp.zeros((batch, case.nodes), jnp.int32),
    )
    done = completions(queries, geometry)

    def zeros(rows: int) -> jax.Array:
        return jnp.zeros((batch, case.kv_heads, rows, case.dim), dtype)

    entries, slots = geometry.entries(case.capacity), done.node.shape[1]
    cached = CachedKV(k=zeros(case.capacity), v=zeros(case.capacity), k_cmp=zeros(entries), v_cmp=zeros(entries))
    tree = TreeKV(k=zeros(case.nodes), v=zeros(case.nodes), k_cmp=zeros(slots), v_cmp=zeros(slots), completions=done)
    q = jnp.zeros((batch, case.nodes, case.kv_heads, case.heads, case.dim), dtype)
    return q, cached, tree, queries


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"dim": 32}, "head dim"),
        ({"heads": 17}, "heads per KV head"),
    ],
)
def test_what_the_kernels_do_not_cover_is_refused(change: dict, reason: str) -> None:
    fields = {"nodes": 2, "heads": 2, "dim": 64, "capacity": 2048, "lengths": (100,)} | change
    args = inputs(Case(**fields))
    with pytest.raises(UnsupportedKernelError, match=reason):
        mosaic_gpu.select_and_attend(*args, geometry=cases.DEFAULT, scale=0.1)


def test_forced_blocks_must_fit() -> None:
    geometry = Geometry(
        kernel_size=32, kernel_stride=16, block_size=64, n_blocks=2, init_blocks=1, local_blocks=2, window=64
    )
    args = inputs(Case(nodes=2, heads=2, dim=64, capacity=2048, lengths=(100,), geometry=geometry))
    with pytest.raises(UnsupportedKernelError, match="forced"):
        mosaic_gpu.select_and_attend(*args, geometry=geometry, scale=0.1)


def test_caches_of_a_million_tokens_are_taken_and_longer_ones_refused() -> None:
    run = functools.partial(mosaic_gpu.select_and_attend, geometry=cases.DEFAULT, scale=0.1, group=1)
    for capacity, blocks in ((1 << 20, 16384), ((1 << 20) + 64, 16385)):
        case = Case(nodes=1, heads=4, dim=128, capacity=capacity, lengths=(0,), kv_heads=8)
        arguments = jax.eval_shape(functools.partial(inputs_abstract, case))
        if blocks <= mosaic_gpu.MAX_BLOCKS:
            assert jax.eval_shape(run, *arguments).blocks.shape == (1, 8, 1, 16)
        else:
            with pytest.raises(UnsupportedKernelError, match=f"at most 16384 blocks.*got {blocks}"):
                jax.eval_shape(run, *arguments)


@pytest.mark.parametrize(
    ("nodes", "bunch", "blocks", "warps"),
    [(1, 4, 1024, 4), (65, 4, 1024, 2), (1, 4, 8192, 8), (32, 4, 8192, 8), (64, 4, 8192, 4), (65, 4, 8192, 2)],
)
def test_selections_of_long_caches_get_more_warps(nodes: int, bunch: int, blocks: int, warps: int) -> None:
    chosen = tiles.choose(
        row_tiles=1, heads=8, entries=4 * blocks - 1, nodes=nodes, bunch=bunch, blocks=blocks, rows=4 * nodes
    )
    assert chosen.select_warps == warps


@pytest.mark.parametrize(
    ("rows", "heads", "narrow", "stages"), [(4, 8, True, 4), (8, 8, True, 4), (9, 8, False, 2), (4, 16, True, 2)]
)
def test_few_query_rows_take_the_place_of_columns(rows: int, heads: int, narrow: bool, stages: int) -> None:
    chosen = tiles.choose(row_tiles=1, heads=heads, entries=4095, nodes=1, bunch=4, blocks=1024, rows=rows)
    assert (chosen.narrow, chosen.stages) == (narrow, stages)


def test_a_configuration_for_few_query_rows_refuses_more() -> None:
    case = Case(nodes=3, heads=3, dim=64, capacity=2048, lengths=(100,), narrow=True)
    with pytest.raises(ValueError, match=r"narrow needs T \* G <= 8, got 3 \* 3"):
        mosaic_gpu.select_and_attend(*inputs(case), geometry=case.geometry, scale=0.1, config=config_of(case))


@pytest.mark.parametrize(
    ("nodes", "heads", "group", "most", "merged", "bunch", "per_tile"),
    [
        (65, 4, 16, 0, 16, 16, 16),
        (65, 4, 16, 4, 16, 4, 16),
        (65, 4, 16, 8, 16, 8, 16),
        (65, 4, 4, 16, 4, 4, 16),
        (5, 4, 8, 4, 8, 4, 8),
        (65, 4, 13, 4, 0, 4, 16),
        (65, 3, 8, 0, 0, 4, 20),  # a thread block of eight nodes would be in two row tiles
        (65, 3, 8, 8, 8, 4, 20),
        (9, 16, 16, 16, 16, 4, 4),
    ],
)
def test_groups_larger_than_a_bunch_take_a_cluster(
    nodes: int, heads: int, group: int, most: int, merged: int, bunch: int, per_tile: int
) -> None:
    assert tiles.bunch_of(nodes=nodes, heads=heads, group=group, most=most) == (merged, bunch, per_tile)
    again = tiles.bunch_of(nodes=nodes, heads=heads, group=group, most=bunch if most else 0)
    assert again == (merged, bunch, per_tile)  # as a configuration that `tiles.choose` made says


def test_sizes_of_a_bunch_are_checked() -> None:
    with pytest.raises(ValueError, match="select_bunch must be 0, 4, 8 or 16, got 3"):
        tiles.bunch_of(nodes=5, heads=4, group=8, most=3)


@pytest.mark.parametrize(("most", "bunch", "cluster"), [(0, 16, 1), (8, 8, 2), (4, 4, 4)])
def test_a_configuration_forces_the_bunch(most: int, bunch: int, cluster: int) -> None:
    case = dataclasses.replace(cases.LOWERED["T=65, groups of 16"], capacity=1024, kv_heads=1)
    config = AttendConfig(tile=64, splits=1, warpgroups=1, stages=2, select_warps=4, select_bunch=most)
    found = []

    def lay_out(*args: object) -> jax.Array:
        laid = mosaic_gpu.lay_out(*args, geometry=case.geometry, scale=0.1, select=True, group=16, config=config)
        found.append(laid.plan)
        return laid.own

    assert jax.eval_shape(lay_out, *jax.eval_shape(functools.partial(inputs_abstract, case))).shape == (1, 80)
    assert (found[0].bunch, found[0].cluster, found[0].warps) == (bunch, cluster, min(4, 32 // bunch))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU is there")
@pytest.mark.parametrize("op", [mosaic_gpu.block_select, mosaic_gpu.compressed_attention])
def test_without_a_gpu_the_kernels_are_refused(op: object) -> None:
    case = cases.INTERPRETED["no entry"]
    with pytest.raises(UnsupportedKernelError, match="GPU"):
        op(*inputs(case), geometry=case.geometry, scale=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*cases.INTERPRETED, *cases.LONG])
def test_on_a_gpu_kernels_equal_the_definition_twice(name: str) -> None:
    case = (cases.INTERPRETED | cases.LONG)[name]
    args = inputs(case, seed=1)
    scale = case.dim**-0.5
    run = jax.jit(
        lambda *a: mosaic_gpu.select_and_attend(*a, geometry=case.geometry, scale=scale, group=case.group).out
    )
    np.testing.assert_array_equal(run(*args), run(*args))
    with jax.default_matmul_precision("highest"):
        result = mosaic_gpu.select_and_attend(*args, geometry=case.geometry, scale=scale, group=case.group)
        check(case, result, args, scale)
    alone = mosaic_gpu.compressed_attention(*args, geometry=case.geometry, scale=scale)
    out, blocks = mosaic_gpu.block_select(*args, geometry=case.geometry, scale=scale)
    np.testing.assert_array_equal(alone, out)
    np.testing.assert_array_equal(blocks, result.blocks)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "warps"), [*((name, 2) for name in cases.CLUSTERED), *((next(iter(cases.CLUSTERED)), n) for n in (1, 4))]
)
def test_on_a_gpu_clusters_give_the_bits_of_one_thread_block_for_a_group(name: str, warps: int) -> None:
    case = cases.CLUSTERED[name]
    args = inputs(case, seed=2)
    run = functools.partial(
        mosaic_gpu.select_and_attend, *args, geometry=case.geometry, scale=case.dim**-0.5, group=case.group
    )
    config = dataclasses.replace(config_of(case), tile=64, select_warps=warps)
    whole = run(config=config)
    for most in (4, 8):
        for _ in range(3):
            found = run(config=dataclasses.replace(config, select_bunch=most))
            for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(whole), strict=True):
                np.testing.assert_array_equal(got, want)
