"""The replica's peers: one Unix-socket connection each, never blocking.

    bytes in ──► FrameDecoder ──► messages        frames out ──► queue ──► socket, as fast as it takes them

A peer that does not read fills its queue; at the cap it is cut off, since the loop waits for nobody.
"""

from __future__ import annotations

import socket
from collections import deque
from typing import Any

from headrace.core.messages import ToReplica
from headrace.core.wire import FrameError, encode_frame, replica_decoder

# Read so much from one peer before others get their turn and the engine its next step.
_READ_BYTES = 256 * 1024
_READS_PER_TURN = 16


class ConnectionClosed(Exception):
    """The peer is gone, broke the protocol, or does not read; ``str`` says which."""


class Connection:
    """One peer and the requests it submitted."""

    def __init__(self, sock: socket.socket, max_backlog_bytes: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        # request id → samples that have not ended
        self.requests: dict[str, int] = {}
        # number of the next cache event that it is to be told; None: it did not subscribe
        self.next_event: int | None = None
        self._decoder = replica_decoder()
        self._max_backlog_bytes = max_backlog_bytes
        self._backlog: deque[memoryview] = deque()
        self._backlog_bytes = 0

    @property
    def has_backlog(self) -> bool:
        return bool(self._backlog)

    def fileno(self) -> int:
        return self.sock.fileno()

    def receive(self) -> tuple[list[ToReplica], str | None]:
        """Messages that arrived, and why the connection must be closed after them, if it must."""
        messages: list[ToReplica] = []
        for _ in range(_READS_PER_TURN):
            try:
                data = self.sock.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                return messages, f"lost: {error}"
            if not data:
                return messages, "closed by the peer"
            try:
                messages += self._decoder.feed(data)
            except FrameError as error:
                return messages, f"broke the protocol: {error}"
            if len(data) < _READ_BYTES:
                break
        return messages, None

    def send(self, message: Any) -> None:
        """Queues one message and writes what the socket takes. Raises ConnectionClosed.

        What counts against the cap is what waits behind the message that is being written: one that is
        larger than the cap must not cost a peer that reads its connection.
        """
        try:
            frame = encode_frame(message)
        except FrameError as error:
            raise ConnectionClosed(f"cannot be told: {error}") from error
        self._backlog.append(memoryview(frame))
        self._backlog_bytes += len(frame)
        self.flush()
        waiting = self._backlog_bytes - len(self._backlog[0]) if self._backlog else 0
        if waiting > self._max_backlog_bytes:
            raise ConnectionClosed(
                f"does not read: {waiting} bytes wait, the limit is {self._max_backlog_bytes}"
            )

    def flush(self) -> None:
        """Writes what the socket takes. Raises ConnectionClosed."""
        while self._backlog:
            frame = self._backlog[0]
            try:
                sent = self.sock.send(frame)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionClosed(f"lost: {error}") from error
            self._backlog_bytes -= sent
            if sent < len(frame):
                self._backlog[0] = frame[sent:]
                return
            self._backlog.popleft()

    def close(self) -> None:
        self.sock.close()
