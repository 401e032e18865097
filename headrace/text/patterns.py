"""Regular expressions over many literal strings: leftmost match, and the longest of those."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from typing import Any

WHITESPACE = (
    "\t\n\x0b\x0c\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode's White_Space characters; ``str.isspace`` also counts U+001C to U+001F, which tokenizers do not."""

_END = ""


def literal_pattern(literals: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern with one group that matches any of ``literals``, or None when there are none.

    Built as a trie, so the cost at a position does not grow with the number of literals.
    """
    trie: dict[str, Any] = {}
    for literal in literals:
        node = trie
        for character in literal:
            node = node.setdefault(character, {})
        node[_END] = {}
    return re.compile("(" + _source(trie) + ")") if trie else None


def _source(node: dict[str, Any]) -> str:
    branches = []
    for character, child in node.items():
        if character == _END:
            continue
        text = re.escape(character)
        while len(child) == 1 and _END not in child:
            (character, child), *_ = child.items()
            text += re.escape(character)
        branches.append(text + _source(child))
    if not branches:
        return ""
    if len(branches) == 1 and _END not in node:
        return branches[0]
    return f"(?:{'|'.join(branches)}){'?' if _END in node else ''}"


class PrefixEnds:
    """Finds strings that end with a beginning of one of some literals; keeps nothing but the literals."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._sorted = sorted(literal for literal in set(literals) if len(literal) > 1)
        self._firsts = frozenset(literal[0] for literal in self._sorted)
        self._longest = max(map(len, self._sorted), default=1) - 1

    def length(self, text: str) -> int:
        """Length of the longest end of ``text`` that is a proper prefix of a literal; 0: none."""
        tail = text[-self._longest :] if self._longest else ""
        if self._firsts.isdisjoint(tail):
            return 0
        for start, character in enumerate(tail):
            if character in self._firsts and self._begins(tail[start:]):
                return len(tail) - start
        return 0

    def _begins(self, end: str) -> bool:
        """Whether a literal is longer than ``end`` and begins with it: such follow it in sorted order."""
        index = bisect_right(self._sorted, end)
        return index < len(self._sorted) and self._sorted[index].startswith(end)
