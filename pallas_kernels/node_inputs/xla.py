"""Portable form of the op."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..row_matmul import total
from .layout import EntryRows, HeadShape, NodeInputs


def rotate(
    x: Float[Array, "... D"], cos: Float[Array, "... half"], sin: Float[Array, "... half"]
) -> Float[Array, "... D"]:
    """Rotary embedding, half-split layout; `cos` and `sin` broadcast against x's leading axes."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def gather_rows(
    tail: Float[Array, "B K l D"], nodes: Float[Array, "B K T D"], entries: EntryRows
) -> Float[Array, "B K M l D"]:
    """The rows of every entry, out of the committed tail and the nodes."""
    rows = jnp.concatenate([tail, nodes.astype(tail.dtype)], axis=2)
    wanted = entries.completions.rows
    at = wanted.reshape(wanted.shape[0], 1, -1, 1)
    return jnp.take_along_axis(rows, at, axis=2, mode="clip").reshape(*rows.shape[:2], *wanted.shape[1:], -1)


def _entries(
    rows: Float[Array, "B K M l D"], weight: Float[Array, "K l"] | None, position: Float[Array, "K l D"] | None
) -> Float[Array, "B K M D"]:
    x = rows.astype(jnp.float32)
    x = x if position is None else x + position.astype(jnp.float32)[None, :, None]
    y = x.mean(3) if weight is None else jnp.einsum("bkmld,kl->bkmd", x, weight.astype(jnp.float32))
    return y.astype(rows.dtype)


def node_inputs(
    qkv: Float[Array, "S _ _"],
    gates: Float[Array, "S2 _ _"] | None,
    gate_bias: Float[Array, " _"] | None,
    cos: Float[Array, "B T half"],
    sin: Float[Array, "B T half"],
    entries: EntryRows | None,
    shape: HeadShape,
    dtype: DTypeLike,
) -> NodeInputs:
    """Slices, rotations and transpositions, which XLA fuses as it sees fit."""
    batch, nodes, kv_heads, group, dim = shape.batch, shape.nodes, shape.kv_heads, shape.group, shape.dim
    rows = batch * nodes
    x = total(qkv, rows, shape.columns, dtype).reshape(batch, nodes, kv_heads, group + 2, dim)
    q, k, v = x[..., :-2, :], x[..., -2, :], x[..., -1, :]
    q = rotate(q, cos[:, :, None, None], sin[:, :, None, None])
    rotated = rotate(k, cos[:, :, None], sin[:, :, None])
    raw_k, tree_k, tree_v = (jnp.swapaxes(y, 1, 2) for y in (k, rotated, v))
    sigmoids = k_cmp = v_cmp = None
    if gates is not None:
        columns = (kv_heads, group, 3) if shape.gates > 3 else (1, 1, 3)
        raw = total(gates, rows, shape.gates, jnp.float32)
        raw = (raw if gate_bias is None else raw + gate_bias.astype(jnp.float32)).reshape(batch, nodes, *columns)
        sigmoids = jnp.broadcast_to(jax.nn.sigmoid(raw), (batch, nodes, kv_heads, group, 3))
    if entries is not None:
        k_cmp = _entries(gather_rows(entries.tail_k, raw_k, entries), entries.weight_k, entries.position_k)
        k_cmp = rotate(k_cmp, entries.cos[:, None], entries.sin[:, None])
        v_cmp = _entries(gather_rows(entries.tail_v, tree_v, entries), entries.weight_v, entries.position_v)
    return NodeInputs(q=q, k=tree_k, v=tree_v, raw_k=raw_k, gates=sigmoids, k_cmp=k_cmp, v_cmp=v_cmp)
