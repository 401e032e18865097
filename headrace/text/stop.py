"""Stop strings over a growing text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from headrace.text.patterns import PrefixEnds


class Match(NamedTuple):
    """``text[start:end]`` is the stop string ``value``."""

    start: int
    end: int
    value: str


class StopStrings:
    """Looks for the first of some stop strings to be completed. Not thread-safe.

    The winner is the one completed by the earliest piece of text; among those the one that starts first,
    then the shortest: what generating token by token and looking after each would have found.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = list(dict.fromkeys(strings))
        self._beginnings = PrefixEnds(self._strings)

    def __bool__(self) -> bool:
        return bool(self._strings)

    def find(self, text: str, start: int) -> Match | None:
        """The first stop string that ends after ``text[:start]``; it may begin before."""
        found = None
        for string in self._strings:
            position = text.find(string, max(0, start - len(string) + 1))
            if position >= 0:
                match = Match(position, position + len(string), string)
                if found is None or match[:2] < found[:2]:
                    found = match
        return found

    def held(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string may begin with."""
        return self._beginnings.length(text)


NO_STOPS = StopStrings(())
"""For texts without any: it holds nothing, so all may share it."""
