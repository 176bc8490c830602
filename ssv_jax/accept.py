"""Which drafted tokens are kept: the ones that the target would have emitted itself.

Every rule here emits, after a node, a token with the target's own law: the most likely one, or one drawn
exactly from the processed next-token distribution p. Where that token is one of the node's children, the
walk goes on from the child; where it is not, the token is the bonus. So the emitted tokens are
distributed as those of autoregressive decoding, whatever the tree holds, as long as the tree was made
without a look at the randomness used here. The rules differ in how often the token is a child:

* point mass: the token is drawn from p. This is the same law as trying the children x in turn, each accepted
  with probability p(x) and else removed from p, and it needs one draw.
* true q (`DraftTree.q`): the children x were sampled from q, and are tried in the order of sampling:
  accepted with probability min(1, p(x) / q(x)); else p <- norm((p - q)+), and q <- q without x,
  renormalised. After the last child the token is drawn from what is left of p. An only child is so
  accepted with probability sum(min(p, q)), the most that a lossless rule can reach.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .sampling import Sampling, invert, probabilities
from .tree import DraftTree, ancestors


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What one round keeps. The emitted tokens are those of the accepted nodes, then the bonus.

    Args:
      path: accepted nodes by depth, from the root (node 0), padded with -1; P = max_depth + 1.
      num_accepted: accepted drafted tokens; the root is not counted.
      bonus: the token that follows the last accepted node. It is not cached yet: it is the next root.
    """

    path: Int[Array, "B P"]
    num_accepted: Int[Array, " B"]
    bonus: Int[Array, " B"]


def accept(
    tree: DraftTree, logits: Float[Array, "B N V"], sampling: Sampling, key: PRNGKeyArray, max_depth: int
) -> Acceptance:
    """Accepts greedily at temperature 0, else by sampling; see `accept_greedy` and `accept_sampling`."""
    if sampling.greedy:
        return accept_greedy(tree, logits, max_depth)
    return accept_sampling(tree, logits, sampling, key, max_depth)


def accept_greedy(tree: DraftTree, logits: Float[Array, "B N V"], max_depth: int) -> Acceptance:
    """Follows the most likely tokens (the first of equals) from the root for as long as the tree has them.

    Args:
      tree: the verified tree.
      logits: the target's, after each node.
      max_depth: static bound; deeper nodes are not accepted.

    Raises:
      ValueError: tree and logits do not fit.
    """
    _check(tree, logits, max_depth)
    return _follow(tree, jnp.argmax(logits, axis=-1).astype(jnp.int32), max_depth)


def accept_sampling(
    tree: DraftTree, logits: Float[Array, "B N V"], sampling: Sampling, key: PRNGKeyArray, max_depth: int
) -> Acceptance:
    """Emits tokens distributed as the target's, by the point-mass rule, or by the true-q rule if q is given.

    With q, lossless only if q is the very distribution that the children were sampled from (the same float32
    numbers, 0 where the draft vocabulary lacks a token), if siblings were sampled without replacement and
    rank is the order of sampling, and if whether a child is in the tree depends neither on its own token
    nor on later siblings'. Sampled trees without the last property (pruned by score) need the point-mass
    rule: q = None.

    Args:
      tree: the verified tree.
      logits: the target's, after each node.
      sampling: how the target's next token is chosen.
      key: must be fresh, and independent of the one that the drafter used.
      max_depth: static bound; deeper nodes are not accepted.

    Raises:
      ValueError: tree and logits do not fit.
    """
    _check(tree, logits, max_depth)
    batch, nodes = tree.tokens.shape
    key_try, key_draw = jax.random.split(key)
    tries = jax.random.uniform(key_try, (batch, nodes))
    draws = jax.random.uniform(key_draw, (batch, max_depth + 1, 2))
    return _accept_given(tree, logits, sampling, tries, draws, max_depth)


def _check(tree: DraftTree, logits: Float[Array, "B N V"], max_depth: int) -> None:
    if max_depth < 0:
        raise ValueError(f"max_depth must be >= 0, got {max_depth}")
    if logits.shape[:2] != tree.tokens.shape:
        raise ValueError(f"need one row of logits per node: tree {tree.tokens.shape}, logits {logits.shape}")
    if tree.q is not None and tree.q.shape != logits.shape:
        raise ValueError(f"q must be over the target vocabulary: q {tree.q.shape}, logits {logits.shape}")


def _accept_given(
    tree: DraftTree,
    logits: Float[Array, "B N V"],
    sampling: Sampling,
    tries: Float[Array, "B N"],
    draws: Float[Array, "B P 2"],
    max_depth: int,
) -> Acceptance:
    """`accept_sampling` with given uniforms in [0, 1): one per tried node, and two per depth for its draw."""

    def emit(node: Int[Array, " B"], going: Bool[Array, " B"], depth: Int[Array, ""]) -> Int[Array, " B"]:
        p = probabilities(_row(logits, node), sampling)
        token = jnp.full_like(node, -1)
        if tree.q is not None:
            children = tree.valid & (tree.parent == node[:, None]) & going[:, None]
            token, p = _try_children(tree, children, p, _row(tree.q, node), tries)
        return jnp.where(token < 0, invert(p, draws[:, depth]), token)

    return _follow(tree, _walk(tree, emit, max_depth), max_depth)


