"""EAGLE-3 drafting: a draft head over the target's features proposes dynamic or sampled trees.

The stable cache holds pairs made of target features only; drafted pairs live in a round's scratch and never
enter it.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from ..models.cache import Cache, DenseLayerTree, commit
from ..models.config import LlamaConfig
from ..models.eagle3 import DraftOptions, Eagle3, build, init_draft_cache
from ..models.eagle3_config import Eagle3Config, TapConvention
from ..models.eagle3_loading import load_eagle3
from ..pallas_kernels import TreeQueries, chain
from ..pallas_kernels.dispatch import Implementation
from ..ranking import best
from ..sampling import Sampling, probabilities, sample_from
from ..tree import DraftTree, take_rows
from .dynamic_tree import check_tree, top_candidates, tree_from_pool
from .protocol import Observation, Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3State:
    """What the head knows of a batch.

    Args:
      cache: stable pairs (feature i, token i + 1), one for every committed token.
      feature: the head's output for each sequence's last pair, from which drafting starts.
    """

    cache: Cache
    feature: Float[Array, "B E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frontier:
    """The nodes that are run next, and all nodes run before them in this round.

    Args:
      tokens, features: of the R nodes to run: their pairs.
      path: which of the X nodes, these R last, are on each node's path, itself included.
      level: depth in the tree of each of the X nodes.
      trees: keys and values of the X - R nodes before, by layer; None at first.
    """

    tokens: Int[Array, "B R"]
    features: Float[Array, "B R E"]
    path: Bool[Array, "B R X"]
    level: Int[Array, " X"]
    trees: tuple[DenseLayerTree, ...] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Eagle3:
    """The part that all EAGLE-3 drafters share: the stable cache and one step of the head.

    Args:
      graphdef, config: structure of the head, from `models.eagle3.build`.
      window: pairs in reach of the head's attention, its own included; None for all. Heads are trained on
        short sequences, and a window keeps them near what they know in long contexts.
      implementation: of the attention.
    """

    graphdef: nnx.GraphDef
    config: Eagle3Config
    window: int | None = None
    implementation: Implementation = None

    def __post_init__(self) -> None:
        _check_window(self.window)

    @property
    def taps(self) -> tuple[int, ...]:
        """See `Drafter`."""
        return self.config.taps

    def init(self, *, batch: int, capacity: int, dtype: Any) -> Eagle3State:
        """See `Drafter`."""
        cache = init_draft_cache(self.config, capacity, batch=batch, dtype=dtype)
        return Eagle3State(cache=cache, feature=jnp.zeros((batch, self.config.hidden_size), dtype))

    def observe(self, params: Params, state: Eagle3State, seen: Observation) -> Eagle3State:
        """Appends a pair for each committed token.

        Pairs at and after `seen.start` are replaced, so a caller may observe a position again with another
        successor.
        """
        head = self._head(params)
        batch, width = seen.tokens.shape
        real = jnp.arange(width) < seen.count[:, None]
        # Columns that are not committed hold anything; nothing of them may reach the cache, not even a NaN.
        taps = tuple(jnp.where(real[..., None], tap, 0) for tap in seen.taps)
        embedded = self._embed(head, params, jnp.where(real, seen.tokens, 0))
        before = Cache(layers=state.cache.layers, length=seen.start)
        features, trees = head(embedded, head.fuse(taps), chain(seen.start, width), before, options=self._options)
        path = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (batch, width))
        cache = commit(before, trees, path, seen.count, None, self.implementation)
        some = seen.count > 0
        last = take_rows(features, jnp.maximum(seen.count - 1, 0)[:, None])[:, 0].astype(state.feature.dtype)
        return Eagle3State(
            cache=Cache(layers=cache.layers, length=jnp.where(some, cache.length, state.cache.length)),
            feature=jnp.where(some[:, None], last, state.feature),
        )

    @property
    def _options(self) -> DraftOptions:
        return DraftOptions(window=self.window, implementation=self.implementation)

    def _head(self, params: Params) -> Eagle3:
        if params.draft is None:
            raise ValueError("params.draft is None: this drafter needs the parameters of its head")
        return nnx.merge(self.graphdef, params.draft)

    def _embed(self, head: Eagle3, params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T E"]:
        if self.config.own_embedding:
            return head.embed(tokens)
        table: Any = params.target["embed"]["embedding"]
        return jnp.take(table[...], tokens, axis=0)

    def _start(self, state: Eagle3State, tokens: Int[Array, "B R"]) -> _Frontier:
        """The children of the root."""
        batch, rows = tokens.shape
        return _Frontier(
            tokens=tokens,
            features=jnp.broadcast_to(state.feature[:, None], (batch, rows, state.feature.shape[1])),
            path=jnp.broadcast_to(jnp.eye(rows, dtype=bool), (batch, rows, rows)),
            level=jnp.ones((rows,), jnp.int32),
            trees=None,
        )

    def _run(
        self, head: Eagle3, params: Params, state: Eagle3State, frontier: _Frontier
    ) -> tuple[Float[Array, "B R E"], tuple[DenseLayerTree, ...]]:
        """The features after the frontier's nodes, and the keys and values of all nodes up to them.

        A node of level s is the pair of its token with its parent's feature, at rotary position L + s - 1.
        """
        length = state.cache.length
        batch, rows, known = frontier.path.shape
        queries = TreeQueries(
            length=length,
            position=length[:, None] + frontier.level - 1,
            ancestor=jnp.pad(frontier.path, ((0, 0), (known - rows, 0), (0, 0))),
            parent=jnp.full((batch, known), -1, jnp.int32),  # attention reads `ancestor` only
        )
        embedded = self._embed(head, params, frontier.tokens)
        return head(embedded, frontier.features, queries, state.cache, frontier.trees, self._options)

    @staticmethod
    def _descend(
        frontier: _Frontier,
        features: Float[Array, "B R E"],
        trees: tuple[DenseLayerTree, ...],
        tokens: Int[Array, "B S"],
        parent: Int[Array, "B S"],
        level: int,
    ) -> _Frontier:
        """The next frontier: S nodes whose parents are rows of this one."""
        batch, rows = tokens.shape
        own = jnp.broadcast_to(jnp.eye(rows, dtype=bool), (batch, rows, rows))
        return _Frontier(
            tokens=tokens,
            features=take_rows(features, parent),
            path=jnp.concatenate([take_rows(frontier.path, parent), own], axis=-1),
            level=jnp.concatenate([frontier.level, jnp.full((rows,), level, jnp.int32)]),
            trees=trees,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Drafter(_Eagle3):
    """Proposes the dynamic tree of `dynamic_tree`: the likeliest continuations, chosen, not sampled.

    One proposal costs `depth` passes of the head over `top_k` nodes; level 1 needs none, it comes from the
    last pair.

    Args:
      depth: expansion steps; the deepest node has depth `depth + 1`.
      top_k: beams, and children of each.
      num_nodes: of the tree, the root included.

    Raises:
      ValueError: values out of range, or a tree larger than its pool.
    """

    depth: int
    top_k: int
    num_nodes: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_tree(depth=self.depth, top_k=self.top_k, nodes=self.num_nodes)
        if self.top_k > self.config.draft_vocab_size:
            raise ValueError(
                f"draft tree: topk={self.top_k} exceeds the draft vocabulary of {self.config.draft_vocab_size}"
            )

    @property
    def max_depth(self) -> int:
        """See `Drafter`; a chain of nodes may be shorter than the pool is deep."""
        return min(self.depth + 1, self.num_nodes - 1)

    def propose(
        self,
        params: Params,
        state: Eagle3State,
        *,
        history: Int[Array, "B H"],
        count: Int[Array, " B"],
        key: PRNGKeyArray,
    ) -> DraftTree:
        """See `Drafter`."""
        head, k = self._head(params), self.top_k
        root = take_rows(history, count[:, None] - 1)
        batch = root.shape[0]
        score, draft_ids = top_candidates(head.logits(state.feature[:, None]), k)
        score, tokens = score[:, 0], head.to_target(draft_ids[:, 0])
        beam_index = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32), (batch, k))
        pool = [(tokens, score, jnp.full_like(beam_index, -1))]
        frontier = self._start(state, tokens)
        for step in range(1, self.depth + 1):
            features, trees = self._run(head, params, state, frontier)
            log_p, draft_ids = top_candidates(head.logits(features), k)
            tokens = head.to_target(draft_ids).reshape(batch, k * k)
            scores = (score[..., None] + log_p).reshape(batch, k * k)
            pool.append((tokens, scores, jnp.repeat(beam_index, k, axis=1)))
            if step == self.depth:
                break
            chosen = best(scores, k)
            score, beam_index = take_rows(scores, chosen), k + (step - 1) * k * k + chosen
            frontier = self._descend(frontier, features, trees, take_rows(tokens, chosen), chosen // k, step + 1)
        tokens, scores, parent = (jnp.concatenate(parts, axis=1) for parts in zip(*pool, strict=True))
        return tree_from_pool(root[:, 0], tokens, scores, parent, top_k=k, nodes=self.num_nodes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3SampledDrafter(_Eagle3):
    """Proposes a tree of fixed shape with children sampled from the head, for the true-q acceptance rule.

    The children of a node are drawn one after the other without replacement; `tree.q` holds the distribution
    of the first draw, exactly as used, with zeros outside the draft vocabulary. A node whose distribution has
    fewer tokens than the shape asks for has fewer valid children.

    Args:
      widths: children of every node of level 0, 1, ...; (1, 1, 1) is a chain of three.
      sampling: how the head's logits become the distribution; usually the target's own sampling.

    Raises:
      ValueError: an empty or non-positive shape, more children than draft tokens, or greedy sampling.
    """

    widths: tuple[int, ...]
    sampling: Sampling

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_sampled(self.widths, self.sampling)
        if max(self.widths) > self.config.draft_vocab_size:
            raise ValueError(
                f"sampled draft tree: widths {self.widths} exceed the draft vocabulary of "
                f"{self.config.draft_vocab_size}"
            )

    @property
    def num_nodes(self) -> int:
        """See `Drafter`."""
        return sum(math.prod(self.widths[:level]) for level in range(len(self.widths) + 1))

    @property
    def max_depth(self) -> int:
        """See `Drafter`."""
        return len(self.widths)

    def propose(
        self,
        params: Params,
        state: Eagle3State,
        *,
        history: Int[Array, "B H"],
        count: Int[Array, " B"],
        key: PRNGKeyArray,
    ) -> DraftTree:
        """See `Drafter`."""
        head = self._head(params)
        root = take_rows(history, count[:, None] - 1)
        batch = root.shape[0]
        tokens, parent, rank = [root], [jnp.full_like(root, -1)], [jnp.zeros_like(root)]
        valid, q = [jnp.ones_like(root, bool)], []
        features, trees, frontier = state.feature[:, None], None, None
        first = 0  # index of the level's first node
        for level, width in enumerate(self.widths):
            if frontier is not None:
                features, trees = self._run(head, params, state, frontier)
            p = probabilities(head.logits(features), self.sampling)
            q.append(self._in_target_vocab(head, p))
            drawn, real = _draw(jax.random.fold_in(key, level), p, width)
            rows = p.shape[1]
            up = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), width)
            real = (real & valid[-1][..., None]).reshape(batch, rows * width)
            tokens.append(head.to_target(drawn).reshape(batch, rows * width))
            # Padding has no parent.
            parent.append(jnp.where(real, first + up, -1))
            valid.append(real)
            rank.append(jnp.broadcast_to(jnp.tile(jnp.arange(width, dtype=jnp.int32), rows), real.shape))
            first += rows
            if level == 0:
                frontier = self._start(state, tokens[-1])
            elif level + 1 < len(self.widths):
                assert frontier is not None and trees is not None
                above = jnp.broadcast_to(up, real.shape)
                frontier = self._descend(frontier, features, trees, tokens[-1], above, level + 1)
        q.append(jnp.zeros((*tokens[-1].shape, self.config.vocab_size), jnp.float32))  # leaves
        return DraftTree(
            tokens=jnp.concatenate(tokens, axis=1),
            parent=jnp.concatenate(parent, axis=1),
            valid=jnp.concatenate(valid, axis=1),
            rank=jnp.concatenate(rank, axis=1),
            q=jnp.concatenate(q, axis=1),
        )

    def _in_target_vocab(self, head: Eagle3, p: Float[Array, "B R Vd"]) -> Float[Array, "B R V"]:
        if not self.config.reduced_vocab:
            return p
        zeros = jnp.zeros((*p.shape[:2], self.config.vocab_size), p.dtype)
        return zeros.at[:, :, head.target_ids[...]].set(p, unique_indices=True)


def _draw(key: PRNGKeyArray, p: Float[Array, "B R V"], count: int) -> tuple[Int[Array, "B R n"], Bool[Array, "B R n"]]:
    """`count` draws without replacement from each row, in order; False where nothing was left to draw."""
    batch, rows, vocab = p.shape
    left = p.reshape(batch * rows, vocab)
    tokens, real = [], []
    for draw in range(count):
        token = sample_from(jax.random.fold_in(key, draw), left)
        real.append(left.max(axis=-1) > 0)
        tokens.append(token)
        left = left.at[jnp.arange(batch * rows), token].set(0.0)
    shape = (batch, rows, count)
    return jnp.stack(tokens, axis=-1).reshape(shape), jnp.stack(real, axis=-1).reshape(shape)


def _check_window(window: int | None) -> None:
    if window is not None and (not isinstance(window, int) or window < 1):
        raise ValueError(f"draft window must be an integer >= 1 or none, got {window!r}")


def _check_sampled(widths: tuple[int, ...], sampling: Sampling) -> None:
    if not widths or any(not isinstance(w, int) or w < 1 for w in widths):
        raise ValueError(f"sampled draft tree: widths must be positive integers, got {widths}")
    if sampling.greedy:
        raise ValueError("sampled draft tree: needs a temperature above 0; for greedy decoding use the dynamic tree")


def load_drafter(
    directory: str | os.PathLike[str],
    target_config: LlamaConfig,
    *,
    depth: int = 6,
    top_k: int = 8,
    nodes: int = 32,
    window: int | None = None,
    dtype: Any = jnp.float32,
    tap_convention: TapConvention | None = None,
    target_params: Mapping[str, Array | np.ndarray] | None = None,
    sampling: Sampling | None = None,
    widths: tuple[int, ...] | None = None,
) -> tuple[Eagle3Drafter | Eagle3SampledDrafter, nnx.State]:
    """A drafter from a checkpoint directory, and the parameters for `Params.draft`.

    The tree is checked first, then the head's config against the target; weights are read last.

    Args:
      directory: see `models.eagle3_loading.load_eagle3`.
      target_config: what is drafted for.
      depth, top_k, nodes: see `Eagle3Drafter`.
      window: pairs in reach of the head's attention, 0 for all, None for what the head's config recommends.
      dtype: of the head's parameters.
      tap_convention, target_params: see `load_eagle3`.
      sampling, widths: both given, make an `Eagle3SampledDrafter` instead of the dynamic tree.

    Raises:
      ValueError: a tree that cannot be built, or a bad window.
      CheckpointError: a head that cannot be read or does not fit the target.
    """
    if (sampling is None) != (widths is None):
        raise ValueError("sampled drafting needs both sampling and widths")
    if window != 0:
        _check_window(window)
    if sampling is not None and widths is not None:
        _check_sampled(widths, sampling)
    else:
        check_tree(depth=depth, top_k=top_k, nodes=nodes)
    loaded = load_eagle3(
        directory,
        target_config,
        tap_convention=tap_convention,
        target_params=target_params,
        dtype=np.dtype(dtype),
    )
    graphdef, state = build(loaded.config, loaded.params, dtype)
    window = loaded.config.draft_window if window is None else window or None
    common: dict[str, Any] = {"graphdef": graphdef, "config": loaded.config, "window": window}
    if sampling is not None and widths is not None:
        return Eagle3SampledDrafter(**common, widths=widths, sampling=sampling), state
    return Eagle3Drafter(**common, depth=depth, top_k=top_k, num_nodes=nodes), state
