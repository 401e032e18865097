"""The client against a scripted replica, in the test's own event loop."""

from __future__ import annotations

import asyncio

import pytest

from headrace.core.errors import EngineError, OverloadedError, UnavailableError
from headrace.core.messages import BlocksStored, Failed, Output, Stats, Step
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.core.wire import encode_frame
from headrace.router import replica_client
from headrace.router.replica_client import ReplicaClient
from headrace.router.replica_stream import ReplicaStream
from tests.gateway.fake_replica import FakeReplica, Plan

EOS = 9


@pytest.fixture
async def replica(tmp_path):
    replica = FakeReplica(tmp_path / "replica.sock", vocab_size=100, eos=EOS)
    await replica.start()
    yield replica
    await replica.close()


@pytest.fixture
async def client(replica):
    client = await ReplicaClient.connect(replica.path, timeout=10)
    yield client
    await client.close()


def request(name: str = "r", n: int = 1, **sampling) -> Request:
    return Request(
        request_id=name, prompt=pack_tokens([1, 2, 3]), sampling=SamplingParams(n=n, seed=1, **sampling)
    )


async def collect(stream: ReplicaStream) -> list[Output]:
    return [output async for outputs in stream for output in outputs]


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


async def test_hello_and_tokens(replica, client):
    assert client.alive
    assert client.hello == replica.hello
    outputs = await collect(client.submit(request()))
    assert [token for output in outputs for token in output.token_ids] == [1, 2, 3, EOS]
    assert outputs[-1].finish_reason == "stop"
    assert client.num_open == 0
    assert replica.requests == [request()]
    assert client.stats.kv_cache_usage == 0.25


async def test_several_requests_in_one_stream(replica, client):
    outputs = await collect(client.submit(request("a", n=2), request("b")))
    ended = sorted((o.request_id, o.sample_index) for o in outputs if o.finish_reason)
    assert ended == [("a", 0), ("a", 1), ("b", 0)]


async def test_many_streams_share_the_connection(replica, client):
    streams = [client.submit(request(str(index))) for index in range(50)]
    results = await asyncio.gather(*map(collect, streams))
    for index, outputs in enumerate(results):
        assert {output.request_id for output in outputs} == {str(index)}
        assert outputs[-1].finish_reason == "stop"
    assert replica.num_connections == 1


async def test_abort_ends_the_stream_and_the_engines_work(replica, client):
    replica.plan = lambda request: Plan(endless=True)
    stream = client.submit(request(max_tokens=None))
    await anext(stream)
    client.abort("r")
    await collect(stream)
    assert stream.ended
    await until(lambda: not replica.running)
    stream.abort()
    client.abort("r")
    client.abort("unknown")
    assert len(replica.aborts) == 1


async def test_leaving_the_context_aborts(replica, client):
    replica.plan = lambda request: Plan(silent=True)
    with client.submit(request("a"), request("b")):
        await until(lambda: len(replica.running) == 2)
    await until(lambda: not replica.running)
    assert client.num_open == 0


async def test_one_sample_can_be_stopped_alone(replica, client):
    replica.plan = lambda request: Plan(tokens=range(8), start_after=0)
    stream = client.submit(request(n=3))
    first = await anext(stream)
    stream.abort_sample("r", 1)
    stream.abort_sample("r", 1)
    rest = await collect(stream)
    assert {output.sample_index for output in first} == {0, 1, 2}
    assert [o.sample_index for o in rest if o.finish_reason] == [0, 2]
    assert [abort.sample_index for abort in replica.aborts] == [1]


async def test_stopping_a_sample_that_has_ended_leaves_the_others(replica, client):
    """A stop string may be found in the very output with which the engine ended the sample."""
    stream = ReplicaStream(client, {"r": 2}, 10_000)
    stream.put(Output("r", 0, [1], "length"))
    stream.abort_sample("r", 0)
    assert not stream.ended
    stream.put(Output("r", 1, [2], "stop"))
    assert [o.sample_index for o in await collect(stream)] == [0, 1]


async def test_stopping_every_sample_ends_the_request(replica, client):
    replica.plan = lambda request: Plan(endless=True)
    stream = client.submit(request(n=2, max_tokens=None))
    await anext(stream)
    stream.abort_sample("r", 0)
    stream.abort_sample("r", 1)
    await collect(stream)
    await until(lambda: not replica.running)


async def test_failed_requests_raise_what_the_replica_says(replica, client):
    replica.plan = lambda request: Plan(failure=Failed("", 500, "server_error", "broken"))
    with pytest.raises(EngineError, match="broken"):
        await collect(client.submit(request()))


