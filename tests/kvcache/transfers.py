"""A sink that remembers, a sender without an engine, and what tests look for afterwards."""

from __future__ import annotations

import hashlib
import os
import socket
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headrace.core.identity import block_identities
from headrace.kvcache.connector import ConnectorClient, SendJob, SendStream
from headrace.kvcache.receiving import Patience
from headrace.kvcache.source import BlockSource, FillJob

ROOT = b"r" * 32
FORMAT = "float32 head-major 4x2x8"
BLOCK_SIZE = 4
BLOCK_BYTES = 20_000
WAIT_S = 60.0


def payload_of(block_id: bytes, num_bytes: int = BLOCK_BYTES) -> bytes:
    """Bytes that follow from the identity alone, so that any mix-up shows."""
    return hashlib.shake_128(block_id).digest(num_bytes)


def tokens_of(num_blocks: int, seed: int = 0) -> bytes:
    return array("I", range(seed * 10_000, seed * 10_000 + num_blocks * BLOCK_SIZE)).tobytes()


def job_of(
    num_blocks: int,
    *,
    seed: int = 0,
    first: int = 0,
    name: str = "",
    address: str = "",
    deadline: float = 0.0,
) -> FillJob:
    tokens = tokens_of(num_blocks, seed)
    return FillJob(
        name or f"job-{seed}-{first}",
        ROOT,
        tokens,
        block_identities(ROOT, tokens, BLOCK_SIZE),
        first,
        address,
        deadline,
    )


class Sink:
    """Checks order and bytes as it goes; takes each block out at once unless ``hold``."""

    def __init__(
        self, source: BlockSource, job: FillJob, *, hold: bool = False, block_bytes: int = BLOCK_BYTES
    ) -> None:
        self.delivered: list[bytes] = []
        self.wrong: list[str] = []
        self.reason: str | None = None
        self.num_computed = 0
        self.changed = threading.Condition()
        self._source = source
        self._job = job
        self._hold = hold
        self._block_bytes = block_bytes

    def open(self) -> Sink:
        self._source.open(self._job, self)
        return self

    def deliver(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        with self.changed:
            if self.reason is not None:
                self.wrong.append(f"block {index} after the end")
            if index != self._job.first + len(self.delivered) or block_id != self._job.block_ids[index]:
                self.wrong.append(f"block {index} out of order")
            if payload != payload_of(block_id, self._block_bytes):
                self.wrong.append(f"block {index} has other bytes")
            self.delivered.append(block_id)
            self.changed.notify_all()
        if not self._hold:
            self._source.consumed(self._job.job_id, 1)

    def computed(self) -> None:
        self.num_computed += 1

    def ended(self, reason: str = "") -> None:
        with self.changed:
            if self.reason is not None:
                self.wrong.append("ended twice")
            self.reason = reason
            self.changed.notify_all()

    def wait(self) -> str:
        """Why it ended."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.reason is not None, WAIT_S), "the job never ended"
            assert not self.wrong, self.wrong
            assert self.reason is not None
            return self.reason

    def wait_delivered(self, count: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.delivered) >= count, WAIT_S), (
                len(self.delivered),
                self.reason,
            )


class Prefill:
    """A SendHandler that computes a block whenever there is room, up to ``limit`` blocks of a chain."""

    def __init__(self, *, limit: int = 10**9, block_bytes: int = BLOCK_BYTES) -> None:
        self.limit = limit
        self.jobs: dict[str, SendJob] = {}
        self.cancelled: list[str] = []
        self.streams: dict[str, SendStream] = {}
        self.changed = threading.Condition()
        self._next: dict[str, int] = {}
        self._block_bytes = block_bytes

    def start(self, job: SendJob, stream: SendStream) -> None:
        with self.changed:
            self.jobs[job.key], self.streams[job.key], self._next[job.key] = job, stream, job.first
            self.changed.notify_all()
        self.room(job.key)

    def room(self, key: str) -> None:
        job, stream = self.jobs[key], self.streams[key]
        ids = block_identities(ROOT, job.tokens, BLOCK_SIZE)
        end = min(len(ids), self.limit)
        while (index := self._next[key]) < end and stream.room():
            stream.send(index, ids[index], payload_of(ids[index], self._block_bytes))
            self._next[key] += 1
        if self._next[key] == len(ids):
            stream.end()

    def cancel(self, key: str) -> None:
        with self.changed:
            self.cancelled.append(key)
            self.changed.notify_all()

    def wait(self, condition: Callable[[Prefill], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self), WAIT_S), (self.jobs, self.cancelled)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def open_files() -> dict[str, str]:
    """What each descriptor of this process leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            found[name] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the one that listed the folder
    return found


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:headrace")


@contextmanager
def nothing_left() -> Iterator[None]:
    """Asserts that descriptors, threads and shared memory are afterwards what they were before."""
    files, threads, maps = open_files(), set(threading.enumerate()), _mapped()
    yield
    # Threads are joined, but a child's end of a pipe may still be on its way out.
    wait_until(lambda: len(open_files()) <= len(files))
    assert set(threading.enumerate()) == threads
    assert _mapped() == maps


@contextmanager
def fetching(**patience: float) -> Iterator[ConnectorClient]:
    client = ConnectorClient(kv_format=FORMAT, block_bytes=BLOCK_BYTES, patience=Patience(**patience))
    try:
        yield client
    finally:
        client.close()


def is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True
