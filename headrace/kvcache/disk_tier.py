"""Blocks that memory had no room for, in files of one folder that the replicas of a host share.

    engine ── put ──► queue (bounded) ──► writer ──► folder        oldest blocks make room
           ── open ─► jobs ──► readers, a block a turn ──► sink    checked; damaged: removed and counted
                                scanner ──► index                  what earlier processes and others left

Nothing here blocks the engine but one look at the folder where the index knows nothing of a block. The tier
may lose, forget or refuse any block at any time; it never delivers another block's bytes.
"""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.core.messages import BlocksStored, CacheEvent
from headrace.kvcache.block_format import HEADER_BYTES, BlockHeader, checksum, format_digest
from headrace.kvcache.disk_folder import ROOT_BYTES, DiskFolder, FoundBlock, Usage
from headrace.kvcache.disk_index import DiskIndex
from headrace.kvcache.disk_reader import DiskReader
from headrace.kvcache.source import FillJob, FillSink

QUEUE_BYTES = 64 * 1024 * 1024  # blocks that wait to be written, in memory
RETRY_S = 30.0  # after trouble with the disk
RESCAN_S = 120.0  # a scan follows if anything changed meanwhile
_TRIES = 16  # to find room while other processes take it

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DiskStats:
    """What the tier holds now, and counters since it was opened; bytes, seconds, bytes a second.

    ``refused_blocks`` were not taken (queue full, or ``stopped``: why the disk takes nothing now),
    ``damaged_blocks`` failed a check and were removed, ``evicted_blocks`` made room for others.
    """

    num_blocks: int = 0
    num_bytes: int = 0
    hit_blocks: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    read_rate: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_s: float = 0.0
    refused_blocks: int = 0
    damaged_blocks: int = 0
    evicted_blocks: int = 0
    queued_bytes: int = 0
    stopped: str = ""


@dataclass(frozen=True)
class _Write:
    key: bytes
    parent: bytes
    payload: bytes | bytearray


