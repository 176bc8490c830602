"""Compressed branch and block selection: both implementations against float64, node by node."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import masking
from ssv_jax.pallas_kernels.block_select import api, block_select, compressed_attention
from tests.pallas_kernels.cases import (
    BFLOAT16,
    CASES,
    Case,
    Pass,
    answer,
    close,
    jit,
    make_pass,
    on_host,
    random_parents,
    same_bits,
    sweep,
)

NAMES = tuple(api.IMPLEMENTATIONS)


def compiled(case: Case, name: str) -> Callable[[Pass], tuple[np.ndarray, np.ndarray]]:
    """A fresh compilation, so that patched module constants count."""
    op = functools.partial(block_select, geometry=case.sizes, scale=case.scale, implementation=name)
    return functools.partial(on_host, jit(lambda p: op(p.q, p.cached, p.tree, p.queries), name))


compiled_once = functools.cache(compiled)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_implementation_equals_the_oracle_at_every_boundary(case):
    """Wrong blocks, or another output than from-scratch attention on the node's own path (faults 20, 23, 24)."""
    functions = {name: compiled_once(case, name) for name in ("xla", "reference")}
    undecided = total = 0
    for given in sweep(case):
        want = answer(given, case.sizes, case.capacity)
        for name, function in functions.items():
            out, blocks = function(given)
            where = f"{name} at lengths {given.queries.length}, parents {given.queries.parent}"
            assert out.dtype == jnp.float32 and blocks.dtype == jnp.int32
            close(out, want.cmp, case.tolerance, where)
            same_bits(np.where(want.decided[..., None], blocks, -9), np.where(want.decided[..., None], want.blocks, -9))
        undecided, total = undecided + (~want.decided).sum(), total + want.decided.size
    assert undecided <= 0.01 * total, "the comparison of selections would be vacuous"


@pytest.mark.parametrize("case", BFLOAT16, ids=str)
def test_bfloat16_selects_what_float32_selects_from_the_same_inputs(case):
    """Rounding scores or masses to bfloat16 would swap blocks whose masses differ by a percent."""
    reference, xla = compiled_once(case, "reference"), compiled_once(case, "xla")
    for given in sweep(case, count=6):
        want = answer(given, case.sizes, case.capacity)
        for out, blocks in (reference(given), xla(given)):
            assert out.dtype == jnp.float32
            close(out, want.cmp, case.tolerance)
            same_bits(np.where(want.decided[..., None], blocks, -9), np.where(want.decided[..., None], want.blocks, -9))
        close(reference(given)[0], want.cmp, 3e-6)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_garbage_beyond_the_length_changes_no_bit(name):
    """A reader of stale rows: what a rejected draft left in the buffer leaks into later tokens (fault 16)."""
    case = CASES[1]
    function = compiled_once(case, name)
    for clean, dirty in zip(sweep(case, count=6, poison=0.0), sweep(case, count=6, poison=1e4), strict=True):
        for a, b in zip(function(clean), function(dirty), strict=True):
            same_bits(a, b)


@pytest.mark.parametrize("limit", [1, 700])
def test_tiles_of_queries_change_nothing(limit, monkeypatch):
    """A tile boundary that drops, repeats or reorders queries: long prompts differ from short ones."""
    case = CASES[0]
    given = sweep(case, count=3)[2]
    out, blocks = compiled_once(case, "xla")(given)
    monkeypatch.setattr(masking, "MAX_SCORE_ELEMENTS", limit)
    tiled = compiled(case, "xla")
    close(tiled(given)[0], out, 1e-6)
    same_bits(tiled(given)[1], blocks)
    alone = functools.partial(compressed_attention, geometry=case.sizes, scale=case.scale, implementation="xla")
    close(jax.jit(lambda p: alone(p.q, p.cached, p.tree, p.queries))(given), out, 1e-6)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_compressed_attention_is_the_same_branch(name):
    """A reuse layer whose compressed branch differs from a refresh layer's."""
    case = CASES[2]
    given = sweep(case, count=3)[-1]
    alone = functools.partial(compressed_attention, geometry=case.sizes, scale=case.scale, implementation=name)
    out = jax.jit(lambda p: alone(p.q, p.cached, p.tree, p.queries))(given)
    close(out, compiled_once(case, name)(given)[0], 1e-6)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_equal_masses_go_to_the_lower_block(name):
    """Ties broken by a sort's whim: decoding and verification pick different blocks (fault 20)."""
    case = Case(geometry="equal", nodes=5, kv_heads=2, group=1, dim=8, blocks=13)
    given = make_pass(case, 33, random_parents(np.random.default_rng(0), 5, "chain")[None], 0)
    flat = Pass(
        q=jnp.zeros_like(given.q), cached=given.cached, tree=given.tree, queries=given.queries, gates=given.gates
    )
    _, blocks = compiled_once(case, name)(flat)
    own = np.asarray(given.queries.position)[0] // 4
    for node in range(5):
        # l = d = l' and equal scores: every complete block has the same mass, the own incomplete one has none
        # but is forced.
        for head in range(2):
            assert blocks[0, head, node].tolist() == [0, 1, own[node]]


