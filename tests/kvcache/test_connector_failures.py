"""Peers that die, stop or talk nonsense cost a job its rest, never a wrong block, and nothing leaks."""

from __future__ import annotations

import random
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.kvcache.channel import encode_frame
from headrace.kvcache.connector import ConnectorServer
from headrace.kvcache.io_thread import TICK_S
from headrace.kvcache.source import WINDOW_BYTES
from headrace.kvcache.transfer import (
    PROTOCOL,
    Cancel,
    Credit,
    Done,
    Fetch,
    Freed,
)
from tests.kvcache.transfers import (
    BLOCK_BYTES,
    FORMAT,
    ROOT,
    WAIT_S,
    Prefill,
    Sink,
    fetching,
    is_closed,
    job_of,
    nothing_left,
    tokens_of,
    wait_until,
)

CHILD = [sys.executable, "-m", "tests.kvcache.connector_child"]
WINDOW = WINDOW_BYTES // BLOCK_BYTES


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


@contextmanager
def child(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([*CHILD, *arguments], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def serving(listen: str, handler: Prefill, lease_s: float = 30.0) -> Iterator[ConnectorServer]:
    server = ConnectorServer(
        listen, handler, root=ROOT, kv_format=FORMAT, block_bytes=BLOCK_BYTES, lease_s=lease_s
    )
    try:
        yield server
    finally:
        server.close()


# Processes that die or stop


def test_the_sender_is_killed(listen: str) -> None:
    with child("serve", listen, "40") as sender, fetching() as client:
        address = said(sender)
        whole = Sink(client, job_of(30, address=address)).open()
        assert whole.wait() == ""
        sink = Sink(client, job_of(100, seed=1, address=address)).open()
        sink.wait_delivered(40)
        sender.kill()
        assert "closed" in sink.wait() or "broke" in sink.wait()
        sender.wait()
        later = Sink(client, job_of(3, seed=2, address=address)).open()
        assert "cannot connect" in later.wait()


def test_the_receiver_is_killed(listen: str) -> None:
    handler = Prefill()
    with serving(listen, handler) as server:
        with child("fetch", server.address, str(3 * WINDOW)) as receiver:
            assert said(receiver) == "delivered"
            receiver.kill()
        handler.wait(lambda handler: handler.cancelled == list(handler.jobs) != [])
        (key,) = handler.jobs
        assert handler.streams[key].room() == 0
        handler.streams[key].send(0, b"i" * 32, bytes(BLOCK_BYTES))  # ignored: nobody is there
        handler.streams[key].end()
        wait_until(lambda: not server._senders)
        with fetching() as client:
            assert Sink(client, job_of(20, address=server.address)).open().wait() == ""


def test_a_sender_that_stops_answering_is_given_up(listen: str) -> None:
    with child("serve", listen, "5") as sender, fetching() as client:
        address = said(sender)
        sink = Sink(client, job_of(10, address=address)).open()
        sink.wait_delivered(5)
        receiver = client._receivers[address]
        heard = receiver._heard_at
        wait_until(lambda: receiver._heard_at > heard)  # it has no block to send, and yet is heard of
        sender.send_signal(signal.SIGSTOP)

        def is_given_up() -> bool:
            receiver._heard_at -= 1.0
            return sink.reason is not None

        wait_until(is_given_up)
        assert "silent" in sink.wait()


def test_a_sender_that_is_alive_and_sends_nothing_is_given_up(listen: str) -> None:
    handler = Prefill(limit=5)
    with serving(listen, handler) as server, fetching() as client:
        job = job_of(10, address=server.address)
        sink = Sink(client, job).open()
        sink.wait_delivered(5)
        client._receivers[server.address]._jobs[job.job_id].heard_at -= 1000.0
        assert "sent no block" in sink.wait()
        handler.wait(lambda handler: len(handler.cancelled) == 1)


def test_a_full_sink_is_no_reason_to_give_up(listen: str) -> None:
    with serving(listen, Prefill()) as server, fetching(silence_s=60.0) as client:
        job = job_of(WINDOW + 1, address=server.address)
        sink = Sink(client, job, hold=True).open()
        sink.wait_delivered(WINDOW)
        client._receivers[server.address]._jobs[job.job_id].heard_at -= 1000.0
        time.sleep(3 * TICK_S)
        assert sink.reason is None
        client.consumed(job.job_id, WINDOW)
        assert sink.wait() == ""


def test_a_receiver_that_uses_nothing_loses_its_lease(listen: str) -> None:
    handler = Prefill()
    with serving(listen, handler) as server, fetching() as client:
        sink = Sink(client, job_of(2 * WINDOW, address=server.address), hold=True).open()
        sink.wait_delivered(WINDOW)
        (sender,) = server._senders.values()
        (stream,) = sender._streams.values()
        assert stream.credit == 0 and not handler.cancelled
        stream.credit_at -= 1000.0
        handler.wait(lambda handler: len(handler.cancelled) == 1)
        assert "used nothing" in sink.wait()


def test_a_receiver_that_stops_reading_loses_its_connection(listen: str) -> None:
    handler = Prefill()
    with serving(listen, handler) as server, child("fetch", server.address, str(3 * WINDOW)) as receiver:
        assert said(receiver) == "delivered"
        receiver.send_signal(signal.SIGSTOP)

        def is_cancelled() -> bool:
            for sender in list(server._senders.values()):
                sender._progress_at -= 10.0
                for stream in list(sender._streams.values()):
                    stream.credit_at -= 10.0
            return len(handler.cancelled) == 1

        wait_until(is_cancelled)


def test_nobody_answers_at_the_address() -> None:
    """A listening socket whose queue is full: connecting never ends by itself."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        host, port = listener.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex((host, port))
        with fetching(connect_s=0.3) as client:
            assert "did not answer" in Sink(client, job_of(2, address=f"tcp://{host}:{port}")).open().wait()
        for filler in fillers:
            filler.close()


def test_idle_connections_are_closed_and_opened_again(listen: str) -> None:
    with serving(listen, Prefill()) as server, fetching(idle_s=0.1) as client:
        for seed in range(2):
            assert Sink(client, job_of(3, seed=seed, address=server.address)).open().wait() == ""
            wait_until(lambda: not client._receivers and not server._senders)


# Receivers that talk nonsense


def connect(server: ConnectorServer) -> socket.socket:
    kind, _, where = server.address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(where)
    else:
        host, _, port = where[2:].rpartition(":")
        sock = socket.create_connection((host, int(port)))
    sock.settimeout(WAIT_S)
    return sock


def fetch_of(**change: Any) -> Fetch:
    fields: dict[str, Any] = {
        "job_id": "j",
        "protocol": PROTOCOL,
        "root": ROOT,
        "kv_format": FORMAT,
        "tokens": tokens_of(8),
        "first": 0,
        "window": 4,
    }
    return Fetch(**(fields | change))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<I", 2**32 - 1),
        struct.pack("<I", 3) + b"\xc1\xc1\xc1",
        encode_frame({"type": "unknown"}),
        encode_frame({"type": "fetch", "job_id": 7}),
        encode_frame(Done("j")),
        random.Random(1).randbytes(10_000),
    ],
    ids=["http", "length", "msgpack", "type", "field", "direction", "random"],
)
def test_nonsense_closes_that_connection_alone(listen: str, data: bytes) -> None:
    handler = Prefill(limit=3)
    with serving(listen, handler) as server, fetching() as client:
        sink = Sink(client, job_of(9, address=server.address)).open()
        sink.wait_delivered(3)
        with connect(server) as sock:
            sock.sendall(data)
            with suppress(OSError):  # it may be closed already
                sock.shutdown(socket.SHUT_WR)
            assert is_closed(sock)
        handler.limit = 9
        handler.room(*handler.jobs)
        assert sink.wait() == ""


def test_a_half_message_at_the_end_is_nothing(listen: str) -> None:
    handler = Prefill()
    with serving(listen, handler) as server:
        with connect(server) as sock:
            sock.sendall(encode_frame(fetch_of())[:-1])
        wait_until(lambda: not server._senders)
        assert not handler.jobs


@pytest.mark.parametrize(
    "change",
    [{"protocol": PROTOCOL + 1}, {"first": -1}, {"window": 0}, {"tokens": b"abc"}, {"root": b""}],
    ids=str,
)
def test_jobs_that_make_no_sense_are_refused(listen: str, change: dict[str, Any]) -> None:
    handler = Prefill()
    with serving(listen, handler) as server, connect(server) as sock:
        sock.sendall(encode_frame(fetch_of(**change)))
        data = b""
        while b"refused" not in data:
            data += sock.recv(4096)
        assert not handler.jobs


def test_credit_beyond_reason_does_not_fill_the_senders_memory(listen: str) -> None:
    handler = Prefill()
    with serving(listen, handler) as server, connect(server) as sock:
        sock.sendall(encode_frame(fetch_of(tokens=tokens_of(3 * WINDOW), window=2**62)))
        sock.sendall(encode_frame(Credit("j", 2**62)) + encode_frame(Credit("j", -5)))
        handler.wait(lambda handler: bool(handler.jobs))
        (key,) = handler.jobs
        wait_until(lambda: handler.streams[key].room() < WINDOW // 4)  # else it is asked for more
        assert handler._next[key] <= 2 * WINDOW
    handler.wait(lambda handler: bool(handler.cancelled))


def test_a_receiver_of_a_small_window_gets_no_more_and_no_less(listen: str) -> None:
    handler = Prefill()
    with serving(listen, handler) as server, connect(server) as sock:
        sock.sendall(encode_frame(fetch_of(tokens=tokens_of(7), window=4)))
        handler.wait(lambda handler: bool(handler.jobs))
        (key,) = handler.jobs
        wait_until(lambda: handler._next[key] == 4)
        sock.sendall(encode_frame(Credit("j", 1)))
        wait_until(lambda: handler._next[key] == 5)
        sock.sendall(encode_frame(Credit("j", 2)))
        wait_until(lambda: handler._next[key] == 7)


def test_freeing_what_was_not_held_closes_the_connection(tmp_path: Path) -> None:
    with serving(f"unix:{tmp_path}/kv.sock", Prefill()) as server, connect(server) as sock:
        sock.sendall(encode_frame(Freed(3)))
        assert is_closed(sock)


def test_unknown_jobs_are_ignored(listen: str) -> None:
    with serving(listen, Prefill()) as server, connect(server) as sock:
        sock.sendall(encode_frame(Cancel("who")) + encode_frame(Credit("who", 1)))
        sock.sendall(encode_frame(fetch_of(window=8)))
        data = b""
        while b"done" not in data:
            data += sock.recv(65536)
