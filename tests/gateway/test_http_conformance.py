"""HTTP as it comes on the wire: targets, bodies, pipelines, and what keeps a connection open."""

from __future__ import annotations

import socket

import pytest

from headrace.gateway.protocol import Limits
from tests.gateway.door import GET, HOLD, MAX_BODY, STREAM, Door, H, chunked, post, talking


def test_what_a_handler_sees(door):
    with talking(
        door, b"PUT /p%C3%A4th/x%2Fy?a=1&b=%20#no HTTP/1.1\r\nHost: x\r\nX-One: \t a b \r\n\r\n"
    ) as c:
        seen = c.reply().json
    assert (seen["method"], seen["path"], seen["query"]) == ("PUT", "/päth/x/y", "a=1&b=%20")
    assert seen["headers"] == [["host", "x"], ["x-one", "a b"]]


def test_a_reply_has_date_and_request_id(door):
    with talking(door, b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: mine\r\n\r\n", GET) as caller:
        first, second = caller.reply(), caller.reply()
    assert first.headers["x-request-id"] == "mine"
    assert len(second.headers["x-request-id"]) == 32
    assert first.headers["date"].endswith(" GMT")
    assert "connection" not in first.headers


@pytest.mark.parametrize("value", [b"a b", b"x" * 129, b"a\xff", b"{}"])
def test_a_request_id_that_is_not_sane_is_replaced(door, value):
    with talking(door, b"GET / HTTP/1.1\r\nhost: x\r\nx-request-id: " + value + b"\r\n\r\n") as caller:
        assert len(caller.reply().headers["x-request-id"]) == 32


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://example.org:80/x/y?z=1", "/x/y", "z=1"),
        (b"http://example.org", "/", ""),
        (b"*", "*", ""),
        (b"//x", "//x", ""),
        (b"/a%00b", "/a\0b", ""),
        (b"/?", "/", ""),
    ],
)
def test_request_targets(door, target, path, query):
    with talking(door, b"OPTIONS " + target + b" HTTP/1.1\r\n" + H + b"\r\n") as caller:
        seen = caller.reply().json
    assert (seen["path"], seen["query"]) == (path, query)


def test_a_request_that_comes_byte_by_byte(door):
    raw = chunked(b"5;ext=1\r\nhello\r\n", b"6\r\n world\r\n", b"0\r\nx-trailer: 1\r\n\r\n")
    with door.connect() as caller:
        caller.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for index in range(len(raw)):
            caller.send(raw[index : index + 1])
        seen = caller.reply().json
        assert seen["body"] == "hello world"
        assert [name for name, _ in seen["headers"]] == ["host", "transfer-encoding"], "no trailers"
        assert caller.is_open()


@pytest.mark.parametrize("size", [0, 1, 70_000, MAX_BODY])
@pytest.mark.parametrize("how", ["length", "chunked"])
def test_bodies(door, size, how):
    body = b"x" * size
    parts = [body[start : start + 5000] for start in range(0, size, 5000)]
    chunks = b"".join([b"%x\r\n%b\r\n" % (len(part), part) for part in parts])
    raw = post(body) if how == "length" else chunked(chunks, b"0\r\n\r\n")
    with talking(door, raw) as caller:
        assert len(caller.reply().json["body"]) == size
        assert caller.is_open()


