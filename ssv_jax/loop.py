"""The decode loop: pure functions that prefill, run verify rounds, and commit what was accepted.

One round: the drafter proposes a tree under the last emitted token; the target scores all nodes in one pass; the
accepted path and a bonus token are emitted, cut at the first stop token or at the budget; exactly the emitted
tokens but the last are committed. Autoregressive decoding is the round whose tree is its root.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .accept import accept
from .drafting.observing import Observing
from .drafting.protocol import Drafter, Observation, Params
from .models.cache import Cache, commit, geometry_of, init_cache
from .models.config import LlamaConfig
from .models.layer_plan import LayerPlan
from .models.llama import LlamaOutput, PassOptions
from .pallas_kernels import TreeQueries, chain, overlap
from .pallas_kernels.dispatch import Implementation
from .sampling import GREEDY, Sampling, sample
from .state import EXHAUSTED, FAILED, RUNNING, STOPPED, DecodeState, Emitted, RoundStats
from .tree import DraftTree, flatten, queries_of, take_rows

# Sharing pays while groups agree (Sparse Speculative Verification leaves the rule open; this is ours).
SHARING_OFF, SHARING_ON, OVERLAP_DECAY = 0.5, 0.6, 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Everything static about a decoding run; two runs with equal fields share compiled code.

    Args:
      model: structure of the target, from `models.llama.build`.
      config: of the target.
      drafter: proposes trees.
      sampling: choice of tokens.
      stop_ids: tokens that end a sequence; they are emitted.
      traversal: order of the nodes in a pass, `bfs` or `dfs`.
      group: consecutive nodes that share a visit list.
      shared: approximate: nodes of a group read their first node's blocks, as long as the moving average of the
        group's overlap stays above `SHARING_OFF`, and again once it exceeds `SHARING_ON`.
      measure_overlap: add block overlaps to the statistics; always so when `shared`.
      plan: refresh and reuse layers, in prefill, decoding and verification alike; None refreshes everywhere.
      implementation: of the attention ops.
    """

    model: nnx.GraphDef
    config: LlamaConfig
    drafter: Drafter
    sampling: Sampling = GREEDY
    stop_ids: tuple[int, ...] = ()
    traversal: str = "bfs"
    group: int = 1
    shared: bool = False
    measure_overlap: bool = False
    plan: LayerPlan | None = None
    implementation: Implementation = None

    def options(self, *, is_chain: bool) -> PassOptions:
        """Static choices of one pass of the target."""
        return PassOptions(
            plan=self.plan,
            group=self.group,
            taps=self.drafter.taps,
            is_chain=is_chain,
            implementation=self.implementation,
        )


