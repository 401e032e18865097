"""Blocks over both transports: order, windows, refusals, several jobs and processes at once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from headrace.core.errors import UsageError
from headrace.kvcache import connector
from headrace.kvcache.channel import parse_address
from headrace.kvcache.connector import ConnectorClient, ConnectorServer
from headrace.kvcache.source import WINDOW_BYTES
from tests.kvcache.transfers import (
    BLOCK_BYTES,
    FORMAT,
    ROOT,
    WAIT_S,
    Prefill,
    Sink,
    job_of,
    nothing_left,
    wait_until,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


def serve(listen: str, handler: Prefill, block_bytes: int = BLOCK_BYTES, **options: float) -> ConnectorServer:
    return ConnectorServer(listen, handler, root=ROOT, kv_format=FORMAT, block_bytes=block_bytes, **options)


@pytest.fixture
def client() -> Iterator[ConnectorClient]:
    client = ConnectorClient(kv_format=FORMAT, block_bytes=BLOCK_BYTES)
    yield client
    client.close()


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


@pytest.fixture
def server(listen: str, prefill: Prefill) -> Iterator[ConnectorServer]:
    server = serve(listen, prefill)
    yield server
    server.close()


def test_a_chain_arrives_whole_and_in_order(
    server: ConnectorServer, client: ConnectorClient, prefill: Prefill
) -> None:
    job = job_of(300, address=server.address)
    sink = Sink(client, job).open()
    assert sink.wait() == ""
    assert sink.delivered == job.block_ids
    assert not prefill.cancelled


def test_the_end_of_computing_is_told_before_the_last_blocks(
    server: ConnectorServer, client: ConnectorClient, prefill: Prefill
) -> None:
    prefill.limit = 3
    job = job_of(4, address=server.address)
    sink = Sink(client, job).open()
    sink.wait_delivered(3)
    (key,) = prefill.jobs
    prefill.streams[key].computed()
    wait_until(lambda: sink.num_computed == 1)
    assert len(sink.delivered) == 3
    prefill.limit = 4
    prefill.room(key)
    assert sink.wait() == ""
    assert sink.num_computed == 1


def test_only_what_is_missing_is_asked_for(
    server: ConnectorServer, client: ConnectorClient, prefill: Prefill
) -> None:
    job = job_of(20, first=13, address=server.address)
    sink = Sink(client, job).open()
    assert sink.wait() == ""
    assert sink.delivered == job.block_ids[13:]
    assert [asked.first for asked in prefill.jobs.values()] == [13]


def test_nothing_missing_ends_at_once(client: ConnectorClient) -> None:
    assert Sink(client, job_of(3, first=3, address="tcp://127.0.0.1:1")).open().wait() == ""


def test_jobs_share_a_connection(server: ConnectorServer, client: ConnectorClient, prefill: Prefill) -> None:
    sinks = [Sink(client, job_of(60, seed=seed, address=server.address)).open() for seed in range(8)]
    assert [sink.wait() for sink in sinks] == [""] * 8
    assert {key.split(":")[0] for key in prefill.jobs} == {"0"}


def test_a_block_of_any_size_passes(listen: str) -> None:
    """Larger than the ring's, the socket's and the receive buffers; and one of a byte."""
    for num_bytes in (1, 24 * 1024 * 1024):
        server = serve(listen, Prefill(block_bytes=num_bytes), num_bytes)
        client = ConnectorClient(kv_format=FORMAT, block_bytes=num_bytes)
        sink = Sink(client, job_of(4, address=server.address), block_bytes=num_bytes).open()
        assert sink.wait() == ""
        client.close()
        server.close()


def test_a_sink_that_takes_nothing_gets_one_window(
    server: ConnectorServer, client: ConnectorClient, prefill: Prefill
) -> None:
    window = WINDOW_BYTES // BLOCK_BYTES
    job = job_of(window + 200, address=server.address)
    sink = Sink(client, job, hold=True).open()
    sink.wait_delivered(window)
    (stream,) = prefill.streams.values()
    assert stream.room() == 0
    other = Sink(client, job_of(50, seed=1, address=server.address)).open()
    assert other.wait() == "", "a job whose sink is full must not hold up another"
    assert len(sink.delivered) == window
    client.consumed(job.job_id, window)
    assert sink.wait() == ""
    assert len(sink.delivered) == window + 200


def test_blocks_wait_in_the_engine_while_the_connection_is_full(tmp_path: Path) -> None:
    """The receiver does not read at all: the sender keeps a window in memory, not the chain."""
    handler = Prefill()
    server = serve(f"unix:{tmp_path}/kv.sock", handler)
    client = ConnectorClient(kv_format=FORMAT, block_bytes=BLOCK_BYTES)
    release = threading.Event()

    class Slow(Sink):
        def deliver(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
            release.wait()
            super().deliver(index, block_id, payload)

    window = WINDOW_BYTES // BLOCK_BYTES
    sink = Slow(client, job_of(3 * window, address=server.address)).open()
    handler.wait(lambda handler: bool(handler.jobs))
    (key,) = handler.jobs
    wait_until(lambda: handler._next[key] == window)
    assert handler.streams[key].room() == 0
    release.set()
    assert sink.wait() == ""
    client.close()
    server.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kv_format": "bfloat16 head-major 4x2x8"}, "its blocks are float32 head-major 4x2x8, not bfloat16"),
        ({"root": b"x" * 32}, "another model revision"),
    ],
)
def test_another_format_or_model_is_refused_in_words(
    server: ConnectorServer, prefill: Prefill, change: dict[str, object], words: str
) -> None:
    client = ConnectorClient(kv_format=str(change.get("kv_format", FORMAT)), block_bytes=BLOCK_BYTES)
    job = job_of(3, address=server.address)
    if "root" in change:
        job = dataclasses.replace(job, root=b"x" * 32)
    sink = Sink(client, job).open()
    assert words in sink.wait()
    assert not sink.delivered and not prefill.jobs
    client.close()


def test_two_jobs_of_one_name_do_not_mix(server: ConnectorServer, client: ConnectorClient) -> None:
    first = Sink(client, job_of(3000, name="same", address=server.address), hold=True).open()
    first.wait_delivered(1)
    second = Sink(client, job_of(5, seed=1, name="same", address=server.address)).open()
    assert "open already" in second.wait()
    client.cancel("same")
    assert first.wait() == "cancelled"


def test_cancel_reaches_the_engine(
    server: ConnectorServer, client: ConnectorClient, prefill: Prefill
) -> None:
    prefill.limit = 5
    job = job_of(50, address=server.address)
    sink = Sink(client, job).open()
    sink.wait_delivered(5)
    client.cancel(job.job_id)
    assert sink.wait() == "cancelled"
    prefill.wait(lambda prefill: prefill.cancelled == list(prefill.jobs))
    # The connection goes on.
    prefill.limit = 10**9
    assert Sink(client, job_of(5, seed=1, address=server.address)).open().wait() == ""
    client.cancel("never opened")


def assert_set(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_cancel_never_overtakes_its_job(
    server: ConnectorServer, client: ConnectorClient, prefill: Prefill
) -> None:
    """The first is cancelled before there is a connection."""
    prefill.limit = 0
    for seed in range(3):
        job = job_of(3, seed=seed, address=server.address)
        release = threading.Event()
        client._io.post(partial(assert_set, release))  # so that both are there at once
        sink = Sink(client, job).open()
        client.cancel(job.job_id)
        release.set()
        assert sink.wait() == "cancelled"
    prefill.wait(lambda prefill: len(prefill.cancelled) == 3)
    assert prefill.cancelled == list(prefill.jobs)


def test_what_the_engine_says_at_its_end_is_told(server: ConnectorServer, client: ConnectorClient) -> None:
    class Unwilling(Prefill):
        def start(self, job: connector.SendJob, stream: connector.SendStream) -> None:
            stream.end("the prompt is longer than the model's context")

    server.handler = Unwilling()
    assert "longer than" in Sink(client, job_of(3, address=server.address)).open().wait()


def test_a_handler_that_ignores_its_room_loses_the_job(listen: str, client: ConnectorClient) -> None:
    class Greedy(Prefill):
        def room(self, key: str) -> None:
            for index in range(2 * WINDOW_BYTES // BLOCK_BYTES):
                self.streams[key].send(index, b"i" * 32, bytes(BLOCK_BYTES))

    handler = Greedy()
    server = serve(listen, handler)
    job = job_of(5000, address=server.address)
    job = dataclasses.replace(job, block_ids=[b"i" * 32] * 5000)

    class Blind(Sink):
        def deliver(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None: ...

    assert "ran ahead" in Blind(client, job).open().wait()
    handler.wait(lambda handler: bool(handler.cancelled))
    server.close()


def test_a_deadline_ends_a_job(server: ConnectorServer, client: ConnectorClient, prefill: Prefill) -> None:
    prefill.limit = 2
    job = job_of(9, address=server.address, deadline=time.monotonic() + 0.5)
    sink = Sink(client, job).open()
    assert "deadline" in sink.wait()
    prefill.wait(lambda prefill: bool(prefill.cancelled))


def test_closing_either_side_ends_its_jobs(listen: str) -> None:
    for closes_first in ("client", "server"):
        handler = Prefill(limit=1)
        server = serve(listen, handler)
        client = ConnectorClient(kv_format=FORMAT, block_bytes=BLOCK_BYTES)
        sink = Sink(client, job_of(4, address=server.address)).open()
        sink.wait_delivered(1)
        (server if closes_first == "server" else client).close()
        assert sink.wait()
        handler.wait(lambda handler: handler.cancelled == list(handler.jobs))
        client.close()
        server.close()
        assert Sink(client, job_of(4, address=server.address)).open().wait() == "the connector is closed"


def test_a_server_that_comes_back_is_found_again(client: ConnectorClient, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/kv.sock"
    reason = Sink(client, job_of(4, address=address)).open().wait()
    assert "cannot connect" in reason and "on another host or in another container" in reason
    for seed in range(3):
        server = serve(address, Prefill())
        assert Sink(client, job_of(4, seed=seed, address=address)).open().wait() == ""
        server.close()
        assert not Path(parse_address(address)).exists()  # type: ignore[arg-type]
        wait_until(lambda: not client._receivers)


@pytest.mark.parametrize(
    "address", ["", "unix:", "tcp:", "tcp://", "tcp://host", "tcp://host:", "tcp://h:99999", "shm:/x", "x"]
)
def test_what_is_no_address_is_said(address: str, client: ConnectorClient) -> None:
    with pytest.raises(UsageError):
        parse_address(address)
    with pytest.raises(UsageError):
        serve(address, Prefill())
    assert "no address" in Sink(client, job_of(2, address=address)).open().wait()


def test_where_a_server_cannot_listen_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for listen in (f"unix:{tmp_path}/file/kv.sock", f"unix:{tmp_path}/{'x' * 200}", "tcp://203.0.113.1:0"):
        with pytest.raises(UsageError) as error:
            serve(listen, Prefill())
        assert error.value.hint


def test_addresses() -> None:
    assert parse_address("unix:/run/kv.sock") == "/run/kv.sock"
    assert parse_address("tcp://10.0.0.1:8100") == ("10.0.0.1", 8100)
    assert parse_address("tcp://[::1]:8100") == ("::1", 8100)
