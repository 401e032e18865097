"""The connection to one replica: outputs, failures, ends of every kind, silence, news for the router."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from headrace.core.errors import ContextLengthError, EngineError, HeadraceError, UnavailableError
from headrace.core.messages import BlocksStored, CacheSnapshot, Failed, Output, Step
from headrace.router.replica_client import ReplicaClient
from tests.router.replicas import ROOT, FakeReplica, expected, make_request, until


class Receiver:
    """Notes what it is told; ``after`` is called with each list of outputs."""

    def __init__(self, after=lambda outputs: None) -> None:
        self.outputs: list[Output] = []
        self.calls = 0
        self.failure: tuple[HeadraceError, str] | None = None
        self.after = after

    def on_outputs(self, outputs):
        assert self.failure is None, "an output after the failure"
        self.calls += 1
        self.outputs += outputs
        self.after(outputs)

    def on_failed(self, error, outcome):
        assert self.failure is None, "failed twice"
        self.failure = error, outcome

    def tokens(self, sample: int = 0) -> list[int]:
        return [t for o in self.outputs if o.sample_index == sample for t in o.token_ids]

    @property
    def num_ended(self) -> int:
        return sum(output.finish_reason is not None for output in self.outputs)


class Listener:
    def __init__(self) -> None:
        self.told: list[tuple] = []

    def model_info(self, model):
        return None

    def on_up(self, replica_id, **facts):
        self.told.append(("up", replica_id, facts))

    def on_down(self, replica_id, reason):
        self.told.append(("down", replica_id))

    def on_stats(self, replica_id, stats):
        self.told.append(("stats", stats))

    def on_events(self, replica_id, first_seq, events):
        self.told.append(("events", first_seq, list(events)))

    def on_snapshot(self, replica_id, snapshot):
        self.told.append(("snapshot", snapshot))

    def kinds(self) -> list[str]:
        return [told[0] for told in self.told]


@pytest.fixture
async def replica(tmp_path):
    replica = FakeReplica(tmp_path / "a.sock")
    await replica.start()
    yield replica
    await replica.close()


@pytest.fixture
async def client(replica):
    client = await ReplicaClient.connect(replica.path, timeout=10)
    yield client
    await client.close()


def submit(client, request, receiver=None):
    receiver = receiver or Receiver()
    client.submit(request, receiver)
    return receiver


async def test_hello_and_tokens(replica, client):
    assert client.alive
    assert client.hello == replica.hello
    receiver = submit(client, make_request())
    assert not receiver.calls  # never from within submit
    await until(lambda: receiver.num_ended)
    assert receiver.tokens() == expected(make_request())
    assert receiver.outputs[-1].finish_reason == "length"
    assert client.num_open == 0
    assert replica.submits == [make_request()]
    assert client.stats.num_blocks == 1000


async def test_one_steps_outputs_of_a_request_come_in_one_call(replica, client):
    receiver = submit(client, make_request(n=3, max_tokens=4))
    other = submit(client, make_request("other", max_tokens=4))
    await until(lambda: receiver.num_ended == 3 and other.num_ended)
    assert receiver.calls == other.calls == 4
    for sample in range(3):
        assert receiver.tokens(sample) == expected(make_request(n=3, max_tokens=4), sample)


async def test_samples_of_one_request_may_come_one_by_one(replica, client):
    second, third = Receiver(), Receiver()
    client.submit(make_request(sample_index=1), second)
    client.submit(make_request(sample_index=2), third)
    client.abort("r", 2)
    await until(lambda: second.num_ended)
    assert second.tokens(1) == expected(make_request(), 1)
    assert not third.tokens(2)
    assert client.num_open == 0


async def test_abort_ends_the_engines_work(replica, client):
    receiver = submit(client, make_request(max_tokens=10_000))
    await until(lambda: receiver.calls)
    client.abort("r")
    calls = receiver.calls
    client.abort("r")
    client.abort("unknown")
    await until(lambda: replica.aborts and not replica.samples)
    await client.probe()  # whatever was on its way has arrived
    assert receiver.calls == calls
    assert len(replica.aborts) == 1


async def test_one_sample_can_be_stopped_alone_and_the_last_one_ends_the_request(replica, client):
    receiver = submit(client, make_request(n=2, max_tokens=10_000))
    await until(lambda: receiver.calls)
    client.abort("r", 1)
    client.abort("r", 1)
    stopped = len(receiver.tokens(1))
    await until(lambda: len(receiver.tokens(0)) > stopped + 3)
    assert len(receiver.tokens(1)) == stopped
    client.abort("r", 0)
    assert client.num_open == 0
    await until(lambda: not replica.samples)
    assert [abort.sample_index for abort in replica.aborts] == [1, None]


@pytest.mark.parametrize(
    ("failed", "kind", "outcome"),
    [
        (Failed("r", 500, "server_error", "broken"), EngineError, "replica_fault"),
        (Failed("r", 503, "service_unavailable", "draining"), UnavailableError, "aborted"),
        (
            Failed("r", 400, "invalid_request_error", "long", None, "context_length_exceeded"),
            ContextLengthError,
            "caller_fault",
        ),
    ],
)
async def test_a_failure_says_whose_fault_it_was(replica, client, failed, kind, outcome):
    replica.paused = True
    receiver = submit(client, make_request(n=2))
    await until(lambda: replica.submits)
    replica.peers[0].send(Step(outputs=[], failed=[failed], stats=replica.stats))
    await until(lambda: receiver.failure)
    error, said = receiver.failure
    assert type(error) is kind and said == outcome
    assert client.num_open == 0


@pytest.mark.parametrize("trouble", ["die", "half", "garbage"])
async def test_whatever_ends_the_connection_fails_every_request_once_and_it_connects_again(
    replica, client, trouble
):
    replica.trouble = lambda request, sample, position: trouble if position == 3 else None
    receivers = [submit(client, make_request(str(index), n=2)) for index in range(3)]
    await until(lambda: all(receiver.failure for receiver in receivers))
    for receiver in receivers:
        assert isinstance(receiver.failure[0], UnavailableError)
        assert receiver.failure[1] == "replica_gone"
        received = receiver.tokens()
        assert received == expected(make_request(), 0, len(received))
        assert len(received) == 3 or trouble == "garbage"  # which takes along what came in the same read
    assert client.num_open == 0
    replica.trouble = lambda *_: None
    if trouble != "garbage":
        await until(lambda: not client.alive)
        with pytest.raises(UnavailableError):
            client.submit(make_request(), Receiver())
        await replica.restart()
    await client.wait_ready(10)
    again = submit(client, make_request("again"))
    await until(lambda: again.num_ended)


async def test_a_receiver_that_throws_costs_nobody_else_anything(replica, client):
    def throw(outputs):
        raise RuntimeError("no")

    bad = submit(client, make_request("bad", max_tokens=10_000), Receiver(throw))
    good = submit(client, make_request("good"))
    await until(lambda: good.num_ended)
    assert bad.calls == 1 and bad.failure is not None
    assert good.tokens() == expected(make_request("good"))
    assert client.alive
    await until(lambda: not replica.samples)


async def test_an_abort_from_within_an_output_is_heard_at_once(replica, client):
    receiver = submit(client, make_request(max_tokens=10_000), Receiver(lambda outputs: client.abort("r")))
    await until(lambda: replica.aborts)
    await client.probe()
    assert receiver.calls == 1


async def test_without_a_replica(tmp_path):
    with pytest.raises(UnavailableError, match="no replica answered"):
        await ReplicaClient.connect(tmp_path / "nobody", timeout=0.1)
    client = ReplicaClient(tmp_path / "nobody")
    client.start()
    assert not client.alive
    client.drain()
    client.abort("r")
    client.subscribe()
    with pytest.raises(UnavailableError):
        client.submit(make_request(), Receiver())
    with pytest.raises(UnavailableError):
        await client.probe()
    await client.close()


async def test_it_waits_for_a_replica_that_comes_later_and_can_be_hurried(tmp_path):
    client = ReplicaClient(tmp_path / "a.sock")
    client.start()
    with pytest.raises(UnavailableError):
        await client.wait_ready(0.1)
    replica = FakeReplica(tmp_path / "a.sock")
    await replica.start()
    client.hurry()
    assert await client.wait_ready(10) == replica.hello
    await client.close()
    await replica.close()


async def test_drain_and_probe(replica, client):
    assert not (await client.probe()).draining
    client.drain()
    assert (await client.probe()).draining


async def test_close_ends_open_requests(replica):
    client = await ReplicaClient.connect(replica.path, timeout=10)
    replica.paused = True
    receiver = submit(client, make_request())
    await client.close()
    assert receiver.failure is not None and receiver.failure[1] == "replica_gone"
    assert not client.alive


@contextlib.asynccontextmanager
async def watched(replica, **options):
    client = ReplicaClient(replica.path, **options)
    client.start()
    try:
        await client.wait_ready(10)
        yield client
    finally:
        await client.close()


async def test_silence_with_requests_is_given_up_and_silence_without_is_not(replica):
    hung: list[int] = []
    async with watched(replica, silence_s=0.2, on_hang=hung.append) as client:
        replica.hangs = True
        await asyncio.sleep(0.5)
        assert not hung and client.alive
        receiver = submit(client, make_request())
        await until(lambda: receiver.failure)
        assert receiver.failure[1] == "replica_gone"
        assert hung == [replica.hello.pid]


async def test_idle_silence_is_noticed_where_asked_for(replica):
    hung: list[int] = []
    async with watched(replica, silence_s=0.1, watch_idle=True, on_hang=hung.append):
        await asyncio.sleep(0.3)
        assert not hung  # it answers the probes
        replica.hangs = True
        await until(lambda: hung)


async def test_a_replica_that_is_busy_but_answers_probes_is_kept(replica):
    hung: list[int] = []
    async with watched(replica, silence_s=0.2, on_hang=hung.append) as client:
        replica.paused = True
        receiver = submit(client, make_request())
        await asyncio.sleep(0.7)
        assert not hung and receiver.failure is None
        replica.resume()
        await until(lambda: receiver.num_ended)


async def test_the_router_hears_of_state_cache_and_load(replica):
    listener = Listener()
    stored = BlocksStored(block_ids=[b"x" * 32], parent=ROOT)
    replica.snapshot = CacheSnapshot(stored=[stored], next_seq=5)
    async with watched(replica, replica_id="a", model="name", listener=listener) as client:
        await until(lambda: "snapshot" in listener.kinds())
        assert listener.kinds() == ["up", "snapshot"]
        facts = listener.told[0][2]
        assert facts["model"].model == "name" and facts["model"].root_identity == ROOT
        assert facts["instance"] == replica.hello.instance
        assert facts["capabilities"].exact_rescue
        assert replica.subscribes[0].next_seq == 0 and replica.subscribes[0].instance == ""
        replica.tell(5, stored)
        await until(lambda: "stats" in listener.kinds())
        assert listener.told[2] == ("events", 5, [stored])
        client.subscribe(6)
        await until(lambda: len(replica.subscribes) == 2)
        assert replica.subscribes[1].next_seq == 6
        assert replica.subscribes[1].instance == replica.hello.instance


async def test_the_listener_hears_of_the_end_before_the_receivers_do(replica):
    order: list[str] = []
    listener = Listener()
    listener.on_down = lambda replica_id, reason: order.append("down")  # type: ignore[method-assign]
    async with watched(replica, replica_id="a", listener=listener) as client:
        replica.paused = True
        receiver = Receiver()
        receiver.on_failed = lambda error, outcome: order.append("failed")  # type: ignore[method-assign]
        client.submit(make_request(), receiver)
        await until(lambda: replica.submits)
        replica.die()
        await until(lambda: len(order) == 2)
    assert order == ["down", "failed"]
