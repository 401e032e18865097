"""A small HTTP server that stands in for an inference server: routes are coroutines, and it keeps books."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import httptools

from headrace.core.request import Request, SamplingParams, pack_tokens


class Caught(Exception):
    """A request that the stand-in's engine would have refused."""


class Exchange:
    """One request to a stand-in and what it answers."""

    def __init__(self, server: StandIn, writer: asyncio.StreamWriter) -> None:
        self.server = server
        self.method = ""
        self.path = ""
        self.headers: dict[str, str] = {}
        self.body = b""
        self.gone = asyncio.Event()  # the caller closed its connection
        self._writer = writer

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def raw(self, data: bytes) -> None:
        self._writer.write(data)

    def reply(self, value: Any, status: int = 200, content_type: str = "application/json") -> None:
        body = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.raw(
            b"HTTP/1.1 %d X\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n%b"
            % (status, content_type.encode(), len(body), body)
        )

    def start_stream(self) -> None:
        self.raw(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n"
            b"x-request-id: theirs\r\nx-engine: stand-in\r\n\r\n"
        )

    def chunk(self, data: bytes) -> None:
        self.raw(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, value: Any) -> None:
        self.chunk(b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n")

    def end_stream(self, *, done: bool = True) -> None:
        if done:
            self.chunk(b"data: [DONE]\n\n")
        self.raw(b"0\r\n\r\n")

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        self._writer.transport.abort()


Route = Callable[[Exchange], Awaitable[None]]


class StandIn:
    """Serves ``routes``, by path; a path without one is a 404, one with ``posts`` a 405 for GET."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.routes: dict[str, Route] = {}
        self.posts: set[str] = set()
        self.seen: list[Exchange] = []
        self.num_connections = 0
        self.errors: list[BaseException] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}"

    def page(self, path: str, value: Any, content_type: str = "application/json") -> None:
        """A page that always says the same."""

        async def answer(exchange: Exchange) -> None:
            exchange.reply(value, content_type=content_type)

        self.routes[path] = answer

    def post(self, path: str, route: Route) -> None:
        self.routes[path] = route
        self.posts.add(path)

    def of(self, path: str) -> list[Exchange]:
        return [exchange for exchange in self.seen if exchange.path == path and exchange.method == "POST"]

    async def __aenter__(self) -> StandIn:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()
        if self.errors:
            raise self.errors[0]

    async def stop(self) -> None:
        """Takes no more connections and resets those that are open."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.num_connections += 1
        try:
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await self._requests(reader, writer)
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while not writer.is_closing():
            exchange = Exchange(self, writer)
            if not await self._read(exchange, reader):
                return
            self.seen.append(exchange)
            route = self.routes.get(exchange.path)
            if route is None:
                exchange.reply({"detail": "Not Found"}, 404)
            elif exchange.path in self.posts and exchange.method == "GET":
                exchange.reply({"detail": "Method Not Allowed"}, 405)
            else:
                await self._answer(route, exchange, reader)
            await writer.drain()

    async def _answer(self, route: Route, exchange: Exchange, reader: asyncio.StreamReader) -> None:
        """Runs the route; sees the caller close while it does."""
        work = asyncio.ensure_future(route(exchange))
        watch = asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                exchange.gone.set()
                if not watch.cancelled() and watch.exception() is None and watch.result():
                    raise AssertionError("the caller pipelined")
            await work
        except Caught as error:
            exchange.reply({"error": {"message": str(error), "type": "BadRequestError", "code": 400}}, 400)
        except ConnectionError:
            exchange.gone.set()
            exchange.close()
        except Exception as error:
            self.errors.append(error)
            exchange.close()
        finally:
            for each in (work, watch):
                each.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)

    async def _read(self, exchange: Exchange, reader: asyncio.StreamReader) -> bool:
        done = False

        class Sink:
            def on_url(self, url: bytes) -> None:
                exchange.path = url.decode()

            def on_header(self, name: bytes, value: bytes) -> None:
                exchange.headers[name.decode().lower()] = value.decode()

            def on_body(self, data: bytes) -> None:
                exchange.body += data

            def on_message_complete(self) -> None:
                nonlocal done
                done = True

        parser = httptools.HttpRequestParser(Sink())
        while not done:
            data = await reader.read(65536)
            if not data:
                return False
            parser.feed_data(data)
        exchange.method = parser.get_method().decode()
        return True


async def until(condition: Callable[[], Any], what: str = "") -> None:
    """Waits for a condition; AssertionError when it does not come about."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


class Ear:
    """A Receiver that keeps what it hears."""

    def __init__(self, num_samples: int = 1) -> None:
        self.outputs: list[Any] = []
        self.failure: tuple[Any, str] | None = None
        self._left = num_samples
        self._done = asyncio.Event()

    def on_outputs(self, outputs: list[Any]) -> None:
        assert not self._done.is_set(), "nothing follows an end"
        self.outputs += outputs
        self._left -= sum(output.finish_reason is not None for output in outputs)
        if not self._left:
            self._done.set()

    def on_failed(self, error: Any, outcome: str) -> None:
        assert not self._done.is_set(), "nothing follows an end"
        self.failure = (error, outcome)
        self._done.set()

    async def wait(self) -> None:
        async with asyncio.timeout(10):
            await self._done.wait()

    def tokens(self, sample: int = 0) -> list[int]:
        return [
            token for output in self.outputs if output.sample_index == sample for token in output.token_ids
        ]


def make_request(prompt: list[int], request_id: str = "req", **fields: Any) -> Request:
    """A request with these sampling parameters; those of the Request itself by their own names."""
    own = {name: fields.pop(name) for name in ("num_output_tokens", "sample_index") if name in fields}
    fields.setdefault("seed", 7)
    return Request(
        request_id=request_id, prompt=pack_tokens(prompt), sampling=SamplingParams(**fields), **own
    )


def only(body: dict[str, Any], allowed: set[str]) -> None:
    """Caught for a field that the engine does not know, as strict engines have it."""
    unknown = set(body) - allowed
    if unknown:
        raise Caught(f"unknown fields: {sorted(unknown)}")
