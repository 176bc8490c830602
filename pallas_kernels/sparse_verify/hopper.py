"""Whether the tensor-core kernels can run here, without importing them."""

from __future__ import annotations

import jax

from ..errors import UnsupportedKernelError


def require_hopper() -> None:
    """Raises `UnsupportedKernelError` unless JAX's default device is an NVIDIA GPU of compute capability 9."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        raise UnsupportedKernelError(f"needs an NVIDIA GPU, JAX runs on {device.platform}")
    capability = str(getattr(device, "compute_capability", "unknown"))
    if not capability.startswith("9."):
        raise UnsupportedKernelError(f"needs compute capability 9 (Hopper), {device.device_kind} has {capability}")
