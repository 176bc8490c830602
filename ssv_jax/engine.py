"""The host side: loads a model, compiles what it needs, and turns text into text."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .controller import Decision, Fixed, Observed, Pilot
from .drafting.build import OwnHead, Platform, check_drafter, settle
from .drafting.protocol import Params
from .errors import ContextLengthError, UsageError
from .generation import Chunk, FinishReason, Generation, GenerationOptions
from .loop import Decoding, init_state
from .models.config import NSA_PRESETS, LlamaConfig, NSAConfig
from .models.eagle3_config import TapConvention
from .models.llama import build
from .models.loading import Checkpoint, load, read_model_config
from .models.sharding import make_mesh, param_sharding, state_sharding
from .pallas_kernels import implementations
from .pallas_kernels.dispatch import Implementation
from .planning import (
    PlanLog,
    Planner,
    ProfilePlanner,
    build_lanes,
    check_strategy,
    fingerprint,
    layer_plan,
    planned_strategies,
    read_planner,
)
from .profiles import Profile
from .registry import DEFAULT_MODEL, resolve
from .state import RUNNING, STOPPED, DecodeState, RoundStats, check_finite
from .stopping import StopScanner
from .strategy import PrecisionClass, Strategy
from .tokenizer import Tokenizer
from .variants import Variants

Progress = Callable[[str, int, int], None]

_PREFILL_SIZES = (16, 64, 256, 512)
_SMALLEST_CAPACITY = 256
# Rounds per call: enough to hide what a call costs beside them (2 to 3 ms on an H200), few enough for text to flow.
_ROUNDS: dict[Platform, int] = {"cpu": 8, "gpu": 32}


def _no_progress(stage: str, done: int, total: int) -> None:
    """Silence."""


def parse_mesh(text: str) -> int:
    """Devices of `tensor=N`.

    Raises:
      UsageError: anything else.
    """
    axis, _, number = text.partition("=")
    if axis.strip() != "tensor" or not number.strip().isdecimal() or int(number) < 1:
        raise UsageError(f"mesh must read tensor=N with N >= 1, got {text!r}")
    return int(number)


class Engine:
    """A loaded model. Use `Engine.load`; then `generate`, `stream` and `chat`.

    Calls compile on first use of a shape and reuse it afterwards; nothing recompiles for another prompt of a
    similar length.
    """

    def __init__(
        self,
        config: LlamaConfig,
        params: Mapping[str, Any],
        *,
        tokenizer: Tokenizer | None = None,
        dtype: Any = jnp.float32,
        strategy: Strategy | None = None,
        precision: PrecisionClass = PrecisionClass.LOSSLESS,
        planner: Planner | Profile | str | Path | None = None,
        explain: Callable[[Decision], None] | None = None,
        draft_model: str | Path | None = None,
        own_head: OwnHead | None = None,
        tap_convention: TapConvention | None = None,
        implementation: Implementation = None,
        tensor: int = 1,
        measure_overlap: bool = False,
        notes: Sequence[str] = (),
        load_seconds: float = 0.0,
        progress: Progress = _no_progress,
    ) -> None:
        """Takes a model that is already in memory.

        Args:
          config: the model.
          params: arrays by flat name, as `models.loading.load` gives them.
          tokenizer: None serves token ids only.
          dtype: of parameters, activations and caches.
          strategy: how to draft and verify; by default `Strategy(draft="auto")`.
          precision: the deviation that is acceptable.
          planner: a profile or its file: the strategy is chosen from it, and changed as the run shows what pays.
          explain: called with every decision of a planner.
          draft_model: directory of the drafter's network, for drafters that have one.
          own_head: the model's own, for `auto` and for an `eagle3` that names no draft model.
          tap_convention: what its tap ids mean, where they are not the usual ones (`resolve_taps`).
          implementation: of the attention ops, see `pallas_kernels.dispatch.run`; by default the fastest that takes
            the shapes, and XLA on several devices.
          tensor: devices to spread heads, feed-forward and vocabulary over.
          measure_overlap: report how far the blocks of neighbouring draft nodes agree, which costs some launches a
            layer. Where a strategy shares blocks it is measured in any case.
          notes: what to tell users about the weights.
          load_seconds: time already spent loading.
          progress: called with (stage, done, total).

        Raises:
          UsageError: options that do not fit each other or the model.
          ProfileError: a profile that cannot be read, or was measured for another model.
        """
        self.config, self.tokenizer, self.dtype = config, tokenizer, jnp.dtype(dtype)
        settled = settle(strategy, draft_model, own_head, _platform())
        self.strategy, self.drafter_reason, draft_model = settled.strategy, settled.reason, settled.draft_model
        self.notes, self.load_seconds = tuple(notes), load_seconds
        check_strategy(config, self.strategy, precision)
        check_drafter(self.strategy, config, draft_model, tap_convention)
        check_implementation(implementation)
        self._allowed, self._explain = precision, explain
        self._planner = read_planner(planner, strategy)
        strategies = [self.strategy]
        if self._planner is not None:
            strategies = planned_strategies(self._planner, config, precision, draft_model, tap_convention)
            self.strategy, self.drafter_reason = strategies[0], "planned"
        # Planners may be refused for the weights as they were read, not as they are spread.
        self.model_hash = None if self._planner is None else fingerprint(config, params, self.dtype)
        # The GPU kernels are for one device; XLA spreads its own ops.
        self._implementation = "xla" if implementation is None and tensor > 1 else implementation
        self._progress = progress
        mesh = None
        if tensor > 1:
            try:
                mesh = make_mesh(tensor)
            except ValueError as error:
                raise UsageError(str(error)) from None
        if mesh is not None:
            params = {
                name: jax.device_put(np.asarray(array).astype(self.dtype), param_sharding(mesh, name, array.shape))
                for name, array in params.items()
            }
        self._graphdef, target = build(config, params, self.dtype)
        asked = strategies, config, draft_model, self.dtype, params, tap_convention
        self.lanes = build_lanes(*asked, implementation=self._implementation)
        self.precision = self.lanes.precision
        self._measure_overlap = measure_overlap or self.precision is PrecisionClass.APPROX
        self._drafter = self.lanes.drafters[self.strategy.label]
        self._params = Params(target=target, draft=self.lanes.draft)
        self.head_hash = None if self._planner is None else fingerprint("head", self.lanes.draft, self.dtype)
        if isinstance(self._planner, ProfilePlanner):
            assert self.model_hash is not None
            self.notes += self._planner.verify(
                device=jax.devices()[0].device_kind,
                dtype=self.dtype.name,
                model_hash=self.model_hash,
                head_hash=self.head_hash,
            )
        self.variants = Variants(mesh)
        self.least_capacity = _SMALLEST_CAPACITY  # more of it makes prompts of more lengths share executables
        self.rounds_per_call = _ROUNDS[_platform()]

    @classmethod
    def load(
        cls,
        model: str | Path = DEFAULT_MODEL,
        *,
        attention: Literal["auto", "dense", "nsa"] = "auto",
        nsa_config: NSAConfig | None = None,
        dtype: str | None = None,
        progress: Progress = _no_progress,
        **options: Any,
    ) -> Engine:
        """Reads a model by name, directory or GGUF file.

        Without a strategy the model's own EAGLE-3 head drafts, if it has one, with its recommended tree; with
        `Strategy()` nothing does.

        Args:
          model: a name of `registry.MODELS` or a path.
          attention: `auto` runs what the checkpoint holds; `dense` ignores sparse parameters; `nsa` runs sparse
            attention, on a dense checkpoint with only the selected branch open.
          nsa_config: sparse attention to run instead of the checkpoint's; implies `nsa`.
          dtype: `float32` or `bfloat16`; by default float32 on a CPU and bfloat16 elsewhere.
          progress: called with (stage, done, total).
          options: as the constructor.

        Raises:
          CheckpointError: a checkpoint that cannot be read.
          UsageError: options that do not fit each other or the model.
        """
        began = time.perf_counter()
        if attention not in ("auto", "dense", "nsa"):
            raise UsageError(f"attention must be auto, dense or nsa, got {attention!r}")
        if attention == "dense" and nsa_config is not None:
            raise UsageError("attention=dense and an nsa config exclude each other: drop one")
        dtype = dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        if dtype not in ("float32", "bfloat16"):
            raise UsageError(f"dtype must be float32 or bfloat16, got {dtype!r}")
        check_implementation(options.get("implementation"))
        options["planner"] = read_planner(options.get("planner"), options.get("strategy"))
        where = resolve(model)
        nsa: NSAConfig | None | Literal["checkpoint"] = "checkpoint"
        if attention == "dense":
            nsa = None
        elif nsa_config is not None:
            nsa = nsa_config
        config = read_model_config(where.path, base=where.base, nsa=nsa)
        if attention == "nsa" and config.nsa is None:
            nsa = NSA_PRESETS["paper"]
            config = read_model_config(where.path, base=where.base, nsa=nsa)
        options.setdefault("own_head", where.head)
        # Before minutes of loading.
        settled = settle(options.get("strategy"), options.get("draft_model"), options["own_head"], _platform())
        check_strategy(config, settled.strategy, options.get("precision", PrecisionClass.LOSSLESS))
        check_drafter(settled.strategy, config, settled.draft_model, options.get("tap_convention"))
        if options["planner"] is not None:
            allowed = options.get("precision", PrecisionClass.LOSSLESS)
            planned_strategies(options["planner"], config, allowed, settled.draft_model, options.get("tap_convention"))

        def loading(done: int, total: int) -> None:
            progress("load", done, total)

        checkpoint = load(where.path, base=where.base, nsa=nsa, dtype=np.dtype(jnp.dtype(dtype)), progress=loading)
        source = checkpoint.tokenizer_source
        tokenizer = Tokenizer.from_path(source) if source else None
        return cls(
            checkpoint.config,
            checkpoint.params,
            tokenizer=tokenizer,
            dtype=jnp.dtype(dtype),
            notes=(*checkpoint.notes, *_untrained_plan(checkpoint, settled.strategy)),
            load_seconds=time.perf_counter() - began,
            progress=progress,
            **options,
        )

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Prompt tokens of a conversation, by the model's chat template.

        Args:
          messages: `{"role": ..., "content": ...}` in order.

        Raises:
          UsageError: no tokenizer, no chat template, or messages that the template refuses.
        """
        if self.tokenizer is None:
            raise UsageError("this model has no tokenizer: give token ids")
        if self.tokenizer.chat_template is None:
            raise UsageError("this model has no chat template: give a plain prompt")
        return self.tokenizer.apply_chat(messages)

    def chat(self, messages: Sequence[Mapping[str, str]], **options: Any) -> Generation:
        """The assistant's next turn. Options are those of `GenerationOptions`."""
        return self.generate(self.encode_chat(messages), **options)

    def generate(self, prompt: str | Sequence[int], **options: Any) -> Generation:
        """Continues a prompt.

        Args:
          prompt: text, or token ids, which are taken as they are.
          options: those of `GenerationOptions`.

        Raises:
          UsageError: bad options, or an empty prompt or ids outside the vocabulary.
          ContextLengthError: a prompt that leaves no room.
          NumericsError: logits that are not finite.
        """
        stream = self.stream(prompt, **options)
        while True:
            try:
                next(stream)
            except StopIteration as end:
                return end.value

    def stream(self, prompt: str | Sequence[int], **options: Any):
        """As `generate`, but yields `Chunk`s as they become final, and returns the `Generation`."""
        wanted = GenerationOptions(**options)
        ids = self._prompt_ids(prompt)
        if wanted.stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this model has none")
        return self._stream(ids, wanted)

    def _prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise UsageError("this model has no tokenizer: give token ids")
            if not prompt:
                raise UsageError("the prompt is empty: give some text")
            ids = self.tokenizer.encode(prompt, add_bos=self.tokenizer.adds_bos)
        else:
            ids = [int(token) for token in prompt]
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        outside = [token for token in ids if not 0 <= token < self.config.vocab_size]
        if outside:
            raise UsageError(
                f"prompt token {outside[0]} is outside the vocabulary: ids run from 0 to {self.config.vocab_size - 1}"
            )
        if len(ids) > self.config.max_position:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, but the model's context holds {self.config.max_position}: "
                f"shorten it by at least {len(ids) - self.config.max_position} tokens"
            )
        return ids

    def _decoding(self, options: GenerationOptions, label: str) -> Decoding:
        strategy, drafter = self.lanes.strategies[label], self.lanes.drafters[label]
        stop_ids = self.tokenizer.eos_ids if self.tokenizer and not options.ignore_eos else ()
        return Decoding(
            model=self._graphdef,
            config=self.config,
            drafter=drafter,
            sampling=options.sampling,
            stop_ids=tuple(stop_ids),
            traversal=strategy.traversal,
            group=strategy.group,
            shared=strategy.precision is PrecisionClass.APPROX,
            measure_overlap=self._measure_overlap and self.config.nsa is not None and drafter.num_nodes > 1,
            plan=layer_plan(self.config, strategy),
            implementation=self._implementation,
        )

    def capacity_for(self, tokens: int) -> int:
        """A power of two that holds the tokens, or the whole context."""
        return min(max(self.least_capacity, 1 << (tokens - 1).bit_length()), self.config.max_position)

    @property
    def params(self) -> Params:
        """Of target and drafter, as they lie on the devices."""
        return self._params

    def start(self, ids: Sequence[int], options: GenerationOptions) -> tuple[DecodeState, dict[str, Decoding]]:
        """The state before prefill, and the static description of every strategy that can decode it."""
        decodings = {label: self._decoding(options, label) for label in self.lanes.strategies}
        decoding = decodings[self.lanes.base]
        capacity = self.capacity_for(len(ids) + options.max_new_tokens)
        width = 1 << (len(ids) - 1).bit_length()  # few shapes of the setup computation
        padded = np.zeros((1, min(width, capacity)), np.int32)
        padded[0, : len(ids)] = ids
        state = init_state(
            decoding,
            jnp.asarray(padded),
            jnp.asarray([len(ids)], jnp.int32),
            max_new_tokens=options.max_new_tokens,
            key=jax.random.key(options.seed),
            capacity=capacity,
            dtype=self.dtype,
        )
        state = dataclasses.replace(state, stats=RoundStats.zero(self.lanes.depth))
        if self.variants.mesh is not None:
            state = jax.device_put(state, state_sharding(self.variants.mesh, state))
        return state, decodings

    def _stream(self, ids: list[int], options: GenerationOptions) -> Iterator[Chunk]:
        state, decodings = self.start(ids, options)
        decoding = decodings[self.lanes.base]
        compiled_before = self.variants.compile_seconds
        sizes = prefill_sizes(len(ids))
        rounds = self.rounds_per_call
        jobs = sorted(set(sizes))
        ahead = list(decodings) if self._planner is None or self._planner.compiles_ahead else []
        variants, known = self.variants, (self._params, state)
        work = [functools.partial(variants.prefill, decoding, *known, size) for size in jobs]
        work += [functools.partial(variants.decode, decodings[label], *known, rounds) for label in ahead]
        ready = variants.prepare(work, lambda done: self._progress("compile", done, len(work)))
        steps = dict(zip(jobs, ready, strict=False))
        calls = dict(zip(ahead, ready[len(jobs) :], strict=True))

        began = time.perf_counter()
        done = 0
        for size in sizes:
            state, _ = steps[size](self._params, state)
            done = min(done + size, len(ids))
            jax.block_until_ready(state.status)
            self._progress("prefill", done, len(ids))
        status = int(np.asarray(state.status)[0])
        check_finite(status, 0)
        tokens = [int(state.history[0, len(ids)])]
        pilot = self._pilot(options, [*ids, *tokens])
        prefill_seconds = time.perf_counter() - began

        scanner = StopScanner(self.tokenizer, options.stop)
        trace: dict[str, list[int]] = {"drafted": [], "accepted": [], "emitted": []}
        yield Chunk(text=scanner.push(tokens), tokens=tuple(tokens))
        began = time.perf_counter()
        decode_seconds = 0.0
        log = PlanLog(self._explain)
        while status == RUNNING and not scanner.stopped:
            decision = pilot.decide(len(ids) + len(tokens))
            if decision.label not in calls:
                decode_seconds = time.perf_counter() - began
                decoding = decodings[decision.label]
                calls[decision.label] = self.variants.decode(decoding, self._params, state, rounds)
                began = time.perf_counter() - decode_seconds
            state, packed = calls[decision.label](self._params, state, decision.rounds or rounds)
            out = packed.fetch()
            status, new = int(out.status[0]), out.tokens[0, : out.count[0]].tolist()
            spent, decode_seconds = decode_seconds, time.perf_counter() - began
            happened = out.emitted[0] > 0
            if self._planner is not None:
                log.add(decision, out.overlap, out.overlap_count)
                pilot.observe(
                    Observed(
                        label=decision.label,
                        context=decision.context,
                        accepted=out.accepted[0][happened].tolist(),
                        seconds=decode_seconds - spent,
                        overlap=log.overlap,
                        tokens=new,
                    )
                )
                decode_seconds = time.perf_counter() - began
            tokens += new
            for name in trace:
                trace[name] += getattr(out, name)[0][happened].tolist()
            self._progress("decode", len(tokens), options.max_new_tokens)
            yield Chunk(text=scanner.push(new), tokens=tuple(new))
            began = time.perf_counter() - decode_seconds  # the consumer's time is not ours
        check_finite(status, len(tokens))  # a failed state ends the loop
        rest = scanner.flush()
        if rest:
            yield Chunk(text=rest, tokens=())
        if scanner.stopped:
            tokens = tokens[: scanner.tokens_used]
        return Generation(
            prompt_ids=tuple(ids),
            tokens=tuple(tokens),
            text=scanner.text if self.tokenizer else None,
            finish_reason=_finish_reason(status, scanner.stopped, len(tokens), options),
            timings_s={
                "load": self.load_seconds,
                "compile": self.variants.compile_seconds - compiled_before,
                "prefill": prefill_seconds,
                "decode": decode_seconds,
            },
            decode_tok_s=(len(tokens) - 1) / decode_seconds if decode_seconds else 0.0,
            stats=self._stats(state.stats)
            | {"per_round": trace}
            | ({"planner": log.summary()} if self._planner else {}),
        )

    def _pilot(self, options: GenerationOptions, known: list[int]) -> Pilot:
        if self._planner is None:
            return Fixed(self.strategy.label)
        return self._planner.pilot(tuple(self.lanes.strategies), self._allowed, options.sampling.greedy, known)

    def _stats(self, stats: RoundStats) -> dict[str, Any]:
        host = jax.device_get(stats)
        rounds = int(host.rounds)
        return {
            "precision": self.precision.value,
            "strategy": dataclasses.asdict(self.strategy) | {"tree": self._tree_size()},
            "drafter": {
                "name": self.strategy.draft,
                "reason": self.drafter_reason,
                "window": getattr(self._drafter, "window", None),
            },
            "rounds": rounds,
            "drafted": int(host.drafted),
            "accepted": int(host.accepted),
            # The first token comes from prefill, not from a round.
            "emitted_per_round": (int(host.emitted) - 1) / rounds if rounds else 0.0,
            "acceptance_by_depth": [
                int(kept) / int(offered) if offered else 0.0
                for kept, offered in zip(host.accepted_at, host.offered_at, strict=True)
            ],
            "overlap": float(host.overlap / host.overlap_count) if host.overlap_count else None,
            "overlap_free": float(host.free_overlap / host.overlap_count) if host.overlap_count else None,
        }

    def _tree_size(self) -> dict[str, int] | None:
        return dataclasses.asdict(self.strategy.size) if self.strategy.size else None


