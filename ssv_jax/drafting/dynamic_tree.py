"""The dynamic draft tree of EAGLE-2 and EAGLE-3: a pool of scored candidates, and the best of them as a tree.

The pool is filled level by level. Level 1 holds the `top_k` most likely tokens after the root. Each of
`depth` expansion steps takes the level's `top_k` best items (beams), gives each its `top_k` most likely
successors, and adds all of them to the pool as the next level. So the pool has `top_k + depth * top_k**2`
items and no item is deeper than `depth + 1`. An item's score is the sum of the log-probabilities on its path.

Items are ordered by (-score, pool index) everywhere: on ties the lower index wins. An item comes after its
parent in the pool and never scores higher, so the best items of the pool always contain the parents of all of
them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..ranking import best, largest
from ..tree import DraftTree

# Stands for impossible tokens and for NaN, so that sums stay finite and comparable.
_LOWEST = -1e30
MOST_CANDIDATES = 65536


def pool_size(depth: int, top_k: int) -> int:
    """Candidates that a tree can be chosen from."""
    return top_k + depth * top_k**2


def check_tree(*, depth: int, top_k: int, nodes: int) -> None:
    """The tree can be built.

    Raises:
      ValueError: a value out of range, or more nodes than the pool gives.
    """
    for name, value, least in (("depth", depth, 1), ("topk", top_k, 1), ("nodes", nodes, 2)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"draft tree: {name} must be an integer >= {least}, got {value!r}")
    pool = pool_size(depth, top_k)
    if pool > MOST_CANDIDATES:
        raise ValueError(
            f"draft tree: depth={depth} and topk={top_k} make topk + depth * topk^2 = {pool} candidates, at most "
            f"{MOST_CANDIDATES} are sorted in a round: use a smaller depth or topk"
        )
    if nodes - 1 > pool:
        raise ValueError(
            f"draft tree: nodes={nodes} (the root and {nodes - 1} drafts) exceed the pool of depth={depth}, "
            f"topk={top_k}, which has topk + depth * topk^2 = {pool} candidates: use nodes <= {pool + 1}, or a "
            "larger depth or topk"
        )


def top_candidates(logits: Float[Array, "B R V"], count: int) -> tuple[Float[Array, "B R k"], Int[Array, "B R k"]]:
    """Log-probabilities and ids of the `count` most likely tokens, by (-log-probability, id).

    Which of several equally likely tokens takes the last place is left to the device, and decides nothing but a draft.
    """
    log_p = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    # Never above 0, so that a child cannot outscore its parent.
    log_p = jnp.where(jnp.isnan(log_p), _LOWEST, jnp.clip(log_p, _LOWEST, 0.0))
    # In one launch by itself; joined with what follows it would be three.
    return largest(jax.lax.optimization_barrier(log_p), count)


def tree_from_pool(
    root: Int[Array, " B"],
    tokens: Int[Array, "B pool"],
    score: Float[Array, "B pool"],
    parent: Int[Array, "B pool"],
    *,
    top_k: int,
    nodes: int,
) -> DraftTree:
    """The root and the best `nodes - 1` pool items, in breadth-first order.

    Args:
      root: the last emitted token.
      tokens: target ids of the pool items.
      score: of the items, each at most its parent's.
      parent: pool index of each item's parent, lower than its own; -1 on level 1.
      top_k: children that each expanded item has in the pool, in order of likelihood.
      nodes: of the tree, static.
    """
    chosen = best(score, nodes - 1)
    above = jnp.take_along_axis(parent, chosen, axis=1)
    place = 1 + (chosen[:, None, :] < above[:, :, None]).sum(-1, dtype=jnp.int32)

    def with_root(first: Array, rest: Array) -> Array:
        return jnp.concatenate([first[:, None], rest], axis=1).astype(jnp.int32)

    zero = jnp.zeros_like(root)
    return DraftTree(
        tokens=with_root(root, jnp.take_along_axis(tokens, chosen, axis=1)),
        parent=with_root(zero - 1, jnp.where(above < 0, 0, place)),
        valid=jnp.ones((root.shape[0], nodes), bool),
        # Every level starts at a multiple of top_k in the pool.
        rank=with_root(zero, chosen % top_k),
    )
