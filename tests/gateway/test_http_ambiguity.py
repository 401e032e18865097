"""Bytes that two parties could read as different requests: refused, and the connection closed."""

from __future__ import annotations

import pytest

from tests.gateway.door import GET, chunked, talking

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
