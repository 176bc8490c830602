"""Profiles: labels, files, interpolation, ranking and pruning; all without JAX."""

from __future__ import annotations

import dataclasses
import json

import pytest

from ssv_jax.profiles import Acceptance, Entry, Profile, ProfileError, Provenance, RoundCost, expected_tokens
from ssv_jax.strategy import PrecisionClass, Strategy, TreeSpec

ABOUT = Provenance(
    device="x", platform="cpu", dtype="float32", model="m", model_hash="0", draft_model=None, head_hash=None,
    implementation=None, rounds_per_call=8, seed=0, max_new_tokens=8, prompts_hash="0", versions={"jax": "1"},
)  # fmt: skip


def entry(label: str, ms: tuple[float, float], accepted: tuple[int, ...] = ()) -> Entry:
    costs = tuple(
        RoundCost(context=c, capacity=2 * c, median_ms=m, low_ms=m, high_ms=m, repeats=5)
        for c, m in zip((1000, 3000), ms, strict=True)
    )
    return Entry(
        strategy=Strategy.parse(label),
        max_depth=len(accepted),
        costs=costs,
        acceptance=Acceptance(rounds=100, accepted_at=accepted, prompts=2),
    )


def profile(*entries: Entry) -> Profile:
    return Profile(provenance=ABOUT, contexts=(1000, 3000), entries=entries, complete=True)


@pytest.mark.parametrize(
    "label",
    ["none", "ngram:7x1x8", "eagle3:5x8x32+dfs+group4", "eagle3:5x8x32+group4+shared+refresh3+window0",
     "none+layers0.4.9"],
)  # fmt: skip
def test_labels_read_back(label):
    """A strategy that another run takes for a different one."""
    strategy = Strategy.parse(label)
    assert strategy.label == label
    assert Strategy.parse(strategy.label) == strategy


def test_labels_spell_out_default_trees():
    assert Strategy(draft="ngram").label == "ngram:7x1x8"
    parsed = Strategy.parse("eagle3:2x3x8+group2+shared")
    assert parsed.tree == TreeSpec(depth=2, topk=3, nodes=8)
    assert parsed.precision is PrecisionClass.APPROX


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ("", "unknown drafter ''"),
        ("medusa", "unknown drafter"),
        ("ngram:7x1", "must read DRAFTER"),
        ("ngram+fast", "must read DRAFTER"),
        ("ngram+group2+group3", "says group twice"),
        ("ngram:2x2x9", "exceeds the pool"),
        ("none:2x2x3", "needs a drafter"),
    ],
)
def test_bad_labels_are_refused(label, message):
    with pytest.raises(ValueError, match=message):
        Strategy.parse(label)


def test_acceptance_adds_prompts_and_gives_chances():
    """Counts by depth; unseen depths get a chance between 0 and 1 instead of a division by zero."""
    seen = Acceptance(accepted_at=(0, 0, 0)).add([2, 0, 1, 2], 0.5).add([0, 0], 0.8)
    assert seen.rounds == 6
    assert seen.accepted_at == (3, 2, 0)
    assert seen.prompts == 2
    assert seen.overlap == pytest.approx((4 * 0.5 + 2 * 0.8) / 6)
    assert seen.conditional() == pytest.approx((3.5 / 7, 2.5 / 4, 0.625 / 3))
    assert expected_tokens((0.5, 0.5)) == 1.75
    assert expected_tokens(()) == 1.0


def test_costs_are_interpolated_and_rankings_follow_the_context():
    table = profile(entry("none", (10.0, 10.0)), entry("ngram:2x1x3", (12.0, 40.0), (80, 60)))
    assert table.entry("ngram:2x1x3").round_ms(500) == 12.0
    assert table.entry("ngram:2x1x3").round_ms(2000) == 26.0
    assert table.entry("ngram:2x1x3").round_ms(9000) == 40.0
    assert table.ranking(1000)[0] == "ngram:2x1x3"
    assert table.ranking(3000)[0] == "none"
    assert [table.bucket(c) for c in (1, 1000, 2999, 5000)] == [1000, 1000, 1000, 3000]


def test_pruning_marks_only_what_can_never_win():
    """A strategy that is dearer and accepts less goes; a dearer one that accepts more, or a less exact one, stays."""
    table = profile(
        entry("none", (10.0, 10.0)),
        entry("ngram:2x1x3", (12.0, 13.0), (80, 60)),
        entry("ngram:2x1x3+dfs", (12.5, 13.5), (80, 60)),
        entry("ngram:2x2x5", (14.0, 15.0), (90, 60)),
        entry("ngram:2x1x3+group2+shared", (12.0, 13.0), (80, 60)),
        entry("ngram:2x1x3+group2", (13.0, 14.0), (80, 60)),
    ).prune()
    marked = {e.label: e.dominated_by for e in table.entries}
    assert marked["ngram:2x1x3+dfs"] == "ngram:2x1x3"
    assert marked["ngram:2x1x3+group2"] == "ngram:2x1x3"
    assert marked["ngram:2x1x3"] is marked["ngram:2x2x5"] is marked["none"] is None
    assert marked["ngram:2x1x3+group2+shared"] == "ngram:2x1x3"


def test_files_read_back(tmp_path):
    table = profile(entry("none", (10.0, 10.0)), entry("ngram:2x1x3", (12.0, 40.0), (80, 60))).prune()
    table.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == table
    assert list(tmp_path.iterdir()) == [tmp_path / "p.json"]


def test_damaged_files_are_refused(tmp_path):
    """A traceback, or a profile that is half believed."""
    good = profile(entry("none", (10.0, 10.0)), entry("ngram:2x1x3", (12.0, 40.0), (80, 60))).to_json()
    strategies = good["strategies"]

    def changed(**fields):
        return good | fields

    def first(**fields):
        return changed(strategies=[strategies[0], strategies[1] | fields])

    cases = (
        ([], "must be an object"),
        (changed(schema=99), "schema is 99"),
        (changed(contexts=[]), "contexts must be ascending"),
        (changed(provenance={}), "lacks or misspells"),
        (changed(provenance=good["provenance"] | {"extra": 1}), "lacks or misspells"),
        (changed(strategies=[strategies[0], strategies[0]]), "occurs twice"),
        (changed(strategies=3), "strategies must be a list"),
        (first(label="x"), "unknown drafter"),
        (first(costs=[]), "has no costs"),
        (first(costs=[strategies[1]["costs"][0] | {"median_ms": -1}]), "median_ms must be a number above 0"),
        (first(costs=strategies[1]["costs"][::-1]), "at ascending contexts"),
        (first(acceptance=strategies[1]["acceptance"] | {"accepted_at": [1, 2]}), "falling counts"),
        (first(acceptance=strategies[1]["acceptance"] | {"rounds": True}), "rounds must be integers"),
        (first(acceptance=None), "acceptance must be an object"),
    )
    for data, message in cases:
        (tmp_path / "bad.json").write_text(json.dumps(data))
        with pytest.raises(ProfileError, match=message):
            Profile.load(tmp_path / "bad.json")
    for text in ("{", "[" * 100000, "\x00"):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ProfileError, match="is not JSON"):
            Profile.load(tmp_path / "bad.json")
    with pytest.raises(ProfileError, match="No such file"):
        Profile.load(tmp_path / "absent.json")


def test_incomplete_profiles_keep_what_they_have(tmp_path):
    """What a killed measurement leaves must be readable."""
    table = dataclasses.replace(profile(dataclasses.replace(entry("none", (1.0, 1.0)), costs=())), complete=False)
    table.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == table
