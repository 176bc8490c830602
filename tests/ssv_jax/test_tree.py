"""Draft trees: ancestry, depths and orders of nodes, against plain Python."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.tree import DraftTree, ancestors, depths, flatten, queries_of, reorder

BATCH = 24
SIZES = [1, 2, 9, 33, 65]
ORDERS = ["bfs", "dfs"]
KINDS = ["any", "chain", "star"]

jitted = jax.jit(flatten, static_argnums=(1, 2))


def random_trees(nodes: int, seed: int, kind: str = "any", with_q: bool = False) -> DraftTree:
    """A batch of trees in some order with parents before children; tokens are unique, ranks are not in order.

    Padding holds garbage, except that its parent is -1.
    """
    rng = np.random.default_rng(seed)
    parent = np.full((BATCH, nodes), -1)
    used = rng.integers(1, nodes + 1, BATCH)
    rank = rng.integers(0, 5, (BATCH, nodes))
    for b in range(BATCH):
        for i in range(1, used[b]):
            parent[b, i] = {"any": rng.integers(0, i), "chain": i - 1, "star": 0}[kind]
        for p in range(used[b]):
            (children,) = np.nonzero(parent[b] == p)
            rank[b, children] = rng.permutation(len(children))
    return DraftTree(
        tokens=jnp.asarray(np.argsort(rng.random((BATCH, nodes)), axis=1), jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        valid=jnp.asarray(np.arange(nodes) < used[:, None]),
        rank=jnp.asarray(rank, jnp.int32),
        q=jnp.asarray(rng.random((BATCH, nodes, 3)), jnp.float32) if with_q else None,
    )


def line_of(parent: np.ndarray, node: int) -> list[int]:
    """The node and its ancestors, upwards."""
    return [node] if parent[node] < 0 else [node, *line_of(parent, parent[node])]


def rows(tree: DraftTree) -> list[dict[str, np.ndarray]]:
    """The trees of a batch one by one, as arrays."""
    fields = {
        f.name: np.asarray(getattr(tree, f.name)) for f in dataclasses.fields(tree) if getattr(tree, f.name) is not None
    }
    return [{name: x[b] for name, x in fields.items()} for b in range(tree.tokens.shape[0])]


def paths(row: dict[str, np.ndarray]) -> list[tuple]:
    """Each valid node as what it is irrespective of order: tokens from the root, rank, q."""
    found = []
    for node in np.nonzero(row["valid"])[0]:
        q = tuple(row["q"][node].tolist()) if "q" in row else ()
        line = line_of(row["parent"], node)
        found.append((tuple(row["tokens"][line].tolist()), int(row["rank"][node]), q))
    return sorted(found)


def expected_order(row: dict[str, np.ndarray], traversal: str) -> list[int]:
    """Tokens of valid nodes in a traversal, by a queue or a stack."""
    parent, rank = row["parent"], row["rank"]
    pending, order = [0], []
    while pending:
        node = pending.pop(0)
        order.append(int(row["tokens"][node]))
        children = [c for c in np.nonzero(row["valid"])[0] if parent[c] == node]
        children.sort(key=lambda c: (rank[c], c))
        pending = pending + children if traversal == "bfs" else children + pending
    return order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", SIZES)
def test_ancestors_agree_with_recursion(nodes, kind):
    """Ancestry is complete up to the deepest node, and holds nobody else."""
    tree = random_trees(nodes, nodes, kind)
    above, depth = np.asarray(ancestors(tree.parent)), np.asarray(depths(tree))
    for b, row in enumerate(rows(tree)):
        for node in range(nodes):
            line = line_of(row["parent"], node)
            assert sorted(line) == np.nonzero(above[b, node])[0].tolist()
            assert depth[b, node] == len(line) - 1


def test_longest_chain():
    """65 nodes: the last one has all others above it."""
    parent = jnp.arange(-1, 64, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(ancestors(parent)[0], np.tri(65, dtype=bool))


def test_broken_parents_end():
    """A hang or an over-read on parents that form a circle or come late: the walk upwards is bounded."""
    assert ancestors(jnp.array([[-1, 2, 1, 3]], jnp.int32)).shape == (1, 4, 4)
    late = ancestors(jnp.array([[-1, 2, 0]], jnp.int32))
    assert np.nonzero(late[0, 1])[0].tolist() == [0, 1, 2]


def test_queries_stand_after_the_committed_tokens():
    """Siblings share a position; every sequence counts from its own length."""
    tree = random_trees(9, 1)
    length = jnp.arange(BATCH, dtype=jnp.int32) * 3
    queries = queries_of(tree, length)
    np.testing.assert_array_equal(queries.position, length[:, None] + depths(tree))
    np.testing.assert_array_equal(queries.ancestor, ancestors(tree.parent))
    np.testing.assert_array_equal(queries.parent, tree.parent)
    assert queries.num_nodes == tree.num_nodes == 9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("traversal", ORDERS)
@pytest.mark.parametrize("nodes", SIZES)
def test_flatten_gives_the_traversal(nodes, traversal, kind):
    """Root first, parents before children, siblings by rank, padding last, and the same tree."""
    tree = random_trees(nodes, nodes + 1, kind, with_q=nodes == 9)
    flat = jitted(tree, traversal, nodes - 1)
    for before, after in zip(rows(tree), rows(flat), strict=True):
        used = before["valid"].sum()
        assert after["valid"].tolist() == [True] * used + [False] * (nodes - used)
        assert after["parent"][0] == -1 and (after["parent"][used:] == -1).all()
        assert (after["parent"][1:used] >= 0).all()
        assert (after["parent"] < np.arange(nodes)).all()
        assert after["tokens"][:used].tolist() == expected_order(before, traversal)
        assert paths(before) == paths(after)
        for p in range(used):
            ranks = after["rank"][after["parent"] == p] if p else after["rank"][1:][after["parent"][1:] == 0]
            assert (np.diff(ranks) > 0).all()


@pytest.mark.parametrize("traversal", ORDERS)
def test_flatten_twice_changes_nothing(traversal):
    """Also from the other traversal, and with equal ranks, where the order of nodes decides."""
    tree = random_trees(33, 7)
    flat = jitted(tree, traversal, 32)
    other = jitted(tree, ORDERS[1 - ORDERS.index(traversal)], 32)
    for start in (flat, other):
        again = jitted(start, traversal, 32)
        valid = np.asarray(flat.valid)
        for name in ("tokens", "parent", "rank"):
            x, y = np.asarray(getattr(again, name)), np.asarray(getattr(flat, name))
            np.testing.assert_array_equal(x[valid], y[valid])
        np.testing.assert_array_equal(again.valid, flat.valid)
    jax.tree.map(np.testing.assert_array_equal, jitted(flat, traversal, 32), flat)
    ties = jitted(dataclasses.replace(tree, rank=jnp.zeros_like(tree.rank)), traversal, 32)
    jax.tree.map(np.testing.assert_array_equal, jitted(ties, traversal, 32), ties)


def test_small_depth_bound_suffices_for_shallow_trees():
    """The bound need not exceed the depth that occurs."""
    tree = random_trees(33, 3)
    deepest = int(depths(tree).max())
    short, full = jitted(tree, "bfs", deepest), jitted(tree, "bfs", 32)
    jax.tree.map(np.testing.assert_array_equal, short, full)


def test_traversals_of_a_small_tree():
    """By hand: the root's second child is tried first, and has two children."""
    tree = DraftTree(
        tokens=jnp.array([[10, 11, 12, 13, 14, 99]], jnp.int32),
        parent=jnp.array([[-1, 0, 0, 2, 2, -1]], jnp.int32),
        valid=jnp.array([[True] * 5 + [False]]),
        rank=jnp.array([[0, 1, 0, 1, 0, 0]], jnp.int32),
    )
    bfs, dfs = flatten(tree, "bfs", 2), flatten(tree, "dfs", 2)
    assert bfs.tokens.tolist() == [[10, 12, 11, 14, 13, 99]] and bfs.parent.tolist() == [[-1, 0, 0, 1, 1, -1]]
    assert dfs.tokens.tolist() == [[10, 12, 14, 13, 11, 99]] and dfs.parent.tolist() == [[-1, 0, 1, 1, 0, -1]]


