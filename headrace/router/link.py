"""A connection on one of our own sockets inside an event loop: bytes in, messages to its owner.

    Link.data_received ──► FrameDecoder ──► owner.receive(link, message)
    whatever ends it   ──► owner.lose(link, reason), once; nothing of it is read any more

``stay_connected`` keeps one to a path that may not be there yet, or be another process's next time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast

from headrace.core.wire import FrameDecoder, FrameError, encode_frame

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 0.25

Message = TypeVar("Message")
Received = TypeVar("Received", contravariant=True)


class LinkOwner(Protocol[Received]):
    """What stands behind one end of connections."""

    def connected(self, link: Any) -> None:
        """The link is open; nothing was read yet."""

    def receive(self, link: Any, message: Received) -> None:
        """One message. Whatever it raises ends the link."""

    def lose(self, link: Any, reason: str) -> None:
        """The link has ended."""


class Link(asyncio.Protocol, Generic[Message]):
    """One connection; ends at EOF, at bytes that are no message, or by ``end``."""

    def __init__(
        self, owner: LinkOwner[Message], decoder: FrameDecoder[Message], log: logging.Logger
    ) -> None:
        self.heard = False  # a message at least
        self.ended = asyncio.Event()
        self._owner = owner
        self._decoder = decoder
        self._log = log
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._owner.connected(self)

    def data_received(self, data: bytes) -> None:
        ended, owner = self.ended, self._owner
        if ended.is_set():
            return
        try:
            for message in self._decoder.feed(data):
                self.heard = True
                owner.receive(self, message)
                if ended.is_set():
                    return
        except FrameError as error:
            self.end(f"it sent garbage: {error}")
        except Exception as error:
            self._log.exception("a message could not be used")
            self.end(f"what it sent could not be used: {error!r}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.end("connection closed" if exc is None else str(exc))

    def send(self, message: Any) -> None:
        """Writes one message; nothing once the connection has gone."""
        self.write(encode_frame(message))

    def write(self, frames: bytes) -> None:
        """Writes encoded messages."""
        if self._transport is not None:
            self._transport.write(frames)

    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def end(self, reason: str) -> None:
        """Closes the connection at once; unread bytes in either direction are dropped."""
        if self.ended.is_set():
            return
        self.ended.set()
        if self._transport is not None:
            self._transport.abort()
        self._owner.lose(self, reason)


async def stay_connected(
    path: str, make_link: Callable[[], Link[Any]], hurry: asyncio.Event, log: logging.Logger
) -> None:
    """Connects, and connects again with back-off whenever the link has ended, until cancelled. ``hurry`` cuts
    a pause short."""
    loop = asyncio.get_running_loop()
    delay = MIN_BACKOFF_S
    while True:
        link = make_link()
        try:
            await loop.create_unix_connection(lambda link=link: link, path)  # type: ignore[misc]
        except OSError as error:
            log.debug("%s: %s", path, error)
        else:
            try:
                await link.ended.wait()
            finally:
                link.end("closed")
            if link.heard:
                delay = MIN_BACKOFF_S
        hurry.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(hurry.wait(), delay)
        delay = min(2 * delay, MAX_BACKOFF_S)
