"""What an attention layer is to a decoder, and dense attention: the teacher and the baseline."""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from ..pallas_kernels import Completions, Selection, TreeQueries, dense_verify
from ..pallas_kernels.dispatch import Implementation
from ..pallas_kernels.node_inputs import EntryRows, HeadShape, NodeInputs, node_inputs
from ..pallas_kernels.row_matmul import matmul_parts
from .cache import DenseLayerCache, DenseLayerTree, LayerCache, LayerTree
from .config import LlamaConfig
from .layers import Projection, RMSNorm, project_parts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PassContext:
    """What all layers of one pass share.

    Args:
      queries: where the nodes stand.
      cos, sin: rotary angles of the nodes.
      completions: compressed entries that nodes complete; None in dense models.
      entry_cos, entry_sin: rotary angles of those entries.
      shared: for approximate runs, whether groups share their first node's blocks; None for exact runs.
    """

    queries: TreeQueries
    cos: Float[Array, "B T half"]
    sin: Float[Array, "B T half"]
    completions: Completions | None = None
    entry_cos: Float[Array, "B M half"] | None = None
    entry_sin: Float[Array, "B M half"] | None = None
    shared: Bool[Array, ""] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LayerOptions:
    """Static choices of one layer in one pass.

    Args:
      refresh: select blocks; otherwise inherit `selection`.
      group: consecutive nodes that share a visit list.
      implementation: of the attention ops, see `pallas_kernels.dispatch.run`.
      steps: implementation of the steps around attention.
    """

    refresh: bool = True
    group: int = 1
    implementation: Implementation = None
    steps: Implementation = None


@runtime_checkable
class SparseAttention(Protocol):
    """An attention layer over a cache and a tree of nodes; dense attention is one that selects nothing."""

    def __call__(
        self,
        x: Float[Array, "B T E"],
        context: PassContext,
        cache: LayerCache,
        selection: Selection | None,
        options: LayerOptions,
    ) -> tuple[Float[Array, "S _ _"], LayerTree, Selection | None]:
        """Attends.

        Returns:
          The output in parts (see `pallas_kernels.row_matmul`), the nodes to commit, and the selection that later
          layers inherit.
        """
        ...


class Heads(nnx.Module):
    """Projections into and out of the attention heads, with the fused query-key-value kernel."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        heads = (config.num_kv_heads, config.group + 2, config.head_dim)
        self.qkv = Projection((config.hidden_size,), heads, bias=config.qkv_bias, dtype=dtype, rngs=rngs)
        self.o = Projection(
            (config.num_kv_heads, config.group, config.head_dim),
            (config.hidden_size,),
            bias=config.o_bias,
            dtype=dtype,
            rngs=rngs,
        )
        if config.qk_norm:
            self.q_norm = RMSNorm(config.head_dim, eps=config.rms_eps, dtype=dtype)
            self.k_norm = RMSNorm(config.head_dim, eps=config.rms_eps, dtype=dtype)
        self.config = config

    def project(
        self, x: Float[Array, "B T E"]
    ) -> tuple[Float[Array, "B T K G D"], Float[Array, "B T K D"], Float[Array, "B T K D"]]:
        """Queries, keys and values, not rotated."""
        qkv = self.qkv(x)
        q, k, v = qkv[..., :-2, :], qkv[..., -2, :], qkv[..., -1, :]
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def inputs(
        self,
        x: Float[Array, "B T E"],
        context: PassContext,
        options: LayerOptions,
        *,
        gate: Projection | None = None,
        entries: EntryRows | None = None,
    ) -> NodeInputs:
        """What attention reads of the nodes; with a projection to gates, also those."""
        config, rows = self.config, x.reshape(-1, x.shape[-1])
        shape = HeadShape(
            batch=x.shape[0],
            nodes=x.shape[1],
            kv_heads=config.num_kv_heads,
            group=config.group,
            dim=config.head_dim,
            gates=0 if gate is None else gate.matrix.shape[1],
        )
        gates = None
        if config.qk_norm:
            q, k, v = self.project(x)
            joined = jnp.concatenate([q, k[..., None, :], v[..., None, :]], axis=-2)
            qkv = joined.reshape(1, rows.shape[0], shape.columns)
        elif gate is None or self.qkv.bias is not None:
            qkv = project_parts(rows, self.qkv, options.steps)
        else:
            both, dtypes = (self.qkv.matrix, gate.matrix), (x.dtype, jnp.float32)
            qkv, gates = matmul_parts(rows, both, dtypes, implementation=options.steps)
        if gate is not None and gates is None:
            (gates,) = matmul_parts(rows, (gate.matrix,), (jnp.float32,), implementation=options.steps)
        return node_inputs(
            qkv,
            gates,
            context.cos,
            context.sin,
            entries,
            gate_bias=None if gate is None or gate.bias is None else gate.bias[...].reshape(-1),
            shape=shape,
            dtype=x.dtype,
            implementation=options.steps,
        )

    def output(self, out: Float[Array, "B T K G D"], dtype: DTypeLike, options: LayerOptions) -> Float[Array, "S _ _"]:
        """The projection of the heads' outputs, in parts."""
        rows = out.astype(dtype).reshape(out.shape[0] * out.shape[1], -1)
        return project_parts(rows, self.o, options.steps)

    @property
    def scale(self) -> float:
        """Multiplies attention scores."""
        return self.config.head_dim**-0.5


class DenseAttention(Heads):
    """Causal attention over everything."""

    def __call__(
        self,
        x: Float[Array, "B T E"],
        context: PassContext,
        cache: LayerCache,
        selection: Selection | None,
        options: LayerOptions,
    ) -> tuple[Float[Array, "S _ _"], LayerTree, Selection | None]:
        """See `SparseAttention`."""
        assert isinstance(cache, DenseLayerCache)
        nodes = self.inputs(x, context, options)
        tree = DenseLayerTree(k=nodes.k, v=nodes.v)
        out = dense_verify(
            nodes.q,
            cache.k,
            cache.v,
            tree.k,
            tree.v,
            context.queries,
            scale=self.scale,
            dtype=x.dtype,
            implementation=options.implementation,
        )
        return self.output(out, x.dtype, options), tree, selection
