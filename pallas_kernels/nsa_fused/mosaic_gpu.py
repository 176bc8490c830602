"""Refresh and reuse layers on NVIDIA Hopper.

A reuse layer is two launches: compressed, selected and window branch in splits, and their gated sum. A refresh layer
is the launches of the selection, those of the selected and the window branch, and XLA's addition of the compressed
branch. Exactness as in `sparse_verify.mosaic_gpu` and `block_select.mosaic_gpu`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..block_select.mosaic_gpu import select_and_attend
from ..errors import UnsupportedKernelError
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from ..sparse_verify import mosaic_gpu as verify_ops
from ..sparse_verify.hopper import require_hopper
from ..sparse_verify.schedule import MergedSchedule, Selection
from ..sparse_verify.tiles import TileConfig


def refresh_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
    group: int,
    shared: Bool[Array, ""] | None = None,
) -> tuple[Float[Array, "B T K G D"], Selection]:
    """All three branches, and the selection made on the way, on a Hopper GPU."""
    require_hopper()
    if shared is not None:
        raise UnsupportedKernelError("has no shared selections (approximate runs)")
    return lowered_refresh(q, cached, tree, queries, gates, geometry=geometry, scale=scale, group=group)


def lowered_refresh(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
    group: int,
    config: TileConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T K G D"], Selection]:
    """As `refresh_attention`, without a look at the device."""
    found = select_and_attend(
        q, cached, tree, queries, geometry=geometry, scale=scale, group=group, interpret=interpret
    )
    assert found.merged is not None and found.owners is not None  # a group was asked for
    schedule = MergedSchedule(blocks=found.merged, owners=found.owners, group=group)
    out = verify_ops.lowered(
        q,
        cached,
        tree,
        queries,
        schedule,
        gates,
        geometry=geometry,
        scale=scale,
        config=config,
        interpret=interpret,
    )
    out += gates[..., 0:1].astype(jnp.float32) * found.out
    return out, Selection(blocks=found.blocks, schedule=schedule)


def reuse_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    gates: Float[Array, "B T K G 3"],
    selection: Selection,
    *,
    geometry: Geometry,
    scale: float,
) -> Float[Array, "B T K G D"]:
    """All three branches under an inherited selection, on a Hopper GPU."""
    require_hopper()
    return lowered_reuse(q, cached, tree, queries, gates, selection, geometry=geometry, scale=scale)


def lowered_reuse(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    gates: Float[Array, "B T K G 3"],
    selection: Selection,
    *,
    geometry: Geometry,
    scale: float,
    config: TileConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "B T K G D"]:
    """As `reuse_attention`, without a look at the device."""
    return verify_ops.lowered(
        q,
        cached,
        tree,
        queries,
        selection.schedule,
        gates,
        geometry=geometry,
        scale=scale,
        compressed=True,
        config=config,
        interpret=interpret,
    )
