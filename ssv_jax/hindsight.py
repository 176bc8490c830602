"""What prompt lookup would have had accepted in a text that another strategy wrote.

Imports no jax. A drafter without a network needs no trial: its drafts follow from the text alone, and the text, whoever
drafted it, is the target's. So every token that a run emits tells how prompt lookup would have fared.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .strategy import LookupShape

MOST_MATCHES = 256  # the latest ones that a round looks at: more would cost milliseconds in texts that repeat one word


class Hindsight:
    """Plays prompt lookup over a growing text: round after round, each from where the one before ended.

    Args:
      shape: of its drafts, which are those of `drafting.ngram.NgramDrafter`.
      known: the text so far, at least one token; the first round drafts what follows the last one.
    """

    def __init__(self, shape: LookupShape, known: Iterable[int]) -> None:
        self._shape = shape
        self._text = list(known)
        self._start = len(self._text)  # tokens known to the next round
        # The last place of each run of `min_ngram` tokens, and for each place the one before it with the same run.
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []

    def add(self, tokens: Iterable[int]) -> list[int]:
        """More of the text.

        Returns:
          Drafts accepted in each round that the text now covers; a round that would reach past its end waits.
        """
        self._text += tokens
        accepted: list[int] = []
        while (count := self._round()) is not None:
            accepted.append(count)
            self._start += count + 1
        return accepted

    def pass_over(self, tokens: Iterable[int]) -> None:
        """More of the text, that nothing is to be learnt from; the next round starts after it."""
        self._text += tokens
        self._start = len(self._text)

    def _round(self) -> int | None:
        """Drafts that the next round would have had accepted; None if the text ends too early to tell."""
        text, start = self._text, self._start
        if start >= len(text):
            return None
        for draft in self._drafts(start):
            if text[start] != draft[0]:
                continue
            for count, token in enumerate(draft):
                if start + count >= len(text):
                    return None
                if text[start + count] != token:
                    return count
            return len(draft) if start + len(draft) < len(text) else None
        return 0

    def _index(self, places: int) -> None:
        """Makes the first places known as ends of matches."""
        text, size, latest, earlier = self._text, self._shape.min_ngram, self._latest, self._earlier
        earlier += [-1] * (min(places, size - 1) - len(earlier))  # too early for a whole run
        first = len(earlier) - size + 1
        if places <= len(earlier):
            return
        runs = zip(*(text[first + at : places - size + 1 + at] for at in range(size)), strict=True)
        for place, run in enumerate(runs, len(earlier)):
            earlier.append(latest.get(run, -1))
            latest[run] = place

    def _drafts(self, known: int) -> list[Sequence[int]]:
        """Branches of the tree that is drafted after `known` tokens; their first tokens differ."""
        shape, text, end = self._shape, self._text, known - 1
        self._index(end)
        place = self._latest.get(tuple(text[max(known - shape.min_ngram, 0) : known]), -1)
        best: dict[int, tuple[int, int]] = {}  # by the token that followed: length of the match, and its place
        full = 0
        for _ in range(MOST_MATCHES):
            if place < 0 or full == shape.branches:
                break
            length = shape.min_ngram
            while length < min(shape.max_ngram, place + 1) and text[place - length] == text[end - length]:
                length += 1
            follower = text[place + 1]
            if best.get(follower, (0, 0)) < (length, 0):
                best[follower] = length, place
                full += length == shape.max_ngram
            place = self._earlier[place]
        room = shape.num_nodes - 1
        drafts: list[Sequence[int]] = []
        for _, at in sorted(best.values(), reverse=True)[: shape.branches]:
            count = min(shape.depth, room)
            if count > 0:
                drafts.append([text[at + 1 + step % (end - at)] for step in range(count)])
                room -= count
        return drafts
