"""HTTP/1.1 to one server: asyncio protocols over httptools, with a pool of kept connections.

    Call ── one request and its answer; its Receiver hears head, body as it is read, end, or one failure
      └─ _Connection ── one socket; serves one Call at a time, then waits in the pool

Nothing limits how long an answer may take. An answer ends where its framing says; a connection that ends
before that, or bytes that are no HTTP, is a typed failure. A kept connection that turns out to be closed
before any byte of an answer is replaced once by a fresh one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import ssl
from typing import Literal, Protocol, cast
from urllib.parse import urlsplit

import httptools

from headrace.core.errors import UsageError

Headers = list[tuple[bytes, bytes]]
Fault = Literal["connect", "closed", "garbage"]

CONNECT_TIMEOUT_S = 5.0
MAX_IDLE_CONNECTIONS = 256
MAX_HEAD_BYTES = 64 * 1024
MAX_FETCH_BYTES = 64 * 1024 * 1024


class HTTPFailure(Exception):
    """No answer, or not all of it. ``connect``: no connection; ``closed``: it ended; ``garbage``: no HTTP."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault


class Receiver(Protocol):
    """Takes one answer; never called from within ``HTTPClient.request`` nor after ``Call.abort``."""

    def on_head(self, status: int, headers: Headers) -> None: ...
    def on_body(self, data: bytes) -> None:
        """What one read brought of the body."""

    def on_end(self) -> None: ...
    def on_failed(self, failure: HTTPFailure) -> None: ...


