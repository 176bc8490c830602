"""Finding and counting in long texts, dense and sparse, over lengths, layer plans and precision classes.

python experiments/needle.py --model NAME_OR_DIR --data FILE.npz.xz [--kinds single copy ...] [--share 4] [--smoke]
The tasks are those of `_tasks`: one number (`single`), one among others (`multi-key`), and more. A trial is exact if
greedy decoding gives the whole answer after its given beginning, between given commas. One pass over the prompt with
the right answer decides that: greedy decoding does if every token is the likeliest one after those before it.

Paths: `sequence`, one pass without a cache; `passes`, the prompt in passes through the cache and then the answer as the
chain that a perfect drafter would propose, whose groups of nodes share blocks where `--share` asks for it (class
approx); `loop`, decoding token by token. `--smoke` checks that they agree.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import _tasks as tasks
import jax
import jax.numpy as jnp
import numpy as np
from _served import Served
from _tasks import KINDS, Trial

from ssv_jax import UsageError, loop
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import build
from ssv_jax.state import RUNNING
from ssv_jax.training import forward


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, a layer plan, and how many nodes share blocks (0: none); `longest` is the longest prompt asked."""

    label: str
    model: evaluation.Model
    plan: LayerPlan
    longest: int
    share: int = 0

    @property
    def precision(self) -> str:
        """Its class, as `ssv_jax.Strategy` has it."""
        if self.model.config.nsa is None:
            return "dense"
        return "approx" if self.share else "lossless" if self.plan.all_refresh else "strict"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """What came of a trial: right tokens before the first wrong one, items that are right, and their numbers."""

    trial: Trial
    before_error: int
    scored: int
    items_right: int
    items: int


