"""The socket: its address, its options, and how it stops."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from headrace.core.errors import UsageError
from headrace.core.knobs import GatewayConfig
from headrace.gateway.protocol import HttpConnection
from headrace.gateway.server import bind_socket
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, Answer, Stack, call, chat, open_request, write_tokenizer

HI = [{"role": "user", "content": "hi"}]


def test_a_port_in_use_is_named():
    with bind_socket(GatewayConfig(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError) as error:
            bind_socket(GatewayConfig(port=port))
    assert f"port {port} on 127.0.0.1 is in use" in error.value.message
    assert "--port" in (error.value.hint or "")
    assert error.value.exit_code == 2


def test_a_host_that_is_not_ours_is_named():
    with pytest.raises(UsageError, match=r"192\.0\.2\.1"):
        bind_socket(GatewayConfig(host="192.0.2.1", port=0))


def test_a_host_that_does_not_resolve_is_named(monkeypatch):
    def unknown(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(UsageError, match=r"no\.such\.host"):
        bind_socket(GatewayConfig(host="no.such.host", port=0))


def test_a_host_that_is_no_name_is_told():
    with pytest.raises(UsageError, match="cannot resolve"):
        bind_socket(GatewayConfig(host="a" * 70, port=0))


def test_accepted_sockets_do_not_delay(stack, monkeypatch):
    options = []
    original = HttpConnection.connection_made

    def connection_made(self, transport):
        original(self, transport)
        sock = transport.get_extra_info("socket")
        options.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    monkeypatch.setattr(HttpConnection, "connection_made", connection_made)
    assert call(stack, "/health").status == 200
    assert len(options) == 1
    assert options[0]


def test_a_running_request_finishes_within_the_grace(tokenizer, tmp_path):
    with Stack(tokenizer, tmp_path, GatewayConfig(port=0, shutdown_grace_s=20)) as stack:
        stack.replica.interval = 0.02
        stack.answer("one two three four five six")
        answers = []
        asker = threading.Thread(target=lambda: answers.append(chat(stack, stream=True)))
        asker.start()
        stack.wait_for(lambda: stack.replica.running, "request in the engine")
        stack.loop.call_soon_threadsafe(stack.stop.set)
        asker.join(20)
    (answer,) = answers
    assert answer.events[-1] == "[DONE]"


def test_after_the_grace_a_running_request_ends_with_an_error(tokenizer, tmp_path):
    with Stack(tokenizer, tmp_path, GatewayConfig(port=0, shutdown_grace_s=0.2)) as stack:
        stack.plan(lambda request: Plan(silent=True))
        answers = []
        askers = [
            threading.Thread(target=lambda stream=stream: answers.append(chat(stack, stream=stream)))
            for stream in (True, False)
        ]
        for asker in askers:
            asker.start()
        stack.wait_for(lambda: len(stack.replica.running) == 2, "requests in the engine")
        stack.loop.call_soon_threadsafe(stack.stop.set)
        for asker in askers:
            asker.join(20)
        whole, streamed = sorted(answers, key=lambda answer: answer.status, reverse=True)
        assert whole.status == 503
        assert whole.error["type"] == "service_unavailable"
        assert streamed.events[-1]["error"]["type"] == "service_unavailable"


def test_while_stopping_nothing_new_is_taken(tokenizer, tmp_path):
    with Stack(tokenizer, tmp_path, GatewayConfig(port=0, shutdown_grace_s=20)) as stack:
        stack.replica.interval = 0.05
        stack.answer("one two three four five six")
        idle = socket.create_connection(("127.0.0.1", stack.port), timeout=20)
        idle.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 200")
        asker = open_request(stack, CHAT, {"messages": HI})
        stack.wait_for(lambda: stack.replica.running, "request in the engine")
        stack.loop.call_soon_threadsafe(stack.stop.set)
        assert idle.recv(4096) == b"", "idle connections are closed"
        assert asker.recv(4096).startswith(b"HTTP/1.1 200")
        idle.close()
        asker.close()


def test_while_stopping_a_request_on_a_kept_connection_is_told(tokenizer, tmp_path):
    with Stack(tokenizer, tmp_path, GatewayConfig(port=0, shutdown_grace_s=20)) as stack:
        stack.plan(lambda request: Plan(silent=True))
        with (
            open_request(stack, CHAT, {"messages": HI}),
            socket.create_connection(("127.0.0.1", stack.port), timeout=20) as late,
        ):
            stack.wait_for(lambda: stack.replica.running, "request in the engine")
            late.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nPOST /v1/chat/completions HTTP/1.1\r\n")
            assert late.recv(4096).startswith(b"HTTP/1.1 200")
            stack.loop.call_soon_threadsafe(stack.stop.set)
            stack.wait_for(lambda: stack.gateway.draining, "stopping")
            late.sendall(b"host: x\r\ncontent-length: 2\r\n\r\n{}")
            response = http.client.HTTPResponse(late)
            response.begin()
            answer = Answer(response)
            assert (answer.status, answer.headers["connection"]) == (503, "close")
            assert answer.error["code"] == "shutting_down"
            assert late.recv(4096) == b""


SCRIPT = """
import asyncio, logging, sys
from pathlib import Path
from headrace.core.knobs import GatewayConfig, RouterConfig
from headrace.gateway.server import serve
from headrace.gateway.state import Gateway, ServedModel
from headrace.router.dispatcher import Dispatcher
from headrace.router.placer import LocalPlacer
from headrace.text.tokenizer import Tokenizer

