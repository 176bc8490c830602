"""Planned runs: switching strategies, drafters included, changes no token, compiles once, and is explained."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from ssv_jax import Engine, PrecisionClass, Strategy, UsageError
from ssv_jax.controller import Decision
from ssv_jax.models.eagle3 import random_params as eagle3_params
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.eagle3_loading import export_eagle3
from ssv_jax.planning import Manual
from ssv_jax.profiles import Acceptance, Entry, Profile, ProfileError, Provenance, RoundCost
from tests.ssv_jax.tiny import CONFIG, write_checkpoint

PROMPT = "abc abc abc abc "
LABELS = ("none", "eagle3:2x3x8+group3", "ngram:3x2x6+dfs", "eagle3:1x2x4")
TARGET = dataclasses.replace(CONFIG, num_layers=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A target and a head for it."""
    where = tmp_path_factory.mktemp("planned")
    head = Eagle3Config(
        hidden_size=TARGET.hidden_size,
        target_hidden_size=TARGET.hidden_size,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=TARGET.vocab_size,
        draft_vocab_size=64,
        taps=(0, 1, 2),
    )
    export_eagle3(where / "head", head, {n: np.asarray(x) for n, x in eagle3_params(head, 1).items()})
    return write_checkpoint(where / "target", config=TARGET), where / "head"


@pytest.fixture(scope="module")
def plain(model):
    """An engine that neither drafts nor plans."""
    return Engine.load(model[0], strategy=Strategy())


@pytest.fixture(scope="module")
def manual(model):
    """An engine that changes its strategy at every call."""
    planner = Manual([Strategy.parse(label) for label in LABELS], lambda call: LABELS[(call * 3 + 1) % len(LABELS)])
    return Engine.load(model[0], draft_model=model[1], planner=planner)


def entry(label: str, depth: int, ms: float, rounds: int = 100) -> Entry:
    cost = RoundCost(context=64, capacity=256, median_ms=ms, low_ms=ms, high_ms=ms, repeats=3)
    counts = tuple(round(rounds * 0.8 ** (level + 1)) for level in range(depth))
    acceptance = Acceptance(rounds=rounds, accepted_at=counts, prompts=1)
    return Entry(strategy=Strategy.parse(label), max_depth=depth, costs=(cost,), acceptance=acceptance)


def profile_of(engine: Engine, *entries: Entry, **changes) -> Profile:
    about = Provenance(
        device="cpu", platform="cpu", dtype="float32", model="tiny", model_hash=engine.model_hash, draft_model="head",
        head_hash=engine.head_hash, implementation=None, rounds_per_call=8, seed=0, max_new_tokens=8,
        prompts_hash="0", versions={},
    )  # fmt: skip
    about = dataclasses.replace(about, **changes)
    return Profile(provenance=about, contexts=(64,), entries=entries, complete=True)


@pytest.fixture
def time_passes(monkeypatch):
    """Sets an engine's clock: the milliseconds of a round by strategy, whatever this machine needs for it."""
    now = 0.0
    monkeypatch.setattr("ssv_jax.engine.time", SimpleNamespace(perf_counter=lambda: now))

    def set_clock(engine: Engine, round_ms: dict[str, float]) -> None:
        decode = type(engine.variants).decode

        def timed(decoding, params, state, rounds):
            call = decode(engine.variants, decoding, params, state, rounds)
            (label,) = (label for label, known in engine.lanes.drafters.items() if known is decoding.drafter)

            def run(params, state, most=rounds):
                nonlocal now
                now += min(most, rounds) * round_ms[label] / 1000
                return call(params, state, most)

            return run

        monkeypatch.setattr(engine.variants, "decode", timed)

    return set_clock


def test_forced_switches_change_no_token(plain, manual):
    """A drafter whose state misses tokens, or a cache that depends on who filled it; every call another strategy."""
    want = plain.generate(PROMPT, max_new_tokens=90, ignore_eos=True)
    got = manual.generate(PROMPT, max_new_tokens=90, ignore_eos=True)
    assert got.tokens == want.tokens
    assert set(got.stats["planner"]["calls"]) == set(LABELS)
    assert got.stats["drafted"] > 0
    assert sum(got.stats["per_round"]["emitted"]) == 89


def test_the_head_misses_nothing_while_others_decode(manual):
    """After rounds of other strategies the head must propose what it would have proposed had it drafted all along."""
    choose = manual._planner.choose
    try:
        manual._planner.choose = lambda call: LABELS[1]
        always = manual.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
        manual._planner.choose = lambda call: LABELS[0] if call < 3 else LABELS[1]
        late = manual.generate(PROMPT, max_new_tokens=60, ignore_eos=True)
    finally:
        manual._planner.choose = choose
    assert late.tokens == always.tokens

    def by_place(result) -> dict[int, int]:
        places = np.cumsum([1, *result.stats["per_round"]["emitted"]])
        return dict(zip(places.tolist(), result.stats["per_round"]["accepted"], strict=False))

    early, after = by_place(always), by_place(late)
    shared = [place for place in after if place in early and place > 25]
    assert shared
    assert [after[place] for place in shared] == [early[place] for place in shared]


def test_switches_compile_nothing_anew(manual):
    """A switch that costs minutes."""
    manual.generate(PROMPT, max_new_tokens=90, ignore_eos=True)
    compiled = manual.variants.compilations
    manual.generate(PROMPT, max_new_tokens=80, ignore_eos=True, seed=1)
    assert manual.variants.compilations == compiled


