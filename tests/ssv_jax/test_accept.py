"""Acceptance, case by case; `test_accept_distribution.py` holds the proof that sampling is lossless."""

from __future__ import annotations

import dataclasses
import functools
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ssv_jax.sampling import GREEDY, Sampling, probabilities, sample_from
from ssv_jax.tree import DraftTree

# By name: the package may export the function `accept`.
rules = importlib.import_module("ssv_jax.accept")
accept = jax.jit(rules.accept, static_argnums=(2, 4))

PLAIN = Sampling(temperature=1.0)
NO_LOGIT = -np.inf


def make_tree(tokens, parent, *, rank=None, valid=None, q=None) -> DraftTree:
    """A batch of trees, or of one tree given as flat lists."""
    tokens, parent = np.atleast_2d(tokens), np.atleast_2d(parent)
    rank = np.zeros_like(tokens) if rank is None else np.atleast_2d(rank)
    valid = np.ones_like(tokens, bool) if valid is None else np.atleast_2d(valid)
    return DraftTree(
        tokens=jnp.asarray(tokens, jnp.int32),
        parent=jnp.asarray(parent, jnp.int32),
        rank=jnp.asarray(rank, jnp.int32),
        valid=jnp.asarray(valid, bool),
        q=None if q is None else jnp.asarray(q, jnp.float32),
    )


def random_tree(rng, nodes: int, vocab: int) -> DraftTree:
    """Any order with parents before children, equal tokens among siblings, padding at the end."""
    used = rng.integers(1, nodes + 1)
    parent = np.array([-1] + [rng.integers(max(0, i - 6), i) for i in range(1, used)])
    rank = rng.permutation(nodes)
    return make_tree(
        rng.integers(0, vocab, nodes),
        np.concatenate([parent, np.full(nodes - used, -1)]),
        rank=rank,
        valid=np.arange(nodes) < used,
    )


def stack(trees: list[DraftTree]) -> DraftTree:
    return jax.tree.map(lambda *x: jnp.concatenate(x), *trees)


def favour(tokens, vocab: int) -> jax.Array:
    """Logits whose maximum after each node is the given token: [1 N V]."""
    return 5 * jax.nn.one_hot(jnp.asarray([tokens]), vocab)


def emitted(tree: DraftTree, got, row: int = 0) -> list[int]:
    path = np.asarray(got.path[row])
    accepted = [int(tree.tokens[row, node]) for node in path[1 : int(got.num_accepted[row]) + 1]]
    return [*accepted, int(got.bonus[row])]


def walk(tree: DraftTree, logits, max_depth: int, row: int) -> tuple[list[int], int]:
    """The greedy walk in plain Python: path and bonus."""
    tokens, parent, rank, valid = (np.asarray(x[row]) for x in (tree.tokens, tree.parent, tree.rank, tree.valid))
    path = [0]
    while True:
        best = int(np.argmax(logits[row, path[-1]]))
        children = [i for i in range(len(tokens)) if valid[i] and parent[i] == path[-1] and tokens[i] == best]
        if not children or len(path) > max_depth:
            return path, best
        path.append(min(children, key=lambda i: (rank[i], i)))


# --- Greedy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 7, 65])
def test_greedy_agrees_with_a_plain_walk(nodes):
    """Ragged batches of random trees: wrong paths, or one sequence advanced by another's length."""
    rng = np.random.default_rng(nodes)
    vocab, max_depth, batch = 3, 6, 64
    tree = stack([random_tree(rng, nodes, vocab) for _ in range(batch)])
    # Whole numbers: equal maxima are common.
    logits = rng.integers(0, 3, (batch, nodes, vocab)).astype(np.float32)
    got = accept(tree, jnp.asarray(logits), GREEDY, jax.random.key(0), max_depth)
    assert got.path.shape == (batch, max_depth + 1)
    for row in range(batch):
        path, bonus = walk(tree, logits, max_depth, row)
        assert np.asarray(got.path[row]).tolist() == path + [-1] * (max_depth + 1 - len(path))
        assert int(got.num_accepted[row]) == len(path) - 1
        assert int(got.bonus[row]) == bonus
    if nodes > 7:
        assert np.asarray(got.num_accepted).max() > 2


