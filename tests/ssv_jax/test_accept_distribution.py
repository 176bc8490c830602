"""Proof by test that acceptance is lossless: the joint law of the first emitted tokens is the target's own.

Small languages (tables of next-token distributions) are decoded with draft trees in many parallel sequences,
for as many rounds as three emitted tokens can take. The counts of the 6^3 triples must fit the exact
probabilities, by chi-square and by total variation; deliberately wrong rules must not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from ssv_jax.sampling import Sampling, invert, probabilities
from ssv_jax.tree import DraftTree

# By name: the package may export the function `accept`.
rules = importlib.import_module("ssv_jax.accept")

VOCAB = 6
EMITTED = 3
# Sequences decoded at once, and how many times: 200,000 in all.
CHUNK = 50_000
CHUNKS = 4
GROUP = 8
PLAIN = Sampling(temperature=1.0)


# --- Languages -----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """Target and draft logits by context, and the context that a token leads to."""

    target: Any  # [C V]
    draft: Any  # [C V]
    after: Any  # integers [C V]


def make_after(memory: str) -> np.ndarray:
    """Contexts: the last token, or the whole prefix of up to two tokens (context 0: the empty prefix)."""
    if memory == "last":
        return np.tile(np.arange(VOCAB), (VOCAB, 1))
    prefixes = [p for n in range(EMITTED) for p in itertools.product(range(VOCAB), repeat=n)]
    index = {p: i for i, p in enumerate(prefixes)}
    # The token after three others is not looked at: any context will do.
    return np.array(
        [[index.get((*p, x), (i + x) % len(prefixes)) for x in range(VOCAB)] for i, p in enumerate(prefixes)]
    )


def make_language(kind: str, memory: str = "prefix", seed: int = 0) -> Language:
    after = make_after(memory)
    rng = np.random.default_rng(seed)
    target, draft = rng.normal(0, 1.3, (2, *after.shape))
    token = np.arange(VOCAB)
    match kind:
        case "random":
            pass
        case "same":
            draft = target
        case "disjoint":
            target = np.where(token % 2 == 0, target, -np.inf)
            draft = np.where(token % 2 == 1, draft, -np.inf)
        case "onehot-target":
            target = np.where(token == rng.integers(0, VOCAB, (len(after), 1)), 0.0, -np.inf)
        case "onehot-draft":
            draft = np.where(token == rng.integers(0, VOCAB, (len(after), 1)), 0.0, -np.inf)
        case "impossible-children":
            # The drafter's favourites cannot be emitted.
            target = np.where(token < 3, -np.inf, target)
            draft = np.where(token < 3, draft + 2, draft)
        case "small-draft-vocabulary":
            # Two tokens: fewer than the children that a node is asked for.
            draft = np.where(token < 2, draft, -np.inf)
        case "eighths":
            # p / q is a multiple of 1/8 for every token: an only child can be tried with a coarse uniform.
            with np.errstate(divide="ignore"):
                target = np.log(np.tile([0.5, 0.375, 0.125, 0, 0, 0], (len(after), 1)))
            draft = np.where(token < 4, 0.0, np.full(after.shape, -np.inf))
        case _:
            raise ValueError(kind)
    return Language(target=np.float32(target), draft=np.float32(draft), after=np.int32(after))


def process(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Temperature, top-k, top-p in float64, one row; equal logits do not occur where something is cut."""
    logits = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(logits - logits.max())
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    weights /= weights.sum()
    if sampling.top_p < 1:
        reached = np.cumsum(weights[order])
        weights[order[np.searchsorted(reached, sampling.top_p) + 1 :]] = 0
    return weights / weights.sum()


def exact_joint(language: Language, sampling: Sampling) -> np.ndarray:
    """Probability of each triple under autoregressive decoding, from context 0."""
    p = np.stack([process(row, sampling) for row in language.target])
    joint = np.zeros((VOCAB,) * EMITTED)
    for triple in np.ndindex(joint.shape):
        context, mass = 0, 1.0
        for token in triple:
            mass *= p[context, token]
            context = language.after[context, token]
        joint[triple] = mass
    return joint


# --- Drafting ------------------------------------------------------------------------------------------

NODES = 9
# Depth bound of all trees, unless a test cuts them.
DEPTH = 3


def make_shape(parent: list[int], rank: list[int]) -> DraftTree:
    """A tree of one sequence without its tokens, padded to NODES.

    Nodes are not always in the order of rank: trees may come sorted by anything.
    """
    pad = NODES - len(parent)
    return DraftTree(
        tokens=jnp.zeros((1, NODES), jnp.int32),
        parent=jnp.array([parent + [-1] * pad], jnp.int32),
        rank=jnp.array([rank + [0] * pad], jnp.int32),
        valid=jnp.arange(NODES)[None] < len(parent),
    )