def init_state(
    decoding: Decoding,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    *,
    max_new_tokens: int,
    key: PRNGKeyArray,
    capacity: int,
    dtype: Any = jnp.float32,
) -> DecodeState:
    """The state before prefill.

    Args:
      decoding: the run.
      prompts: token ids, one row per sequence, padded at the end.
      lengths: tokens of each prompt, at least 1.
      max_new_tokens: tokens to emit at most, at least 1.
      key: typed key; every draw derives from it and from the round.
      capacity: tokens that the cache holds; the last emitted token needs no place.
      dtype: of the caches.

    Raises:
      ValueError: prompts that do not fit the capacity, or a budget below 1.
    """
    batch, width = prompts.shape
    if width > capacity:
        raise ValueError(f"prompts of {width} tokens do not fit a cache of {capacity}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
    budget = min(max_new_tokens, capacity + 1)  # no more fits, and the sum below must not wrap
    cache = init_cache(decoding.config, capacity, batch=batch, dtype=dtype)
    history = jnp.zeros((batch, cache.capacity + 1), jnp.int32).at[:, :width].set(prompts)
    return DecodeState(
        cache=cache,
        history=history,
        # Every leaf its own buffer: the state is donated.
        count=jnp.array(lengths, jnp.int32),
        prompt=jnp.array(lengths, jnp.int32),
        limit=jnp.minimum(lengths + budget, capacity + 1).astype(jnp.int32),
        status=jnp.full((batch,), RUNNING, jnp.int32),
        key=jnp.array(key),
        round=jnp.zeros((), jnp.int32),
        drafter=decoding.drafter.init(batch=batch, capacity=cache.capacity, dtype=dtype),
        stats=RoundStats.zero(decoding.drafter.max_depth),
        shared_on=jnp.ones((), bool),
        overlap_ema=jnp.ones((), jnp.float32),
    )


def _append_history(
    history: Int[Array, "B H"], count: Int[Array, " B"], tokens: Int[Array, "B P"], emitted: Int[Array, " B"]
) -> Int[Array, "B H"]:
    """history[b, count[b] + i] = tokens[b, i] for i < emitted[b]."""
    slot = jnp.arange(tokens.shape[1])
    column = jnp.where(slot < emitted[:, None], count[:, None] + slot, history.shape[1])
    return history.at[jnp.arange(history.shape[0])[:, None], column].set(tokens, mode="drop")


def _cut(
    decoding: Decoding,
    state: DecodeState,
    tokens: Int[Array, "B P"],
    available: Int[Array, " B"],
    logits: Float[Array, "B V"],
) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """How many of the available tokens are emitted, and the status after them.

    Tokens are scanned in order; the first stop token or the budget ends the scan, and on a tie the stop counts.
    `logits` are those that the last token comes from: where they are not finite, nothing is emitted.
    """
    slot = jnp.arange(tokens.shape[1])
    stop = jnp.isin(tokens, jnp.asarray(decoding.stop_ids, jnp.int32)) & (slot < available[:, None])
    stops = stop.any(1)
    up_to_stop = jnp.where(stops, jnp.argmax(stop, axis=1) + 1, available)
    allowed = state.limit - state.count
    emitted = jnp.minimum(up_to_stop, allowed)
    status = jnp.where(emitted >= allowed, EXHAUSTED, RUNNING)
    status = jnp.where(stops & (up_to_stop <= allowed), STOPPED, status)
    finite = jnp.isfinite(logits.max(-1))  # a NaN wins a maximum
    status = jnp.where(finite, status, FAILED)
    running = state.status == RUNNING
    return jnp.where(running & finite, emitted, 0), jnp.where(running, status, state.status)


def _run_target(decoding: Decoding, params: Params, *args: Any, **kwargs: Any) -> LlamaOutput:
    return nnx.merge(decoding.model, params.target)(*args, **kwargs)


def _commit(
    decoding: Decoding, cache: Cache, output: LlamaOutput, path: Int[Array, "B P"], count: Int[Array, " B"]
) -> Cache:
    nsa = decoding.config.nsa
    geometry = geometry_of(nsa) if nsa else None
    return commit(cache, output.trees, path, count, geometry, decoding.implementation)


def prefill_chunk(decoding: Decoding, params: Params, state: DecodeState, size: int) -> tuple[DecodeState, Array]:
    """Runs the next `size` prompt tokens of every sequence; where a prompt ends, emits its first token.

    Args:
      decoding: the run.
      params: of target and drafter.
      state: before.
      size: tokens of this pass, static; sequences with fewer left run those.

    Returns:
      The state after, and the logits [B, V] at each sequence's last prompt token of this pass.
    """
    if size < 1:
        raise ValueError(f"size must be >= 1, got {size}")
    length = state.cache.length
    count = jnp.clip(state.prompt - length, 0, size)
    index = jnp.minimum(length[:, None] + jnp.arange(size + 1), state.history.shape[1] - 1)
    tokens = take_rows(state.history, index)
    last = jnp.maximum(count - 1, 0)[:, None]
    output = _run_target(
        decoding,
        params,
        tokens[:, :-1],
        chain(length, size),
        state.cache,
        decoding.options(is_chain=True),
        last,
    )
    path = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (length.shape[0], size))
    cache = _commit(decoding, state.cache, output, path, count)

    ends = (count > 0) & (cache.length == state.prompt)
    key = jax.random.fold_in(state.key, state.round)
    first = sample(key, output.logits[:, 0], decoding.sampling)
    emitted, status = _cut(decoding, state, first[:, None], jnp.where(ends, 1, 0), output.logits[:, 0])
    status = jnp.where(ends, status, state.status)
    following = jnp.where(ends[:, None] & (jnp.arange(size) == last), first[:, None], tokens[:, 1:])
    drafter = decoding.drafter.observe(
        params,
        state.drafter,
        Observation(tokens=following, taps=output.taps, start=length, count=count),
    )
    stats = dataclasses.replace(state.stats, emitted=state.stats.emitted + emitted.sum())
    state = dataclasses.replace(
        state,
        cache=cache,
        history=_append_history(state.history, state.count, first[:, None], emitted),
        count=state.count + emitted,
        status=status,
        round=state.round + 1,
        drafter=drafter,
        stats=stats,
    )
    return state, output.logits[:, 0]


