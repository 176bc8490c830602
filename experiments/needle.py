"""Retrieval of a 7-digit number from held-out book text, dense and sparse, over lengths and layer plans.

python experiments/needle.py --model NAME_OR_DIR --data FILE.npz.xz [--dense-model NAME_OR_DIR] [--smoke]
A trial counts if greedy decoding gives all seven digits after the given beginning of the answer. One pass over the
prompt with the right answer decides that: greedy decoding gives it exactly if every digit is the most likely token
after those before it. `--path loop` decodes instead, through the cache, and must agree; `--smoke` compares both.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import _evaluation as evaluation
import _harness as harness
import jax
import jax.numpy as jnp
import numpy as np

from ssv_jax import UsageError, loop
from ssv_jax.drafting.none import NoDrafter
from ssv_jax.drafting.protocol import Params
from ssv_jax.models.layer_plan import LayerPlan
from ssv_jax.models.llama import build
from ssv_jax.state import RUNNING
from ssv_jax.training import forward
from ssv_jax.training.tokens import TokenSet

DIGITS = 7
NEEDLE = "\nThe special magic number for {place} is {number}.\n"
QUESTION = "\n\nWhat is the special magic number for {place} mentioned in the text above?"
ANSWER = "The special magic number for {place} mentioned in the text is "
PLACES = (
    "Lisbon Vienna Helsinki Cairo Toronto Santiago Nairobi Jakarta Kyoto Prague Dublin Havana Lima Oslo Athens Warsaw"
).split()
KINDS = {"single": 1, "multi-key": 4}  # numbers in the text, one of which is asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A prompt with its answer.

    Args:
      tokens: int32 [S]; the last DIGITS are the answer.
      depth: where the needle begins, as a share of the prompt.
    """

    tokens: np.ndarray
    depth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model and a layer plan, and the prompts that it is asked."""

    label: str
    model: evaluation.Model
    plan: LayerPlan
    longest: int


Encode = Callable[[str], list[int]]
Chat = Callable[[str], tuple[list[int], list[int]]]
Tools = tuple[Encode, Chat, np.ndarray]


def make_trial(
    rng: np.random.Generator,
    book: np.ndarray,
    length: int,
    depth: float,
    needles: int,
    encode: Encode,
    chat: Chat,
    breaks: np.ndarray,
) -> Trial:
    """A prompt of exactly `length` tokens, answer included.

    Args:
      rng: chooses text, places, numbers and the other needles' depths.
      book: tokens to hide the numbers in.
      length: of the result.
      depth: of the needle, as a share of the text.
      needles: numbers in the text; the first is asked for.
      encode: text to tokens.
      chat: what stands before the text, and after it up to the answer, for a place.
      breaks: token ids after which a needle may stand.

    Raises:
      UsageError: a length that the question alone fills, or a book that is too short.
    """
    places = rng.choice(PLACES, needles, replace=False)
    numbers = [str(n + 10 ** (DIGITS - 1)) for n in rng.choice(9 * 10 ** (DIGITS - 1), needles, replace=False)]
    pieces = [np.array(encode(NEEDLE.format(place=p, number=n))) for p, n in zip(places, numbers, strict=True)]
    before, after = chat(str(places[0]))
    answer = encode(numbers[0])
    if len(answer) != DIGITS:
        raise UsageError(f"the tokenizer gives {len(answer)} tokens for {DIGITS} digits: every digit must be one token")
    room = length - len(before) - len(after) - DIGITS - sum(map(len, pieces))
    if room < 8:
        raise UsageError(f"--lengths {length} leaves no room for text beside the question")
    if len(book) <= room:
        raise UsageError(f"--data: {len(book)} tokens of text in a row, {room} are needed: shorten --lengths")
    start = int(rng.integers(0, len(book) - room))
    text = book[start : start + room]
    depths = [depth, *rng.uniform(0, 1, needles - 1)]
    ends = np.flatnonzero(np.isin(text, breaks)) + 1
    ends = np.append(ends, 0)  # the beginning is always possible
    at = [int(ends[np.argmin(np.abs(ends - d * room))]) for d in depths]
    order = np.argsort(at, kind="stable")
    parts, last, found = [], 0, 0
    for i in order:
        parts += [text[last : at[i]], pieces[i]]
        last = at[i]
        if i == 0:
            found = len(before) + sum(map(len, parts)) - len(pieces[0])
    tokens = np.concatenate([before, *parts, text[last:], after, answer]).astype(np.int32)
    assert len(tokens) == length
    return Trial(tokens=tokens, depth=found / length)


def make_trials(tools: Tools, found: TokenSet, length: int, count: int, kind: str, seed: int) -> list[Trial]:
    """The same trials for the same arguments; depths are evenly spread."""
    sizes = np.diff(found.starts)
    books = [found.document(int(i)) for i in np.flatnonzero(sizes > length)]
    if not books:
        raise UsageError(f"--data: no document of more than {length} tokens: give books, or shorten --lengths")
    rng = np.random.default_rng([seed, length, KINDS[kind]])
    encode, chat, breaks = tools
    trials = []
    for i in range(count):
        book = books[int(rng.integers(len(books)))]
        trials.append(make_trial(rng, book, length, (i + 0.5) / count, KINDS[kind], encode, chat, breaks))
    return trials


def tools_of(model: evaluation.Model) -> Tools:
    """How text becomes tokens, what stands around it, and after which tokens a sentence ends."""
    tokenizer = model.tokenizer
    if tokenizer is None:  # smoke: characters stand for themselves

        def characters(text: str) -> list[int]:
            return [ord(c) % model.config.vocab_size for c in text]

        return characters, lambda place: (characters("<"), characters(f">{place}: ")), np.array([5, 6])
    breaks = [i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]).strip(" ") in (".", ".\n", "\n", "\n\n")]

    def chat(place: str) -> tuple[list[int], list[int]]:
        mark = "\x00"
        question = QUESTION.format(place=place)
        if tokenizer.chat_template is None:
            before, after = "", f"{question}\n{ANSWER.format(place=place)}"
        else:
            text = tokenizer.render_chat([{"role": "user", "content": mark + question}])
            before, _, after = text.partition(mark)
            after += ANSWER.format(place=place)
        return tokenizer.encode(before) if before else [], tokenizer.encode(after)

    return tokenizer.encode, chat, np.array(breaks)


def sequence_answers(
    config: Any, options: forward.SequenceOptions, stacked: Any, tokens: jax.Array, refresh: jax.Array
) -> jax.Array:
    """The most likely token at each digit of the answers, int32 [B, DIGITS]."""
    final = forward.hidden_states(config, stacked, tokens, refresh, options).final
    logits = forward.logits_of(config, stacked, final[:, -DIGITS - 1 : -1])
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def loop_answers(subject: Subject, params: Any, graphdef: Any, tokens: np.ndarray, dtype: Any, size: int) -> np.ndarray:
    """DIGITS greedy tokens after each prompt, by prefill and decoding over a cache, int32 [B, DIGITS]."""
    decoding = loop.Decoding(model=graphdef, config=subject.model.config, drafter=NoDrafter(), plan=subject.plan)
    prompt = tokens[:, :-DIGITS]
    batch, width = prompt.shape
    state = loop.init_state(
        decoding,
        jnp.asarray(prompt),
        jnp.full((batch,), width, jnp.int32),
        max_new_tokens=DIGITS,
        key=jax.random.key(0),
        capacity=tokens.shape[1],
        dtype=dtype,
    )
    weights = Params(target=params)
    prefill, decode = _jitted()
    for _ in range(-(-width // size)):
        state, _ = prefill(decoding=decoding, params=weights, state=state, size=size)
    while bool((state.status == RUNNING).any()):
        state, _ = decode(decoding=decoding, params=weights, state=state, rounds=DIGITS)
    return np.asarray(state.history[:, width : width + DIGITS])


@functools.cache
def _jitted() -> tuple[Any, Any]:
    return (
        jax.jit(loop.prefill_chunk, static_argnames=("decoding", "size"), donate_argnames="state"),
        jax.jit(loop.decode_until, static_argnames=("decoding", "rounds"), donate_argnames="state"),
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
            subjects.append(Subject(label=f"nsa, refresh every {every}", model=model, plan=plan, longest=longest))
    return subjects


def measure(
    args: argparse.Namespace, subjects: list[Subject], trials: dict[tuple[str, int], list[Trial]]
) -> dict[tuple[str, int, str], list[tuple[Trial, int]]]:
    """Right digits of each trial by (kind, length, subject); a spent budget leaves the same trials of all subjects."""
    dtype = jnp.dtype(args.dtype)
    stacked: dict[int, Any] = {}
    for subject in subjects:
        key = id(subject.model.params)
        if key not in stacked:
            stacked[key] = forward.stack_params(subject.model.config, subject.model.params, dtype)
    lengths = sorted({length for _, length in trials})
    batch_of = {n: max(1, min(args.batch_tokens // n, args.trials)) for n in lengths}
    options = forward.SequenceOptions(chunk=args.chunk)
    jitted = jax.jit(sequence_answers, static_argnums=(0, 1))

    def lower(subject: Subject, length: int) -> Any:
        tokens = jax.ShapeDtypeStruct((batch_of[length], length), jnp.int32)
        refresh = jax.ShapeDtypeStruct((len(subject.plan.refresh),), bool)
        return jitted.lower(subject.model.config, options, stacked[id(subject.model.params)], tokens, refresh)

    jobs = {(s.model.config, n): (s, n) for s in subjects for n in lengths if n <= s.longest}
    names = {key: f"{s.label}, {n} tokens" for key, (s, n) in jobs.items()}
    compiled = {}
    if args.path == "sequence":
        compiled = evaluation.compile_all(
            {names[key]: functools.partial(lower, *job) for key, job in sorted(jobs.items(), key=lambda x: -x[1][1])}
        )
    built = {}
    if args.path == "loop":
        built = {s.label: build(s.model.config, s.model.params, dtype) for s in subjects}

    def answers(subject: Subject, length: int, tokens: np.ndarray) -> np.ndarray:
        if args.path == "loop":
            graphdef, params = built[subject.label]
            return loop_answers(subject, params, graphdef, tokens, dtype, args.pass_size)
        call = compiled[names[subject.model.config, length]]
        refresh = jnp.asarray(subject.plan.refresh)
        return np.asarray(call(stacked[id(subject.model.params)], jnp.asarray(tokens), refresh))

    scores: dict[tuple[str, int, str], list[tuple[Trial, int]]] = {}
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
        tokens = np.stack([trial.tokens for trial in filled])
        for subject in (s for s in subjects if length <= s.longest):
            got = answers(subject, length, tokens)
            right = (got == tokens[:, -DIGITS:]).cumprod(axis=1).sum(axis=1)  # digits before the first wrong one
            scores.setdefault((kind, length, subject.label), []).extend(
                zip(part, right.tolist()[: len(part)], strict=True)
            )
        steps.done += length - 1
        steps.step(f"{kind}, {length} tokens, {at + len(part)} trials")
    return scores


def summarise(scores: dict[tuple[str, int, str], list[tuple[Trial, int]]]) -> list[dict[str, Any]]:
    rows = []
    for (kind, length, label), each in scores.items():
        exact = [right == DIGITS for _, right in each]
        low, high = evaluation.wilson(sum(exact), len(exact))
        quarters = [[ok for (t, _), ok in zip(each, exact, strict=True) if int(t.depth * 4) == q] for q in range(4)]
        rows.append(
            {
                "kind": kind,
                "length": length,
                "subject": label,
                "trials": len(each),
                "exact": sum(exact),
                "share": sum(exact) / len(exact),
                "share_low": low,
                "share_high": high,
                "digits_before_first_error": sum(right for _, right in each) / len(each),
                "by_quarter_of_depth": [f"{sum(q)}/{len(q)}" for q in quarters],
                "depths": [round(t.depth, 3) for t, _ in each],
                "right_digits": [right for _, right in each],
            }
        )
    return rows


def draw(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    for axis, kind in zip(np.atleast_1d(axes), kinds, strict=True):
        for label in dict.fromkeys(row["subject"] for row in rows):
            mine = [r for r in rows if r["kind"] == kind and r["subject"] == label]
            style = "--o" if label.startswith("dense") else "-o"
            spans = np.array([[r["share"] - r["share_low"], r["share_high"] - r["share"]] for r in mine]).T
            axis.errorbar([r["length"] for r in mine], [r["share"] for r in mine], spans, fmt=style, label=label)
        axis.set(title=kind, xlabel="prompt (tokens)", ylabel="exact answers", ylim=(-0.03, 1.03), xscale="log")
        axis.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    evaluation.add_model_arguments(parser)
    evaluation.add_output_arguments(parser)
    parser.add_argument("--data", nargs="+", default=[], help="held-out token sets; the first one is used")
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 4096, 8192, 16384])
    parser.add_argument("--kinds", nargs="+", choices=tuple(KINDS), default=list(KINDS))
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dense-theta", nargs="*", default=["1e5:8192", "4e5"], metavar="THETA[:LONGEST]")
    parser.add_argument("--refresh-every", nargs="*", type=int, default=[1, 3])
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--path", choices=("sequence", "loop"), default="sequence")
    parser.add_argument("--batch-tokens", type=int, default=65536, help="tokens of a batch of trials")
    parser.add_argument("--chunk", type=int, default=128, help="queries in a tile of sparse attention")
    parser.add_argument("--pass-size", type=int, default=512, help="tokens of a prefill pass of --path loop")
    args = parser.parse_args()
    if args.smoke:
        args.lengths, args.trials, args.batch_tokens, args.chunk, args.pass_size = [320], 3, 640, 64, 160
        args.dense_theta, args.refresh_every, args.dtype = ["4e4"], [2], "float32"
        model, dense, found = evaluation.smoke_model(), evaluation.smoke_model(nsa=False), evaluation.smoke_set()
    else:
        evaluation.require_files("--data", args.data)
        model = evaluation.load_model(args.model, args.attention, args.nsa_config)
        found = next(iter(evaluation.read_sets(args.data, model.config.vocab_size).values()))
        dense = evaluation.load_model(args.dense_model, "dense") if args.dense_theta else model
    if args.trials < 1:
        raise UsageError(f"--trials must be at least 1, got {args.trials}")
    subjects = make_subjects(args, model, dense, max(args.lengths))
    tools = tools_of(model)
    trials = {
        (kind, n): make_trials(tools, found, n, args.trials, kind, args.seed)
        for kind in args.kinds
        for n in args.lengths
    }
    scores = measure(args, subjects, trials)
    if args.smoke:  # untrained, so all answers are wrong: the tokens themselves must agree
        compare_paths(subjects, trials["multi-key", 320], args)
    rows = summarise(scores)
    output = evaluation.output_path("needle", args.output, args.smoke)
    settings = {key: str(value) for key, value in vars(args).items() if key not in ("model", "output", "data")}
    result = {
        "command": "python experiments/needle.py",
        "model": model.facts,
        "dense": dense.facts,
        "settings": settings | {"data": [Path(path).name for path in args.data]},
        "score": "share of trials whose 7 digits greedy decoding gives exactly; 95% Wilson interval",
        "rows": rows,
    }
    harness.write(output, result)
    evaluation.write_csv(output.with_suffix(".csv"), rows)
    columns = len({row["kind"] for row in rows})
    if columns:
        evaluation.plot(output.with_suffix(".png"), lambda axes: draw(axes, rows), columns=columns)
    evaluation.table(rows, ("kind", "length", "subject", "trials", "exact", "share", "share_low", "share_high"))


def compare_paths(subjects: list[Subject], trials: list[Trial], args: argparse.Namespace) -> None:
    """Both paths give the same token after the same prompts.

    Raises:
      SystemExit: they do not.
    """
    tokens = np.stack([trial.tokens for trial in trials])
    for subject in subjects:
        config, params = subject.model.config, subject.model.params
        refresh = jnp.asarray(subject.plan.refresh)
        stacked = forward.stack_params(config, params, jnp.float32)
        graphdef, state = build(config, params, jnp.float32)
        decoded = loop_answers(subject, state, graphdef, tokens, jnp.float32, args.pass_size)
        # Under the decoded tokens, the sequence pass must choose each of them again.
        forced = np.concatenate([tokens[:, :-DIGITS], decoded], axis=1)
        options = forward.SequenceOptions(chunk=args.chunk)
        run = jax.jit(sequence_answers, static_argnums=(0, 1))
        chosen = run(config, options, stacked, jnp.asarray(forced), refresh)
        if not np.array_equal(np.asarray(chosen), decoded):
            raise SystemExit(f"error: {subject.label}: decoding and the sequence pass choose different tokens")
        harness.say(f"{subject.label}: decoding and the sequence pass choose the same tokens")


if __name__ == "__main__":
    evaluation.guarded(main)
