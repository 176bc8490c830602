"""Block arithmetic, chains, completed entries and the shape checks that all ops share."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import Geometry, ShapeError, chain, completions
from ssv_jax.pallas_kernels.layout import check_pass
from tests.golden import numpy_nsa as oracle
from tests.pallas_kernels.cases import (
    CASES,
    GEOMETRIES,
    QUICK,
    STYLES,
    make_pass,
    queries_of,
    random_parents,
)

_completions = jax.jit(completions, static_argnums=(1, 2), compiler_options=QUICK)
_chain = jax.jit(chain, static_argnums=1, compiler_options=QUICK)


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_entries_counts_what_the_oracle_counts(name):
    """Off by one in the number of visible entries, or block 0 missing (equation 7 read literally)."""
    sizes = GEOMETRIES[name]
    lengths = np.arange(0, 5 * sizes.block_size)
    want = [oracle.num_visible(int(n) - 1, sizes.kernel_size, sizes.kernel_stride) for n in lengths]
    assert [sizes.entries(int(n)) for n in lengths] == want
    assert np.asarray(sizes.num_entries(jnp.asarray(lengths))).tolist() == want


def test_selection_width_is_bounded_by_the_cache():
    """Top-k out of range in a cache of fewer blocks than are selected (fault 24)."""
    sizes = GEOMETRIES["paper"]
    assert [sizes.selection_width(8 * n) for n in (1, 3, 4, 9)] == [1, 3, 4, 4]


def test_a_chain_is_a_tree_without_branches():
    lengths = np.array([0, 7])
    got = chain(jnp.asarray(lengths, jnp.int32), 5)
    want = queries_of(np.broadcast_to(np.arange(5) - 1, (2, 5)), lengths)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)
    assert got.num_nodes == 5


def brute_completions(parents: np.ndarray, length: int, sizes: Geometry) -> list[tuple[int, int, list[int]]]:
    """(node, entry, rows) of one sequence: rows index a ring of the last l committed tokens, then the nodes."""
    out = []
    for node in range(len(parents)):
        path = oracle.tree_path(parents.tolist(), node)
        tokens = [(position, position % sizes.kernel_size) for position in range(length)]
        tokens += [(length + depth, sizes.kernel_size + n) for depth, n in enumerate(path)]
        before = oracle.num_visible(len(tokens) - 2, sizes.kernel_size, sizes.kernel_stride)
        after = oracle.num_visible(len(tokens) - 1, sizes.kernel_size, sizes.kernel_stride)
        if after > before:
            out.append((node, after - 1, [row for _, row in tokens[-sizes.kernel_size :]]))
    return out


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_completions_of_random_trees_equal_brute_force(name):
    """An entry made of a sibling's rows, a missing first entry, a wrong entry number (C4)."""
    sizes, nodes, seen = GEOMETRIES[name], 9, 0
    rng = np.random.default_rng(0)
    for trial, length in enumerate([*range(0, 2 * sizes.block_size + sizes.kernel_size), 61, 62]):
        lengths = np.array([length, (3 * length + 1) % 40])
        parents = np.stack([random_parents(rng, nodes, STYLES[(trial + b) % 5]) for b in range(2)])
        done = jax.tree.map(np.asarray, _completions(queries_of(parents, lengths), sizes, None))
        assert done.node.shape == (2, nodes) and done.rows.shape == (2, nodes, sizes.kernel_size)
        for b in range(2):
            want = brute_completions(parents[b], int(lengths[b]), sizes)
            seen += len(want)
            assert done.node[b].tolist() == [n for n, _, _ in want] + [-1] * (nodes - len(want))
            assert done.entry[b].tolist() == [e for _, e, _ in want] + [0] * (nodes - len(want))
            for slot, (node, _, rows) in enumerate(want):
                assert done.rows[b, slot].tolist() == rows
                assert done.node_slot[b, node] == slot
            assert (done.node_slot[b] >= 0).sum() == len(want)
            # Padded slots are gathered too, so their rows must exist.
            assert done.rows[b].min() >= 0 and done.rows[b].max() < sizes.kernel_size + nodes
    assert seen > 30