SHAPES = {
    "chain": make_shape([-1, 0, 1, 2], [0, 0, 0, 0]),
    "star": make_shape([-1, 0, 0, 0], [0, 2, 0, 1]),
    "depth 2": make_shape([-1, 0, 0, 0, 1, 1, 2, 2], [0, 1, 2, 0, 0, 1, 1, 0]),
    # Leaves at depths 1, 2 and 3.
    "depth 3": make_shape([-1, 0, 0, 0, 1, 1, 3, 4, 4], [0, 1, 0, 2, 1, 0, 0, 1, 0]),
}
MOST_CHILDREN = 3


def choose_children(key, log_q, method: str):
    """Up to MOST_CHILDREN different continuations of each row, in the order in which they are to be tried.

    `sampled` without replacement from q; `repeated` likewise, but the second repeats the first; `independent`
    with replacement; `best`: the most likely; `pruned`: all but the least likely of one sampled child more.
    """
    batch = log_q.shape[0]
    if method == "best":
        return jax.lax.top_k(log_q, MOST_CHILDREN)[1]
    if method == "independent":
        noise = jax.random.gumbel(key, (MOST_CHILDREN, batch, VOCAB))
        return jnp.argmax(log_q + noise, axis=-1).T
    sampled = jax.lax.top_k(log_q + jax.random.gumbel(key, (batch, VOCAB)), MOST_CHILDREN + 1)[1]
    if method == "repeated":
        return jnp.concatenate([sampled[:, :1], sampled[:, :-2]], axis=1)
    if method == "pruned":
        scores = jnp.take_along_axis(log_q, sampled, axis=1)
        kept = jnp.sort(jax.lax.top_k(scores, MOST_CHILDREN)[1], axis=1)
        return jnp.take_along_axis(sampled, kept, axis=1)
    return sampled[:, :-1]


@functools.partial(jax.jit, static_argnames=("method",))
def draft(key, language: Language, context, shape: DraftTree, method: str):
    """For each sequence the tokens of its tree, q and the context after each node."""
    batch = context.shape[0]
    log_q = jax.nn.log_softmax(language.draft, axis=-1)

    def add_children(node, state):
        tokens, contexts = state
        chosen = choose_children(jax.random.fold_in(key, node), log_q[contexts[:, node]], method)
        proposed = jnp.take(chosen, shape.rank[0], axis=1)
        is_child = (shape.parent[0] == node)[None]
        tokens = jnp.where(is_child, proposed, tokens)
        after = jnp.take_along_axis(language.after[contexts[:, node]], proposed, axis=1)
        return tokens, jnp.where(is_child, after, contexts)

    start = (jnp.zeros((batch, NODES), jnp.int32), jnp.broadcast_to(context[:, None], (batch, NODES)))
    parents = jnp.max(shape.parent) + 1
    tokens, contexts = jax.lax.fori_loop(0, parents, add_children, start)
    return tokens, jnp.exp(log_q)[contexts], contexts


# --- Decoding and comparing ----------------------------------------------------------------------------


# Compiling takes longer than running.
@functools.partial(
    jax.jit,
    static_argnames=("sampling", "accept", "max_depth"),
    compiler_options={"xla_backend_optimization_level": 1},
)
def advance(key, state, tokens, q, contexts, shape, language, *, sampling, accept, max_depth):
    """The sequences' contexts, counts and emitted tokens after acceptance."""
    context, count, emitted = state

    # Groups of GROUP sequences, vectorised: both the batch axis and `vmap` are exercised, and the trees' shape
    # is worked out for one group.
    def accept_group(key, tokens, q, contexts):
        common = jax.tree.map(lambda x: jnp.broadcast_to(x, (GROUP, NODES)), shape)
        tree = dataclasses.replace(common, tokens=tokens, q=q)
        return accept(tree, language.target[contexts], sampling, key, max_depth)

    grouped = jax.tree.map(lambda x: x.reshape(-1, GROUP, *x.shape[1:]), (tokens, q, contexts))
    got = jax.vmap(accept_group)(jax.random.split(key, len(grouped[0])), *grouped)
    got = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), got)
    for depth in range(max_depth + 1):
        node = got.path[:, min(depth + 1, max_depth)]
        token = jnp.take_along_axis(tokens, node[:, None], axis=1)[:, 0]
        token = jnp.where(depth < got.num_accepted, token, got.bonus)
        here = (depth <= got.num_accepted)[:, None] & (jnp.arange(EMITTED) == (count + depth)[:, None])
        emitted = jnp.where(here, token[:, None], emitted)
    last = jnp.take_along_axis(got.path, got.num_accepted[:, None], axis=1)
    context = language.after[jnp.take_along_axis(contexts, last, axis=1)[:, 0], got.bonus]
    return context, count + got.num_accepted + 1, emitted