@pytest.mark.parametrize("how", ["length", "chunked"])
def test_a_body_that_is_too_long_gets_413_and_the_connection_goes_on(door, how):
    body = b"x" * (MAX_BODY + 1)
    raw = post(body) if how == "length" else chunked(b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
    with talking(door, raw) as caller:
        reply = caller.reply()
        assert (reply.status, reply.code) == (413, "payload_too_large")
        assert caller.is_open()


def test_a_body_nobody_reads_is_dropped(door):
    with talking(door, post(b"GET /x HTTP/1.1\r\n\r\n" * 100, path=b"/ignore"), GET) as caller:
        assert caller.reply().json == {"ignored": True}
        assert caller.reply().json["path"] == "/a"


def test_a_body_nobody_reads_is_cut_when_it_goes_on_for_ever():
    with Door(Limits(discarded_bytes=100_000)) as door:
        head = b"POST /ignore HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n"
        with talking(door, head) as caller:
            assert caller.reply().status == 200
            with pytest.raises(OSError):
                for _ in range(10_000):
                    caller.send(b"x" * 10_000)


def test_expect_continue(door):
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 5\r\n\r\n"
    with talking(door, head) as caller:
        assert (caller.line(), caller.line()) == (b"HTTP/1.1 100 Continue\r\n", b"\r\n")
        caller.send(b"hello")
        assert caller.reply().json["body"] == "hello"
        assert caller.is_open()
    with talking(door, head + b"hello") as caller:
        reply = caller.reply()  # http.client skips a 100
        assert reply.json["body"] == "hello"


def test_a_refused_expectation_ends_the_connection(door):
    # Whether the body still comes is the caller's choice: the next request cannot be found.
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 99999999\r\n\r\n"
    with talking(door, head) as caller:
        reply = caller.reply()
        assert (reply.status, reply.headers["connection"]) == (413, "close")
        assert caller.end() == b""


def test_an_unknown_expectation(door):
    with talking(door, b"POST /a HTTP/1.1\r\nhost: x\r\nexpect: tea\r\ncontent-length: 0\r\n\r\n") as caller:
        assert caller.reply().status == 417
        assert caller.end() == b""
    assert door.exchanges == []


def test_head_has_no_body(door):
    with talking(door, b"HEAD /ignore HTTP/1.1\r\n" + H + b"\r\n") as caller:
        reply = caller.reply("HEAD")
        assert (reply.headers["content-length"], reply.body) == ("16", b"")
        assert caller.is_open()


def test_blank_lines_before_a_request(door):
    with talking(door, b"\r\n\r\n" + GET) as caller:
        assert caller.reply().json["path"] == "/a"


@pytest.mark.parametrize("method", [b"GET", b"POST"])
@pytest.mark.parametrize("framing", ["none", "length", "chunked"])
def test_an_upgrade_is_ignored_and_its_body_read(door, method, framing):
    lines = {
        "none": (b"", b""),
        "length": (b"content-length: 5\r\n", b"hello"),
        "chunked": (b"transfer-encoding: chunked\r\n", b"5\r\nhello\r\n0\r\n\r\n"),
    }[framing]
    head = b" /u HTTP/1.1\r\nhost: x\r\nconnection: upgrade, http2-settings\r\nupgrade: h2c\r\n"
    raw = method + head + lines[0] + b"\r\n" + lines[1]
    with talking(door, raw + raw + GET) as caller:
        for _ in range(2):
            seen = caller.reply().json
            assert (seen["path"], seen["body"]) == ("/u", "hello" if framing != "none" else "")
        assert caller.reply().json["path"] == "/a"


def test_an_upgrade_whose_body_comes_late(door):
    head = b"POST /u HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 5\r\n\r\n"
    with talking(door, head) as caller:
        door.wait_for(lambda: door.exchanges, "head handled")
        caller.send(b"hello")
        assert caller.reply().json["body"] == "hello"


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (b"GET /a HTTP/1.1\r\nhost: x\r\n", True),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: keep-alive\r\n", True),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n", False),
        (b"GET /a HTTP/1.1\r\nhost: x\r\nConnection: x, Close\r\n", False),
        (b"GET /a HTTP/1.0\r\n", False),
        (b"GET /a HTTP/1.0\r\nconnection: keep-alive\r\n", True),
    ],
)
def test_keep_alive(door, head, kept):
    with talking(door, head + b"\r\n") as caller:
        reply = caller.reply()
        assert reply.json["path"] == "/a"
        if kept:
            assert reply.headers.get("connection") == ("keep-alive" if b"1.0" in head else None)
            assert caller.is_open()
        else:
            assert reply.headers["connection"] == "close"
            assert caller.end() == b""


