"""A text read through a cache, trees that the model drafts for itself in it, and the blocks that their nodes select."""

from __future__ import annotations

import dataclasses
from typing import Any

import _evaluation as evaluation
import jax.numpy as jnp
import numpy as np
from _served import Served

from ssv_jax.strategy import TreeSpec
from ssv_jax.tree import DraftTree, flatten


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tree:
    """N nodes, parents before children; node 0 is the root, whose parent is -1."""

    tokens: np.ndarray
    parent: np.ndarray

    @property
    def depth(self) -> np.ndarray:
        """Edges above each node [N]."""
        depth = np.zeros(len(self.parent), int)
        for node, above in enumerate(self.parent):
            depth[node] = depth[above] + 1 if above >= 0 else 0
        return depth

    def order(self, traversal: str) -> np.ndarray:
        """Nodes [N] in the order of a pass, `bfs` or `dfs`; siblings are ranked by their index."""
        tree = dataclasses.replace(drafted(self, len(self.tokens)), tokens=jnp.arange(len(self.tokens))[None])
        return np.asarray(flatten(tree, traversal, int(self.depth.max())).tokens[0])


def drafted(tree: Tree, nodes: int) -> DraftTree:
    """The tree padded to `nodes`."""
    extra = nodes - len(tree.tokens)
    tokens = np.pad(tree.tokens, (0, extra)).astype(np.int32)[None]
    parent = np.pad(tree.parent, (0, extra), constant_values=-1).astype(np.int32)[None]
    valid = (np.arange(nodes) < len(tree.tokens))[None]
    rank = np.arange(nodes, dtype=np.int32)[None]
    return DraftTree(
        tokens=jnp.asarray(tokens), parent=jnp.asarray(parent), valid=jnp.asarray(valid), rank=jnp.asarray(rank)
    )


class Reader:
    """One sequence and its cache.

    Args:
      model: sparse.
      dtype: of parameters and cache.
      capacity: tokens that will be read at most.
      size: tokens of a reading pass.
      nodes: of the largest tree looked at.
      best: likeliest next tokens that a look returns.
    """

    def __init__(self, model: evaluation.Model, dtype: Any, *, capacity: int, size: int, nodes: int, best: int) -> None:
        self._served, self._capacity, self._nodes, self._best = Served(model, dtype, size), capacity, nodes, best
        self.restart()

    def restart(self) -> None:
        """Forgets what was read."""
        self._cache, self.length = self._served.cache(self._capacity), 0

    def read(self, tokens: np.ndarray) -> None:
        """Commits tokens [S]."""
        self._cache = self._served.read(self._cache, tokens[None])
        self.length += len(tokens)

    def look(self, tree: Tree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores a tree and commits nothing.

        Returns:
          Log-probabilities and ids of the likeliest tokens after each node [N, best], and the blocks that each selects
          in every layer, bool [L, K, N, blocks].
        """
        values, ids, chosen = self._served.look(self._cache, drafted(tree, self._nodes), self._best)
        count = len(tree.tokens)
        return values[0, :count], ids[0, :count], chosen[:, 0, :, :count]


def own_tree(reader: Reader, root: int, spec: TreeSpec) -> Tree:
    """The tree that a perfect drafter would propose: EAGLE-2's dynamic tree, with the target's own probabilities.

    The likeliest `topk` tokens after each of `topk` beams, `depth` levels deep; the `nodes` - 1 likeliest paths stay.
    """
    tokens, parent, score = [root], [-1], [0.0]
    beams = [0]
    seen = Tree(tokens=np.array([root]), parent=np.array([-1]))
    places = {0: 0}  # of the pool's nodes among those that were looked at
    for level in range(spec.depth):
        values, ids, _ = reader.look(seen)
        fresh = []
        for beam in beams:
            for value, token in zip(values[places[beam]][: spec.topk], ids[places[beam]][: spec.topk], strict=True):
                fresh.append(len(tokens))
                tokens.append(int(token))
                parent.append(beam)
                score.append(score[beam] + float(value))
        beams = sorted(sorted(fresh, key=lambda i: (-score[i], i))[: spec.topk])
        if level + 1 < spec.depth:
            for beam in beams:
                places[beam] = len(places)
            seen = Tree(
                tokens=np.append(seen.tokens, [tokens[i] for i in beams]),
                parent=np.append(seen.parent, [places[parent[i]] for i in beams]),
            )
    # A child is never likelier than its parent, and comes after it: what stays is a tree.
    kept = [0, *sorted(sorted(range(1, len(tokens)), key=lambda i: (-score[i], i))[: spec.nodes - 1])]
    index = {node: i for i, node in enumerate(kept)}
    above = [-1 if parent[i] < 0 else index[parent[i]] for i in kept]
    return Tree(tokens=np.array([tokens[i] for i in kept]), parent=np.array(above))


def looked_at(spec: TreeSpec) -> int:
    """Nodes of the largest tree that `own_tree` looks at, its result included."""
    return max(1 + spec.topk * (spec.depth - 1), spec.nodes)


def places(length: int, size: int, trees: int) -> list[int]:
    """The ends of the last reading passes below `length`, where trees stand.

    Raises:
      ValueError: fewer passes than trees.
    """
    last = (length - 1) // size
    if last < trees:
        raise ValueError(f"{length} tokens are {last} passes of {size}, too few for {trees} trees")
    return [size * (last - trees + 1 + i) for i in range(trees)]