@pytest.mark.parametrize("trouble", ["die_after", "garbage_after"])
async def test_death_ends_every_stream_and_the_client_connects_again(replica, client, trouble):
    replica.plan = lambda request: Plan(tokens=range(8), **{trouble: 3})
    streams = [client.submit(request(str(index))) for index in range(3)]
    for stream in streams:
        with pytest.raises(UnavailableError):
            await collect(stream)
    await client.wait_ready(10)
    replica.plan = lambda request: Plan()
    assert (await collect(client.submit(request("again"))))[-1].finish_reason == "stop"
    assert replica.num_connections == 2


async def test_tokens_before_the_death_are_delivered(replica, client):
    replica.plan = lambda request: Plan(tokens=[4, 5, 6], die_after=2)
    stream = client.submit(request())
    received: list[int] = []
    with pytest.raises(UnavailableError):
        async for outputs in stream:
            received += [token for output in outputs for token in output.token_ids]
    assert received == [4, 5]


async def test_without_a_replica(tmp_path):
    with pytest.raises(UnavailableError, match="no replica answered"):
        await ReplicaClient.connect(tmp_path / "nobody", timeout=0.1)
    client = ReplicaClient(tmp_path / "nobody")
    client.start()
    assert not client.alive
    client.drain()
    with pytest.raises(UnavailableError):
        client.submit(request())
    with pytest.raises(UnavailableError):
        await client.probe()
    await client.close()


async def test_it_waits_for_a_replica_that_comes_later(tmp_path):
    client = ReplicaClient(tmp_path / "replica.sock")
    client.start()
    await asyncio.sleep(0.05)
    replica = FakeReplica(tmp_path / "replica.sock", vocab_size=100, eos=EOS)
    await replica.start()
    assert await client.wait_ready(10) == replica.hello
    await client.close()
    await replica.close()


async def test_probe(replica, client):
    health = await client.probe()
    assert not health.draining
    assert health.stats.kv_cache_usage == 0.25


async def test_an_unread_stream_is_bounded(replica, client):
    replica.plan = lambda request: Plan(endless=True, tokens_per_step=10)
    cut = []
    stream = client.submit(request(max_tokens=None), max_backlog_bytes=10_000)
    stream.on_overflow = lambda: cut.append(True)
    await until(lambda: stream.ended)
    with pytest.raises(OverloadedError):
        await collect(stream)
    assert cut == [True]
    await until(lambda: not replica.running)


async def test_a_stream_that_is_read_never_overflows(replica, client):
    replica.plan = lambda request: Plan(endless=True, tokens_per_step=10)
    outputs = await collect(client.submit(request(max_tokens=500), max_backlog_bytes=10_000))
    assert sum(len(output.token_ids) for output in outputs) == 500


async def test_close_ends_open_streams(replica):
    client = await ReplicaClient.connect(replica.path, timeout=10)
    replica.plan = lambda request: Plan(silent=True)
    stream = client.submit(request())
    await client.close()
    with pytest.raises(UnavailableError):
        await collect(stream)
    assert not client.alive


async def test_events_reach_their_listener(replica, client):
    seen = []
    client.on_events = lambda first, events: seen.append((first, list(events)))
    event = BlocksStored(block_ids=[b"x" * 32], parent=b"y" * 32)
    step = Step(outputs=[], failed=[], stats=Stats(), events=[event], event_seq=7)
    for writer in replica._writers:
        writer.write(encode_frame(step))
    await until(lambda: seen)
    assert seen == [(7, [event])]


async def test_a_replica_that_hangs_is_given_up(replica, monkeypatch):
    monkeypatch.setattr(replica_client, "SILENCE_S", 0.2)
    monkeypatch.setattr(replica_client, "PROBE_TIMEOUT_S", 0.2)
    hung: list[int] = []
    client = ReplicaClient(replica.path, on_hang=hung.append)
    client.start()
    await client.wait_ready(10)
    replica.hangs = True
    await asyncio.sleep(0.6)
    assert not hung  # nobody waits for it
    stream = client.submit(request())
    with pytest.raises(UnavailableError, match="does not answer"):
        await asyncio.wait_for(collect(stream), 10)
    assert hung == [replica.hello.pid]
    assert client.num_open == 0
    await client.close()


async def test_one_long_step_is_no_hang(replica, monkeypatch):
    monkeypatch.setattr(replica_client, "SILENCE_S", 0.1)
    monkeypatch.setattr(replica_client, "PROBE_TIMEOUT_S", 10.0)
    hung: list[int] = []
    client = ReplicaClient(replica.path, on_hang=hung.append)
    client.start()
    await client.wait_ready(10)
    replica.plan = lambda request: Plan(silent=True)
    stream = client.submit(request())
    await asyncio.sleep(0.5)  # silent, but it answers probes
    assert not hung and not stream.ended
    stream.abort()
    await client.close()
