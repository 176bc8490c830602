"""Token sets: text to tokens, their files, and batches that are a pure function of seed and step.

A set is a run of tokens with the starts of its documents. Batches are cut from one or several sets; nothing is padded,
and a training run that resumes at a step gets the same batches as one that never stopped.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import json
import lzma
import math
import os
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32, Shaped

from ..tokenizer import Tokenizer

Progress = Callable[[str], None]
"""Takes one line of progress."""

SET_SUFFIXES = (".npz", ".npz.xz")
_PROSE = ".txt .text .md .markdown .rst .tex .jsonl"
_CODE = ".py .pyi .c .h .cc .cpp .hpp .cu .go .rs .java .js .ts .sh .sql .toml .yaml .yml"
TEXT_SUFFIXES = frozenset(f"{_PROSE} {_CODE}".split())
"""Files that a directory is searched for; a file that is named itself may have any suffix."""

_FORMAT = 1
_ROWS_PER_CYCLE = 1000
_KEPT_PLANS = 2
_REPORT_SECONDS = 5.0
# Two-byte tokens: the position bits that LZMA looks at match their alignment.
_XZ_FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 1, "pb": 1}]


class DataError(ValueError):
    """Training data that cannot be used; the message names the file or argument and says what to change."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TokenSet:
    """Documents, one after the other.

    Attributes:
      tokens: uint16 or uint32 [N], token ids.
      starts: int64 [D + 1]; document i is `tokens[starts[i]:starts[i + 1]]`.
      supervised: bool [N], which tokens are targets of the loss; None: every one.

    Raises:
      DataError: no tokens, dtypes or shapes other than these, or starts that do not rise from 0 to N.
    """

    tokens: np.ndarray
    starts: np.ndarray
    supervised: np.ndarray | None = None

    def __post_init__(self) -> None:
        """Checks the arrays against each other."""
        _check_arrays(self.tokens, self.starts, self.supervised, "token set")

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.starts) - 1

    def document(self, index: int) -> Shaped[np.ndarray, " m"]:
        """Tokens of one document, a view."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def check_vocab(self, vocab_size: int, source: str = "token set") -> None:
        """Makes sure that every id is below `vocab_size`.

        Raises:
          DataError: one is not, so the set was made with another tokenizer.
        """
        largest = int(self.tokens.max())
        if largest >= vocab_size:
            raise DataError(
                f"{source}: holds token id {largest}, but the vocabulary has {vocab_size} tokens; "
                "tokenise the text with this model's tokenizer"
            )


def _check_arrays(tokens: Any, starts: Any, supervised: Any, source: str) -> None:
    for name, array, dtypes in (
        ("tokens", tokens, (np.uint16, np.uint32)),
        ("starts", starts, (np.int64,)),
        ("supervised", supervised, (np.bool_,)),
    ):
        if array is None and name == "supervised":
            continue
        allowed = " or ".join(np.dtype(d).name for d in dtypes)
        if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype not in dtypes:
            got = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise DataError(f"{source}: {name} must be a one-dimensional {allowed} array, got {got}")
    if not tokens.size:
        raise DataError(f"{source}: holds no tokens; give at least one document with text")
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != len(tokens) or (np.diff(starts) < 0).any():
        raise DataError(f"{source}: starts must rise from 0 to the number of tokens, {len(tokens)}")
    if supervised is not None and len(supervised) != len(tokens):
        raise DataError(f"{source}: {len(tokens)} tokens but {len(supervised)} supervised flags; give one each")


def from_documents(
    documents: Iterable[Sequence[int] | np.ndarray],
    vocab_size: int,
    supervised: Iterable[Sequence[bool] | np.ndarray] | None = None,
) -> TokenSet:
    """Joins documents to a set; empty ones are left out.

    Args:
      documents: token ids of each document.
      vocab_size: of the tokenizer; decides between uint16 and uint32.
      supervised: for each document, a flag for each token.

    Raises:
      DataError: no tokens at all, an id outside the vocabulary, or flags that do not match the tokens.
    """
    if vocab_size <= 0:
        raise DataError(f"vocab_size: expected a positive number, got {vocab_size}")
    dtype = np.uint16 if vocab_size <= 65536 else np.uint32
    pieces, flags = [], []
    masks = itertools.repeat(None) if supervised is None else supervised
    for number, (document, mask) in enumerate(zip(documents, masks, strict=supervised is not None)):
        ids = np.asarray(document, np.int64)
        if not ids.size:
            continue
        if ids.min() < 0 or ids.max() >= vocab_size:
            raise DataError(
                f"document {number}: token ids run from {ids.min()} to {ids.max()}, outside a vocabulary of "
                f"{vocab_size}; use the tokenizer that made them"
            )
        if mask is not None:
            if len(mask) != len(ids):
                raise DataError(f"document {number}: {len(ids)} tokens but {len(mask)} supervised flags; give one each")
            flags.append(np.asarray(mask, np.bool_))
        pieces.append(ids.astype(dtype))
    if not pieces:
        raise DataError("documents: none holds a token; give at least one document with text")
    return TokenSet(
        tokens=np.concatenate(pieces),
        starts=np.concatenate([[0], np.cumsum([len(p) for p in pieces])]).astype(np.int64),
        supervised=np.concatenate(flags) if flags else None,
    )


# Files


def save(path: str | os.PathLike[str], token_set: TokenSet) -> None:
    """Writes a set as `.npz`, or compressed to about a byte a token as `.npz.xz`; the file appears only when complete.

    Raises:
      DataError: another suffix.
    """
    path = Path(path)
    if not path.name.endswith(SET_SUFFIXES):
        raise DataError(f"{path}: a token set's file ends in .npz or .npz.xz")
    lengths = np.diff(token_set.starts)
    small = np.uint32 if lengths.max() < 2**32 else np.uint64
    arrays = {"format": np.asarray(_FORMAT), "tokens": token_set.tokens, "lengths": lengths.astype(small)}
    if token_set.supervised is not None:
        arrays["supervised"] = np.packbits(token_set.supervised)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    data = buffer.getvalue()
    if path.name.endswith(".xz"):
        data = lzma.compress(data, filters=_XZ_FILTERS)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    os.replace(partial, path)


def load(path: str | os.PathLike[str]) -> TokenSet:
    """Reads what `save` wrote.

    Raises:
      FileNotFoundError: no such file.
      DataError: a file that is damaged or no token set.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        if path.name.endswith(".xz"):
            data = lzma.decompress(data)
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            fields = {name: file[name] for name in file.files}
    except (lzma.LZMAError, zipfile.BadZipFile, EOFError, ValueError, OSError, AttributeError, KeyError) as error:
        text = " ".join(str(error).split())[:120] or type(error).__name__
        raise DataError(f"{path}: damaged, or no token set ({text}); copy or build it again") from None
    missing = {"format", "tokens", "lengths"} - fields.keys()
    if missing:
        raise DataError(f"{path}: no token set, {', '.join(sorted(missing))} missing; build it again")
    if fields["format"].shape or fields["format"].item() != _FORMAT:
        raise DataError(f"{path}: token set format {fields['format']}, this version reads {_FORMAT}; build it again")
    tokens, lengths, packed = fields["tokens"], fields["lengths"], fields.get("supervised")
    if lengths.ndim != 1 or lengths.dtype.kind != "u" or int(lengths.sum(dtype=np.float64)) != tokens.size:
        raise DataError(f"{path}: its document lengths do not add up to its {tokens.size} tokens; build it again")
    supervised = None
    if packed is not None:
        if packed.ndim != 1 or packed.dtype != np.uint8 or packed.size != -(-tokens.size // 8):
            raise DataError(f"{path}: {tokens.size} tokens need {-(-tokens.size // 8)} bytes of flags; build it again")
        supervised = np.unpackbits(packed, count=tokens.size).astype(np.bool_)
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    _check_arrays(tokens, starts, supervised, str(path))
    return TokenSet(tokens=tokens, starts=starts, supervised=supervised)


# Text


def tokenize_files(
    paths: Sequence[str | os.PathLike[str]], tokenizer: Tokenizer, progress: Progress | None = None
) -> TokenSet:
    """Tokenises text files, each a document; `.jsonl` files hold one document a line, as `{"text": ...}`.

    Args:
      paths: files of UTF-8 text, or directories, whose files with a suffix of `TEXT_SUFFIXES` are read in sorted order.
      tokenizer: of the model. Special tokens written out in the text are recognised; documents begin with the
        beginning-of-sequence token where the model's plain text does.
      progress: called with a line every few seconds.

    Raises:
      FileNotFoundError: a path that does not exist.
      DataError: no text, not UTF-8, or JSON without a text.
    """
    files = _text_files([Path(path) for path in paths])
    total = sum(file.stat().st_size for file in files)
    add_bos = tokenizer.adds_bos
    began = reported = time.monotonic()
    done = 0

    def documents() -> Iterator[list[int]]:
        nonlocal done, reported
        for file in files:
            for text, size in _texts(file):
                if text:
                    yield tokenizer.encode(text, add_bos=add_bos)
                done += size
                now = time.monotonic()
                if progress is not None and now - reported >= _REPORT_SECONDS:
                    reported, rate = now, done / (now - began)
                    left = (total - done) / rate
                    progress(f"tokenised {done / 1e6:.1f} of {total / 1e6:.1f} MB, {left:.0f} s left")

    try:
        return from_documents(documents(), tokenizer.vocab_size)
    except DataError as error:
        names = ", ".join(str(path) for path in paths)
        raise error if done < total else DataError(f"{names}: no text to train on; {error}") from None


def _text_files(paths: Sequence[Path]) -> list[Path]:
    files = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or directory")
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(p for p in path.rglob("*") if p.suffix.lower() in TEXT_SUFFIXES and p.is_file())
        if not found:
            raise DataError(f"{path}: no text files in it, such as .txt, .md or .jsonl")
        files += found
    if not files:
        raise DataError("paths: none given; name at least one text file or directory")
    return files


def _texts(file: Path) -> Iterator[tuple[str, int]]:
    """Documents of a file, each with its size in bytes."""
    try:
        if file.suffix.lower() != ".jsonl":
            yield file.read_text(encoding="utf-8-sig"), file.stat().st_size
            return
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    entry = json.loads(line)
                except ValueError:
                    raise DataError(f"{file}, line {number}: not JSON; each line is one object") from None
                text = entry.get("text") if isinstance(entry, dict) else None
                if not isinstance(text, str):
                    raise DataError(f'{file}, line {number}: expected an object with a string "text"')
                yield text, len(line.encode())
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start}); convert it or leave it out") from None


