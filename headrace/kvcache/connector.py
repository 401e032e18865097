"""How blocks move from a replica that has computed them to one that needs them: one protocol, two transports.

    receiver (ConnectorClient, a BlockSource)          sender (ConnectorServer)
    open ──► Fetch(root, format, tokens, first) ─────► SendHandler.start ──► the engine computes
    FillSink.deliver ◄── checks ◄── Block … ◄───────── SendStream.send, block by block as they are finished
    consumed ──► Credit ─────────────────────────────► SendHandler.room
    FillSink.ended ◄── Done, Refused, or EOF ◄──────── SendStream.end

Bounds: of a job, at most WINDOW_BYTES are on their way or not consumed; of a connection, the sender keeps at
most as much waiting (``SendStream.room``). Leases: a receiver's EOF cancels its jobs at once, and one that
takes nothing for LEASE_S loses them; a sender's EOF, its silence for SILENCE_S, or no block for STALL_S ends
the receiver's jobs. The server asks nobody who they are: Unix sockets are their owner's alone, and a TCP
address other than 127.0.0.1 belongs in a network of one's own.

Transports are subclasses of ``channel.Channel`` in pairs, chosen by the address: ``shared_memory`` for
``unix:/path``, ``tcp`` for ``tcp://host:port``. A transfer library (nixl, Mooncake's transfer engine) would
be a third pair with an address form of its own: its sender's ``_place`` starts a write from registered
memory and sends the Block once the write is complete, its receiver's ``_take`` gives the bytes of the place
named by ``slot``. Messages, checks, credits and leases stay as they are.
"""

from __future__ import annotations

import errno
import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from headrace.core.errors import HeadraceError, UsageError
from headrace.core.identity import ID_BYTES
from headrace.kvcache.block_format import checksum
from headrace.kvcache.channel import ConnectionLost, parse_address
from headrace.kvcache.io_thread import READ, WRITE, IoThread
from headrace.kvcache.receiving import Patience, Receiver
from headrace.kvcache.shared_memory import SharedSender, listen_unix
from headrace.kvcache.source import WINDOW_BYTES, FillJob, FillSink
from headrace.kvcache.tcp import TcpSender, listen_tcp
from headrace.kvcache.transfer import (
    PROTOCOL,
    Alive,
    Block,
    Cancel,
    Computed,
    Credit,
    Done,
    Fetch,
    Freed,
    Refused,
)

LEASE_S = 30.0
ALIVE_S = 1.0
MAX_JOBS = 1024  # of one connection

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SendJob:
    """What a receiver wants: the full blocks of ``tokens`` (packed uint32) from number ``first`` on.

    ``key`` is unique in this server over all its connections.
    """

    key: str
    tokens: bytes
    first: int