def test_every_sibling_completes_an_entry_of_its_own():
    """A star on a completing level needs one slot per sibling, not one per depth."""
    sizes = GEOMETRIES["paper"]
    done = _completions(queries_of(np.array([[-1, 0, 0, 0, 0]]), np.array([8])), sizes, None)
    assert done.node[0].tolist() == [1, 2, 3, 4, -1]
    assert done.entry[0, :4].tolist() == [3, 3, 3, 3]
    assert done.rows[0, :4].tolist() == [[2, 3, 4, 4 + node] for node in (1, 2, 3, 4)]
    assert done.node_slot[0].tolist() == [-1, 0, 1, 2, 3]


@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_a_chain_fits_into_the_bound_of_one_entry_per_stride(name):
    """A bound that is one short drops the last entry of a prefill chunk."""
    sizes = GEOMETRIES[name]
    lengths = jnp.arange(2 * sizes.block_size, dtype=jnp.int32)
    for nodes in (3, 8):
        bound = -(-nodes // sizes.kernel_stride)
        queries = _chain(lengths, nodes)
        short, full = (jax.tree.map(np.asarray, _completions(queries, sizes, m)) for m in (bound, None))
        counts = (full.node >= 0).sum(1)
        assert counts.max() == bound, "the bound is not reached, so it was not tested"
        assert short.node.shape == (len(lengths), bound)
        np.testing.assert_array_equal(short.node, full.node[:, :bound])
        np.testing.assert_array_equal(short.entry, full.entry[:, :bound])
        np.testing.assert_array_equal(short.node_slot, full.node_slot)
        for b, count in enumerate(counts):
            np.testing.assert_array_equal(short.rows[b, :count], full.rows[b, :count])


def test_check_pass_names_the_argument_that_does_not_fit():
    """A shape error deep inside a kernel, or none at all because of broadcasting (fault 25)."""
    case = CASES[0]
    given = make_pass(case, 9, random_parents(np.random.default_rng(0), case.nodes, "random")[None], 0)

    def check(**changes):
        parts = {"q": given.q, "cached": given.cached, "tree": given.tree, "queries": given.queries}
        parts |= changes
        check_pass(*parts.values(), case.sizes)

    check()
    cached, tree, queries = given.cached, given.tree, given.queries
    shorter = {name: getattr(cached, name)[:, :, :-1] for name in ("k", "v", "k_cmp", "v_cmp")}
    with pytest.raises(ShapeError, match=r"cached.k_cmp has shape .*\(1, 2, 34, 8\), expected \(1, 2, 35, 8\)"):
        check(cached=dataclasses.replace(cached, k_cmp=shorter["k_cmp"], v_cmp=shorter["v_cmp"]))
    whole = dataclasses.replace(cached, k=shorter["k"], v=shorter["v"])
    with pytest.raises(ShapeError, match="71 rows, which is no multiple of block_size=8: .*init_cache"):
        # 71 rows hold 34 entries.
        check(cached=dataclasses.replace(whole, k_cmp=shorter["k_cmp"], v_cmp=shorter["v_cmp"]))
    with pytest.raises(ShapeError, match=r"tree.k has shape \(1, 2, 12, 8\), expected \(1, 2, 13, 8\)"):
        check(tree=dataclasses.replace(tree, k=tree.k[:, :, 1:], v=tree.v[:, :, 1:]))
    with pytest.raises(ShapeError, match="cached.k has shape .* beside q of shape"):
        check(q=jnp.concatenate([given.q, given.q], axis=2))
    with pytest.raises(ShapeError, match="queries.position"):
        check(queries=chain(queries.length, case.nodes - 1))
