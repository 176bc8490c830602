"""Refresh and reuse layers on NVIDIA Hopper.

A reuse layer is two launches: compressed, selected and window branch in splits, and their gated sum. A refresh layer
is the launches of the selection, and those of the selected and the window branch, whose sum takes the compressed branch
along. Exactness as in `sparse_verify.mosaic_gpu` and `block_select.mosaic_gpu`.

Chunks of prompts are regrouped: the blocks that a node attends to do not depend on the group, and the heads of one
node are too few for a row tile.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ..block_select.mosaic_gpu import select_and_attend
from ..errors import UnsupportedKernelError
from ..hopper import require_hopper
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries
from ..sparse_verify import mosaic_gpu as verify_ops
from ..sparse_verify.schedule import MergedSchedule, Selection
from ..sparse_verify.tiles import TileConfig

MANY = 256  # nodes from which a pass is taken for a chunk of a prompt; trees are smaller
ROWS = 64  # of a row tile


def visit_group(nodes: int, heads: int, group: int) -> int:
    """Consecutive nodes that share a visit list: as many as asked, but a row tile full in chunks of prompts."""
    if nodes < MANY:
        return group
    return max(group, next(size for size in (16, 8, 4, 2, 1) if size * heads <= ROWS))


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
    dtype: DTypeLike = jnp.float32,
) -> tuple[Float[Array, "B T K G D"], Selection]:
    """All three branches, and the selection made on the way, on a Hopper GPU."""
    require_hopper()
    if shared is not None:
        raise UnsupportedKernelError("has no shared selections (approximate runs)")
    options: dict[str, Any] = {"geometry": geometry, "scale": scale, "dtype": dtype}
    return lowered_refresh(q, cached, tree, queries, gates, **options, group=group)


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
    dtype: DTypeLike = jnp.float32,
    config: TileConfig | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T K G D"], Selection]:
    """As `refresh_attention`, without a look at the device."""
    group = visit_group(q.shape[1], q.shape[3], group)
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
        added=found.out,
        dtype=dtype,
        config=config,
        interpret=interpret,
    )
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
    dtype: DTypeLike = jnp.float32,
) -> Float[Array, "B T K G D"]:
    """All three branches under an inherited selection, on a Hopper GPU."""
    require_hopper()
    options: dict[str, Any] = {"geometry": geometry, "scale": scale, "dtype": dtype}
    return lowered_reuse(q, cached, tree, queries, gates, selection, **options)


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
    dtype: DTypeLike = jnp.float32,
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
        dtype=dtype,
        config=config,
        interpret=interpret,
    )
