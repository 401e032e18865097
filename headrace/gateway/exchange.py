"""One HTTP request and its response, on raw ASGI."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import HeadraceError, InvalidRequestError, PayloadTooLargeError
from headrace.gateway.errors import Headers, error_body, error_headers
from headrace.gateway.fields import header_value

if TYPE_CHECKING:
    from headrace.gateway.metrics import Metrics

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BODY_TIMEOUT_S = 60.0
_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
_JSON = (b"content-type", b"application/json")
_EVENTS = (b"content-type", b"text/event-stream; charset=utf-8")
_NO_CACHE = (b"cache-control", b"no-cache")
_NO_BUFFER = (b"x-accel-buffering", b"no")


class Connection(Protocol):
    """What an exchange needs of the connection under it, see ``GatewayProtocol``."""

    def watch(self, on_disconnect: Callable[[], None]) -> None: ...
    def unwatch(self, on_disconnect: Callable[[], None]) -> None: ...
    def abort(self) -> None: ...


class Disconnected(Exception):
    """The caller has gone; nobody is left to answer."""


class Exchange:
    """Reads one body within limits, watches for the caller's disconnect, sends one response."""

    __slots__ = (
        "_connection",
        "_on_disconnect",
        "_receive",
        "_send",
        "authorization",
        "content_length",
        "disconnected",
        "extra_headers",
        "path",
        "request_id",
        "started",
        "streaming",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive = receive
        self._send = send
        self.path: str = scope["path"]
        self._connection: Connection = scope["state"]["connection"]
        self.authorization: bytes | None = None
        self.content_length: bytes | None = None
        self.request_id = b""
        for name, value in scope["headers"]:
            if name == b"content-length":
                self.content_length = value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"x-request-id" and _SANE_ID.fullmatch(value):
                self.request_id = value
        if not self.request_id:
            self.request_id = b"%032x" % random.getrandbits(128)
        self.extra_headers: Headers = []
        self.started = False
        self.streaming = False
        self.disconnected = False
        self._on_disconnect: Callable[[], None] | None = None

    async def read_body(self, limit: int) -> bytes:
        """The whole body; PayloadTooLargeError beyond ``limit`` bytes, before reading where it is announced.

        Raises Disconnected when the caller goes, InvalidRequestError when the body does not arrive in time.
        """
        announced = self.content_length
        if announced is not None and announced.isdigit() and int(announced[:20]) > limit:
            raise _too_large(f"{int(announced[:20])} bytes", limit)
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                return await self._read_all(limit)
        except TimeoutError:
            raise InvalidRequestError(
                f"the body did not arrive within {BODY_TIMEOUT_S:g} s", code="body_timeout"
            ) from None

    async def _read_all(self, limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.disconnected = True
                raise Disconnected
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > limit:
                raise _too_large(f"more than {limit} bytes", limit)
            parts.append(part)
            if not message.get("more_body"):
                return b"".join(parts)

    def watch(self, on_disconnect: Callable[[], None] | None = None) -> None:
        """Calls ``on_disconnect`` as soon as the caller goes; also at once, when it has gone already.

        Watching begins at the first call and goes on until ``unwatch``; a later call replaces what is done.
        """
        first = self._on_disconnect is None
        self._on_disconnect = on_disconnect or _nothing
        if self.disconnected:
            self._on_disconnect()
        elif first:
            self._connection.watch(self._lost)

    def unwatch(self) -> None:
        """Nothing is done about a disconnect from now on."""
        self._connection.unwatch(self._lost)

    def _lost(self) -> None:
        self.disconnected = True
        if self._on_disconnect is not None:
            self._on_disconnect()

    def cut(self) -> None:
        """Closes the connection under a reader that has stopped reading."""
        self._connection.abort()

    def new_id(self) -> str:
        """A fresh id for a response; the caller's own request id need not be unique."""
        return f"{random.getrandbits(128):032x}"

    def note(self, metrics: Metrics, ignored: list[str], text_seconds: float) -> None:
        """Adds headers about ignored fields and the time of the text work, and counts the former."""
        self.extra_headers.append((b"server-timing", b"text;dur=%.2f" % (1000 * text_seconds)))
        if ignored:
            metrics.ignore(ignored)
            self.extra_headers.append((b"x-headrace-ignored-fields", header_value(ignored)))

    async def send_json(self, body: bytes, status: int = 200, headers: Headers | None = None) -> None:
        """A complete JSON response."""
        self.started = True
        all_headers = [
            _JSON,
            (b"content-length", b"%d" % len(body)),
            (b"x-request-id", self.request_id),
            *self.extra_headers,
            *(headers or ()),
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": all_headers})
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_error(self, error: HeadraceError) -> None:
        """An error as a response of its own; only before anything was sent."""
        await self.send_json(error_body(error), error.status, error_headers(error))

    async def start_events(self, first: bytes) -> None:
        """Begins a stream of server-sent events."""
        self.started = self.streaming = True
        headers = [_EVENTS, _NO_CACHE, _NO_BUFFER, (b"x-request-id", self.request_id), *self.extra_headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        if first:
            await self._send({"type": "http.response.body", "body": first, "more_body": True})

    async def send_events(self, data: bytes, *, last: bool = False) -> None:
        """Some more events; waits while the caller does not read."""
        self.streaming = not last
        await self._send({"type": "http.response.body", "body": data, "more_body": not last})


def _nothing() -> None:
    pass


def _too_large(size: str, limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(
        f"the body is {size}, at most {limit} bytes are accepted",
        hint="Send less, or raise --max-body-mb.",
    )
