"""The HTTP server alone, with handlers that echo, hold, stream or ignore, and raw sockets to talk to it."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvloop

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.core.knobs import GatewayConfig
from headrace.gateway.exchange import Disconnected, Exchange
from headrace.gateway.protocol import Limits
from headrace.gateway.server import HttpServer, bind_socket

MAX_BODY = 1 << 20
H = b"host: x\r\n"
GET = b"GET /a HTTP/1.1\r\n" + H + b"\r\n"
HOLD = GET.replace(b"/a", b"/hold")
STREAM = GET.replace(b"/a", b"/stream")


class Door:
    """A server in a thread of its own; ``events`` tells what its handlers saw."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.events: list[str] = []
        self.refused: list[int] = []
        self.exchanges: list[Exchange] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: uvloop.run(self._serve()), name="door")

    def __enter__(self) -> Door:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self._end.set)
        self._thread.join(20)
        assert not self._thread.is_alive(), "the server did not stop"

    async def _serve(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._end = asyncio.Event()
        self.server = HttpServer(self._handle, limits=self.limits, refused=self.refused.append)
        with bind_socket(GatewayConfig(port=0)) as sock:
            self.port = sock.getsockname()[1]
            await self.server.start(sock)
            self._ready.set()
            await self._end.wait()
            await self.server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handle(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)
        if exchange.path == "/ignore":
            exchange.send_json(b'{"ignored":true}')
        elif exchange.path == "/hold":
            exchange.watch(lambda: self.events.append("gone"))
        elif exchange.path == "/stream":
            exchange.watch(lambda: self.events.append("gone"))
            exchange.start_events(b"data: first\n\n")
        elif exchange.path == "/raw":
            exchange.start_raw(201, [(b"x-theirs", b"1"), (b"connection", b"close"), (b"date", b"then")])
            exchange.send_raw(b"one")
            exchange.send_raw(b"two", last=True)
        elif exchange.path == "/sized":
            exchange.start_raw(200, [(b"content-length", b"6")])
            exchange.send_raw(b"one")
            exchange.send_raw(b"two", last=True)
        else:
            task = self.loop.create_task(self._echo(exchange))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _echo(self, exchange: Exchange) -> None:
        try:
            body = await exchange.read_body(MAX_BODY)
        except Disconnected:
            self.events.append("gone")
            return
        except HeadraceError as error:
            exchange.fail(error)
            return
        seen = {
            "method": exchange.method,
            "path": exchange.path,
            "query": exchange.query.decode(),
            "headers": [[name.decode(), value.decode("latin-1")] for name, value in exchange.headers],
            "body": body.decode("latin-1"),
        }
        exchange.send_json(json.dumps(seen).encode())

    def forget(self) -> None:
        """Waits for the ends of earlier connections, and forgets what they did."""
        self.wait_for(lambda: not self.server.num_connections, "earlier connections closed")
        self.events.clear()
        self.refused.clear()
        self.exchanges.clear()

    def do(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` in the server's loop."""

        async def run() -> Any:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(20)

    def wait_for(self, condition: Callable[[], Any], what: str) -> None:
        async def poll() -> None:
            async with asyncio.timeout(15):
                while not condition():
                    await asyncio.sleep(0.002)

        try:
            asyncio.run_coroutine_threadsafe(poll(), self.loop).result(20)
        except TimeoutError:
            raise AssertionError(f"never became true: {what}") from None

    def connect(self, receive_buffer: int | None = None) -> Caller:
        return Caller(self.port, receive_buffer)

    def talk(self, *parts: bytes) -> Caller:
        """A connection on which these bytes have been sent."""
        caller = self.connect()
        for part in parts:
            caller.sock.sendall(part)
        return caller

    def fail_current(self) -> None:
        """Ends the newest exchange as an engine's failure would."""
        self.do(lambda: self.exchanges[-1].fail(UnavailableError("the engine went away")))


def post(body: bytes, *lines: bytes, path: bytes = b"/a") -> bytes:
    """A request with a body of announced length."""
    head = [b"POST %b HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def chunked(*lines: bytes, path: bytes = b"/a") -> bytes:
    """A request with a chunked body, as raw as it is given."""
    return b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % path + b"".join(lines)


@contextmanager
def talking(door: Door, *parts: bytes) -> Iterator[Caller]:
    with door.talk(*parts) as caller:
        yield caller


class Reply:
    """One response as it stood on the wire."""

    def __init__(self, status: int, headers: list[tuple[str, str]], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers}
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error in OpenAI's shape."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return str(error["code"])


class Caller:
    """A raw connection; replies are read one by one, as strictly as http.client does."""

    def __init__(self, port: int, receive_buffer: int | None = None) -> None:
        self.sock = socket.socket()
        self.sock.settimeout(20)
        if receive_buffer is not None:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.connect(("127.0.0.1", port))
        self._file = self.sock.makefile("rb")

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()
        self.sock.close()

    def send(self, data: bytes) -> None:
        self.sock.sendall(data)

    def line(self) -> bytes:
        return self._file.readline()

    def reply(self, method: str = "GET") -> Reply:
        response = http.client.HTTPResponse(_Shared(self._file), method=method)  # type: ignore[arg-type]
        response.begin()
        return Reply(response.status, response.getheaders(), response.read())

    def end(self) -> bytes:
        """What is left until the server closes."""
        return self._file.read()

    def is_open(self) -> bool:
        """Whether the connection still serves: asks something and gets an answer."""
        self.send(b"GET /still HTTP/1.1\r\nhost: x\r\n\r\n")
        return self.reply().json["path"] == "/still"


class _Shared:
    """Gives http.client the one buffered file of a connection, so that replies can follow each other."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def makefile(self, mode: str) -> Any:
        return _Unclosed(self._file)


class _Unclosed:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        pass
