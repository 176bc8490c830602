"""Builds the training and held-out token sets from Debian and PyPI packages, see README.md beside this file.

python experiments/corpus/build_corpus.py --out .corpus            # needs the network; Debian 12 with apt-get and pip
python experiments/corpus/build_corpus.py --out DIR --smoke        # a tiny built-in text, no network
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fetch import FetchError, fetch, unpack
from readers import READERS

from ssv_jax.registry import resolve
from ssv_jax.tokenizer import Tokenizer
from ssv_jax.training import tokens

MANIFEST = Path(__file__).with_name("manifest.json")
SEED = 20250728
_LEAST_CHARS = 400
_DUPLICATE_CHARS = 60


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def clean(text: str) -> str:
    """Uniform line ends, no trailing blanks, at most two empty lines, and nothing that reads as a special token."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x0c", "\n").replace("<|", "< |")
    text = re.sub(r"[\x00-\x08\x0b-\x1f]", "", text)
    text = re.sub(r"[ \t]+(?=\n|$)", "", text)
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


class Seen:
    """Drops paragraphs that came before, anywhere."""

    def __init__(self) -> None:
        self._hashes: set[bytes] = set()

    def filter(self, text: str, code: bool) -> str:
        """The text without paragraphs seen before; of code, only repeated comments go (they are licence headers)."""
        kept = []
        for paragraph in re.split(r"\n{2,}", text):
            plain = " ".join(paragraph.split())
            if len(plain) >= _DUPLICATE_CHARS and (not code or plain.startswith(("#", "//", "/*"))):
                digest = hashlib.blake2b(plain.encode(), digest_size=12).digest()
                if digest in self._hashes:
                    continue
                self._hashes.add(digest)
            kept.append(paragraph)
        return "\n\n".join(kept)


def read_source(root: Path, source: dict[str, Any]) -> Iterator[tuple[Path, str]]:
    """Texts of the files that a source names, in sorted order: path inside the package and text."""
    skip, only = source.get("skip"), source.get("only")
    reader = READERS[source["reader"]]
    for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
        inside = path.relative_to(root)
        if not any(fnmatch.fnmatch(str(inside), glob) for glob in source["files"]):
            continue
        if any(fnmatch.fnmatch(str(inside), glob) for glob in source.get("except", ())):
            continue
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
        for title, text in reader(path, data):
            if (skip and re.search(skip, title)) or (only and not re.search(only, title)):
                continue
            yield inside, text


def documents_of(root: Path, source: dict[str, Any], seen: Seen) -> list[str]:
    """Documents of a source: files of one directory joined up to `join_kb`, a seeded choice of them up to `cap_mb`."""
    code = source["set"].endswith("code")
    joined: list[str] = []
    group: list[str] = []
    size, folder = 0, None
    limit = source.get("join_kb", 0) * 1000
    for inside, text in read_source(root, source):
        text = clean(text)
        if len(text) < _LEAST_CHARS:
            continue
        apart = inside.parent != folder and not source.get("one_document")
        if group and (apart or size + len(text) > limit):
            joined.append("\n\n".join(group))
            group, size = [], 0
        group.append(text)
        size, folder = size + len(text), inside.parent
    if group:
        joined.append("\n\n".join(group))
    random.Random(f"{SEED} {source['set']} {root.name}").shuffle(joined)
    cap = source.get("cap_mb", float("inf")) * 1e6
    kept, total = [], 0
    for text in joined:
        if total >= cap:
            break
        text = seen.filter(text, code)
        if len(text) >= _LEAST_CHARS:
            kept.append(text)
            total += len(text)
    if not kept:
        raise FetchError(f"{root.name}: the manifest's {source['files']} match no text; fix manifest.json")
    return kept


def smoke_documents() -> dict[str, list[tuple[str, str]]]:
    line = "The {} engine reads block {} of the context, keeps what it needs and moves on. "
    texts = ["".join(line.format(word, i) for i in range(40)) for word in ("first", "second", "third")]
    return {"train_docs": [("smoke", text) for text in texts[:2]], "heldout_docs": [("smoke", texts[2])]}


