"""Our end of a TCP connection: HTTP/1.1 and 1.0 on asyncio, parsed by httptools.

    data ──► parser ──► queue of exchanges ──► current ──► host.handle ──► Exchange writes to the transport
                          (pipeline)         (one at a time)

What is decided here:

- A request is handled when its head is complete, one at a time; pipelined ones wait in order. When too many
  wait, or too much of their bodies, reading pauses. (Only then is a disconnect noticed late: at the next
  write, or when the running request has ended.)
- End of file is a disconnect, also when only the caller's sending side was shut down: nothing at that moment
  tells a caller that has gone from one that still listens, and work for nobody is the costlier mistake. The
  engine's work is aborted at once. As a half-closed caller may still read, it is told what happened: an
  error, or an error event in a stream.
- Two parties must never see different requests in the same bytes. Whatever is ambiguous gets a 400 and a
  closed connection: the parser refuses bare line feeds, folded headers, spaces before a colon, repeated
  or broken lengths, both ``Content-Length`` and ``Transfer-Encoding``, bad chunk sizes; here are refused
  transfer codings other than ``chunked``, any of them in HTTP/1.0, versions other than 1.0 and 1.1,
  CONNECT, and a missing or repeated ``Host``.
- An ``Upgrade`` is ignored, as RFC 9110 allows, and the body that comes with it is read.
- A body that was answered before it arrived (413, 429) is read and dropped, so that an ordinary client gets
  to the answer; one that goes on for ever is cut.
- Who sends or reads too slowly is found by a sweep over all connections, once a second, rather than by a
  timer for each.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol
from urllib.parse import unquote_to_bytes

import httptools

from headrace.core.errors import HeadraceError, InvalidRequestError
from headrace.gateway.errors import Headers, encode_error
from headrace.gateway.exchange import Exchange

NEVER = float("inf")
_KIND = "invalid_request_error"
_TRANSFER_ENCODING = b"transfer-encoding"
_CONTENT_LENGTH = b"content-length"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one connection; sizes in bytes, times in seconds."""

    target_bytes: int = 16 * 1024
    header_bytes: int = 64 * 1024
    num_headers: int = 128
    pipelined_requests: int = 16
    pipelined_bytes: int = 256 * 1024
    discarded_bytes: int = 256 * 1024 * 1024
    head_timeout_s: float = 30.0
    """From a request's first byte to the end of its headers."""
    body_timeout_s: float = 60.0
    idle_timeout_s: float = 75.0
    flush_timeout_s: float = 30.0
    """Time in which a reader must take something of a response that is complete."""
    stall_timeout_s: float = 300.0
    """Time in which a reader must take something of a response that is held back for it."""
    linger_s: float = 5.0
    """Time in which a refused caller's bytes are dropped, so that it can read why."""
    sweep_s: float = 1.0


class Host(Protocol):
    """What a connection needs of the server it belongs to."""

    limits: Limits
    date: bytes
    """The header line, its end included."""
    stopping: bool

    def handle(self, exchange: Exchange) -> None:
        """Answers, now or later; raises nothing."""

    def opened(self, connection: HttpConnection) -> None: ...
    def closed(self, connection: HttpConnection) -> None: ...
    def refused(self, status: int) -> None:
        """A request that never became one was answered with ``status``."""


class _Refusal(Exception):
    """Why a head is not accepted; ends the parser's work."""

    def __init__(self, status: int, message: str, code: str = "invalid_http") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code


