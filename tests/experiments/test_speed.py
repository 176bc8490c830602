"""Benches, documents and ledgers of the experiments on speed: same tokens by every way, and rows that are resumed."""

from __future__ import annotations

import argparse
import dataclasses

import numpy as np
import pytest

from ssv_jax import Strategy, UsageError
from ssv_jax.controller import Controller, Decision, Fixed
from ssv_jax.models import eagle3
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.llama import param_shapes
from ssv_jax.profiles import Profile

pytestmark = pytest.mark.usefixtures("quick_programs")
LABELS = ("ngram:3x1x4+group2", "eagle3:1x16x17")


@pytest.fixture(scope="module")
def scripts(plain_names):
    """The modules by name."""
    import _bench
    import _evaluation
    import _speed
    import _subject
    import crossover
    import planner_gain
    import throughput
    import twin

    return argparse.Namespace(
        bench=_bench,
        evaluation=_evaluation,
        speed=_speed,
        subject=_subject,
        crossover=crossover,
        planner_gain=planner_gain,
        throughput=throughput,
        twin=twin,
    )


@pytest.fixture(scope="module")
def bench(scripts):
    """A sparse model with a random head, small drafters, everything compiled."""
    model = scripts.evaluation.smoke_model()
    head = scripts.subject.random_head(model.config)
    assert (head.kind, head.config.taps) == ("random", (0, 1, 2))
    subject, _ = scripts.subject.make_subject(model, head, "float32")
    bench = scripts.bench.Bench(
        subject,
        [Strategy.parse(label) for label in LABELS],
        dtype="float32",
        capacity=256,
        budget=20,
        rounds=4,
        chunk=32,
        verify=("plain", LABELS[0]),
    )
    scripts.bench.compile_benches([bench], quick=True)
    return bench


@pytest.fixture(scope="module")
def text(scripts):
    return scripts.evaluation.smoke_set(200).document(0).tolist()


def test_a_document_goes_on_as_if_it_had_never_been_decoded_from(scripts, bench, text):
    """Prefilled in two steps with decodings between them, it decodes as one that was prefilled at once."""
    pieces = scripts.bench.Document(bench, text)
    pieces.reach(70)
    early = [pieces.fixed(label).tokens for label in ("plain", *bench.labels)]
    assert len({tuple(tokens) for tokens in early}) == 1 and len(early[0]) == 20
    pieces.warm()
    assert pieces.timed("plain") > 0
    assert all(ms > 0 for ms in pieces.verify_ms(LABELS[0], 1, rounds=64))
    assert pieces.fixed("plain").tokens == early[0]
    pieces.reach(150)
    whole = scripts.bench.Document(bench, text)
    whole.reach(150)
    for one in (pieces, whole):
        assert one.context == 150
    for label in bench.labels:
        ours, theirs = pieces.fixed(label), whole.fixed(label)
        assert ours.tokens == theirs.tokens == pieces.fixed("plain").tokens
        assert ours.accepted == theirs.accepted
        assert ours.emitted == len(ours.tokens) - 1 == sum(ours.accepted) + ours.rounds
    assert any(sum(pieces.fixed(label).accepted) for label in LABELS), "nothing accepted shows nothing"
    with pytest.raises(ValueError, match="context must be in"):
        whole.reach(100)


def test_a_profile_of_the_same_runs_plans_the_same_tokens(scripts, bench, text):
    document = scripts.bench.Document(bench, text)
    labels, lanes = bench.labels, bench.lanes
    profiler = scripts.speed.Profiler(labels, dict(lanes.strategies), {x: lanes.drafters[x].max_depth for x in labels})
    for context in (64, 128):
        document.reach(context)
        for label in labels:
            profiler.add(label, context, document.run(Fixed(label)))
    profile = profiler.profile(bench.subject, dtype="float32", rounds=4, budget=20, capacity=256)
    assert Profile.from_json(profile.to_json()) == profile
    assert profile.contexts == (64, 128) and profile.complete
    assert all(profile.entry(label).acceptance.prompts == 2 for label in LABELS)
    candidates = scripts.speed.candidates_of(profile)
    assert candidates[0] == "none" and scripts.speed.best_fixed(profile, candidates) in candidates
    run = document.run(Controller(profile, candidates))
    assert run.tokens == document.fixed("plain").tokens
    assert sum(run.by_label.values()) == len(run.calls)


