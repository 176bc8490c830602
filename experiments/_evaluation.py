"""What the experiments on a trained model share: models, held-out windows, compilation, progress, tables, plots."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import _harness as harness
import jax
import numpy as np

from ssv_jax import UsageError
from ssv_jax.command import run_command
from ssv_jax.models.config import NSA_PRESETS, LlamaConfig, NSAConfig, nsa_from_json
from ssv_jax.models.llama import random_params
from ssv_jax.models.loading import load, read_model_config
from ssv_jax.registry import resolve
from ssv_jax.tokenizer import Tokenizer
from ssv_jax.training import tokens as token_sets
from ssv_jax.training.tokens import TokenSet
from ssv_jax.variants import compiler_options

plot, write_csv = harness.plot, harness.write_csv
_START = time.perf_counter()
SMOKE = LlamaConfig(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=64,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    tie_embeddings=True,
    nsa=NSAConfig(
        cmp_fn="weighted",
        cmp_pe="kv",
        kernel_size=8,
        kernel_stride=4,
        block_size=16,
        n_selected=5,
        window_keys=24,
        gate_bias=True,
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A checkpoint in memory, float32, on the host; `head` is the directory of its own draft head."""

    name: str
    config: LlamaConfig
    params: Mapping[str, Any]
    tokenizer: Tokenizer | None = None
    notes: tuple[str, ...] = ()
    head: Path | None = None

    def with_theta(self, theta: float) -> Model:
        """The same weights under another rotary base."""
        rope = dataclasses.replace(self.config.rope, theta=theta)
        return dataclasses.replace(self, config=dataclasses.replace(self.config, rope=rope))

    @property
    def facts(self) -> dict[str, Any]:
        """What a result says about it."""
        nsa = self.config.nsa
        return {
            "name": Path(self.name).name or self.name,  # a local path says nothing to others
            "attention": "dense" if nsa is None else "nsa",
            "rope_theta": self.config.rope.theta,
            "nsa": None if nsa is None else dataclasses.asdict(nsa),
            "notes": list(self.notes),
        }


def add_model_arguments(parser: argparse.ArgumentParser, dense: bool = True) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="name or path of the model under test")
    parser.add_argument(
        "--attention", choices=("auto", "dense", "nsa"), default="auto", help="nsa: also on a dense checkpoint"
    )
    parser.add_argument("--nsa-config", default=None, help="preset or JSON, instead of the checkpoint's")
    if dense:
        parser.add_argument("--dense-model", default="smollm2-135m", help="name or path of the dense teacher")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--smoke", action="store_true", help="tiny random model, seconds on a CPU")
    parser.add_argument("--output", type=Path, default=None, help="JSON; a CSV and a plot are written beside it")
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start nothing new this long after the start")


def load_model(name: str, attention: str = "auto", nsa_config: str | None = None) -> Model:
    """Reads a checkpoint as `Engine.load` does, in float32.

    Raises:
      CheckpointError: a checkpoint that cannot be read.
      UsageError: a bad sparse attention.
    """
    began = time.perf_counter()
    where = resolve(name)
    nsa: Any = "checkpoint"
    if nsa_config is not None:
        if attention == "dense":
            raise UsageError("--attention dense and --nsa-config exclude each other: drop one")
        try:
            nsa = nsa_from_json(nsa_config)
        except ValueError as error:
            raise UsageError(f"--nsa-config: {error}") from None
    elif attention == "dense":
        nsa = None
    elif attention == "nsa" and read_model_config(where.path, base=where.base).nsa is None:
        nsa = NSA_PRESETS["paper"]
    found = load(where.path, base=where.base, nsa=nsa, dtype=np.float32)
    tokenizer = Tokenizer.from_path(found.tokenizer_source) if found.tokenizer_source else None
    harness.say(f"loaded {name} in {time.perf_counter() - began:.1f} s")
    head = where.head.path if where.head else None
    return Model(name=name, config=found.config, params=found.params, tokenizer=tokenizer, notes=found.notes, head=head)


def smoke_model(nsa: bool = True, seed: int = 0) -> Model:
    """A random model whose logits are not all alike."""
    config = SMOKE if nsa else SMOKE.dense()
    params = {n: np.asarray(x) * (8 if "kernel" in n else 1) for n, x in random_params(SMOKE, seed).items()}
    kept = random_params(config, seed).keys()
    return Model(name="smoke", config=config, params={n: params[n] for n in kept})