def count_triples(key, language, shape, method, *, chunks, with_q, **acceptance) -> np.ndarray:
    """How often each triple of tokens was emitted first."""
    counts = np.zeros(VOCAB**EMITTED, np.int64)
    for chunk_key in jax.random.split(key, chunks):
        context = jnp.zeros(CHUNK, jnp.int32)
        state = (context, context, jnp.zeros((CHUNK, EMITTED), jnp.int32))
        for round_key in jax.random.split(chunk_key, EMITTED):
            draft_key, accept_key = jax.random.split(round_key)
            tokens, q, contexts = draft(draft_key, language, state[0], shape, method)
            q = q if with_q else None
            state = advance(accept_key, state, tokens, q, contexts, shape, language, **acceptance)
        emitted = np.asarray(state[2])
        triples = np.ravel_multi_index(tuple(emitted.T), (VOCAB,) * EMITTED)
        counts += np.bincount(triples, minlength=counts.size)
    return counts


@dataclasses.dataclass(frozen=True)
class Fit:
    """How well counts agree with exact probabilities."""

    p_value: float
    variation: float
    variation_bound: float
    impossible: int

    @property
    def good(self) -> bool:
        return self.impossible == 0 and self.p_value > 1e-3 and self.variation <= self.variation_bound


def compare(counts: np.ndarray, exact: np.ndarray) -> Fit:
    counts, exact = counts.ravel().astype(np.float64), exact.ravel()
    total = counts.sum()
    expected = exact * total
    rare = expected < 5
    seen = np.append(counts[~rare], counts[rare].sum())
    due = np.append(expected[~rare], expected[rare].sum())
    keep = due > 0
    statistic = ((seen - due)[keep] ** 2 / due[keep]).sum()
    # The mean of the variation is below the first term; it exceeds its mean by the second in 1 of 1000 cases.
    bound = 0.5 * np.sqrt(exact * (1 - exact) / total).sum() + np.sqrt(np.log(1000) / (2 * total))
    return Fit(
        p_value=float(stats.chi2.sf(statistic, keep.sum() - 1)) if keep.sum() > 1 else 1.0,
        variation=0.5 * float(np.abs(counts / total - exact).sum()),
        variation_bound=float(bound),
        impossible=int(counts[exact == 0].sum()),
    )


def measure(
    language: Language,
    shape: str,
    method: str,
    *,
    sampling: Sampling = PLAIN,
    accept: Callable = rules.accept,
    with_q: bool = True,
    max_depth: int = DEPTH,
    chunks: int = CHUNKS,
) -> Fit:
    counts = count_triples(
        jax.random.key(1),
        language,
        SHAPES[shape],
        method,
        chunks=chunks,
        with_q=with_q,
        sampling=sampling,
        accept=accept,
        max_depth=max_depth,
    )
    assert counts.sum() == CHUNK * chunks
    return compare(counts, exact_joint(language, sampling))


