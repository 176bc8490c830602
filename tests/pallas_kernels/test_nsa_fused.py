"""Whole refresh and reuse layers: three gated branches, one selection."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.pallas_kernels import Selection, ShapeError, merge, refresh_attention, reuse_attention
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
    on_host,
    random_blocks,
    random_parents,
    same_bits,
    selected_rows,
    sweep,
)

_merge = jax.jit(merge, static_argnums=(1, 2))


@functools.cache
def refresh(case: Case, name: str, group: int) -> Any:
    op = functools.partial(refresh_attention, geometry=case.sizes, scale=case.scale, implementation=name, group=group)
    return jit(lambda p: op(p.q, p.cached, p.tree, p.queries, p.gates), name)


@functools.cache
def reuse(case: Case, name: str) -> Any:
    op = functools.partial(reuse_attention, geometry=case.sizes, scale=case.scale, implementation=name)
    return functools.partial(on_host, jit(lambda p, s: op(p.q, p.cached, p.tree, p.queries, p.gates, s), name))


def gated(given: Pass, *branches: np.ndarray) -> np.ndarray:
    gates = np.asarray(given.gates, np.float64)
    return sum(gates[..., i : i + 1] * branch for i, branch in enumerate(branches))


@pytest.mark.parametrize(
    ("case", "group", "name"),
    [(CASES[0], 4, "xla"), (CASES[0], 4, "reference"), (CASES[2], 2, "xla"), (BFLOAT16[0], 1, "xla")],
    ids=str,
)
def test_refresh_is_the_gated_sum_of_three_branches(case, group, name):
    """Gates in another order, branches under one softmax, or a branch forgotten (A7)."""
    tolerance = 3e-6 if name == "reference" else case.tolerance
    for given in sweep(case, count=8):
        want = answer(given, case.sizes, case.capacity)
        assert want.decided.all()
        out, selection = refresh(case, name, group)(given)
        close(out, gated(given, want.cmp, want.slc, want.win), tolerance)
        same_bits(selection.blocks, want.blocks)
        assert selection.schedule.group == group
        # The same selection handed on gives the same output.
        close(reuse(case, name)(given, selection), out, 1e-6)


@pytest.mark.parametrize("name", ["xla", "reference"])
def test_reuse_reads_the_inherited_blocks_and_its_own_entries(name):
    """A reuse layer that selects again, or that takes over the compressed branch too (E)."""
    case, group = CASES[0], 4
    for i, given in enumerate(sweep(case, count=4)):
        shape = (1, case.kv_heads, case.nodes)
        blocks = random_blocks(np.random.default_rng(i), shape, case.sizes.n_blocks, case.blocks)
        selection = select(blocks, group, case.blocks)
        want = answer(given, case.sizes, case.capacity)
        expected = gated(given, want.cmp, selected_rows(given, case.sizes, blocks), want.win)
        close(reuse(case, name)(given, selection), expected, case.tolerance)


def select(blocks: np.ndarray, group: int, num_blocks: int) -> Selection:
    return Selection(blocks=jnp.asarray(blocks), schedule=_merge(jnp.asarray(blocks), group, num_blocks))


def test_padding_nodes_are_harmless():
    """A fixed-size tree with fewer drafts than nodes: padding must not touch real nodes, nor be NaN."""
    case = CASES[0]
    parents = random_parents(np.random.default_rng(3), case.nodes, "random")
    parents[9:] = -1  # padding stands at the committed length, its own only ancestor
    given = make_pass(case, 29, parents[None], 1, poison=1e4)
    padding = np.arange(case.nodes)[None, None, :, None] >= 9
    tree = dataclasses.replace(
        given.tree,
        k=jnp.where(padding, 1e4, given.tree.k),
        v=jnp.where(padding, 1e4, given.tree.v),
    )
    for name in ("xla", "reference"):
        out, selection = refresh(case, name, 4)(given)
        other, same = refresh(case, name, 4)(dataclasses.replace(given, tree=tree))
        same_bits(np.asarray(out)[:, :9], np.asarray(other)[:, :9])
        same_bits(selection.blocks, same.blocks)
        assert np.isfinite(other).all()
        want = answer(given, case.sizes, case.capacity)
        close(np.asarray(out)[:, :9], gated(given, want.cmp, want.slc, want.win)[:, :9], case.tolerance)


def pick(x: jax.Array, index: Any) -> jax.Array:
    """Indexing on the host, which compiles nothing."""
    return jnp.asarray(np.asarray(x)[index])


def test_a_node_is_the_last_token_of_its_own_path():
    """Tree verification against one token after a longer prefix: the whole point of drafting (C)."""
    case = CASES[0]
    one = dataclasses.replace(case, nodes=1)
    given = make_pass(case, 27, random_parents(np.random.default_rng(4), case.nodes, "deep")[None], 2)
    out, selection = (jax.tree.map(np.asarray, x) for x in refresh(case, "xla", 4)(given))
    position, ancestor = np.asarray(given.queries.position), np.asarray(given.queries.ancestor)
    assert np.asarray(given.tree.completions.node_slot).max() >= 2
    for node in range(case.nodes):
        # Everything above the node is committed, as autoregressive decoding would have.
        length, sizes = int(position[0, node]), case.sizes
        single = make_pass(one, length, np.array([[-1]]), 0)
        path = np.flatnonzero(ancestor[0, node])[:-1]
        slot = np.asarray(given.tree.completions.node_slot)[0]
        entries = [s for s in slot[path] if s >= 0]
        cached = {}
        for field, rows in (("k", path), ("v", path), ("k_cmp", entries), ("v_cmp", entries)):
            old = float64(getattr(given.cached, field)).copy()
            start = sizes.entries(27) if field.endswith("cmp") else 27
            old[:, :, start : start + len(rows)] = float64(getattr(given.tree, field))[:, :, rows]
            cached[field] = jnp.asarray(old.astype(np.float32))
        own = [slot[node]] if slot[node] >= 0 else [0]
        tree = dataclasses.replace(
            single.tree,
            k=pick(given.tree.k, (..., [node], slice(None))),
            v=pick(given.tree.v, (..., [node], slice(None))),
            k_cmp=pick(given.tree.k_cmp, (..., own, slice(None))),
            v_cmp=pick(given.tree.v_cmp, (..., own, slice(None))),
        )
        alone = dataclasses.replace(
            single,
            q=pick(given.q, (slice(None), [node])),
            gates=pick(given.gates, (slice(None), [node])),
            cached=dataclasses.replace(single.cached, **cached),
            tree=tree,
        )
        other, chosen = refresh(one, "xla", 1)(alone)
        close(np.asarray(other)[:, 0], out[:, node], 2e-6)
        same_bits(np.asarray(chosen.blocks)[:, :, 0], selection.blocks[:, :, node])


def test_shapes_and_groups_that_do_not_fit_are_refused():
    case = CASES[0]
    given = make_pass(case, 9, random_parents(np.random.default_rng(0), case.nodes, "random")[None], 0)
    # Without the shape checks of the test set-up, which users do not have.
    arguments = (given.q, given.cached, given.tree, given.queries)
    with pytest.raises(ShapeError, match=r"gates has shape \(1, 13, 2, 3, 2\), expected \(1, 13, 2, 3, 3\)"):
        inspect.unwrap(refresh_attention)(*arguments, given.gates[..., :2], geometry=case.sizes, scale=1.0)
    with pytest.raises(ValueError, match="group must be between 1 and 32, got 0"):
        jax.eval_shape(lambda: refresh_attention(*arguments, given.gates, geometry=case.sizes, scale=1.0, group=0))
