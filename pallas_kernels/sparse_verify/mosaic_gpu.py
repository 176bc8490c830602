"""Selected and window branch on NVIDIA Hopper, in two launches.

Visit lists must not hold blocks past the last node's own, as no selection does.

Exactness: sets and masks are those of the definition; the output differs from it by the rounding of probabilities to
the inputs' dtype (about 1.3e-3 in relative norm for bfloat16). Repeated calls give the same bits. Splits depend on
the shape of the call, so the same node in a pass of another size can differ by rounding.
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
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from . import tiles
from .mosaic_kernel import attention
from .mosaic_rows import ROWS, row_tiles
from .schedule import MergedSchedule

MAX_UNION = 1024

# Layers of one shape share a trace and a lowering, which takes seconds.
_attention = functools.partial(jax.jit, static_argnames=("geometry", "scale", "compressed", "config", "dtype"))(
    attention
)


def require_supported(
    q: Float[Array, "B T K G D"], cached: CachedKV, tree: TreeKV, schedule: MergedSchedule, geometry: Geometry
) -> None:
    """Raises `UnsupportedKernelError` for shapes and dtypes that the kernel does not cover."""
    owners = (("cached", cached), ("tree", tree))
    operands = {f"{owner}.{name}": getattr(kv, name) for name in ("k", "v", "k_cmp", "v_cmp") for owner, kv in owners}
    require_attention(q, operands, q.shape[1])
    if geometry.block_size not in (8, 16, 32, 64):
        raise UnsupportedKernelError(f"needs a block_size of 8, 16, 32 or 64, got {geometry.block_size}")
    if schedule.blocks.shape[-1] > MAX_UNION:
        raise UnsupportedKernelError(f"needs at most {MAX_UNION} blocks per group, got {schedule.blocks.shape[-1]}")


def choose(
    q: Float[Array, "B T K G D"], cached: CachedKV, schedule: MergedSchedule, geometry: Geometry, *, compressed: bool
) -> tiles.TileConfig:
    """Tile configuration of a call: the device's measured one, or the heuristic's."""
    batch, nodes, kv_heads, heads, dim = q.shape
    rows = row_tiles(nodes, heads, schedule.group)
    pieces = ROWS // geometry.block_size
    tree = -(-nodes // ROWS)
    chosen = geometry.selection_width(cached.capacity)

    def listed(members: int) -> int:
        union = min(schedule.blocks.shape[-1], chosen + (members - 1) * -(-chosen // 4))
        return -(-union // pieces) + tree

    return tiles.choose(
        "reuse" if compressed else "verify",
        nodes=nodes,
        group=schedule.group,
        dim=dim,
        selected_tiles=batch * kv_heads * rows.tiles,
        dense_tiles=batch * kv_heads * rows.dense_tiles,
        lists=batch * kv_heads,
        selected_keys=listed(min(schedule.group, nodes)),
        last_keys=listed((nodes - 1) % schedule.group + 1),
        window_keys=min(geometry.window, cached.capacity) // ROWS + 1 + tree,
        compressed_keys=-(-cached.k_cmp.shape[2] // ROWS) + 1 if compressed else 0,
    )


def sparse_verify(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    schedule: MergedSchedule,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
) -> Float[Array, "B T K G D"]:
    """Gated sum of the selected and the window branch, in float32, on a Hopper GPU."""
    require_hopper()
    return lowered(q, cached, tree, queries, schedule, gates, geometry=geometry, scale=scale)


def lowered(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    schedule: MergedSchedule,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
    compressed: bool = False,
    added: Float[Array, "B T K G D"] | None = None,
    dtype: DTypeLike = jnp.float32,
    config: tiles.TileConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """As `sparse_verify`, without a look at the device: it can be lowered for CUDA, or interpreted, anywhere.

    Args:
      q, cached, tree, queries, schedule, gates, geometry, scale: as the op.
      compressed: whether to add the compressed branch.
      added: the compressed branch, where another launch made it: float32, without its gate.
      dtype: of the output.
      config: tile configuration, by default the one of `choose`.
      interpret: parameters of the interpreter, or None.
    """
    require_supported(q, cached, tree, schedule, geometry)
    config = choose(q, cached, schedule, geometry, compressed=compressed) if config is None else config
    arguments, dtype = (q, cached, tree, queries, schedule, gates), jnp.dtype(dtype)
    options: dict[str, Any] = {"geometry": geometry, "scale": scale, "compressed": compressed, "config": config}
    options |= {"added": added, "dtype": dtype}
    if interpret is not None:
        return attention(*arguments, **options, interpret=interpret)
    return _attention(*arguments, **options)
