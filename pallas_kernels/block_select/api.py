"""Compressed-branch attention and block selection of Native Sparse Attention, over a tree of queries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jaxtyping import Array, Float, Int

from .. import dispatch
from ..hopper import on_hopper
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries, check_pass
from . import reference, xla

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mosaic_gpu": on_hopper(__name__, "block_select"),
        "xla": xla.block_select,
        "reference": reference.block_select,
    }
)
ATTENTION_IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mosaic_gpu": on_hopper(__name__, "compressed_attention"),
        "xla": xla.compressed_attention,
        "reference": reference.compressed_attention,
    }
)


def block_select(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B T K G D"], Int[Array, "B K T S"]]:
    """Attends to compressed entries and selects blocks by their attention mass (arXiv 2502.11089, eq. 7-11).

    The mass of an entry, summed over the heads of a KV head, counts for every block that the entry overlaps, in
    proportion. Forced blocks come first, then the heaviest; ties go to the lower index.

    Args:
      q: rotated queries.
      cached: committed keys and values.
      tree: the nodes' own keys and values, with the entries that they complete.
      queries: where the nodes stand.
      geometry: static sizes.
      scale: multiplies q . k after the product.
      implementation: see `dispatch.run`.

    Returns:
      The branch's output in float32, 0 for nodes that see no entry; and each node's selected blocks, ascending,
      padded with -1 at the end, S = min(n_blocks, blocks in the cache).

    Raises:
      ShapeError: shapes that do not fit each other.
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    check_pass(q, cached, tree, queries, geometry)
    return dispatch.run(
        "block_select",
        IMPLEMENTATIONS,
        implementation,
        q,
        cached,
        tree,
        queries,
        geometry=geometry,
        scale=scale,
    )


def compressed_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    *,
    geometry: Geometry,
    scale: float,
    implementation: dispatch.Implementation = None,
) -> Float[Array, "B T K G D"]:
    """The compressed branch alone, as reuse layers need it. Arguments and errors as `block_select`."""
    check_pass(q, cached, tree, queries, geometry)
    return dispatch.run(
        "compressed_attention",
        ATTENTION_IMPLEMENTATIONS,
        implementation,
        q,
        cached,
        tree,
        queries,
        geometry=geometry,
        scale=scale,
    )
