"""One connection to a sender of blocks, and the jobs that are fetched over it.

Everything here runs on the client's IO thread, but for ``Fetching.consumed`` which is only posted to it.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from headrace.kvcache.block_format import DamagedBlockError, check_payload
from headrace.kvcache.channel import Channel, ConnectionLost, parse_address
from headrace.kvcache.io_thread import READ, WRITE, IoThread
from headrace.kvcache.shared_memory import SharedReceiver
from headrace.kvcache.source import WINDOW_BYTES, FillJob, FillSink
from headrace.kvcache.tcp import TcpReceiver
from headrace.kvcache.transfer import (
    PROTOCOL,
    Alive,
    Block,
    Cancel,
    Computed,
    Credit,
    Done,
    Fetch,
    Refused,
)


@dataclass(frozen=True)
class Patience:
    """Seconds: to connect, without a word from the sender, without a block of a job that could be sent, and
    with an idle connection kept for the next job."""

    connect_s: float = 5.0
    silence_s: float = 10.0
    stall_s: float = 30.0
    idle_s: float = 60.0


class _Fetching:
    """A job's state: ``next`` block, how many are ``unused`` in its sink, how many credits are not told."""

    def __init__(self, job: FillJob, sink: FillSink) -> None:
        self.job = job
        self.sink = sink
        self.next = job.first
        self.unused = 0
        self.untold = 0
        self.heard_at = time.monotonic()