class Base:
    """A server's base URL taken apart; UsageError when it is none."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        sane = parts.hostname and parts.netloc.isascii() and "@" not in parts.netloc and port != -1
        if parts.scheme not in ("http", "https") or not sane:
            raise UsageError(
                f"{url!r} is no base URL", hint="Give it as http://HOST:PORT or https://HOST/v1."
            )
        self.url = url
        self.host = parts.hostname or ""
        self.tls = parts.scheme == "https"
        self.port = port or (443 if self.tls else 80)
        # ".../v1" is how OpenAI clients write it; paths here name it themselves
        self.prefix = parts.path.rstrip("/").removesuffix("/v1")
        self.authority = parts.netloc.encode()


class Call:
    """One request under way."""

    __slots__ = ("_client", "connection", "data", "ended", "heard", "heard_at", "patience_s", "paused",
                 "receiver", "retried")  # fmt: skip

    def __init__(self, client: HTTPClient, data: bytes, receiver: Receiver, now: float) -> None:
        self._client = client
        self.data = data
        self.receiver = receiver
        self.connection: _Connection | None = None
        self.ended = False
        self.heard = False  # a byte of the answer
        self.heard_at = now
        self.patience_s = math.inf  # how long its first byte may take before the server is asked after
        self.retried = False
        self.paused = False

    def abort(self) -> None:
        """Closes its connection, so that the server stops; the receiver hears nothing more."""
        if not self.ended:
            self.ended = True
            self._client.forget(self)
            if self.connection is not None:
                self.connection.abort()

    def fail(self, failure: HTTPFailure) -> None:
        """Ends it with a failure found elsewhere, such as a server that has gone silent."""
        if not self.ended:
            self.abort()
            self.receiver.on_failed(failure)

    def pause(self) -> None:
        """Stops reading; what the server sends on fills the socket and then holds the server."""
        self.paused = True
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.paused = False
        if self.connection is not None:
            self.connection.resume()


class HTTPClient:
    """Requests to one server; use it in one event loop and close it there."""

    def __init__(self, url: str, *, api_key_env: str = "", log: logging.Logger) -> None:
        """``api_key_env`` names the environment variable with the key that the server wants."""
        self.base = Base(url)
        self.calls: set[Call] = set()
        self._log = log
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._tls = ssl.create_default_context() if self.base.tls else None
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        self._fixed = b"\r\nhost: " + self.base.authority + b"\r\n"
        if key:
            self._fixed += b"authorization: Bearer " + key.strip().encode() + b"\r\n"
        self._closed = False

    def request(self, method: str, path: str, headers: Headers, body: bytes, receiver: Receiver) -> Call:
        """Sends a request; ``headers`` beside host, authorization and content-length."""
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        head = f"{method} {self.base.prefix}{path} HTTP/1.1".encode("ascii")
        data = b"%b%b%bcontent-length: %d\r\n\r\n%b" % (head, self._fixed, lines, len(body), body)
        call = Call(self, data, receiver, self._loop.time())
        if self._closed:
            self._loop.call_soon(call.fail, HTTPFailure("closed", "the client was closed"))
            return call
        self.calls.add(call)
        self._send(call)
        return call

    async def fetch(
        self, method: str, path: str, body: bytes = b"", *, timeout: float = 5.0
    ) -> tuple[int, bytes]:
        """A whole answer's status and body; HTTPFailure, also when it takes more than ``timeout`` seconds."""
        collector = _Collector(self._loop.create_future())
        headers = [(b"content-type", b"application/json")] if body else []
        call = self.request(method, path, headers, body, collector)
        try:
            async with asyncio.timeout(timeout):
                return await collector.done
        except TimeoutError:
            raise HTTPFailure("closed", f"no answer to {path} within {timeout:g} s") from None
        finally:
            call.abort()

    async def close(self) -> None:
        """Fails what runs and closes every connection."""
        self._closed = True
        for call in list(self.calls):
            call.fail(HTTPFailure("closed", "the client was closed"))
        tasks = list(self._connecting)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        lost = [connection.lost for connection in self._open]
        for connection in list(self._open):
            connection.abort()
        if lost:
            await asyncio.wait(lost, timeout=1.0)

    # Called by calls and connections

    def forget(self, call: Call) -> None:
        self.calls.discard(call)

    def keep(self, connection: _Connection) -> None:
        """Puts a connection whose answer is complete into the pool."""
        if self._closed or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.abort()
        else:
            self._idle.append(connection)

    def drop(self, connection: _Connection) -> None:
        """A connection has ended."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def again(self, call: Call) -> None:
        """A kept connection was closed under a call before its answer began."""
        call.retried = True
        call.connection = None
        self._connect(call)

    def _send(self, call: Call) -> None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                connection.start(call, reused=True)
                return
        self._connect(call)

    def _connect(self, call: Call) -> None:
        task = self._loop.create_task(self._connect_and_start(call))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect_and_start(self, call: Call) -> None:
        base = self.base
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await self._loop.create_connection(
                    lambda: _Connection(self),
                    base.host,
                    base.port,
                    ssl=self._tls,
                    server_hostname=base.host if base.tls else None,
                )
        except TimeoutError:
            message = f"{base.url} took no connection within {CONNECT_TIMEOUT_S:g} s"
            call.fail(HTTPFailure("connect", message))
        except OSError as error:
            call.fail(HTTPFailure("connect", f"{base.url} takes no connection: {error}"))
        else:
            if call.ended:
                self.keep(connection)
            else:
                connection.start(call, reused=False)


class _Connection(asyncio.Protocol):
    """One socket. ``_call`` owns it from its request until the end of its answer."""

    def __init__(self, client: HTTPClient) -> None:
        self.lost: asyncio.Future[None] = client._loop.create_future()
        self.usable = False
        self._client = client
        self._transport: asyncio.Transport | None = None
        self._call: Call | None = None
        self._reused = False
        self._parser = httptools.HttpResponseParser(self)
        self._headers: Headers = []
        self._head_bytes = 0
        self._parts: list[bytes] = []
        self._status = 0
        self._framed = False
        self._head_due = False
        self._complete = False
        self._excess = False
        self._keep_alive = False

    # From the loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._client._open.add(self)
        self.usable = True
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        call = self._call
        if call is None:  # nobody asked: not a peer to rely on
            self.abort()
            return
        call.heard = True
        call.heard_at = self._client._loop.time()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._fail(HTTPFailure("garbage", "the server switched protocols"))
            return
        except httptools.HttpParserError as error:
            self._flush(call)
            self._fail(HTTPFailure("garbage", f"the server sent no valid HTTP: {error}"))
            return
        self._flush(call)
        if self._complete and not call.ended:
            self._finish(call)

    def eof_received(self) -> None:
        return None  # close, and connection_lost tells the call

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self._transport = None
        self._client.drop(self)
        if not self.lost.done():
            self.lost.set_result(None)
        call, self._call = self._call, None
        if call is None or call.ended:
            return
        if not call.heard and self._reused and not call.retried:
            self._client.again(call)
        elif self._status >= 200 and not self._framed and exc is None:
            call.ended = True  # an answer without length ends with its connection
            self._client.forget(call)
            call.receiver.on_end()
        else:
            call.connection = None
            what = "in the middle of its answer" if call.heard else "without an answer"
            call.fail(HTTPFailure("closed", f"the server closed the connection {what}"))

    # From the client and the call

    def start(self, call: Call, *, reused: bool) -> None:
        assert self._transport is not None
        self._call = call
        self._reused = reused
        self._status = 0
        self._complete = False
        call.connection = self
        self._transport.write(call.data)
        if call.paused:
            self.pause()

    def abort(self) -> None:
        self.usable = False
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    # From the parser

    def on_message_begin(self) -> None:
        if self._complete:
            self._excess = True  # a second answer to one request: none of it counts
            return
        self._headers = []
        self._head_bytes = 0
        self._framed = False

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._excess:
            return
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ValueError(f"headers of more than {MAX_HEAD_BYTES} bytes")
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._excess:
            self._status = status
            self._head_due = True

    def on_body(self, data: bytes) -> None:
        if not self._excess:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        self._complete = self._status >= 200
        # the parser knows it only now
        self._keep_alive = self._parser.should_keep_alive()

    def _flush(self, call: Call) -> None:
        """Hands over what one read brought; outside the parser, whose callbacks must not raise."""
        if self._head_due:
            self._head_due = False
            call.receiver.on_head(self._status, self._headers)
        parts = self._parts
        if parts:
            self._parts = []
            if not call.ended:
                call.receiver.on_body(parts[0] if len(parts) == 1 else b"".join(parts))

    def _finish(self, call: Call) -> None:
        self._call = None
        call.ended = True
        call.connection = None
        self._client.forget(call)
        if call.paused:
            self.resume()
        if self._keep_alive and not self._excess:
            self._client.keep(self)  # the parser is as good as new after a whole message
        else:
            self.abort()
        call.receiver.on_end()

    def _fail(self, failure: HTTPFailure) -> None:
        call = self._call
        self.abort()
        if call is not None:
            call.connection = None
            call.fail(failure)


class _Collector:
    """A Receiver that waits for all of an answer."""

    def __init__(self, done: asyncio.Future[tuple[int, bytes]]) -> None:
        self.done = done
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_FETCH_BYTES:
            self.on_failed(HTTPFailure("garbage", f"an answer of more than {MAX_FETCH_BYTES} bytes"))

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result((self._status, b"".join(self._parts)))

    def on_failed(self, failure: HTTPFailure) -> None:
        if not self.done.done():
            self.done.set_exception(failure)
