"""The replica's single loop: drain the sockets, step the engine, send at most one message a step to a peer.

    select ──► accept / receive ──► Engine.add, Engine.abort ──► Engine.step ──► Step to peers:
      │ waits only when the engine has nothing to do               outputs to the one that asked,
      │                                                            stats and cache events to subscribers
      └── also watches standard input (EOF: the parent is gone), signals (SIGTERM: drain), and the engine's
          helpers: threads that move blocks leave what they have and wake the loop

Whatever a peer sends ends at worst that peer's connection; whatever the model throws ends at worst that
step's requests. The engine is called from this loop alone.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import selectors
import signal
import socket
import time
from pathlib import Path
from typing import Any

from headrace.core.errors import HeadraceError, InvalidRequestError, UnavailableError
from headrace.core.launch import ReplicaSpec
from headrace.core.machine import host_id
from headrace.core.messages import (
    Abort,
    CacheSnapshot,
    Drain,
    Failed,
    Health,
    Hello,
    Output,
    Probe,
    Stats,
    Step,
    Submit,
    Subscribe,
    ToReplica,
    UsePack,
)
from headrace.engine.engine import Engine
from headrace.replica.block_server import BlockServer
from headrace.replica.connections import Connection, ConnectionClosed
from headrace.replica.event_log import EventLog
from headrace.replica.packs import PackDesk
from headrace.replica.waker import Waker

log = logging.getLogger("headrace.replica")

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
# A peer that drains too slowly cannot hold the process back for longer than this.
LAST_WORDS_S = 5.0


class ReplicaProcess:
    """Serves one engine on a bound socket until it is drained or its parent is gone."""

    def __init__(
        self,
        spec: ReplicaSpec,
        engine: Engine,
        listener: socket.socket,
        *,
        waker: Waker,
        block_server: BlockServer | None = None,
        parent_fd: int | None = 0,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
    ) -> None:
        """``waker`` is what the engine was made with; it, the engine and ``block_server`` are closed at the
        end. ``parent_fd`` is read until EOF, which ends the process; None: nobody to watch."""
        self._spec = spec
        self._engine = engine
        self._listener = listener
        self._waker = waker
        self._block_server = block_server
        self._parent_fd = parent_fd
        self._max_backlog_bytes = max_backlog_bytes
        self._instance = secrets.token_hex(8)
        self._event_log = EventLog()
        self._packs = PackDesk(engine)
        self._selector = selectors.DefaultSelector()
        self._connections: set[Connection] = set()
        self._owners: dict[str, Connection] = {}
        self._rejected: dict[Connection, list[Failed]] = {}
        self._news = False  # an abort or a swap of packs, of which no subscriber was told yet
        self._told = Stats()
        self._draining = False
        self._stop = False
        self._signal_read, self._signal_write = socket.socketpair()

    def listen(self) -> None:
        """From here on peers can connect and a signal drains; both are served once ``run`` runs."""
        for sock in (self._listener, self._signal_read, self._signal_write):
            sock.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._signal_read, selectors.EVENT_READ, self._read_signal)
        self._selector.register(self._waker, selectors.EVENT_READ, lambda _: None)
        if self._parent_fd is not None:
            os.set_blocking(self._parent_fd, False)
            # A regular file, which a selector refuses, cannot tell that a parent went away.
            with contextlib.suppress(PermissionError):
                self._selector.register(self._parent_fd, selectors.EVENT_READ, self._read_parent)
        signal.set_wakeup_fd(self._signal_write.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._listener.listen(128)

    def run(self) -> None:
        """Serves until drained or left alone; every peer has been told everything by then."""
        try:
            while not self._stop and not (self._draining and not self._engine.has_work):
                self._turn()
            self._say_last_words()
        finally:
            signal.set_wakeup_fd(-1)
            self._close_all()

    def _turn(self) -> None:
        if self._draining and self._block_server is not None:
            self._block_server.drain()
        # A connection may be found lost while a step is published.
        wait_s = 0.0 if self._news or self._rejected else self._engine.wait_s()
        for key, events in self._selector.select(wait_s):
            key.data(events)
        woken = self._waker.take()
        if not self._stop and (woken or wait_s is not None or self._engine.has_work):
            self._step()
        elif self._rejected or self._news:
            self._publish([], [])
        for connection, answer in self._packs.take():
            self._send(connection, answer)

    def _step(self) -> None:
        result = self._engine.step()
        for output in result.outputs:
            if output.finish_reason is not None:
                self._sample_ended(output.request_id, 1)
        self._publish(result.outputs, result.failed)
        for failed in result.failed:
            self._forget(failed.request_id)
        for output in result.outputs:
            if output.finish_reason is not None and self._left(output.request_id) == 0:
                self._forget(output.request_id)

    def _publish(self, outputs: list[Output], failed: list[Failed]) -> None:
        """A Step to each peer that has outputs or failures of its own in it, or subscribed; nobody hears of
        a step in which nothing happened."""
        first_seq, events = self._engine.take_events()
        self._event_log.append(first_seq, events)
        stats = self._engine.stats()
        news = outputs or failed or self._rejected or self._news or events
        if not news and stats == self._told:
            return
        self._told = stats
        rejected, self._rejected = self._rejected, {}
        self._news = False
        for connection in list(self._connections):
            own = [output for output in outputs if self._owners.get(output.request_id) is connection]
            ended = [f for f in failed if self._owners.get(f.request_id) is connection]
            ended += rejected.get(connection, [])
            if connection.next_event is not None:
                self._tell(connection, own, ended, stats)
            elif own or ended:
                self._send(connection, Step(own, ended, stats))

    def _tell(
        self, connection: Connection, outputs: list[Output], failed: list[Failed], stats: Stats
    ) -> None:
        """A Step to a subscriber, with the events that it has not been told."""
        first = connection.next_event
        assert first is not None
        events, next_seq = self._event_log.since(first), self._event_log.next_seq
        if events is None:
            self._send(connection, CacheSnapshot(self._engine.snapshot(), next_seq))
            first, events = next_seq, []
        connection.next_event = next_seq
        self._send(connection, Step(outputs, failed, stats, events, first))

    def _subscribe(self, connection: Connection, message: Subscribe) -> None:
        self._event_log.append(*self._engine.take_events())
        # -1 is never kept: what another process counted says nothing of this one's cache
        connection.next_event = message.next_seq if message.instance == self._instance else -1
        self._tell(connection, [], [], self._engine.stats())

    def _submit(self, connection: Connection, message: Submit) -> None:
        request = message.request
        try:
            if self._draining:
                raise UnavailableError("this replica is draining and takes no new requests")
            if self._owners.get(request.request_id, connection) is not connection:
                raise InvalidRequestError(
                    f"request {request.request_id!r} is already running; ids must be unique",
                    param="request_id",
                )
            samples = self._engine.add(request, message.sent_at)
        except HeadraceError as error:
            failed = Failed.of_error(request.request_id, error)
            self._rejected.setdefault(connection, []).append(failed)
            return
        self._owners[request.request_id] = connection
        # a rescue may bring the samples of one request one by one
        left = connection.requests.get(request.request_id, 0)
        connection.requests[request.request_id] = left + len(samples)

    def _abort(self, connection: Connection, message: Abort) -> None:
        if self._owners.get(message.request_id) is not connection:
            return  # ended already, or somebody else's
        self._news = True
        self._sample_ended(message.request_id, self._engine.abort(message.request_id, message.sample_index))
        if self._left(message.request_id) == 0:
            self._forget(message.request_id)

    def _sample_ended(self, request_id: str, count: int) -> None:
        owner = self._owners.get(request_id)
        if owner is not None:
            owner.requests[request_id] -= count

    def _left(self, request_id: str) -> int:
        owner = self._owners.get(request_id)
        return owner.requests[request_id] if owner is not None else -1

    def _forget(self, request_id: str) -> None:
        owner = self._owners.pop(request_id, None)
        if owner is not None:
            owner.requests.pop(request_id, None)

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            # Out of descriptors, or a peer that left in the queue: others go on.
            log.warning("cannot accept a connection: %s", error)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                time.sleep(0.01)
            return
        connection = Connection(sock, self._max_backlog_bytes)
        self._connections.add(connection)
        self._selector.register(
            connection, selectors.EVENT_READ, lambda events: self._serve(connection, events)
        )
        self._send(
            connection,
            Hello(
                replica_id=self._spec.replica_id,
                pid=os.getpid(),
                model=self._spec.model,
                role=self._spec.role,
                instance=self._instance,
                host_id=host_id(),
                kv_address="" if self._block_server is None else self._block_server.address,
                **self._engine.hello_fields,
            ),
        )

    def _serve(self, connection: Connection, events: int) -> None:
        if connection not in self._connections:
            return  # closed earlier in this turn
        if events & selectors.EVENT_WRITE:
            try:
                connection.flush()
            except ConnectionClosed as error:
                self._close(connection, str(error))
                return
            self._watch(connection)
        if events & selectors.EVENT_READ:
            messages, ending = connection.receive()
            for message in messages:
                self._receive(connection, message)
            if ending is not None:
                self._close(connection, ending)

    def _receive(self, connection: Connection, message: ToReplica) -> None:
        if connection not in self._connections:
            return  # cut off while its earlier messages were answered
        if isinstance(message, Submit):
            self._submit(connection, message)
        elif isinstance(message, Abort):
            self._abort(connection, message)
        elif isinstance(message, Subscribe):
            self._subscribe(connection, message)
        elif isinstance(message, Drain):
            self._draining = True
        elif isinstance(message, Probe):
            self._send(connection, Health(message.nonce, self._draining, self._engine.stats()))
        else:
            self._news = self._news or isinstance(message, UsePack)
            answer = self._packs.receive(connection, message)
            if answer is not None:
                self._send(connection, answer)

    def _send(self, connection: Connection, message: Any) -> None:
        if connection not in self._connections:
            return
        try:
            connection.send(message)
        except ConnectionClosed as error:
            self._close(connection, str(error))
        else:
            self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Asks for writability only while something waits to be written."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.has_backlog else 0)
        key = self._selector.get_key(connection)
        if key.events != wanted:
            self._selector.modify(connection, wanted, key.data)

    def _close(self, connection: Connection, reason: str) -> None:
        """Ends a connection and aborts what it asked for, before the next step."""
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        self._rejected.pop(connection, None)
        self._selector.unregister(connection)
        connection.close()
        self._packs.forget(connection)
        aborted = list(connection.requests)
        self._news = self._news or bool(aborted)
        for request_id in aborted:
            self._engine.abort(request_id)
            self._owners.pop(request_id, None)
        log.log(
            logging.INFO if aborted else logging.DEBUG,
            "connection %s; %d requests aborted",
            reason,
            len(aborted),
        )

    def _on_signal(self, number: int, _frame: Any) -> None:
        # Only flags: this may run between any two bytecodes. A second Ctrl+C does not wait.
        self._stop = self._stop or (self._draining and number == signal.SIGINT)
        self._draining = True

    def _read_signal(self, _: int) -> None:
        with contextlib.suppress(BlockingIOError):
            self._signal_read.recv(4096)
        log.info("signal received: finishing %d requests, taking no new ones", len(self._owners))

    def _read_parent(self, _: int) -> None:
        assert self._parent_fd is not None
        try:
            data = os.read(self._parent_fd, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            log.info("the parent is gone: exiting")
            self._stop = True

    def _say_last_words(self) -> None:
        """Lets peers read what was written to them, for a bounded time."""
        if self._rejected and not self._stop:
            self._publish([], [])
        deadline = time.monotonic() + LAST_WORDS_S
        while not self._stop and (waiting := [c for c in self._connections if c.has_backlog]):
            left = deadline - time.monotonic()
            if left <= 0:
                log.warning("%d connections did not read their last messages", len(waiting))
                return
            for key, events in self._selector.select(left):
                if key.fileobj is not self._listener:
                    key.data(events)

    def _close_all(self) -> None:
        for connection in list(self._connections):
            self._close(connection, "ended with the process")
        self._selector.close()
        for sock in (self._listener, self._signal_read, self._signal_write):
            sock.close()
        Path(self._spec.socket).unlink(missing_ok=True)
        self._engine.close()  # what it has just given the server goes out meanwhile
        if self._block_server is not None:
            self._block_server.close()
        self._waker.close()