def decode_round(decoding: Decoding, params: Params, state: DecodeState) -> tuple[DecodeState, Emitted]:
    """One draft, verify, accept and commit. Sequences that are not running stay as they are.

    Args:
      decoding: the run.
      params: of target and drafter.
      state: after prefill.

    Returns:
      The state after, and at most `max_depth + 1` emitted tokens per sequence.
    """
    draft_key, accept_key = jax.random.split(jax.random.fold_in(state.key, state.round))
    drafter = decoding.drafter
    tree = drafter.propose(params, state.drafter, history=state.history, count=state.count, key=draft_key)
    if drafter.max_depth > 0:
        tree = flatten(tree, decoding.traversal, drafter.max_depth)
    queries = queries_of(tree, state.cache.length)
    options = decoding.options(is_chain=drafter.num_nodes == 1)
    sharing = state.shared_on if decoding.shared else None
    output = _run_target(decoding, params, tree.tokens, queries, state.cache, options, shared=sharing)
    result = accept(tree, output.logits, decoding.sampling, accept_key, drafter.max_depth)

    # Emitted: the accepted drafts, then the bonus token.
    width = drafter.max_depth + 1
    slot = jnp.arange(width)
    path = jnp.maximum(result.path, 0)
    drafts = take_rows(tree.tokens, jnp.roll(path, -1, axis=1))
    tokens = jnp.where(slot < result.num_accepted[:, None], drafts, result.bonus[:, None])
    last = jnp.take_along_axis(path, result.num_accepted[:, None], axis=1)
    emitted, status = _cut(decoding, state, tokens, result.num_accepted + 1, take_rows(output.logits, last)[:, 0])
    cache = _commit(decoding, state.cache, output, path, emitted)
    seen = Observation(
        tokens=tokens,
        taps=tuple(take_rows(tap, path) for tap in output.taps),
        start=state.cache.length,
        count=emitted,
    )
    if decoding.config.nsa is not None and (decoding.shared or decoding.measure_overlap):
        state = _watch_overlap(decoding, state, tree, queries, output)
    state = dataclasses.replace(
        state,
        cache=cache,
        history=_append_history(state.history, state.count, tokens, emitted),
        count=state.count + emitted,
        status=status,
        round=state.round + 1,
        drafter=drafter.observe(params, state.drafter, seen),
        stats=_count(state, tree, queries.position - state.cache.length[:, None], result.num_accepted, emitted),
    )
    drafted = (tree.valid & (tree.parent >= 0)).sum(1, dtype=jnp.int32)
    return state, Emitted(
        tokens=tokens,
        count=emitted,
        drafted=jnp.where(emitted > 0, drafted, 0)[:, None],
        accepted=jnp.minimum(result.num_accepted, emitted)[:, None],
        emitted=emitted[:, None],
    )


