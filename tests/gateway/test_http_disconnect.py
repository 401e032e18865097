"""Callers that go, half or wholly, and servers that stop."""

from __future__ import annotations

import socket
import struct

import pytest

from tests.gateway.door import GET, HOLD, STREAM, Door, post, talking


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


@pytest.mark.parametrize("path", [b"/hold", b"/stream"])
@pytest.mark.parametrize("how", ["close", "reset"])
def test_a_caller_that_goes_is_noticed(door, path, how):
    with talking(door, GET.replace(b"/a", path)) as caller:
        door.wait_for(lambda: door.exchanges, "request running")
        if how == "reset":
            reset(caller.sock)
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")
    exchange = door.exchanges[0]
    assert exchange.disconnected
    door.do(lambda: exchange.send_events(b"data: more\n\n", last=True) if path == b"/stream" else None)
    door.do(lambda: exchange.send_json(b"{}") if path == b"/hold" else None)


def test_a_caller_that_goes_is_noticed_behind_unsent_bytes(door):
    with door.connect(receive_buffer=4096) as caller:
        caller.send(STREAM)
        door.wait_for(lambda: door.exchanges, "stream running")
        door.do(lambda: door.exchanges[0].send_events(b"x" * (16 << 20)))
        assert door.exchanges[0].unsent_bytes() > 0
        assert door.events == []
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")


def test_a_caller_that_goes_with_a_pipeline_is_noticed(door):
    with talking(door, HOLD + GET + post(b"x")):
        door.wait_for(lambda: door.exchanges, "request running")
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")
    assert len(door.exchanges) == 1


def test_a_caller_that_goes_within_its_body_is_noticed(door):
    with talking(door, b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhello"):
        door.wait_for(lambda: door.exchanges, "head handled")
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")


def test_watching_a_caller_that_has_gone_tells_at_once(door):
    with talking(door, HOLD):
        door.wait_for(lambda: door.exchanges, "request running")
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")
    door.do(lambda: door.exchanges[0].watch(lambda: door.events.append("told")))
    assert door.events == ["gone", "told"]


def test_half_closing_counts_as_a_disconnect_and_is_told(door):
    with talking(door, HOLD) as caller:
        door.wait_for(lambda: door.exchanges, "request running")
        caller.sock.shutdown(socket.SHUT_WR)
        reply = caller.reply()
        assert (reply.status, reply.code) == (400, "half_closed")
        assert caller.end() == b""
    assert door.events == ["gone"]


def test_half_closing_within_a_stream_ends_it_with_an_error_event(door):
    with talking(door, STREAM) as caller:
        door.wait_for(lambda: door.exchanges, "request running")
        caller.sock.shutdown(socket.SHUT_WR)
        body = caller.reply().body
        assert body.startswith(b'data: first\n\ndata: {"error":')
        assert b"half_closed" in body
        assert caller.end() == b""
    assert door.events == ["gone"]


def test_half_closing_after_a_request_that_is_answered_at_once(door):
    with talking(door, GET.replace(b"/a", b"/ignore")) as caller:
        caller.sock.shutdown(socket.SHUT_WR)
        assert caller.reply().json == {"ignored": True}
        assert caller.end() == b""


def test_stopping_closes_idle_connections_and_finishes_the_others():
    with Door() as door, door.connect() as silent, talking(door, GET) as idle:
        assert idle.reply().status == 200
        with (
            talking(door, HOLD) as held,
            talking(door, b"GET /a HTTP/1.1\r\n") as late,
        ):
            door.wait_for(lambda: len(door.exchanges) == 2, "request running")
            door.do(door.server.stop)
            assert (idle.end(), silent.end()) == (b"", b"")
            door.do(lambda: door.exchanges[1].send_json(b"1"))
            reply = held.reply()
            assert (reply.json, reply.headers["connection"]) == (1, "close")
            assert held.end() == b""
            late.send(b"host: x\r\n\r\n")
            assert late.reply().headers["connection"] == "close"
            assert late.end() == b""
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", door.port))
