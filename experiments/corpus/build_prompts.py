"""Builds prompts for self-generated training text, out of the training sets, a dictionary's headwords and templates.

python experiments/corpus/build_prompts.py --corpus .corpus --out .corpus/prompts.jsonl.xz
"""

from __future__ import annotations

import argparse
import gzip
import json
import lzma
import random
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fetch import FetchError, fetch, unpack
from prompt_templates import TEMPLATES

from ssv_jax.registry import resolve
from ssv_jax.tokenizer import Tokenizer
from ssv_jax.training import tokens

MANIFEST = Path(__file__).with_name("manifest.json")
EVALUATION = Path(__file__).parents[1] / "prompts" / "chat.jsonl"
SEED = 20250729
MOST_CHARS = 900
COUNTS = {"define": 8000, "explain": 7000, "summarize": 3500, "continue": 3500, "rewrite": 3000, "docstring": 3500}

DEFINE = (
    "What is {}?",
    "What does {} mean in computing?",
    "Explain {} in simple terms.",
    "Give a short definition of {} and an example.",
    "In two sentences, what is {}?",
    "Tell me about {}.",
    "I keep reading about {}. What is it and why does it matter?",
)
EXPLAIN = (
    "Explain the following topic: {}.",
    "Give an introduction to {}.",
    "What do I need to know about {}?",
    "Write a short section of a manual about {}.",
    "How does {} work?",
    "List the key points of {}.",
)
HOW = (
    "How do I {}?",
    "What is the best way to {}?",
    "Show me how to {}, with an example.",
    "I want to {}. Where do I start?",
)
SUMMARIZE = (
    "Summarize the following paragraph in one sentence:\n\n{}",
    "What is the main point of this text?\n\n{}",
    "Give a short summary of this passage:\n\n{}",
    "{}\n\nSummarize the text above in your own words.",
    "Write three bullet points that sum up this text:\n\n{}",
)
CONTINUE = (
    "Continue this text:\n\n{}",
    "Write the next paragraph of this passage:\n\n{}",
    "{}\n\nWhat could come next? Write it.",
)
REWRITE = (
    "Rewrite this passage in simple modern English:\n\n{}",
    "Rephrase the following text so that a child understands it:\n\n{}",
    "Make this text shorter and clearer:\n\n{}",
    "Ask three questions about the following text and answer them:\n\n{}",
    "Correct the style of this paragraph and explain your changes:\n\n{}",
)
DOCSTRING = (
    "Write a Python function `{name}({arguments})` that does the following: {what}",
    'Implement this Python function:\n\ndef {name}({arguments}):\n    """{what}"""',
    'Complete the code.\n\n```python\ndef {name}({arguments}):\n    """{what}"""\n```',
    "{what} Write a Python function named {name} for this and show how it is called.",
)

_VERBS = (
    "add build call change check choose compare configure convert create customize debug define delete disable enable "
    "extend filter find format generate get handle import improve install load manage measure merge migrate open parse "
    "print read remove replace restore run save search select send set start store test track update upgrade use "
    "validate write"
).split()
_TITLE = re.compile(r"(?m)^([A-Z][^\n]{5,70})\n([=\-~^*#\"'+])\2{4,}$")
_FUNCTION = re.compile(r'(?m)^ *def ([a-z]\w{3,40})\(([^()]{0,90})\)[^:\n]*:\n\s+r?"""([A-Z][^"]{30,280}?\.)(?:\n|""")')


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def texts(corpus: Path, name: str, tokenizer: Tokenizer) -> list[str]:
    token_set = tokens.load(corpus / f"{name}.npz.xz")
    return [tokenizer.decode(token_set.document(i), skip_special=False) for i in range(token_set.documents)]


def titles(documents: list[str]) -> Iterator[str]:
    """Section titles of reStructuredText."""
    for text in documents:
        for match in _TITLE.finditer(text):
            title = re.sub(r":[a-z:]+:|[`*|\\]|<[^>]*>", "", match[1]).strip(" .:")
            words = title.split()
            if 2 <= len(words) <= 9 and sum(c.isalpha() or c == " " for c in title) > 0.85 * len(title):
                yield title


def paragraphs(documents: list[str]) -> Iterator[str]:
    """Running prose of a length that fits a prompt, unwrapped."""
    for text in documents:
        for paragraph in re.split(r"\n{2,}", text):
            plain = " ".join(paragraph.split())
            letters = sum(c.isalpha() or c == " " for c in plain)
            if 250 <= len(plain) <= 750 and letters > 0.93 * len(plain) and plain[0].isupper() and plain[-1] in '.!?"':
                yield plain


