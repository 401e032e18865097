"""Peers that die, stop, lie or talk nonsense cost a job its rest, never a wrong block, and nothing leaks."""

from __future__ import annotations

import os
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

from headrace.kvcache.block_format import checksum
from headrace.kvcache.channel import encode_frame
from headrace.kvcache.connector import ConnectorClient, ConnectorServer
from headrace.kvcache.io_thread import TICK_S
from headrace.kvcache.receiving import Patience
from headrace.kvcache.source import WINDOW_BYTES
from headrace.kvcache.transfer import (
    PROTOCOL,
    Alive,
    Block,
    Cancel,
    Computed,
    Credit,
    Done,
    Fetch,
    Freed,
    Ring,
)
from tests.kvcache.transfers import (
    BLOCK_BYTES,
    FORMAT,
    ROOT,
    WAIT_S,
    Prefill,
    Sink,
    job_of,
    nothing_left,
    payload_of,
    tokens_of,
    wait_until,
)

CHILD = [sys.executable, "-m", "tests.kvcache.connector_child"]
WINDOW = WINDOW_BYTES // BLOCK_BYTES


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


@pytest.fixture(params=["unix", "tcp"])
def listen(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"unix:{tmp_path}/kv.sock" if request.param == "unix" else "tcp://127.0.0.1:0"


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
def fetching(**patience: float) -> Iterator[ConnectorClient]:
    client = ConnectorClient(kv_format=FORMAT, block_bytes=BLOCK_BYTES, patience=Patience(**patience))
    try:
        yield client
    finally:
        client.close()


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


def is_closed(sock: socket.socket) -> bool:
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


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


# Senders that lie: a script answers the first Fetch


class Script:
    """A sender that answers whatever it is told to."""

    def __init__(self, listen: str, tmp_path: Path) -> None:
        self.shared = listen.startswith("unix")
        self._sock = socket.socket(socket.AF_UNIX if self.shared else socket.AF_INET)
        self._sock.bind(str(tmp_path / "script.sock") if self.shared else ("127.0.0.1", 0))
        self._sock.listen()
        self.address = (
            f"unix:{tmp_path}/script.sock"
            if self.shared
            else f"tcp://127.0.0.1:{self._sock.getsockname()[1]}"
        )
        self.fd = -1
        self.peer = self._sock

    def accept(self, *, seals: bool = True, size: int = 16 * 32_768) -> None:
        self.peer, _ = self._sock.accept()
        if self.shared:
            import fcntl

            self.fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
            os.ftruncate(self.fd, size)
            if seals:
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            socket.send_fds(self.peer, [encode_frame(Ring(16, 32_768))], [self.fd])

    def block(self, head: Block, payload: bytes) -> None:
        if self.shared:
            os.pwrite(self.fd, payload, head.slot * 32_768)
            self.peer.sendall(encode_frame(head))
        else:
            self.peer.sendall(encode_frame(head) + payload)

    def wait_for(self, words: bytes) -> None:
        self.peer.settimeout(WAIT_S)
        data = b""
        while words not in data:
            more = self.peer.recv(65536)
            assert more, data
            data += more

    def say(self, message: object) -> None:
        self.peer.sendall(encode_frame(message))

    def close(self) -> None:
        self.peer.close()
        self._sock.close()
        if self.fd >= 0:
            os.close(self.fd)


@pytest.fixture
def script(listen: str, tmp_path: Path) -> Iterator[Script]:
    script = Script(listen, tmp_path)
    yield script
    script.close()


def good(job_id: str, ids: list[bytes], index: int, slot: int) -> tuple[Block, bytes]:
    payload = payload_of(ids[index])
    return Block(job_id, index, ids[index], len(payload), checksum(payload), slot), payload


@pytest.mark.parametrize("lie", ["flipped", "other id", "skipped", "repeated", "other block"])
def test_a_wrong_block_ends_the_job_and_is_counted(script: Script, lie: str) -> None:
    job = job_of(6, address=script.address)
    ids, name = job.block_ids, job.job_id
    with fetching() as client:
        sink = Sink(client, job).open()
        script.accept()
        for slot in range(2):
            script.block(*good(name, ids, slot, slot))
        head, payload = good(name, ids, {"skipped": 3, "repeated": 1}.get(lie, 2), 2)
        if lie == "flipped":
            payload = payload[:777] + bytes([payload[777] ^ 1]) + payload[778:]
        elif lie == "other id":
            head = Block(name, 2, ids[3], head.length, head.checksum, 2)
        elif lie == "other block":
            payload = payload_of(ids[3])
        script.block(head, payload)
        script.block(*good(name, ids, 3, 3))  # too late: the job is over
        assert sink.wait().startswith("block 2 arrived")
        assert sink.delivered == ids[:2]
        assert client.damaged_blocks == 1
        # The connection is sound and goes on.
        after = Sink(client, job_of(1, seed=5, address=script.address)).open()
        script.wait_for(b"job-5-0")
        script.block(*good("job-5-0", job_of(1, seed=5).block_ids, 0, 4))
        assert after.wait() == ""


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        encode_frame(Fetch("j", 1, b"", "", b"", 0, 1)),
        encode_frame(Block("job-0-0", 0, b"i" * 32, BLOCK_BYTES - 1, 0)),
        encode_frame(Block("job-0-0", 0, b"i" * 32, 2**60, 0)),
    ],
    ids=["bytes", "direction", "short", "long"],
)
def test_a_sender_that_talks_nonsense_is_left(script: Script, data: bytes) -> None:
    with fetching() as client:
        sink = Sink(client, job_of(6, address=script.address)).open()
        script.accept()
        script.peer.sendall(data)
        assert "the peer" in sink.wait()
        assert not sink.delivered
        assert is_closed(script.peer)


