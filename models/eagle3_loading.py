"""Checkpoints of EAGLE-3 heads: reads the official `pytorch_model.bin` and SpecForge's safetensors, writes those.

Every tensor must be expected and every expected one present with its exact shape.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Array
from numpy.typing import DTypeLike
from safetensors import TensorSpec, serialize_file

from .checkpoint_names import Piece, _same, _transposed, copy_tensor
from .config import LlamaConfig
from .eagle3 import param_shapes
from .eagle3_config import (
    NUM_TAPS,
    Eagle3Config,
    TapConvention,
    eagle3_config_to_json,
    parse_eagle3_config,
)
from .errors import CheckpointError, quote_names
from .loading import _check_tensors, _float_dtype
from .safetensors_io import INDEX, SINGLE, SafetensorsReader, read_json_object
from .saving import _replacing
from .torch_zip import TorchZipReader

_TORCH = "pytorch_model.bin"
# Draft id -> target id as an offset, and which target ids the head can propose.
_OFFSETS, _MEMBERS = "d2t", "t2d"
_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16))


@dataclasses.dataclass(frozen=True, slots=True)
class Eagle3Checkpoint:
    """A draft head read from disk.

    Attributes:
      config: what it is.
      params: flat parameter name -> array, exactly `eagle3.param_shapes(config)`.
      source: the directory it came from.
    """

    config: Eagle3Config
    params: dict[str, np.ndarray]
    source: str


class _AnyDtypeReader(SafetensorsReader):
    """Reads integer and boolean tensors as well."""

    def read(self, name: str) -> np.ndarray:
        if self.dtypes[name] in ("I64", "I32", "BOOL"):
            return self._handles[name].get_tensor(name)
        return super().read(name)


_Source = TorchZipReader | _AnyDtypeReader


class _Renamed:
    """A source under canonical names: no `model.` in front, `layers.0.` for `midlayer.`."""

    def __init__(self, source: _Source, where: Path) -> None:
        self._source = source
        self._names: dict[str, str] = {}
        for name in source.shapes:
            canonical = name.removeprefix("model.")
            if canonical.startswith("midlayer."):
                canonical = "layers.0." + canonical.removeprefix("midlayer.")
            if canonical in self._names:
                raise CheckpointError(f"{where}: tensors {self._names[canonical]} and {name} are the same parameter")
            self._names[canonical] = name
        self.shapes = {canonical: tuple(source.shapes[name]) for canonical, name in self._names.items()}

    def read(self, name: str) -> np.ndarray:
        return self._source.read(self._names[name])


def eagle3_layout(config: Eagle3Config) -> dict[str, tuple[Piece, ...]]:
    """The checkpoint tensors, in canonical names, behind every parameter except the vocabulary map."""
    e, v, width = config.hidden_size, config.draft_vocab_size, config.target_hidden_size
    layout: dict[str, tuple[Piece, ...]] = {}

    def one(flat: str, name: str, shape: tuple[int, ...], view: Callable[[np.ndarray], np.ndarray] = _same) -> None:
        layout[flat] = (Piece(name, shape, view),)

    if config.own_embedding:
        one("embed/embedding", "embed_tokens.weight", (config.vocab_size, e))
    if config.tap_norm == "each":
        for i in range(NUM_TAPS):
            one(f"tap_norms/{i}/scale", f"fc_norm.{i}.weight", (width,))
    elif config.tap_norm == "concat":
        one("tap_norm/scale", "input_norm.weight", (NUM_TAPS * width,))
    one("fc/kernel", "fc.weight", (e, NUM_TAPS * width), _transposed)
    for i in range(config.num_layers):
        for flat, pieces in _layer_layout(config, f"layers.{i}.", first=i == 0).items():
            layout[f"layers/{i}/{flat}"] = pieces
    one("norm/scale", "norm.weight", (e,))
    if config.own_head:
        one("lm_head/kernel", "lm_head.weight", (v, e), _transposed)
    return layout


def _layer_layout(config: Eagle3Config, prefix: str, *, first: bool) -> dict[str, tuple[Piece, ...]]:
    e, f, d, g = config.hidden_size, config.intermediate_size, config.head_dim, config.group
    inputs = 2 * e if first else e
    queries, keys = config.num_heads * d, config.num_kv_heads * d
    attention, mlp = prefix + "self_attn.", prefix + "mlp."
    if first:
        layout: dict[str, tuple[Piece, ...]] = {
            "token_norm/scale": (Piece(prefix + "input_layernorm.weight", (e,), _same),),
            "feature_norm/scale": (Piece(prefix + "hidden_norm.weight", (e,), _same),),
        }
    else:
        layout = {"attn_norm/scale": (Piece(prefix + "input_layernorm.weight", (e,), _same),)}
    layout["attn/qkv/kernel"] = (
        Piece(attention + "q_proj.weight", (queries, inputs), lambda a: a[:, :, :g].transpose(1, 2, 3, 0)),
        Piece(attention + "k_proj.weight", (keys, inputs), lambda a: a[:, :, g].transpose(1, 2, 0)),
        Piece(attention + "v_proj.weight", (keys, inputs), lambda a: a[:, :, g + 1].transpose(1, 2, 0)),
    )
    if config.qkv_bias:
        layout["attn/qkv/bias"] = (
            Piece(attention + "q_proj.bias", (queries,), lambda a: a[:, :g]),
            Piece(attention + "k_proj.bias", (keys,), lambda a: a[:, g]),
            Piece(attention + "v_proj.bias", (keys,), lambda a: a[:, g + 1]),
        )
    layout["attn/o/kernel"] = (Piece(attention + "o_proj.weight", (e, queries), _transposed),)
    if config.o_bias:
        layout["attn/o/bias"] = (Piece(attention + "o_proj.bias", (e,), _same),)
    layout["mlp_norm/scale"] = (Piece(prefix + "post_attention_layernorm.weight", (e,), _same),)
    layout["mlp/gate_up/kernel"] = (
        Piece(mlp + "gate_proj.weight", (f, e), lambda a: a[:, 0].T),
        Piece(mlp + "up_proj.weight", (f, e), lambda a: a[:, 1].T),
    )
    layout["mlp/down/kernel"] = (Piece(mlp + "down_proj.weight", (e, f), _transposed),)
    if config.mlp_bias:
        layout["mlp/gate_up/bias"] = (
            Piece(mlp + "gate_proj.bias", (f,), lambda a: a[0]),
            Piece(mlp + "up_proj.bias", (f,), lambda a: a[1]),
        )
        layout["mlp/down/bias"] = (Piece(mlp + "down_proj.bias", (e,), _same),)
    return layout


def _read_config(
    where: Path, target: LlamaConfig, tap_convention: TapConvention | None
) -> tuple[Eagle3Config, _Renamed]:
    if not where.is_dir():
        raise CheckpointError(f"{where}: no such directory; give the one that holds the head and its config.json")
    fields = read_json_object(where / "config.json")
    source = _Renamed(_open(where), where)
    return parse_eagle3_config(where / "config.json", fields, source.shapes, target, tap_convention), source


def read_eagle3_config(
    directory: str | os.PathLike[str], target: LlamaConfig, *, tap_convention: TapConvention | None = None
) -> Eagle3Config:
    """What `load_eagle3` would read, checked against the target, without the weights. Errors as `load_eagle3`."""
    return _read_config(Path(directory), target, tap_convention)[0]


def load_eagle3(
    directory: str | os.PathLike[str],
    target: LlamaConfig,
    *,
    tap_convention: TapConvention | None = None,
    target_params: Mapping[str, Array | np.ndarray] | None = None,
    dtype: DTypeLike | None = np.float32,
) -> Eagle3Checkpoint:
    """Reads a draft head; it is checked against the target before any weight is read.

    Args:
      directory: holds `config.json` and `model.safetensors` (or shards with an index) or `pytorch_model.bin`.
      target: what the head drafts for.
      tap_convention: what the tap ids mean, needed where they are not the usual ones, see `resolve_taps`.
      target_params: of the target, needed only for a head without an output matrix, which gets the target's.
      dtype: of the floating-point parameters, None to keep each as it is stored.

    Raises:
      CheckpointError: anything unreadable, unsupported or inconsistent, on one line with the file and a
        remedy.
    """
    where = Path(directory)
    wanted = None if dtype is None else _float_dtype(dtype)
    config, source = _read_config(where, target, tap_convention)
    layout = eagle3_layout(config)
    maps = {name for name in (_OFFSETS, _MEMBERS) if name in source.shapes}
    _check_tensors(where, layout, source.shapes, maps)
    target_ids = _read_target_ids(where, config, source)
    if not config.own_head and target_params is None:
        raise CheckpointError(
            f"{where}: has no lm_head.weight, so the head takes the target's output rows: pass the target's parameters"
        )

    shapes = param_shapes(config)
    params: dict[str, np.ndarray] = {}
    for flat, pieces in layout.items():
        parts = [source.read(piece.name) for piece in pieces]
        stored = {part.dtype for part in parts}
        if len(stored) > 1 or not stored <= set(_FLOATS):
            raise CheckpointError(
                f"{where}: {quote_names([piece.name for piece in pieces])} must be of one dtype out of "
                f"float32, float16 and bfloat16, found {', '.join(sorted(map(str, stored)))}"
            )
        out = np.empty(shapes[flat], wanted or parts[0].dtype)
        for piece, part in zip(pieces, parts, strict=True):
            view = piece.view(out)
            with np.errstate(over="ignore"):
                copy_tensor(view, part.reshape(view.shape))
        if not np.isfinite(out).all():
            raise CheckpointError(
                f"{where}: {quote_names([piece.name for piece in pieces])}: not finite as {out.dtype}"
            )
        params[flat] = out
    if not config.own_head:
        assert target_params is not None
        params["lm_head/kernel"] = target_head(target, target_params, target_ids, params["fc/kernel"].dtype)
    if config.reduced_vocab:
        params["target_ids"] = target_ids
    return Eagle3Checkpoint(config, {flat: params[flat] for flat in shapes}, str(where))


def _open(where: Path) -> _Source:
    if not any((where / name).is_file() for name in (SINGLE, INDEX)) and (where / _TORCH).is_file():
        return TorchZipReader(where / _TORCH)
    return _AnyDtypeReader(where)


def target_head(
    target: LlamaConfig, params: Mapping[str, Array | np.ndarray], target_ids: np.ndarray, dtype: np.dtype
) -> np.ndarray:
    """The target's output matrix [E, Vd] at some of its ids."""
    if target.tie_embeddings:
        return np.ascontiguousarray(np.asarray(params["embed/embedding"])[target_ids].T.astype(dtype))
    return np.ascontiguousarray(np.asarray(params["lm_head/kernel"])[:, target_ids].astype(dtype))


