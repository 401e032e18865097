"""Senders that lie: a script answers the first Fetch. No wrong block is taken, and nothing leaks."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.kvcache.block_format import checksum
from headrace.kvcache.channel import encode_frame
from headrace.kvcache.transfer import (
    Alive,
    Block,
    Computed,
    Done,
    Fetch,
    Ring,
)
from tests.kvcache.transfers import (
    BLOCK_BYTES,
    WAIT_S,
    Sink,
    fetching,
    is_closed,
    job_of,
    nothing_left,
    payload_of,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


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
