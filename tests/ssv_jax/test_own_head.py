"""A model that ships as a delta with its head: found by name and by path, drafting by default, changing no token."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from ssv_jax import Engine, PrecisionClass, Strategy, TreeSpec, UsageError, registry
from ssv_jax.drafting.build import DEFAULT_HEAD_TREES, OwnHead, settle
from ssv_jax.models.delta import weights_sha256
from ssv_jax.models.eagle3 import random_params as eagle3_params
from ssv_jax.models.eagle3_config import Eagle3Config
from ssv_jax.models.eagle3_loading import export_eagle3
from ssv_jax.models.errors import CheckpointError
from ssv_jax.registry import KnownModel, ShippedModel, resolve
from tests.models.deltas import trained_from, write_delta
from tests.ssv_jax.test_generate import run
from tests.ssv_jax.tiny import DENSE as BASE
from tests.ssv_jax.tiny import write_checkpoint

pytestmark = pytest.mark.usefixtures("cache_home")
CONFIG = trained_from(BASE)
TREE = TreeSpec(depth=2, topk=2, nodes=6)
PROMPT = "abc abc abc abc "
LENGTH = {"max_new_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A dense base with a tokenizer in `base`, and beside it the delta `weights/tiny` with a head in `eagle3`."""
    home = tmp_path_factory.mktemp("home")
    base = write_checkpoint(home / "base", config=BASE)
    delta = home / "weights" / "tiny"
    write_delta(delta, "../../base", BASE, sha256=weights_sha256(base), refresh_intervals=(1, 2))
    head = Eagle3Config(
        hidden_size=CONFIG.hidden_size,
        target_hidden_size=CONFIG.hidden_size,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=CONFIG.vocab_size,
        draft_vocab_size=64,
        taps=(0, 1, 2),
        draft_window=16,
    )
    export_eagle3(delta / "eagle3", head, {n: np.asarray(x) for n, x in eagle3_params(head, 1).items()})
    return home


def entry(folder: Path) -> ShippedModel:
    files = {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in folder.rglob("*")
        if file.is_file()
    }
    return ShippedModel(
        description="tiny, for tests", folder=folder.name, files=files, trees={"cpu": TREE, "gpu": TREE}
    )


@pytest.fixture
def shipped(home, monkeypatch):
    """The name `tiny` in the registry, for files inside the package."""
    monkeypatch.setattr(registry, "_WEIGHTS", home / "weights")
    models = {**registry.MODELS, "tiny": entry(home / "weights" / "tiny")}
    monkeypatch.setattr(registry, "MODELS", MappingProxyType(models))
    return home / "weights" / "tiny"


@pytest.fixture(scope="module")
def plain(home):
    """Tokens of plain decoding."""
    engine = Engine.load(home / "weights" / "tiny", strategy=Strategy())
    assert engine.config == CONFIG
    return engine.generate(PROMPT, **LENGTH)


def test_by_name_everything_is_there(shipped, plain):
    """The whole path: name, digests, base, delta, tokenizer, head, tree, window."""
    engine = Engine.load("tiny")
    assert engine.config == CONFIG and engine.tokenizer is not None
    assert engine.strategy == Strategy(draft="eagle3", tree=TREE)
    got = engine.generate(PROMPT, **LENGTH)
    assert got.tokens == plain.tokens and len(set(got.tokens)) > 1
    assert got.stats["drafted"] > 0 and plain.stats["drafted"] == 0
    assert got.stats["drafter"] == {"name": "eagle3", "reason": "the model's own head", "window": 16}
    assert plain.stats["drafter"] == {"name": "none", "reason": "asked for", "window": None}


def test_dense_attention_keeps_the_trained_matrices(home, plain):
    """Sparse parts are ignored, low-rank changes are not, and the head still drafts without changing a token."""
    where = home / "weights" / "tiny"
    wanted = Engine.load(where, attention="dense", strategy=Strategy()).generate(PROMPT, **LENGTH)
    engine = Engine.load(where, attention="dense")
    assert engine.config == CONFIG.dense() and engine.strategy.draft == "eagle3"
    assert any("dense attention" in note for note in engine.notes)
    assert engine.generate(PROMPT, **LENGTH).tokens == wanted.tokens
    assert Engine.load(home / "base").generate(PROMPT, **LENGTH).tokens != wanted.tokens


def test_other_options_combine_with_the_open_choice(home, tmp_path):
    """A layer plan that drops the head, or a note that is missing where the plan was not trained for."""
    where = home / "weights" / "tiny"
    options = {"precision": PrecisionClass.APPROX}
    engine = Engine.load(where, strategy=Strategy(draft="auto", refresh_every=2, group=2), **options)
    tree = DEFAULT_HEAD_TREES["cpu"]
    assert engine.strategy == Strategy(draft="eagle3", tree=tree, refresh_every=2, group=2)
    assert not any("layer plans" in note for note in engine.notes)
    write_delta(tmp_path / "delta", str(home / "base"), BASE, refresh_intervals=(1, 3))
    for directory, plan, trained in (
        (where, {"refresh_layers": (0,)}, "1, 2"),
        (tmp_path / "delta", {"refresh_every": 2}, "1, 3"),
    ):
        engine = Engine.load(directory, strategy=Strategy(**plan), **options)
        assert engine.strategy.draft == "none"
        assert any(f"trained for layer plans refresh-every={trained}, not" in note for note in engine.notes)


def test_window_of_the_head_can_be_replaced(home):
    """A recommendation that cannot be overruled."""
    where = home / "weights" / "tiny"
    for asked, got in ((None, 16), (5, 5), (0, None)):
        engine = Engine.load(where, strategy=Strategy(draft="eagle3", draft_window=asked))
        assert engine._drafter.window == got


