"""Questions about long texts, after RULER (arXiv 2404.06654) but in words of our own: numbers to find, variables to
follow, words to count, a sentence to copy.

Every answer is one list of parts in one order, so that one pass decides whether greedy decoding gives it. Parts between
the items of a list (commas) are given and not scored.

single       one number for a place, among book text
multi-key    the same among numbers for three other places
multi-value  four numbers for one place, in the order of the text
variables    five variables of one value, four of them by way of the one before, beside such a chain of another value
common       the three words of a list that occur ten times, in order of appearance; others are rare
frequent     the three most frequent of made-up words whose frequencies fall as 1/rank^2
copy         a sentence about a person, to be repeated, among three about others
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import numpy as np

from ssv_jax import UsageError
from ssv_jax.tokenizer import Tokenizer
from ssv_jax.training.tokens import TokenSet

DIGITS = 7
PLACES = (
    "Lisbon Vienna Helsinki Cairo Toronto Santiago Nairobi Jakarta Kyoto Prague Dublin Havana Lima Oslo Athens Warsaw"
).split()
PEOPLE = "Agnes Boris Clara Duncan Edith Felix Greta Hugo Irene Jasper Karin Leopold".split()
DEEDS = (
    "hid a {} under the {} because the night watchman was coming",
    "painted a picture of a {} and gave it to the owner of the {}",
    "carried a {} across the bridge and left it behind the {}",
    "sold an old {} to a stranger who lived above the {}",
)
GOODS = "clock lantern trumpet ladder basket mirror kettle compass drum saddle".split()
SPOTS = "bakery chapel stable harbour theatre mill library tannery courthouse school".split()
SYLLABLES = "ba ce di fo gu ha ke li mo nu pa re si to vu wa ze".split()
LIST_WORD = re.compile(r" [a-z]{5,9}")

Part = tuple[str, bool]  # text, and whether it is scored


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is hidden and asked.

    Args:
      statements: to stand in the text; the first one at the depth asked for, the others anywhere.
      question: follows the text.
      answer: beginning of the answer, which is given.
      parts: the rest of the answer.
      ordered: whether statements must stand in their order.
      listing: makes the whole text of so many tokens, instead of book text.
    """

    question: str
    answer: str
    parts: tuple[Part, ...]
    statements: tuple[str, ...] = ()
    ordered: bool = False
    listing: Callable[[int], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A prompt with its answer.

    Args:
      tokens: int32 [S], the answer at the end.
      item: for each token of the answer the number of its item, -1 for given ones, int [A].
      depth: where the first statement begins, as a share of the prompt.
    """

    tokens: np.ndarray
    item: np.ndarray
    depth: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tools:
    """A model's way with text.

    Args:
      encode: text to tokens.
      chat: a question and the beginning of its answer to what stands before the text and after it.
      breaks: tokens after which a statement may stand.
      words: common words of one token with a space before them, for lists.
    """

    encode: Callable[[str], list[int]]
    chat: Callable[[str, str], tuple[list[int], list[int]]]
    breaks: np.ndarray
    words: list[str]


def tools_of(tokenizer: Tokenizer | None, vocab_size: int) -> Tools:
    """For a chat model; without a tokenizer (smoke runs), characters stand for themselves."""
    if tokenizer is None:

        def characters(text: str) -> list[int]:
            return [ord(c) % vocab_size for c in text]

        words = [f" {a}{b}" for a in SYLLABLES for b in SYLLABLES]
        return Tools(
            encode=characters,
            chat=lambda q, a: (characters("<"), characters(f">{q[-9:]}{a[-9:]}")),
            breaks=np.array([5, 6]),
            words=words,
        )
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    breaks = [i for i, text in enumerate(texts) if text.strip(" ") in (".", ".\n", "\n", "\n\n")]
    words = [text for text in texts if LIST_WORD.fullmatch(text)][:4000]

    def chat(question: str, answer: str) -> tuple[list[int], list[int]]:
        mark = "\x00"
        if tokenizer.chat_template is None:
            before, after = "", f"{question}\n{answer}"
        else:
            text = tokenizer.render_chat([{"role": "user", "content": mark + question}])
            before, _, after = text.partition(mark)
            after += answer
        return tokenizer.encode(before) if before else [], tokenizer.encode(after)

    return Tools(encode=tokenizer.encode, chat=chat, breaks=np.array(breaks), words=words)


def enumeration(items: list[str]) -> tuple[Part, ...]:
    """Items that are scored, commas that are not."""
    parts: list[Part] = []
    for number, item in enumerate(items):
        parts += [(",", False)] if number else []
        parts.append((f" {item}", True))
    return tuple(parts)


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    return [str(n + 10 ** (DIGITS - 1)) for n in rng.choice(9 * 10 ** (DIGITS - 1), count, replace=False)]


NEEDLE = "\nThe special magic number for {place} is {number}.\n"


def _magic(keys: int) -> Callable[[np.random.Generator, Tools], Task]:
    def make(rng: np.random.Generator, tools: Tools) -> Task:
        places = rng.choice(PLACES, keys, replace=False)
        numbers = _numbers(rng, keys)
        return Task(
            statements=tuple(NEEDLE.format(place=p, number=n) for p, n in zip(places, numbers, strict=True)),
            question=f"\n\nWhat is the special magic number for {places[0]} mentioned in the text above?",
            answer=f"The special magic number for {places[0]} mentioned in the text is ",
            parts=((numbers[0], True),),
        )

    return make


def _magic_values(rng: np.random.Generator, tools: Tools) -> Task:
    place = rng.choice(PLACES)
    numbers = _numbers(rng, 4)
    # Digits are tokens of their own, and so is the space before the first one.
    parts = [part for i, n in enumerate(numbers) for part in (((", ", False),) if i else ()) + ((n, True),)]
    return Task(
        statements=tuple(f"\nOne of the special magic numbers for {place} is {n}.\n" for n in numbers),
        ordered=True,
        question=f"\n\nWhat are the four special magic numbers for {place}, in the order of the text above?",
        answer=f"The special magic numbers for {place} mentioned in the text are, in its order, ",
        parts=tuple(parts),
    )


def _variables(rng: np.random.Generator, tools: Tools) -> Task:
    names = set[str]()
    while len(names) < 10:
        names.add("".join(rng.choice(list("ABCDEFGHIJKLMNOPQRSTUVWXYZ"), 4)))
    mine, other = np.array_split(sorted(names, key=lambda _: rng.random()), 2)
    values = rng.choice(90000, 2, replace=False) + 10000
    chains = [
        [f"\nVAR {chain[0]} = {value}\n", *(f"\nVAR {b} = VAR {a}\n" for a, b in zip(chain, chain[1:], strict=False))]
        for chain, value in zip((mine, other), values, strict=True)
    ]
    return Task(
        statements=tuple(line for pair in zip(*chains, strict=True) for line in pair),
        ordered=True,
        question=f"\n\nWhich five variables have the value {values[0]}, directly or through another one? Name them "
        "in the order of the text above.",
        answer=f"The variables with the value {values[0]} are",
        parts=enumeration(mine.tolist()),
    )


def _common(rng: np.random.Generator, tools: Tools) -> Task:
    words = [str(word) for word in rng.permutation(tools.words)]
    common, rest = words[:3], words[3:]
    entries = [i for i in range(3) for _ in range(10)]

    def listing(room: int) -> np.ndarray:
        count, size = 0, len(tools.encode(words[0]))  # all of one size
        while count < len(entries) + 2 * len(rest):
            room -= len(tools.encode(f"\n{count + 1}.")) + size
            if room < 0:
                break
            count += 1
        if count < 3 * len(entries):
            raise UsageError(f"--lengths: room for a list of {count} words, {3 * len(entries)} are needed")
        name: dict[int, str] = {}  # of the words that occur ten times: in order of appearance
        lines = []
        for number, place in enumerate(rng.permutation(count).tolist(), 1):
            if place < len(entries):
                word = name.setdefault(entries[place], common[min(len(name), 2)])
            else:
                word = rest[place % len(rest)]
            lines.append(f"\n{number}.{word}")
        return np.array(tools.encode("".join(lines)))

    return Task(
        question="\n\nWhich three words are the most common ones in the list above? Name them in order of appearance.",
        answer="The three most common words in the list are",
        parts=enumeration([word.strip() for word in common]),
        listing=listing,
    )


def _frequent(rng: np.random.Generator, tools: Tools) -> Task:
    names: list[str] = []
    size = 0
    while len(names) < 50:
        word = " " + "".join(rng.choice(SYLLABLES, 3))
        size = size or len(tools.encode(word))
        names += [word] if word not in names and len(tools.encode(word)) == size else []

    def listing(room: int) -> np.ndarray:
        chances = 1 / np.arange(1, len(names) + 1) ** 2
        while True:
            ranks = rng.choice(len(names), room // size, p=chances / chances.sum())
            counts = np.bincount(ranks, minlength=len(names))
            best = np.argsort(-counts, kind="stable")
            if (np.diff(counts[best[:4]]) < 0).all():  # so that there is one answer
                break
        named = np.empty(len(names), int)
        named[best] = np.arange(len(names))
        return np.array(tools.encode("".join(names[i] for i in named[ranks])))

    return Task(
        question="\n\nWhich three words of this text are the most frequent ones? Name the most frequent one first.",
        answer="The three most frequent words are",
        parts=enumeration([name.strip() for name in names[:3]]),
        listing=listing,
    )


def _copy(rng: np.random.Generator, tools: Tools) -> Task:
    people = rng.choice(PEOPLE, 4, replace=False)
    goods, spots = rng.choice(GOODS, 4, replace=False), rng.choice(SPOTS, 4, replace=False)
    deeds = [str(rng.choice(DEEDS)).format(*pair) for pair in zip(goods, spots, strict=True)]
    sentences = [f"{person} {deed}" for person, deed in zip(people, deeds, strict=True)]
    return Task(
        statements=tuple(f"\n{sentence}.\n" for sentence in sentences),
        question=f"\n\nWhat did {people[0]} do? Repeat the sentence of the text above.",
        answer=str(people[0]),
        parts=tuple((f" {word}", True) for word in deeds[0].split()),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A family of tasks; `seed` takes part in the choice of its trials."""

    make: Callable[[np.random.Generator, Tools], Task]
    seed: int


KINDS = {
    "single": Kind(make=_magic(1), seed=1),
    "multi-key": Kind(make=_magic(4), seed=4),
    "multi-value": Kind(make=_magic_values, seed=101),
    "variables": Kind(make=_variables, seed=102),
    "common": Kind(make=_common, seed=103),
    "frequent": Kind(make=_frequent, seed=104),
    "copy": Kind(make=_copy, seed=105),
}


def make_trial(
    rng: np.random.Generator, book: np.ndarray, length: int, depth: float, task: Task, tools: Tools
) -> Trial:
    """A prompt of exactly `length` tokens, answer included.

    Args:
      rng: chooses the piece of the book and the depths of all statements but the first.
      book: tokens to hide statements in.
      length: of the result.
      depth: of the first statement, as a share of the text.
      task: what to hide and to ask.
      tools: of the model.

    Raises:
      UsageError: a length that the question alone fills, a book that is too short, or a tokenizer whose digits are no
        tokens.
    """
    pieces = [np.array(tools.encode(text)) for text in task.statements]
    before, after = tools.chat(task.question, task.answer)
    ids, item = [], []
    for number, (text, scored) in enumerate(task.parts):
        part = tools.encode(text)
        if text.isdecimal() and len(part) != len(text):
            raise UsageError(f"the tokenizer gives {len(part)} tokens for {len(text)} digits: each must be one token")
        ids += part
        item += [number if scored else -1] * len(part)
    room = length - len(before) - len(after) - len(ids) - sum(map(len, pieces))
    if room < 8:
        raise UsageError(f"--lengths {length} leaves no room for text beside the question")
    if task.listing is not None:
        text = task.listing(room)[:room]
        found, parts = len(before), [np.concatenate([text, np.repeat(tools.encode("\n")[:1], room - len(text))])]
    else:
        if len(book) <= room:
            raise UsageError(f"--data: {len(book)} tokens of text in a row, {room} are needed: shorten --lengths")
        start = int(rng.integers(0, len(book) - room))
        text = book[start : start + room]
        depths = np.array([depth, *rng.uniform(0, 1, len(pieces) - 1)])
        if task.ordered:
            depths[1:] = np.sort(depth + depths[1:] * (1 - depth))
        ends = np.append(np.flatnonzero(np.isin(text, tools.breaks)) + 1, 0)  # the beginning is always possible
        at = [int(ends[np.argmin(np.abs(ends - d * room))]) for d in depths]
        parts, last, found = list[np.ndarray](), 0, 0
        for i in np.argsort(at, kind="stable"):
            parts += [text[last : at[i]], pieces[i]]
            last = at[i]
            if i == 0:
                found = len(before) + sum(map(len, parts)) - len(pieces[0])
        parts.append(text[last:])
    tokens = np.concatenate([before, *parts, after, ids]).astype(np.int32)
    assert len(tokens) == length
    return Trial(tokens=tokens, item=np.array(item), depth=found / length)


def make_trials(tools: Tools, found: TokenSet, length: int, count: int, kind: str, seed: int) -> list[Trial]:
    """The same trials for the same arguments; depths are evenly spread.

    Raises:
      UsageError: as `make_trial`, or no document of that length.
    """
    sizes = np.diff(found.starts)
    books = [found.document(int(i)) for i in np.flatnonzero(sizes > length)]
    if not books:
        raise UsageError(f"--data: no document of more than {length} tokens: give books, or shorten --lengths")
    rng = np.random.default_rng([seed, length, KINDS[kind].seed])
    trials = []
    for i in range(count):
        book = books[int(rng.integers(len(books)))]
        task = KINDS[kind].make(rng, tools)
        trials.append(make_trial(rng, book, length, (i + 0.5) / count, task, tools))
    return trials
