"""Stop strings are found wherever token boundaries fall, and nothing of them is shown."""

from __future__ import annotations

import pytest

from ssv_jax.stopping import StopScanner
from tests.ssv_jax.tiny import write_checkpoint


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from ssv_jax.tokenizer import Tokenizer

    return Tokenizer.from_directory(write_checkpoint(tmp_path_factory.mktemp("tok") / "m"))


@pytest.mark.parametrize("stop", [("ab",), ("b",), ("abab!",), ("zz", "bab"), ("never",), (), ("é",)])
@pytest.mark.parametrize("size", [1, 2, 3, 50])
def test_any_split_gives_the_same_text(tokenizer, stop, size):
    """A stop string across two pushes is missed, or the start of one leaks out."""
    text = "xababab! é zz and more"
    ids = tokenizer.encode(text)
    scanner = StopScanner(tokenizer, stop)
    shown = "".join(scanner.push(ids[at : at + size]) for at in range(0, len(ids), size)) + scanner.flush()
    ends = [text.find(one) for one in stop if one in text]
    want = text[: min(ends)] if ends else text
    assert shown == want == scanner.text
    assert scanner.stopped == bool(ends)


def test_tokens_up_to_the_stop_are_counted(tokenizer):
    """Tokens that run past the returned text."""
    scanner = StopScanner(tokenizer, ("cd",))
    scanner.push(tokenizer.encode("abcdef"))
    assert scanner.tokens_used == 4