def test_first_of_equal_maxima_is_followed():
    """Divergence from autoregressive decoding on ties: both must take the first index."""
    tree = make_tree([0, 2, 1], [-1, 0, 0], rank=[0, 0, 1])
    logits = jnp.array([[[0.0, 1.0, 1.0]] * 3], jnp.bfloat16)
    got = accept(tree, logits, GREEDY, jax.random.key(0), 1)
    assert got.path.tolist() == [[0, 2]] and got.bonus.tolist() == [1]


def test_all_ties_tree():
    """Over-read or hang when every score is equal: all logits alike, all ranks alike, all tokens alike."""
    nodes, max_depth = 15, 3
    parent = [-1] + [(i - 1) // 2 for i in range(1, nodes)]
    tree = make_tree([0] * nodes, parent)
    logits = jnp.zeros((1, nodes, 4))
    got = accept(tree, logits, GREEDY, jax.random.key(0), max_depth)
    assert got.path.tolist() == [[0, 1, 3, 7]] and got.bonus.tolist() == [0]
    certain = dataclasses.replace(tree, q=favour([0] * nodes, 4) / 5)
    for sampled in (tree, certain):
        got = accept(sampled, 1e9 * favour([0] * nodes, 4), PLAIN, jax.random.key(0), max_depth)
        assert got.path.tolist() == [[0, 1, 3, 7]] and got.bonus.tolist() == [0]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampling"])
def test_padding_is_never_accepted(sampling):
    """Garbage nodes that look like the right continuation."""
    tree = make_tree([3, 1, 1, 1], [-1, -1, 0, 2], valid=[True, False, False, True])
    got = accept(tree, 1e9 * favour([1, 1, 1, 1], 4), sampling, jax.random.key(0), 3)
    assert got.path.tolist() == [[0, -1, -1, -1]]
    assert got.num_accepted.tolist() == [0] and got.bonus.tolist() == [1]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampling"])
def test_tree_is_much_wider_than_deep(sampling):
    """Illegal access when the accepted path is sized by the number of drafted tokens, or the reverse."""
    nodes = 65
    tree = make_tree(range(nodes), [-1] + [0] * (nodes - 1), rank=range(nodes))
    got = accept(tree, 1e9 * favour([64] + [5] * 64, nodes), sampling, jax.random.key(0), 1)
    assert got.path.tolist() == [[0, 64]] and got.bonus.tolist() == [5]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampling"])
@pytest.mark.parametrize("max_depth", [0, 2, 3, 7])
def test_path_has_the_width_of_the_bound(sampling, max_depth):
    """Trees deeper or shallower than the bound."""
    tree = make_tree([0, 1, 2, 3], [-1, 0, 1, 2])
    got = accept(tree, 1e9 * favour([1, 2, 3, 4], 6), sampling, jax.random.key(0), max_depth)
    depth = min(max_depth, 3)
    assert got.path.tolist() == [[*range(depth + 1)] + [-1] * (max_depth - depth)]
    assert got.num_accepted.tolist() == [depth] and got.bonus.tolist() == [depth + 1]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampling"])
def test_root_alone_emits_the_next_token(sampling):
    """Autoregressive decoding is the tree without drafted tokens."""
    tree = make_tree([3], [-1])
    got = accept(tree, 1e9 * favour([2], 4), sampling, jax.random.key(0), 0)
    assert got.path.tolist() == [[0]] and got.num_accepted.tolist() == [0] and got.bonus.tolist() == [2]


@pytest.mark.parametrize("sampling", [GREEDY, PLAIN], ids=["greedy", "sampling"])
@pytest.mark.parametrize("with_q", [False, True], ids=["point", "q"])
def test_rejected_stop_token_is_not_reported(sampling, with_q):
    """A sequence finished because a stop token was drafted, though it was rejected."""
    stop, vocab = 5, 6
    tree = make_tree([0, stop, 1, stop, 2], [-1, 0, 0, 2, 2], rank=[0, 0, 1, 0, 1])
    if with_q:
        tree = dataclasses.replace(tree, q=jnp.full((1, 5, vocab), 1 / vocab))
    got = accept(tree, 1e9 * favour([1, stop, 2, stop, 3], vocab), sampling, jax.random.key(0), 2)
    assert emitted(tree, got) == [1, 2, 3]
    assert got.path.tolist() == [[0, 2, 4]]


def test_temperature_zero_is_greedy():
    """Sampling at temperature 0, also with a q, equals the greedy walk."""
    rng = np.random.default_rng(3)
    tree = stack([random_tree(rng, 12, 3) for _ in range(16)])
    logits = jnp.asarray(rng.normal(size=(16, 12, 3)), jnp.float32)
    greedy = accept(tree, logits, GREEDY, jax.random.key(0), 4)
    with_q = dataclasses.replace(tree, q=jax.nn.softmax(logits))
    sampled = rules.accept_sampling(tree, logits, GREEDY, jax.random.key(0), 4)
    for got in (accept(with_q, logits, GREEDY, jax.random.key(0), 4), sampled):
        jax.tree.map(np.testing.assert_array_equal, got, greedy)


def test_misfits_are_refused():
    """A q over the draft vocabulary would be read at the wrong tokens without an error."""
    tree = make_tree([0, 1], [-1, 0])
    logits = jnp.zeros((1, 2, 6))
    with pytest.raises(ValueError, match="max_depth"):
        rules.accept_greedy(tree, logits, -1)
    small = dataclasses.replace(tree, q=jnp.full((1, 2, 4), 0.25))
    with pytest.raises(ValueError, match="target vocabulary"):
        rules.accept_sampling(small, logits, PLAIN, jax.random.key(0), 1)
    with pytest.raises(ValueError, match="per node"):
        rules.accept_greedy(tree, jnp.zeros((1, 3, 6)), 1)


# --- Sampling, with given uniforms --------------------------------------------------------------------

given = jax.jit(rules._accept_given, static_argnums=(2, 5))
LAST = float(np.nextafter(np.float32(1), np.float32(0)))


def accept_given(tree, logits, u, *, draw=0.5, max_depth=1):
    batch, nodes = tree.tokens.shape
    draws = jnp.full((batch, max_depth + 1, 2), draw, jnp.float32)
    return given(tree, logits, PLAIN, jnp.full((batch, nodes), u, jnp.float32), draws, max_depth)


@pytest.mark.parametrize("u", [0.0, 0.5, LAST])
@pytest.mark.parametrize("draw", [0.0, LAST])
@pytest.mark.parametrize("with_q", [False, True], ids=["point", "q"])
def test_impossible_token_is_never_emitted(u, draw, with_q):
    """A token of probability 0 is emitted when the uniform is exactly 0."""
    logits = jnp.array([[[NO_LOGIT, 0.0, 0.0, NO_LOGIT]] * 3])
    q = np.full((1, 3, 4), 0.25) if with_q else None
    tree = make_tree([1, 0, 3], [-1, 0, 0], rank=[0, 0, 1], q=q)
    got = accept_given(tree, logits, u, draw=draw)
    assert got.num_accepted.tolist() == [0]
    assert got.bonus.tolist() in ([1], [2])


@pytest.mark.parametrize("u", [0.0, 0.5, LAST])
def test_equal_distributions_accept_always(u):
    """q = p: a draft by the target itself is never rejected, not even by the largest uniform."""
    logits = jax.random.normal(jax.random.key(0), (1, 2, 50))
    q = probabilities(logits, PLAIN)
    for token in range(50):
        got = accept_given(make_tree([0, token], [-1, 0], q=q), logits, u)
        assert got.num_accepted.tolist() == [1]


def test_only_tokens_under_represented_by_q_follow_a_rejection():
    """The token after a rejection comes from (p - q)+, which the rejected token is not part of."""
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2]] * 2]))
    tree = make_tree([0, 1], [-1, 0], q=[[[0.1, 0.7, 0.2]] * 2])
    for draw in np.linspace(0, LAST, 11):
        got = accept_given(tree, logits, LAST, draw=draw)
        assert got.num_accepted.tolist() == [0] and got.bonus.tolist() == [0]