def test_a_profile_plans_explains_and_falls_back(model, plain, manual, tmp_path, time_passes):
    """A promising profile, drafts that are worthless: the run must end up autoregressive, with the same tokens."""
    cost = {"none": 1.0, LABELS[1]: 1.2, LABELS[2]: 6.0}
    profile = profile_of(manual, *(entry(label, 3 * (label != "none"), ms) for label, ms in cost.items()))
    profile.save(tmp_path / "profile.json")
    said: list[Decision] = []
    engine = Engine.load(model[0], draft_model=model[1], planner=tmp_path / "profile.json", explain=said.append)
    time_passes(engine, cost)
    before = engine.variants.compilations
    options = {"max_new_tokens": 100, "ignore_eos": True}
    got = engine.generate([7, 8, 9], **options)
    assert engine.variants.compilations == before + 4  # prefill and three strategies, all before the first round
    want = plain.generate([7, 8, 9], **options)
    assert got.tokens == want.tokens
    assert got.stats["precision"] == "lossless"
    planner = got.stats["planner"]
    assert planner["decisions"][0] == str(said[0])
    assert planner["decisions"][0].startswith(f"start {LABELS[1]} at 4 tokens (bucket 64)")
    changes = [(decision.kind, decision.label) for decision in said if decision.kind != "keep"]
    assert changes[:2] == [("start", LABELS[1]), ("switch", "none")] and said[-1].label == "none"
    calls = planner["calls"]
    assert sum(calls.values()) == calls["none"] + calls[LABELS[1]] == len(said)
    assert calls["none"] > 2 * calls[LABELS[1]]  # a probe included

    # Times have their say: the same drafts, in rounds that turn out four times as cheap, are worth it to the end.
    time_passes(engine, cost | {LABELS[1]: 0.3})
    cheap = engine.generate([7, 8, 9], **options)
    assert set(cheap.stats["planner"]["calls"]) == {LABELS[1]}
    assert cheap.tokens == want.tokens
    assert engine.variants.compilations == before + 4


def test_samples_repeat_by_seed(model, manual, time_passes):
    """Decisions by the clock would make a seed's tokens depend on the machine's load."""
    cost = {"none": 1.0, "eagle3:1x2x4": 1.2}
    profile = profile_of(manual, entry("none", 0, 1.0), entry("eagle3:1x2x4", 2, 1.2))
    engine = Engine.load(model[0], draft_model=model[1], planner=profile)
    runs = []
    for ms in (1.2, 0.3):
        time_passes(engine, cost | {"eagle3:1x2x4": ms})
        runs.append(engine.generate(PROMPT, max_new_tokens=60, temperature=1.0, seed=4, ignore_eos=True))
    assert runs[0].tokens == runs[1].tokens
    assert runs[0].stats["planner"] == runs[1].stats["planner"]
    assert set(runs[0].stats["planner"]["calls"]) == set(cost), "one strategy throughout shows nothing"


def test_a_pilot_is_told_every_token_once(model):
    """Prompt lookup in hindsight over a text that lacks a token, or has one twice."""
    heard: list[int] = []

    class Listening(Manual):
        def pilot(self, labels, allowed, greedy, known=()):
            heard.extend(known)
            pilot = super().pilot(labels, allowed, greedy, known)
            pilot.observe = lambda seen: heard.extend(seen.tokens)
            return pilot

    engine = Engine.load(model[0], planner=Listening([Strategy.parse("ngram:3x2x6")]))
    got = engine.generate(PROMPT, max_new_tokens=40, ignore_eos=True)
    assert heard == [*got.prompt_ids, *got.tokens]


def test_precision_and_head_limit_the_candidates(model, manual):
    """A profile must not smuggle in a class that the user did not allow, nor a head that is not there."""
    shared = entry("ngram:3x2x6+group2+shared", 3, 0.5)
    reuse = entry("none+refresh2", 0, 0.4)
    profile = profile_of(manual, entry("none", 0, 1.0), entry(LABELS[1], 3, 1.2), shared, reuse)
    with_head = Engine.load(model[0], draft_model=model[1], planner=profile)
    assert set(with_head.lanes.strategies) == {"none", LABELS[1]}
    approx = Engine.load(model[0], planner=profile, precision=PrecisionClass.APPROX)
    assert set(approx.lanes.strategies) == {"none", shared.label}
    assert approx.precision is PrecisionClass.APPROX


def test_unfit_profiles_are_refused(model, manual, tmp_path):
    """A profile of another model, of a run that was killed, or beside a strategy."""
    plain = entry("none", 0, 1.0)
    for changes, message in (({"model_hash": "x"}, "other weights"), ({"dtype": "bfloat16"}, "measured in bfloat16")):
        with pytest.raises(ProfileError, match=message):
            Engine.load(model[0], planner=profile_of(manual, plain, **changes))
    with pytest.raises(ProfileError, match="incomplete"):
        Engine.load(model[0], planner=dataclasses.replace(profile_of(manual, plain), complete=False))
    with pytest.raises(UsageError, match="drop those options, or the profile"):
        Engine.load(model[0], planner=profile_of(manual, plain), strategy=Strategy(draft="ngram"))
    with pytest.raises(ProfileError, match="No such file"):
        Engine.load(model[0], planner=tmp_path / "absent.json")
    elsewhere = Engine.load(model[0], planner=profile_of(manual, plain, device="moon"))
    assert any("measured on moon" in note for note in elsewhere.notes)
