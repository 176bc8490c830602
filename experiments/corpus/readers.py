"""Text out of the file formats that the packages hold. A reader takes bytes and yields documents of (title, text)."""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

Documents = Iterator[tuple[str, str]]

_BLOCKS = frozenset(
    "p div section article li ul ol dl dt dd tr table h1 h2 h3 h4 h5 h6 pre blockquote br hr figure".split()
)
_SKIPPED = frozenset("script style nav header footer head form button svg select aside".split())
_SKIPPED_CLASSES = frozenset(
    "headerlink sphinxsidebar related navheader navfooter navigation nav-chapters menu-bar toc sidebar linenos".split()
)


class _Text(HTMLParser):
    """Collects the text of a page's main part, `pre` kept as it is."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skip: tuple[str, int] | None = None  # the element being skipped and how deep it is nested in itself
        self._main: tuple[str, int] | None = None
        self._ended = False
        self._pre = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skip:
            if tag == self._skip[0]:
                self._skip = (tag, self._skip[1] + 1)
            return
        named = dict(attrs)
        classes = set((named.get("class") or "").split())
        if tag in _SKIPPED or classes & _SKIPPED_CLASSES:
            self._skip = (tag, 1)
            return
        if self._main is None and (tag == "main" or named.get("role") == "main" or named.get("id") == "page-content"):
            self.parts.clear()
            self._main = (tag, 1)
        elif self._main and tag == self._main[0]:
            self._main = (tag, self._main[1] + 1)
        if tag == "pre":
            self._pre += 1
        self._break(tag)
        if tag == "li":
            self.parts.append("- ")
        elif tag in ("td", "th"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if self._skip:
            if tag == self._skip[0]:
                depth = self._skip[1] - 1
                self._skip = (tag, depth) if depth else None
            return
        if tag == "pre" and self._pre:
            self._pre -= 1
        if tag != "li":
            self._break(tag)
        if self._main and not self._ended and tag == self._main[0]:
            self._main = (tag, self._main[1] - 1)
            self._ended = self._main[1] == 0

    def _break(self, tag: str) -> None:
        if tag in _BLOCKS:
            self.parts.append("\n" if tag in ("br", "li", "tr", "dt", "dd") else "\n\n")

    def handle_data(self, data: str) -> None:
        if self._skip or self._ended:
            return
        self.parts.append(data if self._pre else re.sub(r"\s+", " ", data))


def html(path: Path, data: bytes) -> Documents:
    parser = _Text()
    parser.feed(data.decode("utf-8", "replace"))
    parser.close()
    text = re.sub(r"\n[ \t]+(?=\n)", "\n", "".join(parser.parts).replace("\u00b6", ""))
    yield path.name, re.sub(r"(?m)^ (?=\S)", "", text)


def plain(path: Path, data: bytes) -> Documents:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    yield text.strip().split("\n", 1)[0][:80], text


def pod(path: Path, data: bytes) -> Documents:
    """Perl's documentation format without its markup."""
    text = data.decode("utf-8", "replace")
    text = re.sub(r"(?ms)^=begin .*?^=end[^\n]*$", "", text)
    text = re.sub(r"(?m)^=(?:over|back|cut|encoding|for|pod)\b.*$", "", text)
    text = re.sub(r"(?m)^=(?:head\d|item)\s*", "", text)
    text = re.sub(r"[A-Z]<<+ (.*?) >>+", r"\1", text, flags=re.S)
    text = re.sub(r"L<(?:([^<>|]*)\|)?([^<>]*)>", lambda m: m[1] or m[2], text)
    text = re.sub(r"E<(lt|gt|sol|verbar)>", lambda m: {"lt": "<", "gt": ">", "sol": "/", "verbar": "|"}[m[1]], text)
    for _ in range(3):
        text = re.sub(r"\b[BCFISXZ]<([^<>]*)>", r"\1", text)
    yield path.name, text


def r_lines(path: Path, data: bytes) -> Documents:
    """The character vectors of an R lazy-load database: blobs of a big-endian length and a zlib stream."""
    position = 0
    while position < len(data):
        stream = zlib.decompressobj()
        blob = stream.decompress(data[position + 4 :])
        position = len(data) - len(stream.unused_data)
        lines = _r_strings(blob)
        if lines:
            yield next(line for line in lines if line.strip()), "\n".join(lines)


def _r_strings(blob: bytes) -> list[str]:
    """A serialised character vector (XDR form, versions 2 and 3), or nothing if the object is another one."""
    if blob[:2] != b"X\n":
        return []
    version = struct.unpack(">i", blob[2:6])[0]
    position = 14
    if version >= 3:
        position += 4 + struct.unpack(">i", blob[14:18])[0]
    kind, count = struct.unpack(">ii", blob[position : position + 8])
    position += 8
    if kind & 255 != 16:
        return []
    lines = []
    for _ in range(count):
        size = struct.unpack(">i", blob[position + 4 : position + 8])[0]
        position += 8
        lines.append(blob[position : position + max(size, 0)].decode("utf-8", "replace"))
        position += max(size, 0)
    return lines


def sword(path: Path, data: bytes) -> Documents:
    """A compressed SWORD module: `.czz`/`.bzz` holds zlib streams that the `s` file beside it locates."""
    index = path.with_name(path.name[:-1] + "s").read_bytes()
    for number, (offset, size, _) in enumerate(struct.iter_unpack("<III", index)):
        if not size:
            continue
        text = zlib.decompress(data[offset : offset + size]).decode("utf-8", "replace")
        text = re.sub(r"<note.*?</note>", "", text, flags=re.S)
        text = re.sub(r"<(?:/?title|/?p|br|lb|/l|/lg|chapter|div)\b[^>]*>", "\n\n", text)
        text = re.sub(r"<[^>]*>", " ", text)
        text = re.sub(r"\s+([,.;:!?\u201d\u2019)])", r"\1", re.sub(r"[ \t]+", " ", text))
        text = re.sub(r"\n *", "\n", re.sub(r" +\n", "\n", text))
        yield f"{path.stem}.{number}", text


READERS = {"html": html, "plain": plain, "pod": pod, "r_lines": r_lines, "sword": sword}
