"""The corpus scripts: readers of package formats, cleaning, checks of downloads, and a smoke build."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import sys
import zlib
from pathlib import Path

import pytest

from ssv_jax.training import tokens
from tests.ssv_jax.tiny import write_checkpoint

FOLDER = Path(__file__).parents[2] / "experiments/corpus"
MODULES = ("fetch", "readers", "build_corpus", "build_prompts", "prompt_templates")


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    """The scripts import each other by their plain names; nothing of that stays behind."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


def read(name: str, data: bytes, path: Path = Path("folder/file")) -> list[tuple[str, str]]:
    import readers

    return list(readers.READERS[name](path, data))


def test_html():
    page = b"""<html><head><title>no</title><style>x{}</style></head><body>
<div class="related"><ul><li>menu</li></ul></div>
<div role="main"><h1>Title<a class="headerlink" href="#t">\xc2\xb6</a></h1><p>One
 two &amp; <b>three</b>.<ul><li>first</li><li>second</ul><pre>a  b
  c</pre></div><div>tail</div></body></html>"""
    text = read("html", page)[0][1]
    for wanted in ("Title", "One two & three.", "- first", "- second", "a  b\n  c"):
        assert wanted in text
    for unwanted in ("menu", "x{}", "\u00b6", "tail", "no"):
        assert unwanted not in text


def test_pod():
    source = "=head1 NAME\n\nB<perl> L<text|page> C<< $x->{y} >> E<lt>\n\n=over 4\n\n=item one\n\n=back\n\n=cut\n"
    text = read("pod", source.encode())[0][1]
    assert "NAME\n\nperl text $x->{y} <" in text
    assert "\none\n" in text and "=" not in text


def r_vector(lines: list[str], version: int) -> bytes:
    head = b"X\n" + struct.pack(">iii", version, 0, 0) + (struct.pack(">i", 5) + b"UTF-8" if version == 3 else b"")
    body = b"".join(struct.pack(">ii", 0x40009, len(s.encode())) + s.encode() for s in lines)
    blob = head + struct.pack(">ii", 16, len(lines)) + body
    return struct.pack(">I", len(blob)) + zlib.compress(blob)


def test_r_lines():
    data = r_vector(["", "A TITLE", "caf\u00e9"], 3) + r_vector(["Other"], 2)
    assert read("r_lines", data) == [("A TITLE", "\nA TITLE\ncaf\u00e9"), ("Other", "Other")]


def test_sword(tmp_path):
    text = b'<title>Psalm</title><verse n="1"/>He said , "yes"<note>hidden</note> .<br/>Next'
    packed = zlib.compress(text)
    (tmp_path / "ot.bzs").write_bytes(struct.pack("<III", 0, 0, 0) + struct.pack("<III", 3, len(packed), len(text)))
    title, found = read("sword", b"???" + packed, tmp_path / "ot.bzz")[0]
    assert title == "ot.1"
    assert 'He said, "yes".' in found and "hidden" not in found and "<" not in found


def test_clean_and_duplicates():
    import build_corpus

    assert build_corpus.clean("a \r\nb\x00\n\n\n\n\n<|im_end|>\n\n") == "a\nb\n\n\n< |im_end|>\n"
    seen = build_corpus.Seen()
    long, short = "word " * 20, "short line"
    assert seen.filter(f"{long}\n\n{short}", code=False).count("word") == 20
    assert seen.filter(f"{long}\n\n{short}", code=False) == short
    licence = "# " + "licence " * 20
    assert licence.strip() in seen.filter(f"{licence}\n\n{long}", code=True)
    again = seen.filter(f"{licence}\n\n{long}", code=True)
    assert "licence" not in again and long.strip() in again


def test_documents_are_joined_and_capped(tmp_path):
    import build_corpus

    for folder in "ab":
        for number in range(6):
            path = tmp_path / f"root/{folder}/{number}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{folder}{number} unique words here\n\n" * 40)
    source = {"set": "train_docs", "reader": "plain", "files": ["*.txt"], "except": ["*/5.txt"], "join_kb": 2}

    def documents(**changes):
        return build_corpus.documents_of(tmp_path / "root", source | changes, build_corpus.Seen())

    joined = documents()
    assert len(joined) == 6
    assert all(len({line[0] for line in text.split()[::4]}) == 1 for text in joined)
    assert not any("a5" in text for text in joined)
    assert documents() == joined
    assert len(documents(cap_mb=0.001)) < len(joined)
    assert len(documents(join_kb=1000, one_document=True)) == 1
    assert {t[0] for t in documents(skip="^a")} == {"b"}
    with pytest.raises(RuntimeError, match="match no text"):
        documents(files=["*.none"])