def try_in_turn(tree, logits, sampling, key, max_depth, *, zeroing: bool = True, fresh: bool = True):
    """The point-mass rule as usually written: accept x if u < p(x), else remove x from p and renormalise.

    Wrong with `zeroing` off (p is kept after a rejection) or `fresh` off (one u serves all tries of a round).
    """
    batch, nodes = tree.tokens.shape
    u = jax.random.uniform(key, (batch, 2 * nodes + 2))
    if not fresh:
        u = jnp.broadcast_to(u[:, :1], u.shape)
    node = jnp.zeros(batch, jnp.int32)
    path = jnp.full((batch, max_depth + 1), -1, jnp.int32).at[:, 0].set(0)
    rest = probabilities(logits[:, 0], sampling)
    depth = jnp.zeros(batch, jnp.int32)
    going = jnp.ones(batch, bool)
    by_rank = jnp.argsort(tree.rank, axis=1, stable=True)

    def at(x, index):
        return jnp.take_along_axis(x, index[:, None], axis=1)[:, 0]

    for _ in range(max_depth):
        start = node

        def attempt(i, state, start=start, going=going):
            node, moved, rest = state
            child = by_rank[:, i]
            x = at(tree.tokens, child)
            tried = going & ~moved & at(tree.valid, child) & (at(tree.parent, child) == start)
            yes = tried & (at(u, child) < at(rest, x))
            if zeroing:
                cut = jnp.where(jnp.arange(rest.shape[1]) == x[:, None], 0, rest)
                mass = cut.sum(-1, keepdims=True)
                rest = jnp.where((tried & ~yes)[:, None] & (mass > 0), cut / mass, rest)
            return jnp.where(yes, child, node), moved | yes, rest

        nothing = jnp.zeros(batch, bool)
        node, moved, rest = jax.lax.fori_loop(0, nodes, attempt, (node, nothing, rest))
        going = moved
        depth = depth + moved
        path = jnp.where(moved[:, None] & (jnp.arange(max_depth + 1) == depth[:, None]), node[:, None], path)
        row = jnp.take_along_axis(logits, node[:, None, None], axis=1)[:, 0]
        rest = jnp.where(moved[:, None], probabilities(row, sampling), rest)
    return rules.Acceptance(path=path, num_accepted=depth, bonus=invert(rest, u[:, -2:]))


# --- Right rules ---------------------------------------------------------------------------------------

LANGUAGES = (
    "random",
    "same",
    "disjoint",
    "onehot-target",
    "onehot-draft",
    "impossible-children",
    "small-draft-vocabulary",
)


@pytest.mark.parametrize("kind", LANGUAGES)
def test_true_q_keeps_the_law(kind):
    """Biased samples, or NaN, with: q = p, disjoint supports, certain tokens, tokens that p or q lacks."""
    fit = measure(make_language(kind), "depth 2", "sampled")
    assert fit.good, fit


@pytest.mark.parametrize("kind", LANGUAGES)
def test_point_mass_keeps_the_law(kind):
    """Children chosen as the most likely of q: the q = 1 rule costs acceptance, not correctness."""
    fit = measure(make_language(kind), "depth 2", "best", with_q=False)
    assert fit.good, fit


@pytest.mark.parametrize("shape", SHAPES)
def test_true_q_keeps_the_law_on_every_shape(shape):
    """Chains, and trees with leaves above the depth bound; p depends on the last token alone."""
    fit = measure(make_language("random", "last", seed=2), shape, "sampled")
    assert fit.good, fit


@pytest.mark.parametrize("with_q", [True, False], ids=["q", "point"])
def test_law_holds_for_trees_below_the_bound(with_q):
    """A tree that is deeper than the bound: the walk stops at the bound, with the right next token."""
    fit = measure(make_language("random", seed=5), "depth 3", "sampled", with_q=with_q, max_depth=1)
    assert fit.good, fit


@pytest.mark.parametrize(
    ("shape", "method"),
    [("depth 3", "sampled"), ("depth 3", "pruned"), ("depth 3", "independent"), ("chain", "sampled")],
)
def test_point_mass_keeps_the_law_for_sampled_children(shape, method):
    """Sampled, pruned and repeated children, all accepted as if they had been chosen."""
    fit = measure(make_language("random", "last", seed=3), shape, method, with_q=False)
    assert fit.good, fit


@pytest.mark.parametrize("kind", ["random", "small-draft-vocabulary"])
def test_true_q_ignores_a_repeated_child(kind):
    """A token that appears twice among siblings is counted twice, and comes too often."""
    fit = measure(make_language(kind), "depth 2", "repeated")
    assert fit.good, fit


@pytest.mark.parametrize(
    ("sampling", "with_q"),
    [
        (Sampling(temperature=1.7, top_k=3), True),
        (Sampling(temperature=1.0, top_p=0.7), True),
        (Sampling(temperature=0.6, top_k=4, top_p=0.9), False),
    ],
    ids=["q-top-k", "q-top-p", "point-all"],
)
def test_law_holds_for_processed_distributions(sampling, with_q):
    """Temperature and cuts: verification that forgets them emits what was cut away, or too flat a law."""
    fit = measure(make_language("random", seed=4), "depth 2", "sampled", sampling=sampling, with_q=with_q)
    assert fit.good, fit


def test_trying_in_turn_is_the_same_law():
    """The point-mass rule as usually written and the one draw of ours agree with the same probabilities."""
    language = make_language("random")
    assert measure(language, "depth 2", "best", with_q=False, accept=try_in_turn).good
    assert measure(language, "depth 2", "independent", with_q=False, accept=try_in_turn).good