@pytest.mark.parametrize("name", ["xla", "reference"])
@pytest.mark.parametrize("geometry", ["paper", "equal"])
def test_no_entry_gives_zero_output_and_blocks_of_the_past_only(geometry, name):
    """NaN or an average of garbage before the first entry exists; a future block in an empty slot (A2, A4)."""
    case = Case(geometry=geometry, nodes=2, kv_heads=1, group=2, dim=8, blocks=6)
    given = make_pass(case, 0, np.array([[-1, 0]]), 0, poison=1e4)
    out, blocks = compiled_once(case, name)(given)
    for node in range(2):
        if node + 1 < case.sizes.kernel_size:
            assert not np.any(out[0, node])
        assert blocks[0, 0, node].tolist() == [0] + [-1] * (case.sizes.selection_width(case.capacity) - 1)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_mass_that_underflows_still_beats_the_future(name):
    """Future blocks masked with 0 instead of -inf push out a past block whose mass underflowed (A4)."""
    case = Case(geometry="equal", nodes=1, kv_heads=1, group=1, dim=8, blocks=13)
    given = make_pass(case, 12, np.array([[-1]]), 0)
    # Entry 0 takes everything: entries 1 and 2 underflow to mass 0, as future blocks would have.
    k_cmp = jnp.zeros_like(given.cached.k_cmp).at[0, 0, 0].set(100.0)
    cached = type(given.cached)(k=given.cached.k, v=given.cached.v, k_cmp=k_cmp, v_cmp=given.cached.v_cmp)
    sharp = Pass(
        q=jnp.full_like(given.q, 10.0), cached=cached, tree=given.tree, queries=given.queries, gates=given.gates
    )
    _, blocks = compiled_once(case, name)(sharp)
    assert blocks[0, 0, 0].tolist() == [0, 1, 3]


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_hand_computed_mass_of_straddling_entries(name):
    """The sign of the index in equation 9: mass moves to the neighbouring block (fault 20)."""
    # l=8, d=4, l'=16: entry c covers tokens 4c ... 4c+7, so 3 straddles blocks 0 and 1, and 7 blocks 1 and 2.
    case = Case(geometry="wide", nodes=1, kv_heads=1, group=1, dim=8, blocks=5)
    given = make_pass(case, 66, np.array([[-1]]), 0)
    for heavy, expected in ((0, 0), (2, 0), (4, 1), (6, 1), (8, 2), (10, 2), (12, 3)):
        # One heavy entry; n = 2, so one free block beside the forced own block 4.
        k_cmp = jnp.zeros_like(given.cached.k_cmp).at[0, 0, heavy].set(9.0)
        cached = type(given.cached)(k=given.cached.k, v=given.cached.v, k_cmp=k_cmp, v_cmp=given.cached.v_cmp)
        one = Pass(q=jnp.ones_like(given.q), cached=cached, tree=given.tree, queries=given.queries, gates=given.gates)
        _, blocks = compiled_once(case, name)(one)
        assert blocks[0, 0, 0].tolist() == [expected, 4], heavy
    for pair, expected in (((3, 4), 1), ((2, 3), 0), ((7, 8), 2), ((6, 7), 1)):
        # A straddling entry counts once for either side; its companion decides.
        k_cmp = jnp.zeros_like(given.cached.k_cmp).at[0, 0, np.array(pair)].set(9.0)
        cached = type(given.cached)(k=given.cached.k, v=given.cached.v, k_cmp=k_cmp, v_cmp=given.cached.v_cmp)
        one = Pass(q=jnp.ones_like(given.q), cached=cached, tree=given.tree, queries=given.queries, gates=given.gates)
        _, blocks = compiled_once(case, name)(one)
        assert blocks[0, 0, 0].tolist() == [expected, 4], pair


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_other_branches_of_the_tree_are_invisible(name):
    """A sibling's entry counted in the softmax: acceptance depends on rejected drafts (C4, C5)."""
    case = CASES[3]
    rng = np.random.default_rng(5)
    given = make_pass(case, 18, random_parents(rng, case.nodes, "random")[None], 3)
    function = compiled_once(case, name)
    out, blocks = function(given)
    done = given.tree.completions
    assert int((done.node >= 0).sum()) >= 2
    for node in range(case.nodes):
        foreign = np.array([n >= 0 and not given.queries.ancestor[0, node, n] for n in np.asarray(done.node)[0]])
        tree = type(given.tree)(
            k=given.tree.k,
            v=given.tree.v,
            k_cmp=jnp.where(foreign[None, None, :, None], 1e4, given.tree.k_cmp),
            v_cmp=jnp.where(foreign[None, None, :, None], -1e4, given.tree.v_cmp),
            completions=done,
        )
        other = function(Pass(q=given.q, cached=given.cached, tree=tree, queries=given.queries, gates=given.gates))
        same_bits(other[0][:, node], out[:, node])
        same_bits(other[1][:, :, node], blocks[:, :, node])
