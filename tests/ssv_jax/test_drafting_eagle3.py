"""EAGLE-3 drafting: the stable cache, the dynamic tree and the sampled tree, against numpy and by their invariants."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import loop
from ssv_jax.drafting.dynamic_tree import check_tree, pool_size, top_candidates, tree_from_pool
from ssv_jax.drafting.eagle3 import Eagle3Drafter, Eagle3SampledDrafter, Eagle3State, load_drafter
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Observation, Params
from ssv_jax.models import eagle3
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.eagle3_loading import export_eagle3
from ssv_jax.models.errors import CheckpointError
from ssv_jax.models.llama import build
from ssv_jax.ranking import best
from ssv_jax.sampling import Sampling
from ssv_jax.tree import DraftTree, ancestors, depths, flatten
from tests.models.eagle3_numpy import (
    HEADS,
    PLAIN,
    TARGET,
    NumpyHead,
    as_jax,
    random_embedding,
    random_head,
    random_target,
    tree_of,
)

CAPACITY = 24


@dataclasses.dataclass(frozen=True)
class Setup:
    """A drafter's ingredients, and the same head in numpy."""

    config: Eagle3Config
    params: Params
    graphdef: Any
    oracle: NumpyHead

    def dynamic(self, depth: int = 2, top_k: int = 3, nodes: int = 22, window: int | None = None) -> Eagle3Drafter:
        return Eagle3Drafter(
            graphdef=self.graphdef, config=self.config, depth=depth, top_k=top_k, num_nodes=nodes, window=window
        )


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    """Setups by name of the head."""

    @functools.cache
    def make(name: str = "plain") -> Setup:
        config, params = HEADS[name], random_head(HEADS[name])
        directory = tmp_path_factory.mktemp(name) / "head"
        export_eagle3(directory, config, params)
        embedding = random_embedding(config)
        target = as_jax(random_target() | {"embed/embedding": embedding})
        graphdef, state = eagle3.build(config, params)
        return Setup(
            config, Params(target=build(TARGET, target)[1], draft=state), graphdef, NumpyHead(directory, embedding)
        )

    return make


@functools.partial(jax.jit, static_argnames="drafter")
def observe(drafter, params, state, seen):
    return drafter.observe(params, state, seen)


@functools.partial(jax.jit, static_argnames="drafter")
def propose(drafter, params, state, history, count, key):
    return drafter.propose(params, state, history=history, count=count, key=key)


