"""Command line: `python -m ssv_jax.training.self_generate`. Text that the target writes itself, to train a drafter on.

Prompts are answered, or texts continued, in batches by this project's own decode loop; what comes out is a token set in
which the generated tokens are the targets. Every batch is a file of its own until all are there, so a run that is
killed goes on where it stopped, and several processes can share the work.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..command import Parser, run_resumable
from ..drafting.none import NoDrafter
from ..drafting.protocol import Params
from ..errors import UsageError
from ..loop import Decoding, init_state
from ..models.config import LlamaConfig
from ..models.errors import CheckpointError
from ..models.layer_plan import LayerPlan
from ..models.llama import build
from ..pallas_kernels import implementations
from ..pallas_kernels.dispatch import Implementation
from ..sampling import Sampling
from ..state import RUNNING
from ..tokenizer import Tokenizer
from ..variants import Variants
from . import tokens as token_files
from .tokens import DataError, TokenSet, from_documents, read_data
from .train_eagle3 import load_target

Say = Callable[[str], None]

_SETTINGS = "settings.json"
_SMALLEST_CAPACITY = 256
_REPORT_SECONDS = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """How to generate.

    Args:
      max_new_tokens: tokens to emit at most.
      temperatures: prompts are dealt out evenly among them; 0 is greedy.
      top_k, top_p: see `Sampling`, for temperatures above 0.
      batch: sequences at a time.
      seed: of the dealing and of every draw.
      refresh_every: the target's layer plan; 1 refreshes everywhere.
      prefill: prompt tokens in one pass.
      rounds: tokens between looks at what has finished.
      implementation: of the attention ops.

    Raises:
      ValueError: a value out of range.
    """

    max_new_tokens: int = 512
    temperatures: tuple[float, ...] = (0.0,)
    top_k: int = 0
    top_p: float = 1.0
    batch: int = 64
    seed: int = 0
    refresh_every: int = 1
    prefill: int = 256
    rounds: int = 32
    implementation: Implementation = None

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch", "refresh_every", "prefill", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.temperatures:
            raise ValueError("temperatures: name at least one")
        for temperature in self.temperatures:
            self.sampling(temperature)

    def sampling(self, temperature: float) -> Sampling:
        """The choice of tokens at a temperature."""
        if temperature == 0:
            return Sampling()
        return Sampling(temperature=temperature, top_k=self.top_k, top_p=self.top_p)


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Prompts, by index, that are generated together."""

    temperature: float
    prompts: tuple[int, ...]


def plan_batches(lengths: Sequence[int], request: Request) -> list[Batch]:
    """Batches of prompts of similar length, one temperature each; the same for the same lengths and request."""
    order = np.random.default_rng(request.seed).permutation(len(lengths))
    batches = []
    for place, temperature in enumerate(request.temperatures):
        own = sorted(order[place :: len(request.temperatures)].tolist(), key=lambda index: (lengths[index], index))
        for first in range(0, len(own), request.batch):
            batches.append(Batch(temperature, tuple(own[first : first + request.batch])))
    return batches


