"""Reading a `pytorch_model.bin` without PyTorch: the zip format, state dicts of dense tensors, nothing else.

The file holds a pickle, and a pickle may run any code. Here it can name an ordered dictionary, two functions
that make a tensor and the storage types, all of which are stand-ins of this module; anything else is refused
before it runs. Tensor data lies beside the pickle, uncompressed, and is read one storage at a time.
"""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .errors import CheckpointError

_STORAGES: Mapping[str, np.dtype] = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "BoolStorage": np.dtype(np.bool_),
}


@dataclasses.dataclass(frozen=True, slots=True)
class _Storage:
    key: str
    dtype: np.dtype
    count: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """A strided view of a storage, in elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Refused(Exception):
    """The pickle asks for something that a state dict of dense tensors does not need."""


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        raise _Refused("a tensor that is not a dense view of a storage")
    if len(shape) != len(strides) or not all(map(_is_index, (offset, *shape, *strides))):
        raise _Refused("a tensor with a bad shape or bad strides")
    last = offset + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if math.prod(shape) else 0
    if last >= max(storage.count, 1) or math.prod(shape) > storage.count:
        raise _Refused(f"a tensor of shape {list(shape)} beyond its storage of {storage.count} elements")
    return _Tensor(storage, offset, shape, strides)


def _rebuild_parameter(tensor: Any, *_: Any) -> Any:
    return tensor


class _Unpickler(pickle.Unpickler):
    """Knows the names below and no others."""

    _NAMES: Mapping[tuple[str, str], Callable[..., Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2"): _rebuild_tensor,
        ("torch._utils", "_rebuild_parameter"): _rebuild_parameter,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NAMES:
            return self._NAMES[module, name]
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise _Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        if isinstance(pid, tuple) and len(pid) == 5:
            kind, dtype, key, _, count = pid
            if kind == "storage" and isinstance(dtype, np.dtype) and isinstance(key, str) and _is_index(count):
                return _Storage(key, dtype, count)
        raise _Refused("a storage of an unknown kind")


class TorchZipReader:
    """The tensors of a PyTorch state dict, by name. Reads the index; the data when asked.

    Args:
      path: a `.bin` or `.pt` file that `torch.save` wrote in its zip format (the default since PyTorch 1.6).

    Raises:
      CheckpointError: another format, a damaged file, or a pickle that holds more than dense tensors.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
            index = [name for name in self._zip.namelist() if name.count("/") == 1 and name.endswith("/data.pkl")]
            if len(index) != 1:
                raise self._error("holds no state dict (one data.pkl was expected)")
            self._root = index[0].removesuffix("data.pkl")
            order = self._root + "byteorder"
            if order in self._zip.namelist() and self._zip.read(order) != b"little":
                raise self._error("is not little-endian")
            state = _Unpickler(io.BytesIO(self._zip.read(index[0]))).load()
        except (OSError, zipfile.BadZipFile) as error:
            raise self._error(f"is no complete file of PyTorch's zip format ({error})") from None
        except _Refused as refusal:
            raise self._error(f"its pickle asks for {refusal}, which is not read") from None
        except CheckpointError:
            raise
        except Exception as error:  # a damaged pickle can raise nearly anything
            raise self._error(f"its pickle cannot be read ({type(error).__name__})") from None
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(tensor, _Tensor) for name, tensor in state.items()
        ):
            raise self._error("is not a plain state dict (a mapping of names to dense tensors)")
        self._tensors: dict[str, _Tensor] = dict(state)
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: {text}; convert it to model.safetensors, for example with safetensors.torch.save_file"
        )

    def read(self, name: str) -> np.ndarray:
        """One tensor in its stored dtype.

        Raises:
          CheckpointError: its data is missing, compressed or of another size than the index says.
        """
        tensor = self._tensors[name]
        storage, size = tensor.storage, tensor.storage.dtype.itemsize
        try:
            info = self._zip.getinfo(f"{self._root}data/{storage.key}")
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != storage.count * size:
                raise self._error(f"the data of tensor {name} is not {storage.count} x {storage.dtype}")
            flat = np.frombuffer(self._zip.read(info), storage.dtype)
        except (KeyError, OSError, zipfile.BadZipFile) as error:
            raise self._error(f"the data of tensor {name} cannot be read ({error})") from None
        strides = tuple(stride * size for stride in tensor.strides)
        view = np.lib.stride_tricks.as_strided(flat[tensor.offset :], tensor.shape, strides, writeable=False)
        return np.ascontiguousarray(view)
