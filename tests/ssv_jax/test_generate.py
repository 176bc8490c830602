"""The command line: streams, JSON, exit statuses, and one-line errors without tracebacks."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from ssv_jax.generate import main
from tests.ssv_jax import commands
from tests.ssv_jax.tiny import CONFIG, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]


pytestmark = pytest.mark.usefixtures("cache_home")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_checkpoint(tmp_path_factory.mktemp("model") / "nsa"))


def run(capsys, *argv: str) -> tuple[int, str, str]:
    return commands.run(main, capsys, *argv)


def test_json_has_the_documented_fields(capsys, directory):
    """A field that scripts rely on is missing or of another kind."""
    status, out, err = run(capsys, "--model", directory, "--prompt", "abc abc", "--max-new-tokens", "5", "--json")
    assert status == 0
    report = json.loads(out)
    assert len(report["tokens"]) == 5
    assert report["prompt_tokens"] == 7
    assert set(report["timings_s"]) == {"load", "compile", "prefill", "decode"}
    for name in ("text", "finish_reason", "decode_tok_s", "device", "dtype", "versions", "precision", "strategy"):
        assert name in report
    assert report["drafter"] == {"name": "none", "reason": "the model has no head of its own", "window": None}
    assert report["dtype"] == "float32"
    assert "prefill 7/7" in err
    assert len(out.splitlines()) == 1


def test_text_and_ids_and_stdin_agree(capsys, directory, tmp_path, monkeypatch):
    """The same prompt through different doors gives different text."""
    common = ("--model", directory, "--max-new-tokens", "6", "--quiet")
    _, text, err = run(capsys, *common, "--prompt", "abc")
    assert err == ""
    ids = ",".join(str(i) for i in json.loads(run(capsys, *common, "--prompt", "abc", "--json")[1])["prompt_ids"])
    assert run(capsys, *common, "--prompt-ids", ids)[1] == text
    file = tmp_path / "prompt.txt"
    file.write_text("abc")
    assert run(capsys, *common, "--prompt-file", str(file))[1] == text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfabc")))
    assert run(capsys, *common, "-")[1] == text


def test_speculation_flags(capsys, directory):
    """Flags that parse but do not reach the run."""
    argv = ("--model", directory, "--prompt", "abc abc abc", "--max-new-tokens", "12", "--ignore-eos", "--json")
    plain = json.loads(run(capsys, *argv)[1])
    flags = ("--draft", "ngram", "--tree", "depth=3,topk=2,nodes=6", "--traversal", "dfs", "--group", "3")
    fast = json.loads(run(capsys, *argv, *flags)[1])
    assert fast["tokens"] == plain["tokens"]
    assert fast["strategy"]["tree"] == {"depth": 3, "topk": 2, "nodes": 6}
    assert fast["strategy"]["group"] == 3
    assert len(fast["acceptance_by_depth"]) == 3
    strict = json.loads(run(capsys, *argv, "--layer-plan", "refresh-every=2", "--precision", "strict")[1])
    assert strict["precision"] == "strict"


def test_list_models(capsys):
    """The listing must not need a model."""
    status, out, _ = run(capsys, "--list-models")
    assert status == 0
    assert "smollm2-135m" in out
    assert out.count("(default)") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((), "give exactly one of"),
        (("--prompt", "a", "--chat", "b"), "give exactly one of"),
        (("--prompt", ""), "the prompt is empty"),
        (("--prompt-file", "/does/not/exist"), "No such file"),
        (("--prompt-file", "/"), "--prompt-file /: "),
        (("--prompt-ids", "1,x"), "must be integers"),
        (("--prompt-ids", "-5"), "prompt token -5 is outside the vocabulary"),
        (("--prompt-ids", "1,300"), "outside the vocabulary"),
        (("--chat", "a", "--chat", "b"), "add a user turn"),
        (("--prompt", "a", "--max-new-tokens", "0"), "max_new_tokens must be >= 1"),
        (("--prompt", "a", "--max-new-tokens", "many"), "invalid int value"),
        (("--prompt", "a", "--temperature", "-1"), "temperature must be"),
        (("--prompt", "a", "--top-p", "2"), "top_p must be"),
        (("--prompt", "a", "--dtype", "float16"), "invalid choice"),
        (("--prompt", "a", "--unknown"), "unrecognized arguments"),
        (("--prompt", "a", "--nsa-config", "{"), "neither a preset"),
        (("--prompt", "a", "--nsa-config", '{"kernel_size": 7}'), "must divide"),
        (("--prompt", "a", "--attention", "dense", "--nsa-config", "paper"), "exclude each other"),
        (("--prompt", "a", "--tree", "depth=2"), "lacks topk, nodes"),
        (("--prompt", "a", "--tree", "depth=2,topk=1,nodes=3"), "needs a drafter"),
        (("--prompt", "a", "--draft", "ngram", "--tree", "depth=2,topk=2,nodes=9"), "exceeds the pool"),
        (("--prompt", "a", "--group", "0"), "group must be"),
        (("--prompt", "a", "--layer-plan", "refresh-every=0", "--precision", "strict"), "refresh-every must be >= 1"),
        (("--prompt", "a", "--layer-plan", "every=2"), "must read refresh-every=N"),
        (("--prompt", "a", "--layer-plan", "refresh=1,2", "--precision", "strict"), "layer 0 must be a refresh layer"),
        (("--prompt", "a", "--layer-plan", "refresh=0,2", "--precision", "strict"), "no layer 2"),
        (("--prompt", "a", "--layer-plan", "refresh-every=2"), "only lossless is allowed"),
        (("--prompt", "a", "--grouping", "shared", "--group", "2"), "only lossless is allowed"),
        (("--prompt", "a", "--draft", "eagle3"), "needs a draft model"),
        (("--prompt", "a", "--draft", "none", "--draft-model", "x"), "has no network"),
        (("--prompt", "a", "--draft-window", "8"), "a draft window needs"),
        (("--prompt", "a", "--draft", "eagle3", "--draft-window", "1000000000000"), "must be from 1 to 1073741824"),
        (("--prompt", "a", "--tree", "depth=--1,topk=1,nodes=2"), "must read depth=N,topk=N,nodes=N"),
        (("--prompt", "a", "--draft", "ngram", "--draft-window", "0"), "a draft window needs"),
        (("--prompt", "a", "--mesh", "data=2"), "tensor=N"),
        (("--prompt", "a", "--mesh", "tensor=64"), "needs 64 devices"),
        (("--prompt", "a", "--mesh", ""), "tensor=N"),
        (("--prompt", "a", "--mesh", "tensor=\u00b2"), "tensor=N"),
        (("--prompt", "\udcff"), "not valid text"),
        (("--prompt", "a", "--nsa-config", "[" * 100000), "cannot be read as JSON"),
        (("--prompt", "a", "--nsa-config", '{"preset": []}'), "unknown nsa preset"),
        (("--prompt", "a", "--nsa-config", '{"window_keys": 4294967296}'), "must be at most"),
        (("--prompt", "a", "--tap-convention", "residual"), "has no taps"),
        (("--prompt", "a", "--draft", "ngram", "--tree", "depth=9999,topk=1,nodes=10000"), "must be at most 1024"),
        (("--prompt", "a", "--implementation", "magic"), "unknown implementation magic"),
    ],
)
def test_usage_errors_exit_2_with_one_line(capsys, directory, argv, message):
    """A traceback, or a message that does not say what to do."""
    status, out, err = run(capsys, "--model", directory, "--quiet", *argv)
    assert message in err
    assert status == 2
    assert out == ""
    assert len(err.strip().splitlines()) == 1


def test_unreadable_models_exit_1_with_one_line(capsys, tmp_path):
    """Missing, empty and damaged checkpoints."""
    empty = tmp_path / "empty"
    empty.mkdir()
    damaged = write_checkpoint(tmp_path / "damaged")
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    gguf = tmp_path / "x.gguf"
    gguf.write_bytes(b"GGUF" + b"\x03\0\0\0" + b"\xff" * 40)
    for model in (tmp_path / "missing", empty, damaged, gguf):
        status, out, err = run(capsys, "--model", str(model), "--prompt", "a", "--quiet")
        assert status == 1, err
        assert out == ""
        assert len(err.strip().splitlines()) == 1
        assert model.name in err


def test_long_prompt_exits_1(capsys, directory):
    """A prompt beyond the context is named as such before anything is compiled."""
    ids = ",".join(["5"] * (CONFIG.max_position + 1))
    status, _, err = run(capsys, "--model", directory, "--prompt-ids", ids, "--quiet")
    assert status == 1
    assert "context holds 512" in err


def test_not_utf8_is_named(capsys, directory, tmp_path):
    """A binary file as a prompt."""
    file = tmp_path / "binary"
    file.write_bytes(b"abc\xff\xfe")
    status, _, err = run(capsys, "--model", directory, "--prompt-file", str(file))
    assert status == 2
    assert "not UTF-8 at byte 3" in err


def test_standard_input_that_is_not_utf8_is_named(capsys, directory, monkeypatch):
    """Binary data piped in."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff")))
    status, _, err = run(capsys, "--model", directory, "-")
    assert status == 2
    assert "-: not UTF-8 at byte 1" in err


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", ">/dev/full"])
def test_unusable_streams_give_no_traceback(directory, closed):
    """A closed or full standard stream."""
    command = f"{sys.executable} -m ssv_jax.generate --list-models {closed}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, cwd=ROOT, timeout=600)
    assert "Traceback" not in done.stderr
    assert done.returncode == (1 if closed == ">/dev/full" else 0)


def test_a_huge_budget_ends_at_the_context(capsys, directory):
    """A token budget that wraps int32 decodes past the context for ever."""
    argv = ("--model", directory, "--prompt-ids", ",".join(["5"] * 505), "--ignore-eos", "--json", "--quiet")
    for budget in (2**31 - 1, 2**40):
        status, out, _ = run(capsys, *argv, "--max-new-tokens", str(budget))
        assert status == 0
        assert json.loads(out)["finish_reason"] == "context"
        assert len(json.loads(out)["tokens"]) == CONFIG.max_position - 505 + 1
