"""Copies cached blocks to the disk tier before they are evicted, so that an eviction costs nothing.

    cached, free, oldest first │ written │ written │ next │ …                    between steps, bounded
    while something runs:      only once eviction is near, and little a step
    while nothing runs:        until all is on disk, so that a restart finds it

A block that is evicted before its turn is lost, as it would be without a tier.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.kvcache.block_pool import BlockPool

# Copied out in one step while others run: 1 to 3 ms, a fraction of a decode step of the models whose blocks
# are large. While nothing runs, the larger bound keeps the caller's loop answering.
BYTES_PER_STEP = 8 * 1024 * 1024
IDLE_BYTES_PER_STEP = 32 * 1024 * 1024
# While something runs, blocks are written once fewer than this share of all are empty.
NEAR_EVICTION = 0.25
# How long a full queue, or a disk that takes nothing, is left alone.
RETRY_S = 0.1
MAX_RETRY_S = 5.0


class DiskSink(Protocol):
    """What write-behind needs of the disk tier."""

    def contains(self, block_id: bytes) -> bool: ...

    def room(self) -> int:
        """How many blocks ``put`` would take now."""

    def put(self, block_id: bytes, parent: bytes, payload: bytes | bytearray) -> bool: ...

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that was put is written or dropped; False if that took longer."""


class WriteBehind:
    """Works through ``BlockPool.unsaved``; the pool must track it."""

    def __init__(
        self,
        pool: BlockPool,
        tier: DiskSink,
        *,
        read: Callable[[Sequence[int]], list[bytearray]],
        block_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read`` copies blocks out of the cache."""
        self._pool = pool
        self._tier = tier
        self._read = read
        self._block_bytes = block_bytes
        self._clock = clock
        self._retry_at = 0.0
        self._retry_s = RETRY_S

    def advance(self, *, busy: bool) -> None:
        """Puts what a step may put; ``busy``: something runs that must not be held up."""
        if busy and self._pool.num_empty > NEAR_EVICTION * self._pool.num_blocks:
            return
        if self._clock() >= self._retry_at:
            self._write(BYTES_PER_STEP if busy else IDLE_BYTES_PER_STEP)

    def wait_s(self) -> float | None:
        """Seconds until there is something to write while nothing runs; None: nothing."""
        if not self._pool.unsaved(1):
            return None
        return max(0.0, self._retry_at - self._clock())

    def flush(self, timeout_s: float) -> bool:
        """Writes all that is cached, what was used last first, as there may not be time for all; False if
        that took longer, and the rest is lost."""
        deadline = self._clock() + timeout_s
        while self._pool.unsaved(1):
            left = deadline - self._clock()
            if left <= 0:
                return False
            if not self._write(IDLE_BYTES_PER_STEP, newest_first=True) and not self._tier.flush(left):
                return False
            if self._retry_s > 2 * RETRY_S:
                return False  # the disk takes nothing
        return self._tier.flush(max(0.0, deadline - self._clock()))

    def _write(self, budget: int, *, newest_first: bool = False) -> int:
        """Puts unsaved blocks, up to ``budget`` bytes but at least one; returns how many are off the list."""
        pool, tier = self._pool, self._tier
        limit = max(1, budget // self._block_bytes)
        candidates = pool.unsaved(limit, newest_first=newest_first)
        known = [block for block, block_id, _ in candidates if tier.contains(block_id)]
        pool.mark_saved(known)
        skip = set(known)
        missing = [candidate for candidate in candidates if candidate[0] not in skip]
        missing = missing[: tier.room()] if missing else missing
        done = len(known)
        for (block, block_id, parent), payload in zip(
            missing, self._read([block for block, _, _ in missing]), strict=True
        ):
            if not tier.put(block_id, parent, payload):
                break
            pool.mark_saved([block])
            done += 1
        if done or not candidates:
            self._retry_s = RETRY_S
        else:
            self._retry_at = self._clock() + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
        return done