def functions(documents: list[str]) -> Iterator[dict[str, str]]:
    """Names, arguments and first sentences of Python functions."""
    for text in documents:
        for name, arguments, what in _FUNCTION.findall(text):
            arguments = ", ".join(a.strip() for a in arguments.split(",") if a.strip() not in ("self", "cls", ""))
            yield {"name": name, "arguments": arguments, "what": " ".join(what.split())}


def headwords(packages: Path) -> list[str]:
    """Headwords of the dictionary of computing; its definitions are not used."""
    package = json.loads(MANIFEST.read_text())["prompt_package"]
    with tempfile.TemporaryDirectory(prefix="prompts-") as scratch:
        unpack(package["kind"], fetch(package, packages, say), Path(scratch), [package["path"]])
        path = Path(scratch) / package["path"]
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8", "replace")
    words = [line.split("\t")[0] for line in text.splitlines()]
    return [w for w in words if re.fullmatch(r"[A-Za-z][A-Za-z0-9 +/.-]{2,38}", w)]


def how_or_explain(title: str, rng: random.Random) -> str:
    """A question about a section title."""
    first, _, rest = title.partition(" ")
    low = first.lower()
    for ending, added in (("ing", ""), ("ing", "e")):
        verb = low.removesuffix(ending) + added
        stem = verb[:-1] if len(verb) > 3 and verb[-1:] == verb[-2:-1] else verb
        for candidate in (verb, stem):
            if low.endswith(ending) and candidate in _VERBS:
                return rng.choice(HOW).format(f"{candidate} {rest}")
    if low in _VERBS:
        return rng.choice(HOW).format(f"{low} {rest}")
    return rng.choice(EXPLAIN).format(title)


def build(corpus: Path, packages: Path, tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """All prompts as (category, text), distinct, in a seeded order, without those of the evaluation set."""
    rng = random.Random(SEED)
    books, docs, code = (texts(corpus, f"train_{name}", tokenizer) for name in ("books", "docs", "code"))
    say("read the training sets")
    prose = [p for p in paragraphs(books + docs)]
    rng.shuffle(prose)
    used = {json.loads(line)["turns"][0] for line in EVALUATION.read_text().splitlines()}
    made: list[tuple[str, str]] = []

    def take(category: str, count: int, candidates: Iterator[str]) -> None:
        before = len(made)
        for prompt in candidates:
            if len(made) - before == count:
                break
            if prompt not in used and len(prompt) <= MOST_CHARS:
                used.add(prompt)
                made.append((category, prompt))
        say(f"{category}: {len(made) - before}")

    def shuffled(items: list) -> list:
        rng.shuffle(items)
        return items

    words = shuffled(sorted(set(headwords(packages))))
    take("define", COUNTS["define"], (rng.choice(DEFINE).format(word) for word in words))
    heads = shuffled(sorted(set(titles(docs))))
    take("explain", COUNTS["explain"], (how_or_explain(title, rng) for title in heads))
    rest = iter(prose)
    for category, forms in (("summarize", SUMMARIZE), ("continue", CONTINUE), ("rewrite", REWRITE)):
        take(category, COUNTS[category], (rng.choice(forms).format(p) for p in rest))
    found = shuffled(list(functions(code)))
    take("docstring", COUNTS["docstring"], (rng.choice(DOCSTRING).format(**f) for f in found))
    for category, (template, count) in TEMPLATES.items():
        take(category, count, (template(rng) for _ in range(20 * count)))
    rng.shuffle(made)
    return made


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds prompts for self-generated training text.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that build_corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .jsonl or .jsonl.xz")
    parser.add_argument("--model", default="smollm2-135m", help="model whose tokenizer made the corpus")
    parser.add_argument("--packages", type=Path, help="folder that keeps the downloads (default: CORPUS/packages)")
    options = parser.parse_args(arguments)
    try:
        tokenizer = Tokenizer.from_path(resolve(options.model).path)
        made = build(options.corpus, options.packages or options.corpus / "packages", tokenizer)
        lines = "".join(
            json.dumps({"question_id": number, "category": category, "turns": [prompt]}, ensure_ascii=False) + "\n"
            for number, (category, prompt) in enumerate(made)
        )
        data = lines.encode()
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_bytes(lzma.compress(data, preset=9) if options.out.suffix == ".xz" else data)
        say(f"{options.out}: {len(made)} prompts")
    except (FetchError, ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