class Receiver:
    """``on_damage`` is told of each damaged block, ``on_end`` of each ended job's id, before its sink is, and
    ``on_close`` when the connection is closed. Raises UsageError for what is no address, OSError where
    connecting fails at once."""

    def __init__(
        self,
        address: str,
        io: IoThread,
        *,
        kv_format: str,
        block_bytes: int,
        patience: Patience,
        on_damage: Callable[[], None],
        on_end: Callable[[str], None],
        on_close: Callable[[], None],
    ) -> None:
        self._address = address
        self._io = io
        self._kv_format = kv_format
        self._window = max(1, WINDOW_BYTES // block_bytes)
        self._patience = patience
        self._on_damage = on_damage
        self._on_end = on_end
        self._on_close = on_close
        self._jobs: dict[str, _Fetching] = {}
        self._connected = False
        self._closed = False
        self._begun_at = self._heard_at = self._idle_since = time.monotonic()
        self._channel = _connect(address, block_bytes)
        io.watch(self._channel.sock, READ | WRITE, self._on_ready)

    def open(self, job: FillJob, sink: FillSink) -> None:
        """Starts a job; see BlockSource."""
        if not self._jobs:
            self._heard_at = time.monotonic()  # an idle sender says nothing
        self._jobs[job.job_id] = _Fetching(job, sink)
        self._channel.send(
            Fetch(job.job_id, PROTOCOL, job.root, self._kv_format, job.tokens, job.first, self._window)
        )
        self._flush()

    def consumed(self, job_id: str, num_blocks: int) -> None:
        """See BlockSource; told to the sender a quarter of a window at a time."""
        fetching = self._jobs.get(job_id)
        if fetching is None:
            return
        fetching.unused -= num_blocks
        fetching.untold += num_blocks
        if fetching.untold * 4 >= self._window:
            if fetching.unused + fetching.untold >= self._window:
                fetching.heard_at = time.monotonic()  # it could not send before
            self._channel.send(Credit(job_id, fetching.untold))
            fetching.untold = 0
            self._flush()

    def cancel(self, job_id: str) -> None:
        """See BlockSource."""
        fetching = self._jobs.get(job_id)
        if fetching is not None:
            self._give_up(fetching, "cancelled")
            self._flush()

    def tick(self, now: float) -> None:
        """Looks at the clock: deadlines, silence, connections that nobody needs."""
        patience = self._patience
        if not self._connected and now - self._begun_at > patience.connect_s:
            self.close(f"{self._address} did not answer within {patience.connect_s:g} s")
            return
        if self._jobs and self._connected and now - self._heard_at > patience.silence_s:
            self.close(f"the sender was silent for {patience.silence_s:g} s")
            return
        if not self._jobs and now - self._idle_since > patience.idle_s:
            self.close("idle")
            return
        for fetching in list(self._jobs.values()):
            if fetching.job.deadline and now >= fetching.job.deadline:
                self._give_up(fetching, "its deadline has passed")
            elif (
                now - fetching.heard_at > patience.stall_s
                and fetching.unused + fetching.untold < self._window
            ):
                self._give_up(fetching, f"the sender sent no block for {patience.stall_s:g} s")
        self._flush()

    def close(self, reason: str) -> None:
        """Ends every job for this reason, and the connection."""
        if self._closed:
            return
        self._closed = True
        self._io.unwatch(self._channel.sock)
        self._channel.close()
        self._on_close()
        for fetching in list(self._jobs.values()):
            self._end(fetching, reason)

    def _on_ready(self, events: int) -> None:
        if not self._connected:
            error = self._channel.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.close(f"cannot connect to {self._address}: {os.strerror(error)}")
                return
            self._connected = True
            self._heard_at = time.monotonic()
        if events & READ:
            arrived = self._channel.receive()
            if arrived:
                self._heard_at = time.monotonic()
            for message, payload in arrived:
                self._on_message(message, payload)
                if self._closed:
                    return
            if self._channel.lost is not None:
                self.close(str(self._channel.lost))
                return
        self._flush()

    def _on_message(self, message: object, payload: bytearray | None) -> None:
        if isinstance(message, Alive):
            return
        fetching = self._jobs.get(getattr(message, "job_id", ""))
        if fetching is None:
            return  # it ended here, and the sender did not know yet
        if isinstance(message, Block):
            assert payload is not None, message
            self._on_block(fetching, message, payload)
        elif isinstance(message, Refused):
            self._end(fetching, f"refused: {message.reason}")
        elif isinstance(message, Computed):
            fetching.sink.computed()
        elif isinstance(message, Done):
            missing = len(fetching.job.block_ids) - fetching.next
            self._end(fetching, message.reason or f"the sender stopped {missing} blocks early")

    def _on_block(self, fetching: _Fetching, head: Block, payload: bytearray) -> None:
        job, index = fetching.job, fetching.next
        try:
            if head.index != index or head.block_id != job.block_ids[index]:
                raise DamagedBlockError(f"foreign: block {head.index} of another chain, or out of order")
            check_payload(payload, head.length, head.checksum)
        except DamagedBlockError as error:
            self._on_damage()
            self._give_up(fetching, f"block {index} arrived {error}")
            return
        fetching.next += 1
        fetching.unused += 1
        fetching.heard_at = time.monotonic()
        fetching.sink.deliver(index, head.block_id, payload)
        if fetching.next == len(job.block_ids):
            self._end(fetching, "")

    def _give_up(self, fetching: _Fetching, reason: str) -> None:
        self._channel.send(Cancel(fetching.job.job_id))
        self._end(fetching, reason)

    def _end(self, fetching: _Fetching, reason: str) -> None:
        del self._jobs[fetching.job.job_id]
        self._idle_since = time.monotonic()
        self._on_end(fetching.job.job_id)
        fetching.sink.ended(reason)

    def _flush(self) -> None:
        if self._closed or not self._connected:
            return
        try:
            self._channel.flush()
        except ConnectionLost as error:
            self.close(str(error))
            return
        events = READ | WRITE if self._channel.wants_to_write else READ
        self._io.watch(self._channel.sock, events, self._on_ready)


def _connect(address: str, block_bytes: int) -> Channel:
    """A channel whose socket may still be connecting."""
    where = parse_address(address)
    if isinstance(where, str):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        target: object = where
    else:
        # Addresses that replicas tell are numbers; a name is resolved here and now.
        family, _, _, _, target = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        error = sock.connect_ex(target)  # type: ignore[arg-type]
        if error not in (0, errno.EINPROGRESS):
            raise OSError(error, os.strerror(error))
        return (SharedReceiver if isinstance(where, str) else TcpReceiver)(sock, block_bytes)
    except BaseException:
        sock.close()
        raise
