"""A caller that goes, reads slowly or never: its request ends in the engine, nobody else notices."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import replace

import pytest

from headrace.core.knobs import GatewayConfig
from headrace.gateway.protocol import HttpConnection
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, Stack, call, chat, open_request

HI = [{"role": "user", "content": "hi"}]


def _read_until(sock: socket.socket, needle: bytes) -> bytes:
    received = b""
    while needle not in received:
        part = sock.recv(65536)
        assert part, received
        received += part
    return received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_before_any_token(stack, stream, n):
    stack.plan(lambda request: Plan(silent=True))
    sock = open_request(stack, CHAT, {"messages": HI, "stream": stream, "n": n})
    stack.wait_for(lambda: stack.replica.running, "request in the engine")
    sock.close()
    stack.wait_for(lambda: not stack.replica.running, "request aborted")
    assert [abort.sample_index for abort in stack.replica.aborts] == [None]
    stack.wait_for(lambda: stack.client.num_open == 0, "request forgotten")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_while_decoding(stack, stream):
    stack.answer("one two three ", endless=True)
    sock = open_request(stack, CHAT, {"messages": HI, "stream": stream})
    if stream:
        _read_until(sock, b" two")
    stack.wait_for(lambda: any(running.sent > 5 for running in stack.replica.running.values()))
    sock.close()
    stack.wait_for(lambda: not stack.replica.running, "request aborted")


def test_disconnect_with_several_prompts_aborts_them_all(stack):
    stack.plan(lambda request: Plan(silent=True))
    sock = open_request(stack, "/v1/completions", {"prompt": ["one", "two", "three"]})
    stack.wait_for(lambda: len(stack.replica.running) == 3, "requests in the engine")
    sock.close()
    stack.wait_for(lambda: not stack.replica.running, "requests aborted")


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_in_the_routers_queue(tokenizer, tmp_path, stream):
    with Stack(tokenizer, tmp_path, max_num_seqs=1) as stack:
        stack.plan(lambda request: Plan(silent=True))
        body = {"messages": HI, "stream": stream}
        socks = [open_request(stack, CHAT, body) for _ in range(40)]
        stack.wait_for(lambda: stack.dispatcher.num_open == 40, "more than fit")
        num_placed = len(stack.replica.running)
        assert 0 < num_placed < 40
        for sock in socks:
            sock.close()
        stack.wait_for(lambda: not stack.dispatcher.num_open and not stack.replica.running, "all forgotten")
        assert len(stack.replica.requests) < 40, "what only waited was never placed"


def test_half_closing_aborts_and_is_told(stack):
    stack.plan(lambda request: Plan(silent=True))
    with open_request(stack, CHAT, {"messages": HI}) as sock:
        stack.wait_for(lambda: stack.replica.running, "request in the engine")
        sock.shutdown(socket.SHUT_WR)
        stack.wait_for(lambda: not stack.replica.running, "request aborted")
        assert b"half_closed" in _read_until(sock, b"}}")


def test_disconnect_in_the_middle_of_the_body(stack):
    with socket.create_connection(("127.0.0.1", stack.port)) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    assert chat(stack).status == 200
    assert len(stack.replica.requests) == 1


@pytest.mark.parametrize("start", [b"", b"{"])
def test_a_body_that_never_arrives_gives_its_permit_back(stack, monkeypatch, start):
    original = HttpConnection.connection_made

    def connection_made(self, transport):
        original(self, transport)
        self.limits = replace(self.limits, body_timeout_s=0.05)

    monkeypatch.setattr(HttpConnection, "connection_made", connection_made)
    with socket.create_connection(("127.0.0.1", stack.port), timeout=20) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + start)
        answer = sock.recv(4096)
    assert answer.startswith(b"HTTP/1.1 400") and b"body_timeout" in answer
    monkeypatch.undo()
    assert chat(stack).status == 200


@pytest.mark.parametrize("size", [100_000, 200_000, 600_000])
def test_disconnect_after_a_long_body(stack, size):
    # Reading is paused while much of a body waits to be taken; the last part must not leave it so, or the
    # caller's end is never read.
    stack.plan(lambda request: Plan(silent=True))
    for _ in range(4):
        body = json.dumps({"messages": HI, "stream": True, "padding": "x" * size}).encode()
        with socket.create_connection(("127.0.0.1", stack.port)) as sock:
            head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body[:10])
            time.sleep(0.02)
            sock.sendall(body[10:])
            stack.wait_for(lambda: stack.replica.running, "request in the engine")
        stack.wait_for(lambda: not stack.replica.running, "request aborted")


def test_aborts_are_counted(stack):
    def aborted() -> float:
        lines = call(stack, "/metrics").body.decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if 'finished_reason="abort"' in line)

    before = aborted()
    stack.plan(lambda request: Plan(silent=True))
    open_request(stack, CHAT, {"messages": HI}).close()
    stack.wait_for(lambda: stack.replica.requests and not stack.replica.running)
    stack.wait_for(lambda: stack.client.num_open == 0)
    stack.answer("x")
    chat(stack)
    assert aborted() == before + 1


def test_a_slow_reader_is_cut_off_and_the_others_go_on(tokenizer, tmp_path):
    config = GatewayConfig(port=0, max_response_backlog_mb=0.05, shutdown_grace_s=0.5)
    with Stack(tokenizer, tmp_path, config) as stack:
        stack.answer("one two three four five six ", endless=True, tokens_per_step=50)
        sock = open_request(stack, CHAT, {"messages": HI, "stream": True, "n": 4})
        stack.wait_for(lambda: stack.replica.running, "request in the engine")
        stack.wait_for(lambda: not stack.replica.running, "slow reader's request aborted")
        stack.answer("fine")
        assert chat(stack).json["choices"][0]["message"]["content"] == "fine"
        received = b""
        while part := sock.recv(1 << 20):
            received += part
            if b"slow_reader" in received:
                break
        assert b'data: {"error":' in received
        assert received.endswith(b"0\r\n\r\n"), "the stream ends in order"
        sock.close()


def test_a_reader_that_pauses_within_the_limit_gets_everything(stack):
    text = "one two three four five six " * 8
    stack.answer(text, tokens_per_step=3)
    sock = open_request(stack, CHAT, {"messages": HI, "stream": True, "max_tokens": 400})
    stack.wait_for(lambda: stack.replica.requests and not stack.replica.running, "all generated")
    received = _read_until(sock, b"[DONE]")
    sock.close()
    assert received.count(b" six") == 8


def test_pipelined_requests_are_both_answered(stack):
    raw = b'{"messages":[{"role":"user","content":"hi"}]}'
    one = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw
    with socket.create_connection(("127.0.0.1", stack.port), timeout=20) as sock:
        sock.sendall(one + one)
        received = b""
        while received.count(b"Paris.") < 2:
            part = sock.recv(65536)
            assert part
            received += part
    assert received.count(b"HTTP/1.1 200") == 2
