"""Float32 definition of the op, node by node; plain, never optimised."""

from __future__ import annotations

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from .layout import EntryRows, HeadShape, NodeInputs


def _turn(x: Float[Array, "... D"], cos: Float[Array, " half"], sin: Float[Array, " half"]) -> Float[Array, "... D"]:
    half = cos.shape[0]
    return jnp.concatenate([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)


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
    """Everything in float32, rounded where arrays are stored."""
    batch, nodes, kv_heads, group, dim = shape.batch, shape.nodes, shape.kv_heads, shape.group, shape.dim
    x = qkv.astype(jnp.float32).sum(0)[: batch * nodes, : shape.columns].astype(dtype).astype(jnp.float32)
    x = x.reshape(batch, nodes, kv_heads, group + 2, dim)
    at = [(b, t) for b in range(batch) for t in range(nodes)]
    q = jnp.stack([_turn(x[b, t, :, :group], cos[b, t], sin[b, t]) for b, t in at])
    k = jnp.stack([_turn(x[b, t, :, group], cos[b, t], sin[b, t]) for b, t in at])
    q, k = q.reshape(batch, nodes, kv_heads, group, dim), k.reshape(batch, nodes, kv_heads, dim)
    raw_k, v = jnp.moveaxis(x[..., group, :], 1, 2).astype(dtype), jnp.moveaxis(x[..., group + 1, :], 1, 2)
    sigmoids = k_cmp = v_cmp = None
    if gates is not None:
        raw = gates.astype(jnp.float32).sum(0)[: batch * nodes, : shape.gates]
        raw = raw if gate_bias is None else raw + gate_bias.astype(jnp.float32)
        raw = jnp.broadcast_to(raw[:, None], (batch * nodes, kv_heads * group * 3 // shape.gates, shape.gates))
        sigmoids = (1 / (1 + jnp.exp(-raw))).reshape(batch, nodes, kv_heads, group, 3)
    if entries is not None:
        done, size = entries.completions, entries.tail_k.shape[2]
        pairs = (
            (entries.tail_k, raw_k, entries.weight_k, entries.position_k),
            (entries.tail_v, v.astype(dtype), entries.weight_v, entries.position_v),
        )
        found = []
        for tail, new, weight, position in pairs:
            rows = jnp.concatenate([tail.astype(jnp.float32), new.astype(jnp.float32)], axis=2)
            weight = jnp.full((kv_heads, size), 1 / size) if weight is None else weight.astype(jnp.float32)
            picked = jnp.stack([rows[b][:, done.rows[b]] for b in range(batch)])  # B K M l D
            if position is not None:
                picked = picked + position.astype(jnp.float32)[None, :, None]
            found.append((picked * weight[None, :, None, :, None]).sum(3))
        turned = [
            _turn(found[0][b, :, m], entries.cos[b, m], entries.sin[b, m])
            for b in range(batch)
            for m in range(done.node.shape[1])
        ]
        k_cmp = jnp.moveaxis(jnp.stack(turned).reshape(batch, -1, kv_heads, dim), 1, 2).astype(dtype)
        v_cmp = found[1].astype(dtype)
    return NodeInputs(
        q=q.astype(dtype),
        k=jnp.moveaxis(k, 1, 2).astype(dtype),
        v=v.astype(dtype),
        raw_k=raw_k,
        gates=sigmoids,
        k_cmp=k_cmp,
        v_cmp=v_cmp,
    )