def coarse(tree, logits, sampling, key, max_depth):
    """Tries with eight uniforms, 0 among them: exact for an only child where p / q is a multiple of 1/8."""
    key_try, key_draw = jax.random.split(key)
    cell = jax.random.randint(key_try, tree.tokens.shape, 0, 8)
    tries = jnp.where(cell == 0, 0.0, (cell + 0.5) / 8)
    draws = jax.random.uniform(key_draw, (tree.tokens.shape[0], max_depth + 1, 2))
    return rules._accept_given(tree, logits, sampling, tries, draws, max_depth)


def test_law_holds_when_uniforms_are_often_zero():
    """A token of probability 0 is emitted whenever the uniform is exactly 0."""
    fit = measure(make_language("eighths"), "chain", "sampled", accept=coarse)
    assert fit.good, fit


# --- Wrong rules: each must fail the same statistic ----------------------------------------------------


def patched(name: str, replacement: Callable, accept: Callable = rules.accept) -> Callable:
    """The rule with one of its steps replaced, while it is traced."""

    def mutant(*args):
        with mock.patch.object(rules, name, replacement):
            return accept(*args)

    return mutant


def reuse_uniforms(tree, logits, sampling, key, max_depth):
    batch, nodes = tree.tokens.shape
    u = jax.random.uniform(key, (batch, 1))
    tries, draws = (
        jnp.broadcast_to(u, (batch, nodes)),
        jnp.broadcast_to(u[..., None], (batch, max_depth + 1, 2)),
    )
    return rules._accept_given(tree, logits, sampling, tries, draws, max_depth)


def try_by_score(tree, logits, sampling, key, max_depth):
    parent_q = jnp.take_along_axis(tree.q, jnp.maximum(tree.parent, 0)[..., None], axis=1)
    score = jnp.take_along_axis(parent_q, tree.tokens[..., None], axis=2)[..., 0]
    rank = jnp.argsort(jnp.argsort(-score, axis=1), axis=1).astype(jnp.int32)
    return rules.accept(dataclasses.replace(tree, rank=rank), logits, sampling, key, max_depth)


WRONG_TRUE_Q = {
    "no residual": patched("_residual", lambda rest, q, p: rest),
    "reused uniforms": reuse_uniforms,
    "tried by score": try_by_score,
    "q not updated": patched("_without", lambda q, x: q),
    "always accepted": patched("_accepts", lambda u, p, q: p > 0),
}


@pytest.mark.parametrize("name", WRONG_TRUE_Q)
def test_wrong_true_q_rules_fail(name):
    """The statistic sees each of the known ways to lose losslessness with true q."""
    fit = measure(make_language("random"), "depth 2", "sampled", chunks=1, accept=WRONG_TRUE_Q[name])
    assert not fit.good, fit
    assert fit.p_value < 1e-6, fit


def test_true_q_of_pruned_children_fails():
    """Why sampled trees that were pruned by score must be accepted as chosen ones."""
    fit = measure(make_language("random"), "depth 2", "pruned", chunks=1)
    assert fit.p_value < 1e-6, fit


@pytest.mark.parametrize("step", ["zeroing", "fresh"])
def test_wrong_point_mass_rules_fail(step):
    """Raw p after a rejection; one uniform for all tries."""
    wrong = functools.partial(try_in_turn, **{step: False})
    fit = measure(make_language("random"), "depth 2", "best", chunks=1, with_q=False, accept=wrong)
    assert fit.p_value < 1e-6, fit


def test_one_draw_for_all_depths_fails():
    """Point mass by one draw per depth: the draws must be independent."""
    fit = measure(make_language("random"), "depth 2", "best", chunks=1, with_q=False, accept=reuse_uniforms)
    assert fit.p_value < 1e-6, fit


def test_accepting_at_equality_fails():
    """`u <= p / q` emits tokens of probability 0 when u is 0."""
    wrong = patched("_accepts", lambda u, p, q: u * q <= p, coarse)
    fit = measure(make_language("eighths"), "chain", "sampled", chunks=1, accept=wrong)
    assert fit.impossible > 0, fit


def test_target_without_its_cuts_fails():
    """Accepting against the unprocessed distribution."""
    raw = patched("probabilities", lambda logits, sampling: jax.nn.softmax(logits))
    sampling = Sampling(temperature=0.8, top_p=0.8)
    fit = measure(make_language("random"), "depth 2", "sampled", chunks=1, sampling=sampling, accept=raw)
    assert fit.impossible > 0 and fit.p_value < 1e-6, fit