def read_data(
    paths: Sequence[str], tokenizer: Tokenizer, progress: Progress | None = None
) -> tuple[tuple[TokenSet, ...], tuple[float, ...]]:
    """Reads the `--data` arguments of the training commands, for `Mixture`.

    Args:
      paths: token sets (`.npz`, `.npz.xz`), text files or directories, each alone or as `PATH=WEIGHT`.
      tokenizer: of the model.
      progress: called with a line now and then.

    Returns:
      One set for each path, and their weights: those given, otherwise their numbers of tokens.

    Raises:
      FileNotFoundError: a path that does not exist.
      DataError: a weight that is no positive number or given for some paths only, or unusable data.
    """
    if not paths:
        raise DataError("data: no path given; name a token set (.npz, .npz.xz), a text file or a directory")
    named = [_split_weight(path) for path in paths]
    given = [weight for _, weight in named if weight is not None]
    if given and len(given) < len(named):
        bare = next(path for path, weight in named if weight is None)
        raise DataError(f"data: {bare} has no weight; write PATH=WEIGHT for every path or for none")
    missing = [str(path) for path, _ in named if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{missing[0]}: no such file or directory")
    sets = []
    for path, _ in named:
        is_set = path.name.endswith(SET_SUFFIXES) and path.is_file()
        sets.append(load(path) if is_set else tokenize_files([path], tokenizer, progress))
        sets[-1].check_vocab(tokenizer.vocab_size, str(path))
        if progress is not None:
            progress(f"{path}: {len(sets[-1].tokens)} tokens in {sets[-1].documents} documents")
    return tuple(sets), tuple(given) if given else tuple(float(len(s.tokens)) for s in sets)


def _split_weight(text: str) -> tuple[Path, float | None]:
    path, sign, number = text.rpartition("=")
    if not sign or Path(text).exists():
        return Path(text), None
    try:
        weight = float(number)
    except ValueError:
        raise DataError(f"data: {text}: expected PATH=WEIGHT with a number, got {number!r}") from None
    if not (math.isfinite(weight) and weight > 0):
        raise DataError(f"data: {text}: the weight must be a positive number")
    return Path(path), weight


# Batches


@dataclasses.dataclass(frozen=True)
class _Plan:
    """One pass over a set: its documents in a random order, seen as a ring of tokens, and where each row begins."""

    first: np.ndarray  # [documents] where each begins in `tokens`
    ends: np.ndarray  # [documents] cumulative lengths
    rows: np.ndarray  # positions in the ring


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """Batches of rows, each cut from one of several sets; row r of the run is the same whatever ran before.

    A row is a run of whole documents in a seeded order that changes from pass to pass; only its last one is cut. A
    document longer than a row is continued in another row and starts at a random offset in half of the passes; a
    shorter one that was cut comes again as the first of another row. A pass over a set is as many rows as its tokens
    fill, in random order. Of every 1000 rows, the sets get shares by weight, at least one each.

    Attributes:
      sets: token sets.
      weights: relative share of rows of each set, positive.
      length: tokens in a row, at least 2.
      batch: rows in a batch.
      seed: of the order.

    Raises:
      DataError: no sets, numbers out of range, or a set without a single target.
    """

    sets: tuple[TokenSet, ...]
    weights: tuple[float, ...]
    length: int
    batch: int
    seed: int
    _shares: np.ndarray = dataclasses.field(init=False, repr=False)
    _plans: dict[tuple[int, int], Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the arguments and divides a cycle of rows among the sets."""
        if not self.sets or len(self.sets) != len(self.weights):
            raise DataError(
                f"weights: {len(self.weights)} for {len(self.sets)} sets; give at least one set, a weight each"
            )
        if not all(math.isfinite(w) and w > 0 for w in self.weights):
            raise DataError(f"weights: expected positive numbers, got {self.weights}")
        if len(self.sets) > _ROWS_PER_CYCLE:
            raise DataError(f"sets: at most {_ROWS_PER_CYCLE}, got {len(self.sets)}; join some")
        for name, value, least in (("length", self.length, 2), ("batch", self.batch, 1), ("seed", self.seed, 0)):
            if value < least:
                raise DataError(f"{name}: expected at least {least}, got {value}")
        for number, token_set in enumerate(self.sets):
            target = (
                np.ones(len(token_set.tokens), bool) if token_set.supervised is None else token_set.supervised.copy()
            )
            target[token_set.starts[:-1][np.diff(token_set.starts) > 0]] = False
            if not target.any():
                raise DataError(f"sets[{number}]: no token to predict; give documents of two tokens or more, and flags")
        object.__setattr__(self, "_shares", _share(self.weights))

    def batch_at(self, step: int) -> tuple[Int32[np.ndarray, "batch length"], Bool[np.ndarray, "batch length"]]:
        """The batch of a step, which depends on the seed and the step alone.

        Args:
          step: 0 or more.

        Returns:
          tokens: int32 [batch, length].
          supervised: bool [batch, length], whether the token at a position is a target, to be predicted from those
            before it; False for the first token of each document.

        Raises:
          DataError: a negative step.
        """
        if step < 0:
            raise DataError(f"step: expected 0 or more, got {step}")
        tokens = np.empty((self.batch, self.length), np.int32)
        supervised = np.empty((self.batch, self.length), np.bool_)
        for index in range(self.batch):
            cycle, place = divmod(step * self.batch + index, _ROWS_PER_CYCLE)
            order = np.random.default_rng([self.seed, 0, cycle]).permutation(self._shares)
            chosen = int(order[place])
            before = cycle * np.count_nonzero(self._shares == chosen) + np.count_nonzero(order[:place] == chosen)
            self._fill(chosen, int(before), tokens[index], supervised[index])
        return tokens, supervised

    def _fill(self, chosen: int, number: int, tokens: np.ndarray, supervised: np.ndarray) -> None:
        """Writes the `number`-th row of a set."""
        token_set = self.sets[chosen]
        epoch, row = divmod(number, -(-len(token_set.tokens) // self.length))
        plan = self._plan(chosen, epoch)
        position = int(plan.rows[row % len(plan.rows)])
        document = int(np.searchsorted(plan.ends, position, side="right"))
        filled = 0
        while filled < self.length:
            left = int(plan.ends[document]) - position
            begin = int(plan.first[document]) + self._size(plan, document) - left
            count = min(left, self.length - filled)
            target = slice(filled, filled + count)
            tokens[target] = token_set.tokens[begin : begin + count]
            supervised[target] = True if token_set.supervised is None else token_set.supervised[begin : begin + count]
            supervised[filled] = False
            filled += count
            position = int(plan.ends[document])
            document += 1
            if document == len(plan.ends):
                document = position = 0

    @staticmethod
    def _size(plan: _Plan, document: int) -> int:
        return int(plan.ends[document] - (plan.ends[document - 1] if document else 0))

    def _plan(self, chosen: int, epoch: int) -> _Plan:
        found = self._plans.get((chosen, epoch))
        if found is None:
            found = _make_plan(self.sets[chosen], self.length, np.random.default_rng([self.seed, 1, chosen, epoch]))
            # Only to save time: plans are made again when they are needed again.
            for old in [key for key in list(self._plans) if key[0] == chosen][: 1 - _KEPT_PLANS]:
                self._plans.pop(old, None)
            self._plans[chosen, epoch] = found
        return found


def _share(weights: Sequence[float]) -> np.ndarray:
    """Which set each row of a cycle comes from, in order of sets: largest remainders, at least one row each."""
    exact = np.asarray(weights, np.float64)
    exact = exact / exact.sum() * _ROWS_PER_CYCLE
    counts = np.maximum(np.floor(exact).astype(np.int64), 1)
    while (short := _ROWS_PER_CYCLE - int(counts.sum())) != 0:
        excess = exact - counts
        if short > 0:
            counts[np.argmax(excess)] += 1
        else:
            counts[np.argmin(np.where(counts > 1, excess, np.inf))] -= 1
    return np.repeat(np.arange(len(weights)), counts)


def _make_plan(token_set: TokenSet, length: int, rng: np.random.Generator) -> _Plan:
    sizes = np.diff(token_set.starts)
    order = rng.permutation(np.flatnonzero(sizes))
    first, sizes = token_set.starts[:-1][order], sizes[order]
    skip = rng.integers(0, np.clip(sizes - length, 0, length) + 1) * rng.integers(0, 2, len(sizes))
    first, sizes = first + skip, sizes - skip
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    rows, position = [], 0
    while position < total:
        rows.append(position)
        position += length
        if position >= total:
            break
        document = int(np.searchsorted(ends, position, side="right"))
        if sizes[document] <= length:
            # Shorter than a row: it comes again, whole.
            position = int(ends[document] - sizes[document])
    return _Plan(first, ends, rng.permutation(np.asarray(rows, np.int64)))
