"""Command line: `python -m ssv_jax.profile`. Measures strategies on this device and writes a profile for `--profile`.

Two things are measured: what a round costs at each context length (real prompts, repeated to that length; wall time
of calls as the engine makes them, after one that is not counted), and how far drafts are accepted on a prompt set
(whole generations). The file is written after every measurement, and the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .command import Parser, Progress, enable_compilation_cache, leave, run_command, usable_streams, versions
from .errors import UsageError
from .profiles import Entry, Profile, ProfileError, Provenance, RoundCost

DEFAULT_STRATEGIES = ("ngram", "eagle3")


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = Parser(prog="python -m ssv_jax.profile", description="Measure strategies for --profile.", allow_abbrev=False)
    p.add_argument("--model", metavar="NAME_OR_PATH", help="as for generate")
    p.add_argument("--out", required=True, type=Path, metavar="FILE", help="the profile; continued if it exists")
    p.add_argument("--prompts", required=True, type=Path, metavar="FILE", help='JSON lines with "turns" or "prompt"')
    p.add_argument(
        "--strategies",
        nargs="+",
        metavar="LABEL",
        default=None,
        help="e.g. ngram:7x1x8 eagle3:5x8x32+group4; autoregressive decoding is always among them",
    )
    p.add_argument("--contexts", default="1024", metavar="1024,4096", help="context lengths, in tokens")
    p.add_argument("--draft-model", metavar="DIR", help="an EAGLE-3 head; default: the model's own")
    p.add_argument("--tap-convention", choices=["residual", "layer-output"])
    p.add_argument("--dtype", choices=["float32", "bfloat16"])
    p.add_argument("--attention", choices=["auto", "dense", "nsa"], default="auto")
    p.add_argument("--nsa-config", metavar="JSON_OR_PRESET")
    p.add_argument("--implementation", metavar="NAME")
    p.add_argument("--repeats", type=int, default=7, metavar="N", help="timed calls for each cost (default 7)")
    p.add_argument("--max-prompts", type=int, default=20, metavar="N")
    p.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="of each prompt")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--restart", action="store_true", help="measure again what the file holds")
    p.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return p


def _read_prompts(path: Path, most: int) -> list[str]:
    """First turns.

    Raises:
      UsageError: a file that cannot be read or a line that is no prompt.
    """
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--prompts {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}") from None
    prompts: list[str] = []
    for number, line in enumerate(lines[:most], 1):
        try:
            item = json.loads(line)
            prompts.append(str(item["turns"][0] if "turns" in item else item["prompt"]))
        except (ValueError, KeyError, IndexError, TypeError):
            raise UsageError(f'--prompts {path}, line {number}: expected an object with "turns" or "prompt"') from None
    if not prompts:
        raise UsageError(f"--prompts {path} holds no prompt")
    return prompts


def _contexts(text: str) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise UsageError(f"--contexts must read 1024,4096 with lengths >= 1, got {text!r}")
    return found


class _Job:
    """The measurements that are left, and how long they will take."""

    def __init__(self, profile: Profile, prompts: int, progress: Progress) -> None:
        self._progress = progress
        costs = sum(len(profile.contexts) - len(entry.costs) for entry in profile.entries)
        texts = sum(prompts - entry.acceptance.prompts for entry in profile.entries if entry.max_depth)
        self._left = {"cost": costs, "acceptance": texts}
        self._spent: dict[str, list[float]] = {"cost": [], "acceptance": []}
        self._total, self._done = costs + texts, 0

    def done(self, kind: str, seconds: float, what: str) -> None:
        """One measurement more."""
        self._left[kind] -= 1
        self._spent[kind].append(seconds)
        self._done += 1
        known = [value for values in self._spent.values() for value in values]
        eta = 0.0
        for name, left in self._left.items():
            values = self._spent[name] or known
            eta += left * sum(values) / len(values)
        self._progress.say(f"{self._done}/{self._total} {what} (about {eta:.0f} s left)")


def _measure(args: argparse.Namespace) -> None:
    import jax

    from .engine import Engine
    from .models.config import nsa_from_json
    from .planning import Manual
    from .registry import DEFAULT_MODEL, resolve
    from .strategy import PrecisionClass, Strategy

    contexts, prompts = _contexts(args.contexts), _read_prompts(args.prompts, args.max_prompts)
    for name in ("repeats", "max_prompts", "max_new_tokens"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    known = None
    if args.out.exists() and not args.restart:
        known = Profile.load(args.out)
    if not args.out.parent.is_dir():
        raise UsageError(f"--out {args.out}: no such directory")
    model = DEFAULT_MODEL if args.model is None else args.model
    head = resolve(model).head
    has_head = args.draft_model is not None or head is not None
    try:
        nsa = None if args.nsa_config is None else nsa_from_json(args.nsa_config)
        labels = args.strategies or [name for name in DEFAULT_STRATEGIES if has_head or name != "eagle3"]
        asked = [_spelled_out(Strategy.parse(label), head) for label in labels]
        plain = [Strategy(refresh_every=s.refresh_every, refresh_layers=s.refresh_layers) for s in asked]
        strategies = list(dict.fromkeys([*plain, *(s for s in asked if s.draft != "none")]))
        if any(s.draft == "auto" for s in strategies):
            raise ValueError("auto is no strategy to measure: name its drafter")
    except ValueError as error:
        raise UsageError(str(error)) from None
    progress = Progress(sys.stderr, enabled=not args.quiet)
    enable_compilation_cache()
    manual = Manual(strategies)
    engine = Engine.load(
        model,
        attention=args.attention,
        nsa_config=nsa,
        dtype=args.dtype,
        progress=progress,
        precision=PrecisionClass.APPROX,
        planner=manual,
        draft_model=args.draft_model,
        tap_convention=args.tap_convention,
        implementation=args.implementation,
    )
    assert engine.model_hash is not None
    longest = engine.config.max_position - engine.rounds_per_call * (engine.lanes.depth + 1)
    if contexts[-1] > longest:
        raise UsageError(f"--contexts {contexts[-1]}: this model's context leaves room for at most {longest}")
    about = Provenance(
        device=jax.devices()[0].device_kind,
        platform=jax.default_backend(),
        dtype=engine.dtype.name,
        model=Path(str(model)).name,
        model_hash=engine.model_hash,
        draft_model=None if engine.head_hash is None else Path(str(args.draft_model or "own")).name,
        head_hash=engine.head_hash,
        implementation=args.implementation,
        rounds_per_call=engine.rounds_per_call,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        prompts_hash=hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16],
        versions=versions(),
    )
    depths = {label: drafter.max_depth for label, drafter in engine.lanes.drafters.items()}
    profile = _start(about, contexts, depths, strategies, known, args.out)
    ids = _token_ids(engine, prompts)
    assert engine.tokenizer is not None
    job = _Job(profile, len(prompts), progress)
    filler = [token for prompt in ids for token in prompt]
    for context in contexts:
        asked = [e.label for e in profile.entries if all(cost.context != context for cost in e.costs)]
        timer = _Timer(engine, filler, context, asked, progress) if asked else None
        for label in asked:
            assert timer is not None
            entry, began = profile.entry(label), time.perf_counter()
            times = sorted(timer.time(label, args.repeats))
            cost = RoundCost(
                context=context,
                capacity=timer.capacity,
                median_ms=_quantile(times, 0.5),
                low_ms=_quantile(times, 0.1),
                high_ms=_quantile(times, 0.9),
                repeats=len(times),
            )
            costs = tuple(sorted((*entry.costs, cost), key=lambda c: c.context))
            profile = profile.replace(dataclasses.replace(entry, costs=costs))
            profile.save(args.out)
            what = f"{label} at {context}: {cost.median_ms:.2f} ms a round ({cost.low_ms:.2f} to {cost.high_ms:.2f})"
            job.done("cost", time.perf_counter() - began, what)
    # One capacity for all prompts: that of the longest, or a known one, if it is not so large that rounds get slow.
    least = engine.capacity_for(max(map(len, ids)) + args.max_new_tokens)
    shared = engine.capacity_for(contexts[0] + _timed_options(engine).max_new_tokens)
    engine.least_capacity = shared if least <= shared <= 4 * least else least
    for label in profile.labels:
        entry = profile.entry(label)
        if entry.max_depth == 0:
            continue
        manual.choose = lambda call, label=label: label
        # Prompts are prefilled under the layer plan that is measured.
        plain = next(e.label for e in profile.entries if e.strategy.plan == entry.strategy.plan and not e.max_depth)
        engine.lanes = dataclasses.replace(engine.lanes, base=plain)
        for number in range(entry.acceptance.prompts, len(prompts)):
            began = time.perf_counter()
            result = engine.generate(ids[number], max_new_tokens=args.max_new_tokens, seed=args.seed, ignore_eos=True)
            accepted = accepted_before_stop(result.tokens, result.stats["per_round"], engine.tokenizer.eos_ids)
            acceptance = entry.acceptance.add(accepted, result.stats["overlap"])
            entry = dataclasses.replace(entry, acceptance=acceptance)
            profile = profile.replace(entry)
            profile.save(args.out)
            what = f"{label} on prompt {number + 1}: {entry.tokens_per_round:.2f} tokens a round so far"
            job.done("acceptance", time.perf_counter() - began, what)
    profile = dataclasses.replace(profile, complete=True).prune()
    profile.save(args.out)
    _show(profile)


def _token_ids(engine: Any, prompts: Sequence[str]) -> list[list[int]]:
    """Prompts as the chat turns that users would give, or as plain text where there is no chat template.

    Raises:
      UsageError: no tokenizer.
    """
    if engine.tokenizer is None:
        raise UsageError("this model has no tokenizer, which prompts need")
    if engine.tokenizer.chat_template is None:
        return [engine.tokenizer.encode(text, add_bos=engine.tokenizer.adds_bos) for text in prompts]
    return [engine.encode_chat([{"role": "user", "content": text}]) for text in prompts]


class _Timer:
    """A prefilled state that every strategy decodes from.

    Args:
      engine: that holds the strategies.
      filler: tokens, repeated up to the context length.
      context: tokens to prefill.
      labels: strategies to be timed, which are compiled all at once.
      progress: told about that.
    """

    def __init__(
        self, engine: Any, filler: Sequence[int], context: int, labels: Sequence[str], progress: Progress
    ) -> None:
        import jax

        from .engine import prefill_sizes

        ids = [filler[at % len(filler)] for at in range(context)]
        self._engine, variants = engine, engine.variants
        state, self._decodings = engine.start(ids, _timed_options(engine))
        base, known = self._decodings[engine.lanes.base], (engine.params, state)
        sizes = prefill_sizes(context)
        work = [functools.partial(variants.prefill, base, *known, size) for size in sorted(set(sizes))]
        rounds = engine.rounds_per_call
        work += [functools.partial(variants.decode, self._decodings[label], *known, rounds) for label in labels]
        variants.prepare(work, lambda done: progress("compile", done, len(work)))
        for size in sizes:
            state, _ = variants.prefill(base, engine.params, state, size)(engine.params, state)
        self._state = jax.block_until_ready(state)
        self.capacity = int(state.history.shape[1]) - 1

    def time(self, label: str, repeats: int) -> list[float]:
        """Milliseconds a round of `repeats` calls, each from the same state, after one that is not counted."""
        import jax
        import jax.numpy as jnp

        engine, rounds = self._engine, self._engine.rounds_per_call
        call = engine.variants.decode(self._decodings[label], engine.params, self._state, rounds)
        times: list[float] = []
        for _ in range(repeats + 1):
            state = jax.block_until_ready(jax.tree.map(jnp.copy, self._state))
            began = time.perf_counter()
            out = call(engine.params, state)[1].fetch()
            times.append(1000 * (time.perf_counter() - began) / max(1, int((out.emitted[0] > 0).sum())))
        return times[1:]


def accepted_before_stop(
    tokens: Sequence[int], rounds: Mapping[str, Sequence[int]], stop_ids: Sequence[int]
) -> list[int]:
    """Drafts accepted in each round of a generation that went on after end tokens, had it stopped at the first.

    Generations that go on need no executables of their own: costs are measured with the same ones.

    Args:
      tokens: all of them; the first is not of a round.
      rounds: `emitted` and `accepted` of each round.
      stop_ids: end tokens.
    """
    left = next((at for at, token in enumerate(tokens) if token in stop_ids), len(tokens))
    result: list[int] = []
    for emitted, accepted in zip(rounds["emitted"], rounds["accepted"], strict=True):
        if left <= 0:
            break
        result.append(min(accepted, left))
        left -= emitted
    return result


def _timed_options(engine: Any) -> Any:
    """Of decodings that do every round of a call, whatever is accepted."""
    from .generation import GenerationOptions

    most = engine.rounds_per_call * (engine.lanes.depth + 1)
    return GenerationOptions(max_new_tokens=most + 1, ignore_eos=True)


def _spelled_out(strategy: Any, head: Any) -> Any:
    """With the tree that it will draft: the model's own recommendation where the label names none."""
    import jax

    from .strategy import TreeSpec

    tree: TreeSpec | None = strategy.tree
    if tree is None and strategy.draft == "eagle3" and head is not None:
        tree = head.trees["cpu" if jax.default_backend() == "cpu" else "gpu"]
    return dataclasses.replace(strategy, tree=tree or strategy.size)


