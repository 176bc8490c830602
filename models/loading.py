"""Loading checkpoints: Hugging Face, llama-nsa and fla directories, GGUF files, the project's own format, deltas.

Every tensor of a checkpoint must be expected and every expected one present with its exact shape: nothing is
skipped or guessed silently. Tensors are read, converted and released one by one on a few threads, so the
peak is the model in the target dtype plus a handful of tensors.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import DTypeLike

from .checkpoint_names import GGUF, Naming, Piece, copy_tensor, tensor_layout
from .config import LlamaConfig, NSAConfig
from .delta import (
    DeltaInfo,
    Merger,
    is_delta,
    read_delta,
    read_delta_info,
    trained_config,
    weights_sha256,
)
from .errors import CheckpointError, list_faults
from .gguf_config import ROPE_FREQS, parse_gguf_config
from .gguf_io import GGUFFile
from .hf_config import parse_config
from .llama import param_shapes
from .orbax_io import MANIFEST, OrbaxReader, read_config
from .safetensors_io import SafetensorsReader, read_json_object

CheckpointFormat = Literal["hf", "gguf", "ssv-jax", "delta"]
Progress = Callable[[int, int], None]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
_THREADS = 8
# Saturates the sigmoid in float32: a closed gate passes 4e-18 of its branch, an open one all of it.
_GATE_LOGIT = 40.0


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model read from disk.

    Attributes:
      config: what it is.
      params: flat parameter name -> array, exactly `param_shapes(config)`.
      source: the path it came from.
      notes: what a user should know about the weights, one sentence each.
      tokenizer_source: path that a tokenizer can be built from, or None.
      refresh_intervals: layer plans `refresh-every=N` that the weights were trained for; empty where unknown.
    """

    config: LlamaConfig
    params: dict[str, np.ndarray]
    source: str
    notes: tuple[str, ...] = ()
    tokenizer_source: str | None = None
    refresh_intervals: tuple[int, ...] = ()


@runtime_checkable
class _Reader(Protocol):
    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


def detect_format(path: str | os.PathLike[str]) -> CheckpointFormat:
    """Which kind of checkpoint lies at a path.

    Raises:
      CheckpointError: nothing there, or nothing that is known.
    """
    where = Path(path)
    if where.is_dir():
        if (where / MANIFEST).is_file():
            return "ssv-jax"
        if is_delta(where):
            return "delta"
        if (where / "config.json").is_file():
            return "hf"
        found = sorted(file.name for file in where.glob("*.gguf"))
        hint = f"; to load a GGUF file give its path, such as {where / found[0]}" if found else ""
        raise CheckpointError(f"{where}: no config.json in this directory{hint}")
    if not where.exists():
        raise CheckpointError(f"{where}: no such file or directory")
    if where.suffix == ".safetensors":
        raise CheckpointError(f"{where}: give the directory that holds this file and its config.json")
    return "gguf"


def load(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    nsa: NSAConfig | None | Literal["checkpoint"] = "checkpoint",
    rope_theta: float | None = None,
    dtype: DTypeLike | None = np.float32,
    progress: Progress | None = None,
) -> Checkpoint:
    """Reads a checkpoint.

    Formats: a directory with `config.json` and safetensors of Llama, Mistral (no sliding window), Qwen2 or
    Qwen3; the same as `llama-nsa` (see `hf_config`) or fla's `nsa`; a GGUF file of the llama architecture,
    dequantised; a directory written by `saving.save_orbax`; a delta (see `delta`), merged into its base.

    Args:
      path: file or directory.
      base: the checkpoint that a delta changes; None takes the path that the delta names. Other formats ignore it.
      nsa: the sparse attention to run: "checkpoint" takes what the checkpoint says (dense models stay
        dense), a config replaces it, None runs a sparse checkpoint with dense attention, leaving gates and
        compressors out. A dense checkpoint gets gates that open the selected branch only, which is dense
        attention wherever every block is selected; that needs a compressor without parameters.
      rope_theta: replaces the rotary base of the checkpoint.
      dtype: of the parameters: float32, bfloat16 or float16, or None to keep each tensor as it is stored
        (quantised ones and those that a delta adapts become float32).
      progress: called with (tensors done, tensors in all) after each tensor, on the calling thread.

    Returns:
      The checkpoint. Values are exact when the dtype can hold the stored ones, rounded to nearest otherwise.

    Raises:
      CheckpointError: anything unreadable, unsupported or inconsistent, on one line with the file and a
        remedy.
    """
    source = Path(path)
    target = None if dtype is None else _float_dtype(dtype)
    kind = detect_format(source)
    if kind == "delta":
        return _load_delta(source, base, nsa, rope_theta, target, progress)
    return _load_whole(source, kind, nsa, rope_theta, target, progress, None)