def test_the_dense_twin_drafts_and_decodes_as_the_small_model(scripts, text):
    """Tokens, rounds and acceptance with one head; also from a smaller cache that the text moved to."""
    model = scripts.evaluation.smoke_model(nsa=False)
    head = scripts.subject.random_head(model.config)
    small, wide = (
        scripts.subject.make_subject(model, head, "float32", shape)[0] for shape in (None, scripts.twin.SMOKE_SHAPE)
    )
    assert "twin" in wide.name and wide.vocab_size == small.vocab_size == 128 < wide.config.vocab_size
    label = LABELS[1]
    benches = [
        scripts.bench.Bench(
            subject,
            [Strategy.parse(label)],
            dtype="float32",
            capacity=size,
            budget=12,
            rounds=4,
            chunk=64,
            planned=False,
        )
        for subject, size in ((small, 256), (wide, 256), (wide, 128))
    ]
    scripts.bench.compile_benches(benches, [True, True, False], quick=True)
    ours, theirs = (scripts.bench.Document(bench, text) for bench in benches[:2])
    for context in (80, 160):
        ours.reach(context)
        theirs.reach(context)
        want = ours.fixed("plain").tokens
        runs = [document.fixed(label) for document in (ours, theirs)]
        if context == 80:
            moved = theirs.moved(benches[2])
            runs += [moved.fixed(label)]
            assert moved.fixed("plain").tokens == want
        assert theirs.fixed("plain").tokens == want
        assert all(run.tokens == want and run.accepted == runs[0].accepted for run in runs)


def test_caches_are_filled_without_a_text(scripts, bench):
    state = scripts.bench.fill(bench.first_state([0]), 128)
    document = scripts.bench.Document(bench, [0], state)
    document.filled(200)
    assert document.timed(LABELS[1]) > 0
    assert int(document.state.cache.length[0]) >= 204
    rows = np.asarray(document.state.cache.layers[0].kv.k)
    assert np.isfinite(rows).all() and 0.9 < rows.std() < 1.1


def test_what_a_bench_refuses(scripts, bench):
    with pytest.raises(ValueError, match="one layer plan"):
        scripts.bench.Bench(
            bench.subject,
            [Strategy(), Strategy(refresh_every=2)],
            dtype="float32",
            capacity=256,
            budget=4,
            rounds=2,
            chunk=32,
        )
    model = scripts.evaluation.smoke_model()
    with pytest.raises(UsageError, match="--random-head"):
        scripts.subject.find_head(model, None, False)
    assert scripts.subject.find_head(model, None, True).kind == "random"


def test_a_ledger_goes_on_and_refuses_other_settings(scripts, tmp_path):
    def ledger(about, **options):
        return scripts.evaluation.Ledger(tmp_path / "rows.json", "command", about, ("a", "b"), **options)

    first = ledger({"x": (1, 2)})
    first.add({"a": 1, "b": 1, "value": 3})
    first.add({"a": 1, "b": 2, "value": 4})
    first.facts["profile"] = {"deep": [1]}
    first.add({"a": 1, "b": 1, "value": 5})
    again = ledger({"x": (1, 2)})
    assert again.find(a=1) == [{"a": 1, "b": 2, "value": 4}, {"a": 1, "b": 1, "value": 5}]
    assert again.has(b=2) and not again.has(b=3) and again.facts == {"profile": {"deep": [1]}}
    with pytest.raises(UsageError, match="another x"):
        ledger({"x": (1, 3)})
    assert ledger({"x": (1, 3)}, restart=True).rows == []
    (tmp_path / "rows.json").write_text("{}")
    with pytest.raises(UsageError, match="not the rows"):
        ledger({"x": 1})


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [([1.2, 2.0], "below 100"), ([0.5, 0.8], "above 400"), ([0.5, 2.0], "200"), ([2.0, 0.5], "above 400")],
)
def test_crossing(scripts, ratios, expected):
    assert scripts.crossover.crossing(list(zip((100, 400), ratios, strict=True))) == expected


