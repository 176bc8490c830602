"""Reading GGUF files: the container, and its tensors as float32.

The container is parsed here and not by `gguf.GGUFReader`, which takes seconds for a vocabulary (one memory
map slice per string) and does not notice a truncated file. Dequantisation is `gguf.dequantize`.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from .errors import CheckpointError

_MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4
# Elements that one call dequantises: small enough for the cache, large enough to hide numpy's overhead.
_SLAB = 1 << 18


@dataclasses.dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies.

    Args:
      shape: in numpy's order, slowest axis first.
      kind: how it is stored.
      offset: of its first byte in the file.
      nbytes: of its stored form.
    """

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    offset: int
    nbytes: int


class GGUFFile:
    """Metadata and tensor table of a GGUF file (version 2 or 3, little endian), checked against its size.

    Attributes:
      path: the file.
      metadata: key -> int, float, bool, str, or a list of these.
      tensors: name -> `GGUFTensor`.

    Raises:
      CheckpointError: no such file, not GGUF, truncated, or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                magic = file.read(4)
                if magic != _MAGIC:
                    raise CheckpointError(f"{path}: not a GGUF file (it starts with {magic!r})")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
        self._at = 4
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, OverflowError) as error:
            raise self._corrupt(str(error)) from None

    def _corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: corrupt GGUF header at byte {self._at}: {what}; copy it again")

    def _take(self, count: int) -> int:
        """Moves past `count` bytes and returns where they begin."""
        start = self._at
        if count > len(self._data) - start:
            raise CheckpointError(
                f"{self.path}: truncated or corrupt: its header needs {count} bytes at {start}, the file has "
                f"{len(self._data)}; copy it again"
            )
        self._at = start + count
        return start

    def _scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack_from("<" + code, self._data, self._take(size))[0]

    def _string(self) -> str:
        size = self._scalar("Q")
        start = self._take(size)
        return self._data[start : start + size].decode("utf-8")

    def _strings(self, count: int) -> list[str]:
        """An array of strings. A vocabulary has 10^5: one loop, no call for each."""
        data, at, end = self._data, self._at, len(self._data)
        unpack = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        for _ in range(count):
            self._at = at
            if end - at < 8:
                self._take(8)
            start = at + 8
            at = start + unpack(data, at)[0]
            if at > end:
                self._take(at - self._at)
            strings.append(data[start:at].decode("utf-8"))
        self._at = at
        return strings

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner, count = self._scalar("I"), self._scalar("Q")
            if inner in _SCALARS:
                code = _SCALARS[inner]
                start = self._take(count * struct.calcsize("<" + code))
                return list(struct.unpack_from(f"<{count}{code}", self._data, start))
            if inner == _STRING:
                return self._strings(count)
            raise self._corrupt(f"array of type {inner}")
        if kind in _SCALARS:
            return self._scalar(_SCALARS[kind])
        raise self._corrupt(f"value of type {kind}")

    def _parse(self) -> None:
        version = self._scalar("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = "a big-endian file" if swapped in (2, 3) else f"GGUF version {version}"
            raise CheckpointError(f"{self.path}: {what} is unsupported; only little-endian versions 2 and 3")
        num_tensors, num_values = self._scalar("Q"), self._scalar("Q")
        for _ in range(num_values):
            key = self._string()
            if key in self.metadata:
                raise self._corrupt(f"metadata key {key} twice")
            self.metadata[key] = self._value(self._scalar("I"))
        found: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, num_dims = self._string(), self._scalar("I")
            if not 1 <= num_dims <= _MAX_DIMS:
                raise self._corrupt(f"tensor {name} has {num_dims} dimensions")
            dims = tuple(self._scalar("Q") for _ in range(num_dims))
            found.append((name, dims[::-1], self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"general.alignment is {alignment}")
        base = -(-self._at // alignment) * alignment
        for name, shape, code, offset in found:
            self._add_tensor(name, shape, code, base + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], code: int, offset: int) -> None:
        if name in self.tensors:
            raise self._corrupt(f"tensor {name} twice")
        try:
            kind = gguf.GGMLQuantizationType(code)
        except ValueError:
            raise self._corrupt(f"tensor {name} is of unknown type {code}") from None
        block, size = gguf.GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._corrupt(f"tensor {name} has rows of {shape[-1]}, {kind.name} needs multiples of {block}")
        nbytes = math.prod(shape) // block * size
        if offset + nbytes > len(self._data):
            raise CheckpointError(
                f"{self.path}: truncated: tensor {name} ends at byte {offset + nbytes}, the file has "
                f"{len(self._data)}; copy it again"
            )
        self.tensors[name] = GGUFTensor(shape, kind, offset, nbytes)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensor name -> shape, slowest axis first."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor, dequantised to float32. Thread-safe.

        Raises:
          CheckpointError: a storage type that `gguf.dequantize` does not know.
        """
        tensor = self.tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.nbytes, tensor.offset)
        if tensor.kind == gguf.GGMLQuantizationType.F32:
            return raw.view(np.float32).reshape(tensor.shape)
        block, size = gguf.GGML_QUANT_SIZES[tensor.kind]
        out = np.empty(math.prod(tensor.shape), np.float32)
        step = max(1, _SLAB // block)
        try:
            # Blocks do not know about rows, so slabs of blocks are rows as good as the tensor's own.
            for first in range(0, tensor.nbytes // size, step):
                slab = raw[first * size : (first + step) * size].reshape(1, -1)
                values = gguf.dequantize(slab, tensor.kind).reshape(-1)
                out[first * block : first * block + values.size] = values
        except NotImplementedError:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {tensor.kind.name}, which the gguf package cannot "
                "dequantise; use a file of another quantisation, such as Q8_0 or F16"
            ) from None
        return out.reshape(tensor.shape)
