"""Draft trees: the candidate continuations that one verify pass scores."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .pallas_kernels import TreeQueries
from .ranking import picked, ranks


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTree:
    """N nodes under a root, parents before children.

    Args:
      tokens: the nodes' tokens; node 0 is the root, the last emitted token, whose keys are not cached yet.
      parent: index of each node's parent, smaller than its own; -1 for the root and for padding.
      valid: False for padding nodes, which are never accepted.
      rank: order in which siblings are tried, lower first; for sampled children the order of sampling.
      q: for the true-q rule, the distribution over the target vocabulary that each node's children were sampled
        from (without replacement, in order of rank); None for chosen (point-mass) children.
    """

    tokens: Int[Array, "B N"]
    parent: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    rank: Int[Array, "B N"]
    q: Float[Array, "B N V"] | None = None

    @property
    def num_nodes(self) -> int:
        """N, root included."""
        return self.tokens.shape[1]


def ancestors(parent: Int[Array, "B N"]) -> Bool[Array, "B N N"]:
    """`out[b, i, j]`: node j is node i or an ancestor of it. Parents must come before children."""
    batch, nodes = parent.shape
    rows = jnp.broadcast_to(jnp.eye(nodes, dtype=bool), (batch, nodes, nodes))

    # Pointer doubling: after step s, a row holds the nearest 2^s ancestors.
    jump = jnp.where(parent < 0, jnp.arange(nodes), parent)
    for _ in range(max(nodes - 1, 1).bit_length()):
        rows = rows | jnp.take_along_axis(rows, jump[..., None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return rows


def queries_of(tree: DraftTree, length: Int[Array, " B"]) -> TreeQueries:
    """Positions and ancestry of the nodes after `length` committed tokens."""
    above = ancestors(tree.parent)
    depth = above.sum(-1, dtype=jnp.int32) - 1
    return TreeQueries(length=length, position=length[:, None] + depth, ancestor=above, parent=tree.parent)


def depths(tree: DraftTree) -> Int[Array, "B N"]:
    """Edges between each node and the root; 0 for padding."""
    return ancestors(tree.parent).sum(-1, dtype=jnp.int32) - 1


def take_rows(x: Array, index: Int[Array, "B P"]) -> Array:
    """x[b, index[b, p]], whatever follows the second axis."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), axis=1)


def _inverse(order: Int[Array, "B N"]) -> Int[Array, "B N"]:
    """The inverse permutation."""
    return picked(order, order.shape[1], jnp.arange(order.shape[1], dtype=jnp.int32))


def reorder(tree: DraftTree, order: Int[Array, "B N"]) -> DraftTree:
    """The same tree with node `order[i]` at index i; order[0] must be 0 and parents must stay before children."""
    inverse = _inverse(order)
    parent = take_rows(tree.parent, order)
    moved = jnp.take_along_axis(inverse, jnp.maximum(parent, 0), axis=1).astype(jnp.int32)
    return DraftTree(
        tokens=take_rows(tree.tokens, order),
        parent=jnp.where(parent < 0, -1, moved),
        valid=take_rows(tree.valid, order),
        rank=take_rows(tree.rank, order),
        q=None if tree.q is None else take_rows(tree.q, order),
    )


def flatten(tree: DraftTree, traversal: str, max_depth: int) -> DraftTree:
    """Reorders nodes by `bfs` (depth, then parent, then rank) or `dfs` (preorder by rank); padding goes last.

    Args:
      tree: any order with parents before children.
      traversal: the order wanted.
      max_depth: static bound on the depth of any node.

    Raises:
      ValueError: an unknown traversal.
    """
    if traversal not in ("bfs", "dfs"):
        raise ValueError(f"traversal must be bfs or dfs, got {traversal!r}")
    batch, nodes = tree.tokens.shape
    above = ancestors(tree.parent)
    depth = above.sum(-1, dtype=jnp.int32) - 1
    last = jnp.int32(2 * nodes)
    if traversal == "bfs":
        # After pass d, the places of nodes at depth <= d are final: each is sorted by its parent's place.
        place, level = jnp.zeros((batch, nodes), jnp.int32), jnp.where(tree.valid, depth, last)
        for _ in range(max_depth + 1):
            up = jnp.take_along_axis(place, jnp.maximum(tree.parent, 0), axis=1)
            place = ranks(level, up, tree.rank)
        return reorder(tree, _inverse(place))
    # Preorder: a node follows its parent and the whole subtrees of its earlier siblings.
    size = jnp.where(tree.valid[:, :, None], above, False).sum(1, dtype=jnp.int32)
    sibling = (tree.parent[:, :, None] == tree.parent[:, None, :]) & tree.valid[:, None, :]
    index = jnp.arange(nodes)
    ahead = (tree.rank[:, None, :] < tree.rank[:, :, None]) | (
        (tree.rank[:, None, :] == tree.rank[:, :, None]) & (index[None, None, :] < index[None, :, None])
    )
    offset = 1 + jnp.where(sibling & ahead, size[:, None, :], 0).sum(-1)
    offset = jnp.where(tree.parent < 0, 0, offset)
    place = jnp.where(above, offset[:, None, :], 0).sum(-1)
    place = jnp.where(tree.valid, place, last + index)
    return reorder(tree, _inverse(ranks(place)))
