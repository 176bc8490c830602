"""Batched generation: the engine's own tokens, resumption, random slices, and clear errors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ssv_jax.engine import Engine
from ssv_jax.models.loading import load as load_model
from ssv_jax.training import self_generate
from ssv_jax.training.self_generate import Generator, Request, generate, plan_batches, random_slices
from ssv_jax.training.tokens import DataError, from_documents, load, save
from tests.ssv_jax.tiny import write_checkpoint

LENGTHS = (3, 41, 17, 9, 26)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model):
    return Engine.load(model)


def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, length).astype(np.int32) for length in LENGTHS]


def make(model: Path, stop_ids: tuple[int, ...], **options) -> Generator:
    checkpoint = load_model(model, dtype=np.float32)
    request = Request(**{"max_new_tokens": 12, "batch": 2, "prefill": 16, "rounds": 4} | options)
    return Generator(checkpoint.config, checkpoint.params, dtype=np.float32, stop_ids=stop_ids, request=request)


def test_batches_hold_what_the_engine_generates_alone(model, engine, tmp_path):
    alone = [engine.generate(prompt.tolist(), max_new_tokens=12, ignore_eos=True).tokens for prompt in prompts()]
    # A token that ends one text early and is in others too late or never.
    stop = alone[1][4]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in alone]
    assert len({len(tokens) for tokens in expected}) > 1
    out = tmp_path / "set.npz"
    lines: list[str] = []
    report = generate(make(model, (stop,)), prompts(), out, source="tiny", say=lines.append)
    made = load(out)
    assert made.documents == len(LENGTHS) and made.supervised is not None
    for index, prompt in enumerate(prompts()):
        rows = slice(made.starts[index], made.starts[index + 1])
        np.testing.assert_array_equal(made.tokens[rows], [*prompt, *expected[index]])
        np.testing.assert_array_equal(
            np.flatnonzero(made.supervised[rows]), len(prompt) + np.arange(len(expected[index]))
        )
    assert report is not None
    assert report["generated"] == sum(map(len, expected)) == made.supervised.sum()
    assert report["ended_by_stop_token"] == sum(tokens[-1] == stop for tokens in expected)
    assert any("tok/s" in line for line in lines)


def test_a_killed_run_goes_on_with_the_missing_batches(model, tmp_path, monkeypatch):
    options = {"temperatures": (0.0, 0.8), "seed": 3}
    generator = make(model, (7,), **options)
    whole, parts = tmp_path / "whole.npz", tmp_path / "parts.npz"
    generate(generator, prompts(), whole, source="tiny", say=lambda _: None)

    kept, calls = Generator.run, []

    def dies(self, *args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return kept(self, *args)

    monkeypatch.setattr(Generator, "run", dies)
    with pytest.raises(KeyboardInterrupt):
        generate(generator, prompts(), parts, source="tiny", say=lambda _: None)
    assert not parts.exists()
    lines: list[str] = []
    generate(generator, prompts(), parts, source="tiny", say=lines.append)
    assert "1 of 3 batches are done already" in lines[0]
    assert parts.read_bytes() == whole.read_bytes()
    # Two processes, each with its share, end with the same.
    shared = tmp_path / "shared.npz"
    assert generate(generator, prompts(), shared, source="tiny", part=(0, 2), say=lambda _: None) is None
    assert generate(generator, prompts(), shared, source="tiny", part=(1, 2), say=lambda _: None) is not None
    assert shared.read_bytes() == whole.read_bytes()
    with pytest.raises(ValueError, match="other settings \\(seed\\)"):
        generate(make(model, (7,), **options | {"seed": 4}), prompts(), parts, source="tiny", say=lambda _: None)


def test_batches_deal_out_every_prompt_once():
    lengths = np.random.default_rng(0).integers(1, 500, 101).tolist()
    batches = plan_batches(lengths, Request(batch=16, temperatures=(0.0, 1.0)))
    assert sorted(i for batch in batches for i in batch.prompts) == list(range(101))
    by_temperature = [sum(len(b.prompts) for b in batches if b.temperature == t) for t in (0.0, 1.0)]
    assert sorted(by_temperature) == [50, 51]
    for temperature in (0.0, 1.0):
        own = [lengths[i] for batch in batches if batch.temperature == temperature for i in batch.prompts]
        assert own == sorted(own)


def test_slices_are_pieces_of_documents_within_the_range():
    documents = [np.arange(first, first + size) for first, size in ((0, 30), (100, 5), (200, 80))]
    token_set = from_documents(documents, 300)
    slices = random_slices([token_set], [1.0], 200, 10, 40, seed=1)
    sizes = [len(piece) for piece in slices]
    assert min(sizes) >= 10 and max(sizes) <= 40 and len(set(sizes)) > 10
    for piece in slices:
        np.testing.assert_array_equal(piece, np.arange(piece[0], piece[0] + len(piece)))
    assert not any(100 <= piece[0] < 200 for piece in slices)
    assert {int(piece[0]) // 200 for piece in slices} == {0, 1}
    with pytest.raises(DataError, match="no document has 90 tokens; lower --context"):
        random_slices([token_set], [1.0], 1, 90, 100, seed=0)


def test_command_line_answers_prompts_and_continues_texts(model, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [text, "more"]}) + "\n" for text in ("hello", "a b c", "x" * 300)))
    common = ["--model", str(model), "--max-new-tokens", "8", "--batch", "2", "--rounds", "4", "--prefill", "16"]
    out = tmp_path / "answers.npz"
    arguments = [*common, "--prompts", str(file), "--max-prompt-tokens", "100", "--out", str(out)]
    assert self_generate.main(arguments) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["documents"] == load(out).documents == 2
    assert "1 longer than 100 tokens left out" in printed.err

    texts, longer = tmp_path / "texts.npz", tmp_path / "longer.npz"
    save(texts, from_documents([np.arange(250) % 256], 300))
    arguments = [*common, "--continue", str(texts), "--count", "3", "--context", "20,50", "--out", str(longer)]
    assert self_generate.main(arguments) == 0
    made = load(longer)
    assert made.documents == 3 and made.supervised is not None and 3 <= made.supervised.sum() <= 24


@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        (["--prompts", "absent.jsonl"], 1, "absent.jsonl: no such file"),
        (["--prompts", "absent.jsonl", "--out", "x.txt"], 2, "must end in .npz"),
        (["--prompts", "absent.jsonl", "--batch", "0"], 2, "batch must be at least 1"),
        (["--prompts", "absent.jsonl", "--temperature", "-1"], 2, "temperature must be"),
        (["--prompts", "absent.jsonl", "--implementation", "magic"], 2, "unknown implementation magic"),
        (["--prompts", "absent.jsonl", "--continue", "x"], 2, "not allowed with argument"),
    ],
)
def test_errors_are_one_line_before_anything_is_loaded(extra, status, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    try:
        found = self_generate.main(["--model", "absent", "--out", "out.npz", *extra])
    except SystemExit as end:
        found = end.code
    error = capsys.readouterr().err
    assert found == status and message in error and error.count("\n") == 1 and not list(tmp_path.iterdir())


def test_prompts_that_are_no_prompts(model, tmp_path, capsys):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"turns": ["fine"]}\n{"turns": []}\n')
    assert self_generate.main(["--model", str(model), "--prompts", str(file), "--out", str(tmp_path / "o.npz")]) == 1
    assert "prompts.jsonl, line 2: expected" in capsys.readouterr().err
