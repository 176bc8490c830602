"""How parameters and decoding state spread over a `tensor` mesh axis.

Key-value heads (with their query heads), feed-forward units and vocabulary rows are split; everything else is
replicated. An axis that the mesh does not divide is replicated too, so any model runs on any mesh.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "tensor"

# Which axis of a parameter is split, by the end of its flat name.
_SPLIT_AXIS = {
    "attn/qkv/kernel": 1,
    "attn/qkv/bias": 0,
    "attn/o/kernel": 0,
    "attn/gate/kernel": 1,
    "attn/gate/bias": 0,
    "mlp/gate_up/kernel": 2,
    "mlp/gate_up/bias": 1,
    "mlp/down/kernel": 0,
    "embed/embedding": 0,
    "lm_head/kernel": 1,
}


def make_mesh(tensor: int) -> Mesh:
    """A mesh of the first `tensor` devices.

    Raises:
      ValueError: fewer devices than asked for.
    """
    devices = jax.devices()
    if not 1 <= tensor <= len(devices):
        raise ValueError(
            f"mesh tensor={tensor} needs {tensor} devices, but {len(devices)} {devices[0].platform} "
            f"device(s) are visible: use tensor=1 to tensor={len(devices)}"
        )
    return Mesh(np.asarray(devices[:tensor]), (AXIS,))


def _split(mesh: Mesh, shape: tuple[int, ...], axis: int | None) -> NamedSharding:
    if axis is None or shape[axis] % mesh.shape[AXIS]:
        return NamedSharding(mesh, PartitionSpec())
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, AXIS))


def param_sharding(mesh: Mesh, name: str, shape: tuple[int, ...]) -> NamedSharding:
    """Where a parameter goes, by its flat name."""
    axis = next((axis for end, axis in _SPLIT_AXIS.items() if name.endswith(end)), None)
    if "attn/compress_" in name and not name.endswith(("b2", "b1")):
        axis = 0
    if name.endswith(("attn/gate/kernel", "attn/gate/bias")) and len(shape) < 3:
        axis = None  # one gate for all heads
    return _split(mesh, shape, axis)


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """Shardings of a pytree of decoding state: [B, K, rows, D] arrays by key-value head, the rest replicated."""
    return jax.tree.map(lambda x: _split(mesh, x.shape, 1 if x.ndim == 4 else None), state)
