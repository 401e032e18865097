"""What the router remembers of recent requests: who served a session, which prefixes many want."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

MAX_SESSIONS = 65_536
MAX_PREFIXES = 65_536
HALF_LIFE_S = 60.0


class Sessions:
    """The replica that served each session last; the longest unused are forgotten."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._homes: dict[tuple[str, str], str] = {}

    def __len__(self) -> int:
        return len(self._homes)

    def get(self, model: str, session: str) -> str | None:
        return self._homes.get((model, session))

    def set(self, model: str, session: str, replica_id: str) -> None:
        key = (model, session)
        self._homes.pop(key, None)  # to the end: used now
        self._homes[key] = replica_id
        if len(self._homes) > self._limit:
            _halve(self._homes)


class Popularity:
    """How many recent requests ended their longest match at a block, by its key."""

    def __init__(self, limit: int = MAX_PREFIXES) -> None:
        self._limit = limit
        self._users: dict[int, tuple[float, float]] = {}  # key → (count, when)

    def __len__(self) -> int:
        return len(self._users)

    def touch(self, key: int, now: float) -> float:
        """Counts one more; returns how many others there were lately, fading with HALF_LIFE_S."""
        known = self._users.pop(key, None)
        others = known[0] * 0.5 ** ((now - known[1]) / HALF_LIFE_S) if known is not None else 0.0
        self._users[key] = (others + 1.0, now)
        if len(self._users) > self._limit:
            _halve(self._users)
        return others


def _halve(entries: dict[K, V]) -> None:
    """Drops the older half: rarely, so that it costs nothing each time."""
    for key in list(entries)[: len(entries) // 2]:
        del entries[key]
