"""Dense attention over a cache and a tree on NVIDIA Hopper, in two launches: splits of the keys, and their sum.

Bytes: a thread block reads its keys and values once for up to 192 (node, head) rows, and blocks of other rows of the
same head follow through the L2 cache. Exactness: masks are those of the definition; the output differs from it by the
rounding of probabilities to the inputs' dtype (about 1.3e-3 in relative norm for bfloat16). Repeated calls give the
same bits. Splits depend on the shape of the call, so the same node in a pass of another size can differ by rounding.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..errors import UnsupportedKernelError
from ..hopper import require_attention, require_hopper
from ..layout import TreeQueries
from . import tiles
from .mosaic_kernel import attention

# Layers of one shape share a trace and a lowering, which takes seconds.
_attention = functools.partial(jax.jit, static_argnames=("scale", "window", "dtype", "config"))(attention)


def require_supported(q: Array, k: Array, v: Array, tree_k: Array, tree_v: Array, scale: float) -> None:
    """Raises `UnsupportedKernelError` for shapes and dtypes that the kernel does not cover."""
    require_attention(q, {"k": k, "v": v, "tree_k": tree_k, "tree_v": tree_v}, tree_k.shape[2])
    if scale <= 0:
        raise UnsupportedKernelError(f"needs a positive scale, got {scale}")


def choose(q: Array, k: Array, tree_k: Array, window: int | None) -> tiles.TileConfig:
    """Tile configuration of a call: the device's measured one, or the heuristic's."""
    batch, nodes, kv_heads, heads, dim = q.shape
    keys = k.shape[2] if window is None else min(window, k.shape[2])
    return tiles.choose(nodes=nodes, heads=heads, kv_heads=batch * kv_heads, dim=dim, keys=keys)


def dense_verify(
    q: Float[Array, "B T K G D"],
    k: Float[Array, "B K L D"],
    v: Float[Array, "B K L D"],
    tree_k: Float[Array, "B K X D"],
    tree_v: Float[Array, "B K X D"],
    queries: TreeQueries,
    *,
    scale: float,
    window: int | None,
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "B T K G D"]:
    """Every node attends to the committed rows in reach and to its own path, on a Hopper GPU."""
    require_hopper()
    return lowered(q, k, v, tree_k, tree_v, queries, scale=scale, window=window, dtype=dtype)


def lowered(
    q: Float[Array, "B T K G D"],
    k: Float[Array, "B K L D"],
    v: Float[Array, "B K L D"],
    tree_k: Float[Array, "B K X D"],
    tree_v: Float[Array, "B K X D"],
    queries: TreeQueries,
    *,
    scale: float,
    window: int | None = None,
    dtype: DTypeLike = jnp.float32,
    config: tiles.TileConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """As `dense_verify`, without a look at the device: it can be lowered for CUDA, or interpreted, anywhere.

    Args:
      q, k, v, tree_k, tree_v, queries, scale, window, dtype: as the op.
      config: tile configuration, by default the one of `choose`.
      interpret: parameters of the interpreter, or None.
    """
    require_supported(q, k, v, tree_k, tree_v, scale)
    config = choose(q, k, tree_k, window) if config is None else config
    arguments = (q, k, v, tree_k, tree_v, queries)
    options: dict[str, Any] = {"scale": scale, "window": window, "dtype": jnp.dtype(dtype), "config": config}
    if interpret is not None:
        return attention(*arguments, **options, interpret=interpret)
    return _attention(*arguments, **options)