async def main():
    log = logging.getLogger()
    tokenizer = Tokenizer.from_folder(Path(sys.argv[1]))
    placer = LocalPlacer(RouterConfig(), log=log)
    dispatcher = Dispatcher(placer, RouterConfig(), log=log)
    config = GatewayConfig(port=0, shutdown_grace_s=float(sys.argv[2]))
    models = [ServedModel("m", ["m"], tokenizer, dispatcher)]
    gateway = Gateway(config, models=models, dispatcher=dispatcher, log=log)
    await serve(gateway, config, log=log, on_ready=lambda address: print(address, flush=True))
    await dispatcher.close()
    await placer.close()
    tokenizer.close()
    print("stopped", flush=True)

asyncio.run(main())
"""


@pytest.fixture
def process(tmp_path):
    """A server of its own and its port; it is killed unless it has ended by itself."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), "1000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:"), process.communicate()
        yield process, int(address.rpartition(":")[2])
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_stop_the_process_in_order(process, number):
    server, _ = process
    server.send_signal(number)
    out, err = server.communicate(timeout=30)
    assert out.strip() == "stopped"
    assert "Traceback" not in err
    assert server.returncode == 0


def test_a_second_signal_does_not_wait_for_the_grace(process):
    server, port = process
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n")
        sock.sendall(b"content-length: 5\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 100"), "the handler waits for the body"
        server.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionRefusedError):
            while True:
                # one that stood in line when the door closed is reset
                with contextlib.suppress(ConnectionResetError):
                    socket.create_connection(("127.0.0.1", port), timeout=30).close()
        assert server.poll() is None, "the grace is a thousand seconds"
        server.send_signal(signal.SIGTERM)
        response = http.client.HTTPResponse(sock)
        response.begin()
        answer = Answer(response)
        assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    out, err = server.communicate(timeout=30)
    assert out.strip() == "stopped"
    assert "Traceback" not in err


def test_a_long_body_does_not_hold_up_other_streams(stack):
    """While a large conversation is worked on, another stream's tokens keep flowing."""
    stack.answer("one two three ", endless=True)
    sock = open_request(stack, CHAT, {"messages": HI, "stream": True})
    stack.wait_for(lambda: any(running.sent > 3 for running in stack.replica.running.values()))
    body = json.dumps({"messages": [{"role": "user", "content": "hello world " * 5000}]}).encode()
    counts = []

    def sent() -> int:
        return max(running.sent for running in stack.replica.running.values())

    original = stack.tokenizer.encode_chat

    def slow(*args, **kwargs):
        before = sent()
        deadline = time.monotonic() + 10
        while sent() < before + 20 and time.monotonic() < deadline:
            time.sleep(0.002)
        counts.append(sent() - before)
        return original(*args, **kwargs)

    stack.tokenizer.encode_chat = slow
    try:
        answer = call(stack, CHAT, body)
    finally:
        del stack.tokenizer.encode_chat
        sock.close()
    assert answer.status == 400
    assert counts[0] >= 20
