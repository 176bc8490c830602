"""Prompt lookup in hindsight: round by round what the drafter itself would have had accepted."""

from __future__ import annotations

import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from ssv_jax.drafting.ngram import NgramDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.hindsight import MOST_MATCHES, Hindsight
from ssv_jax.strategy import LookupShape


def played(drafter: NgramDrafter, text: list[int], start: int) -> list[int]:
    """Drafts accepted in each round of the drafter over a text that is known to its end."""
    propose = jax.jit(
        lambda history, count: drafter.propose(
            Params(target=nnx.State({})), None, history=history, count=count, key=jax.random.key(0)
        )
    )
    history, rounds = jnp.asarray([[*text, 0]], jnp.int32), []
    while start < len(text):
        tree = propose(history, jnp.asarray([start], jnp.int32))
        tokens, parent, valid = (np.asarray(x)[0] for x in (tree.tokens, tree.parent, tree.valid))
        node, count = 0, 0
        while start + count < len(text):
            below = [i for i in range(1, len(tokens)) if valid[i] and parent[i] == node]
            node = next((i for i in below if tokens[i] == text[start + count]), None)
            if node is None:
                break
            count += 1
        else:
            return rounds  # the text ends within this round
        rounds.append(count)
        start += count + 1
    return rounds


@pytest.mark.parametrize("seed", range(40))
def test_rounds_are_the_drafters_own(seed):
    """Another match, branch, or period than the drafter's, at any shape of tree, however the text arrives."""
    rng = random.Random(seed)
    text = [rng.randrange(rng.choice([2, 3, 6, 20])) for _ in range(rng.randint(2, 60))]
    if seed % 2:
        text = (text * 3)[: len(text) + 20]
    depth, branches, most = rng.randint(1, 8), rng.randint(1, 3), rng.randint(1, 6)
    sizes = {"depth": depth, "branches": branches, "num_nodes": rng.randint(2, depth * branches + 1)}
    sizes |= {"max_ngram": most, "min_ngram": rng.randint(1, most)}
    start = rng.randint(1, min(len(text), 10))
    hindsight, at, rounds = Hindsight(LookupShape(**sizes), text[:start]), start, []
    while at < len(text):
        more = rng.randint(1, 7)
        rounds += hindsight.add(text[at : at + more])
        at += more
    expected = played(NgramDrafter(**sizes), text, start)
    # A round whose whole draft fits, but not the token after it, is known only later.
    assert rounds == expected[: len(rounds)]
    assert len(expected) - len(rounds) <= 1


def test_defaults_are_the_drafters():
    """Matches of another length than the drafter's, where nothing is said."""
    sizes = {"depth": 3, "branches": 1, "num_nodes": 4}
    shape, drafter = LookupShape(**sizes), NgramDrafter(**sizes)
    assert (shape.max_ngram, shape.min_ngram) == (drafter.max_ngram, drafter.min_ngram)


def test_text_that_is_passed_over():
    """Rounds over text that another round has covered, or matches that miss it."""
    hindsight = Hindsight(LookupShape(depth=3, branches=1, num_nodes=4), [1, 2, 3])
    hindsight.pass_over([4, 5, 6, 7, 8, 1, 2])
    assert hindsight.add([3, 4, 5, 6]) == [3]


def test_one_word_for_ever():
    """A search through all matches, for every round, of a text that repeats itself."""
    looked = []

    class Counting(list):
        def __getitem__(self, at):
            looked.append(at)
            return super().__getitem__(at)

    hindsight = Hindsight(LookupShape(depth=3, branches=2, num_nodes=7), [1, 2] * 20000)
    hindsight._earlier = Counting()
    assert hindsight.add([1, 2] * 4) == [3, 3]
    assert len(looked) <= 3 * MOST_MATCHES


def test_needs_no_jax():
    """An import that makes decisions wait for JAX."""
    code = "import sys; sys.modules['jax'] = None; import ssv_jax.controller, ssv_jax.hindsight"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