class Generator:
    """A model that continues batches of prompts."""

    def __init__(
        self, config: LlamaConfig, params: Any, *, dtype: Any, stop_ids: Sequence[int], request: Request
    ) -> None:
        """Takes the model as `Engine` does, the tokens that end a text, and how to generate.

        Raises:
          ValueError: a layer plan that the model does not have.
        """
        self.config, self.dtype, self.request = config, dtype, request
        graphdef, target = build(config, params, dtype)
        self._params = Params(target=target)
        self._decoding = Decoding(
            model=graphdef,
            config=config,
            drafter=NoDrafter(),
            stop_ids=tuple(stop_ids),
            plan=LayerPlan.every(config.num_layers, request.refresh_every),
            implementation=request.implementation,
        )
        self._variants = Variants()

    def run(self, prompts: Sequence[np.ndarray], temperature: float, seed: int, say: Say) -> list[np.ndarray]:
        """The tokens after each prompt, a stop token included.

        Args:
          prompts: at most `request.batch`, each of one token or more.
          temperature: for all.
          seed: of the draws.
          say: called with a line of progress now and then.
        """
        request = self.request
        decoding = dataclasses.replace(self._decoding, sampling=request.sampling(temperature))
        longest = max(len(prompt) for prompt in prompts)
        capacity = _capacity(longest + request.max_new_tokens)
        lengths = np.ones(request.batch, np.int32)
        padded = np.zeros((request.batch, capacity), np.int32)
        for row in range(request.batch):  # rows without a prompt repeat one, so that shapes and stops stay
            prompt = prompts[row % len(prompts)]
            lengths[row] = len(prompt)
            padded[row, : len(prompt)] = prompt
        state = init_state(
            decoding,
            jnp.asarray(padded),
            jnp.asarray(lengths),
            max_new_tokens=request.max_new_tokens,
            key=jax.random.key(seed),
            capacity=capacity,
            dtype=self.dtype,
        )
        size = min(request.prefill, capacity)
        prefill = self._variants.prefill(decoding, self._params, state, size)
        decode = self._variants.decode(decoding, self._params, state, request.rounds)
        for _ in range(-(-longest // size)):
            state, _ = prefill(self._params, state)
        began = reported = time.monotonic()
        emitted, running = 1, _running(np.asarray(state.status))
        while running:
            state, packed = decode(self._params, state)
            running = _running(packed.fetch().status)
            emitted += request.rounds
            now = time.monotonic()
            if now - reported > _REPORT_SECONDS:
                reported = now
                rate = emitted / (now - began)
                say(f"  up to {emitted} of {request.max_new_tokens} tokens, {running} running, {rate:.1f} steps/s")
        history, count = jax.device_get((state.history, state.count))
        return [history[row, lengths[row] : count[row]] for row in range(len(prompts))]


def _running(status: np.ndarray) -> int:
    """Sequences that are not finished."""
    return int((status == RUNNING).sum())


def _capacity(tokens: int) -> int:
    """The next of 256, 384, 512, 768, 1024, ...: few shapes to compile, at most a third unused."""
    power = max(_SMALLEST_CAPACITY, 1 << (tokens - 1).bit_length())
    return power * 3 // 4 if power > _SMALLEST_CAPACITY and tokens <= power * 3 // 4 else power


def generate(
    generator: Generator,
    prompts: Sequence[np.ndarray],
    out: Path,
    *,
    source: str,
    part: tuple[int, int] = (0, 1),
    say: Say,
) -> dict[str, Any] | None:
    """Continues all prompts and writes them with their continuations to `out`, or does a part of that.

    Args:
      generator: the model.
      prompts: token ids.
      out: the token set's file; batches go to a folder beside it.
      source: names the model, for the check that batches belong together.
      part: (i, n) does every n-th batch, from the i-th; whoever finds all batches done writes `out`.
      say: called with lines of progress.

    Returns:
      Numbers about the set, or None where other parts are missing.

    Raises:
      UsageError: the folder has batches of something else.
    """
    request = generator.request
    batches = plan_batches([len(prompt) for prompt in prompts], request)
    folder = out.with_name(out.name + ".parts")
    _check_settings(folder, prompts, request, source)
    files = [folder / f"batch-{index:05d}.npz" for index in range(len(batches))]
    mine = [i for i in range(len(batches)) if i % part[1] == part[0]]
    todo = [i for i in mine if not files[i].exists()]
    # In a random order, so that what a stopped run has made is a sample of the whole.
    todo = np.random.default_rng(request.seed).permutation(todo).tolist()
    if len(todo) < len(mine):
        say(f"{len(mine) - len(todo)} of {len(mine)} batches are done already")
    began, made, answered = time.monotonic(), 0, 0
    for done, index in enumerate(todo):
        batch = batches[index]
        texts = [prompts[i] for i in batch.prompts]
        seed = int(np.random.SeedSequence([request.seed, index]).generate_state(1)[0])
        new = generator.run(texts, batch.temperature, seed, say)
        documents = [np.concatenate([a, b]) for a, b in zip(texts, new, strict=True)]
        flags = [np.arange(len(whole)) >= len(text) for whole, text in zip(documents, texts, strict=True)]
        token_files.save(files[index], from_documents(documents, generator.config.vocab_size, flags))
        made += sum(map(len, new))
        answered += len(texts)
        seconds = time.monotonic() - began
        left = seconds / (done + 1) * (len(todo) - done - 1)
        say(
            f"batch {done + 1}/{len(todo)}: {answered} prompts, {made} tokens, {made / seconds:,.0f} tok/s, "
            f"{left:.0f} s left"
        )
    missing = sum(not file.exists() for file in files)
    if missing:
        say(f"{missing} batches are left to other parts")
        return None
    return _join(generator, batches, files, out)


def _join(generator: Generator, batches: Sequence[Batch], files: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes all batches as one set, in the order of the prompts."""
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    for batch, file in zip(batches, files, strict=True):
        part = token_files.load(file)
        assert part.supervised is not None and part.documents == len(batch.prompts)
        for place, index in enumerate(batch.prompts):
            rows = slice(part.starts[place], part.starts[place + 1])
            found[index] = part.tokens[rows], part.supervised[rows]
    order = sorted(found)
    whole = from_documents([found[i][0] for i in order], generator.config.vocab_size, [found[i][1] for i in order])
    token_files.save(out, whole)
    assert whole.supervised is not None
    ended = np.isin([found[i][0][-1] for i in order], generator._decoding.stop_ids)
    return {
        "file": str(out),
        "documents": whole.documents,
        "tokens": len(whole.tokens),
        "generated": int(whole.supervised.sum()),
        "ended_by_stop_token": int(ended.sum()),
    }


def _check_settings(folder: Path, prompts: Sequence[np.ndarray], request: Request, source: str) -> None:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(len(prompt).to_bytes(8, "little") + np.asarray(prompt, np.int64).tobytes())
    wanted = {"model": source, "prompts": digest.hexdigest(), **dataclasses.asdict(request)}
    for name in ("implementation", "prefill", "rounds"):  # how, not what
        wanted.pop(name)
    wanted = json.loads(json.dumps(wanted))
    path = folder / _SETTINGS
    if path.exists():
        found = json.loads(path.read_text(encoding="utf-8"))
        changed = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        if changed:
            raise UsageError(
                f"--out: {folder} holds batches made with other settings ({', '.join(changed)}): use the same again, "
                "give another --out, or delete that folder"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(wanted, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[np.ndarray]:
    """First turns of a JSONL file of `{"turns": [...]}` objects, as chat prompts.

    Raises:
      FileNotFoundError: no such file.
      DataError: a line that is no such object, no prompt at all, or a tokenizer without a chat template.
    """
    if tokenizer.chat_template is None:
        raise DataError(f"{path}: the model has no chat template to put prompts into; use --continue")
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        if not line.strip():
            continue
        try:
            turns = json.loads(line)["turns"]
            first = turns[0] if isinstance(turns, list) else None
        except (ValueError, KeyError, TypeError, IndexError):
            first = None
        if not isinstance(first, str) or not first:
            raise DataError(f'{path}, line {number}: expected {{"turns": ["..."]}} with a first turn')
        prompts.append(np.asarray(tokenizer.apply_chat([{"role": "user", "content": first}]), np.int32))
    if not prompts:
        raise DataError(f"{path}: holds no prompts")
    return prompts


def random_slices(
    sets: Sequence[TokenSet], weights: Sequence[float], count: int, shortest: int, longest: int, seed: int
) -> list[np.ndarray]:
    """Runs of tokens of random documents, of random length (uniform in its logarithm), none across documents.

    Args:
      sets, weights: what to cut from; a set's documents are drawn in proportion to their length.
      count: runs.
      shortest, longest: tokens; documents below `shortest` are not used, and a run is no longer than its document.
      seed: of the draws.

    Raises:
      DataError: no document is long enough.
    """
    rng = np.random.default_rng(seed)
    usable = []
    for token_set, weight in zip(sets, weights, strict=True):
        sizes = np.diff(token_set.starts)
        share = np.where(sizes >= shortest, sizes, 0).astype(np.float64)
        if share.any():
            usable.append((token_set, weight, np.cumsum(share) / share.sum()))
    if not usable:
        raise DataError(f"--continue: no document has {shortest} tokens; lower --context")
    chances = np.asarray([weight for _, weight, _ in usable])
    slices = []
    for _ in range(count):
        token_set, _, cumulative = usable[rng.choice(len(usable), p=chances / chances.sum())]
        document = token_set.document(int(np.searchsorted(cumulative, rng.random(), side="right")))
        size = min(round(float(np.exp(rng.uniform(np.log(shortest), np.log(longest))))), len(document))
        begin = int(rng.integers(0, len(document) - size + 1))
        slices.append(np.asarray(document[begin : begin + size], np.int32))
    return slices


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers separated by commas, got {text!r}") from None


def _range(text: str) -> tuple[int, int]:
    try:
        first, last = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 1024,8192, got {text!r}") from None
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(f"must rise from 1 or more, got {text!r}")
    return first, last


def _part(text: str) -> tuple[int, int]:
    try:
        index, count = (int(piece) for piece in text.split("/"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must look like 0/2, got {text!r}") from None
    if not 0 <= index < count:
        raise argparse.ArgumentTypeError(f"must be one of 0/{max(count, 1)} ... {max(count, 1) - 1}/{max(count, 1)}")
    return index, count


def parser() -> argparse.ArgumentParser:
    """All options."""
    p = Parser(
        prog="python -m ssv_jax.training.self_generate",
        description="Let a model answer prompts or continue texts, as training data for its drafter.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--model", required=True, metavar="NAME_OR_PATH")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], help="default: float32 on a CPU, else bfloat16")
    source = p.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompts", nargs="+", metavar="FILE", help='JSONL, {"turns": [...]}; the first is answered')
    source.add_argument(
        "--continue", nargs="+", dest="texts", metavar="PATH[=W]", help="token sets or texts, from random places"
    )
    p.add_argument("--count", type=int, default=1024, metavar="N", help="texts to continue")
    p.add_argument("--context", type=_range, default=(1024, 8192), metavar="MIN,MAX", help="tokens that are given")
    p.add_argument("--limit", type=int, metavar="N", help="use the first N prompts only")
    p.add_argument("--max-prompt-tokens", type=int, default=4096, metavar="N", help="longer prompts are left out")
    p.add_argument("--out", required=True, metavar="FILE.npz", help="a finished one is not made again")
    p.add_argument("--part", type=_part, default=(0, 1), metavar="I/N", help="do a part, beside other processes")
    g = p.add_argument_group("generation")
    g.add_argument("--max-new-tokens", type=int, default=512, metavar="N")
    g.add_argument("--temperature", type=_numbers, default=(0.0,), metavar="T[,T]", help="prompts are dealt out evenly")
    g.add_argument("--top-k", type=int, default=0, metavar="K")
    g.add_argument("--top-p", type=float, default=1.0, metavar="P")
    g.add_argument("--batch", type=int, default=64, metavar="N", help="sequences at a time")
    g.add_argument("--seed", type=int, default=0)
    g.add_argument("--refresh-every", type=int, default=1, metavar="N", help="the model's layer plan")
    g.add_argument("--prefill", type=int, default=256, metavar="N", help="prompt tokens in one pass")
    g.add_argument("--rounds", type=int, default=32, metavar="N", help="tokens between looks at what has finished")
    g.add_argument("--implementation", metavar="NAME", help="of the attention ops")
    return p


def _request(args: argparse.Namespace) -> Request:
    names = [field.name for field in dataclasses.fields(Request) if field.name != "temperatures"]
    request = Request(temperatures=args.temperature, **{name: getattr(args, name) for name in names})
    if not args.out.endswith(token_files.SET_SUFFIXES):
        raise ValueError(f"--out {args.out}: must end in .npz or .npz.xz")
    for name in ("count", "max_prompt_tokens", "limit"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(args, name)}")
    if args.seed < 0:
        raise ValueError(f"--seed must not be negative, got {args.seed}")
    if args.implementation is not None and args.implementation not in implementations():
        raise ValueError(f"unknown implementation {args.implementation}; known: {', '.join(implementations())}")
    return request


def _generate(args: argparse.Namespace) -> None:
    say = functools.partial(print, file=sys.stderr, flush=True)
    try:
        request = _request(args)
    except ValueError as error:
        raise UsageError(str(error)) from None
    for path in args.prompts or ():
        if not Path(path).is_file():
            raise FileNotFoundError(f"--prompts {path}: no such file")
    say(f"loading {args.model}")
    target = load_target(args.model, args.dtype)
    if target.tokenizer is None:
        raise CheckpointError(f"{args.model}: has no tokenizer, which prompts and end tokens need")
    if args.prompts:
        prompts = [prompt for path in args.prompts for prompt in read_prompts(Path(path), target.tokenizer)]
        room = min(args.max_prompt_tokens, target.config.max_position - request.max_new_tokens)
        fitting = [prompt for prompt in prompts if len(prompt) <= room][: args.limit]
        if not fitting:
            raise DataError(f"--prompts: none has at most {room} tokens; use other ones or fewer new tokens")
        say(f"{len(fitting)} prompts; {sum(len(p) > room for p in prompts)} longer than {room} tokens left out")
    else:
        shortest, longest = args.context
        longest = min(longest, target.config.max_position - request.max_new_tokens)
        if longest < shortest:
            raise UsageError(
                f"--context: {shortest} tokens and {request.max_new_tokens} new ones exceed the model's context of "
                f"{target.config.max_position}"
            )
        sets, weights = read_data(args.texts, target.tokenizer, say)
        fitting = random_slices(sets, weights, args.count, shortest, longest, args.seed)
    try:
        generator = Generator(
            target.config,
            target.params,
            dtype=jnp.asarray(target.params["embed/embedding"]).dtype,
            stop_ids=target.tokenizer.eos_ids,
            request=request,
        )
    except ValueError as error:
        raise UsageError(str(error)) from None
    report = generate(generator, fitting, Path(args.out), source=target.source, part=args.part, say=say)
    if report is not None:
        print(json.dumps(report, indent=2))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; exit status 2 for usage errors, 1 for files and data that cannot be used."""
    args = parser().parse_args(argv)
    return run_resumable(
        lambda: _generate(args),
        remains="with the batches that are missing",
        smaller="a smaller --batch, shorter texts or fewer new tokens",
    )


if __name__ == "__main__":
    raise SystemExit(main())
