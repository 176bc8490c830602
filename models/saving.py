"""Writing checkpoints: Hugging Face directories and this project's own format.

Everything is written into a hidden directory beside the target and renamed into place at the end, so a save
that is killed leaves nothing that looks like a checkpoint, and replacing one keeps the old until the new is
complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Array

from .checkpoint_names import HF, Piece, copy_tensor, tensor_layout
from .config import LlamaConfig
from .errors import CheckpointError, list_faults
from .hf_config import config_to_json
from .llama import param_shapes
from .orbax_io import MANIFEST, write_checkpoint
from .safetensors_io import PendingTensor, write_safetensors

_DTYPES = ("float32", "bfloat16", "float16")
_SHARD_BYTES = 4 << 30


def export_hf(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    params: Mapping[str, Array | np.ndarray],
    *,
    tokenizer_files: Iterable[str | os.PathLike[str]] | None = None,
    overwrite: bool = False,
    max_shard_bytes: int = _SHARD_BYTES,
) -> None:
    """Writes `config.json` and safetensors in Hugging Face's layout.

    A dense model becomes Llama, Qwen2 or Qwen3, whichever has its biases and norms, which other programs
    load too; a sparse one becomes `llama-nsa` with an `nsa_config` object. `loading.load` reads both back
    bit for bit when given the same dtype.

    Args:
      directory: created, parents included.
      config: the model.
      params: flat name -> array in float32, bfloat16 or float16, kept as they are.
      tokenizer_files: files copied beside the weights under their own names.
      overwrite: replace a checkpoint that is already there, with everything in its directory.
      max_shard_bytes: size above which the weights are split over several files.

    Raises:
      CheckpointError: parameters that do not fit the config, a model that no Hugging Face class can hold, or
        a directory that is in use.
    """
    target = Path(directory)
    _check_params(target, config, params)
    embedding = params["embed/embedding"]
    fields = config_to_json(config, str(embedding.dtype))
    copies = _checked_files(target, tokenizer_files or ())

    def pending(name: str, piece: Piece) -> PendingTensor:
        def make() -> np.ndarray:
            view = piece.view(np.ascontiguousarray(params[name]))
            out = np.empty(view.shape, view.dtype)
            copy_tensor(out, view)
            return out.reshape(piece.shape)

        return PendingTensor(piece.name, piece.shape, np.dtype(params[name].dtype), make)

    layout = tensor_layout(config, HF)
    tensors = [pending(name, piece) for name, pieces in layout.items() for piece in pieces]
    with _replacing(target, overwrite) as work:
        for source in copies:
            shutil.copyfile(source, work / source.name)
        write_safetensors(work, tensors, max_shard_bytes)
        (work / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def save_orbax(
    directory: str | os.PathLike[str],
    config: LlamaConfig,
    params: Mapping[str, Array | np.ndarray],
    *,
    tokenizer_files: Iterable[str | os.PathLike[str]] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes this project's own checkpoint directory, see `orbax_io`; any `LlamaConfig` can be saved.

    Args, errors and atomicity are those of `export_hf`.
    """
    target = Path(directory)
    _check_params(target, config, params)
    copies = _checked_files(target, tokenizer_files or ())
    with _replacing(target, overwrite) as work:
        for source in copies:
            shutil.copyfile(source, work / source.name)
        write_checkpoint(work, config, params)


def _check_params(target: Path, config: LlamaConfig, params: Mapping[str, Array | np.ndarray]) -> None:
    shapes = param_shapes(config)
    faults = list_faults(
        {
            "missing": [name for name in shapes if name not in params],
            "unknown": sorted(name for name in params if name not in shapes),
            "of a wrong shape": [
                f"{name} (expected {list(shape)}, found {list(params[name].shape)})"
                for name, shape in shapes.items()
                if name in params and tuple(params[name].shape) != shape
            ],
            f"not {', '.join(_DTYPES)}": [
                f"{name} ({array.dtype})" for name, array in params.items() if str(array.dtype) not in _DTYPES
            ],
        }
    )
    if faults:
        raise CheckpointError(f"{target}: parameters that do not fit the config cannot be saved; {faults}")


def _checked_files(target: Path, files: Iterable[str | os.PathLike[str]]) -> list[Path]:
    paths = [Path(file) for file in files]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{path}: no such tokenizer file")
        if path.name in ("config.json", MANIFEST) or path.suffix == ".safetensors":
            raise CheckpointError(f"{path}: a tokenizer file of this name would replace a part of {target}")
    return paths


@contextlib.contextmanager
def _replacing(target: Path, overwrite: bool) -> Iterator[Path]:
    """A work directory that becomes `target` when the block ends without an error."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: exists and is not a directory")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise CheckpointError(f"{target}: not empty; choose another directory or pass overwrite=True")
        if not any((target / name).is_file() for name in ("config.json", MANIFEST)):
            raise CheckpointError(f"{target}: not empty and no checkpoint, so it is kept; remove it yourself")
    absolute = target.resolve()  # through a link, so that the link stays
    absolute.parent.mkdir(parents=True, exist_ok=True)
    holder = Path(tempfile.mkdtemp(prefix=f".{absolute.name}.", suffix=".incomplete", dir=absolute.parent))
    try:
        work = holder / "new"
        work.mkdir()
        yield work
        # A full directory cannot be replaced in one step: the old one steps aside, complete, and goes last.
        old = holder / "old"
        if absolute.is_dir():
            absolute.rename(old)
        try:
            work.rename(absolute)
        except OSError:
            if old.is_dir():
                old.rename(absolute)
            raise
    finally:
        shutil.rmtree(holder, ignore_errors=True)
