"""Gaps of streams inside a window of time: what other callers felt while something else went on."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def gaps_between(times: Sequence[float]) -> list[float]:
    """Every gap between consecutive arrivals of one stream."""
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def gaps_within(times: Sequence[float], start: float, end: float) -> list[float]:
    """The gaps of one stream that overlap [start, end], each counted whole back to its beginning but cut at
    ``end``: what comes after is not the window's doing.

        start         end
    ──┬───│──┬────┬────│────┬──►      three gaps: whole, whole, cut
    """
    found = []
    for earlier, later in zip(times, [*times[1:], float("inf")], strict=True):
        if later > start and earlier < end:
            found.append(min(later, end) - earlier)
    return found


def longest_after(times: Sequence[float], moment: float) -> float:
    """The longest gap of one stream that ends after ``moment``; 0 if none does."""
    return max((b - a for a, b in itertools.pairwise(times) if b > moment), default=0.0)