class SendStream(Protocol):
    """Where a handler puts one job's blocks; from any thread. Once cancelled it ignores everything."""

    def room(self) -> int:
        """Blocks that may be sent now; hold the others in the cache until ``SendHandler.room`` is called."""

    def send(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        """Queues block number ``index``, the one after the last; the stream owns ``payload`` from now on.
        To send more than there is room for breaks the job."""

    def computed(self) -> None:
        """All blocks are computed; what is not sent yet waits only for room. ``end`` implies it."""

    def end(self, reason: str = "") -> None:
        """Nothing follows. Empty: every block has been queued; else why not, in words."""


class SendHandler(Protocol):
    """Who computes the blocks; called from the server's thread, so it only leaves word and wakes a loop."""

    def start(self, job: SendJob, stream: SendStream) -> None:
        """Compute, or find, the job's blocks, and put them into ``stream``, in order."""

    def room(self, key: str) -> None:
        """The job's stream has room again after it had little."""

    def cancel(self, key: str) -> None:
        """The receiver is gone, or does not want the job any more: let go of its blocks."""


class ConnectorServer:
    """Listens for receivers, and sends them blocks. Its thread runs from here to ``close``.

    ``listen`` is ``unix:/path`` (shared memory) or ``tcp://host:port`` (0: any free port); ``address`` is
    what peers connect to. Receivers of another ``root`` or ``kv_format`` are refused with the reason.
    Raises UsageError if it cannot listen there.
    """

    def __init__(
        self,
        listen: str,
        handler: SendHandler,
        *,
        root: bytes,
        kv_format: str,
        block_bytes: int,
        lease_s: float = LEASE_S,
    ) -> None:
        self.handler = handler
        self.root = root
        self.kv_format = kv_format
        self.block_bytes = block_bytes
        self.lease_s = lease_s
        self.window = max(1, WINDOW_BYTES // block_bytes)
        self._senders: dict[int, _Sender] = {}
        self._numbers = itertools.count()
        self._path: Path | None = None
        where = parse_address(listen)
        if isinstance(where, str):
            self._path = Path(where)
            self._socket = listen_unix(self._path)
            self.address = listen
        else:
            self._socket = listen_tcp(*where)
            host, port = self._socket.getsockname()[:2]
            self.address = f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
        self._paused = False
        self.io = IoThread("headrace-connector-server", self._tick)
        self.io.post(lambda: self.io.watch(self._socket, READ, self._accept))

    def close(self) -> None:
        """Cancels every job and closes every connection."""
        self.io.stop(self._shut)
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def _shut(self) -> None:
        self.io.unwatch(self._socket)
        self._socket.close()
        for sender in list(self._senders.values()):
            sender.close()

    def _accept(self, events: int) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._paused = True  # until the next tick: it would be told of the same again and again
                self.io.unwatch(self._socket)
            return
        number = next(self._numbers)
        try:
            kind = SharedSender if self._path is not None else TcpSender
            channel = kind(sock, self.block_bytes)
        except OSError as error:
            logger.warning("cannot serve blocks to a replica: %s", error.strerror or error)
            sock.close()
            return
        self._senders[number] = _Sender(self, channel, number, partial(self._senders.__delitem__, number))

    def _tick(self) -> None:
        now = time.monotonic()
        if self._paused:
            self._paused = False
            self.io.watch(self._socket, READ, self._accept)
        for sender in list(self._senders.values()):
            sender.tick(now)


class _Stream:
    """A SendStream. The receiver takes ``window`` blocks at once, and ``credit`` more now."""

    def __init__(self, sender: _Sender, key: str, job_id: str, window: int) -> None:
        self.key = key
        self.job_id = job_id
        self.window = window
        self.credit = window
        self.credit_at = time.monotonic()
        self.asked = False
        self.closed = False
        self._sender = sender
        self._computed = False

    def room(self) -> int:
        with self._sender.lock:
            self.asked = True
            return 0 if self.closed else max(0, min(self.credit, self._sender.num_free()))

    def send(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        sender = self._sender
        with sender.lock:
            if self.closed:
                return
            if self.credit > 0:
                self.credit -= 1
                self.credit_at = time.monotonic()
                sender.num_posted += 1
                call = partial(sender.transmit, self, index, block_id, payload)
            else:
                call = partial(sender.revoke, self, "the sender ran ahead of what was asked for")
        sender.server.io.post(call)

    def computed(self) -> None:
        with self._sender.lock:
            if self.closed or self._computed:
                return
            self._computed = True
        self._sender.server.io.post(partial(self._sender.say, self, Computed(self.job_id)))

    def end(self, reason: str = "") -> None:
        if not reason:
            self.computed()
        self._sender.server.io.post(partial(self._sender.finish, self, reason))


class _Sender:
    """One receiver's connection. All but what ``lock`` guards belongs to the server's thread."""

    def __init__(
        self,
        server: ConnectorServer,
        channel: SharedSender | TcpSender,
        number: int,
        on_close: Callable[[], None],
    ) -> None:
        self.server = server
        self.lock = threading.Lock()  # guards num_posted, and each stream's credit, asked, closed
        self.num_posted = 0  # blocks on their way from a handler's thread to this one
        self._channel = channel
        self._number = number
        self._on_close = on_close
        self._streams: dict[str, _Stream] = {}
        self._progress_at = self._spoke_at = time.monotonic()
        self._closed = False
        server.io.watch(channel.sock, READ, self._on_ready)

    def num_free(self) -> int:
        """Blocks that may wait besides those that do."""
        return self.server.window - self.num_posted - self._channel.num_waiting_blocks

    def transmit(self, stream: _Stream, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        """Sends what a stream was given."""
        with self.lock:
            self.num_posted -= 1
            gone = stream.closed
        if gone:
            return
        if len(payload) != self.server.block_bytes or len(block_id) != ID_BYTES:
            self.revoke(stream, f"the sender made a block of {len(payload)} bytes")
            return
        head = Block(stream.job_id, index, block_id, len(payload), checksum(payload))
        self._channel.send_block(head, payload)
        self._flush()

    def say(self, stream: _Stream, message: object) -> None:
        """Sends a message before the blocks that wait."""
        if not stream.closed:
            self._channel.send_now(message)
            self._flush()

    def finish(self, stream: _Stream, reason: str) -> None:
        """Ends a stream behind the blocks that wait."""
        if self._drop(stream):
            self._channel.send(Done(stream.job_id, reason))
            self._flush()

    def revoke(self, stream: _Stream, reason: str) -> None:
        """Ends a stream whose handler does not know yet."""
        if not stream.closed:
            self.finish(stream, reason)
            self.server.handler.cancel(stream.key)

    def tick(self, now: float) -> None:
        """Looks at the clock: leases, and a word for those who wait."""
        lease = self.server.lease_s
        if self._channel.has_unsent and now - self._progress_at > lease:
            self.close()
            return
        for stream in list(self._streams.values()):
            if stream.credit <= 0 and now - stream.credit_at > lease:
                self.revoke(stream, f"the receiver used nothing for {lease:g} s")
        if self._streams and now - self._spoke_at >= ALIVE_S:
            self._spoke_at = now
            self._channel.send_now(Alive())
            self._flush()

    def close(self) -> None:
        """Closes the connection, and cancels its jobs."""
        if self._closed:
            return
        self._closed = True
        self.server.io.unwatch(self._channel.sock)
        self._channel.close()
        self._on_close()
        for stream in list(self._streams.values()):
            self._drop(stream)
            self.server.handler.cancel(stream.key)

    def _on_ready(self, events: int) -> None:
        if events & READ:
            try:
                for message, _ in self._channel.receive():
                    self._on_message(message)
            except ConnectionLost:
                self.close()
                return
            if self._channel.lost is not None:
                self.close()
                return
        self._flush()

    def _on_message(self, message: object) -> None:
        self._progress_at = time.monotonic()
        if isinstance(message, Fetch):
            self._start(message)
        elif isinstance(message, Freed):
            self._channel.freed(message.num_slots)
        elif isinstance(message, Credit):
            stream = self._streams.get(message.job_id)
            if stream is not None:
                with self.lock:
                    stream.credit += max(0, message.num_blocks)
                    stream.credit_at = self._progress_at
        elif isinstance(message, Cancel):
            stream = self._streams.get(message.job_id)
            if stream is not None and self._drop(stream):
                self.server.handler.cancel(stream.key)

    def _start(self, fetch: Fetch) -> None:
        reason = self._objection(fetch)
        if not reason:
            stream = _Stream(self, f"{self._number}:{fetch.job_id}", fetch.job_id, fetch.window)
            self._streams[fetch.job_id] = stream
            try:
                self.server.handler.start(SendJob(stream.key, fetch.tokens, fetch.first), stream)
                return
            except HeadraceError as error:
                reason = error.message
            self._drop(stream)
        self._channel.send(Refused(fetch.job_id, reason))

    def _objection(self, fetch: Fetch) -> str:
        """Why the job cannot be done here; empty if it can."""
        server = self.server
        if fetch.protocol != PROTOCOL:
            return f"it speaks version {PROTOCOL} of the protocol, not {fetch.protocol}: serve one release"
        if fetch.kv_format != server.kv_format:
            return (
                f"its blocks are {server.kv_format}, not {fetch.kv_format}: "
                "give both replicas the same model, dtype, block size and hardware class"
            )
        if fetch.root != server.root:
            return "its blocks belong to another model revision, adapter or tenant: serve the same one"
        if fetch.job_id in self._streams:
            return "a job of this name is open already"
        if len(self._streams) >= MAX_JOBS:
            return f"{MAX_JOBS} jobs are open on this connection"
        if len(fetch.tokens) % 4 or fetch.first < 0 or fetch.window < 1:
            return "the job makes no sense"
        return ""

    def _drop(self, stream: _Stream) -> bool:
        """Forgets a stream; whether it was there."""
        with self.lock:
            stream.closed = True
        if self._streams.get(stream.job_id) is not stream:
            return False
        del self._streams[stream.job_id]
        return True

    def _flush(self) -> None:
        if self._closed:
            return
        try:
            if self._channel.flush():
                self._progress_at = time.monotonic()
        except ConnectionLost:
            self.close()
            return
        events = READ | WRITE if self._channel.wants_to_write else READ
        self.server.io.watch(self._channel.sock, events, self._on_ready)
        for stream in list(self._streams.values()):
            if not stream.asked:
                continue
            with self.lock:
                enough = min(stream.window, self.server.window) / 4
                ready = min(stream.credit, self.num_free()) >= enough
                stream.asked = not ready
            if ready:
                self.server.handler.room(stream.key)


class ConnectorClient:
    """The receiving side: a ``BlockSource`` over one connection per address, opened when first needed."""

    def __init__(self, *, kv_format: str, block_bytes: int, patience: Patience | None = None) -> None:
        self.damaged_blocks = 0  # failed a check on arrival and were dropped
        self._kv_format = kv_format
        self._block_bytes = block_bytes
        self._patience = patience or Patience()
        self._receivers: dict[str, Receiver] = {}  # by address
        self._receiver_of: dict[str, Receiver] = {}  # by job
        self._told: set[str] = set()  # in the log, once each
        self._io = IoThread("headrace-connector-client", self._tick)

    def open(self, job: FillJob, sink: FillSink) -> None:
        """See BlockSource."""
        if not self._io.post(partial(self._open, job, sink)):
            sink.ended("the connector is closed")

    def consumed(self, job_id: str, num_blocks: int) -> None:
        """See BlockSource."""
        self._io.post(partial(self._consumed, job_id, num_blocks))

    def cancel(self, job_id: str) -> None:
        """See BlockSource."""
        self._io.post(partial(self._cancel, job_id))

    def close(self) -> None:
        """Ends every job and closes every connection."""
        self._io.stop(self._shut)

    def _open(self, job: FillJob, sink: FillSink) -> None:
        if job.first >= len(job.block_ids):
            sink.ended("")
            return
        if job.job_id in self._receiver_of:
            sink.ended("a job of this name is open already")
            return
        try:
            receiver = self._receivers.get(job.address) or self._connect(job.address)
        except UsageError as error:
            sink.ended(error.message)
            return
        except OSError as error:
            reason = f"cannot connect to {job.address}: {error.strerror or error}"
            if job.address.startswith("unix:") and error.errno == errno.ENOENT:
                reason += ": it has gone, or is on another host or in another container (kv_connector: tcp)"
            if reason not in self._told:
                self._told.add(reason)
                logger.warning("blocks are computed here instead of fetched: %s", reason)
            sink.ended(reason)
            return
        self._receiver_of[job.job_id] = receiver
        receiver.open(job, sink)

    def _connect(self, address: str) -> Receiver:
        receiver = Receiver(
            address,
            self._io,
            kv_format=self._kv_format,
            block_bytes=self._block_bytes,
            patience=self._patience,
            on_damage=self._on_damage,
            on_end=self._receiver_of.__delitem__,
            on_close=partial(self._receivers.__delitem__, address),
        )
        self._receivers[address] = receiver
        return receiver

    def _consumed(self, job_id: str, num_blocks: int) -> None:
        receiver = self._receiver_of.get(job_id)
        if receiver is not None:
            receiver.consumed(job_id, num_blocks)

    def _cancel(self, job_id: str) -> None:
        receiver = self._receiver_of.get(job_id)
        if receiver is not None:
            receiver.cancel(job_id)

    def _on_damage(self) -> None:
        self.damaged_blocks += 1

    def _tick(self) -> None:
        now = time.monotonic()
        for receiver in list(self._receivers.values()):
            receiver.tick(now)

    def _shut(self) -> None:
        for receiver in list(self._receivers.values()):
            receiver.close("the connector is closed")