def _load_whole(
    source: Path,
    kind: CheckpointFormat,
    nsa: NSAConfig | None | Literal["checkpoint"],
    rope_theta: float | None,
    target: np.dtype | None,
    progress: Progress | None,
    merger: Merger | None,
) -> Checkpoint:
    """Any format but a delta; `merger` changes parameters as they are read."""
    if kind == "ssv-jax":
        return _load_own(source, nsa, rope_theta, target, progress, merger)
    opened = _open(source, kind)
    notes = list(opened.notes)
    config = _apply_overrides(opened.config, nsa, rope_theta, source, notes)
    # What is read: a dense checkpoint has nothing of the sparse attention that it shall run.
    stored = config.dense() if opened.config.nsa is None else config
    _check_layers(source, stored, opened.reader.shapes)
    layout = tensor_layout(stored, opened.naming)
    unused = set(opened.ignorable)
    if config.nsa is None and opened.config.nsa is not None:
        full = tensor_layout(opened.config, opened.naming)
        unused |= {piece.name for name in full.keys() - layout.keys() for piece in full[name]}
    head = opened.naming.templates["head"] + ".weight"
    if config.tie_embeddings:
        unused.add(head)
    _check_tensors(source, layout, opened.reader.shapes, unused)
    if config.tie_embeddings and head in opened.reader.shapes:
        _check_tied(source, opened.reader, opened.naming.templates["embed"] + ".weight", head)
    params = _read_params(source, stored, layout, opened.reader, target, progress, merger)
    if config.nsa is not None and stored.nsa is None:
        params = _with_selected_gates(config, params)
    return Checkpoint(config, params, str(source), tuple(notes), _tokenizer_source(source))


def read_model_config(
    path: str | os.PathLike[str],
    *,
    base: str | os.PathLike[str] | None = None,
    nsa: NSAConfig | None | Literal["checkpoint"] = "checkpoint",
    rope_theta: float | None = None,
) -> LlamaConfig:
    """The model that `load` would give, without reading its weights. Arguments and errors as `load`."""
    source = Path(path)
    kind = detect_format(source)
    if kind == "delta":
        info = read_delta_info(source)
        stored = trained_config(source, info, read_model_config(delta_base(source, info, base, weights=False)))
    else:
        stored = read_config(source) if kind == "ssv-jax" else _open(source, kind).config
    return _apply_overrides(stored, nsa, rope_theta, source, [])


@dataclasses.dataclass(frozen=True, slots=True)
class _Opened:
    """A checkpoint of others, its configuration read and its tensors at hand."""

    config: LlamaConfig
    naming: Naming
    reader: _Reader
    ignorable: frozenset[str]
    notes: tuple[str, ...] = ()


def _open(source: Path, kind: CheckpointFormat) -> _Opened:
    if kind == "gguf":
        file = GGUFFile(source)
        quantised = sorted({t.kind.name for t in file.tensors.values()} - {"F32", "F16", "BF16"})
        notes = [f"weights dequantised from {', '.join(quantised)}: not the original model's"] if quantised else []
        config = parse_gguf_config(file)
        return _Opened(config, GGUF, file, frozenset({ROPE_FREQS}), tuple(notes))
    path = source / "config.json"
    fields = read_json_object(path)
    reader = SafetensorsReader(source)
    parsed = parse_config(path, fields, reader.shapes)
    # Old Llama checkpoints carry the rotary frequencies, which the config determines.
    ignorable = frozenset(name for name in reader.shapes if name.endswith(".rotary_emb.inv_freq"))
    return _Opened(parsed.config, parsed.naming, reader, ignorable)


def _float_dtype(dtype: DTypeLike) -> np.dtype:
    found = np.dtype(dtype)
    if found.name not in ("float32", "bfloat16", "float16"):
        raise ValueError(f"dtype must be float32, bfloat16 or float16, got {found}")
    return found


def _tokenizer_source(source: Path) -> str | None:
    if source.is_file() or any((source / name).is_file() for name in _TOKENIZER_FILES):
        return str(source)
    return None


