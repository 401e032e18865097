"""One replica's numbered cache events, put into the index in order: nothing twice, nothing missing.

What it tells of its memory is put into its slot of the prefix index, what of its disk into the folder.

first_seq ≤ next_seq    what is new of them is applied
first_seq > next_seq    a gap: the index stays as it is until a replay or a snapshot heals it
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.messages import BlocksRemoved, BlocksStored, CacheEvent, CacheSnapshot
from headrace.router.disk_index import DiskFolder
from headrace.router.prefix_index import PrefixIndex, keys_of

HEAL_S = 5.0  # how long the answer to a Subscribe may take before the gap is told again


class CacheFeed:
    """Feeds ``slot`` of ``index``, and ``folder`` while it has a disk tier. ``next_seq`` is the number of the
    next event that it waits for."""

    __slots__ = ("_healing_until", "_index", "_slot", "folder", "next_seq", "num_resets")

    def __init__(self, index: PrefixIndex, slot: int) -> None:
        self._index = index
        self._slot = slot
        self.folder: DiskFolder | None = None
        self.next_seq = 0
        self.num_resets = 0  # times that what was known became void
        self._healing_until = 0.0

    def on_events(self, first_seq: int, events: Sequence[CacheEvent], now: float) -> int | None:
        """None, or the number to subscribe from again, because events before ``first_seq`` are missing.

        A gap is told once, then not again before HEAL_S have passed.
        """
        expected = self.next_seq
        if first_seq > expected:
            if now < self._healing_until:
                return None
            self._healing_until = now + HEAL_S
            return expected
        index, slot = self._index, self._slot
        for event in events[expected - first_seq :]:
            if type(event) is BlocksStored:
                self._store(event)
            elif type(event) is BlocksRemoved:
                keys = keys_of(b"".join(event.block_ids))
                if event.tier == "memory":
                    index.remove(slot, keys)
                elif self.folder is not None:
                    self.folder.remove(keys)
            else:
                index.clear(slot)
                self.num_resets += 1
        self.next_seq = max(expected, first_seq + len(events))
        self._healing_until = 0.0
        return None

    def on_snapshot(self, snapshot: CacheSnapshot) -> None:
        """Replaces all that was known. Of a folder that others use as well, they may know more."""
        self._void()
        if self.folder is not None and self.folder.num_members == 1:
            self.folder.clear()
        for stored in snapshot.stored:
            self._store(stored)
        self.next_seq = snapshot.next_seq
        self._healing_until = 0.0

    def restart(self) -> None:
        """Another process counts from 0, with an empty cache."""
        self._void()
        self.next_seq = 0
        self._healing_until = 0.0

    def _store(self, event: BlocksStored) -> None:
        keys = keys_of(b"".join(event.block_ids))
        if event.tier == "memory":
            self._index.store(self._slot, keys)
        elif self.folder is not None:
            self.folder.store(keys)

    def _void(self) -> None:
        if self._index.count(self._slot):
            self.num_resets += 1
            self._index.clear(self._slot)
