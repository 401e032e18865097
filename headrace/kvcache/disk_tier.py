"""Blocks that memory had no room for, in files of one folder that the replicas of a host share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headrace.core.messages import BlocksStored, CacheEvent
from headrace.kvcache.source import FillJob, FillSink


@dataclass(frozen=True)
class DiskStats:
    """What the tier holds now, and counters since it was opened; bytes, seconds, bytes a second."""

    num_blocks: int = 0
    num_bytes: int = 0
    hit_blocks: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    read_rate: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    refused_blocks: int = 0
    damaged_blocks: int = 0
    evicted_blocks: int = 0
    queued_bytes: int = 0
    stopped: str = ""


class DiskTier:
    """A ``BlockSource`` that also takes blocks. Usable at once; what earlier processes left is found by a
    scan in the background.

    ``limit_bytes`` bounds the folder over all processes that share it, ``kv_format`` says what a block's
    bytes mean (files of another are foreign), ``wake`` is called from the tier's threads when
    ``take_events`` has something. Raises UsageError where the folder cannot be made or is not ours.
    """

    def __init__(
        self,
        path: Path,
        *,
        root: bytes,
        kv_format: str,
        block_bytes: int,
        limit_bytes: int,
        wake: Callable[[], None] | None = None,
    ) -> None: ...

    def contains(self, block_id: bytes) -> bool:
        """Whether the block is believed to be on disk."""
        ...

    def prefix(self, block_ids: list[bytes], start: int = 0) -> int:
        """How many blocks from number ``start`` on, without a gap, are believed to be on disk."""
        ...

    def room(self) -> int:
        """How many blocks ``put`` would take now; ask before copying a block out of memory."""
        ...

    def put(self, block_id: bytes, parent: bytes, payload: bytes | bytearray) -> bool:
        """Queues a block for writing; the tier owns ``payload`` from now on. False, and counted as refused,
        when the queue is full or the disk takes nothing. True as well for what is already there."""
        ...

    def open(self, job: FillJob, sink: FillSink) -> None: ...

    def consumed(self, job_id: str, num_blocks: int) -> None: ...

    def cancel(self, job_id: str) -> None: ...

    def read_rate(self) -> float:
        """Learned bytes a second of reading, checks included; 0 while nothing was read."""
        ...

    def take_events(self) -> list[CacheEvent]:
        """Blocks stored and removed on disk since the last call. A scan's finds have no ``parent``."""
        ...

    def snapshot(self) -> list[BlocksStored]:
        """All blocks of this root that are believed to be on disk; they have no ``parent``."""
        ...

    def stats(self) -> DiskStats: ...

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that is queued is written or dropped; False if that took longer."""
        ...

    def close(self) -> None:
        """Ends every job and all threads; what is still queued is dropped."""
        ...
