"""Selected and window branches under any selection, grouped or not, against float64."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import ShapeError, masking, merge, sparse_verify
from ssv_jax.pallas_kernels.sparse_verify import xla
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
    random_blocks,
    random_parents,
    same_bits,
    selected_rows,
    sweep,
)

Verify = Callable[[Pass, np.ndarray], np.ndarray]
# xla.GATHER_RATIO that forces either branch.
BRANCHES = {"gather": 0, "mask": 10**6}


def compiled(case: Case, name: str, group: int = 1) -> Verify:
    """A fresh compilation, so that patched module constants count."""
    op = functools.partial(sparse_verify, geometry=case.sizes, scale=case.scale, implementation=name)

    def function(p: Pass, blocks: jax.Array) -> jax.Array:
        return op(p.q, p.cached, p.tree, p.queries, merge(blocks, group, case.blocks), p.gates)

    return functools.partial(on_host, jit(function, name))


@functools.cache
def compiled_once(case: Case, name: str, group: int = 1) -> Verify:
    """`name` is `reference`, `gather` or `mask`; compiled on the first call."""
    if name == "reference":
        return compiled(case, name, group)
    function = compiled(case, "xla", group)

    def call(p: Pass, blocks: np.ndarray) -> np.ndarray:
        ratio, xla.GATHER_RATIO = xla.GATHER_RATIO, BRANCHES[name]
        try:
            return function(p, blocks)
        finally:
            xla.GATHER_RATIO = ratio

    return call


def selections(case: Case, given: Pass, seed: int) -> np.ndarray:
    batch, nodes = given.queries.position.shape
    width = case.sizes.selection_width(case.capacity)
    return random_blocks(np.random.default_rng(seed), (batch, case.kv_heads, nodes), width, case.blocks)


@pytest.mark.parametrize(("case", "group"), [*zip(CASES, (3, 2, 1, 4, 1), strict=True), (BFLOAT16[0], 4)], ids=str)
def test_every_path_equals_the_oracle_under_its_own_selection(case, group):
    """The rows that autoregressive NSA would read, from cache and tree, at every boundary (C2, C3, fault 23)."""
    for given in sweep(case):
        want = answer(given, case.sizes, case.capacity)
        gates = np.asarray(given.gates, np.float64)
        expected = gates[..., 1:2] * want.slc + gates[..., 2:3] * want.win
        for name in ("gather", "mask", "reference"):
            tolerance = 3e-6 if name == "reference" else case.tolerance
            out = compiled_once(case, name, group)(given, want.blocks.astype(np.int32))
            assert out.dtype == np.float32
            close(out, expected, tolerance, f"{name}, {given.queries.length}, {given.queries.parent}")


@pytest.mark.parametrize("case", (CASES[0], CASES[1], CASES[3]), ids=str)
def test_any_selection_even_without_the_own_block_or_empty(case):
    """The tail block taken for selected (fault 22); NaN for a node that selected nothing."""
    group = {"paper": 3, "straddling": 2, "equal": 4}[case.geometry]
    for i, given in enumerate(sweep(case, count=6, seed=50)):
        blocks = selections(case, given, i)
        only = dataclasses.replace(given, gates=jnp.broadcast_to(jnp.array([0.0, 1.0, 0.0]), given.gates.shape))
        expected = selected_rows(given, case.sizes, blocks)
        assert (np.abs(expected).sum((-1, -2)) == 0).any(), "no node without keys: weaker than it says"
        for name in ("gather", "mask", "reference"):
            close(compiled_once(case, name, group)(only, blocks), expected, case.tolerance, name)


def test_grouping_changes_no_bit_of_the_reference():
    """An alien block that is not an exact no-op: the tokens emitted would depend on the group size (D)."""
    case = CASES[0]
    for i, given in enumerate(sweep(case, count=5, seed=9)):
        for blocks in (selections(case, given, i), answer(given, case.sizes, case.capacity).blocks.astype(np.int32)):
            alone = compiled_once(case, "reference", 1)(given, blocks)
            for group in (2, 3, 4, 5):
                same_bits(compiled_once(case, "reference", group)(given, blocks), alone, f"group {group}")


@pytest.mark.parametrize("name", ["gather", "mask"])
def test_grouping_changes_little_of_the_portable_path(name):
    """As above; here sums run over the group's union, in another order, so only to rounding."""
    case = CASES[0]
    for i, given in enumerate(sweep(case, count=3, seed=9)):
        blocks = selections(case, given, i)
        alone = compiled_once(case, name, 1)(given, blocks)
        for group in (3, 5):
            close(compiled_once(case, name, group)(given, blocks), alone, 1e-6, f"group {group}")


