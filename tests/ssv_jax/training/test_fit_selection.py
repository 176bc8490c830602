"""The compressor fit: its loss is that of the pass, it gets lower, a stopped fit resumes, only compressors change."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ssv_jax import Engine, UsageError
from ssv_jax.models.config import NSAConfig
from ssv_jax.models.delta import read_delta
from ssv_jax.models.llama import random_params
from ssv_jax.training import adapt_nsa, fit_selection, selection_fit
from ssv_jax.training.forward import SequenceOptions, hidden_states, layer_names, stack_params

from ..tiny import DENSE, write_checkpoint

NSA = NSAConfig(
    cmp_fn="pooled",
    cmp_pe="kv",
    cmp_pools=2,
    gate_bias=True,
    kernel_size=8,
    kernel_stride=4,
    block_size=8,
    n_selected=4,
    window_keys=8,
)
CONFIG = dataclasses.replace(DENSE, nsa=NSA)


@pytest.mark.parametrize("rope", ["post", "pre"])
def test_the_loss_is_that_of_the_pass_for_every_layer(rope: str) -> None:
    # All blocks selected: rounding could choose another one in a near tie.
    config = dataclasses.replace(CONFIG, nsa=dataclasses.replace(NSA, cmp_rope=rope, n_selected=16))
    params = stack_params(config, {k: v * 6 for k, v in random_params(config, 1).items()})
    tokens = jax.random.randint(jax.random.key(2), (1, 70), 0, config.vocab_size)
    options = SequenceOptions(selection_loss=True, streams=True, chunk=32)
    hidden = hidden_states(config, params, tokens, None, options)
    assert hidden.selection_loss is not None
    assert hidden.streams is not None
    fit = selection_fit.LayerFit(config, length=70, dtype=jnp.float32, chunk=16)
    x = params["embed/embedding"][tokens]
    for layer in range(config.num_layers):
        values = {name: params[f"layers/{name}"][layer] for name in layer_names(config)}
        own = {name: v for name, v in values.items() if name.startswith(selection_fit.COMPRESSOR)}
        seen = fit.observe(values, x, jnp.arange(70))
        np.testing.assert_allclose(fit.loss(own, values, seen), hidden.selection_loss[layer], rtol=1e-4, atol=1e-6)
        x = fit.advance(values, x)
        np.testing.assert_allclose(x, hidden.streams[layer], atol=1e-3)


def test_a_fit_lowers_the_loss_and_keeps_its_best() -> None:
    params = stack_params(CONFIG, {k: v * 6 for k, v in random_params(CONFIG, 3).items()})
    values = {name: params[f"layers/{name}"][1] for name in layer_names(CONFIG)}
    fit = selection_fit.LayerFit(CONFIG, length=96, dtype=jnp.float32, chunk=32)
    position = jnp.arange(40, 96, 3)
    xs = jax.random.normal(jax.random.key(4), (4, 1, 96, CONFIG.hidden_size))
    seen = [fit.observe(values, x, position) for x in xs]
    fitted, (before, after) = fit.fit(values, seen[1:], seen[:1], steps=60, rate=0.03, seed=0)
    assert after < 0.9 * before
    assert set(fitted) == {n for n in layer_names(CONFIG) if n.startswith(selection_fit.COMPRESSOR)}
    np.testing.assert_allclose(fit.loss(fitted, values, seen[0]), after, rtol=1e-5)
    _, (start, best) = fit.fit(values, seen[1:], seen[:1], steps=8, rate=1e3, seed=0)  # diverges
    assert start == before
    assert best <= before


@pytest.mark.parametrize("focus", [0.0, 0.7])
def test_queries_are_drawn_by_what_they_read_of_one_free_block(focus: float) -> None:
    """Chances against full attention written out; forced blocks do not count, nor do queries without others."""
    params = stack_params(CONFIG, {k: v * 6 for k, v in random_params(CONFIG, 5).items()})
    values = {name: params[f"layers/{name}"][1] for name in layer_names(CONFIG)}
    fit = selection_fit.LayerFit(CONFIG, length=61, dtype=jnp.float32, chunk=32)
    x = jax.random.normal(jax.random.key(6), (1, 61, CONFIG.hidden_size))
    q, _, k = (np.asarray(y, np.float64) for y in fit._projected(values, x))
    scores = np.einsum("kigd,kjd->kgij", q[0], k[0]) * fit._attention(values).scale
    scores = np.where(np.tri(61, dtype=bool), scores, -np.inf)
    full = np.exp(scores - scores.max(-1, keepdims=True))
    full = (full / full.sum(-1, keepdims=True)).mean(1)  # [K, S, S]
    first = (NSA.init_blocks + NSA.local_blocks) * NSA.block_size
    peaks = np.array(
        [
            max(
                full[head, at, 8 * block : 8 * block + 8].sum()
                for head in range(full.shape[0])
                for block in range(NSA.init_blocks, at // 8 - NSA.local_blocks + 1)
            )
            for at in range(first, 61)
        ]
    )
    chance = (1 - focus) + focus * peaks / peaks.mean()
    chance /= chance.sum()
    keys, trials = jax.random.split(jax.random.key(7), 4000), 4000
    drawn = jax.vmap(lambda key: fit.draw(values, x, key, count=1, focus=focus))(keys)
    counts = np.bincount(np.asarray(drawn).ravel(), minlength=61)
    assert not counts[:first].any()
    expected = trials * chance
    chi = ((counts[first:] - expected) ** 2 / expected).sum()
    assert chi < len(chance) + 5 * np.sqrt(2 * len(chance))
    several = np.asarray(fit.draw(values, x, keys[0], count=20, focus=focus))
    assert len(set(several.tolist())) == 20 and (np.diff(several) > 0).all()


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("material")
    text = folder / "text.txt"
    rng = np.random.default_rng(0)
    text.write_text(" ".join(rng.choice(["the", "cat", "sat", "on", "a", "mat", "and", "ran"], 900)))
    model = write_checkpoint(folder / "model", config=DENSE)
    weighted = {f.name: getattr(NSA, f.name) for f in dataclasses.fields(NSA)} | {"cmp_fn": "weighted"}
    status = adapt_nsa.main(
        [
            *("--model", str(model), "--data", str(text), "--out", str(folder / "run"), "--rank", "2"),
            *("--nsa-config", json.dumps(weighted), "--phase", "length=64,batch=1,steps=2", "--chunk", "32"),
        ]
    )
    assert status == 0
    return folder / "run" / "delta", text


def command(material: tuple[Path, Path], out: Path, *more: str) -> list[str]:
    delta, text = material
    return [
        *("--model", str(delta), "--data", str(text), "--out", str(out), "--length", "96", "--sequences", "3"),
        *("--queries", "20", "--pools", "2", "--steps", "10", "--chunk", "32", *more),
    ]


def test_a_stopped_fit_goes_on_to_the_same_end(
    material: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    assert fit_selection.main(command(material, tmp_path / "whole")) == 0
    assert "selection loss" in capsys.readouterr().err
    fit, calls = selection_fit.LayerFit.fit, []

    def stopped(self, *args, **options):
        calls.append(None)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return fit(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(selection_fit.LayerFit, "fit", stopped)
        assert fit_selection.main(command(material, tmp_path / "parts")) == 130
    assert (tmp_path / "parts" / "layer-000.npz").exists()
    assert not (tmp_path / "parts" / "delta").exists()
    assert fit_selection.main(command(material, tmp_path / "parts")) == 0
    one, other = (read_delta(tmp_path / name / "delta") for name in ("whole", "parts"))
    before = read_delta(material[0]).arrays
    assert one.info.nsa is not None
    assert (one.info.nsa.cmp_fn, one.info.nsa.cmp_pools) == ("pooled", 2)
    for name, value in one.arrays.items():
        np.testing.assert_array_equal(np.asarray(other.arrays[name]), np.asarray(value), err_msg=name)
        if selection_fit.COMPRESSOR not in name and name in before:
            np.testing.assert_array_equal(np.asarray(value), np.asarray(before[name]), err_msg=name)
    assert len(Engine.load(tmp_path / "whole" / "delta").generate("the cat", max_new_tokens=5).tokens) == 5


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        (["--focus", "1.5"], 2, "--focus must be in [0, 1]"),
        (["--steps", "0"], 2, "--steps must be >= 1"),
        (["--lr", "nan"], 2, "--lr"),
        (["--seed", "-1"], 2, "--seed"),
        (["--length", "30"], 2, "--length 30: needs --queries 20 beyond the 24 tokens"),
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
    assert fit_selection.main(command(material, tmp_path / "run", *change)) == status
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert says in error
    assert not (tmp_path / "run").exists()


def test_only_models_that_can_be_fitted_are_taken(
    material: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    dense = material[0].parent.parent / "model"
    assert fit_selection.main(command(material, tmp_path / "run", "--model", str(dense))) == 2
    assert "adapt_nsa first" in capsys.readouterr().err
    moved = tmp_path / "moved"
    shutil.copytree(material[0], moved)
    text = (moved / "config.json").read_text()
    (moved / "config.json").write_text(text.replace(read_delta(moved).info.base.sha256 or "-", "0" * 64))
    assert fit_selection.main(command(material, tmp_path / "run", "--model", str(moved))) == 1
    assert "use the same base" in capsys.readouterr().err
    with pytest.raises(UsageError, match="dense attention"):
        fit_selection.pooled_config(DENSE, 2)
    with pytest.raises(UsageError, match="cmp_fn=mlp"):
        fit_selection.pooled_config(dataclasses.replace(CONFIG, nsa=dataclasses.replace(NSA, cmp_fn="mlp")), 2)
    with pytest.raises(UsageError, match="--pools 3: the model has 2"):
        fit_selection.pooled_config(CONFIG, 3)