def test_costs_of_switches(scripts):
    def call(label, kind, seconds, emitted):
        decision = Decision(label=label, kind=kind, reason="", context=1, bucket=1)
        return scripts.bench.Call(decision=decision, seconds=seconds, accepted=(0, 0), emitted=emitted)

    calls = (call("a", "start", 1.0, 10), call("b", "probe", 2.0, 5), call("a", "return", 1.5, 10))
    calls += (call("a", "keep", 1.0, 10),)
    run = scripts.bench.Run(tokens=tuple(range(36)), calls=calls)
    found = scripts.planner_gain.switch_costs(run)
    assert found == {"probe_s": pytest.approx(1.5), "first_call": pytest.approx(1.5)}
    assert [decision.kind for decision in run.changes] == ["probe", "return"]
    assert scripts.bench.distinct([1, 2, 3, 4] * 5) == pytest.approx(4 / 17)
    assert scripts.bench.same_tokens((1, 2, 3), (1, 2)) == 2 and scripts.bench.same_tokens((1, 2), (3, 2)) == 0


def test_strategies_are_settled_before_anything_is_loaded(scripts):
    def settle(**changes):
        parser = argparse.ArgumentParser()
        scripts.evaluation.add_output_arguments(parser)
        scripts.speed.add_arguments(parser, 16)
        args = parser.parse_args(["--smoke"])
        for name, value in changes.items():
            setattr(args, name, value)
        scripts.speed.settle_arguments(args)
        return args

    args = settle(draft="ngram")
    assert args.strategies == list(scripts.speed.STRATEGIES["ngram"]) and args.dtype == "float32"
    for changes, message in (
        ({"rounds": 0}, "--rounds must be >= 1"),
        ({"draft": "ngram", "random_head": True}, "no network"),
        ({"draft": "ngram", "strategies": ["eagle3:2x2x5"]}, "no head"),
        ({"strategies": ["none"]}, "are added"),
        ({"strategies": ["ngram+refresh2"]}, "are added"),
        ({"strategies": ["ngram+group2+shared"]}, "exact ones"),
        ({"strategies": ["warp"]}, "unknown drafter"),
    ):
        with pytest.raises(UsageError, match=message):
            settle(**changes)


def test_tokens_a_round_come_from_a_result(scripts, tmp_path):
    args = argparse.Namespace(throughput=None, tokens_per_round=2.5)
    found = scripts.crossover.tokens_a_round(args)
    assert found["dense", "plain"] == 1.0 and found["nsa", "grouped"] == 2.5
    args.throughput = tmp_path / "absent.json"
    with pytest.raises(UsageError, match="not a result"):
        scripts.crossover.tokens_a_round(args)


def test_heads_of_the_twin_have_the_sizes_of_public_ones(scripts):
    """Llama-3.1-8B and its EAGLE-3 head: names and shapes, nothing allocated."""

    config = dataclasses.replace(
        scripts.evaluation.SMOKE,
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )
    shape = scripts.twin.SHAPES["8b"]
    wide = scripts.twin.widen_config(config, shape)
    head = Eagle3Config(
        vocab_size=49152,
        draft_vocab_size=16384,
        hidden_size=576,
        target_hidden_size=576,
        intermediate_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        taps=(2, 15, 27),
    )
    wider = scripts.twin.widen_head_config(head, config, wide, shape)
    shapes = eagle3.param_shapes(wider)
    assert shapes["fc/kernel"] == (3 * 4096, 4096) and shapes["lm_head/kernel"] == (4096, 32000)
    assert shapes["layers/0/attn/qkv/kernel"] == (2 * 4096, 8, 6, 128)
    assert shapes["layers/0/mlp/gate_up/kernel"] == (4096, 2, 14336)
    total = sum(int(np.prod(shape)) for shape in param_shapes(wide.dense()).values())
    assert total == pytest.approx(8.03e9, rel=1e-3)
