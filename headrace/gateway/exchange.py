"""One HTTP request and its response.

Every send is synchronous: the bytes go to the transport in one write, and what the socket does not take
waits in the transport's buffer. Whoever streams looks at ``unsent_bytes`` and ends a reader that is too far
behind. After the caller has gone, sends do nothing.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING

from headrace.core.errors import HeadraceError, InvalidRequestError, PayloadTooLargeError
from headrace.gateway.errors import Headers, error_body, error_headers
from headrace.gateway.sse import error_event

if TYPE_CHECKING:
    from headrace.gateway.protocol import HttpConnection

STATUS_LINES = {
    int(status): b"HTTP/1.1 %d %b\r\n" % (status, status.phrase.encode()) for status in HTTPStatus
}
HOP_BY_HOP = frozenset({
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
    b"te", b"trailer", b"transfer-encoding", b"upgrade",
})  # fmt: skip
"""Headers about one connection (RFC 9110, 7.6.1); another server's do not go on to our caller."""

_OURS = HOP_BY_HOP | {b"date", b"x-request-id"}
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_EVENTS = (
    b"content-type: text/event-stream; charset=utf-8\r\ncache-control: no-cache\r\nx-accel-buffering: no\r\n"
)
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_BODILESS = frozenset({204, 304})


class Disconnected(Exception):
    """The caller has gone; nobody is left to answer."""


