"""A run survives being killed, and refuses to mix with another."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax.errors import UsageError
from ssv_jax.training.runs import Run

STATE = {"w": jnp.arange(6.0).reshape(2, 3), "n": jnp.zeros((), jnp.int32)}


def test_resume_continues_after_the_last_checkpoint_and_drops_later_metrics(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {"lr": 0.1}, 10, save_every=2)
    state, done = run.restore(STATE)
    assert done == 0
    for step in range(1, 6):
        state = {"w": state["w"] + 1, "n": state["n"] + 1}
        run.log(step, step * 100, loss=1 / step)
        run.save(step, state)
    run.finish()
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "tok')  # killed while writing
    again = Run(tmp_path / "run", {"lr": 0.1}, 10, save_every=2)
    state, done = again.restore(STATE)
    assert done == int(state["n"]) == 4
    np.testing.assert_array_equal(state["w"], STATE["w"] + 4)
    assert [line["step"] for line in again.metrics()] == [1, 2, 3, 4]
    again.log(5, 500, loss=0.1)
    assert [line["step"] for line in again.metrics()] == [1, 2, 3, 4, 5]
    again.save(5, state, force=True)
    again.finish()
    assert (tmp_path / "run" / "curve.png").stat().st_size > 1000


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    Run(tmp_path / "run", {"lr": 0.1, "seed": 0}, 10, save_every=2).finish()
    with pytest.raises(UsageError, match=r"lr: 0\.1 -> 0\.2"):
        Run(tmp_path / "run", {"lr": 0.2, "seed": 0}, 10, save_every=2)


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="no training run"):
        Run(tmp_path, {"lr": 0.1}, 10, save_every=2)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_empty_folder_is_a_new_run(tmp_path: Path) -> None:
    run = Run(tmp_path, {"lr": 0.1, "phases": [{"steps": 3}]}, 3, save_every=1)
    assert run.restore(STATE)[1] == 0
    assert json.loads((tmp_path / "settings.json").read_text())["phases"] == [{"steps": 3}]
    run.finish()