def smoke_set(length: int = 900, vocab: int = 128) -> TokenSet:
    """One long document that repeats itself, and two short ones."""
    words = np.random.default_rng(0).integers(0, vocab, (8, 7))
    rng = np.random.default_rng(1)
    long = np.concatenate([words[i] for i in rng.integers(0, 8, -(-length // 7))])[:length]
    return token_sets.from_documents([long, long[:100], long[50:120]], vocab)


def require_files(option: str, paths: Sequence[str | Path]) -> None:
    """To be called before anything that takes long.

    Raises:
      UsageError: no paths, or one that is no file.
    """
    if not paths:
        raise UsageError(f"{option}: name at least one file")
    missing = [str(path) for path in paths if not Path(path).is_file()]
    if missing:
        raise UsageError(f"{option}: {missing[0]}: no such file")


def read_sets(paths: Sequence[str], vocab_size: int) -> dict[str, TokenSet]:
    """Token sets by the stem of their file names.

    Raises:
      UsageError: as `require_files`.
      DataError: a damaged file, or a set of another vocabulary.
    """
    require_files("--data", paths)
    sets = {}
    for path in paths:
        sets[Path(path).name.split(".")[0]] = found = token_sets.load(path)
        found.check_vocab(vocab_size, path)
    return sets


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Consecutive held-out tokens.

    Args:
      tokens: int32 [S].
      target: bool [S], False for the first token of each document, which nothing predicts.
      document: index of the document, -1 for several.
    """

    tokens: np.ndarray
    target: np.ndarray
    document: int


def windows(found: TokenSet, length: int, count: int) -> list[Window]:
    """`count` windows that do not overlap, evenly spread; each lies in one document, while there are such.

    Raises:
      UsageError: a set that has no window of this length at all.
    """
    sizes = np.diff(found.starts)
    single = [
        Window(
            tokens=found.document(i)[at : at + length].astype(np.int32),
            target=np.arange(at, at + length) > 0,
            document=i,
        )
        for i in np.flatnonzero(sizes >= length).tolist()
        for at in range(0, int(sizes[i]) - length + 1, length)
    ]
    if len(single) >= count:
        return [single[i] for i in np.linspace(0, len(single) - 1, count).round().astype(int)]
    short = [found.document(i) for i in np.flatnonzero((sizes < length) & (sizes > 0)).tolist()]
    joined = np.concatenate(short).astype(np.int32) if short else np.zeros(0, np.int32)
    target = np.concatenate([np.arange(len(x)) > 0 for x in short]) if short else np.zeros(0, bool)
    for at in range(0, len(joined) - length + 1, length):
        if len(single) == count:
            break
        part = slice(at, at + length)
        single.append(Window(tokens=joined[part], target=target[part], document=-1))
    if not single:
        raise UsageError(f"--data: a set of {len(found.tokens)} tokens has no window of {length}: shorten --lengths")
    if len(single) < count:
        harness.say(f"only {len(single)} windows of {length} tokens, {count} were asked for")
    return single


def compile_all[Key](jobs: Mapping[Key, Callable[[], Any]], quick: bool = False) -> dict[Key, Any]:
    """`job().compile()` for every job (each lowers one computation), as many at a time as there are cores.

    Compilation leaves Python's lock alone, so that a machine with many cores compiles all in the time of the longest.
    `quick`: code that is fast to make and slow to run, for tiny models.
    """
    began = time.perf_counter()

    def build(job: Callable[[], Any]) -> Any:
        return job().compile({"xla_backend_optimization_level": 0} if quick else compiler_options())

    with concurrent.futures.ThreadPoolExecutor(max(1, min(len(jobs), os.cpu_count() or 1))) as pool:
        waiting = {pool.submit(build, job): key for key, job in jobs.items()}
        done = {}
        for future in concurrent.futures.as_completed(waiting):
            done[waiting[future]] = future.result()
            name = waiting[future]
            text = ", ".join(map(str, name)) if isinstance(name, tuple) else str(name)
            harness.say(f"compiled {len(done)}/{len(jobs)}: {text} ({time.perf_counter() - began:.0f} s)")
    return done


class Steps:
    """Counts steps of similar length on stderr, with the time left; says when the program's budget is spent."""

    def __init__(self, name: str, total: int, budget_s: float = math.inf) -> None:
        self.name, self.total, self.done = name, total, 0
        self.began, self.budget_s = time.perf_counter(), budget_s
        self._last = 0.0

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def spent(self) -> bool:
        return time.perf_counter() - _START >= self.budget_s

    def step(self, text: str) -> None:
        """At most two lines a second."""
        self.done += 1
        if self.seconds - self._last < 0.5 and self.done < self.total:
            return
        self._last = self.seconds
        left = self.seconds / self.done * max(self.total - self.done, 0)
        harness.say(f"{self.name} {self.done}/{self.total}: {text} ({self.seconds:.0f} s, about {left:.0f} s left)")


class Ledger:
    """Rows of an experiment in a JSON file that is written after each; the same command goes on where it stopped.

    Args:
      path: the file; a CSV and a plot will lie beside it.
      command: for readers.
      about: all that rows depend on. JSON values, nothing about places on this machine.
      key: fields that tell rows apart.
      restart: forget what the file holds.

    Raises:
      UsageError: a file that holds something else, or the rows of other settings.
    """

    def __init__(
        self, path: Path, command: str, about: Mapping[str, Any], key: Sequence[str], *, restart: bool = False
    ) -> None:
        self.path, self.key, self.rows = path, tuple(key), []
        self._known: dict[str, Any] = {}
        ran = harness.provenance()
        self.about = json.loads(json.dumps({"command": command, **about}))
        self.about["ran"] = {name: ran[name] for name in ("device", "devices", "versions")}
        self.facts: dict[str, Any] = {}
        self._commits = [ran["commit"]]
        if restart or not path.exists():
            return
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found, self.rows, self.facts = data["about"], data["rows"], data["facts"]
            self._commits = list(dict.fromkeys([*data["commits"], ran["commit"]]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path}: not the rows of an experiment ({error!r}): add --restart") from None
        differing = [name for name in {**found, **self.about} if found.get(name) != self.about.get(name)]
        if differing:
            raise UsageError(f"{path} holds rows of another {', '.join(differing)}: name another --output or --restart")
        harness.say(f"{path.name}: {len(self.rows)} rows so far")

    def find(self, **fields: Any) -> list[dict[str, Any]]:
        """Rows with these values."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in fields.items())]

    def has(self, **fields: Any) -> bool:
        return bool(self.find(**fields))

    def add(self, row: Mapping[str, Any]) -> None:
        """A new row, in place of one with the same key."""
        same = {name: row.get(name) for name in self.key}
        self.rows = [old for old in self.rows if any(old.get(name) != value for name, value in same.items())]
        self.rows.append(dict(row))
        self.save()

    def save(self) -> None:
        part = {"about": self.about, "commits": self._commits, "facts": self.facts, "rows": self.rows}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.with_name(self.path.name + ".part")
        file.write_text(json.dumps({"provenance": harness.provenance(), **part}, indent=1) + "\n", encoding="utf-8")
        os.replace(file, self.path)


def wilson(right: int, count: int) -> tuple[float, float]:
    """95% interval of a proportion (Wilson score)."""
    if not count:
        return 0.0, 1.0
    z, p = 1.96, right / count
    centre = p + z * z / (2 * count)
    half = z * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    scale = 1 + z * z / count
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def output_path(item: str, output: Path | None, smoke: bool) -> Path:
    """`results/ITEM/DEVICE.json`, or what the user asked for."""
    device = jax.devices()[0].device_kind.lower().replace(" ", "-")
    return output or harness.RESULTS / item / f"{'smoke' if smoke else device}.json"


def table(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Prints columns of rows."""
    text = [[str(name) for name in names]]
    for row in rows:
        cells = [row.get(name) for name in names]
        text.append([f"{x:.4g}" if isinstance(x, float) else "-" if x is None else str(x) for x in cells])
    widths = [max(len(line[i]) for line in text) for i in range(len(names))]
    for line in text:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))


def guarded(main: Callable[[], None]) -> None:
    """Runs a script; what a user can mend ends it with one line, and status 2 if it is an option."""
    interrupted = "interrupted; rows that were written stay"
    status = run_command(main, smaller="shorter contexts, fewer windows or smaller trees", interrupted=interrupted)
    if status:
        raise SystemExit(status)
