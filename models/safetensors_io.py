"""Reading and writing safetensors: one file, or shards with an index."""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from .errors import CheckpointError, quote_names

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES: Mapping[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      CheckpointError: missing or unreadable file, bad JSON, or JSON that is not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except json.JSONDecodeError as error:
        raise CheckpointError(
            f"{path}: not valid JSON: {error.msg} at line {error.lineno}, column {error.colno}; copy it again"
        ) from None
    except (ValueError, RecursionError) as error:  # numbers or nesting beyond what Python reads
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}; copy it again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


class SafetensorsReader:
    """The tensors of a directory, by name. Opens every shard, reads none until asked.

    Args:
      directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
      single: name of the one file, if it is another.

    Raises:
      CheckpointError: no weights, a missing shard, an index that disagrees with its shards, a tensor in two
        shards, or a file that is not valid safetensors.
    """

    def __init__(self, directory: Path, single: str = SINGLE) -> None:
        if (directory / single).is_file():
            files = [directory / single]
            index: dict[str, str] = {}
        elif (directory / INDEX).is_file():
            index = _read_index(directory / INDEX)
            files = [directory / name for name in sorted(set(index.values()))]
            missing = [file.name for file in files if not file.is_file()]
            if missing:
                raise CheckpointError(
                    f"{directory / INDEX}: {len(missing)} of {len(files)} shards missing: "
                    f"{quote_names(missing)}; download them into {directory}"
                )
        else:
            others = sorted(p.name for p in directory.glob("*.bin")) + sorted(p.name for p in directory.glob("*.pt*"))
            hint = f"; convert {quote_names(others, 3)} to safetensors first" if others else ""
            raise CheckpointError(f"{directory}: neither {SINGLE} nor {INDEX}{hint}")
        self._handles: dict[str, Any] = {}
        self._files: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        for file in files:
            self._open(file)
        lost = sorted(name for name, file in index.items() if self._files.get(name) != directory / file)
        if lost:
            raise CheckpointError(
                f"{directory / INDEX}: lists {len(lost)} tensors that their shards do not hold: "
                f"{quote_names(lost)}; index and shards are of different versions, download both again"
            )

    def _open(self, file: Path) -> None:
        try:
            handle = safe_open(file, framework="np")
            names = handle.keys()
            slices = {name: handle.get_slice(name) for name in names}
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(
                f"{file}: not a complete safetensors file ({_one_line(error)}); download or copy it again"
            ) from None
        for name, part in slices.items():
            if name in self._files:
                raise CheckpointError(f"{file}: tensor {name} is also in {self._files[name].name}")
            self._files[name] = file
            self._handles[name] = handle
            self.shapes[name] = tuple(part.get_shape())
            self.dtypes[name] = part.get_dtype()

    def read(self, name: str) -> np.ndarray:
        """One tensor, in its stored dtype (float32, float16 or bfloat16).

        Raises:
          CheckpointError: another dtype, or the file cannot be read.
        """
        code = self.dtypes[name]
        if code not in _DTYPES:
            raise CheckpointError(
                f"{self._files[name]}: tensor {name} has dtype {code}; supported: {', '.join(_DTYPES)}"
            )
        try:
            return self._handles[name].get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{self._files[name]}: tensor {name}: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _read_index(path: Path) -> dict[str, str]:
    weights = read_json_object(path).get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise CheckpointError(f"{path}: no weight_map object with tensor names and shard files")
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", ".."):
            raise CheckpointError(f"{path}: tensor {name} points to {file!r}, which is not a plain file name")
    return weights


@dataclasses.dataclass(frozen=True, slots=True)
class PendingTensor:
    """A tensor to be written; `make` is called only when its turn comes and must give a contiguous array."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_safetensors(directory: Path, tensors: Sequence[PendingTensor], max_shard_bytes: int) -> None:
    """Writes `model.safetensors`, or shards and their index above `max_shard_bytes`, one tensor at a time.

    Raises:
      CheckpointError: a dtype other than float32, float16 or bfloat16.
    """
    for tensor in tensors:
        if tensor.dtype not in _CODES:
            known = ", ".join(str(dtype) for dtype in _CODES)
            raise CheckpointError(f"{directory}: cannot write {tensor.name} as {tensor.dtype}, only {known}")
    shards: list[list[PendingTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        _write_file(directory / SINGLE, shards[0])
        return
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name, shard in zip(names, shards, strict=True):
        _write_file(directory / name, shard)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard},
    }
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write_file(path: Path, tensors: Iterable[PendingTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    # Largest alignment first, so that every tensor starts at a multiple of its item size.
    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    for tensor in ordered:
        end = offset + tensor.nbytes
        header[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in ordered:
            data = tensor.make()
            if data.shape != tensor.shape or data.dtype != tensor.dtype:
                raise AssertionError(f"{tensor.name}: made {data.dtype}{data.shape}")
            file.write(memoryview(np.ascontiguousarray(data).reshape(-1).view(np.uint8)))
