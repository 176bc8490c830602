"""Training a head: it learns, survives being killed, is written as it was measured, and drafts; clear errors."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.engine import Engine
from ssv_jax.models.eagle3_loading import load_eagle3
from ssv_jax.models.saving import export_hf
from ssv_jax.strategy import Strategy, TreeSpec
from ssv_jax.training import train_eagle3
from ssv_jax.training.eagle3_loss import TrainingTest
from ssv_jax.training.schedule import Phase
from ssv_jax.training.tokens import from_documents, save
from ssv_jax.training.train_eagle3 import Recipe, Target, choose_vocabulary, head_config, load_target, train
from tests.ssv_jax.tiny import CONFIG, write_checkpoint

DEEP = dataclasses.replace(CONFIG, num_layers=4)
TAPS = (1, 2, 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("model"), config=DEEP)


@pytest.fixture(scope="module")
def target(model) -> Target:
    return load_target(str(model), "float32")


@pytest.fixture(scope="module")
def data():
    """Texts of few different tokens, the second half of each supervised."""
    rng = np.random.default_rng(0)
    documents = [rng.choice(np.arange(40, 60), 50) for _ in range(40)]
    return (from_documents(documents, DEEP.vocab_size, [np.arange(50) >= 25] * 40),), (1.0,)


def recipe(*steps: int, **options) -> Recipe:
    phases = tuple(Phase(length=24, batch=2, steps=n) for n in steps)
    defaults = {"test": TrainingTest(steps=3, window=6), "lr": 3e-3, "warmup": 2, "save_every": 2, "heldout_batches": 2}
    return Recipe(phases=phases, **defaults | options)


def test_a_killed_run_ends_with_the_same_head(target, data, tmp_path):
    config = head_config(target.config, draft_vocab=100, taps=TAPS)
    once, twice = tmp_path / "once", tmp_path / "twice"
    plan = recipe(3, 3, test=TrainingTest(steps=2, window=6))
    report = train(target, config, plan, once, data, data)
    # Stopped after the fifth step, one step after its last checkpoint.
    train(target, config, plan, twice, data, data, stop_after=5)
    assert not (twice / "head").exists()
    assert train(target, config, plan, twice, data, data) == report
    for name in ("model.safetensors", "config.json"):
        assert (once / "head" / name).read_bytes() == (twice / "head" / name).read_bytes()
    steps = [json.loads(line)["step"] for line in (twice / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 6
    with pytest.raises(ValueError, match="other settings \\(recipe"):
        train(target, config, dataclasses.replace(plan, lr=1e-4), twice, data)


def test_a_head_learns_is_measured_as_written_and_drafts(model, target, data, tmp_path):
    config = head_config(target.config, taps=TAPS, own_head=True)
    out = tmp_path / "run"
    report = train(target, config, recipe(120, lr=1e-2, save_every=1000, log_every=20), out, data, data)
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert losses[-1] < 0.9 * losses[0] and len(losses) == 6
    assert report["heldout"]["accuracy"][0] > 0.05 and report["heldout"]["coverage"] == 1

    checkpoint = load_eagle3(out / "head", target.config, dtype=None)
    assert all(x.dtype == jnp.bfloat16 for name, x in checkpoint.params.items() if name != "target_ids")
    trainer = train_eagle3.Trainer(target, config, np.arange(300, dtype=np.int32), recipe(1, heldout_batches=2))
    again = trainer.evaluate(checkpoint.params, data)
    assert again["coverage"] == 1 and np.isfinite(again["loss"])

    strategy = Strategy(draft="eagle3", tree=TreeSpec(depth=2, topk=2, nodes=6), draft_window=6)
    drafted = Engine.load(model, strategy=strategy, draft_model=out / "head").generate(
        list(range(40, 60)), max_new_tokens=30
    )
    plain = Engine.load(model).generate(list(range(40, 60)), max_new_tokens=30)
    assert drafted.tokens == plain.tokens
    assert drafted.stats["emitted_per_round"] > 1


def test_the_draft_vocabulary_holds_the_most_frequent_targets():
    documents = [np.asarray([9, 9, 9, 9, 3, 3, 5]), np.asarray([7, 7, 7])]
    flags = [np.asarray([0, 0, 0, 0, 1, 1, 1], bool), np.asarray([1, 0, 0], bool)]
    sets = [from_documents([d], 12, [f]) for d, f in zip(documents, flags, strict=True)]
    assert choose_vocabulary(sets, (1.0, 1.0), 2, 12).tolist() == [3, 7]
    assert choose_vocabulary(sets, (9.0, 1.0), 2, 12).tolist() == [3, 5]
    assert choose_vocabulary(sets, (1.0, 1.0), 5, 12).tolist() == [0, 1, 3, 5, 7]
    assert choose_vocabulary(sets, (1.0, 1.0), 12, 12).tolist() == list(range(12))


def test_command_line_trains_stops_in_time_and_goes_on(model, data, tmp_path, capsys):
    texts, out = tmp_path / "texts.npz", tmp_path / "run"
    save(texts, data[0][0])
    arguments = ["--model", str(model), "--data", str(texts), "--heldout", str(texts), "--out", str(out)]
    arguments += ["--length", "20", "--batch", "2", "--steps", "4", "--ttt-steps", "2", "--taps", "1,2,4"]
    arguments += ["--draft-vocab", "64", "--heldout-batches", "1", "--log-every", "1"]
    assert train_eagle3.main([*arguments, "--max-seconds", "0"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["steps"] == 1 and "stopped after step 1 of 4" in printed.err
    assert train_eagle3.main(arguments) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["steps"] == 4 and report["tokens"] == 160 and len(report["heldout"]["accuracy"]) == 2
    assert "resuming after step 1" in printed.err and "tok/s" in printed.err
    assert json.loads((out / "report.json").read_text()) == report


@pytest.mark.parametrize(
    ("extra", "status", "message"),
    [
        (["--model", "absent"], 1, "absent: no such file"),
        (["--data", "absent.npz"], 1, "absent.npz: no such file"),
        (["--ttt-steps", "0"], 2, "steps must be >= 1"),
        (["--length", "6"], 2, "length=6 is too short for --ttt-steps 6"),
        (["--taps", "3,2,1"], 2, "taps must be 3 different"),
        (["--phase", "length=4"], 2, "must look like length=2048"),
        (["--lr", "0"], 2, "--lr and --refresh-every must be positive"),
        (["--save-every", "0"], 2, "--save-every must be at least 1"),
    ],
)
def test_errors_are_one_line(model, extra, status, message, tmp_path, capsys):
    arguments = ["--model", str(model), "--data", "x.npz", "--out", str(tmp_path / "run"), "--taps", "1,2,4"]
    try:
        found = train_eagle3.main([*arguments, *extra])
    except SystemExit as end:
        found = end.code
    error = capsys.readouterr().err
    assert found == status and message in error.splitlines()[-1] and not list(tmp_path.iterdir())


def test_a_target_without_default_taps_needs_them_named(model, tmp_path, capsys):
    assert train_eagle3.main(["--model", str(model), "--data", "x.npz", "--out", str(tmp_path / "run")]) == 2
    assert "name them" in capsys.readouterr().err


def test_batches_spread_over_devices_evenly(target, monkeypatch):
    devices = jax.devices() * 2
    monkeypatch.setattr(jax, "devices", lambda: devices)
    config = head_config(target.config, taps=TAPS)
    uneven = dataclasses.replace(recipe(1), phases=(Phase(length=24, batch=3, steps=1),))
    with pytest.raises(ValueError, match="batch=3: must be a multiple of the 2 visible devices"):
        train_eagle3.Trainer(target, config, np.arange(300, dtype=np.int32), uneven)


def test_untied_targets_and_shared_rows(tmp_path):
    from ssv_jax.models.llama import random_params

    config = dataclasses.replace(DEEP, nsa=None, tie_embeddings=False)
    export_hf(tmp_path / "model", config, {k: np.asarray(v) for k, v in random_params(config).items()})
    target = load_target(str(tmp_path / "model"), "float32")
    head = head_config(target.config, taps=TAPS, draft_vocab=30)
    ids = np.arange(30, dtype=np.int32) * 3
    trainer = train_eagle3.Trainer(target, head, ids, recipe(1))
    params = trainer.final_params(trainer.initial_state())
    rows = np.asarray(target.params["lm_head/kernel"])[:, ids]
    np.testing.assert_array_equal(params["lm_head/kernel"], rows.astype(params["lm_head/kernel"].dtype))