def _try_children(
    tree: DraftTree,
    children: Bool[Array, "B N"],
    p: Float[Array, "B V"],
    q: Float[Array, "B V"],
    tries: Float[Array, "B N"],
) -> tuple[Int[Array, " B"], Float[Array, "B V"]]:
    """The true-q rule at one node: the accepted child's token, or -1 and the distribution that is left."""

    def attempt(state):
        left, token, rest, q = state
        rank = jnp.where(left, tree.rank, jnp.iinfo(tree.rank.dtype).max)
        child = jnp.argmin(rank, axis=1)
        x = _at(tree.tokens, child)
        qx = _at(q, x)
        # A child of q = 0 was not sampled: it repeats a token, or q had fewer tokens than children were asked
        # for. Skipping it changes no law.
        tried = left.any(axis=1) & (token < 0) & (qx > 0)
        accepted = _accepts(_at(tries, child), _at(rest, x), qx)
        rejected = (tried & ~accepted)[:, None]
        return (
            left & (jnp.arange(tree.num_nodes) != child[:, None]),
            jnp.where(tried & accepted, x, token),
            jnp.where(rejected, _residual(rest, q, p), rest),
            jnp.where(rejected, _without(q, x), q),
        )

    def unsettled(state):
        left, token, _, _ = state
        return (left & (token < 0)[:, None]).any()

    none = jnp.full(p.shape[:1], -1, jnp.int32)
    start = (children, none, p, q.astype(jnp.float32))
    _, token, rest, _ = jax.lax.while_loop(unsettled, attempt, start)
    return token, rest


def _accepts(u: Float[Array, " B"], p: Float[Array, " B"], q: Float[Array, " B"]) -> Bool[Array, " B"]:
    """Whether u < p / q: never where p is 0, not even at u = 0; always where p >= q."""
    return u * q < p


def _residual(rest: Float[Array, "B V"], q: Float[Array, "B V"], p: Float[Array, "B V"]) -> Float[Array, "B V"]:
    """norm((rest - q)+); where rounding leaves no mass (rest = q), the original p."""
    over = jnp.maximum(rest - q, 0)
    mass = over.sum(axis=-1, keepdims=True)
    return jnp.where(mass > 0, over / jnp.where(mass > 0, mass, 1), p)


def _without(q: Float[Array, "B V"], x: Int[Array, " B"]) -> Float[Array, "B V"]:
    """The distribution of the next sibling: q without x, renormalised; 0 where nothing is left."""
    others = jnp.where(jnp.arange(q.shape[1]) == x[:, None], 0, q)
    mass = others.sum(axis=-1, keepdims=True)
    return others / jnp.where(mass > 0, mass, 1)


def _walk(
    tree: DraftTree,
    emit: Callable[[Int[Array, " B"], Bool[Array, " B"], Int[Array, ""]], Int[Array, " B"]],
    max_depth: int,
) -> Int[Array, "B N"]:
    """Token emitted after each visited node, -1 elsewhere; costs one `emit` per depth reached."""
    nodes = jnp.arange(tree.num_nodes)
    acceptable = _acceptable(tree)

    def step(state):
        depth, node, going, emitted = state
        token = emit(node, going, depth)
        here = going[:, None] & (nodes == node[:, None])
        child = acceptable & (tree.parent == node[:, None]) & (tree.tokens == token[:, None])
        return (
            depth + 1,
            jnp.argmax(child, axis=1).astype(jnp.int32),
            going & child.any(axis=1),
            jnp.where(here, token[:, None], emitted),
        )

    def unfinished(state):
        depth, _, going, _ = state
        return (depth <= max_depth) & going.any()

    root = jnp.zeros(tree.tokens.shape[:1], jnp.int32)
    start = (jnp.int32(0), root, root == 0, jnp.full(tree.tokens.shape, -1, jnp.int32))
    return jax.lax.while_loop(unfinished, step, start)[-1]


def _follow(tree: DraftTree, emitted: Int[Array, "B N"], max_depth: int) -> Acceptance:
    """The path on which every token is the one emitted after its parent; all depths at once."""
    wanted = jnp.take_along_axis(emitted, jnp.maximum(tree.parent, 0), axis=1)
    matches = _acceptable(tree) & (tree.tokens == wanted)
    matches = matches.at[:, 0].set(True)
    above = ancestors(tree.parent)
    depth = above.sum(axis=-1, dtype=jnp.int32) - 1
    kept = (matches[:, None, :] | ~above).all(axis=-1)

    # At most one node per depth is kept: no two acceptable siblings share a token.
    found = kept[:, None, :] & (depth[:, None, :] == jnp.arange(max_depth + 1)[:, None])
    path = jnp.where(found.any(axis=-1), jnp.argmax(found, axis=-1), -1).astype(jnp.int32)
    num_accepted = (path >= 0).sum(axis=1, dtype=jnp.int32) - 1
    return Acceptance(path=path, num_accepted=num_accepted, bonus=_at(emitted, _at(path, num_accepted)))


def _acceptable(tree: DraftTree) -> Bool[Array, "B N"]:
    """Valid nodes under a parent; of siblings with the same token only the one tried first."""
    index = jnp.arange(tree.num_nodes)
    rank, other = tree.rank[:, :, None], tree.rank[:, None, :]
    earlier = (other < rank) | ((other == rank) & (index[None, :] < index[:, None]))
    same = (tree.parent[:, :, None] == tree.parent[:, None, :]) & (tree.tokens[:, :, None] == tree.tokens[:, None, :])
    repeated = (same & earlier & tree.valid[:, None, :]).any(axis=-1)
    return tree.valid & (tree.parent >= 0) & ~repeated


def _row(x: Array, index: Int[Array, " B"]) -> Array:
    """`x[b, index[b]]`, of [B N V]."""
    return jnp.take_along_axis(x, index[:, None, None], axis=1)[:, 0]


def _at(x: Array, index: Int[Array, " B"]) -> Array:
    """`x[b, index[b]]`, of [B N]."""
    return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]
