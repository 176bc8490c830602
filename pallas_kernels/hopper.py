"""Whether the tensor-core kernels can run here, without importing them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from .errors import UnsupportedKernelError

MAX_HEADS = 16
MAX_NODES = 4096  # masks grow with its square, and longer passes are prefill: tile them outside


def require_hopper() -> None:
    """Raises `UnsupportedKernelError` unless JAX's default device is an NVIDIA GPU of compute capability 9."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise UnsupportedKernelError(f"needs an NVIDIA GPU, JAX runs on {device.platform}")
    capability = str(getattr(device, "compute_capability", "unknown"))
    if not capability.startswith("9."):
        raise UnsupportedKernelError(f"needs compute capability 9 (Hopper), {device.device_kind} has {capability}")


def require_attention(q: jax.Array, operands: Mapping[str, jax.Array], nodes: int) -> None:
    """Raises `UnsupportedKernelError` for what none of the attention kernels covers.

    Args:
      q: queries [B, T, K, G, D].
      operands: keys and values by the names that users know, which must have the queries' dtype.
      nodes: of the tree.
    """
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedKernelError(f"needs bfloat16 or float16 queries, got {q.dtype}")
    for name, array in operands.items():
        if array.dtype != q.dtype:
            raise UnsupportedKernelError(f"needs {name} in the queries' {q.dtype}, got {array.dtype}")
    if q.shape[-1] not in (64, 128):
        raise UnsupportedKernelError(f"needs head dim 64 or 128, got {q.shape[-1]}")
    if q.shape[-2] > MAX_HEADS:
        raise UnsupportedKernelError(f"needs at most {MAX_HEADS} heads per KV head, got {q.shape[-2]}")
    if nodes > MAX_NODES:
        raise UnsupportedKernelError(f"needs at most {MAX_NODES} nodes, got {nodes}")


def on_hopper(sibling: str, name: str) -> Callable[..., Any]:
    """The function `name` of the module `mosaic_gpu` beside `sibling`, imported at the first call on a Hopper GPU.

    The import takes a second, so it must not happen elsewhere.
    """
    module = f"{sibling.rpartition('.')[0]}.mosaic_gpu"

    def run(*args: Any, **kwargs: Any) -> Any:
        require_hopper()
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return run