def _apply_overrides(
    config: LlamaConfig,
    nsa: NSAConfig | None | Literal["checkpoint"],
    rope_theta: float | None,
    source: Path,
    notes: list[str],
) -> LlamaConfig:
    """The model to run, from the stored one and the caller's wishes."""
    if rope_theta is not None and rope_theta != config.rope.theta:
        notes.append(f"rope theta {rope_theta:g} instead of the checkpoint's {config.rope.theta:g}")
        rope = dataclasses.replace(config.rope, theta=float(rope_theta))
        config = dataclasses.replace(config, rope=rope)
    if nsa == "checkpoint":
        return config
    if nsa is not None and not isinstance(nsa, NSAConfig):
        raise ValueError(f"nsa must be an NSAConfig, None or 'checkpoint', got {nsa!r}")
    if nsa is None:
        if config.nsa is not None:
            notes.append("dense attention: the checkpoint's branch gates and compressors are not used")
        return config.dense()
    if config.nsa is not None:
        if nsa != config.nsa:
            notes.append("sparse attention settings differ from those that the checkpoint was trained with")
        return dataclasses.replace(config, nsa=nsa)
    if nsa.trained_parts:
        raise CheckpointError(
            f"{source}: a dense checkpoint has no weights for {' and '.join(nsa.trained_parts)}; train them "
            "first, or use cmp_fn=mean with cmp_pe=none"
        )
    notes.append(
        "dense checkpoint run with sparse attention: gates set so that only the selected branch is open, "
        "nothing has been trained for it"
    )
    return dataclasses.replace(config, nsa=dataclasses.replace(nsa, gate_bias=True))


