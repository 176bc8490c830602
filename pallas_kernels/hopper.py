"""Whether the tensor-core kernels can run here, without importing them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax

from .errors import UnsupportedKernelError


def require_hopper() -> None:
    """Raises `UnsupportedKernelError` unless JAX's default device is an NVIDIA GPU of compute capability 9."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise UnsupportedKernelError(f"needs an NVIDIA GPU, JAX runs on {device.platform}")
    capability = str(getattr(device, "compute_capability", "unknown"))
    if not capability.startswith("9."):
        raise UnsupportedKernelError(f"needs compute capability 9 (Hopper), {device.device_kind} has {capability}")


def on_hopper(sibling: str, name: str) -> Callable[..., Any]:
    """The function `name` of the module `mosaic_gpu` beside `sibling`, imported at the first call on a Hopper GPU.

    The import takes a second, so it must not happen elsewhere.
    """
    module = f"{sibling.rpartition('.')[0]}.mosaic_gpu"

    def run(*args: Any, **kwargs: Any) -> Any:
        require_hopper()
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return run
