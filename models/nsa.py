"""Native Sparse Attention: compress, select, window, gate (arXiv 2502.11089)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..pallas_kernels import Selection, TreeKV, refresh_attention, reuse_attention
from ..pallas_kernels.node_inputs import EntryRows, gather_rows
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

    def _entry_rows(self, context: PassContext, cache: NSALayerCache) -> EntryRows:
        """Where completed entries come from: the committed tail and the nodes' own paths."""
        assert context.completions is not None
        assert context.entry_cos is not None
        assert context.entry_sin is not None
        weighted = self.compress_k.function == "weighted"
        return EntryRows(
            tail_k=cache.tail_k,
            tail_v=cache.tail_v,
            completions=context.completions,
            cos=context.entry_cos,
            sin=context.entry_sin,
            weight_k=self.compress_k.weight[...] if weighted else None,
            weight_v=self.compress_v.weight[...] if weighted else None,
            position_k=self.compress_k.pe[...] if self.compress_k.positions else None,
            position_v=self.compress_v.pe[...] if self.compress_v.positions else None,
        )

    @property
    def _entries_are_sums(self) -> bool:
        """Whether entries are plain weighted sums of rows, which the op makes on its way."""
        nsa = self.config.nsa
        assert nsa is not None
        return nsa.cmp_fn in ("mean", "weighted") and nsa.cmp_rope == "post"

    def __call__(
        self,
        x: Float[Array, "B T E"],
        context: PassContext,
        cache: LayerCache,
        selection: Selection | None,
        options: LayerOptions,
    ) -> tuple[Float[Array, "S _ _"], LayerTree, Selection | None]:
        """See `SparseAttention`."""
        assert isinstance(cache, NSALayerCache)
        assert self.config.nsa is not None
        assert context.completions is not None
        rows, sums = self._entry_rows(context, cache), self._entries_are_sums
        nodes = self.inputs(x, context, options, gate=self.gate, entries=rows if sums else None)
        post = self.config.nsa.cmp_rope == "post"
        raw_k = nodes.raw_k if post else nodes.k
        if sums:
            assert nodes.k_cmp is not None and nodes.v_cmp is not None
            k_cmp, v_cmp = nodes.k_cmp, nodes.v_cmp
        else:
            k_cmp = self.compress_k(gather_rows(rows.tail_k, raw_k, rows))
            k_cmp = rotate(k_cmp, rows.cos[:, None], rows.sin[:, None]) if post else k_cmp
            v_cmp = self.compress_v(gather_rows(rows.tail_v, nodes.v, rows))
        tree = TreeKV(k=nodes.k, v=nodes.v, k_cmp=k_cmp, v_cmp=v_cmp, completions=context.completions)
        assert nodes.gates is not None
        arguments = (nodes.q, cache.kv, tree, context.queries, nodes.gates)
        named: dict[str, Any] = {
            "geometry": self.geometry,
            "scale": self.scale,
            "dtype": x.dtype,
            "implementation": options.implementation,
        }
        if options.refresh:
            out, selection = refresh_attention(*arguments, group=options.group, shared=context.shared, **named)
        else:
            assert selection is not None
            out = reuse_attention(*arguments, selection, **named)
        return self.output(out, x.dtype, options), NSALayerTree(kv=tree, raw_k=raw_k), selection