def _start(
    about: Provenance,
    contexts: tuple[int, ...],
    depths: dict[str, int],
    strategies: Sequence[Any],
    known: Profile | None,
    out: Path,
) -> Profile:
    """Empty, or with what an earlier run of the same kind measured.

    Raises:
      UsageError: a file with measurements of another kind.
    """
    from .profiles import Acceptance

    entries: list[Entry] = []
    if known is not None and known.provenance != about:
        differing = [
            field.name
            for field in dataclasses.fields(Provenance)
            if getattr(known.provenance, field.name) != getattr(about, field.name)
        ]
        raise UsageError(
            f"--out {out} was measured with another {', '.join(differing)}: give another file, or --restart"
        )
    for strategy in strategies:
        depth = depths[strategy.label]
        entry = Entry(strategy=strategy, max_depth=depth, acceptance=Acceptance(accepted_at=(0,) * depth))
        if known is not None and strategy.label in known.labels:
            entry = dataclasses.replace(known.entry(strategy.label), dominated_by=None)
            entry = dataclasses.replace(entry, costs=tuple(c for c in entry.costs if c.context in contexts))
        entries.append(entry)
    return Profile(provenance=about, contexts=contexts, entries=tuple(entries))


def _quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values, the nearest."""
    return values[round(share * (len(values) - 1))]


def _show(profile: Profile) -> None:
    """The ranking, to standard output."""
    for context in profile.contexts:
        print(f"context {context}:")
        for label in profile.ranking(context):
            entry = profile.entry(label)
            note = f", never better than {entry.dominated_by}" if entry.dominated_by else ""
            print(
                f"  {label}: {entry.tokens_per_second(context):.1f} tok/s expected "
                f"({entry.tokens_per_round:.2f} tokens in {entry.round_ms(context):.2f} ms{note})"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 2 for usage errors, 1 for what cannot be read or run."""
    usable_streams()
    args = parser().parse_args(argv)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")

    def work() -> None:
        try:
            _measure(args)
        except ProfileError as error:
            raise ProfileError(f"{error} (or give --restart)") from None

    return run_command(
        work,
        smaller="shorter --contexts, fewer --max-new-tokens or smaller trees",
        interrupted="stopped; the same command goes on from here",
    )


if __name__ == "__main__":
    leave(main())