def test_what_follows_a_close_is_not_answered(door):
    with talking(door, b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" + GET) as caller:
        assert caller.reply().json["path"] == "/a"
        assert caller.end() == b""
    assert len(door.exchanges) == 1


def test_a_stream_over_http10_ends_with_the_connection(door):
    with talking(door, b"GET /stream HTTP/1.0\r\nconnection: keep-alive\r\n\r\n") as caller:
        door.wait_for(lambda: door.exchanges, "stream running")
        door.do(lambda: door.exchanges[0].send_events(b"data: last\n\n", last=True))
        reply = caller.reply()
    assert reply.headers["connection"] == "close"
    assert "transfer-encoding" not in reply.headers
    assert reply.body == b"data: first\n\ndata: last\n\n"


def test_pipelined_requests_are_answered_in_order_one_at_a_time(door):
    with talking(door, HOLD + post(b"two") + GET) as caller:
        door.wait_for(lambda: door.exchanges, "first request running")
        assert [each.path for each in door.exchanges] == ["/hold"]
        door.do(lambda: door.exchanges[0].send_json(b"1"))
        assert caller.reply().json == 1
        assert caller.reply().json["body"] == "two"
        assert caller.reply().json["path"] == "/a"


def test_a_long_pipeline_is_answered_whole(door):
    requests = [b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(3000)]
    ignored = [each.replace(b"GET /", b"GET /ignore?") for each in requests]
    with talking(door, b"".join(ignored)) as caller:
        for _ in ignored:
            assert caller.reply().json == {"ignored": True}
        assert caller.is_open()


def test_a_pipeline_behind_a_slow_request_stops_being_read(door):
    with talking(door, HOLD) as caller:
        door.wait_for(lambda: door.exchanges, "first request running")
        caller.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(5000):
                caller.send(post(b"x" * 10_000, path=b"/ignore"))
        caller.sock.settimeout(20)
        door.do(lambda: door.exchanges[0].send_json(b"1"))
        assert caller.reply().json == 1
        for _ in range(100):
            assert caller.reply().json == {"ignored": True}


def test_a_malformed_request_in_a_pipeline_comes_after_the_good_ones(door):
    with talking(door, GET + b"GET /b HTTP/1.1\r\n" + H + b"\r\nnonsense\r\n\r\n") as caller:
        assert [caller.reply().json["path"], caller.reply().json["path"]] == ["/a", "/b"]
        reply = caller.reply()
        assert (reply.status, reply.code) == (400, "invalid_http")
        assert caller.end() == b""


def test_a_stream_that_fails_ends_with_an_error_event(door):
    with talking(door, STREAM) as caller:
        door.wait_for(lambda: door.exchanges, "request running")
        door.fail_current()
        assert b"the engine went away" in caller.reply().body
        assert caller.is_open()


def test_a_request_that_fails_gets_an_error(door):
    with talking(door, HOLD) as caller:
        door.wait_for(lambda: door.exchanges, "request running")
        door.fail_current()
        reply = caller.reply()
        assert (reply.status, reply.headers["retry-after"]) == (503, "2")


def test_another_servers_answer_goes_on_under_our_framing(door):
    with talking(door, GET.replace(b"/a", b"/raw"), GET.replace(b"/a", b"/sized")) as caller:
        first, second = caller.reply(), caller.reply()
        assert (first.status, first.body, first.headers["x-theirs"]) == (201, b"onetwo", "1")
        assert first.headers["transfer-encoding"] == "chunked"
        assert "connection" not in first.headers
        assert first.headers["date"] != "then"
        assert (second.body, second.headers["content-length"]) == (b"onetwo", "6")
        assert "transfer-encoding" not in second.headers


def test_backpressure_is_told(door):
    told: list[str] = []
    with door.connect(receive_buffer=4096) as caller:
        caller.send(STREAM)
        door.wait_for(lambda: door.exchanges, "stream running")
        exchange = door.exchanges[0]
        door.do(lambda: exchange.watch_writable(lambda: told.append("pause"), lambda: told.append("resume")))
        door.do(lambda: exchange.send_events(b"x" * (16 << 20)))
        door.wait_for(lambda: told == ["pause"], "paused")
        door.do(lambda: exchange.send_events(b"", last=True))
        # The response has ended: nobody is told any more.
        assert len(caller.reply().body) > 16 << 20
        assert told == ["pause"]
    told.clear()
    with door.connect(receive_buffer=4096) as caller:
        caller.send(STREAM)
        door.wait_for(lambda: len(door.exchanges) == 2, "stream running")
        exchange = door.exchanges[1]
        door.do(lambda: exchange.send_events(b"x" * (16 << 20)))
        door.do(lambda: exchange.watch_writable(lambda: told.append("pause"), lambda: told.append("resume")))
        door.wait_for(lambda: told == ["pause"], "paused at once")
        received = 0
        while received < 16 << 20:
            received += len(caller.sock.recv(1 << 20))
        door.wait_for(lambda: told == ["pause", "resume"], "resumed")
