"""Trained deltas: what training changed in a base checkpoint, as a checkpoint of its own.

A directory of two files:

- `config.json`: `format` ("ssv-jax-delta"), `version`; `base`: `model` (a name that the caller knows, or a path
  from this directory) and `sha256` of its weights or null; `config`: the fields of the model that differ from the
  base's (`nsa`, an object of `NSAConfig`'s fields; `rope_theta`; `max_position`); `lora`: `scale`;
  `trained_refresh_intervals`: the layer plans that it was trained for; `training`: anything about its origin.
- `delta.safetensors`, under the parameters' flat names: `NAME`, a parameter that the base lacks or that replaces
  the base's, and `NAME.lora_a` [in, r] with `NAME.lora_b` [r, out], a low-rank change of the matrix NAME, whose
  kernel [*inputs, *outputs] is taken as [in, out].

The model's parameter is base + scale * (lora_a @ lora_b), all in float32, rounded once to the dtype asked for.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Array
from numpy.typing import DTypeLike

from .config import LlamaConfig, NSAConfig, nsa_from_mapping
from .errors import CheckpointError, list_faults
from .hf_config import _Fields
from .llama import param_shapes
from .safetensors_io import PendingTensor, SafetensorsReader, _write_file, read_json_object
from .saving import _replacing

FORMAT = "ssv-jax-delta"
WEIGHTS = "delta.safetensors"
LORA_A, LORA_B = ".lora_a", ".lora_b"
_CONFIG = "config.json"
_VERSION = 1
_FIELDS = ("format", "version", "base", "config", "lora", "trained_refresh_intervals", "training")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeltaBase:
    """The checkpoint that a delta changes.

    Args:
      model: a registry name, or a path from the delta's directory (or an absolute one).
      sha256: of its weights, as `weights_sha256` gives it; None leaves them unchecked.
    """

    model: str
    sha256: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DeltaInfo:
    """A delta's `config.json`.

    Args:
      base: what it changes.
      nsa, rope_theta, max_position: of the trained model; None keeps the base's.
      lora_scale: multiplies every low-rank product.
      refresh_intervals: the layer plans `refresh-every=N` that it was trained for; empty where unknown.
      training: about its origin, for people.
    """

    base: DeltaBase
    nsa: NSAConfig | None = None
    rope_theta: float | None = None
    max_position: int | None = None
    lora_scale: float = 1.0
    refresh_intervals: tuple[int, ...] = ()
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, base: LlamaConfig) -> LlamaConfig:
        """The trained model's configuration, from the base's.

        Raises:
          ValueError: a value out of range.
        """
        rope = base.rope if self.rope_theta is None else dataclasses.replace(base.rope, theta=self.rope_theta)
        return dataclasses.replace(
            base,
            rope=rope,
            nsa=base.nsa if self.nsa is None else self.nsa,
            max_position=self.max_position or base.max_position,
        )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """A delta read from disk.

    Args:
      info: its `config.json`.
      arrays: its tensors, in the dtypes that they are stored in.
      source: its directory.
    """

    info: DeltaInfo
    arrays: Mapping[str, np.ndarray]
    source: str


class Merger:
    """A delta that fits its base, ready to be merged parameter by parameter.

    Args:
      delta: what changes.
      base: configuration of the base.

    Attributes:
      config: of the trained model.
      adapted: parameters with a low-rank change.
      new: parameters that come from the delta alone.

    Raises:
      CheckpointError: tensors that are missing, unknown or of a wrong shape; all are listed.
    """

    def __init__(self, delta: Delta, base: LlamaConfig) -> None:
        self._delta = delta
        self.config = trained_config(delta.source, delta.info, base)
        check_arrays(delta.source, base, self.config, {name: x.shape for name, x in delta.arrays.items()})
        self.adapted = frozenset(n.removesuffix(LORA_A) for n in delta.arrays if n.endswith(LORA_A))
        self.new = frozenset(n for n in delta.arrays if not n.endswith((LORA_A, LORA_B)))

    def merged(self, name: str, base: np.ndarray | None, dtype: DTypeLike | None) -> np.ndarray:
        """One parameter of the trained model.

        Args:
          name: flat.
          base: its value in the base; float32 loses nothing of it. Not needed for `new` ones.
          dtype: of the result; None gives float32 for adapted parameters, the stored dtype for others.

        Raises:
          CheckpointError: values beyond the range of the dtype.
        """
        if name in self.new:
            value = self._delta.arrays[name]
            if dtype is not None:
                value = value.astype(np.float32)  # from bfloat16, NumPy would not see an overflow
        elif base is None:
            raise ValueError(f"{name} comes from the base, and none was given")
        elif name in self.adapted:
            a, b = (self._delta.arrays[name + end].astype(np.float32) for end in (LORA_A, LORA_B))
            change = np.float32(self._delta.info.lora_scale) * (a @ b)
            value = base.astype(np.float32) + change.reshape(base.shape)
        else:
            value = base
        if dtype is None:
            return value
        try:
            with np.errstate(over="raise"):
                return value.astype(dtype, copy=False)
        except FloatingPointError:
            raise CheckpointError(
                f"{self._delta.source}: {name} has values beyond the range of {np.dtype(dtype)}; load as bfloat16 "
                "or float32"
            ) from None


def merge(
    base_config: LlamaConfig,
    base_params: Mapping[str, Array | np.ndarray],
    delta: Delta,
    *,
    dtype: DTypeLike | None = np.float32,
) -> dict[str, np.ndarray]:
    """The trained model's parameters, in host memory.

    Args:
      base_config, base_params: the base, parameters by flat name.
      delta: what training changed.
      dtype: as for `Merger.merged`.

    Returns:
      Flat name -> array, exactly those of `param_shapes(delta.info.config(base_config))`.

    Raises:
      CheckpointError: a delta or parameters that do not fit the base's configuration.
    """
    merger = Merger(delta, base_config)
    shapes = param_shapes(merger.config)
    lost = [name for name in shapes if name not in merger.new and name not in base_params]
    if lost:
        raise CheckpointError(f"{delta.source}: {list_faults({'missing in the base': lost})}")
    params: dict[str, np.ndarray] = {}
    for name in shapes:
        base = None if name in merger.new else np.asarray(base_params[name])
        params[name] = merger.merged(name, base, dtype)
    return params


def trained_config(source: str | os.PathLike[str], info: DeltaInfo, base: LlamaConfig) -> LlamaConfig:
    """`info.config(base)`, with its errors as CheckpointError."""
    try:
        return info.config(base)
    except ValueError as error:
        raise CheckpointError(f"{Path(source) / _CONFIG}: {error}") from None


def matrix_shape(name: str, shape: Sequence[int]) -> tuple[int, int]:
    """Inputs and outputs of a kernel or table as one matrix: all axes but the last of `o` are inputs, else the first.

    Raises:
      ValueError: not a matrix.
    """
    if len(shape) < 2 or name.rsplit("/", 1)[-1] not in ("kernel", "embedding"):
        raise ValueError(f"{name} is no matrix")
    inputs = len(shape) - 1 if name.endswith("/o/kernel") else 1
    return math.prod(shape[:inputs]), math.prod(shape[inputs:])


def check_arrays(
    source: str | os.PathLike[str],
    base: LlamaConfig,
    trained: LlamaConfig,
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """A delta's tensors lead from the base to the trained model.

    Args:
      source: the delta, for messages.
      base, trained: both models.
      shapes: of the delta's tensors.

    Raises:
      CheckpointError: missing, unknown, contradicting or wrongly shaped tensors; all are listed.
    """
    before, after = param_shapes(base), param_shapes(trained)
    # Parameters that both models have in other shapes cannot come from the base.
    kept = {name for name, shape in after.items() if before.get(name) == shape}
    missing = [name for name in after if name not in kept and name not in shapes]
    unknown, twice, wrong = [], [], []

    def compare(name: str, expected: tuple[int, ...]) -> None:
        if tuple(shapes[name]) != expected:
            wrong.append(f"{name} (expected {list(expected)}, found {list(shapes[name])})")

    for name in shapes:
        end = next((end for end in (LORA_A, LORA_B) if name.endswith(end)), None)
        if end is None:
            if name not in after:
                unknown.append(name)
            else:
                compare(name, after[name])
            continue
        of = name.removesuffix(end)
        try:
            if of not in kept:
                raise ValueError
            size = matrix_shape(of, after[of])
        except ValueError:
            unknown.append(name)
            continue
        other = of + (LORA_B if end == LORA_A else LORA_A)
        if of in shapes and end == LORA_A:
            twice.append(of)
        if other not in shapes:
            missing.append(other)
        if len(shapes[name]) != 2:
            wrong.append(f"{name} (expected two axes, found {list(shapes[name])})")
        elif end == LORA_A:
            compare(name, (size[0], shapes[name][1]))
        else:
            rank = shapes[other][-1] if other in shapes and len(shapes[other]) == 2 else shapes[name][0]
            compare(name, (rank, size[1]))
    faults = list_faults(
        {
            "missing": missing,
            "unknown": sorted(unknown),
            "of a wrong shape": wrong,
            "both replaced and adapted": twice,
        }
    )
    if faults:
        raise CheckpointError(
            f"{source}: this delta does not fit its base and its configuration; {faults}. Check that it was "
            "trained from this base"
        )


def is_delta(directory: Path) -> bool:
    """Whether a directory holds a delta, complete or not."""
    if (directory / WEIGHTS).is_file():
        return True
    try:
        return read_json_object(directory / _CONFIG).get("format") == FORMAT
    except CheckpointError:
        return False


def read_delta_info(directory: str | os.PathLike[str]) -> DeltaInfo:
    """A delta's `config.json`.

    Raises:
      CheckpointError: unreadable, of another format or version, or with fields that are unknown or invalid.
    """
    path = Path(directory) / _CONFIG
    fields = read_json_object(path)
    reader = _Fields(path, fields)
    if fields.get("format") != FORMAT or fields.get("version") != _VERSION:
        raise reader.error(
            f"format {fields.get('format')!r}, version {fields.get('version')!r} is unsupported; this release "
            f"reads {FORMAT!r}, version {_VERSION}"
        )
    base, config = reader.mapping("base") or {}, reader.mapping("config") or {}
    lora = reader.mapping("lora") or {}
    unknown = sorted(set(fields) - set(_FIELDS))
    for name, part, known in (
        ("base", base, {"model", "sha256"}),
        ("config", config, {"nsa", "rope_theta", "max_position"}),
        ("lora", lora, {"scale"}),
    ):
        unknown += [f"{name}.{field}" for field in sorted(set(part) - known)]
    if unknown:
        raise reader.error(f"unknown field(s) {', '.join(unknown)}; known: {', '.join(_FIELDS)}")
    model, digest = base.get("model"), base.get("sha256")
    if not isinstance(model, str) or not model or not isinstance(digest, str | None):
        raise reader.error("field base must be an object with model, a name or a path, and sha256, a digest or null")
    intervals = fields.get("trained_refresh_intervals") or []
    if not isinstance(intervals, list) or any(type(n) is not int or n < 1 for n in intervals):
        raise reader.error(f"field trained_refresh_intervals must be a list of integers >= 1, got {intervals!r}")
    overrides = _Fields(path, config, "config.")
    nsa = overrides.mapping("nsa")
    try:
        info = DeltaInfo(
            base=DeltaBase(model=model, sha256=digest),
            nsa=None if nsa is None else nsa_from_mapping(nsa),
            rope_theta=None if config.get("rope_theta") is None else overrides.number("rope_theta"),
            max_position=None if config.get("max_position") is None else overrides.integer("max_position"),
            lora_scale=_Fields(path, lora, "lora.").number("scale", 1.0),
            refresh_intervals=tuple(intervals),
            training=reader.mapping("training") or {},
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise reader.error(str(error)) from None
    if not math.isfinite(info.lora_scale):
        raise reader.error(f"field lora.scale must be finite, got {info.lora_scale}")
    if info.max_position is not None and info.max_position < 1:
        raise reader.error(f"field config.max_position must be a positive integer, got {info.max_position}")
    return info


def read_delta(directory: str | os.PathLike[str]) -> Delta:
    """A delta, whole; whether it fits its base shows when it meets it, see `Merger`.

    Raises:
      CheckpointError: as `read_delta_info`, or tensors that are unreadable, of another dtype than float32, float16
        and bfloat16, or not finite.
    """
    where = Path(directory)
    info = read_delta_info(where)
    if not (where / WEIGHTS).is_file():
        raise CheckpointError(f"{where}: no {WEIGHTS} in this directory; copy the delta again")
    reader = SafetensorsReader(where, WEIGHTS)
    arrays = {name: reader.read(name) for name in reader.shapes}
    damaged = [name for name, value in arrays.items() if not np.isfinite(value.astype(np.float32)).all()]
    if damaged:
        raise CheckpointError(f"{where / WEIGHTS}: {list_faults({'not finite': damaged})}")
    return Delta(info=info, arrays=arrays, source=str(where))


def save_delta(
    directory: str | os.PathLike[str],
    *,
    base: DeltaBase,
    base_config: LlamaConfig,
    config: LlamaConfig,
    arrays: Mapping[str, Array | np.ndarray],
    lora_scale: float = 1.0,
    refresh_intervals: Sequence[int] = (),
    training: Mapping[str, Any] | None = None,
    dtype: DTypeLike = ml_dtypes.bfloat16,
    overwrite: bool = False,
) -> None:
    """Writes a delta, atomically; `loading.load` reads the directory.

    Args:
      directory: created, parents included.
      base: what was trained from.
      base_config: its configuration.
      config: of the trained model; may differ in `nsa`, `rope.theta` and `max_position`.
      arrays: as in `delta.safetensors`, see the module.
      lora_scale: multiplies every low-rank product.
      refresh_intervals: layer plans trained for.
      training: about its origin; must fit into JSON.
      dtype: to store in; values are rounded to nearest.
      overwrite: replace a checkpoint that is already there, with everything in its directory.

    Raises:
      CheckpointError: tensors that do not lead from `base_config` to `config` or are not finite, configurations
        that differ in more, or a directory that is in use.
    """
    target = Path(directory)
    info = DeltaInfo(
        base=base,
        nsa=None if config.nsa == base_config.nsa else config.nsa,
        rope_theta=None if config.rope.theta == base_config.rope.theta else config.rope.theta,
        max_position=None if config.max_position == base_config.max_position else config.max_position,
        lora_scale=float(lora_scale),
        refresh_intervals=tuple(refresh_intervals),
        training=dict(training or {}),
    )
    if info.config(base_config) != config:
        raise CheckpointError(
            f"{target}: the trained model differs from its base in more than nsa, rope theta and max_position (and "
            "nsa cannot be removed): a delta cannot say that, save the whole model"
        )
    check_arrays(target, base_config, config, {name: tuple(x.shape) for name, x in arrays.items()})
    stored = {name: np.asarray(value).astype(dtype) for name, value in arrays.items()}
    damaged = [name for name, value in stored.items() if not np.isfinite(value.astype(np.float32)).all()]
    if damaged:
        raise CheckpointError(f"{target}: {list_faults({f'not finite as {np.dtype(dtype)}': damaged})}")
    overrides: dict[str, Any] = {"rope_theta": info.rope_theta, "max_position": info.max_position}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    if info.nsa is not None:
        overrides["nsa"] = dataclasses.asdict(info.nsa)
    fields = {
        "format": FORMAT,
        "version": _VERSION,
        "base": dataclasses.asdict(base),
        "config": overrides,
        "lora": {"scale": info.lora_scale},
        "trained_refresh_intervals": list(info.refresh_intervals),
        "training": info.training,
    }
    text = json.dumps(fields, indent=2) + "\n"
    pending = [
        PendingTensor(name, value.shape, value.dtype, lambda value=value: value) for name, value in stored.items()
    ]
    with _replacing(target, overwrite) as work:
        _write_file(work / WEIGHTS, pending)
        (work / _CONFIG).write_text(text, encoding="utf-8")


def weights_sha256(path: str | os.PathLike[str]) -> str | None:
    """Digest of a checkpoint's weights: of its file, or of its `model*.safetensors` in the order of their names.

    None where there are no such files.
    """
    where = Path(path)
    files = [where] if where.is_file() else sorted(where.glob("model*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as opened:
            while block := opened.read(1 << 22):
                digest.update(block)
    return digest.hexdigest() if files else None
