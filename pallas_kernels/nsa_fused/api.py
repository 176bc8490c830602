"""Whole attention of one NSA layer: a refresh layer selects blocks, a reuse layer inherits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from .. import dispatch
from ..errors import ShapeError
from ..hopper import on_hopper
from ..layout import CachedKV, Geometry, TreeKV, TreeQueries, check_pass
from ..sparse_verify.schedule import Selection, check_group
from . import reference, xla

REFRESH_IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mosaic_gpu": on_hopper(__name__, "refresh_attention"),
        "xla": xla.refresh_attention,
        "reference": reference.refresh_attention,
    }
)
REUSE_IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mosaic_gpu": on_hopper(__name__, "reuse_attention"),
        "xla": xla.reuse_attention,
        "reference": reference.reuse_attention,
    }
)


def implementations() -> tuple[str, ...]:
    """Names that every attention op knows, fastest first."""
    return tuple(REFRESH_IMPLEMENTATIONS)


def refresh_attention(
    q: Float[Array, "B T K G D"],
    cached: CachedKV,
    tree: TreeKV,
    queries: TreeQueries,
    gates: Float[Array, "B T K G 3"],
    *,
    geometry: Geometry,
    scale: float,
    group: int = 1,
    shared: Bool[Array, ""] | None = None,
    dtype: DTypeLike = jnp.float32,
    implementation: dispatch.Implementation = None,
) -> tuple[Float[Array, "B T K G D"], Selection]:
    """o = g_cmp o_cmp + g_slc o_slc + g_win o_win (arXiv 2502.11089, eq. 5), with a fresh selection.

    Args:
      q: rotated queries.
      cached: committed keys and values.
      tree: the nodes' own keys and values, with the entries that they complete.
      queries: where the nodes stand.
      gates: (compressed, selected, window) gates.
      geometry: static sizes.
      scale: multiplies q . k after the product.
      group: consecutive nodes that share a visit list, static.
      shared: for approximate runs, whether the nodes of a group read the first one's blocks (`sharing.share`);
        None for exact runs.
      dtype: of the output.
      implementation: see `dispatch.run`.

    Returns:
      The attention output, and the selection for reuse layers.

    Raises:
      ShapeError: shapes that do not fit each other.
      UnsupportedKernelError, ValueError: as `dispatch.run` and `merge`.
    """
    _check(q, cached, tree, queries, gates, geometry)
    check_group(group)
    return dispatch.run(
        "refresh_attention",
        REFRESH_IMPLEMENTATIONS,
        implementation,
        q,
        cached,
        tree,
        queries,
        gates,
        geometry=geometry,
        scale=scale,
        dtype=dtype,
        group=group,
        **({} if shared is None else {"shared": shared}),
    )


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
    implementation: dispatch.Implementation = None,
) -> Float[Array, "B T K G D"]:
    """As `refresh_attention`, under the selection of an earlier layer of the same pass."""
    _check(q, cached, tree, queries, gates, geometry)
    return dispatch.run(
        "reuse_attention",
        REUSE_IMPLEMENTATIONS,
        implementation,
        q,
        cached,
        tree,
        queries,
        gates,
        selection,
        geometry=geometry,
        scale=scale,
        dtype=dtype,
    )


def _check(q: Array, cached: CachedKV, tree: TreeKV, queries: TreeQueries, gates: Array, geometry: Geometry) -> None:
    check_pass(q, cached, tree, queries, geometry)
    if gates.shape != (*q.shape[:-1], 3):
        raise ShapeError(f"gates has shape {gates.shape}, expected {(*q.shape[:-1], 3)} beside q of shape {q.shape}")