class Exchange:
    """Reads one body within limits, watches for the caller's disconnect, sends one response."""

    __slots__ = (
        "_announced",
        "_body",
        "_body_error",
        "_body_limit",
        "_chunked",
        "_connection",
        "_events",
        "_on_disconnect",
        "_pause",
        "_pending",
        "_resume",
        "_waiter",
        "_write",
        "arrival",
        "authorization",
        "body_complete",
        "disconnected",
        "ended",
        "expects_continue",
        "extra_headers",
        "headers",
        "http10",
        "keep_alive",
        "method",
        "path",
        "query",
        "request_id",
        "started",
        "streaming",
    )

    def __init__(
        self,
        connection: HttpConnection,
        method: str,
        path: str,
        query: bytes,
        headers: Headers,
        authorization: bytes | None,
        request_id: bytes | None,
    ) -> None:
        """``headers`` have lower-case names; the connection sets what its framing needs afterwards."""
        self.method = method
        self.path = path
        self.query = query
        self.headers = headers
        self.authorization = authorization
        if request_id is None or not _SANE_ID.fullmatch(request_id):
            request_id = b"%032x" % random.getrandbits(128)
        self.request_id = request_id
        self.arrival = time.perf_counter()
        self.extra_headers: Headers = []
        self.started = False
        self.streaming = False
        self.ended = False
        self.disconnected = False
        self.http10 = False
        self.keep_alive = True
        self.expects_continue = False
        self.body_complete = False
        self._announced: int | None = None
        self._connection = connection
        self._write = connection.write
        self._body: bytes | bytearray = b""
        self._body_error: HeadraceError | None = None
        self._body_limit: int | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._chunked = False
        self._events = False
        self._pending = b""
        self._on_disconnect: Callable[[], None] | None = None
        self._pause: Callable[[], None] | None = None
        self._resume: Callable[[], None] | None = None

    # The caller's side: what the connection reports

    def announce_body(self, size: int | None) -> None:
        """The body's length as its header gives it; None for a chunked one."""
        self._announced = size

    @property
    def buffered_bytes(self) -> int:
        """Body that has arrived and that nobody has taken."""
        return len(self._body)

    def feed_body(self, data: bytes) -> None:
        """More of the body; dropped once it is too long or the response has ended."""
        if self.ended or self._body_error is not None:
            return
        if not self._body:
            self._body = data
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data
        if self._body_limit is not None and len(self._body) > self._body_limit:
            self.fail_body(_too_large(f"more than {self._body_limit} bytes", self._body_limit))

    def complete_body(self) -> None:
        """The request is here as a whole."""
        self.body_complete = True
        self._wake()

    def fail_body(self, error: HeadraceError) -> None:
        """The rest of the body will not come, or is not wanted; whoever reads it gets ``error``."""
        self._body = b""
        self._body_error = error
        self._wake()

    def lose(self) -> None:
        """The caller has gone."""
        if self.disconnected or self.ended:
            return
        self.disconnected = True
        self._body = b""
        self._wake()
        if self._on_disconnect is not None:
            self._on_disconnect()

    def lose_half(self) -> None:
        """The caller has shut its side down: counts as a disconnect, but is told, as it may still listen."""
        if self.disconnected or self.ended:
            return
        error = InvalidRequestError(
            "the caller shut the connection down before the answer was complete",
            hint="Keep both directions open until it is: a half-closed connection counts as a disconnect.",
            code="half_closed",
        )
        self.keep_alive = False
        if not self.started:
            self._write(self._whole(error_body(error), error.status, None))
        elif self._events:
            self._send(error_event(error), last=True)
        self.lose()

    def pause(self) -> None:
        """The transport's buffer is above its high-water mark."""
        if self._pause is not None:
            self._pause()

    def resume(self) -> None:
        if self._resume is not None:
            self._resume()

    # The handler's side

    async def read_body(self, limit: int) -> bytes:
        """The whole body; PayloadTooLargeError beyond ``limit`` bytes, before reading where it is announced.

        Does not suspend when the body is here already. Raises Disconnected when the caller goes,
        InvalidRequestError when the body is malformed or does not arrive in time.
        """
        if self._announced is not None and self._announced > limit:
            raise _too_large(f"{self._announced} bytes", limit)
        if len(self._body) > limit:
            self.fail_body(_too_large(f"more than {limit} bytes", limit))
        self._body_limit = limit
        if not (self.body_complete or self.disconnected or self._body_error is not None):
            await self._wait_for_body()
        if self.disconnected:
            raise Disconnected
        if self._body_error is not None:
            raise self._body_error
        body, self._body = self._body, b""
        return body if isinstance(body, bytes) else bytes(body)

    async def _wait_for_body(self) -> None:
        if self.expects_continue:
            self.expects_continue = False
            self._write(_CONTINUE)
        timeout_s = self._connection.limits.body_timeout_s
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        late = InvalidRequestError(f"the body did not arrive within {timeout_s:g} s", code="body_timeout")
        timer = loop.call_later(timeout_s, self.fail_body, late)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def watch(self, on_disconnect: Callable[[], None]) -> None:
        """Calls ``on_disconnect`` as soon as the caller goes; at once, when it has gone already.

        A later call replaces what is done. Watching ends with the response.
        """
        self._on_disconnect = on_disconnect
        if self.disconnected:
            on_disconnect()

    def watch_writable(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        """Calls ``pause`` when the transport's buffer rises above its high-water mark, and ``resume`` after.

        At once, when it is above it already.
        """
        self._pause, self._resume = pause, resume
        if self._connection.write_paused:
            pause()

    def unsent_bytes(self) -> int:
        """Response bytes that the socket has not taken."""
        return self._connection.unsent_bytes()

    def cut(self) -> None:
        """Closes the connection under a reader that has stopped reading; what is unsent is lost."""
        self._connection.abort()

    def new_id(self) -> str:
        """A fresh id for a response; the caller's own request id need not be unique."""
        return f"{random.getrandbits(128):032x}"

    def send_json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        """A complete JSON response."""
        self.send_whole(body, b"application/json", status, headers)

    def send_whole(
        self, body: bytes, media_type: bytes, status: int = 200, headers: Headers | None = None
    ) -> None:
        """A complete response of any kind."""
        assert not self.started, "one response a request"
        self.started = True
        if not self.disconnected:
            self._write(self._whole(body, status, headers, media_type))
        self._end()

    def send_error(self, error: HeadraceError) -> None:
        """An error as a response of its own; only before anything was sent."""
        self.send_json(error_body(error), error.status, error_headers(error))

    def fail(self, error: HeadraceError) -> None:
        """Ends the response with an error, however far it is: a response, the last event, or a cut."""
        if not self.started:
            self.send_error(error)
        elif not self.ended and self._events:
            self.send_events(error_event(error), last=True)
        elif not self.ended:
            self.cut()

    def start_events(self, first: bytes) -> None:
        """Begins a stream of server-sent events."""
        assert not self.started, "one response a request"
        self.started = self.streaming = self._events = True
        if self.disconnected:
            return
        head = self._head(STATUS_LINES[200], _EVENTS + self._framing())
        if not first:
            self._write(head)
        elif self._chunked:
            self._write(b"%b%x\r\n%b\r\n" % (head, len(first), first))
        else:
            self._write(head + first)

    def send_events(self, data: bytes, *, last: bool = False) -> None:
        """Some more events, in one write."""
        if not self.disconnected:
            self._send(data, last)
        if last:
            self._end()

    def start_raw(self, status: int, headers: Headers) -> None:
        """Begins the answer of another server; its head goes out with the first data.

        A ``content-length`` among ``headers`` frames the body, else it is chunked. Headers about the other
        connection are dropped.
        """
        assert not self.started, "one response a request"
        self.started = self.streaming = True
        lines = [b"%b: %b\r\n" % header for header in headers if header[0] not in _OURS]
        sized = status in _BODILESS or any(name == b"content-length" for name, _ in headers)
        status_line = STATUS_LINES.get(status) or b"HTTP/1.1 %d \r\n" % status
        framing = b"" if sized else self._framing()
        self._pending = self._head(status_line, b"".join(lines) + framing)

    def send_raw(self, data: bytes, *, last: bool = False) -> None:
        """Some more of it, in one write. A body that ends before its announced length: ``cut``."""
        if not self.disconnected:
            self._send(data, last)
        if last:
            self._end()

    # Framing

    def _framing(self) -> bytes:
        """How a body of unknown length is delimited; HTTP/1.0 knows only the connection's end."""
        if self.http10:
            self.keep_alive = False
            return b""
        self._chunked = True
        return b"transfer-encoding: chunked\r\n"

    def _head(self, status_line: bytes, lines: bytes) -> bytes:
        connection = self._connection
        if self.expects_continue or connection.stopping:
            # A body that was not asked for may come or not, so that the next request cannot be found.
            self.keep_alive = False
        if not self.keep_alive:
            lines += b"connection: close\r\n"
        elif self.http10:
            lines += b"connection: keep-alive\r\n"
        for header in self.extra_headers:
            lines += b"%b: %b\r\n" % header
        return b"%b%b%bx-request-id: %b\r\n\r\n" % (status_line, connection.date, lines, self.request_id)

    def _whole(
        self, body: bytes, status: int, headers: Headers | None, media_type: bytes = b"application/json"
    ) -> bytes:
        lines = b"content-type: %b\r\ncontent-length: %d\r\n" % (media_type, len(body))
        for header in headers or ():
            lines += b"%b: %b\r\n" % header
        head = self._head(STATUS_LINES[status], lines)
        return head if self.method == "HEAD" else head + body

    def _send(self, data: bytes, last: bool) -> None:
        if self._chunked:
            if data:
                tail = b"\r\n0\r\n\r\n" if last else b"\r\n"
                data = b"%x\r\n%b%b" % (len(data), data, tail)
            elif last:
                data = b"0\r\n\r\n"
        if self._pending:
            data, self._pending = self._pending + data, b""
        if data:
            self._write(data)

    def _end(self) -> None:
        self.streaming = False
        self.ended = True
        self._body = b""
        self._on_disconnect = self._pause = self._resume = None
        self._connection.finish(self)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _too_large(size: str, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is {size}, at most {limit} bytes are accepted",
        hint="Send less, or raise --max-body-mb.",
    )