def test_reorder_keeps_the_tree():
    """Any order with parents first: links follow the nodes, q and padding travel along."""
    tree = random_trees(17, 5, with_q=True)
    rng = np.random.default_rng(0)
    order = np.zeros((BATCH, 17), np.int32)
    for b, row in enumerate(rows(tree)):
        placed = [0]
        while len(placed) < 17:
            ready = [i for i in range(17) if i not in placed and row["parent"][i] in (-1, *placed)]
            placed.append(int(rng.choice(ready)))
        order[b] = placed
    moved = reorder(tree, jnp.asarray(order))
    for before, after in zip(rows(tree), rows(moved), strict=True):
        assert paths(before) == paths(after)
        assert (after["parent"] < np.arange(17)).all()
        assert before["valid"].sum() == after["valid"].sum()


def test_rank_decides_between_siblings():
    """The traversal test would see an order that ignores rank."""
    tree = random_trees(33, 9)
    reverse = dataclasses.replace(tree, rank=-tree.rank)
    assert (np.asarray(jitted(reverse, "bfs", 32).tokens) != np.asarray(jitted(tree, "bfs", 32).tokens)).any()


def test_unknown_traversal_is_named():
    """A misspelt option must not fall back to some order."""
    with pytest.raises(ValueError, match="bfs or dfs, got 'zigzag'"):
        flatten(random_trees(2, 0), "zigzag", 1)