def test_a_block_that_was_cut_off_is_not_delivered(script: Script) -> None:
    job = job_of(6, address=script.address)
    with fetching() as client:
        sink = Sink(client, job).open()
        script.accept()
        script.block(*good(job.job_id, job.block_ids, 0, 0))
        head, payload = good(job.job_id, job.block_ids, 1, 1)
        script.peer.sendall(encode_frame(head)[:-2] if script.shared else encode_frame(head) + payload[:-1])
        sink.wait_delivered(1)
        script.peer.close()
        assert "closed" in sink.wait() or "broke" in sink.wait()
        assert sink.delivered == job.block_ids[:1]


def test_what_arrived_before_the_end_counts(script: Script) -> None:
    job = job_of(3, address=script.address)
    with fetching() as client:
        sink = Sink(client, job).open()
        script.accept()
        for index in range(2):
            script.block(*good(job.job_id, job.block_ids, index, index))
        script.say(Alive())
        script.say(Computed(job.job_id))
        script.say(Done(job.job_id))
        assert "1 blocks early" in sink.wait()
        assert sink.delivered == job.block_ids[:2]


@pytest.mark.parametrize("flaw", ["no seals", "too small", "no descriptor", "slot", "twice"])
def test_shared_memory_that_cannot_be_trusted_is_not_mapped(tmp_path: Path, flaw: str) -> None:
    script = Script("unix", tmp_path)
    job = job_of(3, address=script.address)
    with fetching() as client:
        sink = Sink(client, job).open()
        if flaw == "no descriptor":
            script.peer, _ = script._sock.accept()
            script.say(Ring(16, 32_768))
        else:
            script.accept(seals=flaw != "no seals", size=4096 if flaw == "too small" else 16 * 32_768)
        if flaw == "twice":
            script.say(Ring(16, 32_768))
        if flaw == "slot":
            head, _ = good(job.job_id, job.block_ids, 0, 16)
            script.say(head)
        assert "the peer" in sink.wait()
        assert not sink.delivered
    script.close()
