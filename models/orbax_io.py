"""This project's own checkpoint directory: parameters by orbax, the configuration as JSON beside them.

- `ssv_jax_checkpoint.json`: format, version, config, and the sizes of the files in `params`.
- `params/`: orbax, each array in the dtype that it was given in.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .config import Llama3Scaling, LlamaConfig, RopeConfig, nsa_from_mapping
from .errors import CheckpointError, list_faults
from .safetensors_io import read_json_object

MANIFEST = "ssv_jax_checkpoint.json"
_PARAMS = "params"
_VERSION = 1


def write_checkpoint(directory: Path, config: LlamaConfig, params: Mapping[str, Any]) -> None:
    """Writes into an empty directory; the manifest comes last.

    Args:
      directory: exists and is empty.
      config: the model.
      params: flat name -> array (numpy or JAX).
    """
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory.absolute() / _PARAMS, _nest(params))
    manifest = {
        "format": "ssv-jax",
        "version": _VERSION,
        "config": dataclasses.asdict(config),
        "files": _file_sizes(directory / _PARAMS),
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def _file_sizes(folder: Path) -> dict[str, int]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {file.relative_to(folder).as_posix(): file.stat().st_size for file in files}


def read_config(directory: Path) -> LlamaConfig:
    """The configuration of a checkpoint directory, after a check that its files have the sizes they were saved with.

    Orbax itself answers a truncated file with failures of many threads.

    Raises:
      CheckpointError: a manifest that is missing, of another version, or holds no valid configuration; parameter
        files that are missing or of another size.
    """
    path = directory / MANIFEST
    manifest = read_json_object(path)
    if manifest.get("format") != "ssv-jax" or manifest.get("version") != _VERSION:
        raise CheckpointError(
            f"{path}: format {manifest.get('format')!r}, version {manifest.get('version')!r} is unsupported; "
            f"this release reads 'ssv-jax', version {_VERSION}"
        )
    expected, found = manifest.get("files"), _file_sizes(directory / _PARAMS)
    if not isinstance(expected, dict):
        raise CheckpointError(f"{path}: no list of files in it; save the checkpoint again")
    faults = list_faults(
        {
            f"missing in {_PARAMS}": [name for name in expected if name not in found],
            f"of a wrong size in {_PARAMS}": [
                f"{name} (expected {size} bytes, found {found[name]})"
                for name, size in expected.items()
                if name in found and found[name] != size
            ],
        }
    )
    if faults:
        raise CheckpointError(f"{directory}: damaged or incomplete checkpoint, copy it again; {faults}")
    try:
        fields = dict(manifest["config"])
        rope = dict(fields.pop("rope"))
        scaling, nsa = rope.pop("scaling"), fields.pop("nsa")
        return LlamaConfig(
            **fields,
            rope=RopeConfig(**rope, scaling=None if scaling is None else Llama3Scaling(**scaling)),
            nsa=None if nsa is None else nsa_from_mapping(nsa),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: no valid config in it: {error}") from None


class OrbaxReader:
    """The parameters of a checkpoint directory, by flat name.

    Raises:
      CheckpointError: orbax cannot read their metadata.
    """

    def __init__(self, directory: Path) -> None:
        import orbax.checkpoint as ocp

        self._path = directory.absolute() / _PARAMS
        self._checkpointer = ocp.PyTreeCheckpointer()
        try:
            found = self._checkpointer.metadata(self._path).item_metadata
            if found is None:
                raise ValueError("no metadata")
            self.shapes = {name: tuple(leaf.shape) for name, leaf in _flatten(found.tree).items()}
        except Exception as error:  # orbax and tensorstore raise whatever they like on damaged files
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> CheckpointError:
        text = " ".join(str(error).split())[:200]
        return CheckpointError(f"{self._path}: orbax cannot read it ({type(error).__name__}: {text}); save it again")

    def read_all(self) -> dict[str, np.ndarray]:
        """Every parameter as numpy, in its stored dtype.

        Raises:
          CheckpointError: damaged files.
        """
        import orbax.checkpoint as ocp

        arguments = _nest({name: ocp.RestoreArgs(restore_type=np.ndarray) for name in self.shapes})
        try:
            return _flatten(self._checkpointer.restore(self._path, restore_args=arguments))
        except Exception as error:
            raise self._damaged(error) from None


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        *folders, last = name.split("/")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return tree


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, node in tree.items():
        if isinstance(node, Mapping):
            flat.update(_flatten(node, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = node
    return flat