def test_no_mass_left_falls_back_to_p():
    """NaN, then token 0 for ever, when rounding leaves nothing of p after a rejection."""
    p = jnp.array([[0.0, 0.4, 0.6, 0.0], [0.25, 0.25, 0.25, 0.25]])
    for rest in (p, p * (1 - 1e-6)):
        left = rules._residual(rest, p, p)
        np.testing.assert_array_equal(left, p)
    gone = rules._without(jnp.array([[0.0, 1.0]]), jnp.array([1]))
    assert gone.tolist() == [[0.0, 0.0]]


def test_children_beyond_the_support_of_q_are_skipped():
    """Division by a q of 0: more children were asked for than q has tokens."""
    q = np.zeros((1, 4, 4))
    q[..., 2] = 1
    tree = make_tree([0, 2, 2, 3], [-1, 0, 0, 0], rank=[0, 0, 1, 2], q=q)
    logits = jnp.log(jnp.array([[[0.5, 0.3, 0.2, 0.0]] * 4]))
    got = accept_given(tree, logits, LAST)
    assert got.num_accepted.tolist() == [0] and got.bonus.tolist() in ([0], [1])
    got = accept_given(tree, logits, 0.1)
    assert got.path.tolist() == [[0, 1]]


def test_q_of_leaves_is_not_read():
    """NaN in rows that the drafter had no reason to fill."""
    q = np.full((1, 3, 4), np.nan)
    q[:, 0] = 0.25
    tree = make_tree([0, 1, 2], [-1, 0, 0], rank=[0, 0, 1], q=q)
    got = accept_given(tree, jnp.zeros((1, 3, 4)), 0.5)
    assert got.path.tolist() == [[0, 1]] and 0 <= int(got.bonus[0]) < 4


