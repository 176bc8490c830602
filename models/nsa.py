"""Native Sparse Attention: compress, select, window, gate (arXiv 2502.11089)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..pallas_kernels import Selection, TreeKV, refresh_attention, reuse_attention
from .attention import Heads, LayerOptions, PassContext
from .cache import LayerCache, LayerTree, NSALayerCache, NSALayerTree, geometry_of
from .config import LlamaConfig
from .layers import Projection, rotate

_INIT_STD = 0.02


class Compressor(nnx.Module):
    """phi: the l rows of a compression block become one entry, per KV head.

    Args:
      config: the model; its `nsa` says which function.
      positions: whether a position embedding is added to the rows.
      dtype: of the parameters.
      rngs: initialises them.
    """

    def __init__(self, config: LlamaConfig, *, positions: bool, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        assert config.nsa is not None
        self.function = config.nsa.cmp_fn
        heads, size, dim = config.num_kv_heads, config.nsa.kernel_size, config.head_dim

        def draw(*shape: int) -> nnx.Param:
            return nnx.Param((jax.random.normal(rngs.params(), shape) * _INIT_STD).astype(dtype))

        if positions:
            self.pe = draw(heads, size, dim)
        if self.function in ("weighted", "pooled"):
            self.weight = nnx.Param(jnp.full((heads, size), 1 / size, dtype))
        elif self.function == "linear":
            self.weight = draw(heads, size, dim, dim)
        elif self.function == "mlp":
            self.w1, self.b1 = draw(heads, size, dim, dim), nnx.Param(jnp.zeros((heads, dim), dtype))
            self.w2, self.b2 = draw(heads, dim, dim), nnx.Param(jnp.zeros((heads, dim), dtype))
        if self.function == "pooled":
            pools = config.nsa.cmp_pools
            self.pool_query, self.pool_bias = draw(heads, dim, pools), draw(heads, size, pools)
            self.pool_mix = draw(heads, pools, dim)
        self.positions = positions

    def __call__(self, rows: Float[Array, "B K M l D"]) -> Float[Array, "B K M D"]:
        """One entry for every block of rows, computed in float32."""
        x = rows.astype(jnp.float32)
        if self.positions:
            x = x + self.pe[...].astype(jnp.float32)[None, :, None]
        if self.function == "mean":
            y = x.mean(3)
        elif self.function in ("weighted", "pooled"):
            y = jnp.einsum("bkmld,kl->bkmd", x, self.weight[...].astype(jnp.float32))
        elif self.function == "linear":
            y = jnp.einsum("bkmld,klde->bkme", x, self.weight[...].astype(jnp.float32))
        else:
            w1, b1, w2, b2 = (p[...].astype(jnp.float32) for p in (self.w1, self.b1, self.w2, self.b2))
            hidden = jnp.einsum("bkmld,klde->bkme", x, w1) + b1[None, :, None]
            y = jnp.einsum("bkmd,kde->bkme", jax.nn.gelu(hidden, approximate=False), w2) + b2[None, :, None]
        if self.function == "pooled":
            query, bias, mix = (p[...].astype(jnp.float32) for p in (self.pool_query, self.pool_bias, self.pool_mix))
            share = jax.nn.softmax(jnp.einsum("bkmld,kdp->bkmlp", x, query) + bias[None, :, None], axis=3)
            y = y + jnp.einsum("bkmpd,kpd->bkmd", jnp.einsum("bkmlp,bkmld->bkmpd", share, x), mix)
        return y.astype(rows.dtype)


class NSAttention(Heads):
    """Three gated branches: compressed entries, selected blocks, sliding window."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        super().__init__(config, dtype=dtype, rngs=rngs)
        nsa = config.nsa
        assert nsa is not None
        self.geometry = geometry_of(nsa)
        scope = (config.num_kv_heads, config.group, 3) if nsa.gate_scope == "head" else (3,)
        self.gate = Projection((config.hidden_size,), scope, bias=nsa.gate_bias, dtype=dtype, rngs=rngs)
        self.compress_k = Compressor(config, positions=nsa.cmp_pe != "none", dtype=dtype, rngs=rngs)
        self.compress_v = Compressor(config, positions=nsa.cmp_pe == "kv", dtype=dtype, rngs=rngs)

    def gates(self, x: Float[Array, "B T E"]) -> Float[Array, "B T K G 3"]:
        """Sigmoid gates of the three branches, in float32."""
        raw = self.gate(x, dtype=jnp.float32)
        if raw.ndim == 3:
            raw = raw[:, :, None, None]
        shape = (*x.shape[:2], self.config.num_kv_heads, self.config.group, 3)
        return jnp.broadcast_to(jax.nn.sigmoid(raw), shape)

    def _compress(
        self, context: PassContext, cache: NSALayerCache, raw_k: Array, v: Array
    ) -> tuple[Float[Array, "B K M D"], Float[Array, "B K M D"]]:
        """Entries that the nodes complete, from the committed tail and the nodes' own paths."""
        assert self.config.nsa is not None
        done = context.completions
        assert done is not None
        assert context.entry_cos is not None
        assert context.entry_sin is not None

        def block_rows(tail: Array, nodes: Array) -> Array:
            rows = jnp.concatenate([tail, nodes.astype(tail.dtype)], axis=2)
            at = done.rows.reshape(done.rows.shape[0], 1, -1, 1)
            return jnp.take_along_axis(rows, at, axis=2, mode="clip").reshape(*rows.shape[:2], *done.rows.shape[1:], -1)

        k_cmp = self.compress_k(block_rows(cache.tail_k, raw_k))
        if self.config.nsa.cmp_rope == "post":
            k_cmp = rotate(k_cmp, context.entry_cos[:, None], context.entry_sin[:, None])
        return k_cmp, self.compress_v(block_rows(cache.tail_v, v))

    def __call__(
        self,
        x: Float[Array, "B T E"],
        context: PassContext,
        cache: LayerCache,
        selection: Selection | None,
        options: LayerOptions,
    ) -> tuple[Float[Array, "B T E"], LayerTree, Selection | None]:
        """See `SparseAttention`."""
        assert isinstance(cache, NSALayerCache)
        assert self.config.nsa is not None
        assert context.completions is not None
        q, k, v = self.project(x)
        q = rotate(q, context.cos[:, :, None, None], context.sin[:, :, None, None])
        rotated = rotate(k, context.cos[:, :, None], context.sin[:, :, None])
        raw = rotated if self.config.nsa.cmp_rope == "pre" else k
        raw_k, tree_k, tree_v = (jnp.swapaxes(y, 1, 2) for y in (raw, rotated, v))
        k_cmp, v_cmp = self._compress(context, cache, raw_k, tree_v)
        tree = TreeKV(k=tree_k, v=tree_v, k_cmp=k_cmp, v_cmp=v_cmp, completions=context.completions)
        arguments = (q, cache.kv, tree, context.queries, self.gates(x))
        named = {"geometry": self.geometry, "scale": self.scale, "implementation": options.implementation}
        if options.refresh:
            out, selection = refresh_attention(*arguments, group=options.group, shared=context.shared, **named)
        else:
            assert selection is not None
            out = reuse_attention(*arguments, selection, **named)
        return self.o(out.astype(x.dtype)), NSALayerTree(kv=tree, raw_k=raw_k), selection
