"""Dense attention over a cache and a tree of queries: the teacher, the baseline, and the drafter's attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .. import dispatch
from ..errors import ShapeError
from ..hopper import on_hopper
from ..layout import TreeQueries
from . import reference, xla

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mosaic_gpu": on_hopper(__name__, "dense_verify"),
        "xla": xla.dense_verify,
        "reference": reference.dense_verify,
    }
)


def dense_verify(
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
    implementation: dispatch.Implementation = None,
) -> Float[Array, "B T K G D"]:
    """softmax(q k^T scale) v over the committed rows and the node's own path.

    Args:
      q: rotated queries of the last T of the X nodes, usually all.
      k, v: committed rotated keys, and values; rows at and after the length are never read.
      tree_k, tree_v: the nodes' own.
      queries: where the nodes stand.
      scale: multiplies q . k after the product.
      window: keys in reach, the query's own included; None for all.
      dtype: of the output.
      implementation: see `dispatch.run`.

    Returns:
      The attention output.

    Raises:
      ShapeError: shapes that do not fit each other.
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    batch, rows, kv_heads, _, dim = q.shape
    nodes = queries.position.shape[1]
    if rows > nodes:
        raise ShapeError(f"q has {rows} rows, but queries only {nodes} nodes: q holds the last nodes, at most all")
    for name, got, want in (
        ("k", k.shape, (batch, kv_heads, k.shape[2], dim)),
        ("v", v.shape, k.shape),
        ("tree_k", tree_k.shape, (batch, kv_heads, nodes, dim)),
        ("tree_v", tree_v.shape, (batch, kv_heads, nodes, dim)),
        ("queries.position", queries.position.shape, (batch, nodes)),
    ):
        if tuple(got) != tuple(want):
            raise ShapeError(f"{name} has shape {tuple(got)}, expected {tuple(want)} beside q of shape {q.shape}")
    return dispatch.run(
        "dense_verify",
        IMPLEMENTATIONS,
        implementation,
        q,
        k,
        v,
        tree_k,
        tree_v,
        queries,
        scale=scale,
        window=window,
        dtype=dtype,
    )