def _platform() -> Platform:
    return "cpu" if jax.default_backend() == "cpu" else "gpu"


def _untrained_plan(checkpoint: Checkpoint, strategy: Strategy) -> tuple[str, ...]:
    """A note on a layer plan with more reuse than the weights were trained for."""
    trained = checkpoint.refresh_intervals
    if not trained or checkpoint.config.nsa is None or not strategy.reuses:
        return ()
    if strategy.refresh_layers is None and strategy.refresh_every in trained:
        return ()
    plans = ", ".join(str(interval) for interval in trained)
    return (f"the weights were trained for layer plans refresh-every={plans}, not for the one asked for",)


def check_implementation(implementation: Implementation) -> None:
    """Refuses implementations that no op has.

    Raises:
      UsageError: lists the known ones.
    """
    names = [implementation] if isinstance(implementation, str) else list(implementation or ())
    unknown = [name for name in names if name not in implementations()]
    if unknown:
        raise UsageError(f"unknown implementation {', '.join(unknown)}; known: {', '.join(implementations())}")


def prefill_sizes(tokens: int) -> list[int]:
    """Passes that cover a prompt: full ones of the largest size, then the smallest that holds the rest."""
    largest = _PREFILL_SIZES[-1]
    sizes = [largest] * (tokens // largest)
    rest = tokens % largest
    if rest:
        sizes.append(next(size for size in _PREFILL_SIZES if size >= rest))
    return sizes


def _finish_reason(status: int, by_string: bool, emitted: int, options: GenerationOptions) -> FinishReason:
    if by_string:
        return "stop_string"
    if status == STOPPED:
        return "stop"
    return "length" if emitted >= options.max_new_tokens else "context"
