"""Grouped sparse verification: selected blocks and sliding window, over a tree of queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxtyping import Array, Float

from .. import dispatch
from ..errors import ShapeError
from ..hopper import on_hopper
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries, check_pass
from . import reference, xla
from .schedule import MergedSchedule

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"mosaic_gpu": on_hopper(__name__, "sparse_verify"), "xla": xla.sparse_verify, "reference": reference.sparse_verify}
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
    implementation: dispatch.Implementation = None,
) -> Float[Array, "B T K G D"]:
    """The selected and the window branch of Native Sparse Attention, gated and added.

    A node reads the committed rows of the blocks that it owns in its group's visit list, the rows of its window,
    and of the tree its own path: under the selection where the path's block is selected, under the window by
    depth. Each branch has its own softmax.

    Args:
      q: rotated queries.
      cached: committed keys and values.
      tree: the nodes' own keys and values.
      queries: where the nodes stand.
      schedule: visit lists of groups of consecutive nodes.
      gates: (compressed, selected, window) gates; the first is not used here.
      geometry: static sizes.
      scale: multiplies q . k after the product.
      implementation: see `dispatch.run`.

    Returns:
      The gated sum of both branches, in float32.

    Raises:
      ShapeError: shapes that do not fit each other.
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    check_pass(q, cached, tree, queries, geometry)
    parts = -(-q.shape[1] // schedule.group)
    if schedule.blocks.shape[:3] != (q.shape[0], q.shape[2], parts):
        raise ShapeError(
            f"schedule.blocks has shape {schedule.blocks.shape}, expected {(q.shape[0], q.shape[2], parts)} groups "
            f"for {q.shape[1]} nodes in groups of {schedule.group}"
        )
    return dispatch.run(
        "sparse_verify",
        IMPLEMENTATIONS,
        implementation,
        q,
        cached,
        tree,
        queries,
        schedule,
        gates,
        geometry=geometry,
        scale=scale,
    )
