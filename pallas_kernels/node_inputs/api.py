"""From projections to what attention reads: heads, rotary embedding, gates, completed entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .. import dispatch
from ..errors import ShapeError
from ..hopper import on_hopper
from . import reference, xla
from .layout import EntryRows, HeadShape, NodeInputs

IMPLEMENTATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "mosaic_gpu": on_hopper(__name__, "node_inputs"),
        "xla": xla.node_inputs,
        "reference": reference.node_inputs,
    }
)


def node_inputs(
    qkv: Float[Array, "S _ _"],
    gates: Float[Array, "S2 _ _"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    entries: EntryRows | None = None,
    *,
    gate_bias: Float[Array, " _"] | None = None,
    shape: HeadShape,
    dtype: DTypeLike,
    implementation: dispatch.Implementation = None,
) -> NodeInputs:
    """Splits projections into heads, rotates queries and keys, applies sigmoids, completes entries.

    Args:
      qkv: parts of the projection (see `row_matmul`), rows [B, T], columns [K, G + 2, D]: a KV head's queries, then
        its key and its value.
      gates: parts of the projection to gates.
      cos, sin: rotary angles of the nodes.
      entries: how entries arise whose keys are compressed before they are rotated; None for none.
      gate_bias: added to the projection to gates before their sigmoids.
      shape: static sizes.
      dtype: of everything but the gates, which are float32.
      implementation: see `dispatch.run`.

    Raises:
      ShapeError: shapes that do not fit each other.
      UnsupportedKernelError, ValueError: as `dispatch.run`.
    """
    rows = shape.batch * shape.nodes
    for name, parts, columns in (("qkv", qkv, shape.columns), ("gates", gates, shape.gates)):
        if parts is not None and (parts.shape[1] < rows or parts.shape[2] < columns):
            raise ShapeError(f"{name} has shape {parts.shape}, expected at least {rows} rows and {columns} columns")
    if (gates is None) != (shape.gates == 0):
        raise ShapeError(f"shape.gates={shape.gates} says whether there are gates: give both or none")
    if gate_bias is not None and gate_bias.shape != (shape.gates,):
        raise ShapeError(f"gate_bias has shape {gate_bias.shape}, expected {(shape.gates,)}")
    if cos.shape != (shape.batch, shape.nodes, shape.dim // 2):
        raise ShapeError(f"cos has shape {cos.shape}, expected {(shape.batch, shape.nodes, shape.dim // 2)}")
    arguments = (qkv, gates, gate_bias, cos, sin, entries, shape, dtype)
    return dispatch.run("node_inputs", IMPLEMENTATIONS, implementation, *arguments)