@pytest.mark.parametrize("name", ["gather", "mask", "reference"])
def test_garbage_beyond_the_length_changes_no_bit(name):
    """A partly committed block read to its end: rejected rows leak (fault 16)."""
    case = CASES[1]
    clean, dirty = sweep(case, count=6, poison=0.0), sweep(case, count=6, poison=1e4)
    for i, (a, b) in enumerate(zip(clean, dirty, strict=True)):
        blocks = selections(case, a, i)
        same_bits(compiled_once(case, name, 2)(a, blocks), compiled_once(case, name, 2)(b, blocks))


@pytest.mark.parametrize("name", ["gather", "mask", "reference"])
def test_other_branches_of_the_tree_are_invisible(name):
    """The bare selection test without ancestry, or an ancestry test against the group's first node."""
    case = CASES[3]
    given = make_pass(case, 18, random_parents(np.random.default_rng(2), case.nodes, "random")[None], 3)
    blocks = answer(given, case.sizes, case.capacity).blocks.astype(np.int32)
    function = compiled_once(case, name, 4)
    out = function(given, blocks)
    for node in range(case.nodes):
        foreign = ~np.asarray(given.queries.ancestor)[0, node][None, None, :, None]
        tree = dataclasses.replace(
            given.tree, k=jnp.where(foreign, 1e4, given.tree.k), v=jnp.where(foreign, -1e4, given.tree.v)
        )
        same_bits(function(dataclasses.replace(given, tree=tree), blocks)[:, node], out[:, node])


@pytest.mark.parametrize("branch", ["gather", "mask"])
@pytest.mark.parametrize("limit", [1, 4000])
def test_tiles_of_groups_change_nothing(branch, limit, monkeypatch):
    """A tile boundary that drops, repeats or reorders groups."""
    case = CASES[0]
    given = sweep(case, count=3)[2]
    blocks = selections(case, given, 0)
    whole = compiled_once(case, branch, 3)(given, blocks)
    monkeypatch.setattr(masking, "MAX_SCORE_ELEMENTS", limit)
    monkeypatch.setattr(xla, "GATHER_RATIO", BRANCHES[branch])
    close(compiled(case, "xla", 3)(given, blocks), whole, 1e-6)


def test_a_long_cache_is_gathered_and_a_short_one_masked(monkeypatch):
    """Decoding at 64K that reads the whole cache for sixteen blocks, or copies a cache to read all of it."""
    calls, take = [], jnp.take_along_axis
    for blocks, gathers in ((2 * xla.GATHER_RATIO, False), (2 * xla.GATHER_RATIO + 1, True)):
        case = Case(geometry="wide", nodes=1, kv_heads=1, group=1, dim=8, blocks=blocks)
        given = make_pass(case, 20, np.array([[-1]]), 0)
        chosen = np.array([[[[0, 1]]]], np.int32)
        want = compiled(case, "reference")(given, chosen)
        with monkeypatch.context() as patch:
            calls.clear()
            patch.setattr(jnp, "take_along_axis", lambda *a, **k: calls.append(a) or take(*a, **k))
            out = compiled(case, "xla")(given, chosen)
        assert bool(calls) == gathers
        close(out, want, case.tolerance)


def test_shapes_that_do_not_fit_are_refused():
    case = CASES[0]
    given = make_pass(case, 9, random_parents(np.random.default_rng(0), case.nodes, "random")[None], 0)
    schedule = merge(jnp.zeros((1, 2, 12, 4), jnp.int32), 1, case.blocks)
    with pytest.raises(ShapeError, match=r"expected \(1, 2, 13\) groups for 13 nodes in groups of 1"):
        # Without the shape checks of the test set-up, which users do not have.
        inspect.unwrap(sparse_verify)(
            given.q, given.cached, given.tree, given.queries, schedule, given.gates, geometry=case.sizes, scale=1.0
        )