def stream(batch: int = 1, length: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Taps [3, B, L, E] and following tokens [B, L] of some sequence."""
    rng = np.random.default_rng(seed)
    taps = rng.normal(size=(3, batch, length, TARGET.hidden_size)).astype(np.float32)
    return taps, rng.integers(0, TARGET.vocab_size, (batch, length)).astype(np.int32)


def seen(taps: np.ndarray, tokens: np.ndarray, start: list[int], count: list[int], width: int) -> Observation:
    """The observation of `count` positions from `start`, padded to `width` columns of garbage."""
    batch = len(start)
    padded = np.full((3, batch, width, taps.shape[-1]), np.nan, np.float32)
    following = np.full((batch, width), 7, np.int32)
    for b, (at, n) in enumerate(zip(start, count, strict=True)):
        padded[:, b, :n] = taps[:, b, at : at + n]
        following[b, :n] = tokens[b, at : at + n]
    return Observation(
        tokens=jnp.asarray(following),
        taps=tuple(jnp.asarray(tap) for tap in padded),
        start=jnp.asarray(start, jnp.int32),
        count=jnp.asarray(count, jnp.int32),
    )


def fresh(drafter, params: Params, taps: np.ndarray, tokens: np.ndarray, lengths: list[int]) -> Eagle3State:
    """One prefill of the first `lengths` positions."""
    state = drafter.init(batch=len(lengths), capacity=CAPACITY, dtype=jnp.float32)
    return observe(drafter, params, state, seen(taps, tokens, [0] * len(lengths), lengths, CAPACITY))


def roots(tokens: np.ndarray, lengths: list[int]) -> dict[str, jax.Array]:
    """`history` and `count` with the token after the last pair's position as root: that pair's own token."""
    history = np.concatenate([np.zeros((len(lengths), 1), np.int32), tokens], axis=1)
    return {"history": jnp.asarray(history), "count": jnp.asarray(lengths, jnp.int32) + 1}


def assert_same_rows(ours: Eagle3State, theirs: Eagle3State, lengths: list[int]) -> None:
    np.testing.assert_array_equal(ours.cache.length, lengths)
    np.testing.assert_array_equal(theirs.cache.length, lengths)
    for a, b in zip(jax.tree.leaves(ours.cache.layers), jax.tree.leaves(theirs.cache.layers), strict=True):
        for row, n in enumerate(lengths):
            np.testing.assert_allclose(a[row, :, :n], b[row, :, :n], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours.feature, theirs.feature, rtol=1e-4, atol=1e-4)


def assert_tree(tree: DraftTree, row: int, expected: list[tuple[int, int, int]]) -> None:
    found = list(zip(*(np.asarray(x[row]).tolist() for x in (tree.tokens, tree.parent, tree.rank)), strict=True))
    assert found == expected


# --- proposals


@pytest.mark.parametrize("name", HEADS)
def test_dynamic_tree_equals_numpy_for_ragged_sequences(setup, name):
    made = setup(name)
    taps, tokens = stream(batch=2, seed=4)
    lengths = [9, 5]
    drafter = made.dynamic()
    state = fresh(drafter, made.params, taps, tokens, lengths)
    tree = propose(drafter, made.params, state, **roots(tokens, lengths), key=jax.random.key(0))
    for row, length in enumerate(lengths):
        stable = made.oracle.prefill(taps[:, row, :length], tokens[row, :length])
        root = int(tokens[row, length - 1])
        assert_tree(tree, row, tree_of(made.oracle, stable, root, depth=2, top_k=3, nodes=22))
        if name != "plain":
            continue
        alone = fresh(drafter, made.params, taps[:, row : row + 1], tokens[row : row + 1], [length])
        single = propose(drafter, made.params, alone, **roots(tokens[row : row + 1], [length]), key=jax.random.key(0))
        np.testing.assert_array_equal(single.tokens[0], tree.tokens[row])
    assert np.asarray(tree.valid).all() and tree.q is None


@pytest.mark.parametrize(("depth", "top_k", "nodes"), [(5, 1, 7), (1, 4, 2), (3, 3, 25), (1, 17, 30)])
def test_tree_shapes_equal_numpy(setup, depth, top_k, nodes):
    # A chain, a tree of one draft, the whole pool, and every token of the draft vocabulary.
    made = setup()
    taps, tokens = stream(seed=4)
    drafter = made.dynamic(depth=depth, top_k=top_k, nodes=nodes)
    state = fresh(drafter, made.params, taps, tokens, [6])
    tree = propose(drafter, made.params, state, **roots(tokens, [6]), key=jax.random.key(0))
    stable = made.oracle.prefill(taps[:, 0, :6], tokens[0, :6])
    assert_tree(tree, 0, tree_of(made.oracle, stable, int(tokens[0, 5]), depth=depth, top_k=top_k, nodes=nodes))
    assert int(depths(tree).max()) <= drafter.max_depth <= depth + 1
    flat = flatten(tree, "bfs", drafter.max_depth)
    np.testing.assert_array_equal(flat.tokens, tree.tokens)
    np.testing.assert_array_equal(flat.parent, tree.parent)
    flatten(tree, "dfs", drafter.max_depth)
    children: dict[int, list[int]] = {}
    for token, parent in zip(tree.tokens[0].tolist()[1:], tree.parent[0].tolist()[1:], strict=True):
        children.setdefault(parent, []).append(token)
    assert all(len(set(tokens)) == len(tokens) for tokens in children.values())


def test_fault_12_proposed_tokens_are_target_ids(setup):
    made = setup()
    taps, tokens = stream(seed=2)
    drafter = made.dynamic()
    state = fresh(drafter, made.params, taps, tokens, [4])
    tree = propose(drafter, made.params, state, **roots(tokens, [4]), key=jax.random.key(0))
    proposed = set(tree.tokens[0, 1:].tolist())
    assert proposed <= set(made.oracle.ids.tolist()) < set(range(TARGET.vocab_size))


def test_window_that_covers_everything_changes_nothing_and_a_short_one_equals_numpy(setup):
    made = setup()
    taps, tokens = stream(seed=6)
    trees = {}
    for window in (None, CAPACITY, 4):
        drafter = made.dynamic(window=window)
        state = fresh(drafter, made.params, taps, tokens, [9])
        trees[window] = propose(drafter, made.params, state, **roots(tokens, [9]), key=jax.random.key(0)), state
    np.testing.assert_array_equal(trees[None][0].tokens, trees[CAPACITY][0].tokens)
    np.testing.assert_array_equal(trees[None][1].feature, trees[CAPACITY][1].feature)
    stable = made.oracle.prefill(taps[:, 0, :9], tokens[0, :9], window=4)
    np.testing.assert_allclose(trees[4][1].feature[0], stable[-1].feature, rtol=1e-4, atol=1e-4)
    assert np.abs(trees[4][1].feature - trees[None][1].feature).max() > 1e-3
    root = int(tokens[0, 8])
    assert_tree(trees[4][0], 0, tree_of(made.oracle, stable, root, depth=2, top_k=3, nodes=22, window=4))


def test_nothing_recompiles_and_drafters_are_static(setup):
    made = setup()
    again = made.dynamic()
    assert again == made.dynamic() and hash(again) == hash(made.dynamic())
    assert again != made.dynamic(window=5)
    assert again.taps == (2, 3, 4) and again.num_nodes == 22 and again.max_depth == 3
    taps, tokens = stream()
    state = fresh(again, made.params, taps, tokens, [3])
    propose(again, made.params, state, **roots(tokens, [3]), key=jax.random.key(0))
    before = propose._cache_size()
    state = observe(again, made.params, state, seen(taps, tokens, [3], [3], 4))
    propose(made.dynamic(), made.params, state, **roots(tokens, [6]), key=jax.random.key(1))
    assert propose._cache_size() == before


# --- the stable cache


@pytest.mark.parametrize("name", ["plain", "three-layers"])
def test_fault_13_and_14_stable_rows_equal_a_fresh_prefill_after_every_round(setup, name):
    # Rounds of ragged accepts between proposals; columns past the accepted ones hold NaN.
    made = setup(name)
    taps, tokens = stream(batch=2, length=20)
    drafter = made.dynamic()
    lengths = [4, 2]
    state = fresh(drafter, made.params, taps, tokens, lengths)
    for counts in ([4, 1], [1, 3], [0, 2], [3, 4]):
        propose(drafter, made.params, state, **roots(tokens, lengths), key=jax.random.key(0))
        state = observe(drafter, made.params, state, seen(taps, tokens, lengths, counts, drafter.max_depth + 1))
        lengths = [a + b for a, b in zip(lengths, counts, strict=True)]
        assert_same_rows(state, fresh(drafter, made.params, taps, tokens, lengths), lengths)


@pytest.mark.parametrize("split", range(1, 9))
def test_fault_27_resuming_at_every_split_changes_nothing(setup, split):
    made = setup()
    taps, tokens = stream(length=9)
    drafter = made.dynamic()
    state = fresh(drafter, made.params, taps, tokens, [split])
    state = observe(drafter, made.params, state, seen(taps, tokens, [split], [9 - split], CAPACITY))
    assert_same_rows(state, fresh(drafter, made.params, taps, tokens, [9]), [9])


def test_a_pair_can_be_observed_again_with_another_successor(setup):
    made = setup()
    taps, tokens = stream(length=9)
    drafter = made.dynamic()
    wrong = tokens.copy()
    wrong[0, 5] = (tokens[0, 5] + 1) % TARGET.vocab_size
    state = fresh(drafter, made.params, taps, wrong, [6])
    state = observe(drafter, made.params, state, seen(taps, tokens, [5], [4], 4))
    assert_same_rows(state, fresh(drafter, made.params, taps, tokens, [9]), [9])


def test_rows_beyond_the_length_are_never_read(setup):
    made = setup()
    taps, tokens = stream()
    drafter = made.dynamic()
    state = fresh(drafter, made.params, taps, tokens, [6])

    def poison(x):
        return x.at[:, :, 6:].set(1e6)

    layers = jax.tree.map(poison, state.cache.layers)
    poisoned = dataclasses.replace(state, cache=dataclasses.replace(state.cache, layers=layers))
    clean, dirty = (
        propose(drafter, made.params, s, **roots(tokens, [6]), key=jax.random.key(0)) for s in (state, poisoned)
    )
    np.testing.assert_array_equal(clean.tokens, dirty.tokens)
    more = seen(taps, tokens, [6], [3], 4)
    after = observe(drafter, made.params, poisoned, more)
    assert_same_rows(after, fresh(drafter, made.params, taps, tokens, [9]), [9])
    assert float(after.cache.layers[0].k[0, 0, 9, 0]) == 1e6


def test_a_full_cache_keeps_its_last_rows(setup):
    made = setup()
    taps, tokens = stream(length=CAPACITY)
    drafter = made.dynamic()
    state = fresh(drafter, made.params, taps, tokens, [CAPACITY - 2])
    state = observe(drafter, made.params, state, seen(taps, tokens, [CAPACITY - 2], [2], 4))
    assert_same_rows(state, fresh(drafter, made.params, taps, tokens, [CAPACITY]), [CAPACITY])


def test_faults_13_and_14_through_the_decode_loop(setup):
    # The loop's own rounds: lengths agree after each, and greedy tokens are those of autoregressive decoding.
    made = setup()
    small = dataclasses.replace(TARGET, num_layers=3)
    kept = {
        n: x for n, x in random_target().items() if not n.startswith(("layers/3", "layers/4", "layers/5", "layers/6"))
    }
    target, target_state = build(small, as_jax(kept))
    params = dataclasses.replace(made.params, target=target_state)
    near = dataclasses.replace(made.dynamic(), config=dataclasses.replace(made.config, taps=(1, 2, 3)))
    prompts, lengths = jnp.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 0, 0]], jnp.int32), jnp.asarray([5, 3], jnp.int32)
    outputs = []
    for drafter in (NoDrafter(), near):
        decoding = loop.Decoding(model=target, config=small, drafter=drafter)
        state = loop.init_state(
            decoding, prompts, lengths, max_new_tokens=9, key=jax.random.key(0), capacity=64, dtype=jnp.float32
        )
        prefill = jax.jit(loop.prefill_chunk, static_argnums=(0, 3))
        for _ in range(2):
            state, _ = prefill(decoding, params, state, 4)
        step = jax.jit(loop.decode_round, static_argnums=0)
        for _ in range(9):
            state, _ = step(decoding, params, state)
            if isinstance(drafter, Eagle3Drafter):
                np.testing.assert_array_equal(state.drafter.cache.length, state.cache.length)
        outputs.append([state.history[b, : int(n)].tolist() for b, n in enumerate(state.count)])
    assert outputs[0] == outputs[1] and [len(x) for x in outputs[0]] == [14, 12]


# --- the pool


def test_trees_larger_than_their_pool_are_refused():
    assert pool_size(6, 8) == 8 + 6 * 64
    check_tree(depth=6, top_k=8, nodes=393)
    with pytest.raises(ValueError, match="1048577024 candidates, at most 65536"):
        check_tree(depth=1000, top_k=1024, nodes=1024)
    with pytest.raises(ValueError, match=r"nodes=394 .* = 392 candidates: use nodes <= 393"):
        check_tree(depth=6, top_k=8, nodes=394)
    for bad in ({"depth": 0}, {"top_k": 0}, {"nodes": 1}, {"nodes": True}):
        with pytest.raises(ValueError, match="must be an integer"):
            check_tree(**({"depth": 1, "top_k": 2, "nodes": 3} | bad))


def test_unusable_drafters_are_refused(setup, tmp_path):
    made = setup()
    with pytest.raises(ValueError, match="topk=18 exceeds the draft vocabulary of 17"):
        made.dynamic(top_k=18)
    with pytest.raises(ValueError, match="draft window"):
        made.dynamic(window=0)
    # Before anything is read.
    with pytest.raises(ValueError, match="= 6 candidates"):
        load_drafter(tmp_path / "absent", TARGET, depth=1, top_k=2, nodes=8)
    with pytest.raises(CheckpointError, match="no such directory"):
        load_drafter(tmp_path / "absent", TARGET)
    with pytest.raises(ValueError, match=r"params\.draft is None"):
        made.dynamic().propose(
            Params(target=made.params.target), made.dynamic().init(batch=1, capacity=4, dtype=jnp.float32),
            history=jnp.zeros((1, 4), jnp.int32), count=jnp.ones((1,), jnp.int32), key=jax.random.key(0),
        )  # fmt: skip


def random_pool(rng: np.random.Generator, depth: int, top_k: int, values: list[float]) -> dict[str, jax.Array]:
    """A pool filled as documented, with log-probabilities drawn from `values`."""
    log_p = -np.sort(-rng.choice(values, size=top_k))
    score, parent = list(log_p), [-1] * top_k
    level = range(top_k)
    for _ in range(depth):
        beams = sorted(sorted(level, key=lambda i: (-score[i], i))[:top_k])
        start = len(score)
        for beam in beams:
            score += [score[beam] + x for x in -np.sort(-rng.choice(values, size=top_k))]
            parent += [beam] * top_k
        level = range(start, len(score))
    return {
        "tokens": jnp.arange(len(score), dtype=jnp.int32)[None] + 100,
        "score": jnp.asarray(score, jnp.float32)[None],
        "parent": jnp.asarray(parent, jnp.int32)[None],
    }


@pytest.mark.parametrize("values", [[0.0], [0.0, -1.0], [0.0, -0.5, -1e30], [-1e30]], ids=str)
def test_fault_19_ties_keep_the_tree_closed(values):
    # log p = 0 makes a child as good as its parent: only the order by pool index keeps parents in.
    rng = np.random.default_rng(0)
    for depth, top_k in ((1, 1), (3, 2)):
        pool = random_pool(rng, depth, top_k, values)
        size = pool_size(depth, top_k)
        assert pool["tokens"].shape == (1, size)
        for nodes in {2, size // 2 + 1, size + 1}:
            tree = tree_from_pool(jnp.asarray([1], jnp.int32), **pool, top_k=top_k, nodes=nodes)
            parent = np.asarray(tree.parent[0])
            assert parent[0] == -1 and (parent[1:] >= 0).all() and (parent[1:] < np.arange(1, nodes)).all()
            # The token tells the pool index, so the edges can be followed there too.
            index = np.asarray(tree.tokens[0, 1:]) - 100
            above = np.asarray(pool["parent"][0])[index]
            np.testing.assert_array_equal(np.where(above < 0, 0, np.searchsorted(index, above) + 1), parent[1:])
            chosen = sorted(range(size), key=lambda i: (-float(pool["score"][0, i]), i))[: nodes - 1]
            assert sorted(chosen) == index.tolist()
            assert int(ancestors(tree.parent).sum(-1).max()) - 1 <= depth + 1
            np.testing.assert_array_equal(flatten(tree, "bfs", depth + 1).tokens, tree.tokens)


def test_ties_go_to_the_lower_index_and_nan_to_the_end():
    assert best(jnp.asarray([[0.0, -1.0, 0.0, -0.0, -1.0]]), 4).tolist() == [[0, 1, 2, 3]]
    assert best(jnp.zeros((1, 300)), 7).tolist() == [list(range(7))]
    log_p, ids = top_candidates(jnp.zeros((1, 1, 9)), 4)
    assert ids.tolist() == [[[0, 1, 2, 3]]] and np.allclose(log_p, -np.log(9))
    log_p, ids = top_candidates(jnp.asarray([[[-1e9, 5.0, -1e9, -jnp.inf]]]), 4)
    assert ids.tolist() == [[[1, 0, 2, 3]]] and log_p[0, 0, 0] == 0.0 and np.isfinite(log_p).all()
    log_p, ids = top_candidates(jnp.full((1, 1, 3), jnp.nan), 3)
    assert sorted(ids[0, 0].tolist()) == [0, 1, 2] and (log_p == log_p[0, 0, 0]).all()


@pytest.mark.parametrize("scale", [0.0, np.nan, 1e8], ids=["ties", "nan", "certain"])
def test_heads_that_know_nothing_or_are_certain_give_valid_trees(setup, scale):
    made = setup()
    params = random_head(PLAIN)
    params["lm_head/kernel"] *= np.float32(scale)
    state = eagle3.build(PLAIN, params)[1]
    drafter = made.dynamic(depth=3, top_k=3, nodes=20)
    taps, tokens = stream()
    both = Params(target=made.params.target, draft=state)
    tree = propose(drafter, both, fresh(drafter, both, taps, tokens, [5]), **roots(tokens, [5]), key=jax.random.key(0))
    parent = np.asarray(tree.parent[0])
    assert (parent[1:] >= 0).all() and (parent < np.arange(20)).all()
    assert set(tree.tokens[0, 1:].tolist()) <= set(made.oracle.ids.tolist())


# --- sampled trees

SAMPLING = Sampling(temperature=0.8, top_k=6, top_p=0.95)


def sampled(made: Setup, widths: tuple[int, ...], sampling: Sampling = SAMPLING) -> Eagle3SampledDrafter:
    return Eagle3SampledDrafter(graphdef=made.graphdef, config=made.config, widths=widths, sampling=sampling)


def expected_q(oracle: NumpyHead, feature: np.ndarray, sampling: Sampling, vocab: int) -> np.ndarray:
    """Temperature, then top-k, then top-p, over the target's vocabulary."""
    logits = oracle.log_p(feature) / sampling.temperature
    order = np.argsort(-logits, kind="stable")[: sampling.top_k or None]
    p = np.exp(logits[order] - logits[order[0]])
    p /= p.sum()
    keep = np.cumsum(p) - p < sampling.top_p
    q = np.zeros(vocab)
    q[oracle.ids[order[keep]]] = p[keep] / p[keep].sum()
    return q


@pytest.mark.parametrize("widths", [(1, 1, 1), (3, 2)], ids=str)
def test_sampled_tree_carries_the_distribution_that_was_sampled(setup, widths):
    made = setup()
    taps, tokens = stream(batch=2)
    drafter = sampled(made, widths)
    state = fresh(drafter, made.params, taps, tokens, [7, 4])
    tree = propose(drafter, made.params, state, **roots(tokens, [7, 4]), key=jax.random.key(3))
    assert tree.tokens.shape == (2, drafter.num_nodes) and int(depths(tree).max()) == drafter.max_depth == len(widths)
    assert tree.q is not None
    for row, length in enumerate((7, 4)):
        stable = made.oracle.prefill(taps[:, row, :length], tokens[row, :length])
        out, above = {0: stable[-1].feature}, {0: []}
        for node in range(1, drafter.num_nodes):
            parent = int(tree.parent[row, node])
            position = length + len(above[parent])
            token = int(tree.tokens[row, node])
            pair = made.oracle.pair(out[parent], token, position, stable + above[parent])
            out[node], above[node] = pair.feature, [*above[parent], pair]
            assert tree.q[row, parent, token] > 0
        has_children = set(tree.parent[row].tolist())
        for node in range(drafter.num_nodes):
            q = expected_q(made.oracle, out[node], SAMPLING, TARGET.vocab_size)
            np.testing.assert_allclose(tree.q[row, node], q if node in has_children else 0 * q, atol=2e-5)
    siblings = {(p, r) for p, r in zip(tree.parent[0].tolist(), tree.rank[0].tolist(), strict=True)}
    assert len(siblings) == drafter.num_nodes


def test_children_are_drawn_without_replacement_in_order(setup):
    made = setup()
    taps, tokens = stream(seed=9)
    drafter = sampled(made, (2,), Sampling(temperature=1.5, top_k=3))
    state = fresh(drafter, made.params, taps, tokens, [5])
    rounds = 20000
    keys = jax.random.split(jax.random.key(11), rounds)
    run = jax.jit(jax.vmap(lambda k: drafter.propose(made.params, state, **roots(tokens, [5]), key=k).tokens[0, 1:]))
    drawn = np.asarray(run(keys))
    q = expected_q(
        made.oracle, made.oracle.prefill(taps[:, 0, :5], tokens[0, :5])[-1].feature, drafter.sampling, TARGET.vocab_size
    )
    support = np.flatnonzero(q)
    assert len(support) == 3
    counts = np.zeros((31, 31))
    np.add.at(counts, (drawn[:, 0], drawn[:, 1]), 1)
    for first in support:
        for second in support:
            p = 0.0 if first == second else q[first] * q[second] / (1 - q[first])
            deviation = abs(counts[first, second] - rounds * p)
            assert deviation <= 5 * np.sqrt(rounds * p * (1 - p))
    assert counts[np.ix_(support, support)].sum() == rounds


def test_a_distribution_with_few_tokens_has_few_valid_children(setup):
    made = setup()
    taps, tokens = stream(seed=9)
    drafter = sampled(made, (3, 2), Sampling(temperature=1.0, top_k=1))
    state = fresh(drafter, made.params, taps, tokens, [5])
    tree = propose(drafter, made.params, state, **roots(tokens, [5]), key=jax.random.key(0))
    assert tree.valid[0].tolist() == [True, True, False, False, True, False, False, False, False, False]
    assert tree.parent[0].tolist() == [-1, 0, -1, -1, 1, -1, -1, -1, -1, -1]
    flat = flatten(tree, "bfs", 2)
    assert flat.valid[0].tolist() == [True] * 3 + [False] * 7


def test_sampled_drafters_refuse_nonsense(setup, tmp_path):
    made = setup()
    for widths, sampling, words in (
        ((), SAMPLING, "positive integers"),
        ((2, 0), SAMPLING, "positive integers"),
        ((18,), SAMPLING, "exceed the draft vocabulary of 17"),
        ((2,), Sampling(), "temperature above 0"),
    ):
        with pytest.raises(ValueError, match=words):
            sampled(made, widths, sampling)
    with pytest.raises(ValueError, match="both sampling and widths"):
        load_drafter(tmp_path, TARGET, widths=(1,))


# --- loading


def test_load_drafter_proposes_what_the_head_in_memory_proposes(setup, tmp_path):
    made = setup()
    export_eagle3(tmp_path / "head", made.config, random_head(made.config))
    drafter, state = load_drafter(tmp_path / "head", TARGET, depth=2, top_k=3, nodes=22)
    assert drafter == made.dynamic() and isinstance(drafter, Eagle3Drafter)
    taps, tokens = stream()
    params = Params(target=made.params.target, draft=state)
    ours, theirs = (
        propose(drafter, p, fresh(drafter, p, taps, tokens, [6]), **roots(tokens, [6]), key=jax.random.key(0))
        for p in (params, made.params)
    )
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    both, _ = load_drafter(tmp_path / "head", TARGET, sampling=SAMPLING, widths=(2, 1), window=9, dtype=jnp.bfloat16)
    assert isinstance(both, Eagle3SampledDrafter) and both.num_nodes == 5 and both.window == 9


def test_a_head_for_another_target_is_refused_before_its_weights_are_read(tmp_path):
    export_eagle3(tmp_path / "head", PLAIN, as_jax(random_head(PLAIN)))
    for change, words in (({"vocab_size": 32}, "vocab_size is 31"), ({"hidden_size": 16}, "target_hidden_size is 12")):
        with pytest.raises(CheckpointError, match=words):
            load_drafter(tmp_path / "head", dataclasses.replace(TARGET, **change))
