"""The planner over recorded decodings of the shipped model: chats, copying, code, questions about documents.

`recorded.npz`: greedy float32 tokens of `smollm2-135m-nsa` after prompts of `experiments/planner_gain.py` (the last 384
tokens of each), and the drafts of its head, 32 nodes, that each round accepted. What another tree would have had
accepted at a place is that, cut to its depth and thinned at random as `THINNED` says; prompt lookup is played over the
text itself. Costs are those of an H200: milliseconds a round, and what a call costs beside its rounds.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from ssv_jax.controller import Controller, Fixed, Observed
from ssv_jax.hindsight import Hindsight
from ssv_jax.profiles import Acceptance, Entry, Profile, Provenance, RoundCost
from ssv_jax.strategy import LookupShape, Strategy

MOST, CALL_MS = 32, 5.0
PLAIN, SMALL, MIDDLE, WIDE = "none", "eagle3:2x2x5", "eagle3:4x4x16+group4", "eagle3:5x8x32+group4"
LOOKUP = "ngram:7x1x8+group4"
MS = {PLAIN: 1.44, SMALL: 2.05, MIDDLE: 2.3, WIDE: 2.55, LOOKUP: 1.95}
THINNED = {SMALL: 0.62, MIDDLE: 0.86, WIDE: 1.0}  # tokens a round over those of the recorded tree
SHAPE = LookupShape(depth=7, branches=1, num_nodes=8)


class Recorded:
    """One decoding."""

    def __init__(self, data, number: int) -> None:
        prompt, tokens, accepted, emitted = (
            data[f"{name}{number}"].tolist() for name in ("prompt", "tokens", "accepted", "emitted")
        )
        self.text, self.start = [*prompt, *tokens], len(prompt) + 1
        self.at = [kept for kept, count in zip(accepted, emitted, strict=True) for _ in range(count)]

    def round(self, label: str, place: int, rng: random.Random) -> int:
        """Drafts accepted by a round that starts with so many tokens known."""
        if label == PLAIN:
            return 0
        if label == LOOKUP:
            return Hindsight(SHAPE, self.text[:place]).add([*self.text[place:], *[-1] * 9])[0]
        tokens = (self.at[place - self.start] + 1) * THINNED[label]
        return min(int(tokens) + (rng.random() < tokens % 1) - 1, Strategy.parse(label).size.depth)

    def run(self, pilot) -> tuple[float, list[int]]:
        """Milliseconds, and the drafts accepted in each round."""
        rng, place, total, rounds = random.Random(0), self.start, 0.0, []
        while place < len(self.text):
            decision, begin, accepted = pilot.decide(place), place, []
            while place < len(self.text) and len(accepted) < min(decision.rounds or MOST, MOST):
                accepted.append(self.round(decision.label, place, rng))
                place = min(place + accepted[-1] + 1, len(self.text))
            ms = CALL_MS + len(accepted) * MS[decision.label]
            tokens = self.text[begin:place]
            seen = Observed(label=decision.label, context=begin, accepted=accepted, seconds=ms / 1000, tokens=tokens)
            pilot.observe(seen)
            total, rounds = total + ms, rounds + accepted
        return total, rounds


@pytest.fixture(scope="module")
def recordings():
    data = np.load(Path(__file__).with_name("recorded.npz"))
    return [Recorded(data, number) for number in range(len(data["kinds"]))]


@pytest.fixture(scope="module")
def table(recordings):
    """A profile of every second recording; the others are there to plan."""
    entries = []
    for label, ms in MS.items():
        size = Strategy.parse(label).size
        acceptance = Acceptance(accepted_at=(0,) * (size.depth if size else 0))
        for recording in recordings[::2] if size else ():
            acceptance = acceptance.add(recording.run(Fixed(label))[1], None)
        cost = RoundCost(context=1024, capacity=2048, median_ms=ms + CALL_MS / MOST, low_ms=ms, high_ms=ms, repeats=5)
        strategy = Strategy.parse(label)
        entries.append(
            Entry(strategy=strategy, max_depth=size.depth if size else 0, costs=(cost,), acceptance=acceptance)
        )
    about = Provenance(
        device="x", platform="gpu", dtype="float32", model="m", model_hash="0", draft_model=None, head_hash=None,
        implementation=None, rounds_per_call=MOST, seed=0, max_new_tokens=256, prompts_hash="0", versions={},
    )  # fmt: skip
    return Profile(provenance=about, contexts=(1024,), entries=tuple(entries), complete=True)


def test_regret_over_recorded_texts(recordings, table):
    """At most 5% slower than the best fixed strategy in hindsight over all texts, 3% than plain decoding in long ones.

    Texts of 256 tokens end after two calls of one strategy: the short call that planning starts with is 3% of them.
    """
    measured = recordings[1::2]
    fixed = {label: [text.run(Fixed(label))[0] for text in measured] for label in MS}
    planned = [text.run(Controller(table, MS, known=text.text[: text.start]))[0] for text in measured]
    first = table.ranking(1024, list(MS))[0]
    best = min(sum(times) for times in fixed.values())
    over = {name: value / sum(planned) - 1 for name, value in (("offline", sum(fixed[first])), ("hindsight", best))}
    print({name: f"{100 * value:+.1f}%" for name, value in over.items()}, first)
    assert over["hindsight"] >= -0.05
    ratios = [plain / own for plain, own in zip(fixed[PLAIN], planned, strict=True)]
    assert all(r >= 0.97 for r, text in zip(ratios, measured, strict=True) if len(text.text) - text.start >= 100)


def test_lookup_is_taken_where_it_wins(recordings, table):
    """Of the texts where prompt lookup is best by a fifth, most must end with it; hindsight switched off, fewer do."""
    hits, blind, count = 0, 0, 0
    for text in recordings:
        times = {label: text.run(Fixed(label))[0] for label in MS}
        rest = min(value for label, value in times.items() if label != LOOKUP)
        if times[LOOKUP] * 1.2 > rest or len(text.text) - text.start < 100:
            continue
        count += 1
        for known in (text.text[: text.start], ()):
            pilot = Controller(table, MS, known=known)
            text.run(pilot)
            used = pilot.decide(len(text.text)).label == LOOKUP
            hits, blind = hits + (used and bool(known)), blind + (used and not known)
    assert count >= 3
    assert hits >= 0.7 * count
    assert hits > blind