def _watch_overlap(
    decoding: Decoding, state: DecodeState, tree: DraftTree, queries: TreeQueries, output: LlamaOutput
) -> DecodeState:
    """Adds this round's overlaps, and decides whether the next round shares."""
    assert decoding.config.nsa is not None
    measure = functools.partial(
        overlap,
        position=queries.position,
        valid=tree.valid & (state.status == RUNNING)[:, None],
        geometry=geometry_of(decoding.config.nsa),
        group=decoding.group,
    )
    layers = [measure(choice.blocks) for choice in output.selections if choice is not None]
    total = jax.tree.map(lambda *parts: sum(parts), *layers)
    mean = total.group / jnp.maximum(total.group_count, 1)
    ema = jnp.where(
        total.group_count > 0, OVERLAP_DECAY * state.overlap_ema + (1 - OVERLAP_DECAY) * mean, state.overlap_ema
    )
    stats = dataclasses.replace(
        state.stats,
        overlap=state.stats.overlap + total.raw,
        free_overlap=state.stats.free_overlap + total.free,
        overlap_count=state.stats.overlap_count + total.count,
    )
    shared_on = jnp.where(state.shared_on, ema >= SHARING_OFF, ema > SHARING_ON)
    return dataclasses.replace(state, stats=stats, overlap_ema=ema, shared_on=shared_on)


def _count(
    before: DecodeState,
    tree: DraftTree,
    depth: Int[Array, "B N"],
    accepted: Int[Array, " B"],
    emitted: Int[Array, " B"],
) -> RoundStats:
    """Statistics after a round; drafts cut off by a stop or the budget do not count as accepted."""
    stats = before.stats
    running = before.status == RUNNING
    drafts = tree.valid & (depth > 0) & running[:, None]
    levels = jnp.arange(1, stats.offered_at.shape[0] + 1)
    kept = jnp.where(running, jnp.minimum(accepted, emitted), 0)
    offered = (drafts[:, :, None] & (depth[:, :, None] == levels)).any(1)
    return dataclasses.replace(
        stats,
        rounds=stats.rounds + running.sum(),
        drafted=stats.drafted + drafts.sum(),
        accepted=stats.accepted + kept.sum(),
        emitted=stats.emitted + emitted.sum(),
        offered_at=stats.offered_at + offered.sum(0),
        accepted_at=stats.accepted_at + (kept[:, None] >= levels).sum(0),
    )


def decode_until(
    decoding: Decoding, params: Params, state: DecodeState, rounds: int, most: Int[Array, ""] | None = None
) -> tuple[DecodeState, Emitted]:
    """Up to `rounds` rounds on the device, fewer when every sequence has finished.

    Args:
      decoding: the run.
      params: of target and drafter.
      state: after prefill.
      rounds: static bound.
      most: rounds of this call at most; None for `rounds`, which also bounds it.

    Returns:
      The state after, and all tokens emitted by this call.
    """
    if rounds < 1:
        raise ValueError(f"rounds must be >= 1, got {rounds}")
    batch = state.count.shape[0]
    width = decoding.drafter.max_depth + 1
    zeros = jnp.zeros((batch, rounds), jnp.int32)
    empty = Emitted(
        tokens=jnp.zeros((batch, rounds * width), jnp.int32),
        count=jnp.zeros((batch,), jnp.int32),
        drafted=zeros,
        accepted=zeros,
        emitted=zeros,
    )
    first, drafter = state.round, decoding.drafter
    bound = rounds if most is None else jnp.minimum(most, rounds)
    if isinstance(drafter, Observing):
        entered = drafter.enter(state.drafter, rounds, decoding.config.hidden_size)
        state = dataclasses.replace(state, drafter=entered)

    def running(carry: tuple[DecodeState, Emitted]) -> Bool[Array, ""]:
        return (carry[0].status == RUNNING).any() & (carry[0].round - first < bound)

    def step(carry: tuple[DecodeState, Emitted]) -> tuple[DecodeState, Emitted]:
        state, out = carry
        turn = state.round - first
        state, new = decode_round(decoding, params, state)

        def record(into: Array, value: Array) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(into, value, turn, axis=1)

        return state, Emitted(
            tokens=_append_history(out.tokens, out.count, new.tokens, new.count),
            count=out.count + new.count,
            drafted=record(out.drafted, new.drafted),
            accepted=record(out.accepted, new.accepted),
            emitted=record(out.emitted, new.emitted),
        )

    state, out = jax.lax.while_loop(running, step, (state, empty))
    if isinstance(drafter, Observing):
        state = dataclasses.replace(state, drafter=drafter.leave(params, state.drafter))
    return state, out
