"""Reads blocks for fill jobs: several jobs at once, a block of each in turn, the next ones on their way."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.kvcache.block_format import BlockHeader, DamagedBlockError
from headrace.kvcache.disk_folder import ROOT_BYTES, DiskFolder
from headrace.kvcache.disk_index import DiskIndex
from headrace.kvcache.source import WINDOW_BYTES, FillJob, FillSink

NUM_THREADS = 2
READ_AHEAD = 4  # files of a job that are open, and on their way from disk, while one is checked
_OUR_OWN_LACK = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)  # says nothing about the file
_KEEP = 0.9  # of the learned rate, at every block

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Reading:
    job: FillJob
    sink: FillSink
    next: int
    num_outstanding: int = 0  # delivered and not consumed
    parked: bool = False  # waits for consumption; otherwise queued, or at a reader
    cancelled: str = ""
    ahead: deque[int] = field(default_factory=deque)  # file descriptors of blocks next, next + 1, …


class DiskReader:
    """Threads that deliver into sinks. ``pending`` are payloads on their way to disk, by key;
    ``header_of(block_id, parent)`` is what a block's header must say; ``wake`` tells of removals; a payload
    that is not ``is_sound`` is as good as damaged."""

    def __init__(
        self,
        folder: DiskFolder,
        index: DiskIndex,
        pending: Mapping[bytes, bytes | bytearray],
        header_of: Callable[[bytes, bytes], BlockHeader],
        wake: Callable[[], None],
        block_bytes: int,
        is_sound: Callable[[bytes | bytearray], bool],
    ) -> None:
        self.hit_blocks = 0
        self.read_bytes = 0
        self.read_s = 0.0
        self.damaged_blocks = 0
        self._folder = folder
        self._index = index
        self._pending = pending
        self._header_of = header_of
        self._wake = wake
        self._is_sound = is_sound
        self._window = max(1, WINDOW_BYTES // block_bytes)
        self._recent_bytes = 0.0
        self._recent_s = 0.0
        self._changed = threading.Condition()  # guards what follows, and the counters above
        self._jobs: dict[str, _Reading] = {}
        self._ready: deque[_Reading] = deque()
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"headrace-disk-reader-{i}", daemon=True)
            for i in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def rate(self) -> float:
        """Bytes a second over the latest blocks; 0 while there were none."""
        return self._recent_bytes / self._recent_s if self._recent_s else 0.0

    def open(self, job: FillJob, sink: FillSink) -> None:
        """Starts a job; see BlockSource."""
        with self._changed:
            assert job.job_id not in self._jobs, f"job {job.job_id} is open already"
            if not self._closing:
                reading = self._jobs[job.job_id] = _Reading(job, sink, job.first)
                self._ready.append(reading)
                self._changed.notify()
                return
        sink.ended("the disk tier is closed")

    def consumed(self, job_id: str, num_blocks: int) -> None:
        """See BlockSource."""
        with self._changed:
            reading = self._jobs.get(job_id)
            if reading is not None:
                reading.num_outstanding -= num_blocks
                if reading.num_outstanding < self._window:
                    self._unpark(reading)

    def cancel(self, job_id: str) -> None:
        """See BlockSource."""
        with self._changed:
            reading = self._jobs.get(job_id)
            if reading is not None:
                reading.cancelled = "cancelled"
                self._unpark(reading)

    def close(self) -> None:
        """Ends every job and the threads."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for reading in list(self._jobs.values()):
            self._end(reading, "the disk tier is closed")

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._ready and not self._closing:
                    self._changed.wait(self._expire())
                if self._closing:
                    return
                reading = self._ready.popleft()
            try:
                reason = self._advance(reading)
            except Exception as error:
                logger.exception("reading blocks from disk failed")
                reason = f"reading failed: {error}"
            if reason is not None:
                self._end(reading, reason)
                continue
            with self._changed:
                if reading.cancelled or reading.num_outstanding < self._window:
                    self._ready.append(reading)
                else:
                    reading.parked = True

    def _advance(self, reading: _Reading) -> str | None:
        """Delivers one block. Why the job ends, or None if it goes on."""
        job = reading.job
        if reading.cancelled:
            return reading.cancelled
        if reading.next == len(job.block_ids):
            return ""
        if job.deadline and time.monotonic() >= job.deadline:
            return "its deadline has passed"
        block_id = job.block_ids[reading.next]
        key = job.root[:ROOT_BYTES] + block_id
        payload: bytes | bytearray | None = self._pending.get(key)
        if payload is not None:
            if reading.ahead:
                os.close(reading.ahead.popleft())
        else:
            expected = self._header_of(block_id, job.parent_of(reading.next))
            if job.root != expected.root:
                return "the disk tier holds blocks of another root"
            begun = time.monotonic()
            try:
                payload = self._read(reading, key, expected)
            except FileNotFoundError:
                self._index.discard(key)
                self._wake()
                return f"block {reading.next} is not on disk"
            except DamagedBlockError as error:
                self._drop(key)
                return f"block {reading.next} on disk is {error}"
            except OSError as error:
                if error.errno not in _OUR_OWN_LACK:
                    self._drop(key)
                return f"block {reading.next} cannot be read: {error.strerror or error}"
            self._learn(len(payload), time.monotonic() - begun)
        with self._changed:
            self.hit_blocks += 1
            reading.num_outstanding += 1
        index = reading.next
        reading.next += 1
        reading.sink.deliver(index, block_id, payload)
        return "" if reading.next == len(job.block_ids) else None

    def _read(self, reading: _Reading, key: bytes, expected: BlockHeader) -> bytearray:
        ahead, job = reading.ahead, reading.job
        if not ahead:
            ahead.append(self._folder.open_block(key))
        with contextlib.suppress(OSError):  # told when its turn comes
            while len(ahead) < min(READ_AHEAD, len(job.block_ids) - reading.next):
                following = job.block_ids[reading.next + len(ahead)]
                ahead.append(self._folder.open_block(key[:ROOT_BYTES] + following))
        fd = ahead.popleft()
        try:
            payload = self._folder.read_block(fd, expected)
            if not self._is_sound(payload):
                raise DamagedBlockError("of no use: it holds numbers that are not finite")
            now = time.time()
            self._folder.touch(fd, now)
        finally:
            os.close(fd)
        self._index.touch(key, now)
        return payload

    def _drop(self, key: bytes) -> None:
        """Removes a damaged block, so that nobody reads it again."""
        with contextlib.suppress(OSError):  # it stays, and fails again
            self._folder.remove_block(key)
        self._index.discard(key)
        with self._changed:
            self.damaged_blocks += 1
        self._wake()

    def _learn(self, num_bytes: int, seconds: float) -> None:
        with self._changed:
            self.read_bytes += num_bytes
            self.read_s += seconds
            self._recent_bytes = _KEEP * self._recent_bytes + num_bytes
            self._recent_s = _KEEP * self._recent_s + seconds

    def _unpark(self, reading: _Reading) -> None:
        if reading.parked:
            reading.parked = False
            self._ready.append(reading)
            self._changed.notify()

    def _expire(self) -> float | None:
        """Lets parked jobs end whose deadline has passed; seconds until the next one's."""
        now = time.monotonic()
        waits = []
        for reading in self._jobs.values():
            if reading.parked and reading.job.deadline:
                if reading.job.deadline <= now:
                    self._unpark(reading)
                    return 0.0
                waits.append(reading.job.deadline - now)
        return min(waits, default=None)

    def _end(self, reading: _Reading, reason: str) -> None:
        with self._changed:
            del self._jobs[reading.job.job_id]
        for fd in reading.ahead:
            os.close(fd)
        reading.ahead.clear()
        reading.sink.ended(reason)
