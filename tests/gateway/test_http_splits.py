"""However the network cuts bytes up, whole or mutilated: the same requests come out, and nothing breaks."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from headrace.core.errors import HeadraceError
from headrace.gateway.exchange import Disconnected, Exchange
from headrace.gateway.protocol import HttpConnection, Limits

LIMIT = 1000
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
REQUESTS = [
    b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"POST /b?x HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello",
    b"POST /c HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3;e=1\r\nabc\r\n0\r\nt: 1\r\n\r\n",
    b"POST /d HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"content-length: 3\r\n\r\nabc",
    b"POST /e HTTP/1.1\r\nhost: x\r\n" + UPGRADE + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    b"GET /f HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    b"\r\n",
    b"POST /g HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n" + b"y" * 2000,
    b"PUT /h HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\nab",
    b"GET /i HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
]
NOISE = b"\r\n :;,\0\t0519aZ\xff-+"


class Wire:
    """A transport that takes everything at once."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False

    def write(self, data: bytes) -> None:
        assert not self.closing
        self.written += data

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def close(self) -> None:
        self.closing = True

    abort = close


class Recorder:
    """A host that reads every body and notes what it was given."""

    limits = Limits()
    date = b"date: then\r\n"
    stopping = False

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.num_handled = 0
        self.tasks: list[asyncio.Task[None]] = []

    def opened(self, connection: HttpConnection) -> None:
        pass

    def closed(self, connection: HttpConnection) -> None:
        pass

    def refused(self, status: int) -> None:
        assert 400 <= status < 500

    def handle(self, exchange: Exchange) -> None:
        self.num_handled += 1
        self.tasks.append(asyncio.get_running_loop().create_task(self._answer(exchange)))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            body = await exchange.read_body(LIMIT)
        except Disconnected:
            return
        except HeadraceError as error:
            exchange.fail(error)
            return
        self.seen.append((exchange.method, exchange.path, exchange.query, body))
        exchange.send_json(b"{}")


async def settle(recorder: Recorder) -> None:
    """Lets handlers run for as long as answering one begins another."""
    num_handled = -1
    while num_handled != recorder.num_handled:
        num_handled = recorder.num_handled
        for _ in range(4):
            await asyncio.sleep(0)


async def parse(raw: bytes, cuts: list[int]) -> list[tuple[Any, ...]]:
    """The requests that come out of ``raw``, cut at these places; the caller then goes."""
    recorder, wire = Recorder(), Wire()
    connection = HttpConnection(recorder)
    connection.connection_made(wire)  # type: ignore[arg-type]
    start = 0
    for end in [*cuts, len(raw)]:
        if wire.closing:
            break
        connection.data_received(raw[start:end])
        start = end
        await settle(recorder)
    if not wire.closing:
        connection.eof_received()
    connection.connection_lost(None)
    await asyncio.wait_for(asyncio.gather(*recorder.tasks), 10)
    return recorder.seen


def mutilated(raw: bytes, generator: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(generator.randint(1, 3)):
        place = generator.randrange(len(data) + 1)
        length = generator.choice([0, 0, 1, 3])
        data[place : place + length] = bytes([generator.choice(NOISE)]) * generator.randint(0, 1)
    return bytes(data)


@pytest.mark.parametrize("whole", [True, False])
async def test_the_same_requests_come_out_however_they_are_cut(whole):
    generator = random.Random(7)
    for _ in range(300):
        raw = b"".join(generator.choices(REQUESTS, k=generator.randint(1, 5)))
        if not whole:
            raw = mutilated(raw, generator)
        places = min(len(raw), generator.randint(1, 12))
        cuts = sorted(generator.sample(range(len(raw)), places))
        at_once = await parse(raw, [])
        assert await parse(raw, cuts) == at_once, (raw, cuts)


async def test_a_pipeline_of_all_kinds_comes_out_whole():
    seen = await parse(b"".join(REQUESTS), [])
    assert [(method, path, body) for method, path, _, body in seen] == [
        ("GET", "/a", b""),
        ("POST", "/b", b"hello"),
        ("POST", "/c", b"abc"),
        ("POST", "/d", b"abc"),
        ("POST", "/e", b"a"),
        ("GET", "/f", b""),
        ("PUT", "/h", b"ab"),
        ("GET", "/i", b""),
    ]
