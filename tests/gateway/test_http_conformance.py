"""HTTP as it comes on the wire: framing, pipelines, limits, ambiguity, half-closed and slow callers."""

from __future__ import annotations

import http.client
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from headrace.gateway.protocol import Limits
from tests.gateway.door import MAX_BODY, Caller, Door

H = b"host: x\r\n"
GET = b"GET /a HTTP/1.1\r\n" + H + b"\r\n"
FAST = Limits(
    head_timeout_s=0.2,
    body_timeout_s=0.2,
    idle_timeout_s=0.2,
    flush_timeout_s=0.2,
    linger_s=0.2,
    sweep_s=0.05,
)


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    with Door() as door:
        yield door


@pytest.fixture(scope="module")
def hasty() -> Iterator[Door]:
    with Door(FAST) as door:
        yield door


@pytest.fixture(autouse=True)
def _forget(door: Door, hasty: Door) -> None:
    for each in (door, hasty):
        each.events.clear()
        each.refused.clear()
        each.exchanges.clear()


def post(body: bytes, *lines: bytes, path: bytes = b"/a") -> bytes:
    head = [b"POST %b HTTP/1.1" % path, b"host: x", b"content-length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def chunked(*lines: bytes, path: bytes = b"/a") -> bytes:
    return b"POST %b HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" % path + b"".join(lines)


@contextmanager
def talking(door: Door, *parts: bytes) -> Iterator[Caller]:
    with door.talk(*parts) as caller:
        yield caller


# Requests


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


# The connection


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
    with talking(door, GET.replace(b"/a", b"/hold") + post(b"two") + GET) as caller:
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
    with talking(door, GET.replace(b"/a", b"/hold")) as caller:
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


# Ambiguity


AMBIGUOUS = {
    "both lengths": b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both lengths, the other order": b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello",
    "the same length twice": b"content-length: 5\r\ncontent-length: 5\r\n\r\nhello",
    "a list of lengths": b"content-length: 5, 5\r\n\r\nhello",
    "a signed length": b"content-length: +5\r\n\r\nhello",
    "a negative length": b"content-length: -5\r\n\r\nhello",
    "a hexadecimal length": b"content-length: 0x5\r\n\r\nhello",
    "no length": b"content-length:\r\n\r\nhello",
    "a huge length": b"content-length: 99999999999999999999999\r\n\r\nhello",
    "gzip": b"transfer-encoding: gzip\r\n\r\nhello",
    "gzip, chunked": b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked, gzip": b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "identity": b"transfer-encoding: identity\r\n\r\n",
    "chunked twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunked, chunked": b"transfer-encoding: chunked, chunked\r\n\r\n0\r\n\r\n",
    "xchunked": b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "vertical tab": b"transfer-encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "quoted": b'transfer-encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "parameter": b"transfer-encoding: chunked;a=b\r\n\r\n0\r\n\r\n",
    "empty coding": b"transfer-encoding:\r\n\r\n0\r\n\r\n",
    "space before the colon": b"content-length : 5\r\n\r\nhello",
    "space in a name": b"x y: 5\r\n\r\n",
    "no name": b": 5\r\n\r\n",
    "no colon": b"content-length\r\n\r\n",
    "a folded header": b"x-a: b\r\n content-length: 5\r\n\r\nhello",
    "a folded empty header": b"x-a:\r\n b\r\n\r\n",
    "space before the first header": None,
    "bare line feeds": None,
    "a bare line feed after a header": b"x-a: b\n\r\n",
    "a bare line feed at the end": b"x-a: b\r\n\n",
    "a bare carriage return": b"x-a: b\rcontent-length: 5\r\n\r\n",
    "two carriage returns": b"x-a: b\r\r\n\r\n",
    "a zero byte": b"x-a: b\0c\r\n\r\n",
    "a control character": b"x-a: b\x01c\r\n\r\n",
    "a name that is not ASCII": b"x-\xc3\xa4: b\r\n\r\n",
    "another host": b"host: y\r\n\r\n",
    "no host": None,
    "HTTP/1.0 and chunked": None,
    "HTTP/0.9": None,
    "HTTP/2.0": None,
    "HTTP/1.2": None,
    "the preface of HTTP/2": None,
    "a space after the version": None,
    "a space in the target": None,
    "a tab in the target": None,
    "an authority": None,
    "a broken escape": None,
    "a target without a slash": None,
    "an unknown method": None,
    "a method in small letters": None,
    "TLS": None,
}
WHOLE = {
    "space before the first header": b"GET /a HTTP/1.1\r\n host: x\r\n\r\n",
    "bare line feeds": b"GET /a HTTP/1.1\nhost: x\n\n",
    "no host": b"GET /a HTTP/1.1\r\n\r\n",
    "HTTP/1.0 and chunked": b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "HTTP/0.9": b"GET /a\r\n\r\n",
    "HTTP/2.0": b"GET /a HTTP/2.0\r\nhost: x\r\n\r\n",
    "HTTP/1.2": b"GET /a HTTP/1.2\r\nhost: x\r\n\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a space after the version": b"GET /a HTTP/1.1 \r\nhost: x\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n",
    "a tab in the target": b"GET /a\tb HTTP/1.1\r\nhost: x\r\n\r\n",
    "an authority": b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    "a broken escape": b"GET /%ff%fe HTTP/1.1\r\nhost: x\r\n\r\n",
    "a target without a slash": b"GET a HTTP/1.1\r\nhost: x\r\n\r\n",
    "an unknown method": b"BLAH /a HTTP/1.1\r\nhost: x\r\n\r\n",
    "a method in small letters": b"get /a HTTP/1.1\r\nhost: x\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
}


@pytest.mark.parametrize("what", AMBIGUOUS)
@pytest.mark.parametrize("where", ["at once", "after another", "in two parts"])
def test_what_two_parties_could_read_differently_is_refused(door, what, where):
    rest = AMBIGUOUS[what]
    raw = WHOLE[what] if rest is None else b"POST /a HTTP/1.1\r\nhost: x\r\n" + rest
    smuggled = raw + b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    with door.connect() as caller:
        if where == "after another":
            caller.send(GET)
            assert caller.reply().status == 200
        if where == "in two parts":
            caller.send(smuggled[:9])
            smuggled = smuggled[9:]
        try:
            caller.send(smuggled)
        except OSError:
            assert what == "TLS"
        reply = caller.reply()
        assert (reply.status, reply.code) == (400, "invalid_http")
        assert reply.headers["connection"] == "close"
        assert reply.headers["x-request-id"]
        assert caller.end() == b""
    assert [each.path for each in door.exchanges] == (["/a"] if where == "after another" else [])
    assert door.refused == [400]


BAD_CHUNKS = {
    "a space after the size": b"5 \r\nhello\r\n",
    "a prefix": b"0x5\r\nhello\r\n",
    "a sign": b"-5\r\nhello\r\n",
    "no size": b"\r\nhello\r\n",
    "a huge size": b"fffffffffffffffff\r\nhello\r\n",
    "bare line feeds": b"5\nhello\n",
    "no end of the data": b"5\r\nhello0\r\n\r\n",
    "too much data": b"5\r\nhello world\r\n",
    "a line feed in an extension": b"5;a\nb\r\nhello\r\n",
    "a coding in the trailer": b"0\r\ntransfer-encoding: gzip\r\n\r\n",
    "an endless extension": b"5;" + b"a" * 500_000 + b"\r\nhello\r\n",
    "an endless trailer": b"0\r\nx-a: " + b"a" * 500_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("what", BAD_CHUNKS)
@pytest.mark.parametrize("late", [False, True])
def test_malformed_chunks_are_refused(door, what, late):
    with door.connect() as caller:
        head = chunked()
        smuggled = BAD_CHUNKS[what] + b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
        if late:
            caller.send(head)
            door.wait_for(lambda: door.exchanges, "head handled")
        else:
            smuggled = head + smuggled
        try:
            caller.send(smuggled)
        except OSError:
            assert "endless" in what
        reply = caller.reply()
        assert (reply.status, reply.code) == (400, "invalid_http")
        assert caller.end() == b""
    assert [each.path for each in door.exchanges] in ([], ["/a"])


def test_malformed_chunks_after_the_answer_close_the_connection(door):
    with talking(door, chunked(path=b"/ignore")) as caller:
        assert caller.reply().json == {"ignored": True}
        caller.send(b"zzz\r\nGET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n")
        assert caller.end() == b""
    assert [each.path for each in door.exchanges] == ["/ignore"]


# Limits


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
    with talking(hasty, GET.replace(b"/a", b"/hold") + b"GET /a HTTP/1.1\r\n") as caller:
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
        caller.send(GET.replace(b"/a", b"/hold"))
        hasty.wait_for(lambda: hasty.exchanges, "request running")
        hasty.do(lambda: hasty.exchanges[0].send_json(b"1" * (16 << 20)))
        assert hasty.exchanges[0].unsent_bytes() > 0
        hasty.wait_for(lambda: hasty.exchanges[0].unsent_bytes() == 0, "connection cut")
        with pytest.raises((ConnectionResetError, http.client.IncompleteRead)):
            caller.reply()


# Disconnects


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
        caller.send(GET.replace(b"/a", b"/stream"))
        door.wait_for(lambda: door.exchanges, "stream running")
        door.do(lambda: door.exchanges[0].send_events(b"x" * (16 << 20)))
        assert door.exchanges[0].unsent_bytes() > 0
        assert door.events == []
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")


def test_a_caller_that_goes_with_a_pipeline_is_noticed(door):
    with talking(door, GET.replace(b"/a", b"/hold") + GET + post(b"x")):
        door.wait_for(lambda: door.exchanges, "request running")
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")
    assert len(door.exchanges) == 1


def test_a_caller_that_goes_within_its_body_is_noticed(door):
    with talking(door, b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\nhello"):
        door.wait_for(lambda: door.exchanges, "head handled")
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")


def test_watching_a_caller_that_has_gone_tells_at_once(door):
    with talking(door, GET.replace(b"/a", b"/hold")):
        door.wait_for(lambda: door.exchanges, "request running")
    door.wait_for(lambda: door.events == ["gone"], "disconnect noticed")
    door.do(lambda: door.exchanges[0].watch(lambda: door.events.append("told")))
    assert door.events == ["gone", "told"]


def test_half_closing_counts_as_a_disconnect_and_is_told(door):
    with talking(door, GET.replace(b"/a", b"/hold")) as caller:
        door.wait_for(lambda: door.exchanges, "request running")
        caller.sock.shutdown(socket.SHUT_WR)
        reply = caller.reply()
        assert (reply.status, reply.code) == (400, "half_closed")
        assert caller.end() == b""
    assert door.events == ["gone"]


def test_half_closing_within_a_stream_ends_it_with_an_error_event(door):
    with talking(door, GET.replace(b"/a", b"/stream")) as caller:
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


# Responses


def test_a_stream_that_fails_ends_with_an_error_event(door):
    with talking(door, GET.replace(b"/a", b"/stream")) as caller:
        door.wait_for(lambda: door.exchanges, "request running")
        door.fail_current()
        assert b"the engine went away" in caller.reply().body
        assert caller.is_open()


def test_a_request_that_fails_gets_an_error(door):
    with talking(door, GET.replace(b"/a", b"/hold")) as caller:
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
        caller.send(GET.replace(b"/a", b"/stream"))
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
        caller.send(GET.replace(b"/a", b"/stream"))
        door.wait_for(lambda: len(door.exchanges) == 2, "stream running")
        exchange = door.exchanges[1]
        door.do(lambda: exchange.send_events(b"x" * (16 << 20)))
        door.do(lambda: exchange.watch_writable(lambda: told.append("pause"), lambda: told.append("resume")))
        door.wait_for(lambda: told == ["pause"], "paused at once")
        received = 0
        while received < 16 << 20:
            received += len(caller.sock.recv(1 << 20))
        door.wait_for(lambda: told == ["pause", "resume"], "resumed")


# Stopping


def test_stopping_closes_idle_connections_and_finishes_the_others():
    with Door() as door, door.connect() as silent, talking(door, GET) as idle:
        assert idle.reply().status == 200
        with (
            talking(door, GET.replace(b"/a", b"/hold")) as held,
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