def test_children_are_tried_in_order_of_rank():
    """Order of nodes and order of trying are different things."""
    logits = jnp.zeros((1, 3, 4))
    for rank, first in (([0, 0, 1], 1), ([0, 1, 0], 2)):
        tree = make_tree([0, 1, 2], [-1, 0, 0], rank=rank, q=np.full((1, 3, 4), 0.25))
        assert accept_given(tree, logits, 0.5).path.tolist() == [[0, first]]


def test_batch_rows_do_not_mix():
    """Corrupt batches when sequences accept different numbers of tokens."""
    rng = np.random.default_rng(5)
    batch, nodes, vocab, max_depth = 9, 14, 4, 5
    tree = stack([random_tree(rng, nodes, vocab) for _ in range(batch)])
    logits = jnp.asarray(2 * rng.normal(size=(batch, nodes, vocab)), jnp.float32)
    tries = jnp.asarray(rng.random((batch, nodes)), jnp.float32)
    draws = jnp.asarray(rng.random((batch, max_depth + 1, 2)), jnp.float32)
    q = jax.nn.softmax(logits + jnp.asarray(rng.normal(size=logits.shape), jnp.float32))
    for tried in (tree, dataclasses.replace(tree, q=q)):
        got = given(tried, logits, PLAIN, tries, draws, max_depth)
        assert len(set(got.num_accepted.tolist())) > 1
        for row in range(batch):
            one = jax.tree.map(lambda x, row=row: x[row : row + 1], (tried, logits, tries, draws, got))
            alone = given(one[0], one[1], PLAIN, one[2], one[3], max_depth)
            jax.tree.map(np.testing.assert_array_equal, alone, one[4])


# --- Large vocabularies -------------------------------------------------------------------------------

VOCAB = 16384
BATCH = 64


def draw_float32(key, q):
    return sample_from(key, q)


def draw_bfloat16(key, q):
    """As a drafter may that keeps everything in low precision."""
    noise = jax.random.gumbel(key, q.shape, jnp.bfloat16)
    return jnp.argmax(jnp.log(q).astype(jnp.bfloat16) + noise, axis=-1).astype(jnp.int32)