def _check_layers(source: Path, config: LlamaConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Before anything is sized by a number of layers that a damaged file may claim."""
    if config.num_layers > len(shapes):
        raise CheckpointError(
            f"{source}: {config.num_layers} layers cannot be made of its {len(shapes)} tensors; check its config"
        )


def _check_tensors(
    source: Path,
    layout: Mapping[str, tuple[Piece, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    unused: set[str],
) -> None:
    expected = {piece.name: piece.shape for pieces in layout.values() for piece in pieces}
    faults = list_faults(
        {
            "missing": [name for name in expected if name not in shapes],
            "unknown": sorted(n for n in shapes if n not in expected and n not in unused),
            "of a wrong shape": [
                f"{name} (expected {list(shape)}, found {list(shapes[name])})"
                for name, shape in expected.items()
                if name in shapes and tuple(shapes[name]) != shape
            ],
        }
    )
    if faults:
        raise CheckpointError(
            f"{source}: its tensors do not fit its configuration; {faults}. Check that all files belong to "
            "one supported model"
        )


def _check_tied(source: Path, reader: _Reader, embed: str, head: str) -> None:
    ours, theirs = reader.read(embed), reader.read(head)
    if ours.dtype == theirs.dtype:  # bits, without wide copies of what may be a gigabyte
        bits = f"u{ours.dtype.itemsize}"
        ours, theirs = ours.view(bits), theirs.view(bits)
    if not np.array_equal(ours, theirs):
        raise CheckpointError(
            f"{source}: tie_word_embeddings is true, but {head} differs from {embed}; set it to false in "
            "config.json if the head is to be used"
        )


def _read_params(
    source: Path,
    config: LlamaConfig,
    layout: Mapping[str, tuple[Piece, ...]],
    reader: _Reader,
    dtype: np.dtype | None,
    progress: Progress | None,
    merger: Merger | None = None,
) -> dict[str, np.ndarray]:
    shapes = param_shapes(config)
    if shapes.keys() != layout.keys():
        differing = sorted(shapes.keys() ^ layout.keys())
        raise AssertionError(f"tensor layout and parameter table differ: {differing}")
    total = sum(len(pieces) for pieces in layout.values())

    def read(flat: str) -> np.ndarray:
        pieces = layout[flat]
        first = reader.read(pieces[0].name)
        wanted = np.dtype(np.float32) if merger is not None and flat in merger.adapted else dtype
        out = np.empty(shapes[flat], first.dtype if wanted is None else wanted)
        for index, piece in enumerate(pieces):
            data = first if index == 0 else reader.read(piece.name)
            if wanted is None and data.dtype != out.dtype:
                raise CheckpointError(
                    f"{source}: {piece.name} is {data.dtype}, but {pieces[0].name}, which shares a parameter "
                    f"with it, is {out.dtype}; load with an explicit dtype"
                )
            view = piece.view(out)
            try:
                with np.errstate(over="raise"):
                    copy_tensor(view, data.reshape(view.shape))
            except FloatingPointError:
                raise CheckpointError(
                    f"{source}: {piece.name} has values beyond the range of {out.dtype}; load as bfloat16 or float32"
                ) from None
        return out if merger is None else merger.merged(flat, out, dtype)

    params: dict[str, np.ndarray] = {}
    done = 0
    workers = min(_THREADS, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        largest_first = sorted(layout, key=lambda flat: -math.prod(shapes[flat]))
        futures = {pool.submit(read, flat): flat for flat in largest_first}
        try:
            for future in concurrent.futures.as_completed(futures):
                params[futures[future]] = future.result()
                done += len(layout[futures[future]])
                if progress is not None:
                    progress(done, total)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {flat: params[flat] for flat in layout}


def _with_selected_gates(config: LlamaConfig, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds gates that are open for the selected branch alone, whatever the input."""
    dtype = params["embed/embedding"].dtype
    logits = np.array([-_GATE_LOGIT, _GATE_LOGIT, -_GATE_LOGIT], dtype)
    full: dict[str, np.ndarray] = {}
    for name, shape in param_shapes(config).items():
        if name in params:
            full[name] = params[name]
        elif name.endswith("/attn/gate/kernel"):
            full[name] = np.zeros(shape, dtype)
        elif name.endswith("/attn/gate/bias"):
            full[name] = np.broadcast_to(logits, shape).copy()
        else:
            raise AssertionError(f"no initial value for {name}")
    return full


def _load_own(
    source: Path,
    nsa: NSAConfig | None | Literal["checkpoint"],
    rope_theta: float | None,
    dtype: np.dtype | None,
    progress: Progress | None,
    merger: Merger | None,
) -> Checkpoint:
    """A directory of `save_orbax`; its names are the parameters' own."""
    notes: list[str] = []
    stored = read_config(source)
    config = _apply_overrides(stored, nsa, rope_theta, source, notes)
    read_as = config.dense() if stored.nsa is None else config
    reader = OrbaxReader(source)
    _check_layers(source, read_as, reader.shapes)
    shapes = param_shapes(read_as)
    layout = {name: (Piece(name, shape, lambda a: a),) for name, shape in shapes.items()}
    unused = set(param_shapes(stored)) - set(shapes) if config.nsa is None else set()
    _check_tensors(source, layout, reader.shapes, unused)
    arrays = reader.read_all()
    params: dict[str, np.ndarray] = {}
    for name in shapes:
        array = arrays.pop(name)
        if merger is not None:
            array = merger.merged(name, array, dtype)
        try:
            with np.errstate(over="raise"):
                params[name] = array if dtype is None else array.astype(dtype, copy=False)
        except FloatingPointError:
            raise CheckpointError(
                f"{source}: {name} has values beyond the range of {dtype}; load as bfloat16 or float32"
            ) from None
        if progress is not None:
            progress(len(params), len(shapes))
    if stored.nsa is None and config.nsa is not None:
        params = _with_selected_gates(config, params)
    return Checkpoint(config, params, str(source), tuple(notes), _tokenizer_source(source))


def delta_base(source: Path, info: DeltaInfo, base: str | os.PathLike[str] | None, *, weights: bool = True) -> Path:
    """The checkpoint under a delta.

    Args:
      source: the delta's directory.
      info: its `config.json`.
      base: where the checkpoint is; None takes the path that the delta names.
      weights: whether its weights will be used, and so are checked, which reads them.

    Raises:
      CheckpointError: none there, another delta, or other weights than the delta was trained from.
    """
    where = source / info.base.model if base is None else Path(base)
    if not where.exists():
        raise CheckpointError(
            f"{source}: the base {info.base.model!r} of this delta is neither a known model nor a path from its "
            "directory; set base.model in its config.json"
        )
    if detect_format(where) == "delta":
        raise CheckpointError(f"{source}: its base {where} is a delta too; name a whole checkpoint as base")
    expected = info.base.sha256
    if weights and expected is not None and (found := weights_sha256(where)) != expected:
        raise CheckpointError(
            f"{source}: was trained from a base whose weights have sha256 {expected}, but those of {where} have "
            f"{found}; use the same base"
        )
    return where


def _load_delta(
    source: Path,
    base: str | os.PathLike[str] | None,
    nsa: NSAConfig | None | Literal["checkpoint"],
    rope_theta: float | None,
    dtype: np.dtype | None,
    progress: Progress | None,
) -> Checkpoint:
    """A base with a delta merged into it while it is read."""
    delta = read_delta(source)
    under = delta_base(source, delta.info, base)
    merger = Merger(delta, read_model_config(under))
    notes: list[str] = []
    config = _apply_overrides(merger.config, nsa, rope_theta, source, notes)
    trained, wanted = param_shapes(merger.config), param_shapes(config)
    if merger.config.nsa is not None and config.nsa is not None and wanted != trained:
        differing = sorted(name for name in {*trained, *wanted} if trained.get(name) != wanted.get(name))
        raise CheckpointError(
            f"{source}: these sparse attention settings need other parameters than this delta has; "
            f"{list_faults({'differing': differing})}"
        )
    stored = _load_whole(under, detect_format(under), "checkpoint", None, dtype, progress, merger)
    params = {
        name: merger.merged(name, None, dtype) if name in merger.new else stored.params[name]
        for name in wanted
        if name in trained
    }
    if merger.config.nsa is None and config.nsa is not None:
        params = _with_selected_gates(config, params)
    return Checkpoint(
        config,
        params,
        str(source),
        (*stored.notes, *notes),
        stored.tokenizer_source,
        delta.info.refresh_intervals,
    )
