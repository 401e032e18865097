"""The latest cache events, kept so that whoever missed some can be told again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from headrace.core.messages import BlocksRemoved, BlocksStored, CacheEvent

MAX_EVENTS = 4096
MAX_IDS = 200_000


class EventLog:
    """A ring of numbered events, bounded by their number and by the identities in them."""

    def __init__(self, max_events: int = MAX_EVENTS, max_ids: int = MAX_IDS) -> None:
        self.next_seq = 0
        self._max_events = max_events
        self._max_ids = max_ids
        self._events: deque[CacheEvent] = deque()
        self._num_ids = 0

    def append(self, first_seq: int, events: Sequence[CacheEvent]) -> None:
        """Adds what follows the events so far, and drops the oldest beyond the bounds."""
        assert first_seq == self.next_seq, (first_seq, self.next_seq)
        self.next_seq += len(events)
        self._events.extend(events)
        self._num_ids += sum(map(_count_ids, events))
        while len(self._events) > self._max_events or self._num_ids > self._max_ids:
            self._num_ids -= _count_ids(self._events.popleft())

    def since(self, seq: int) -> list[CacheEvent] | None:
        """The events from number ``seq`` on; None if they are not kept, or have not happened."""
        count = self.next_seq - seq
        if not 0 <= count <= len(self._events):
            return None
        return [self._events[i] for i in range(-count, 0)]


def _count_ids(event: CacheEvent) -> int:
    return len(event.block_ids) if isinstance(event, BlocksStored | BlocksRemoved) else 0