def sequence_answers(
    config: Any, options: forward.SequenceOptions, width: int, stacked: Any, tokens: jax.Array, refresh: jax.Array
) -> jax.Array:
    """The likeliest token at each of the last `width` places, int32 [B, width]."""
    final = forward.hidden_states(config, stacked, tokens, refresh, options).final
    logits = forward.logits_of(config, stacked, final[:, -width - 1 : -1])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def loop_answers(
    subject: Subject, params: Any, graphdef: Any, trials: list[Trial], dtype: Any, size: int
) -> np.ndarray:
    """Greedy tokens after each prompt, by prefill and decoding over a cache, at the answers' places, int32 [B, A]."""
    tokens, width = np.stack([trial.tokens for trial in trials]), widest(trials)
    lengths = np.array([len(trial.tokens) - len(trial.item) for trial in trials])
    decoding = loop.Decoding(model=graphdef, config=subject.model.config, drafter=NoDrafter(), plan=subject.plan)
    state = loop.init_state(
        decoding,
        jnp.asarray(tokens),
        jnp.asarray(lengths, jnp.int32),
        max_new_tokens=width,
        key=jax.random.key(0),
        capacity=tokens.shape[1] + width,
        dtype=dtype,
    )
    weights = Params(target=params)
    prefill, decode = _jitted()
    for _ in range(-(-int(lengths.max()) // size)):
        state, _ = prefill(decoding=decoding, params=weights, state=state, size=size)
    while bool((state.status == RUNNING).any()):
        state, _ = decode(decoding=decoding, params=weights, state=state, rounds=width)
    history = np.asarray(state.history)
    found = np.full((len(trials), width), -1, np.int32)
    for row, (trial, length) in enumerate(zip(trials, lengths, strict=True)):
        found[row, width - len(trial.item) :] = history[row, length : length + len(trial.item)]
    return found


@functools.cache
def _jitted() -> tuple[Any, Any]:
    return (
        jax.jit(loop.prefill_chunk, static_argnames=("decoding", "size"), donate_argnames="state"),
        jax.jit(loop.decode_until, static_argnames=("decoding", "rounds"), donate_argnames="state"),
    )


def pass_answers(
    served: Served, shares: Sequence[int], trials: list[Trial], width: int, capacity: int
) -> list[np.ndarray]:
    """The likeliest tokens in one pass over each answer, int32 [B, width], by number of nodes that share blocks."""
    tokens = np.stack([trial.tokens for trial in trials])
    length = tokens.shape[1]
    # The chain begins with the prompt's last token, as a round begins with its root; short answers' go on beyond them.
    starts = np.array([length - len(trial.item) - 1 for trial in trials])
    cache = served.read(served.cache(capacity, len(trials)), tokens[:, : starts.max()], starts)
    padded = np.pad(tokens, ((0, 0), (0, width)))
    chain = np.take_along_axis(padded, starts[:, None] + np.arange(width), axis=1)
    found = []
    for share in shares:
        _, best, _ = served.score(cache, chain, chain, group=max(share, 1), shared=share > 0)
        aligned = np.full_like(best, -1)
        for row, trial in enumerate(trials):
            aligned[row, width - len(trial.item) :] = best[row, : len(trial.item)]
        found.append(aligned)
    return found


def widest(trials: Sequence[Trial]) -> int:
    """Tokens of the longest answer."""
    return max(len(trial.item) for trial in trials)


def mark(trial: Trial, got: np.ndarray) -> Score:
    """Compares the last tokens of `got` with the answer."""
    size = len(trial.item)
    right = got[-size:] == trial.tokens[-size:]
    scored = trial.item >= 0
    items = np.unique(trial.item[scored])
    return Score(
        trial=trial,
        before_error=int(right[scored].cumprod().sum()),
        scored=int(scored.sum()),
        items_right=sum(bool(right[trial.item == item].all()) for item in items),
        items=len(items),
    )


def make_subjects(
    args: argparse.Namespace, model: evaluation.Model, dense: evaluation.Model, longest: int
) -> list[Subject]:
    subjects = []
    for text in args.dense_theta:
        theta, _, limit = text.partition(":")
        try:
            based, most = dense.with_theta(float(theta)), int(limit or longest)
        except ValueError as error:
            raise UsageError(f"--dense-theta {text}: expected THETA or THETA:LONGEST ({error})") from None
        plan = LayerPlan.every(dense.config.num_layers)
        subjects.append(Subject(label=f"dense, theta {float(theta):g}", model=based, plan=plan, longest=most))
    if model.config.nsa is not None:
        for every in args.refresh_every:
            try:
                plan = LayerPlan.every(model.config.num_layers, every)
            except ValueError as error:
                raise UsageError(f"--refresh-every: {error}") from None
            for share in (0, *args.share):
                label = f"nsa, refresh every {every}" + (f", {share} share" if share else "")
                subjects.append(Subject(label=label, model=model, plan=plan, longest=longest, share=share))
    return subjects


Results = dict[tuple[str, int, str], list[Score]]
Readers = dict[Any, Served]


def measure(
    args: argparse.Namespace,
    subjects: list[Subject],
    trials: dict[tuple[str, int], list[Trial]],
    readers: Readers,
    save: Callable[[Results], object] = lambda scores: None,
) -> Results:
    """Scores by (kind, length, subject); a spent budget leaves the same trials of all subjects.

    `readers`: those that `--path passes` has compiled for, which it adds to. `save` gets all scores after each batch.
    """
    dtype = jnp.dtype(args.dtype)
    lengths, width = sorted({length for _, length in trials}), widest([t for each in trials.values() for t in each])
    # Passes read all lengths with the same executables.
    batch_of = {n: args.batch_tokens // (lengths[-1] if args.path == "passes" else n) for n in lengths}
    batch_of = {n: max(1, min(batch, args.trials)) for n, batch in batch_of.items()}
    answer = {
        "sequence": functools.partial(_by_sequence, args, dtype, batch_of, width),
        "passes": functools.partial(_by_passes, args, dtype, batch_of, width, readers),
        "loop": functools.partial(_by_loop, args, dtype),
    }[args.path](subjects)
    scores: Results = {}
    work = [(kind, n, at) for (kind, n), found in trials.items() for at in range(0, len(found), batch_of[n])]
    work.sort(key=lambda job: job[1])  # cheap ones first
    total = sum(n for _, n, _ in work)
    steps = evaluation.Steps("needle", total, args.budget_s)
    for kind, length, at in work:
        if steps.spent:
            harness.say(f"budget of {args.budget_s:g} s spent: {kind}, {length} tokens, trial {at} and on left out")
            break
        part = trials[kind, length][at : at + batch_of[length]]
        filled = part + part[-1:] * (batch_of[length] - len(part))
        asked = [subject for subject in subjects if length <= subject.longest]
        for subject, got in zip(asked, answer(asked, filled), strict=True):
            marks = [mark(trial, row) for trial, row in zip(part, got, strict=False)]
            scores.setdefault((kind, length, subject.label), []).extend(marks)
        save(scores)  # a time limit must not lose it
        steps.done += length - 1
        steps.step(f"{kind}, {length} tokens, {at + len(part)} trials")
    return scores


def _by_sequence(
    args: argparse.Namespace,
    dtype: Any,
    batch_of: dict[int, int],
    width: int,
    subjects: list[Subject],
) -> Any:
    """Compiles for every (model, length) at once."""
    stacked: dict[int, Any] = {}
    for subject in subjects:
        key = id(subject.model.params)
        if key not in stacked:
            stacked[key] = forward.stack_params(subject.model.config, subject.model.params, dtype)
    options = forward.SequenceOptions(chunk=args.chunk)
    jitted = jax.jit(sequence_answers, static_argnums=(0, 1, 2))

    def lower(subject: Subject, length: int) -> Any:
        tokens = jax.ShapeDtypeStruct((batch_of[length], length), jnp.int32)
        refresh = jax.ShapeDtypeStruct((len(subject.plan.refresh),), bool)
        return jitted.lower(subject.model.config, options, width, stacked[id(subject.model.params)], tokens, refresh)

    jobs = {(s.model.config, n): (s, n) for s in subjects for n in batch_of if n <= s.longest}
    names = {key: f"{s.label}, {n} tokens" for key, (s, n) in jobs.items()}
    longest_first = sorted(jobs.items(), key=lambda job: -job[1][1])
    compiled = evaluation.compile_all({names[key]: functools.partial(lower, *job) for key, job in longest_first})

    def answers(asked: list[Subject], part: list[Trial]) -> list[np.ndarray]:
        tokens = jnp.asarray(np.stack([trial.tokens for trial in part]))
        calls = [compiled[names[s.model.config, tokens.shape[1]]] for s in asked]
        refresh = [jnp.asarray(s.plan.refresh) for s in asked]
        return [
            np.asarray(call(stacked[id(s.model.params)], tokens, r))
            for s, call, r in zip(asked, calls, refresh, strict=True)
        ]

    return answers


def reader_of(readers: Readers, subject: Subject, dtype: Any, size: int) -> Served:
    """Subjects that differ in sharing alone have one reader."""
    key = id(subject.model.params), subject.model.config, subject.plan
    if key not in readers:
        readers[key] = Served(subject.model, dtype, size, subject.plan)
    return readers[key]


def _by_passes(
    args: argparse.Namespace,
    dtype: Any,
    batch_of: dict[int, int],
    width: int,
    readers: Readers,
    subjects: list[Subject],
) -> Any:
    """Subjects of one reader have one prefill; everything is compiled at once."""
    longest = max(batch_of)
    mine = {subject.label: reader_of(readers, subject, dtype, args.pass_size) for subject in subjects}
    empty = np.zeros((batch_of[longest], width), np.int32)

    def read(served: Served) -> Any:
        return served.read(served.cache(longest + width, len(empty)), empty[:, :1])

    def score(subject: Subject) -> None:
        cache = caches[mine[subject.label]]
        mine[subject.label].score(cache, empty, empty, group=max(subject.share, 1), shared=subject.share > 0)
        harness.say(f"compiled: {subject.label}")

    with concurrent.futures.ThreadPoolExecutor(min(len(subjects), os.cpu_count() or 1)) as pool:
        distinct = list(dict.fromkeys(mine.values()))
        caches = dict(zip(distinct, pool.map(read, distinct), strict=True))
        list(pool.map(score, subjects))
    caches.clear()

    def answers(asked: list[Subject], part: list[Trial]) -> list[np.ndarray]:
        found: dict[str, np.ndarray] = {}
        for served in dict.fromkeys(mine[subject.label] for subject in asked):
            here = [subject for subject in asked if mine[subject.label] is served]
            got = pass_answers(served, [subject.share for subject in here], part, width, longest + width)
            found |= {subject.label: x for subject, x in zip(here, got, strict=True)}
        return [found[subject.label] for subject in asked]

    return answers


def _by_loop(args: argparse.Namespace, dtype: Any, subjects: list[Subject]) -> Any:
    built = {s.label: build(s.model.config, s.model.params, dtype) for s in subjects}

    def answers(asked: list[Subject], part: list[Trial]) -> list[np.ndarray]:
        return [loop_answers(s, *built[s.label][::-1], part, dtype, args.pass_size) for s in asked]

    return answers


def summarise(scores: Results, subjects: list[Subject]) -> list[dict[str, Any]]:
    precision = {subject.label: subject.precision for subject in subjects}
    rows = []
    for (kind, length, label), each in scores.items():
        exact = [score.before_error == score.scored for score in each]
        low, high = evaluation.wilson(sum(exact), len(exact))
        places = [[ok for x, ok in zip(each, exact, strict=True) if int(x.trial.depth * 4) == q] for q in range(4)]
        rows.append(
            {
                "kind": kind,
                "length": length,
                "subject": label,
                "class": precision[label],
                "trials": len(each),
                "exact": sum(exact),
                "share": sum(exact) / len(exact),
                "share_low": low,
                "share_high": high,
                "items": sum(x.items_right for x in each) / sum(x.items for x in each),
                "tokens_before_first_error": sum(x.before_error for x in each) / len(each),
                "tokens_of_answer": sum(x.scored for x in each) / len(each),
                "by_quarter_of_depth": [f"{sum(q)}/{len(q)}" for q in places],
                "depths": [round(x.trial.depth, 3) for x in each],
                "right_tokens": [x.before_error for x in each],
            }
        )
    return rows


def draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for axis, kind in zip(np.ravel(axes), kinds, strict=False):
        for label in dict.fromkeys(row["subject"] for row in rows):
            mine = [r for r in rows if r["kind"] == kind and r["subject"] == label]
            if not mine:
                continue
            style = {"dense": "--o", "approx": ":s"}.get(mine[0]["class"], "-o")
            spans = np.array([[r["share"] - r["share_low"], r["share_high"] - r["share"]] for r in mine]).T
            axis.errorbar([r["length"] for r in mine], [r["share"] for r in mine], spans, fmt=style, label=label)
        lengths = sorted({row["length"] for row in rows})
        axis.set(title=kind, xlabel="prompt (tokens)", ylabel="exact answers", xscale="log")
        axis.set(xlim=(lengths[0] / 1.2, lengths[-1] * 1.2), ylim=(-0.03, 1.03))
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.minorticks_off()
        axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets; the first one is used")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=["single", "multi-key"])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense-theta", nargs="*", default=["1e5:8192", "4e5"], metavar="THETA[:LONGEST]")
    parser.add_argument("--refresh-every", nargs="*", type=int, default=[1, 3])
    parser.add_argument("--share", nargs="*", type=int, default=[], help="nodes that share blocks, --path passes only")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--path", choices=("sequence", "passes", "loop"), default="sequence")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a batch of trials")
    parser.add_argument("--chunk", type=int, default=128, help="queries in a tile of sparse attention")
    parser.add_argument("--pass-size", type=int, default=512, help="tokens of a prefill pass through the cache")
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.trials, args.batch_tokens, args.chunk, args.pass_size = [640], 2, 1280, 64, 160
        args.dense_theta, args.refresh_every, args.share, args.dtype = ["4e4"], [2], [2], "float32"
        args.kinds, args.path = ["copy"], "passes"
    if args.share and args.path != "passes":
        raise UsageError("--share: only --path passes shares blocks, as only it has a pass over the answer: add it")
    if args.trials < 1 or any(not 2 <= share <= 32 for share in args.share):
        raise UsageError("--trials must be at least 1, and --share from 2 to 32")
    if args.smoke:
        model, dense, found = evaluation.smoke_model(), evaluation.smoke_model(nsa=False), evaluation.smoke_set()
    else:
        evaluation.require_files("--data", args.data)
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        found = next(iter(evaluation.read_sets(args.data, model.config.vocab_size).values()))
        dense = evaluation.load_model(args.dense_model, "dense") if args.dense_theta else model
    if args.share and model.config.nsa is None:
        raise UsageError(f"--share: {args.model} is dense and selects no blocks")
    subjects = make_subjects(args, model, dense, max(args.lengths))
    tools = tasks.tools_of(model.tokenizer, model.config.vocab_size)
    trials = {
        (kind, n): tasks.make_trials(tools, found, n, args.trials, kind, args.seed)
        for kind in args.kinds
        for n in args.lengths
    }
    output = evaluation.output_path("needle", args.output, args.smoke)
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("model", "output", "data")}
    result = {
        "command": "python experiments/needle.py",
        "model": model.facts,
        "dense": dense.facts,
        "settings": settings | {"data": [Path(path).name for path in args.data]},
        "score": "share of trials whose answer greedy decoding gives exactly, with its 95% Wilson interval",
        "items": "share of the answers' items that are right after the right ones before",
    }

    def save(scores: Results) -> list[dict[str, Any]]:
        rows = summarise(scores, subjects)
        harness.write(output, result | {"rows": rows})
        return rows

    readers: Readers = {}
    scores = measure(args, subjects, trials, readers, save)
    if args.smoke:  # untrained, so all answers are wrong: the tokens themselves must agree
        compare_paths(subjects[-2], trials["copy", args.lengths[0]], readers, args)
    rows = save(scores)
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    columns = len({row["kind"] for row in rows})
    if columns:
        evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, rows), columns=columns)
    names = "kind length subject class trials exact share share_low share_high items"
    evaluation.table(rows, names.split())