def _read_target_ids(where: Path, config: Eagle3Config, source: _Renamed) -> np.ndarray:
    """Target id of every draft id, from maps that must agree with each other and with the config."""
    count, vocab = config.draft_vocab_size, config.vocab_size
    for name, shape in ((_OFFSETS, (count,)), (_MEMBERS, (vocab,))):
        found = source.shapes.get(name)
        if found is None and config.reduced_vocab:
            raise CheckpointError(
                f"{where}: tensor {name} is missing: with draft_vocab_size {count} of {vocab} the ids of the "
                "draft vocabulary cannot be guessed"
            )
        if found is not None and found != shape:
            raise CheckpointError(f"{where}: {name} has shape {list(found)}, expected {list(shape)}")
    offsets = source.read(_OFFSETS) if _OFFSETS in source.shapes else np.zeros(count, np.int64)
    if offsets.dtype.kind != "i":
        raise CheckpointError(f"{where}: {_OFFSETS} has dtype {offsets.dtype}, expected integers")
    ids = np.arange(count, dtype=np.int64) + offsets.astype(np.int64)
    if ids.min() < 0 or ids.max() >= vocab:
        raise CheckpointError(
            f"{where}: {_OFFSETS} leads to target ids {ids.min()} to {ids.max()}, outside 0 to {vocab - 1}"
        )
    if np.unique(ids).size != count:
        raise CheckpointError(
            f"{where}: {_OFFSETS} leads to only {np.unique(ids).size} different target ids for {count} draft "
            "ids; it must hold offsets (target id minus draft id)"
        )
    if not config.reduced_vocab and offsets.any():
        raise CheckpointError(f"{where}: {_OFFSETS} moves ids although the draft vocabulary is the whole one")
    if _MEMBERS in source.shapes:
        members = source.read(_MEMBERS)
        if members.dtype != np.bool_:
            raise CheckpointError(f"{where}: {_MEMBERS} has dtype {members.dtype}, expected booleans")
        if members.sum() != count or not members[ids].all():
            raise CheckpointError(
                f"{where}: {_MEMBERS} marks {members.sum()} target ids, which are not the {count} that {_OFFSETS} names"
            )
    return ids.astype(np.int32)


