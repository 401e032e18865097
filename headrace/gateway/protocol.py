"""Our end of a TCP connection: uvicorn's httptools protocol with the gateway's own manners."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.gateway.errors import encode_error

MAX_HEADER_BYTES = 64 * 1024
MAX_DISCARDED_BYTES = 256 * 1024 * 1024


class GatewayProtocol(HttpToolsProtocol):
    """Adds TCP_NODELAY, a bound on headers and on bodies nobody reads, and errors in OpenAI's shape.

    ``scope["state"]["connection"]`` is this object: requests learn from it at once when the caller goes,
    without a task that waits for it, and also those of a pipeline. A body that was answered before it
    arrived (413, 429) is read and dropped, so that an ordinary client gets to the answer; one that goes
    on for ever is cut.
    """

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Calls ``on_disconnect`` when the connection is lost, at once if it is lost already."""
        if self._lost:
            on_disconnect()
        else:
            self._watchers.add(on_disconnect)

    def unwatch(self, on_disconnect: Callable[[], None]) -> None:
        self._watchers.discard(on_disconnect)

    def abort(self) -> None:
        """Closes the connection without waiting for its reader."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lost = False
        self._watchers: set[Callable[[], None]] = set()
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._lost = True
        watchers, self._watchers = self._watchers, set()
        for on_disconnect in watchers:
            on_disconnect()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._discarded_bytes = 0
        self.scope["state"]["connection"] = self

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_headers(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_headers(len(name) + len(value))

    def on_body(self, body: bytes) -> None:
        if self.cycle.response_complete:
            self._discarded_bytes += len(body)
            if self._discarded_bytes > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        # A large last part paused reading, and nobody receives again: the caller's end must still be read.
        if not self.pipeline:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        body = encode_error(msg.rstrip("."), "invalid_request_error", None, "invalid_http")
        head = (
            b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        self.transport.close()

    def _count_headers(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > MAX_HEADER_BYTES:
            raise ValueError(f"headers longer than {MAX_HEADER_BYTES} bytes")
