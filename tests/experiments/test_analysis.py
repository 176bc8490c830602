"""What the analysis experiments count: tasks and their answers, trees that a model drafts for itself, block visits."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.strategy import TreeSpec
from ssv_jax.training import tokens as token_sets

pytestmark = pytest.mark.usefixtures("quick_programs", "plain_names")


@pytest.fixture(scope="module")
def tools(plain_names):
    import _tasks as tasks

    return tasks, tasks.tools_of(None, 128)


def text_of(trial, part=slice(None)):
    return "".join(map(chr, trial.tokens[part]))


@pytest.fixture(scope="module")
def trials(tools):
    tasks, characters = tools
    # Lower-case letters and line ends, so that numbers and names can only come from statements.
    book = np.random.default_rng(0).integers(97, 123, 5000)
    book[::40] = 5
    found = token_sets.from_documents([book], 128)
    lengths = dict.fromkeys(tasks.KINDS, 1000) | {"common": 2000}
    return {kind: tasks.make_trials(characters, found, n, 3, kind, seed=1) for kind, n in lengths.items()}


def test_prompts_have_the_length_asked_for_and_end_with_the_answer(trials):
    for kind, each in trials.items():
        assert {len(trial.tokens) for trial in each} == {2000 if kind == "common" else 1000}
        for trial in each:
            assert len(trial.item) < 80, kind
            assert trial.item[0] == 0, kind


@pytest.mark.parametrize("kind", ["single", "multi-key", "multi-value"])
def test_the_numbers_asked_for_stand_in_the_text(trials, kind):
    for trial in trials[kind]:
        answer = text_of(trial, slice(-len(trial.item), None))
        before = text_of(trial, slice(-len(trial.item)))
        at = [before.index(number) for number in answer.split(", ")]
        assert at == sorted(at)
        assert len(at) == (4 if kind == "multi-value" else 1)


def test_depths_are_spread_and_named(trials):
    for kind in ("single", "copy"):
        depths = [trial.depth for trial in trials[kind]]
        assert depths == sorted(depths)
        assert depths[0] < 0.3
        assert depths[-1] > 0.6


def test_variables_lead_to_the_value(trials):
    for trial in trials["variables"]:
        before = text_of(trial, slice(-len(trial.item)))
        names = text_of(trial, slice(-len(trial.item), None)).replace(" ", "").split(",")
        lines = [line.split() for line in before.split("\n") if line.startswith("VAR ")]
        value: dict[str, str] = {}
        for _, name, _, *rest in lines:  # a value, or VAR and a name
            value[name] = value.get(rest[-1], rest[-1])
        wanted = value[names[0]]
        assert [name for name, found in value.items() if found == wanted] == names
        assert len(value) == 10


def test_the_answer_is_what_counting_gives(trials):
    for trial in trials["common"]:
        before = text_of(trial, slice(-len(trial.item)))
        words = [line.split(". ")[1] for line in before.split(">")[0].split("\n") if ". " in line]
        answer = text_of(trial, slice(-len(trial.item), None)).replace(" ", "").split(",")
        assert {word for word in words if words.count(word) == 10} == set(answer)
        assert sorted(answer, key=words.index) == answer
        assert max(words.count(word) for word in set(words) - set(answer)) < 10
    for trial in trials["frequent"]:
        before = text_of(trial, slice(-len(trial.item)))
        words = before.split(">")[0].removeprefix("<").split()
        answer = text_of(trial, slice(-len(trial.item), None)).replace(" ", "").split(",")
        assert sorted(set(words), key=words.count, reverse=True)[:3] == answer


def test_scores_leave_out_given_parts_and_stop_at_the_first_error(tools):
    import needle

    tasks, _ = tools
    trial = tasks.Trial(tokens=np.array([9, 1, 2, 7, 3, 4]), item=np.array([0, 0, -1, 2, 2]), depth=0.0)
    whole = needle.mark(trial, np.array([0, 1, 2, 0, 3, 4]))
    assert (whole.before_error, whole.scored, whole.items_right, whole.items) == (4, 4, 2, 2)
    part = needle.mark(trial, np.array([1, 0, 7, 3, 4]))
    assert (part.before_error, part.items_right) == (1, 1)


class FakeReader:
    """A model whose next-token law depends on the path; `look` as `_trees.Reader`."""

    def __init__(self, vocab: int, best: int) -> None:
        self.vocab, self.best = vocab, best

    def law(self, path):
        logits = np.random.default_rng(list(path)).normal(size=self.vocab)
        return logits - np.log(np.exp(logits).sum())

    def look(self, tree):
        paths = []
        for token, above in zip(tree.tokens, tree.parent, strict=True):
            paths.append((*(paths[above] if above >= 0 else ()), int(token)))
        laws = np.stack([self.law(path) for path in paths])
        ids = np.argsort(-laws, axis=1)[:, : self.best]
        return np.take_along_axis(laws, ids, axis=1), ids, None


def test_the_own_tree_holds_the_likeliest_paths():
    import _trees as trees

    reader = FakeReader(vocab=4, best=4)
    spec = TreeSpec(depth=3, topk=4, nodes=9)
    tree = trees.own_tree(reader, 2, spec)
    assert len(tree.tokens) == 9
    assert (tree.parent[1:] < np.arange(1, 9)).all()
    paths = []
    for token, above in zip(tree.tokens, tree.parent, strict=True):
        paths.append((*(paths[above] if above >= 0 else ()), int(token)))
    every = [(2, *rest) for size in (1, 2, 3) for rest in itertools.product(range(4), repeat=size)]
    score = {path: sum(reader.law(path[:i])[path[i]] for i in range(1, len(path))) for path in every}
    # All four tokens are beams at depth 1; at depth 2 four of sixteen go on, so paths of three may be missing.
    kept = set(paths[1:])
    assert kept <= set(every)
    shallow = sorted((path for path in every if len(path) < 4), key=score.__getitem__, reverse=True)
    worst = min(score[path] for path in kept)
    assert all(path in kept for path in shallow if score[path] > worst)
    assert tree.order("bfs").tolist() == sorted(range(9), key=lambda i: (tree.depth[i], i))
    preorder = tree.order("dfs").tolist()
    assert preorder[0] == 0
    for node, above in enumerate(tree.parent):
        assert above < 0 or preorder.index(above) < preorder.index(node)
    with pytest.raises(ValueError, match="too few"):
        trees.places(100, 50, 2)
    assert trees.places(101, 50, 2) == [50, 100]


def test_visits_are_sizes_of_unions():
    import _trees as trees
    import tree_grid

    rng = np.random.default_rng(0)
    shapes = [np.array([-1, 0, 0, 1, 2, 1]), np.array([-1, 0, 1, 2, 3, -1])]
    batch = [trees.drafted(trees.Tree(tokens=np.arange(6), parent=parent), 6) for parent in shapes]
    joined = {name: jnp.concatenate([getattr(tree, name) for tree in batch]) for name in ("tokens", "parent", "rank")}
    valid = np.array([[True] * 6, [True] * 5 + [False]])
    tree = type(batch[0])(**joined, valid=jnp.asarray(valid))
    chosen = rng.random((3, 2, 2, 6, 7)) < 0.4
    length = np.array([28, 17])  # of blocks of 4: all seven, and five
    found = np.asarray(tree_grid.visits(tree, jnp.asarray(chosen), jnp.asarray(length), 4, (1, 2, 4), 4))
    for row, orders in enumerate([([0, 1, 2, 3, 5, 4], [0, 1, 3, 5, 2, 4]), ([0, 1, 2, 3, 4, 5],) * 2]):
        for o, order in enumerate(orders):
            for g, size in enumerate((1, 2, 4)):
                want = 0
                for sets in chosen[:, row].reshape(-1, 6, 7):
                    sets = sets & (np.arange(7) * 4 < length[row]) & valid[row][:, None]
                    want += sum(sets[order[at : at + size]].any(0).sum() for at in range(0, 6, size))
                assert found[o, g, row] == want, (row, o, size)


def test_inheritance_is_measured_against_the_layer_that_selects():
    import selection_overlap as overlap

    pairs = np.arange(5 * 5 * 2, dtype=float).reshape(5, 5, 2)
    found = overlap.by_layer({"layers free": pairs, "union 4": np.ones((5, 3))}, 64)
    values, layers, scale = found["inherit 3 free"]
    assert layers == [1, 2, 4]
    assert scale == 64
    np.testing.assert_array_equal(values, [pairs[1, 0], pairs[2, 0], pairs[4, 3]])
    assert found["lag 2 free"][1] == [2, 3, 4]
    assert found["union 4"][2] == 4


def test_a_profile_is_split_by_work():
    import routing_split

    kinds = ("selection", "attention", "matmuls", "rest")
    profile = {kind: {"ms": float(i + 1), "launches": 2} for i, kind in enumerate(kinds)}
    row = {"plan": "lossless", "nodes": 5, "context": 64, "implementation": "mosaic_gpu", "ms_per_step": {"median": 11}}
    other = row | {"implementation": "xla", "profile": profile}
    (split,) = routing_split.split({"rows": [row | {"profile": profile}, other, row]})
    assert split["routing_of_both"] == pytest.approx(1 / 3)
    assert split["both_of_step"] == pytest.approx(0.3)


def test_spread_over_prompts():
    import acceptance

    answers = {
        key: acceptance.Answer(tokens=(1,), rounds=2, emitted=emitted)
        for key, emitted in (("a1", 2), ("a2", 4), ("b1", 6), ("b2", 8))
    }
    groups = acceptance.by_category({Named(name): answer for name, answer in answers.items()})
    assert groups == {"a": [1.0, 2.0], "b": [3.0, 4.0]}
    assert acceptance.between(groups) == pytest.approx(0.8)
    assert acceptance.between({"a": [1.0]}) is None
    assert acceptance.prompt_spread([2.0])["stdev"] == 0


class Named:
    """A prompt, by what `by_category` reads of it."""

    def __init__(self, name: str) -> None:
        self.category = name[0]