@functools.partial(jax.jit, static_argnames=("draw", "rounds", "with_q"))
def first_tokens(key, p_logits, q, *, draw, rounds, with_q=True):
    """First emitted token and number accepted of chains with one drafted token."""

    def one(key):
        draw_key, accept_key = jax.random.split(key)
        rows = jnp.broadcast_to(q, (BATCH, 2, VOCAB))
        child = draw(draw_key, rows[:, 0])
        tokens = jnp.stack([jnp.zeros_like(child), child], axis=1)
        each = functools.partial(jnp.broadcast_to, shape=tokens.shape)
        tree = DraftTree(
            tokens=tokens,
            parent=each(jnp.array([-1, 0], jnp.int32)),
            valid=each(jnp.array([True, True])),
            rank=each(jnp.array([0, 0], jnp.int32)),
            q=rows if with_q else None,
        )
        logits = jnp.broadcast_to(p_logits, rows.shape)
        got = rules.accept(tree, logits, PLAIN, accept_key, 1)
        return jnp.where(got.num_accepted > 0, child, got.bonus), got.num_accepted

    return jax.tree.map(jnp.ravel, jax.lax.map(one, jax.random.split(key, rounds)))


def bucket_p_value(tokens, p) -> float:
    """Chi-square of the tokens' counts in 64 runs of neighbouring tokens."""
    seen = np.bincount(np.asarray(tokens) // (VOCAB // 64), minlength=64)
    due = np.asarray(p, np.float64).reshape(64, -1).sum(1)
    return stats.chisquare(seen, due / due.sum() * seen.sum()).pvalue


def test_acceptance_is_the_overlap_of_p_and_q():
    """Acceptance below sum(min(p, q)): the true q was not used. And the law stays p over a large vocabulary."""
    logits, shift = jax.random.normal(jax.random.key(0), (2, VOCAB))
    p = probabilities(2 * logits, PLAIN)
    q = probabilities(2 * logits + shift, PLAIN)
    overlap = float(jnp.minimum(p, q).sum())
    tokens, accepted = first_tokens(jax.random.key(1), 2 * logits, q, draw=draw_float32, rounds=48)
    trials = len(accepted)
    assert abs(float(accepted.mean()) - overlap) < 4 * np.sqrt(overlap * (1 - overlap) / trials)
    assert bucket_p_value(tokens, p) > 1e-3
    _, chosen = first_tokens(jax.random.key(2), 2 * logits, q, draw=draw_float32, rounds=8, with_q=False)
    assert float(chosen.mean()) < overlap / 4


def test_drawing_and_accepting_share_one_distribution():
    """Samples biased towards low token numbers: children drawn in bfloat16, accepted against float32 numbers."""
    logits = jax.random.normal(jax.random.key(0), (VOCAB,))
    p = probabilities(logits, PLAIN)
    assert p.dtype == jnp.float32
    tokens, accepted = first_tokens(jax.random.key(1), logits, p, draw=draw_float32, rounds=48)
    assert accepted.all()
    assert bucket_p_value(tokens, p) > 1e-3
    tokens, _ = first_tokens(jax.random.key(1), logits, p, draw=draw_bfloat16, rounds=48)
    assert bucket_p_value(tokens, p) < 1e-6


def test_removed_tokens_do_not_appear_in_a_large_vocabulary():
    """Rounding of a long cumulative sum gives removed tokens a share."""
    logits = jax.random.normal(jax.random.key(0), (1, 2, VOCAB))
    sampling = Sampling(temperature=1.0, top_k=VOCAB // 8)
    p = np.asarray(probabilities(logits, sampling))[0, 0]
    tree = make_tree(np.zeros((BATCH, 2)), np.tile([-1, 0], (BATCH, 1)))
    rows = jnp.broadcast_to(logits, (BATCH, 2, VOCAB))
    for seed in range(4):
        got = accept(tree, rows, sampling, jax.random.key(seed), 1)
        for row in range(BATCH):
            assert p[emitted(tree, got, row)[0]] > 0
