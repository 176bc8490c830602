"""Long texts in which facts are told and asked for again, so that block selection learns to find single facts.

Names, wordings and numbers are drawn from lists of this file; the needle test (`experiments/needle.py`) uses other
wordings and another question format, in texts that are held out.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ssv_jax.registry import resolve
from ssv_jax.tokenizer import Tokenizer
from ssv_jax.training import tokens

_OWNERS = (
    "Alice Bertrand Carmen Dmitri Esther Farid Gloria Hassan Ingrid Jorge Keiko Lorenzo Miriam Nadia Otto Priya "
    "Quentin Rosa Stefan Tamar Ulrich Vera Wei Ximena Yusuf Zelda"
).split()
_THINGS = (
    "locker|bicycle|parcel|ticket|account|file|vault|ship|telescope|recipe|contract|engine|radio|camera|passport|"
    "garden|letter|violin|engine room|laboratory"
).split("|")
_KINDS = ("code", "number", "key", "registration", "password", "identifier", "reference")
_WORDS = (
    "amber basalt cedar delta ember falcon granite harbor indigo juniper kestrel lantern meadow nectar onyx pepper "
    "quartz raven saffron tundra umber velvet willow zephyr"
).split()
_TOLD = (
    "The {kind} of {owner}'s {thing} is {value}.",
    "Remember this: {owner}'s {thing} has the {kind} {value}.",
    "{owner} wrote down the {kind} of the {thing}: {value}.",
    "Note: {thing} of {owner}, {kind} {value}.",
    "{{{owner}, {thing}}}: {kind} = {value}",
)
_ASKED = (
    "What is the {kind} of {owner}'s {thing}? It is {value}.",
    "Question: {kind} of the {thing} of {owner}? Answer: {value}.",
    "As was said before, the {kind} of {owner}'s {thing} is {value}.",
    "{owner} asked for the {kind} of the {thing}, which is {value}.",
    "Recall: {thing} of {owner}, {kind} {value}.",
)


def _value(rng: np.random.Generator) -> str:
    kind = rng.integers(3)
    if kind == 0:
        return str(rng.integers(10 ** int(rng.integers(3, 8)), 10**8))
    if kind == 1:
        return "-".join(rng.choice(_WORDS, 2))
    return f"{rng.choice(_WORDS)}{rng.integers(10, 10000)}"


def make_document(
    rng: np.random.Generator, text: np.ndarray, encode: Callable[[str], list[int]], facts: int, ends: np.ndarray
) -> np.ndarray:
    """A text with facts in it, each asked for once or twice later on.

    Args:
      rng: chooses everything.
      text: tokens.
      encode: text to tokens.
      facts: how many.
      ends: tokens after which something may be inserted.
    """
    inserts: list[tuple[float, list[int]]] = []
    for _ in range(facts):
        fact = {
            "owner": rng.choice(_OWNERS),
            "thing": rng.choice(_THINGS),
            "kind": rng.choice(_KINDS),
            "value": _value(rng),
        }
        told = rng.uniform(0, 0.9)
        inserts.append((told, encode("\n" + str(rng.choice(_TOLD)).format(**fact) + "\n")))
        for _ in range(int(rng.integers(1, 3))):
            inserts.append((rng.uniform(told, 1.0), encode("\n" + str(rng.choice(_ASKED)).format(**fact) + "\n")))
    inserts.sort(key=lambda pair: pair[0])
    places = np.flatnonzero(np.isin(text, ends)) + 1
    places = places if len(places) else np.array([len(text)])
    parts, last = [], 0
    for share, piece in inserts:
        at = max(last, int(places[np.argmin(np.abs(places - share * len(text)))]))
        parts += [text[last:at], np.asarray(piece)]
        last = at
    return np.concatenate([*parts, text[last:]])


def main() -> int:
    p = argparse.ArgumentParser(description="Builds a token set of texts with facts to be found again.")
    p.add_argument("--texts", type=Path, nargs="+", required=True, help="token sets to take the texts from")
    p.add_argument("--out", type=Path, required=True, help="token set to write (.npz or .npz.xz)")
    p.add_argument("--model", default="smollm2-135m", help="known model name or checkpoint, for its tokenizer")
    p.add_argument("--documents", type=int, default=160)
    p.add_argument(
        "--lengths",
        type=int,
        nargs="+",
        default=[3500, 7000, 13000, 21000],
        help="tokens of text per document in turn, before the facts",
    )
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    tokenizer = Tokenizer.from_path(resolve(args.model).path)
    ends = np.array([i for end in ("\n", "\n\n", ".\n") for i in tokenizer.encode(end)[-1:]])
    sets = [tokens.load(path) for path in args.texts]
    if min(args.lengths) < 400 or max(args.lengths) >= min(len(found.tokens) for found in sets):
        p.error(f"--lengths: from 400 to the size of the smallest set, got {args.lengths}")
    rng = np.random.default_rng(args.seed)
    documents = []
    for number in range(args.documents):
        source = sets[number % len(sets)]
        length = args.lengths[number // len(sets) % len(args.lengths)]
        start = int(rng.integers(0, len(source.tokens) - length))
        text = source.tokens[start : start + length]
        facts = int(rng.integers(length // 400, length // 120))
        documents.append(make_document(rng, text, tokenizer.encode, facts, ends))
    built = tokens.from_documents(documents, tokenizer.vocab_size)
    tokens.save(args.out, built)
    print(f"{args.out}: {len(built.tokens)} tokens in {built.documents} documents", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