def test_a_changed_download_is_refused(tmp_path):
    import fetch

    package = {"kind": "deb", "package": "x", "version": "1", "file": "x.deb", "sha256": "0" * 64}
    (tmp_path / "x.deb").write_bytes(b"content")
    with pytest.raises(fetch.FetchError, match="the manifest has 0000"):
        fetch.fetch(package, tmp_path, print)
    package["sha256"] = hashlib.sha256(b"content").hexdigest()
    assert fetch.fetch(package, tmp_path, print) == tmp_path / "x.deb"


def test_manifest():
    import readers

    manifest = json.loads((FOLDER / "manifest.json").read_text())
    for package in [*manifest["packages"], manifest["prompt_package"]]:
        assert package["kind"] in ("deb", "sdist", "wheel")
        assert len(package["sha256"]) == 64
        assert package["licence"] and package["version"] and package["file"]
    for package in manifest["packages"]:
        for source in package["sources"]:
            assert source["reader"] in readers.READERS
            assert source["set"] in {"train_books", "train_docs", "train_code", "heldout_books", "heldout_docs"}
    names = [package["package"] for package in manifest["packages"]]
    assert len(names) == len(set(names))


def test_smoke_build(tmp_path):
    import build_corpus

    checkpoint = tmp_path / "model"
    checkpoint.mkdir()
    write_checkpoint(checkpoint)
    arguments = ["--out", str(tmp_path / "out"), "--smoke", "--model", str(checkpoint)]
    assert build_corpus.main(arguments) == 0
    train, heldout = (tokens.load(tmp_path / f"out/{name}.npz.xz") for name in ("train_docs", "heldout_docs"))
    assert (train.documents, heldout.documents) == (2, 1)
    counts = json.loads((tmp_path / "out/manifest.json").read_text())["sets"]
    assert counts["train_docs"]["tokens"] == len(train.tokens)


def test_absent_model(tmp_path, capsys):
    import build_corpus

    assert build_corpus.main(["--out", str(tmp_path), "--smoke", "--model", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err


def test_templates_give_many_distinct_prompts():
    import prompt_templates

    for category, (template, count) in prompt_templates.TEMPLATES.items():
        rng = random.Random(category)
        made = {template(rng) for _ in range(min(count, 400))}
        assert len(made) > 200, category
        assert all(prompt.strip() == prompt and "{" not in prompt and len(prompt) < 700 for prompt in made), category


@pytest.mark.parametrize(
    ("title", "verb"), [("Writing extension modules", "write"), ("Setting up a server", "set"), ("Load a page", "load")]
)
def test_titles_become_questions(title, verb):
    import build_prompts

    assert f"{verb} {title.split(' ', 1)[1]}" in build_prompts.how_or_explain(title, random.Random(0))
    assert "Memory model" in build_prompts.how_or_explain("Memory model", random.Random(0))


def test_parts_of_documents():
    import build_prompts

    text = (
        "Chapter of things\n=================\n\n" + "A sentence with some words in it. " * 10 + "\n\n"
        'def scale(x, factor=2):\n    """Multiplies every value of x by a factor and returns it.\n    """\n'
    )
    assert list(build_prompts.titles([text])) == ["Chapter of things"]
    assert len(list(build_prompts.paragraphs([text]))) == 1
    assert list(build_prompts.functions([text])) == [
        {
            "name": "scale",
            "arguments": "x, factor=2",
            "what": "Multiplies every value of x by a factor and returns it.",
        }
    ]


def test_evaluation_prompts():
    lines = [json.loads(line) for line in (FOLDER.parent / "prompts/chat.jsonl").read_text().splitlines()]
    assert len(lines) == 40 == len({line["turns"][0] for line in lines})
    categories = [line["category"] for line in lines]
    assert {categories.count(category) for category in categories} == {5}
    assert all(set(line) == {"question_id", "category", "turns"} for line in lines)
