"""Decoding of a model in memory, by strategies that share one prefill, fixed or planned.

A `Bench` holds the executables of a model's strategies for one capacity, all compiled at once. A `Document` is a text
in the cache: it is prefilled piece by piece, and every strategy decodes from where it stands. Nothing is copied for
that: rows of a cache before its length never change, and rows after it are never read, so going back takes the few
other leaves.

Decoding is timed as `Engine` runs it: wall time of the calls and of what the host does between them, after a
synchronisation, without compilation and without prefill.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import _evaluation as evaluation
import jax
import jax.numpy as jnp
import numpy as np
from _subject import Subject

from ssv_jax import Strategy, loop
from ssv_jax.calls import Packed, decode_packed, lower
from ssv_jax.controller import Decision, Fixed, Observed, Pilot
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Observation, Params
from ssv_jax.models.cache import DenseLayerCache
from ssv_jax.planning import build_lanes, layer_plan
from ssv_jax.state import RUNNING, DecodeState, RoundStats
from ssv_jax.tree import DraftTree

PLAIN = "plain"  # autoregressive decoding that carries no draft head along
UNIT = 2048  # capacities are multiples of it: others make XLA pad whole caches
FAR = 1 << 30
ROWS = ("k", "v", "k_cmp", "v_cmp")  # leaves of caches that hold a row a token


def _is_rows(path: Sequence[Any]) -> bool:
    """Whether a leaf of a `DecodeState` holds a row a token in a cache."""
    names = [getattr(key, "name", None) for key in path]
    return "cache" in names and names[-1] in ROWS


def kept(state: DecodeState) -> list[Any]:
    """All leaves but the rows of caches, which are None."""
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    return [None if _is_rows(path) else leaf for path, leaf in leaves]


def restored(state: DecodeState, leaves: Sequence[Any]) -> DecodeState:
    """The state that `leaves` were kept of, in the rows of `state`, which has gone on from there."""
    now, structure = jax.tree.flatten(state)
    return jax.tree.unflatten(structure, [a if b is None else b for a, b in zip(now, leaves, strict=True)])


@jax.jit
def _copies(leaves: list[Any]) -> list[Any]:
    return jax.tree.map(jnp.copy, leaves)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Frozen:
    """Proposes the tree that is its state."""

    num_nodes: int
    max_depth: int
    taps: tuple[int, ...] = ()

    def init(self, *, batch: int, capacity: int, dtype: Any) -> Any:
        raise NotImplementedError("the caller gives the tree")

    def observe(self, params: Params, state: DraftTree, seen: Observation) -> DraftTree:
        # Never more, but XLA must not find that all rounds are the same.
        more = (seen.count > FAR).astype(jnp.int32)
        return dataclasses.replace(state, tokens=state.tokens + more[:, None])

    def propose(self, params: Params, state: DraftTree, **known: Any) -> DraftTree:
        return state


def verify_rounds(decoding: loop.Decoding, params: Params, state: DecodeState, rounds: jax.Array) -> DecodeState:
    """Drafts once, then verifies, accepts and commits that tree `rounds` times, each from the same state."""
    drafter = decoding.drafter
    key = jax.random.fold_in(state.key, state.round)
    tree = drafter.propose(params, state.drafter, history=state.history, count=state.count, key=key)
    frozen = Frozen(num_nodes=drafter.num_nodes, max_depth=drafter.max_depth)
    only = dataclasses.replace(decoding, drafter=frozen)

    def step(_: Any, now: DecodeState) -> DecodeState:
        new, _ = loop.decode_round(only, params, now)
        return dataclasses.replace(restored(new, kept(now)), drafter=new.drafter)

    end = jax.lax.fori_loop(0, rounds, step, dataclasses.replace(state, drafter=tree))
    return dataclasses.replace(end, drafter=state.drafter)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One call to the device: its decision, wall seconds, and the drafts accepted in each round."""

    decision: Decision
    seconds: float
    accepted: tuple[int, ...]
    emitted: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One decoding: the new tokens, the first of which prefill emitted, and the calls."""

    tokens: tuple[int, ...]
    calls: tuple[Call, ...]

    @property
    def seconds(self) -> float:
        return sum(call.seconds for call in self.calls)

    @property
    def rounds(self) -> int:
        return sum(len(call.accepted) for call in self.calls)

    @property
    def emitted(self) -> int:
        return sum(call.emitted for call in self.calls)

    @property
    def accepted(self) -> list[int]:
        return [count for call in self.calls for count in call.accepted]

    @property
    def tok_s(self) -> float:
        return self.emitted / self.seconds if self.calls else math.nan

    @property
    def tokens_a_round(self) -> float:
        return self.emitted / max(self.rounds, 1)

    @property
    def ms_a_round(self) -> float:
        return self.seconds / max(self.rounds, 1) * 1e3

    @property
    def by_label(self) -> dict[str, int]:
        """Calls of each strategy."""
        return dict(collections.Counter(call.decision.label for call in self.calls))

    @property
    def changes(self) -> list[Decision]:
        """Decisions that were not to go on."""
        return [call.decision for call in self.calls if call.decision.kind not in ("start", "keep")]


def capacity_for(tokens: int) -> int:
    """The capacity for so many tokens."""
    unit = UNIT if tokens > UNIT else 256
    return -(-tokens // unit) * unit


class Bench:
    """Strategies of a subject that decode one state of one capacity.

    Args:
      subject: the model.
      strategies: of one layer plan; a plain one is added for prefill and as the baseline, `PLAIN`.
      dtype: of the caches.
      capacity: tokens.
      budget: new tokens of each decoding.
      rounds: rounds a call.
      chunk: tokens of a prefill pass.
      verify: labels whose verification is timed alone.
      planned: whether plain decoding that carries the head along is among the strategies, as a planner needs it.
      stops: whether an end token ends a decoding.
      implementation: of the attention.
    """

    def __init__(
        self,
        subject: Subject,
        strategies: Iterable[Strategy],
        *,
        dtype: Any,
        capacity: int,
        budget: int,
        rounds: int,
        chunk: int,
        verify: Iterable[str] = (),
        planned: bool = True,
        stops: bool = False,
        implementation: str | None = None,
    ) -> None:
        asked = list(dict.fromkeys(strategies))
        plans = {(s.refresh_every, s.refresh_layers) for s in asked}
        if len(plans) != 1:
            raise ValueError(f"strategies of one layer plan share a cache, got plans {sorted(map(str, plans))}")
        refresh, layers = plans.pop()
        plain = Strategy(refresh_every=refresh, refresh_layers=layers)
        self.subject, self.dtype, self.capacity = subject, jnp.dtype(dtype), capacity
        self.budget, self.rounds, self.chunk, self.verify = budget, rounds, chunk, tuple(verify)
        drafts = any(strategy.draft == "eagle3" for strategy in asked)
        head = subject.head if drafts else None
        self.lanes = build_lanes(
            [plain, *asked], subject.config, None, self.dtype, {}, head=head, implementation=implementation
        )
        self.params = Params(target=subject.target, draft=None if head is None else head[1])
        named = {label: (self.lanes.strategies[label], drafter) for label, drafter in self.lanes.drafters.items()} | {
            PLAIN: (plain, NoDrafter())
        }
        self.decodings = {
            label: loop.Decoding(
                model=subject.graphdef,
                config=subject.config,
                drafter=drafter,
                stop_ids=subject.stop if stops else (),
                traversal=strategy.traversal,
                group=strategy.group,
                plan=layer_plan(subject.config, strategy),
                implementation=implementation,
            )
            for label, (strategy, drafter) in named.items()
        }
        unused = self.lanes.base if head is not None and not planned else PLAIN if head is None else None
        self.decoded = tuple(label for label in self.decodings if label != unused)
        self._compiled: dict[Any, Any] = {}

    @property
    def labels(self) -> tuple[str, ...]:
        """All strategies, the plain one first."""
        return tuple(self.lanes.strategies)

    def first_state(self, tokens: Sequence[int]) -> DecodeState:
        padded = np.zeros((1, self.capacity), np.int32)
        padded[0, : len(tokens)] = tokens
        state = loop.init_state(
            self.decodings[self.lanes.base],
            jnp.asarray(padded),
            jnp.ones((1,), jnp.int32),
            max_new_tokens=self.budget,
            key=jax.random.key(0),
            capacity=self.capacity,
            dtype=self.dtype,
        )
        return dataclasses.replace(state, stats=RoundStats.zero(self.lanes.depth))

    def jobs(self, prefills: bool = True) -> dict[tuple[Any, ...], Callable[[], Any]]:
        """What is to be compiled, for `compile_all`; keys begin with this bench."""

        def first(label: str) -> DecodeState:
            state = self.first_state([0])
            return dataclasses.replace(state, drafter=None) if label == PLAIN else state

        shapes, bare = (jax.eval_shape(functools.partial(first, label)) for label in ("", PLAIN))

        def prefill() -> Any:
            return lower(loop.prefill_chunk, self.decodings[self.lanes.base], self.params, shapes, self.chunk)

        def decode(label: str) -> Any:
            state, most = bare if label == PLAIN else shapes, np.int32(self.rounds)
            return lower(decode_packed, self.decodings[label], self.params, state, self.rounds, most)

        def verify(label: str) -> Any:
            jitted = jax.jit(verify_rounds, static_argnames="decoding", donate_argnames="state")
            state = bare if label == PLAIN else shapes
            count = jax.ShapeDtypeStruct((), jnp.int32)
            return jitted.lower(decoding=self.decodings[label], params=self.params, state=state, rounds=count)

        jobs: dict[tuple[Any, ...], Callable[[], Any]] = {(self, "prefill"): prefill} if prefills else {}
        for label in self.decoded:
            jobs[self, "decode", label] = functools.partial(decode, label)
        for label in self.verify:
            jobs[self, "verify", label] = functools.partial(verify, label)
        return jobs

    def __str__(self) -> str:
        return f"{'dense' if self.subject.config.nsa is None else 'NSA'} {self.capacity}"

    def take(self, compiled: dict[tuple[Any, ...], Any]) -> None:
        """Its own part of what `compile_all` returned."""
        self._compiled |= {key[1:]: value for key, value in compiled.items() if key[0] is self}

    def prefill(self, state: DecodeState) -> DecodeState:
        return self._compiled["prefill",](self.params, state)[0]

    def decode(self, label: str, state: DecodeState, rounds: int | None = None) -> tuple[DecodeState, Packed]:
        """One call, of all its rounds if not told fewer."""
        most = np.int32(rounds or self.rounds)
        if label != PLAIN or self.params.draft is None:  # without a head they are the same
            label = self.lanes.base if label == PLAIN else label
            return self._compiled["decode", label](self.params, state, most)
        bare = dataclasses.replace(state, drafter=None)
        new, out = self._compiled["decode", PLAIN](self.params, bare, most)
        return dataclasses.replace(new, drafter=state.drafter), out

    def verified(self, label: str, state: DecodeState, rounds: int) -> DecodeState:
        """See `verify_rounds`."""
        call = self._compiled["verify", label]
        if label != PLAIN:
            return call(params=self.params, state=state, rounds=jnp.int32(rounds))
        new = call(params=self.params, state=dataclasses.replace(state, drafter=None), rounds=jnp.int32(rounds))
        return dataclasses.replace(new, drafter=state.drafter)


def compile_benches(benches: Sequence[Bench], prefills: Sequence[bool] | None = None, quick: bool = False) -> float:
    """Compiles everything, all at once, see `compile_all`; returns the seconds."""
    began = time.perf_counter()
    jobs: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for bench, with_prefill in zip(benches, prefills or [True] * len(benches), strict=True):
        jobs |= bench.jobs(with_prefill)
    compiled = evaluation.compile_all(jobs, quick)
    for bench in benches:
        bench.take(compiled)
    return time.perf_counter() - began


class Document:
    """A text in the cache of a bench.

    Args:
      bench: that decodes it.
      tokens: of the whole text.
    """

    def __init__(self, bench: Bench, tokens: Sequence[int], state: DecodeState | None = None) -> None:
        self.bench, self.tokens, self.context = bench, tokens, 0
        self.state = bench.first_state(tokens) if state is None else state
        self._before = self._here = _copies(kept(self.state))

    def reach(self, context: int) -> float:
        """Prefills up to `context` tokens of the text, from where an earlier call stopped; returns seconds.

        The last pass is done again when the text goes on: it ended with a token of the model's own.
        """
        if not self.context < context <= len(self.tokens):
            raise ValueError(f"context must be in ({self.context}, {len(self.tokens)}], got {context}")
        state = restored(self.state, self._before)
        place = jnp.full((1,), context, jnp.int32)
        running = jnp.full((1,), RUNNING, jnp.int32)
        state = dataclasses.replace(
            state, prompt=place, count=jnp.copy(place), limit=place + self.bench.budget, status=running
        )
        passes = -(-(context - int(state.cache.length[0])) // self.bench.chunk)
        jax.block_until_ready(state)
        began = time.perf_counter()
        for number in range(passes):
            if number == passes - 1:
                self._before = _copies(kept(state))
            state = self.bench.prefill(state)
        jax.block_until_ready(state.count)
        seconds = time.perf_counter() - began
        self.state, self.context = state, context
        self._here = _copies(kept(state))
        return seconds

    def filled(self, context: int) -> None:
        """Stands at `context` tokens of whatever the cache holds; see `fill`."""
        place = jnp.full((1,), context, jnp.int32)
        state = self.state
        draft = state.drafter
        if draft is not None:
            draft = dataclasses.replace(draft, cache=dataclasses.replace(draft.cache, length=jnp.copy(place)))
        self.state = dataclasses.replace(
            state,
            cache=dataclasses.replace(state.cache, length=place),
            prompt=jnp.copy(place),
            count=place + 1,
            limit=place + 1 + self.bench.budget,
            status=jnp.full((1,), RUNNING, jnp.int32),
            drafter=draft,
        )
        self.context = context
        self._here = _copies(kept(self.state))

    def moved(self, bench: Bench) -> Document:
        """The same place of the same text in a smaller cache of a dense model."""
        assert bench.subject is self.bench.subject
        state = restored(self.state, _copies(self._here))
        assert isinstance(state.cache.layers[0], DenseLayerCache)
        wanted = jax.eval_shape(functools.partial(bench.first_state, [0]))
        cut = jax.tree.map(lambda leaf, like: leaf[tuple(slice(n) for n in like.shape)], state, wanted)
        other = Document(bench, self.tokens, cut)
        other.context = self.context
        return other

    @property
    def known(self) -> list[int]:
        """Tokens before decoding: the text up to here, and the one that prefill emitted."""
        return [*self.tokens[: self.context], int(self.state.history[0, self.context])]

    def run(self, pilot: Pilot) -> Run:
        """Decodes from here, with the strategies that the pilot chooses."""
        bench = self.bench
        state = restored(self.state, _copies(self._here))
        jax.block_until_ready(state)
        tokens = [int(state.history[0, self.context])]
        calls = []
        running = int(state.status[0]) == RUNNING
        began = time.perf_counter()
        while running:
            context = self.context + len(tokens)
            decision = pilot.decide(context)
            state, packed = bench.decode(decision.label, state, decision.rounds)
            out = packed.fetch()
            running = out.status[0] == RUNNING
            happened = out.emitted[0] > 0
            accepted = tuple(out.accepted[0][happened].tolist())
            seconds = time.perf_counter() - began
            new = out.tokens[0, : int(out.count[0])].tolist()
            pilot.observe(
                Observed(label=decision.label, context=context, accepted=accepted, seconds=seconds, tokens=new)
            )
            tokens += new
            before, began = began, time.perf_counter()
            calls.append(Call(decision=decision, seconds=began - before, accepted=accepted, emitted=len(new)))
        self.state = state
        return Run(tokens=tuple(tokens), calls=tuple(calls))

    def timed(self, label: str) -> float:
        """Seconds of one call from here."""
        state = restored(self.state, _copies(self._here))
        jax.block_until_ready(state)
        began = time.perf_counter()
        self.state, packed = self.bench.decode(label, state)
        packed.fetch()
        return time.perf_counter() - began

    def fixed(self, label: str) -> Run:
        """Decodes from here with one strategy."""
        return self.run(Fixed(label))

    def warm(self) -> bool:
        """One call of every executable: the first is slow."""
        for label in self.bench.decoded:
            self.state, _ = self.bench.decode(label, restored(self.state, _copies(self._here)))
        for label in self.bench.verify:
            self.state = self.bench.verified(label, restored(self.state, _copies(self._here)), 1)
        jax.block_until_ready(self.state.count)
        return True

    def verify_ms(self, label: str, repeats: int, rounds: int = 32) -> list[float]:
        """Milliseconds of verifying a round's tree, drafted here: what longer loops take more than short ones."""
        times = []
        for _ in range(repeats):
            seconds = []
            for count in (1, 1 + rounds):
                state = restored(self.state, _copies(self._here))
                jax.block_until_ready(state)
                began = time.perf_counter()
                self.state = self.bench.verified(label, state, count)
                jax.block_until_ready(self.state.count)
                seconds.append(time.perf_counter() - began)
            times.append((seconds[1] - seconds[0]) / rounds * 1e3)
        return times


def fill(state: DecodeState, vocab_size: int, seed: int = 0) -> DecodeState:
    """Random rows in all caches and random tokens in the history, in place. What is computed means nothing."""
    paths = jax.tree_util.tree_flatten_with_path(state)[0]
    structure = jax.tree.structure(state)

    @functools.partial(jax.jit, donate_argnums=0)
    def one(leaf: jax.Array, key: jax.Array) -> jax.Array:
        return jax.random.normal(key, leaf.shape, leaf.dtype)

    keys = jax.random.split(jax.random.key(seed), len(paths))
    leaves = [
        one(leaf, key) if _is_rows(path) or getattr(path[-1], "name", "").startswith("tail_") else leaf
        for (path, leaf), key in zip(paths, keys, strict=True)
    ]
    state = jax.tree.unflatten(structure, leaves)
    history = jax.random.randint(jax.random.key(seed), state.history.shape, 0, vocab_size, jnp.int32)
    return dataclasses.replace(state, history=history)


def same_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two texts have in common before they part."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def distinct(tokens: Sequence[int], size: int = 4) -> float:
    """Share of n-grams that are new: near 0 for a text that repeats itself, which flatters drafting."""
    grams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
