"""Requests that found no room, in the order in which they will be placed.

    one line per (model, text only)     a full fleet of one model does not hold up another
        rescues → priority → standard → flex → batch, first come first served within each

A rescue goes on with what has begun, so it goes first, and is not refused when the router's ``max_queue``
is reached, which bounds all others over all lines.
"""

from __future__ import annotations

from collections.abc import Iterator

from headrace.core.routing import Route

TIERS = ("priority", "standard", "flex", "batch")
_RANKS = {name: rank for rank, name in enumerate(TIERS, start=1)}
_STANDARD = _RANKS["standard"]

LineKey = tuple[str, bool]


class Waiter:
    """One request and when it began to wait (monotonic)."""

    __slots__ = ("key", "rank", "route", "since")

    def __init__(self, route: Route, since: float) -> None:
        self.route = route
        self.since = since
        self.key: LineKey = (route.model, route.text_only)
        self.rank = _rank(route)


class Waiting:
    """All lines. Truthy while anybody waits."""

    def __init__(self) -> None:
        self._by_id: dict[str, Waiter] = {}
        self._lines: dict[LineKey, tuple[dict[str, Waiter], ...]] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Waiter]:
        return iter(self._by_id.values())

    def add(self, waiter: Waiter) -> None:
        request_id = waiter.route.request_id
        assert request_id not in self._by_id, f"{request_id} waits already"
        self._by_id[request_id] = waiter
        line = self._lines.get(waiter.key)
        if line is None:
            line = self._lines[waiter.key] = tuple({} for _ in range(1 + len(TIERS)))
        line[waiter.rank][request_id] = waiter

    def remove(self, request_id: str) -> Waiter | None:
        waiter = self._by_id.pop(request_id, None)
        if waiter is not None:
            line = self._lines[waiter.key]
            del line[waiter.rank][request_id]
            if not any(line):
                del self._lines[waiter.key]
        return waiter

    def is_ahead(self, route: Route) -> bool:
        """Whether somebody waits whom this request may not overtake."""
        line = self._lines.get((route.model, route.text_only))
        return line is not None and any(line[: _rank(route) + 1])

    def line_keys(self) -> list[LineKey]:
        return list(self._lines)

    def line(self, key: LineKey) -> list[Waiter]:
        """One line, next first."""
        return [waiter for tier in self._lines.get(key, ()) for waiter in tier.values()]


def _rank(route: Route) -> int:
    return 0 if route.attempt else _RANKS.get(route.tier, _STANDARD)
