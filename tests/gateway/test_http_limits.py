"""Callers that send too much, too slowly, or do not read."""

from __future__ import annotations

import http.client
from collections.abc import Iterator

import pytest

from headrace.gateway.protocol import Limits
from tests.gateway.door import GET, HOLD, STREAM, Door, talking

FAST = Limits(
    head_timeout_s=0.2,
    body_timeout_s=0.2,
    idle_timeout_s=0.2,
    flush_timeout_s=0.2,
    stall_timeout_s=0.2,
    linger_s=0.2,
    sweep_s=0.05,
)


@pytest.fixture(scope="module")
def shared_hasty() -> Iterator[Door]:
    with Door(FAST) as door:
        yield door


@pytest.fixture
def hasty(shared_hasty: Door) -> Door:
    """A server whose patience is short."""
    shared_hasty.forget()
    return shared_hasty


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 70_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 128 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx-big: " + b"a" * 1_000_000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"x-small: a\r\n" * 100_000, 431),
        (b"GET /" + b"a" * 1_000_000, 431),
        (b"\r\n" * 500_000, 431),
    ],
    ids=["target", "header", "headers", "endless header", "endless headers", "endless target", "nothing"],
)
def test_heads_have_limits(door, raw, status):
    with door.connect() as caller:
        try:
            caller.send(raw)
        except OSError:
            assert len(raw) > 500_000
        reply = caller.reply()
        assert (reply.status, reply.code) == (status, "invalid_http")
        assert caller.end() == b""
    assert door.exchanges == []
    assert door.refused == [status]


def test_heads_at_their_limits_are_accepted(door):
    headers = b"a: b\r\n" * 126 + b"x-big: " + b"a" * 65_000 + b"\r\n"
    with talking(door, b"GET /" + b"a" * 16_000 + b" HTTP/1.1\r\nhost: x\r\n" + headers + b"\r\n") as caller:
        assert len(caller.reply().json["headers"]) == 128
        assert caller.is_open()


def test_a_slow_head_gets_408(hasty):
    with talking(hasty, b"GET /a HTTP/1.1\r\nhost: ") as caller:
        reply = caller.reply()
        assert reply.status == 408
        assert caller.end() == b""
    assert hasty.refused == [408]


def test_a_slow_head_behind_a_running_request_does_not_end_it(hasty):
    with talking(hasty, HOLD + b"GET /a HTTP/1.1\r\n") as caller:
        hasty.wait_for(lambda: hasty.exchanges, "first request running")
        started = hasty.loop.time()
        hasty.wait_for(lambda: hasty.loop.time() > started + 0.4, "several sweeps later")
        hasty.do(lambda: hasty.exchanges[0].send_json(b"1"))
        assert caller.reply().json == 1
        assert caller.reply().status == 408


def test_a_slow_body_gets_an_error(hasty):
    with talking(hasty, b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhello") as caller:
        reply = caller.reply()
        assert (reply.status, reply.code) == (400, "body_timeout")


def test_a_slow_body_nobody_reads_is_cut(hasty):
    with talking(hasty, b"POST /ignore HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhello") as caller:
        assert caller.reply().status == 200
        assert caller.end() == b""


def test_an_idle_connection_is_closed(hasty):
    with hasty.connect() as silent, talking(hasty, GET) as caller:
        assert caller.reply().status == 200
        assert caller.end() == b""
        assert silent.end() == b""


def test_a_refused_caller_that_goes_on_sending_reads_why(hasty):
    with talking(hasty, b"nonsense\r\n\r\n") as caller:
        hasty.wait_for(lambda: hasty.refused, "refused")
        caller.send(b"x" * 10_000)
        assert caller.reply().status == 400
        assert caller.end() == b""


def test_a_reader_that_never_fetches_a_complete_answer_is_cut(hasty):
    with hasty.connect(receive_buffer=4096) as caller:
        caller.send(HOLD)
        hasty.wait_for(lambda: hasty.exchanges, "request running")
        hasty.do(lambda: hasty.exchanges[0].send_json(b"1" * (16 << 20)))
        assert hasty.exchanges[0].unsent_bytes() > 0
        hasty.wait_for(lambda: hasty.exchanges[0].unsent_bytes() == 0, "connection cut")
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            caller.reply()


def test_a_reader_that_stalls_in_a_stream_is_cut(hasty):
    with hasty.connect(receive_buffer=4096) as caller:
        caller.send(STREAM)
        hasty.wait_for(lambda: hasty.exchanges, "stream running")
        hasty.do(lambda: hasty.exchanges[0].send_events(b"x" * (16 << 20)))
        hasty.wait_for(lambda: hasty.events == ["gone"], "connection cut")


def test_a_reader_that_takes_something_from_time_to_time_is_not_cut(door):
    with door.connect(receive_buffer=4096) as caller:
        caller.send(STREAM)
        door.wait_for(lambda: door.exchanges, "stream running")
        exchange = door.exchanges[0]
        connection = exchange._connection
        door.do(lambda: exchange.send_events(b"x" * (32 << 20)))
        for _ in range(3):  # each time is as if the deadline had passed
            door.do(lambda: connection.expire(door.loop.time()))
            before = exchange.unsent_bytes()
            while exchange.unsent_bytes() == before:
                assert caller.sock.recv(1 << 18)
        assert door.events == []
        door.wait_for(
            lambda: connection.expire(door.loop.time()) or door.events == ["gone"], "connection cut"
        )