def test_settling():
    """Every way to leave the drafter open, and what names it."""
    own = OwnHead(path=Path("own"), trees={"cpu": TREE, "gpu": TreeSpec(depth=3, topk=2, nodes=4)})

    def settled(strategy, draft_model=None, head=own, platform="cpu"):
        found = settle(strategy, draft_model, head, platform)
        return found.strategy.draft, found.strategy.tree, found.draft_model, found.reason

    big = TreeSpec(depth=4, topk=3, nodes=9)
    assert settled(None) == ("eagle3", TREE, Path("own"), "the model's own head")
    assert settled(None, platform="gpu")[1] == TreeSpec(depth=3, topk=2, nodes=4)
    assert settled(Strategy(draft="auto", tree=big))[1:3] == (big, Path("own"))
    assert settled(Strategy(draft="eagle3"))[:3] == ("eagle3", TREE, Path("own"))
    assert settled(Strategy(draft="eagle3"), "mine") == ("eagle3", None, "mine", "asked for")
    assert settled(None, "mine") == ("eagle3", None, "mine", "a draft model was given")
    assert settled(Strategy()) == ("none", None, None, "asked for")
    assert settled(Strategy(draft="ngram")) == ("ngram", None, None, "asked for")
    assert settled(None, head=None) == ("none", None, None, "the model has no head of its own")
    assert settled(Strategy(draft="eagle3"), head=None) == ("eagle3", None, None, "asked for")
    for strategy in (Strategy(draft="auto", tree=big), Strategy(draft="auto", draft_window=4)):
        with pytest.raises(UsageError, match=r"choose .*eagle3.*\(this model has no head of its own\)"):
            settled(strategy, head=None)


def test_command_line(capsys, home, shipped, plain):
    """Text that depends on the drafter, or a report that hides which one ran."""
    common = ("--prompt", PROMPT, "--max-new-tokens", "16", "--ignore-eos", "--json", "--quiet", "--model")
    reports = {}
    for model, flags in (
        (str(shipped), ()),
        ("tiny", ("--draft", "none")),
        ("tiny", ("--draft", "eagle3", "--draft-window", "0")),
    ):
        status, out, err = run(capsys, *common, model, *flags)
        assert status == 0, err
        reports[model, flags] = report = json.loads(out)
        assert tuple(report["tokens"]) == plain.tokens
    drafters = [report["drafter"] for report in reports.values()]
    assert [drafter["name"] for drafter in drafters] == ["eagle3", "none", "eagle3"]
    assert [drafter["window"] for drafter in drafters] == [16, None, None]
    trees = [report["strategy"]["tree"] for report in reports.values()]
    assert trees == [dataclasses.asdict(DEFAULT_HEAD_TREES["cpu"]), None, dataclasses.asdict(TREE)]
    status, out, _ = run(capsys, "--list-models")
    assert "tiny\ttiny, for tests\n" in out and out.count("(default)") == 1


def test_the_default_model_is_one_name(capsys, home, shipped, monkeypatch):
    """A second place that names the default model."""
    monkeypatch.setattr(registry, "DEFAULT_MODEL", "tiny")
    status, out, _ = run(capsys, "--prompt", PROMPT, "--max-new-tokens", "2", "--json", "--quiet")
    assert status == 0 and json.loads(out)["drafter"]["name"] == "eagle3"
    assert "tests (default)" in run(capsys, "--list-models")[1]


def test_damaged_files_of_the_package(home, tmp_path, monkeypatch):
    """Weights that were cut or left out when the package was made."""
    shutil.copytree(home / "weights", tmp_path / "weights")
    model = entry(home / "weights" / "tiny")
    monkeypatch.setattr(registry, "_WEIGHTS", tmp_path / "weights")
    monkeypatch.setattr(registry, "MODELS", MappingProxyType({"tiny": model}))
    resolve("tiny")
    file = tmp_path / "weights" / "tiny" / "eagle3" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"eagle3.model.safetensors: sha256 is .* reinstall this package"):
        resolve("tiny")
    file.unlink()
    with pytest.raises(CheckpointError, match=r"model tiny: .* lacks eagle3/model.safetensors; reinstall"):
        resolve("tiny")


def test_a_base_by_name(home, tmp_path, monkeypatch):
    """A delta outside the package, whose base is a model that the registry knows; a known name wins over a path."""
    shutil.copytree(home / "weights" / "tiny", tmp_path / "mine")
    path = tmp_path / "mine" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base": {"model": "known", "sha256": None}}))
    with pytest.raises(CheckpointError, match="base 'known' .* neither a known model"):
        Engine.load(tmp_path / "mine")
    known = KnownModel(description="", distribution="", version="", suffix="", sha256="")
    monkeypatch.setattr(registry, "MODELS", MappingProxyType({"known": known}))
    monkeypatch.setattr(registry, "_locate", lambda name, model: home / "base")
    assert resolve(tmp_path / "mine").base == home / "base"
    assert Engine.load(tmp_path / "mine", strategy=Strategy()).config == CONFIG


def test_a_head_of_another_model_is_refused_before_loading(home, tmp_path):
    """Minutes of loading before the answer."""
    other = write_checkpoint(tmp_path / "other", config=dataclasses.replace(BASE, hidden_size=64))
    shutil.copytree(home / "weights" / "tiny" / "eagle3", other / "eagle3")
    with pytest.raises(CheckpointError, match="made for another target"):
        Engine.load(other)
    assert Engine.load(other, strategy=Strategy()).strategy.draft == "none"
