"""Llama-family decoder over dense or Native Sparse Attention."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from ..pallas_kernels import Selection, TreeQueries, completions
from ..pallas_kernels.dispatch import Implementation, or_portable
from .attention import DenseAttention, LayerOptions, PassContext
from .cache import Cache, LayerCache, LayerTree, geometry_of
from .config import LlamaConfig
from .layer_plan import LayerPlan
from .layers import Projection, RMSNorm, SwiGLU, random_values, rope_angles
from .nsa import NSAttention

_FIRST_LAYER = "layers/0/"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassOptions:
    """Static choices of one pass.

    Args:
      plan: refresh and reuse layers; None refreshes everywhere.
      group: consecutive nodes that share a visit list.
      taps: residual streams to return: k is the stream after k layers, 0 the embeddings.
      is_chain: the nodes are consecutive tokens, which bounds the entries that they complete.
      implementation: of the attention ops, see `pallas_kernels.dispatch.run`.
      steps: implementation of the steps around attention; None for that of attention where it fits, else XLA's.
    """

    plan: LayerPlan | None = None
    group: int = 1
    taps: tuple[int, ...] = ()
    is_chain: bool = False
    implementation: Implementation = None
    steps: Implementation = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaOutput:
    """Results of one pass.

    Args:
      logits: float32, at the requested rows.
      taps: residual streams before the final norm, in the order of `PassOptions.taps`.
      trees: what `cache.commit` appends, by layer.
      selections: what refresh layers chose, None for reuse and dense layers.
    """

    logits: Float[Array, "B R V"]
    taps: tuple[Float[Array, "B T E"], ...]
    trees: tuple[LayerTree, ...]
    selections: tuple[Selection | None, ...]


class Embedding(nnx.Module):
    """Token embeddings, also the output head where tied."""

    def __init__(self, vocab: int, size: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        draw = jax.random.normal(rngs.params(), (vocab, size), jnp.float32)
        self.embedding = nnx.Param((draw * 0.02).astype(dtype))

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        """Rows of the table."""
        return jnp.take(self.embedding[...], tokens, axis=0)

    def attend(self, x: Float[Array, "B R E"]) -> Float[Array, "B R V"]:
        """Logits of a tied head, float32."""
        return jnp.einsum("bre,ve->brv", x, self.embedding[...], preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerOutput:
    """Results of one layer.

    Args:
      entering: the residual stream before this layer.
      x, added: the stream after it: their sum. Whoever needs it next adds up the parts.
      tree: the nodes to commit.
      selection: to inherit.
    """

    entering: Float[Array, "B T E"]
    x: Float[Array, "B T E"]
    added: Float[Array, "S _ _"]
    tree: LayerTree
    selection: Selection | None


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        attention = DenseAttention if config.nsa is None else NSAttention
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.rms_eps, dtype=dtype)
        self.attn = attention(config, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_eps, dtype=dtype)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        added: Float[Array, "S _ _"] | None,
        context: PassContext,
        cache: LayerCache,
        selection: Selection | None,
        options: LayerOptions,
    ) -> LayerOutput:
        """Runs one layer.

        Args:
          x: the residual stream before the last addition.
          added: what the layer before adds to it, in parts; None for the first.
          context: what all layers share.
          cache: of this layer.
          selection: that an earlier layer made.
          options: static choices.
        """
        shape = x.shape
        entering, normed = self.attn_norm.after(x.reshape(-1, shape[-1]), added, options.steps)
        out, tree, selection = self.attn(normed.reshape(shape), context, cache, selection, options)
        rows, normed = self.mlp_norm.after(entering, out, options.steps)
        added = self.mlp.parts(normed, options.steps)
        return LayerOutput(
            entering=entering.reshape(shape), x=rows.reshape(shape), added=added, tree=tree, selection=selection
        )


class Llama(nnx.Module):
    """The decoder; holds parameters only, caches travel as arguments."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, rngs=rngs)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_eps, dtype=dtype)
        if not config.tie_embeddings:
            head = (config.hidden_size,), (config.vocab_size,)
            self.lm_head = Projection(*head, bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        queries: TreeQueries,
        cache: Cache,
        options: PassOptions,
        rows: Int[Array, "B R"] | None = None,
        shared: Bool[Array, ""] | None = None,
    ) -> LlamaOutput:
        """Runs T nodes over a cache; nothing is written to it.

        Args:
          tokens: the nodes' tokens.
          queries: where the nodes stand; `queries.length` must equal `cache.length`.
          cache: committed tokens.
          options: static choices.
          rows: nodes whose logits are wanted, all by default.
          shared: for approximate runs, whether groups share their first node's blocks.

        Returns:
          Logits, taps and the trees that `cache.commit` takes.
        """
        # float32 products on a GPU would otherwise run in tf32.
        with jax.default_matmul_precision("highest"):
            return self._run(tokens, queries, cache, options, rows, shared)

    def _run(
        self,
        tokens: Array,
        queries: TreeQueries,
        cache: Cache,
        options: PassOptions,
        rows: Array | None,
        shared: Array | None,
    ) -> LlamaOutput:
        plan = options.plan or LayerPlan.every(self.config.num_layers)
        context = dataclasses.replace(self._context(queries, options.is_chain), shared=shared)
        x = self.embed(tokens)
        added, stream, trees, selections, selection = None, [], [], [], None
        steps = or_portable(options.implementation) if options.steps is None else options.steps
        choices: dict[str, Any] = {"group": options.group, "implementation": options.implementation, "steps": steps}
        for layer, layer_cache, refresh in zip(self.layers, cache.layers, plan.refresh, strict=True):
            layer_options = LayerOptions(refresh=refresh, **choices)
            done = layer(x, added, context, layer_cache, selection, layer_options)
            x, added, selection = done.x, done.added, done.selection
            stream.append(done.entering)
            trees.append(done.tree)
            selections.append(selection if refresh else None)
        x, normed = self.norm.after(x.reshape(-1, x.shape[-1]), added, steps)
        x, normed = (y.reshape(*tokens.shape, -1) for y in (x, normed))
        stream.append(x)
        x = normed if rows is None else self.norm(jnp.take_along_axis(x, rows[..., None], axis=1))
        logits = self.embed.attend(x) if self.config.tie_embeddings else self.lm_head(x, dtype=jnp.float32)
        return LlamaOutput(
            logits=logits,
            taps=tuple(stream[tap] for tap in options.taps),
            trees=tuple(trees),
            selections=tuple(selections),
        )

    def _context(self, queries: TreeQueries, is_chain: bool) -> PassContext:
        head_dim, rope = self.config.head_dim, self.config.rope
        cos, sin = rope_angles(queries.position, head_dim, rope)
        if self.config.nsa is None:
            return PassContext(queries=queries, cos=cos, sin=sin)
        geometry = geometry_of(self.config.nsa)
        nodes = queries.num_nodes
        bound = -(-nodes // geometry.kernel_stride) if is_chain else nodes
        done = completions(queries, geometry, bound)
        entry_cos, entry_sin = rope_angles(done.entry * geometry.kernel_stride, head_dim, rope)
        return PassContext(
            queries=queries, cos=cos, sin=sin, completions=done, entry_cos=entry_cos, entry_sin=entry_sin
        )


def abstract(config: LlamaConfig, dtype: DTypeLike = jnp.float32) -> tuple[nnx.GraphDef, nnx.State]:
    """Structure and parameter shapes, nothing allocated."""
    model = nnx.eval_shape(lambda: Llama(config, dtype=dtype, rngs=nnx.Rngs(0)))
    return nnx.split(model, nnx.Param)


def flat_name(path: Iterable[Any]) -> str:
    """A parameter's flat name: its path joined by slashes."""
    return "/".join(str(part) for part in path)


def param_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Flat parameter names and their shapes."""
    return dict(_param_shapes(config))


@functools.lru_cache(maxsize=8)
def _param_shapes(config: LlamaConfig) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """All layers are alike, and tracing each of them takes seconds for a deep model: one is traced."""
    _, state = abstract(dataclasses.replace(config, num_layers=1))
    traced = [(flat_name(path), tuple(leaf.shape)) for path, leaf in nnx.to_flat_state(state)]
    layer = [(name.removeprefix(_FIRST_LAYER), shape) for name, shape in traced if name.startswith(_FIRST_LAYER)]
    at = next(index for index, (name, _) in enumerate(traced) if name.startswith(_FIRST_LAYER))
    layers = [(f"layers/{index}/{name}", shape) for index in range(config.num_layers) for name, shape in layer]
    return (*traced[:at], *layers, *traced[at + len(layer) :])


def build(
    config: LlamaConfig, params: Mapping[str, Array | np.ndarray], dtype: DTypeLike = jnp.float32
) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and state with the given parameters.

    Args:
      config: the model.
      params: arrays by flat name, exactly those of `param_shapes`.
      dtype: parameters are cast to it.

    Raises:
      ValueError: missing, unknown or wrongly shaped parameters; all are listed.
    """
    graphdef, state = abstract(config, dtype)
    return graphdef, fill_state(state, params)


def fill_state(state: nnx.State, params: Mapping[str, Array | np.ndarray]) -> nnx.State:
    """An abstract state with arrays in place of its shapes.

    Args:
      state: of shapes, from `nnx.eval_shape`.
      params: arrays by flat name, exactly those of the state; they are cast to the dtypes of its leaves.

    Raises:
      ValueError: missing, unknown or wrongly shaped parameters; all are listed.
    """
    flat = nnx.to_flat_state(state)
    shapes = {flat_name(path): tuple(leaf.shape) for path, leaf in flat}
    faults = [f"missing {name}" for name in shapes if name not in params]
    faults += [f"unknown {name}" for name in params if name not in shapes]
    faults += [
        f"{name} has shape {tuple(params[name].shape)}, expected {shape}"
        for name, shape in shapes.items()
        if name in params and tuple(params[name].shape) != shape
    ]
    if faults:
        raise ValueError(f"parameters do not fit the model: {'; '.join(faults)}")
    leaves = [(path, leaf.replace(jnp.asarray(params[flat_name(path)], leaf.dtype))) for path, leaf in flat]
    return nnx.from_flat_state(leaves)


def random_params(config: LlamaConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> dict[str, Array]:
    """Freshly initialised parameters by flat name, for training and for synthetic benchmarks."""
    return random_values(param_shapes(config), seed, dtype)
