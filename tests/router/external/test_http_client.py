"""The HTTP client against a server that is late, broken, or gone."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

import pytest

from headrace.core.errors import UsageError
from headrace.router.external.http_client import Base, HTTPClient, HTTPFailure
from tests.router.external.stand_in import Exchange, StandIn, until

LOG = logging.getLogger("test")


class Heard:
    def __init__(self) -> None:
        self.status = 0
        self.headers: list = []
        self.parts: list[bytes] = []
        self.ended = False
        self.failure: HTTPFailure | None = None

    def on_head(self, status, headers):
        self.status, self.headers = status, headers

    def on_body(self, data):
        self.parts.append(data)

    def on_end(self):
        assert not self.ended and self.failure is None
        self.ended = True

    def on_failed(self, failure):
        assert not self.ended and self.failure is None
        self.failure = failure


@pytest.fixture
async def server():
    async with StandIn() as server:
        yield server


@pytest.fixture
async def client(server):
    client = HTTPClient(server.url, log=LOG)
    yield client
    await client.close()


async def test_connections_are_kept_and_used_again(server, client):
    server.page("/page", {"a": 1})
    for _ in range(5):
        assert await client.fetch("GET", "/page") == (200, b'{"a": 1}')
    assert server.num_connections == 1
    assert server.seen[0].headers["host"] == f"127.0.0.1:{server.port}"


async def test_the_key_of_the_environment_is_sent(server, monkeypatch):
    monkeypatch.setenv("THE_KEY", "s3cret")
    server.page("/page", {})
    client = HTTPClient(server.url + "/v1", api_key_env="THE_KEY", log=LOG)
    await client.fetch("POST", "/page", b"{}")
    await client.close()
    assert server.seen[0].headers["authorization"] == "Bearer s3cret"
    assert server.seen[0].headers["content-length"] == "2"


async def test_a_kept_connection_that_was_closed_is_replaced_once(server, client):
    async def answer_and_close(exchange: Exchange) -> None:
        exchange.reply({"n": len(server.seen)})
        if len(server.seen) == 1:
            await exchange._writer.drain()
            exchange.close()

    server.routes["/page"] = answer_and_close
    await client.fetch("GET", "/page")
    # the client may not know yet that its kept connection is closed
    assert (await client.fetch("GET", "/page"))[0] == 200
    assert server.num_connections == 2


async def test_a_fresh_connection_that_is_closed_is_no_second_try(server, client):
    async def close(exchange: Exchange) -> None:
        exchange.close()

    server.routes["/page"] = close
    with pytest.raises(HTTPFailure) as caught:
        await client.fetch("GET", "/page")
    assert caught.value.fault == "closed"
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf", "closed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhel", "closed"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", "garbage"),
        (b"HTTP/1.1 20", "closed"),
        (b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n", "garbage"),
        (b"HTTP/1.1 200 OK\r\n" + b"".join(b"h%d: %b\r\n" % (n, b"x" * 900) for n in range(90)), "garbage"),
    ],
)
async def test_broken_answers_are_typed(server, client, answer, fault):
    async def broken(exchange: Exchange) -> None:
        exchange.raw(answer)
        await exchange._writer.drain()
        exchange.close()

    server.routes["/page"] = broken
    with pytest.raises(HTTPFailure) as caught:
        await client.fetch("GET", "/page")
    assert caught.value.fault == fault


async def test_an_answer_without_length_ends_with_its_connection(server, client):
    async def old(exchange: Exchange) -> None:
        exchange.raw(b"HTTP/1.0 200 OK\r\n\r\nall of it")
        await exchange._writer.drain()
        exchange.close()

    server.routes["/page"] = old
    assert await client.fetch("GET", "/page") == (200, b"all of it")


async def test_an_interim_answer_is_skipped(server, client):
    async def interim(exchange: Exchange) -> None:
        exchange.raw(b"HTTP/1.1 100 Continue\r\n\r\n")
        exchange.reply({"ok": True})

    server.routes["/page"] = interim
    for _ in range(2):
        assert await client.fetch("GET", "/page") == (200, b'{"ok": true}')


async def test_a_second_answer_nobody_asked_for_ends_the_connection(server, client):
    async def twice(exchange: Exchange) -> None:
        exchange.raw(
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nAHTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nB"
        )

    server.routes["/page"] = twice
    assert await client.fetch("GET", "/page") == (200, b"A")
    assert await client.fetch("GET", "/page") == (200, b"A")
    assert server.num_connections == 2


async def test_tls_with_a_certificate_that_is_trusted_and_one_that_is_not(monkeypatch):
    pem = Path(__file__).with_name("localhost.pem")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pem)
    async with StandIn(tls) as server:
        server.page("/page", {"a": 1})
        stranger = HTTPClient(server.url, log=LOG)
        with pytest.raises(HTTPFailure) as caught:
            await stranger.fetch("GET", "/page")
        assert caught.value.fault == "connect" and "certificate" in str(caught.value)
        await stranger.close()
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
        client = HTTPClient(server.url, log=LOG)
        for _ in range(3):
            assert await client.fetch("GET", "/page") == (200, b'{"a": 1}')
        await client.close()


async def test_nobody_listens():
    async with StandIn() as server:
        url = server.url
    client = HTTPClient(url, log=LOG)
    with pytest.raises(HTTPFailure) as caught:
        await client.fetch("GET", "/page")
    assert caught.value.fault == "connect"
    await client.close()


async def test_abort_closes_the_connection_at_once(server, client):
    gone = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await exchange.gone.wait()
        gone.set()

    server.post("/slow", slow)
    heard = Heard()
    call = client.request("POST", "/slow", [], b"{}", heard)
    await until(lambda: server.of("/slow"))
    call.abort()
    async with asyncio.timeout(5):
        await gone.wait()
    assert heard.failure is None and not heard.ended


async def test_abort_before_the_connection_is_made(server, client):
    server.page("/page", {})
    heard = Heard()
    client.request("GET", "/page", [], b"", heard).abort()
    await client.fetch("GET", "/page")
    assert heard.failure is None and not heard.ended and not heard.parts


async def test_a_paused_answer_holds_the_server(server, client):
    sent = 0

    async def flood(exchange: Exchange) -> None:
        nonlocal sent
        exchange.start_stream()
        for _ in range(400):
            exchange.chunk(b"x" * 65536)
            await exchange._writer.drain()
            sent += 1
        exchange.end_stream(done=False)

    server.post("/flood", flood)
    heard = Heard()
    call = client.request("POST", "/flood", [], b"{}", heard)
    await until(lambda: heard.parts)
    call.pause()
    before = -1
    while before != sent:  # until the server cannot send any more
        before = sent
        await asyncio.sleep(0.1)
    assert sent < 400
    call.resume()
    await until(lambda: heard.ended)
    assert sum(map(len, heard.parts)) == 400 * 65536


async def test_closing_fails_what_runs(server):
    async def slow(exchange: Exchange) -> None:
        await exchange.gone.wait()

    server.post("/slow", slow)
    client = HTTPClient(server.url, log=LOG)
    heard = Heard()
    client.request("POST", "/slow", [], b"{}", heard)
    await until(lambda: server.of("/slow"))
    await client.close()
    assert heard.failure is not None and heard.failure.fault == "closed"
    late = Heard()
    client.request("POST", "/slow", [], b"{}", late)
    await until(lambda: late.failure)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://user:pw@host", "http://host:99999", "http://hö"]
)
def test_urls_that_are_none(url):
    with pytest.raises(UsageError):
        Base(url)


def test_base_urls():
    assert (Base("http://h:81/v1").prefix, Base("http://h:81/v1").port) == ("", 81)
    assert (Base("https://api.example/openai/v1/").prefix, Base("https://api.example").port) == (
        "/openai",
        443,
    )
    assert Base("http://[::1]:8000").host == "::1"
