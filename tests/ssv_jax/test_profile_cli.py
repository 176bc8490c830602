"""The profile command: measures, resumes, refuses nonsense, and its file plans a generation."""

from __future__ import annotations

import json

import pytest

from ssv_jax import generate, profile
from ssv_jax.profiles import Profile
from tests.ssv_jax.commands import run
from tests.ssv_jax.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("cache_home")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("model") / "nsa"))


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"turns": [text]}) for text in ("abc abc abc", "say it again")))
    return str(file)


def test_a_profile_is_measured_resumed_and_used(capsys, directory, prompts, tmp_path):
    """The whole way: a profile, the same after a kill without measuring twice, and a planned generation from it."""
    out = tmp_path / "profile.json"
    argv = ("--model", directory, "--out", str(out), "--prompts", prompts, "--contexts", "40,100", "--repeats", "2",
            "--max-new-tokens", "12", "--strategies", "ngram:3x1x4", "ngram:3x2x6+group2")  # fmt: skip
    status, shown, err = run(profile.main, capsys, *argv)
    assert status == 0, err
    assert "context 40:" in shown and "tok/s expected" in shown
    assert "10/10 ngram:3x2x6+group2 on prompt 2" in err and "s left)" in err
    table = Profile.load(out)
    assert table.complete
    assert table.labels == ("none", "ngram:3x1x4", "ngram:3x2x6+group2")
    assert [c.context for c in table.entry("none").costs] == [40, 100]
    assert table.entry("ngram:3x1x4").acceptance.prompts == 2
    assert table.entry("ngram:3x1x4").acceptance.rounds > 0

    # As a kill would have left it: one cost and one prompt short.
    data = json.loads(out.read_text()) | {"complete": False}
    lost = data["strategies"][1]["costs"].pop()
    data["strategies"][0]["costs"][0]["median_ms"] = 123.0  # measured before, so it must stay
    out.write_text(json.dumps(data))
    status, _, err = run(profile.main, capsys, *argv)
    assert status == 0
    assert "1/1 ngram:3x1x4 at 100" in err
    again = Profile.load(out)
    assert again.entry("none").costs[0].median_ms == 123.0
    assert again.entry("ngram:3x1x4").costs[1].context == lost["context"]

    status, _, err = run(profile.main, capsys, *argv, "--seed", "3")
    assert status == 2
    assert "measured with another seed" in err

    plain = ("--model", directory, "--prompt", "abc abc", "--max-new-tokens", "20", "--ignore-eos", "--json", "--quiet")
    want = json.loads(run(generate.main, capsys, *plain)[1])
    status, text, err = run(generate.main, capsys, *plain, "--profile", str(out), "--explain")
    assert status == 0, err
    assert json.loads(text)["tokens"] == want["tokens"]
    assert err.startswith("plan: start ")
    assert json.loads(text)["planner"]["decisions"]
    status, _, err = run(generate.main, capsys, *plain, "--profile", str(out), "--draft", "ngram")
    assert status == 2
    assert "drop those options, or the profile" in err


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(9, []), (1, [1]), (2, [2]), (4, [2, 1]), (7, [2, 1])],
    ids=["first token", "within a round", "within a round, later", "in the second", "never"],
)
def test_rounds_after_an_end_token_do_not_count(stop, expected):
    """Acceptance of text that no user would see."""
    rounds = {"emitted": [3, 2], "accepted": [2, 1]}
    assert profile.accepted_before_stop([9, 1, 2, 3, 4, 5], rounds, [stop]) == expected


def test_strategy_and_explain_without_a_profile(capsys, directory):
    """`--strategy LABEL` is the other options in one word; auto is what it always was."""
    argv = ("--model", directory, "--prompt", "abc abc", "--max-new-tokens", "6", "--ignore-eos", "--json", "--quiet")
    status, text, err = run(generate.main, capsys, *argv, "--strategy", "ngram:3x1x4+dfs", "--explain")
    assert status == 0
    assert json.loads(text)["strategy"]["tree"] == {"depth": 3, "topk": 1, "nodes": 4}
    assert err == "plan: ngram:3x1x4+dfs throughout: asked for\n"
    assert "planner" not in json.loads(text)
    status, _, err = run(generate.main, capsys, *argv, "--strategy", "ngram", "--group", "2")
    assert status == 2 and "--strategy says all" in err
    status, _, err = run(generate.main, capsys, *argv, "--strategy", "fast")
    assert status == 2 and "unknown drafter" in err


@pytest.mark.parametrize(
    ("argv", "status", "message"),
    [
        (("--contexts", "a"), 2, "--contexts must read"),
        (("--contexts", "5000"), 2, "leaves room for at most"),
        (("--repeats", "0"), 2, "--repeats must be >= 1"),
        (("--strategies", "warp"), 2, "unknown drafter"),
        (("--strategies", "auto"), 2, "name its drafter"),
        (("--strategies", "eagle3:2x2x4"), 2, "needs a draft model"),
        (("--out", "/does/not/exist/p.json"), 2, "no such directory"),
        (("--prompts", "/does/not/exist"), 2, "No such file"),
        (("--model", "/does/not/exist"), 1, "exist"),
    ],
)
def test_bad_options_are_refused(capsys, directory, prompts, tmp_path, argv, status, message):
    """Nonsense that is noticed after hours of measuring."""
    common = ("--model", directory, "--out", str(tmp_path / "p.json"), "--prompts", prompts, "--quiet")
    got, out, err = run(profile.main, capsys, *common, *argv)
    assert message in err
    assert got == status
    assert out == ""
    assert len(err.strip().splitlines()) == 1
