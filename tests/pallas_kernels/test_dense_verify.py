"""Dense and windowed attention over a cache and a tree, against float64."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import ShapeError, dense_verify, masking
from tests.golden import numpy_nsa as oracle
from tests.pallas_kernels.cases import (
    BFLOAT16,
    CASES,
    Case,
    Pass,
    answer,
    close,
    float64,
    jit,
    make_pass,
    node_keys,
    on_host,
    random_parents,
    same_bits,
    sweep,
)


def compiled(case: Case, name: str, window: int | None) -> Callable[[Pass], np.ndarray]:
    op = functools.partial(dense_verify, scale=case.scale, window=window, implementation=name)
    return functools.partial(
        on_host, jit(lambda p: op(p.q, p.cached.k, p.cached.v, p.tree.k, p.tree.v, p.queries), name)
    )


compiled_once = functools.cache(compiled)


@pytest.mark.parametrize("case", (CASES[0], CASES[1], CASES[3], BFLOAT16[0]), ids=str)
def test_every_implementation_equals_the_oracle(case):
    """A mask off by one at the length, the window's edge or a branch of the tree."""
    for given in sweep(case, count=10):
        want = answer(given, case.sizes, case.capacity)
        for name in ("xla", "reference"):
            tolerance = case.tolerance if name == "xla" else 3e-6
            where = f"{name} at lengths {given.queries.length}, parents {given.queries.parent}"
            for window, expected in ((None, want.dense), (case.sizes.window, want.win)):
                out = compiled_once(case, name, window)(given)
                assert out.dtype == np.float32
                close(out, expected, tolerance, where)


@pytest.mark.parametrize("window", [1, 3, 71, 72, 73, 200])
def test_windows_of_every_width(window):
    """The slice of the cache that a window reads, at both ends and where it is the whole cache."""
    case = CASES[0]
    function = compiled(case, "xla", window)
    for given in sweep(case, count=4, seed=window):
        position = np.asarray(given.queries.position)
        out = function(given)
        for node in range(case.nodes):
            k, v, _, _ = node_keys(given, case.sizes, 0, node)
            t = int(position[0, node])
            close(out[0, node], oracle.window_attention(float64(given.q)[0, node], k, v, t, window)[0], 3e-6)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_garbage_beyond_the_length_changes_no_bit(name):
    """Rejected rows read back (fault 16), with and without a window."""
    case = CASES[1]
    for clean, dirty in zip(sweep(case, count=5, poison=0.0), sweep(case, count=5, poison=1e4), strict=True):
        for window in (None, case.sizes.window):
            same_bits(compiled_once(case, name, window)(clean), compiled_once(case, name, window)(dirty))


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_other_branches_of_the_tree_are_invisible(name):
    """A sibling's key in the softmax."""
    case = CASES[3]
    given = make_pass(case, 18, random_parents(np.random.default_rng(1), case.nodes, "random")[None], 3)
    for window in (None, case.sizes.window):
        function = compiled_once(case, name, window)
        out = function(given)
        for node in range(case.nodes):
            foreign = ~np.asarray(given.queries.ancestor)[0, node][None, None, :, None]
            tree = type(given.tree)(
                k=jnp.where(foreign, 1e4, given.tree.k),
                v=jnp.where(foreign, -1e4, given.tree.v),
                k_cmp=given.tree.k_cmp,
                v_cmp=given.tree.v_cmp,
                completions=given.tree.completions,
            )
            other = Pass(q=given.q, cached=given.cached, tree=tree, queries=given.queries, gates=given.gates)
            same_bits(function(other)[:, node], out[:, node])


@pytest.mark.parametrize("window", [None, 6])
def test_tiles_of_queries_change_nothing(window, monkeypatch):
    """A tile boundary that drops, repeats or reorders queries."""
    case = CASES[0]
    given = sweep(case, count=3)[2]
    whole = compiled_once(case, "xla", window)(given)
    monkeypatch.setattr(masking, "MAX_SCORE_ELEMENTS", 2500)
    close(compiled(case, "xla", window)(given), whole, 1e-6)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_other_output_types_only_round(name):
    """A caller that asks for bfloat16 gets float32, or sums in bfloat16."""
    case = CASES[0]
    given = make_pass(case, 9, random_parents(np.random.default_rng(0), case.nodes, "random")[None], 0)
    arguments = (given.q, given.cached.k, given.cached.v, given.tree.k, given.tree.v, given.queries)
    wide, narrow = (
        dense_verify(*arguments, scale=case.scale, dtype=dtype, implementation=name)
        for dtype in (jnp.float32, jnp.bfloat16)
    )
    assert narrow.dtype == jnp.bfloat16
    same_bits(np.asarray(narrow), np.asarray(wide.astype(jnp.bfloat16)))


def test_shapes_that_do_not_fit_are_refused():
    case = CASES[0]
    given = make_pass(case, 9, random_parents(np.random.default_rng(0), case.nodes, "random")[None], 0)
    arguments = (given.q, given.cached.k, given.cached.v, given.tree.k, given.tree.v, given.queries)
    with pytest.raises(ShapeError, match=r"tree_k has shape \(1, 2, 12, 8\), expected \(1, 2, 13, 8\)"):
        short = given.tree.k[:, :, 1:], given.tree.v[:, :, 1:]
        # Without the shape checks of the test set-up, which users do not have.
        inspect.unwrap(dense_verify)(*arguments[:3], *short, given.queries, scale=1.0)
    with pytest.raises(ValueError, match="dense_verify: unknown implementation cuda; known: .*xla, .*reference"):
        dense_verify(*arguments, scale=1.0, implementation="cuda")
