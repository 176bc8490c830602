"""The adaptation command, end to end on a tiny model: it learns, resumes exactly, and writes what it evaluated."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ssv_jax import Engine, UsageError
from ssv_jax.models.config import LlamaConfig, nsa_from_json
from ssv_jax.models.delta import DeltaBase, read_delta, save_delta
from ssv_jax.training import adapt_nsa
from ssv_jax.training.forward import split_layers
from ssv_jax.training.lora import init_trained

from ..tiny import DENSE, write_checkpoint

NSA = {
    "cmp_fn": "weighted",
    "cmp_pe": "kv",
    "gate_bias": True,
    "kernel_size": 8,
    "kernel_stride": 4,
    "block_size": 8,
    "n_selected": 4,
    "window_keys": 8,
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("material")
    text = folder / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(rng.choice(["the", "cat", "sat", "on", "a", "mat", "and", "ran"], 900)))
    return write_checkpoint(folder / "model", config=DENSE), text


def command(material: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    model, text = material
    return [
        *("--model", str(model), "--data", str(text), "--out", str(out)),
        *("--nsa-config", json.dumps(NSA), "--rank", "4"),
        *("--phase", "length=96,batch=2,steps=10", "--lr", "0.01", "--warmup", "2", "--save-every", "4"),
        *("--log-every", "1", "--chunk", "32", "--segments", "1", "--refresh-intervals", "1:0.7,2:0.3", *more),
    ]


def test_adapts_and_the_result_runs(material: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    options = ["--heldout", str(material[1]), "--eval-rows", "1", "--rope-theta", "20000"]
    options += ["--phase", "length=64,batch=4,steps=30", "--lr", "0.005"]
    assert adapt_nsa.main(command(material, out, *options)) == 0
    shown = capsys.readouterr().err
    assert "step 40/40" in shown
    assert "left" in shown
    losses = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 40
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    rows = json.loads((out / "heldout.json").read_text())
    assert [row["refresh_every"] for row in rows] == [1, 2, 1, 2]
    delta = read_delta(out / "delta")
    assert delta.info.refresh_intervals == (1, 2)
    assert delta.info.rope_theta == 20000
    engine = Engine.load(out / "delta")
    assert engine.config.nsa is not None
    assert len(engine.generate("the cat", max_new_tokens=5).tokens) == 5
    assert adapt_nsa.main([*command(material, tmp_path / "again"), "--model", str(out / "delta")]) == 2
    assert "is a delta" in capsys.readouterr().err


def test_a_stopped_run_goes_on_to_the_same_end(material: tuple[Path, Path], tmp_path: Path) -> None:
    assert adapt_nsa.main(command(material, tmp_path / "whole")) == 0
    stopped = command(material, tmp_path / "parts")
    assert adapt_nsa.main([*stopped, "--max-seconds", "0.001"]) == 0
    assert not (tmp_path / "parts" / "delta").exists()
    assert adapt_nsa.main(stopped) == 0
    one, other = (read_delta(tmp_path / name / "delta").arrays for name in ("whole", "parts"))
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(other[name]), err_msg=name)


@pytest.mark.parametrize("stride", [4, 8])
def test_a_start_gives_its_values_but_no_compressors_of_another_geometry(tmp_path: Path, stride: int) -> None:
    """A run of finer entries that forgets what was learnt, or one that takes compressors of another size."""

    def config(stride: int) -> LlamaConfig:
        return dataclasses.replace(DENSE, nsa=nsa_from_json(json.dumps({**NSA, "kernel_stride": stride})))

    biases = (0.0, 0.0, 0.0)
    noise = {name: np.asarray(x) + 0.25 for name, x in init_trained(config(4), 2, biases, 1).items()}
    base = DeltaBase(model="base", sha256="0" * 64)
    save_delta(tmp_path / "delta", base=base, base_config=DENSE, config=config(4), arrays=split_layers(noise))
    fresh = init_trained(config(stride), 2, biases, 2)
    nsa = config(stride).nsa
    assert nsa is not None
    got, whole = adapt_nsa._values_of(tmp_path / "delta", fresh, nsa, DENSE.num_layers)
    assert whole == (stride == 4)
    assert set(got) == set(fresh)
    for name, value in got.items():
        kept = fresh[name] if "compress" in name and not whole else noise[name]
        np.testing.assert_allclose(np.asarray(value), np.asarray(kept), rtol=1e-2, err_msg=name)
    with pytest.raises(UsageError, match="other values than this run trains .*--rank"):
        adapt_nsa._values_of(tmp_path / "delta", init_trained(config(stride), 3, biases, 2), nsa, DENSE.num_layers)


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        (["--rank", "-1"], 2, "--rank must be >= 0"),
        (["--lr", "nan"], 2, "--lr"),
        (["--nsa-config", "paper"], 2, "gate_bias"),
        (["--nsa-config", '{"block_size": 7}'], 2, "kernel_stride"),
        (["--rope-theta", "0"], 2, "--rope-theta"),
        (["--data", "/no/such/file"], 1, "no such file"),
        (["--model", "/no/such/model"], 1, "no such file"),
    ],
)
def test_mistakes_are_answered_in_one_line(
    material: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    change: list[str],
    status: int,
    says: str,
) -> None:
    assert adapt_nsa.main(command(material, tmp_path / "run", *change)) == status
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert says in error


@pytest.mark.parametrize("change", [["--phase", "length=0,batch=1,steps=1"], ["--refresh-intervals", "0:1"]])
def test_usage_errors_exit_with_2(material: tuple[Path, Path], tmp_path: Path, change: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        adapt_nsa.main(command(material, tmp_path / "run", *change))
    assert stop.value.code == 2