class HttpConnection(asyncio.Protocol):
    """Parses requests, hands them over one at a time, and keeps the connection's manners."""

    transport: asyncio.Transport
    write: Callable[[bytes], None]

    def __init__(self, host: Host) -> None:
        self.limits = host.limits
        self.deadline = NEVER
        self.write_paused = False
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._queue: deque[Exchange] = deque()
        self._current: Exchange | None = None
        self._incoming: Exchange | None = None  # its head is complete, its body is not
        self._refusal: _Refusal | None = None  # sent when everything before it is answered
        self._target = b""
        self._headers: Headers = []
        self._in_head = False
        self._replaying = False  # a head of our own making, see _without_upgrade
        self._upgrading = False
        self._deaf = False  # what comes is dropped
        self._advancing = False
        self._read_paused = False
        self._moved = False
        self._stalled_bytes = 0  # since a message began, went on with its body, or ended
        self._discarded_bytes = 0
        self._unsent = 0

    # What an exchange needs

    @property
    def date(self) -> bytes:
        return self._host.date

    @property
    def stopping(self) -> bool:
        return self._host.stopping

    def unsent_bytes(self) -> int:
        return self.transport.get_write_buffer_size()

    def abort(self) -> None:
        """Closes the connection without waiting for its reader."""
        self.transport.abort()

    def finish(self, exchange: Exchange) -> None:
        """The response of ``exchange`` is written; goes on to what comes next."""
        if exchange is not self._current:
            return  # the caller had gone
        self._current = None
        if not exchange.keep_alive:
            self._queue.clear()
            self._refusal = None
            self._close(linger=not exchange.body_complete)
        elif exchange is self._incoming:
            self._discarded_bytes = 0
            self.deadline = self._loop.time() + self.limits.body_timeout_s
        else:
            self._advance()

    # What asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.write = transport.write
        self.deadline = self._loop.time() + self.limits.idle_timeout_s
        self._host.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._deaf = True
        self._queue.clear()
        current, self._current = self._current, None
        self._host.closed(self)
        if current is not None:
            current.lose()

    def eof_received(self) -> None:
        """Returns None: the transport writes what it holds, and closes."""
        self._deaf = True
        self._queue.clear()
        self.deadline = self._loop.time() + self.limits.flush_timeout_s
        current, self._current = self._current, None
        if current is not None:
            current.lose_half()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._current is not None:
            self._watch_reader()
            self._current.pause()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._current is not None:
            self.deadline = NEVER
            self._current.resume()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._discard(len(data))
            return
        self._moved = False
        rest: bytes | memoryview = data
        try:
            while True:
                try:
                    self._parser.feed_data(rest)
                    break
                except httptools.HttpParserUpgrade as upgrade:
                    rest = memoryview(rest)[upgrade.args[0] :]
                    self._without_upgrade()
            if not self._moved:
                self._stalled_bytes += len(data)
                if self._stalled_bytes > self.limits.header_bytes:
                    raise _Refusal(431, f"headers longer than {self.limits.header_bytes} bytes")
        except _Refusal as refusal:
            self._refuse(refusal)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, _Refusal):
                raise
            self._refuse(cause)
        except httptools.HttpParserError as error:
            self._refuse(_Refusal(400, f"malformed request: {error}"))
        if self._current is None:
            self._advance()
        self._throttle()

    # What the parser calls

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        self._moved = self._in_head = True
        self._stalled_bytes = 0
        self._target = b""
        self._headers = []
        if self._current is None:
            self.deadline = self._loop.time() + self.limits.head_timeout_s

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # and not in a trailer
            self._headers.append((name.lower(), value.strip()))

    def on_headers_complete(self) -> None:
        if self._replaying:
            self._replaying = False
            return
        self._in_head = False
        exchange = self._exchange()
        self._incoming = exchange
        self._queue.append(exchange)

    def on_body(self, data: bytes) -> None:
        self._moved = True
        self._stalled_bytes = 0
        exchange = self._incoming
        if exchange is None:
            return
        exchange.feed_body(data)
        if exchange.ended:
            self._discard(len(data))

    def on_message_complete(self) -> None:
        if self._upgrading:
            return  # its body follows
        self._moved = True
        self._stalled_bytes = 0
        exchange, self._incoming = self._incoming, None
        if exchange is not None:
            exchange.complete_body()

    # Requests

    def _exchange(self) -> Exchange:
        """The request whose head is complete; raises _Refusal."""
        limits = self.limits
        headers = self._headers
        size = num_hosts = 0
        length: int | None = 0
        authorization = request_id = expect = None
        for name, value in headers:
            size += len(name) + len(value)
            if name == b"host":
                num_hosts += 1
            elif name == _CONTENT_LENGTH:
                length = int(value)  # digits, the parser has seen to it
            elif name == _TRANSFER_ENCODING:
                if value.lower() != b"chunked":
                    raise _Refusal(400, "the only transfer coding accepted is chunked")
                length = None
            elif name == b"authorization":
                authorization = value
            elif name == b"x-request-id":
                request_id = value
            elif name == b"expect":
                expect = value
        if len(self._target) > limits.target_bytes:
            raise _Refusal(414, f"the request target is longer than {limits.target_bytes} bytes")
        if size > limits.header_bytes:
            raise _Refusal(431, f"headers longer than {limits.header_bytes} bytes")
        if len(headers) > limits.num_headers:
            raise _Refusal(431, f"{len(headers)} headers, at most {limits.num_headers} are accepted")
        parser = self._parser
        version = parser.get_http_version()
        if version == "1.1":
            if num_hosts != 1:
                raise _Refusal(400, f"{num_hosts} Host headers, exactly one is needed")
        elif version != "1.0":
            raise _Refusal(400, f"HTTP/{version} is not spoken here, HTTP/1.1 is")
        elif length is None:
            raise _Refusal(400, "HTTP/1.0 knows no Transfer-Encoding")
        method = parser.get_method().decode()
        if method == "CONNECT":
            raise _Refusal(400, "this server is no proxy: CONNECT is refused")
        path, query = _split(self._target)
        exchange = Exchange(self, method, path, query, headers, authorization, request_id)
        exchange.announce_body(length)
        exchange.keep_alive = parser.should_keep_alive()
        if version == "1.0":
            exchange.http10 = True
        elif expect is not None:
            if expect.lower() != b"100-continue":
                raise _Refusal(417, "the only expectation that can be met is 100-continue")
            exchange.expects_continue = length != 0
        if parser.should_upgrade():
            self._upgrading = True
        return exchange

    def _without_upgrade(self) -> None:
        """Goes on with the body of a request that asked to speak another protocol.

        The parser takes what follows such a head for the other protocol; a new one is told of a request
        with a body of the same length instead.
        """
        exchange = self._incoming
        assert exchange is not None
        self._upgrading = False
        self._replaying = True
        self._parser = httptools.HttpRequestParser(self)
        framing = [line for line in exchange.headers if line[0] in (_CONTENT_LENGTH, _TRANSFER_ENCODING)]
        self._parser.feed_data(
            b"POST / HTTP/1.1\r\n%b\r\n" % b"".join([b"%b: %b\r\n" % line for line in framing])
        )

    def _advance(self) -> None:
        """Hands the next request over; with none left, says why nothing more is taken."""
        if self._advancing:
            return
        self._advancing = True
        while self._current is None and self._queue:
            exchange = self._queue.popleft()
            if exchange.body_complete:
                exchange.expects_continue = False
            self._current = exchange
            self.deadline = NEVER
            if self.write_paused:
                self._watch_reader()
            self._host.handle(exchange)
        self._advancing = False
        self._throttle()
        if self._current is not None or self.transport.is_closing() or self._incoming is not None:
            return
        if self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self.stopping and not self._in_head:
            self._close(linger=False)
        elif not self._deaf:
            limits = self.limits
            self._unsent = self.unsent_bytes()
            if self._unsent:
                wait = limits.flush_timeout_s
            else:
                wait = limits.head_timeout_s if self._in_head else limits.idle_timeout_s
            self.deadline = self._loop.time() + wait

    def _throttle(self) -> None:
        """Stops reading while too much is waiting behind the running request."""
        queue = self._queue
        full = bool(queue) and (
            len(queue) >= self.limits.pipelined_requests
            or queue[-1].buffered_bytes > self.limits.pipelined_bytes
        )
        if full is not self._read_paused and not self.transport.is_closing():
            self._read_paused = full
            if full:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    # Refusals and the end

    def _refuse(self, refusal: _Refusal) -> None:
        """Takes nothing more; a request whose body was malformed is told, if it runs already."""
        self._deaf = True
        self._in_head = False
        exchange, self._incoming = self._incoming, None
        if exchange is None:
            self._refusal = refusal
            return
        exchange.keep_alive = False
        if exchange is self._current:
            exchange.fail_body(InvalidRequestError(refusal.message, code=refusal.code))
        elif self._queue and self._queue[-1] is exchange:
            self._queue.pop()
            self._refusal = refusal
        else:  # answered already
            self._close(linger=True)

    def _send_refusal(self, refusal: _Refusal) -> None:
        self._refusal = None
        self._host.refused(refusal.status)
        body = encode_error(refusal.message, _KIND, None, refusal.code)
        exchange = Exchange(self, "", "", b"", [], None, None)
        exchange.keep_alive = False
        self._current = exchange
        exchange.send_json(body, refusal.status)

    def _close(self, *, linger: bool) -> None:
        """Closes once everything is written; first lets a caller that is still sending read the answer.

        Closing a socket with unread data resets the connection, and the answer may be lost with it.
        """
        self._deaf = True
        self._throttle()
        if linger:
            self._discarded_bytes = 0
            self.deadline = self._loop.time() + self.limits.linger_s
            if self.transport.can_write_eof():
                self.transport.write_eof()
        else:
            self._unsent = self.unsent_bytes()
            self.deadline = self._loop.time() + self.limits.flush_timeout_s
            self.transport.close()

    def _discard(self, size: int) -> None:
        self._discarded_bytes += size
        if self._discarded_bytes > self.limits.discarded_bytes:
            self.transport.abort()

    def stop(self) -> None:
        """The server stops: an idle connection closes now, another after the running response."""
        if self._current is None and not self._in_head and self._incoming is None and not self._deaf:
            self._close(linger=False)

    def fail_body(self, error: HeadraceError) -> None:
        """Whoever waits for the rest of the running request's body gets ``error``."""
        if self._current is not None and not self._current.body_complete:
            self._current.fail_body(error)

    def _watch_reader(self) -> None:
        """From now on the reader of the running response has to take something from time to time."""
        self._unsent = 0
        self.deadline = self._loop.time() + self.limits.stall_timeout_s

    def expire(self, now: float) -> None:
        """The deadline has passed, in seconds of the loop's clock."""
        limits = self.limits
        unsent = self.unsent_bytes()
        if unsent and (not self._unsent or unsent < self._unsent):
            self._unsent = unsent
            running = self._current is not None
            self.deadline = now + (limits.stall_timeout_s if running else limits.flush_timeout_s)
        elif self._current is not None:
            self.transport.abort()
        elif self._in_head and not self._deaf:
            self._refuse(_Refusal(408, f"the headers did not arrive within {limits.head_timeout_s:g} s"))
            self._advance()
        elif unsent or self._deaf or self._incoming is not None:
            self.transport.abort()
        else:
            self._close(linger=False)


def _split(target: bytes) -> tuple[str, bytes]:
    """Decoded path and raw query of a request target; raises _Refusal."""
    if not target.startswith(b"/"):
        if target == b"*":
            return "*", b""
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserInvalidURLError:
            raise _Refusal(400, "malformed request target") from None
        return _decoded(url.path or b"/"), url.query or b""
    path, _, query = target.partition(b"#")[0].partition(b"?")
    return _decoded(path), query


def _decoded(path: bytes) -> str:
    if b"%" in path:
        path = unquote_to_bytes(path)
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise _Refusal(400, "the path is not UTF-8") from None