def compare_paths(subject: Subject, trials: list[Trial], readers: Readers, args: argparse.Namespace) -> None:
    """All paths give the same token after the same prompts, where no blocks are shared.

    Raises:
      SystemExit: they do not.
    """
    config, params = subject.model.config, subject.model.params
    graphdef, state = build(config, params, jnp.float32)
    decoded = loop_answers(subject, state, graphdef, trials, jnp.float32, args.pass_size)
    # Under the decoded tokens, the other paths must choose each of them again.
    forced = [
        dataclasses.replace(t, tokens=np.concatenate([t.tokens[: -len(t.item)], row[-len(t.item) :]]))
        for t, row in zip(trials, decoded, strict=True)
    ]
    options, width = forward.SequenceOptions(chunk=args.chunk), decoded.shape[1]
    run = jax.jit(sequence_answers, static_argnums=(0, 1, 2))
    stacked, refresh = forward.stack_params(config, params, jnp.float32), jnp.asarray(subject.plan.refresh)
    chosen = run(config, options, width, stacked, jnp.asarray(np.stack([t.tokens for t in forced])), refresh)
    served, capacity = reader_of(readers, subject, jnp.float32, args.pass_size), len(forced[0].tokens) + width
    (passed,) = pass_answers(served, [0], forced, width, capacity)
    for name, got in (("the sequence pass", np.asarray(chosen)), ("a pass over the answer", passed)):
        for trial, row, want in zip(forced, got, decoded, strict=True):
            if not np.array_equal(row[-len(trial.item) :], want[-len(trial.item) :]):
                raise SystemExit(f"error: {subject.label}: decoding and {name} choose different tokens")
    harness.say(f"{subject.label}: decoding, the sequence pass and a pass over the answer choose the same tokens")


if __name__ == "__main__":
    evaluation.guarded(main)