class DiskTier:
    """A ``BlockSource`` that also takes blocks. Usable at once; what earlier processes left is found by a
    scan in the background.

    ``block_bytes`` is every block's size, ``kv_format`` says what its bytes mean (files of another are
    foreign), ``limit_bytes`` bounds the folder over all processes that share it. ``wake`` is called from
    the tier's threads when ``take_events`` has something, ``is_sound`` for each payload that was read:
    whether it is of any use, as whoever wrote it may have been wrong. Raises UsageError where the folder
    cannot be made or is open to others.
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
        is_sound: Callable[[bytes | bytearray], bool] | None = None,
        queue_bytes: int = QUEUE_BYTES,
        retry_s: float = RETRY_S,
        rescan_s: float = RESCAN_S,
    ) -> None:
        self._root = root
        self._digest = format_digest(kv_format)
        self._block_bytes = block_bytes
        self._limit = limit_bytes
        self._wake = wake
        self._max_queued = max(1, queue_bytes // block_bytes)
        self._retry_s = retry_s
        self._rescan_s = rescan_s
        self._folder = DiskFolder(path)
        self._index = DiskIndex(root)
        self._changed = threading.Condition()  # guards what follows
        self._queue: deque[_Write] = deque()
        self._pending: dict[bytes, bytes | bytearray] = {}  # queued or being written
        self._scan_wanted = False
        self._closing = False
        self._counted = False  # a scan has told how many bytes there are
        self._stopped = ""
        self._retry_at = 0.0
        self._written_blocks = self._refused_blocks = self._evicted_blocks = 0
        self._write_s = 0.0
        self._reader = DiskReader(
            self._folder,
            self._index,
            self._pending,
            self._header,
            self._changed_on_disk,
            block_bytes,
            is_sound or _anything,
        )
        self._threads = [
            threading.Thread(target=self._write_all, name="headrace-disk-writer", daemon=True),
            threading.Thread(target=self._scan_all, name="headrace-disk-scanner", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # What is there

    def contains(self, block_id: bytes) -> bool:
        """Whether the block is believed to be on disk."""
        key = self._key(block_id)
        return key in self._index or key in self._pending

    def prefix(self, block_ids: Sequence[bytes], start: int = 0) -> int:
        """How many blocks from number ``start`` on, without a gap, are believed to be on disk.

        Blocks that another replica wrote are found too: the first one that is not known is looked for.
        """
        count = start
        while count < len(block_ids):
            key = self._key(block_ids[count])
            if key not in self._index and key not in self._pending:
                found = self._folder.find_block(key)
                if found is None:
                    break
                self._index.add(found, announce=False)
            count += 1
        return count - start

    # Into the tier

    def room(self) -> int:
        """How many blocks ``put`` would take now; ask before copying a block out of memory."""
        if self._stopped and time.monotonic() < self._retry_at:
            return 0
        return max(0, self._max_queued - len(self._queue))

    def put(self, block_id: bytes, parent: bytes, payload: bytes | bytearray) -> bool:
        """Queues a block for writing; the tier owns ``payload`` from now on. False, and counted as refused,
        when the queue is full or the disk takes nothing. True as well for what is already there."""
        assert len(payload) == self._block_bytes, (len(payload), self._block_bytes)
        key = self._key(block_id)
        if key in self._index:
            self._index.touch(key, time.time())
            return True
        with self._changed:
            if key in self._pending:
                return True
            if self._closing or not self.room():
                self._refused_blocks += 1
                return False
            self._queue.append(_Write(key, parent, payload))
            self._pending[key] = payload
            self._changed.notify_all()
        return True

    # Out of the tier: a BlockSource

    def open(self, job: FillJob, sink: FillSink) -> None:
        """Reads the job's blocks until one is not there."""
        self._reader.open(job, sink)

    def consumed(self, job_id: str, num_blocks: int) -> None:
        """So many more blocks have been taken out of the sink."""
        self._reader.consumed(job_id, num_blocks)

    def cancel(self, job_id: str) -> None:
        """Ends a job; unknown ids are ignored."""
        self._reader.cancel(job_id)

    def read_rate(self) -> float:
        """Learned bytes a second of reading, checks included; 0 while nothing was read."""
        return self._reader.rate

    # What to tell

    def take_events(self) -> list[CacheEvent]:
        """The next blocks stored and removed on disk, a few thousand at most; call again while there are
        some. They have no ``parent``, and come in no particular order."""
        return self._index.take_events()

    def snapshot(self) -> list[BlocksStored]:
        """All blocks of this root that are believed to be on disk; they have no ``parent``."""
        return self._index.snapshot()

    def stats(self) -> DiskStats:
        """Counts as of now."""
        reader = self._reader
        return DiskStats(
            num_blocks=self._index.num_blocks,
            num_bytes=self._index.num_bytes,
            hit_blocks=reader.hit_blocks,
            read_bytes=reader.read_bytes,
            read_s=reader.read_s,
            read_rate=reader.rate,
            written_blocks=self._written_blocks,
            written_bytes=self._written_blocks * (HEADER_BYTES + self._block_bytes),
            write_s=self._write_s,
            refused_blocks=self._refused_blocks,
            damaged_blocks=reader.damaged_blocks,
            evicted_blocks=self._evicted_blocks,
            queued_bytes=len(self._queue) * self._block_bytes,
            stopped=self._stopped,
        )

    def flush(self, timeout_s: float) -> bool:
        """Waits until all that is queued is written or dropped; False if that took longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, timeout_s)

    def close(self) -> None:
        """Ends every job and all threads; what is still queued is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._reader.close()
        for thread in self._threads:
            thread.join()
        self._folder.close()

    # Writer

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                write = self._queue[0]
            written = False
            if not self._stopped or time.monotonic() >= self._retry_at:
                try:
                    written = self._write(write)
                except OSError as error:
                    self._stop(error)
            with self._changed:
                self._queue.popleft()
                del self._pending[write.key]
                self._refused_blocks += not written
                self._changed.notify_all()
            if written:
                self._changed_on_disk()

    def _write(self, write: _Write) -> bool:
        if not self._counted and not self._folder.usage().known:
            with self._changed:
                self._changed.wait_for(lambda: self._counted or self._closing)
        begun = time.monotonic()
        there = self._folder.find_block(write.key)
        if there is not None:
            self._index.add(FoundBlock(there.key, there.num_bytes, time.time()), announce=True)
            return True
        header = self._header(write.key[ROOT_BYTES:], write.parent, checksum(write.payload))
        num_bytes = HEADER_BYTES + len(write.payload)
        for _ in range(_TRIES):
            if self._closing or not self._make_room(num_bytes):
                return False
            if self._folder.write_block(write.key, header, write.payload, self._limit):
                break
        else:
            return False
        self._index.add(FoundBlock(write.key, num_bytes, time.time()), announce=True)
        self._written_blocks += 1
        self._write_s += time.monotonic() - begun
        if self._stopped:
            self._stopped = ""
            logger.info("the disk tier takes blocks again")
        return True

    def _make_room(self, num_bytes: int) -> bool:
        """Removes the blocks used longest ago until ``num_bytes`` more fit."""
        if num_bytes > self._limit:
            return False
        while self._folder.usage().num_bytes + num_bytes > self._limit:
            oldest = self._index.pop_oldest()
            if oldest is None:
                # What fills the folder is not known here: others wrote it since the last scan.
                self._want_scan()
                return False
            key, used = oldest
            try:
                used_since = self._folder.remove_block(key, unless_used_since=used + 1.0)
            except OSError:
                self._index.keep(key, used)
                raise
            if used_since is None:
                self._index.discard(key)
                self._evicted_blocks += 1
            else:
                self._index.keep(key, used_since)
        return True

    def _stop(self, error: OSError) -> None:
        """Takes nothing for a while. A file that vanished under the writer is no trouble of the disk's."""
        if error.errno == errno.ENOENT:
            self._want_scan()
            return
        if not self._stopped:
            logger.warning(
                "the disk tier in %s takes no blocks for now: %s; serving goes on, and it is tried again "
                "every %g s",
                self._folder.path,
                error.strerror or error,
                self._retry_s,
            )
        self._stopped = error.strerror or str(error)
        self._retry_at = time.monotonic() + self._retry_s

    # Scanner

    def _scan_all(self) -> None:
        seen: Usage | None = None
        while not self._closing:
            try:
                self._folder.reopen()
                if not self._counted or self._scan_wanted or self._folder.usage() != seen:
                    self._scan_wanted = False
                    self._scan()
                    seen = self._folder.usage()
            except OSError as error:
                self._stop(error)
            with self._changed:
                if not self._counted:
                    self._changed.wait_for(lambda: self._closing, self._retry_s)
                    continue
                # One that is wanted again and again, because others fill the folder, comes once a second.
                self._changed.wait_for(lambda: self._closing, min(1.0, self._rescan_s))
                self._changed.wait_for(lambda: self._closing or self._scan_wanted, self._rescan_s)

    def _scan(self) -> None:
        self._folder.remove_leftovers()
        before = self._folder.usage()
        self._index.begin_scan()
        num_bytes = 0
        for found in self._folder.scan():
            if self._closing:
                return
            self._index.see(found)
            num_bytes += sum(block.num_bytes for block in found)
        self._index.end_scan()
        self._folder.correct(before, num_bytes)
        with self._changed:
            self._counted = True
            self._changed.notify_all()
        self._changed_on_disk()

    def _want_scan(self) -> None:
        with self._changed:
            self._scan_wanted = True
            self._changed.notify_all()

    def _changed_on_disk(self) -> None:
        if self._wake is not None:
            self._wake()

    def _key(self, block_id: bytes) -> bytes:
        return self._root[:ROOT_BYTES] + block_id

    def _header(self, block_id: bytes, parent: bytes, check: int = 0) -> BlockHeader:
        return BlockHeader(block_id, parent, self._root, self._digest, self._block_bytes, check)


def _anything(payload: bytes | bytearray) -> bool:
    return True
