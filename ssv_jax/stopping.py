"""Stop strings: text that may still turn into one is held back, and nothing after one is shown."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Tokenizer


class StopScanner:
    """Turns emitted tokens into final text.

    Args:
      tokenizer: None gives no text.
      stop: strings that end the text; the earliest match wins.
    """

    def __init__(self, tokenizer: Tokenizer | None, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream() if tokenizer else None
        self._stop = tuple(stop)
        self._pending = ""
        self.text = ""
        self.stopped = False
        self.tokens_used = 0

    def push(self, tokens: Sequence[int]) -> str:
        """Text that has become final. After a stop string, `tokens_used` counts the tokens up to it."""
        if self._decoder is None:
            self.tokens_used += len(tokens)
            return ""
        out = ""
        for token in tokens:
            if self.stopped:
                break
            self.tokens_used += 1
            out += self._release(self._decoder.push([token]))
        return out

    def flush(self) -> str:
        """The rest of the text, at the end of the stream."""
        if self._decoder is None or self.stopped:
            return ""
        out = self._release(self._decoder.flush())
        if not self.stopped:
            out += self._pending
            self.text += self._pending
            self._pending = ""
        return out

    def _release(self, new: str) -> str:
        self._pending += new
        found = [at for at in (self._pending.find(text) for text in self._stop) if at >= 0]
        if found:
            self.stopped = True
            keep = min(found)
        else:
            keep = len(self._pending) - self._possible_start()
        out = self._pending[:keep]
        self.text += out
        self._pending = "" if self.stopped else self._pending[keep:]
        return out

    def _possible_start(self) -> int:
        """Characters at the end that could be the beginning of a stop string."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for size in range(min(longest, len(self._pending)), 0, -1):
            if any(text.startswith(self._pending[-size:]) for text in self._stop):
                return size
        return 0