def export_eagle3(
    directory: str | os.PathLike[str],
    config: Eagle3Config,
    params: Mapping[str, Array | np.ndarray],
    *,
    overwrite: bool = False,
) -> None:
    """Writes `config.json` and `model.safetensors` in SpecForge's names; `load_eagle3` reads back the same bits.

    Args:
      directory: created, parents included.
      config: the head. Where it shares the target's embedding or output matrix, those are not written.
      params: flat name -> array, exactly those of `eagle3.param_shapes`; dtypes are kept.
      overwrite: replace a checkpoint that is already there, with everything in its directory.

    Raises:
      CheckpointError: parameters that do not fit the config, or a directory that is in use.
    """
    target = Path(directory)
    expected = param_shapes(config)
    wrong = sorted(
        name
        for name in {*expected, *params}
        if name not in expected or name not in params or tuple(params[name].shape) != expected[name]
    )
    if wrong:
        raise CheckpointError(f"{target}: parameters do not fit this config: {quote_names(wrong)}")
    arrays: dict[str, np.ndarray] = {}
    for flat, pieces in eagle3_layout(config).items():
        whole = np.ascontiguousarray(params[flat])
        if whole.dtype not in _FLOATS:
            raise CheckpointError(f"{target}: {flat} has dtype {whole.dtype}, expected float32, float16 or bfloat16")
        for piece in pieces:
            name = piece.name
            if name.startswith("layers.0."):
                name = "midlayer." + name.removeprefix("layers.0.")
            arrays[name] = np.ascontiguousarray(piece.view(whole)).reshape(piece.shape)
    ids = np.arange(config.draft_vocab_size)
    if config.reduced_vocab:
        targets = np.asarray(params["target_ids"], np.int64)
        members = np.zeros(config.vocab_size, np.bool_)
        if targets.min() < 0 or targets.max() >= config.vocab_size or np.unique(targets).size != ids.size:
            raise CheckpointError(f"{target}: target_ids must be different ids below {config.vocab_size}")
        members[targets] = True
        arrays |= {_OFFSETS: targets - ids, _MEMBERS: members}
    fields = eagle3_config_to_json(config, str(params["fc/kernel"].dtype))
    with _replacing(target, overwrite) as work:
        specs = {
            name: TensorSpec(
                dtype=str(array.dtype),
                shape=list(array.shape),
                data_ptr=array.ctypes.data,
                data_len=array.nbytes,
            )
            for name, array in arrays.items()
        }
        serialize_file(specs, work / SINGLE, metadata={"format": "pt"})
        (work / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
