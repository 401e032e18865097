"""What this process believes to be on disk: every block's size and last use, and what to tell the router.

Other processes write and remove too, so a belief can be wrong: then a read is a miss. Look-ups take no lock
(a dict's own are atomic); whatever changes takes one, briefly. The order of last use is a heap whose items
may be out of date: an item that is older than its entry goes back in when it comes up.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.messages import BlocksRemoved, BlocksStored, CacheEvent
from headrace.kvcache.disk_folder import ROOT_BYTES, FoundBlock

EVENT_IDS = 4096  # handed out at once: a scan of a large folder becomes many messages, not a giant one


@dataclass(slots=True)
class _Entry:
    num_bytes: int
    used: float
    scan: int  # number of the last scan that saw it, or that ran when it was added
    announced: bool


class DiskIndex:
    """Keys are a root's first bytes and an identity; events and counts are of ``root`` only."""

    def __init__(self, root: bytes) -> None:
        self._own = root[:ROOT_BYTES]
        self._lock = threading.Lock()
        self._entries: dict[bytes, _Entry] = {}
        self._heap: list[tuple[float, bytes]] = []
        self._scan = 0
        self._events: deque[tuple[bool, bytes]] = deque()  # (stored or removed, identity)
        self.num_blocks = 0
        self.num_bytes = 0

    def __contains__(self, key: bytes) -> bool:
        return key in self._entries

    def add(self, found: FoundBlock, *, announce: bool) -> None:
        """A block that is on disk; known ones become newer, never older."""
        with self._lock:
            self._add(found, announce)

    def touch(self, key: bytes, used: float) -> None:
        """A block was used; unknown ones are ignored."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.used = max(entry.used, used)

    def discard(self, key: bytes) -> None:
        """A block is not on disk any more."""
        with self._lock:
            self._discard(key)

    def pop_oldest(self) -> tuple[bytes, float] | None:
        """The block used longest ago, and when. It is to be discarded, or put back with ``keep``."""
        with self._lock:
            while self._heap:
                used, key = heapq.heappop(self._heap)
                entry = self._entries.get(key)
                if entry is None:
                    continue
                if entry.used > used:
                    heapq.heappush(self._heap, (entry.used, key))
                    continue
                return key, used
        return None

    def keep(self, key: bytes, used: float) -> None:
        """Puts back what ``pop_oldest`` gave: another process used it at ``used``."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.used = max(entry.used, used)
                heapq.heappush(self._heap, (entry.used, key))

    def begin_scan(self) -> None:
        """What is added from now on counts as seen by the scan."""
        with self._lock:
            self._scan += 1

    def see(self, blocks: Iterable[FoundBlock]) -> None:
        """The scan found these."""
        with self._lock:
            for found in blocks:
                self._add(found, announce=True)

    def end_scan(self) -> None:
        """Forgets what was there before and the scan has not seen."""
        with self._lock:
            for key in [key for key, entry in self._entries.items() if entry.scan < self._scan]:
                self._discard(key)

    def take_events(self) -> list[CacheEvent]:
        """The next events, of at most EVENT_IDS blocks in all; empty when there are none."""
        events: list[CacheEvent] = []
        with self._lock:
            for _ in range(min(len(self._events), EVENT_IDS)):
                stored, block_id = self._events.popleft()
                last = events[-1] if events else None
                if stored:
                    if isinstance(last, BlocksStored):
                        last.block_ids.append(block_id)
                    else:
                        events.append(BlocksStored([block_id], parent=b"", tier="disk"))
                elif isinstance(last, BlocksRemoved):
                    last.block_ids.append(block_id)
                else:
                    events.append(BlocksRemoved([block_id], tier="disk"))
        return events

    def snapshot(self) -> list[BlocksStored]:
        """All blocks of the root, as the events up to now would tell them."""
        with self._lock:
            own = [key[ROOT_BYTES:] for key in self._entries if key.startswith(self._own)]
        return [
            BlocksStored(own[i : i + EVENT_IDS], parent=b"", tier="disk")
            for i in range(0, len(own), EVENT_IDS)
        ]

    def _add(self, found: FoundBlock, announce: bool) -> None:
        key = found.key
        entry = self._entries.get(key)
        own = key.startswith(self._own)
        if entry is None:
            entry = self._entries[key] = _Entry(found.num_bytes, found.used, self._scan, announced=False)
            heapq.heappush(self._heap, (found.used, key))
            if own:
                self.num_blocks += 1
                self.num_bytes += found.num_bytes
        else:
            entry.used = max(entry.used, found.used)
            entry.scan = self._scan
        if announce and own and not entry.announced:
            entry.announced = True
            self._events.append((True, key[ROOT_BYTES:]))

    def _discard(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is None or not key.startswith(self._own):
            return
        self.num_blocks -= 1
        self.num_bytes -= entry.num_bytes
        if entry.announced:
            self._events.append((False, key[ROOT_BYTES:]))