def collect(packages: Path, scratch: Path) -> tuple[dict[str, list[tuple[str, str]]], list[dict[str, Any]]]:
    """All texts by set, each with its package, and what each source gave."""
    manifest = json.loads(MANIFEST.read_text())
    listed = [(package, source) for package in manifest["packages"] for source in package["sources"]]
    for package in manifest["packages"]:
        globs = [glob for source in package["sources"] for glob in (*source["files"], *source.get("beside", ()))]
        unpack(package["kind"], fetch(package, packages, say), scratch / package["package"], globs)
    seen = Seen()
    texts: dict[str, list[tuple[str, str]]] = {}
    report = []
    # Held-out works first, so that no paragraph of theirs is left in the training sets.
    for package, source in sorted(listed, key=lambda pair: not pair[1]["set"].startswith("heldout")):
        found = documents_of(scratch / package["package"], source, seen)
        texts.setdefault(source["set"], []).extend((package["package"], text) for text in found)
        chars = sum(map(len, found))
        say(f"{package['package']}: {chars / 1e6:.2f} MB in {len(found)} documents -> {source['set']}")
        report.append({"package": package["package"], "set": source["set"], "documents": len(found), "chars": chars})
    return texts, report


def write_sets(out: Path, texts: dict[str, list[tuple[str, str]]], tokenizer: Tokenizer) -> dict[str, Any]:
    """Tokenises each set and writes it."""
    counts: dict[str, Any] = {}
    total = sum(len(text) for entries in texts.values() for _, text in entries)
    done, began, reported = 0, time.monotonic(), time.monotonic()
    for name, entries in sorted(texts.items()):
        documents, by_package = [], dict.fromkeys([package for package, _ in entries], 0)
        for package, text in entries:
            documents.append(tokenizer.encode(text, add_bos=tokenizer.adds_bos))
            by_package[package] += len(documents[-1])
            done += len(text)
            now = time.monotonic()
            if now - reported > 5:
                left = (now - began) * (total - done) / done
                say(f"tokenised {done / 1e6:.1f} of {total / 1e6:.1f} MB, {left:.0f} s left")
                reported = now
        token_set = tokens.from_documents(documents, tokenizer.vocab_size)
        path = out / f"{name}.npz.xz"
        tokens.save(path, token_set)
        lengths = sorted(len(d) for d in documents)
        counts[name] = {
            "tokens": len(token_set.tokens),
            "documents": token_set.documents,
            "shortest": lengths[0],
            "median": lengths[len(lengths) // 2],
            "longest": lengths[-1],
            "bytes": path.stat().st_size,
            "tokens_by_package": by_package,
        }
        say(f"{name}: {len(token_set.tokens)} tokens in {token_set.documents} documents, {path.stat().st_size} bytes")
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds token sets for training and held-out evaluation.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the token sets")
    parser.add_argument("--model", default="smollm2-135m", help="known model name or checkpoint, for its tokenizer")
    parser.add_argument("--packages", type=Path, help="folder that keeps the downloads (default: OUT/packages)")
    parser.add_argument("--smoke", action="store_true", help="a tiny built-in text instead of the packages")
    options = parser.parse_args(arguments)
    try:
        tokenizer = Tokenizer.from_path(resolve(options.model).path)
        options.out.mkdir(parents=True, exist_ok=True)
        if options.smoke:
            texts, report = smoke_documents(), []
        else:
            with tempfile.TemporaryDirectory(prefix="corpus-") as scratch:
                texts, report = collect(options.packages or options.out / "packages", Path(scratch))
        counts = write_sets(options.out, texts, tokenizer)
        content = {"model": options.model, "sets": counts, "sources": report}
        (options.out / "manifest.json").write_text(json.dumps(content, indent=1) + "\n")
    except (FetchError, ValueError, OSError) as error:
        say(f"error: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
