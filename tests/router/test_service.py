"""The router process: gateways and the supervisor on its socket, its death and its return."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from random import Random

import msgspec
import pytest

from headrace.core.errors import NotFoundError, OverloadedError, UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.launch import RouterSpec, StartEvent
from headrace.core.messages import Failed, Timing
from headrace.core.process import bind_unix
from headrace.core.routing import Attach, Endpoint, FromRouter, Lease, Place, Placement, Release, Route
from headrace.core.wire import encode_frame, peer_decoder
from headrace.router.dispatcher import Dispatcher
from headrace.router.remote import RemotePlacer
from headrace.router.service import RouterService
from tests.router.fleet import LOG, num_ready, submit
from tests.router.replicas import MODEL, FakeReplica, expected, make_request, running, until

CONFIG = RouterConfig(routing_policy="round_robin", replica_timeout_s=30.0)


class Gateway:
    """One gateway's share of the machinery."""

    def __init__(self, path: str, name: str, config: RouterConfig = CONFIG) -> None:
        self.placer = RemotePlacer(path, peer=name, log=LOG, config=config)
        self.dispatcher = Dispatcher(self.placer, config, log=LOG)

    async def __aenter__(self) -> Gateway:
        self.placer.start()
        self.dispatcher.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.dispatcher.close()
        await self.placer.close()

    async def ready(self, count: int) -> None:
        await until(lambda: num_ready(self.dispatcher) == count)

    def submit(self, request):
        return submit(self.dispatcher, request)


@contextlib.asynccontextmanager
async def supervisor(path: str, *replicas: FakeReplica, on_hang=None):
    placer = RemotePlacer(path, peer="supervisor", log=LOG, config=CONFIG, on_hang=on_hang)
    placer.start()
    for replica in replicas:
        placer.set_endpoint(replica.endpoint)
    try:
        yield placer
    finally:
        await placer.close()


@contextlib.asynccontextmanager
async def service(tmp_path, config: RouterConfig = CONFIG, **options):
    path = tmp_path / "router.sock"
    one = RouterService(config, log=LOG, **options)
    await one.start(bind_unix(path))
    try:
        yield one
    finally:
        await one.close()


@contextlib.asynccontextmanager
async def everything(tmp_path, count=2, gateways=2, **options):
    """A service, its supervisor, replicas that are up, gateways that know it."""
    path = str(tmp_path / "router.sock")
    replicas = [FakeReplica(tmp_path / f"{name}.sock", name) for name in "abcd"[:count]]
    async with (
        running(*replicas),
        service(tmp_path, **options) as one,
        supervisor(path, *replicas) as boss,
        contextlib.AsyncExitStack() as stack,
    ):
        gates = [await stack.enter_async_context(Gateway(path, f"gateway-{i}")) for i in range(gateways)]
        for gate in gates:
            await gate.ready(count)
        yield one, boss, replicas, gates


async def in_flight(placer) -> int:
    status = await placer.status()
    return sum(replica.num_in_flight for replica in status.replicas)


async def empty(placer) -> None:
    async with asyncio.timeout(20):
        while await in_flight(placer) or (await placer.status()).num_queued:
            await asyncio.sleep(0.001)


def check(sink, request) -> None:
    assert sink.error is None
    for sample in range(request.sampling.n):
        assert sink.tokens(sample) == expected(request, sample)


async def test_gateways_share_the_replicas_and_each_knows_the_model(tmp_path):
    async with everything(tmp_path) as (_, boss, replicas, gates):
        requests = [make_request(f"{i}", n=2) for i in range(20)]
        sinks = [gates[i % 2].submit(request) for i, request in enumerate(requests)]
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, requests, strict=True):
            check(sink, request)
        assert [len(replica.submits) for replica in replicas] == [10, 10]
        for gate in gates:
            assert gate.dispatcher.ready(MODEL)
            assert gate.dispatcher.info(MODEL).max_model_len == 512
        await empty(boss)
        (decision,) = await gates[0].placer.why("caller-3")
        assert decision.outcome == "finished" and decision.ttft_s is not None


async def test_a_death_is_seen_by_all_and_the_streams_go_on(tmp_path):
    async with everything(tmp_path) as (_, boss, replicas, gates):
        requests = [make_request(f"{i}", max_tokens=300) for i in range(8)]
        sinks = [gates[i % 2].submit(request) for i, request in enumerate(requests)]
        await until(lambda: all(len(sink.tokens()) > 5 for sink in sinks))
        replicas[0].die()
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, requests, strict=True):
            check(sink, request)
        assert sum(sink.flight.num_rescues for sink in sinks) == 4
        await empty(boss)


async def test_what_came_of_a_pair_reaches_the_router(tmp_path):
    """The way of a prompt to its replica, and a prefill side that a gateway saw fail."""
    told = Timing(0.0, 0.1, 4, 0.3, 96, 32)
    async with everything(tmp_path) as (one, boss, replicas, gates):
        for replica in replicas:
            replica.timing = lambda request: told
        sink = gates[0].submit(make_request("r"))
        await until(lambda: sink.ended)
        await empty(boss)
        (decision,) = await gates[0].placer.why("r")
        assert (decision.num_fetched_tokens, decision.num_disk_tokens, decision.fill_s) == (96, 32, 0.3)
        heard = []
        release = one.placer.release
        one.placer.release = lambda *args: (heard.append(args), release(*args))
        gates[0].placer.place(Route(request_id="s", model=MODEL, num_prompt_tokens=4), _Deaf())
        await until(lambda: gates[0].placer._leases)
        gates[0].placer.release("s", "aborted", 0, 0.0, "replica_gone")
        await until(lambda: heard)
        assert heard == [("s", "aborted", 0, 0.0, "replica_gone")]


class _Deaf:
    """Waits for a placement and does nothing with it."""

    def on_placed(self, placement):
        pass

    def on_refused(self, error):
        raise AssertionError(error)


async def test_hand_over_reaches_every_gateway(tmp_path):
    async with everything(tmp_path) as (_, boss, replicas, gates):
        requests = [make_request(f"{i}", max_tokens=300) for i in range(8)]
        sinks = [gates[i % 2].submit(request) for i, request in enumerate(requests)]
        await until(lambda: all(len(sink.tokens()) > 5 for sink in sinks))
        old = replicas[0]
        boss.set_endpoint(msgspec.structs.replace(old.endpoint, draining=True, hand_over=True))
        await until(lambda: not old.samples)
        boss.remove_endpoint(old.replica_id)
        old.die()
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, requests, strict=True):
            check(sink, request)
        assert all(len(gate.dispatcher.members()) == 1 for gate in gates)


async def test_a_gateway_that_vanishes_gives_back_what_it_held_and_waited_for(tmp_path):
    async with everything(tmp_path) as (one, boss, replicas, gates):
        for replica in replicas:
            replica.paused = True
            boss.set_endpoint(msgspec.structs.replace(replica.endpoint, max_in_flight=1))
        await until(lambda: all(m.endpoint.max_in_flight for m in gates[0].dispatcher.members()))
        sinks = [gates[0].submit(make_request(f"{i}")) for i in range(5)]
        other = gates[1].submit(make_request("other"))
        await until(lambda: sum(len(replica.submits) for replica in replicas) == 2)
        status = await boss.status()
        assert status.num_queued == 4
        gates[0].placer._link.end("test")  # as if its process had been killed, for the router
        gates[0].placer._leases.clear()
        gates[0].placer._waiting.clear()
        await until(lambda: any(r.request_id == "other" for replica in replicas for r in replica.submits))
        assert (await boss.status()).num_queued == 0
        for replica in replicas:
            replica.resume()
        await until(lambda: other.ended)
        check(other, make_request("other"))
        await empty(boss)
        one.placer.router.check_integrity()
        for sink in sinks:
            sink.flight.abort()
            sink.deaf = True


async def test_refusals_keep_their_kind_across_the_socket(tmp_path):
    async with everything(tmp_path, config=RouterConfig(max_queue=0)) as (_, boss, replicas, gates):
        stranger = gates[0].submit(msgspec.structs.replace(make_request(), model="unknown"))
        await until(lambda: stranger.error)
        assert isinstance(stranger.error, UnavailableError) and "unknown" in stranger.error.message
        for replica in replicas:
            boss.set_endpoint(msgspec.structs.replace(replica.endpoint, draining=True))
        await until(lambda: not gates[0].dispatcher.ready(MODEL))
        refused = gates[0].submit(make_request("more"))
        await until(lambda: refused.error)
        assert isinstance(refused.error, OverloadedError)
        await empty(boss)


@pytest.mark.parametrize("error", [OverloadedError("full", retry_after=17), NotFoundError("no", param="x")])
def test_an_error_is_the_same_on_the_other_side(error):
    there = Failed.of_error("r", error).to_error()
    assert (type(there), there.message, there.param, there.code) == (
        type(error),
        error.message,
        error.param,
        error.code,
    )
    assert getattr(there, "retry_after", None) == getattr(error, "retry_after", None)


async def test_questions_about_the_router(tmp_path):
    async with everything(tmp_path) as (_, boss, _, gates):
        for gate, counters in zip(gates, (b"one", b"two"), strict=True):
            gate.placer.report(counters)
            await gate.placer.status()  # answered after the report was read
        assert sorted(await gates[0].placer.reports()) == [b"one", b"two"]
        status = await boss.status()
        assert status.gateways == ["gateway-0", "gateway-1"]
        assert await boss.why("nothing") == []


async def test_without_a_router_questions_fail_and_requests_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.router.remote.ANSWER_S", 0.05)
    config = RouterConfig(max_queue=1)
    async with Gateway(str(tmp_path / "nobody.sock"), "g", config) as gate:
        with pytest.raises(UnavailableError, match="did not answer"):
            await gate.placer.status()
        waits = gate.submit(make_request("waits"))
        too_many = gate.submit(make_request("more"))
        await until(lambda: too_many.error)
        assert isinstance(too_many.error, OverloadedError)
        assert not waits.ended
        waits.flight.abort()
        waits.deaf = True
        assert not gate.placer._waiting


async def test_a_router_that_never_comes_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.router.remote.LATE_S", 0.0)
    monkeypatch.setattr("headrace.router.remote.SWEEP_S", 0.02)
    async with Gateway(str(tmp_path / "nobody.sock"), "g", RouterConfig(queue_timeout_s=0.05)) as gate:
        sink = gate.submit(make_request())
        await until(lambda: sink.error)
        assert isinstance(sink.error, UnavailableError)


async def test_a_peer_that_sends_garbage_is_cut_off_and_others_are_not(tmp_path):
    async with everything(tmp_path) as (_, _, _, gates):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "router.sock"))
        writer.write(b"\x05\x00\x00\x00hello")
        while await reader.read(1 << 16):
            pass
        writer.close()
        await writer.wait_closed()
        sink = gates[0].submit(make_request())
        await until(lambda: sink.ended)
        check(sink, make_request())


async def test_a_peer_that_does_not_read_is_cut_off_and_loses_its_leases(tmp_path):
    async with everything(tmp_path, max_backlog_bytes=10_000) as (one, boss, _, gates):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "router.sock"), limit=1)
        writer.write(encode_frame(Attach("deaf")))
        for number in range(20):
            writer.write(
                encode_frame(Place(Route(request_id=f"deaf-{number}", model=MODEL, num_prompt_tokens=1)))
            )
        await until(lambda: any(peer.held for peer in one._links.values() if peer.name == "deaf"))

        def say_more() -> bool:
            for number in range(200):
                one.on_hand_over(f"nobody-{number}")
            return not any(peer.name == "deaf" for peer in one._links.values())

        await until(say_more)
        await empty(boss)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        del reader
        sink = gates[1].submit(make_request())
        await until(lambda: sink.ended)
        check(sink, make_request())


async def test_a_hung_replica_is_told_to_the_supervisor(tmp_path):
    config = RouterConfig(replica_timeout_s=0.2)
    replica = FakeReplica(tmp_path / "a.sock", "a")
    hung: list[tuple[str, int]] = []
    path = str(tmp_path / "router.sock")
    async with (
        running(replica),
        service(tmp_path, config),
        supervisor(path, replica, on_hang=lambda *args: hung.append(args)) as boss,
    ):
        async with asyncio.timeout(20):
            while [r.member.state for r in (await boss.status()).replicas] != ["ready"]:
                await asyncio.sleep(0.001)
        replica.hangs = True
        await until(lambda: hung)
        assert hung[0] == ("a", replica.hello.pid)


class Raw:
    """A bare connection to the router."""

    def __init__(self, reader, writer) -> None:
        self._reader, self._writer = reader, writer
        self._decoder = peer_decoder()
        self._read: list[FromRouter] = []

    @classmethod
    async def open(cls, path) -> Raw:
        return cls(*await asyncio.open_unix_connection(str(path)))

    def send(self, *messages) -> None:
        self._writer.write(b"".join(map(encode_frame, messages)))

    async def expect(self, tag: str):
        async with asyncio.timeout(20):
            while True:
                for message in self._read:
                    if type(message).__name__ == tag:
                        self._read.remove(message)
                        return message
                self._read += self._decoder.feed(await self._reader.read(1 << 16))

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def route(name: str, model: str = MODEL) -> Route:
    return Route(request_id=name, model=model, num_prompt_tokens=4)


async def test_a_new_router_answers_nobody_before_it_knows_the_fleet(tmp_path):
    replica = FakeReplica(tmp_path / "a.sock", "a")
    path = tmp_path / "router.sock"
    async with running(replica), service(tmp_path):
        gateway = await Raw.open(path)
        lease = Lease(route=route("old"), placement=Placement(request_id="old", replica_id="a"), began=True)
        gateway.send(Attach("gateway", [lease]), Place(route("new")), Place(route("gone")))
        gateway.send(Release("gone", "aborted"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await gateway.expect("Fleet")
        async with supervisor(str(path), replica) as boss:
            fleet = await gateway.expect("Fleet")
            assert [member.state for member in fleet.members] == ["ready"]
            placed = await gateway.expect("Placed")
            assert placed.placement.request_id == "new"
            assert await in_flight(boss) == 2
            gateway.send(Release("old", "finished", 3, 0.1))
            await gateway.close()
            await empty(boss)


async def test_a_new_router_does_not_wait_for_ever(tmp_path):
    path = tmp_path / "router.sock"
    down = Endpoint(replica_id="a", model=MODEL, address=str(tmp_path / "a.sock"), kind="headrace")
    async with service(tmp_path, settle_s=0.05, grace_s=0.05):
        gateway = await Raw.open(path)
        gateway.send(Attach("gateway"))
        assert (await gateway.expect("Fleet")).members == []
        boss = RemotePlacer(str(path), peer="supervisor", log=LOG)
        boss.start()
        boss.set_endpoint(down)
        assert [m.state for m in (await gateway.expect("Fleet")).members] == ["starting"]
        gateway.send(Place(route("r", "unknown")))
        refused = await gateway.expect("Refused")
        assert refused.failed.request_id == "r"
        await boss.close()
        await gateway.close()


async def test_a_gateways_new_connection_takes_over_what_the_old_one_held(tmp_path):
    """As when the router has not noticed yet that the old one is dead."""
    replica = FakeReplica(tmp_path / "a.sock", "a")
    path = tmp_path / "router.sock"
    async with running(replica), service(tmp_path) as one, supervisor(str(path), replica) as boss:
        old, new = await Raw.open(path), await Raw.open(path)
        old.send(Attach("gateway"), Place(route("one")))
        placement = (await old.expect("Placed")).placement
        new.send(Attach("gateway", [Lease(route=route("one"), placement=placement, began=False)]))
        await new.expect("Fleet")
        await old.close()
        await until(lambda: len(one._links) == 2)
        assert await in_flight(boss) == 1
        new.send(Release("one", "finished"))
        await empty(boss)
        await new.close()


class Process:
    """``python -m headrace.router``, for real."""

    def __init__(self, path, config: RouterConfig = CONFIG) -> None:
        self._spec = msgspec.json.encode(RouterSpec(socket=str(path), router=config)) + b"\n"
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.router",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        self._process.stdin.write(self._spec)
        line = await self._process.stdout.readline()
        assert msgspec.json.decode(line, type=StartEvent).event == "ready"

    async def end(self, number: int) -> int:
        os.kill(self._process.pid, number)
        return await self.wait()

    async def wait(self) -> int:
        async with asyncio.timeout(20):
            code = await self._process.wait()
        self._process.stdin.close()
        with contextlib.suppress(ConnectionError):
            await self._process.stdin.wait_closed()
        return code

    def orphan(self) -> None:
        self._process.stdin.close()


async def test_the_process_ends_when_told_and_when_its_parent_is_gone(tmp_path):
    path = tmp_path / "router.sock"
    process = Process(path)
    await process.start()
    assert path.stat().st_mode & 0o077 == 0
    assert await process.end(signal.SIGTERM) == 0
    assert not path.exists()
    await process.start()
    process.orphan()
    assert await process.wait() == 0


async def test_a_process_that_cannot_start_says_why(tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "headrace.router",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(b"{}\n"), 20)
    event = msgspec.json.decode(out, type=StartEvent)
    assert event.event == "error" and event.kind == "UsageError"
    assert process.returncode == 2


async def test_the_router_is_killed_and_nobody_notices(tmp_path):
    """Streams run on without it, requests wait for its next life, leases are counted there again."""
    path = tmp_path / "router.sock"
    replicas = [FakeReplica(tmp_path / f"{name}.sock", name) for name in "ab"]
    process = Process(path)
    await process.start()
    async with (
        running(*replicas),
        supervisor(str(path), *replicas) as boss,
        Gateway(str(path), "g0") as g0,
        Gateway(str(path), "g1") as g1,
    ):
        for gate in (g0, g1):
            await gate.ready(2)
        for replica in replicas:
            replica.paused = True
        first = [make_request(f"{i}", max_tokens=50, n=1 + i % 2) for i in range(10)]
        sinks = [(g0, g1)[i % 2].submit(request) for i, request in enumerate(first)]
        await until(lambda: sum(len(replica.submits) for replica in replicas) == 10)
        await process.end(signal.SIGKILL)
        await until(lambda: g0.placer._link is None and g1.placer._link is None)
        second = [make_request(f"late-{i}") for i in range(6)]
        sinks += [(g0, g1)[i % 2].submit(request) for i, request in enumerate(second)]
        for replica in replicas[:1]:
            replica.resume()
        await until(lambda: all(s.ended for s in sinks[:10] if s.flight.placement.replica_id == "a"))
        assert all(gate.dispatcher.ready(MODEL) for gate in (g0, g1))
        assert not any(sink.ended for sink in sinks[10:])
        await process.start()
        await until(lambda: sum(len(replica.submits) for replica in replicas) == 16)
        running_now = sum(
            sink.flight.request.sampling.n for sink in sinks if not sink.ended and sink.flight.placement
        )
        assert running_now > 0
        replicas[1].resume()
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, first + second, strict=True):
            check(sink, request)
            assert sink.flight.num_rescues == 0
        await empty(boss)
    assert await process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize("seed", range(3))
async def test_routers_connections_and_replicas_come_and_go(tmp_path, seed):
    random = Random(seed)
    config = RouterConfig(routing_policy="round_robin", max_rescues=1000, retry_budget=1.0)
    path = tmp_path / "router.sock"
    replicas = [FakeReplica(tmp_path / f"{name}.sock", name) for name in "abc"]
    for replica in replicas:
        replica.trouble = lambda *_: "die" if random.random() < 0.001 else None
    one = RouterService(config, log=LOG)
    await one.start(bind_unix(path))
    async with (
        running(*replicas),
        supervisor(str(path), *replicas) as boss,
        Gateway(str(path), "g0", config) as g0,
        Gateway(str(path), "g1", config) as g1,
    ):
        for gate in (g0, g1):
            await gate.ready(3)
        left = [make_request(str(i), seed=i, n=1 + i % 2, max_tokens=1 + i % 30) for i in range(150)]
        requests, sinks = list(left), []
        while left or not all(sink.ended for sink in sinks):
            for _ in range(min(len(left), 3)):
                sinks.append((g0, g1)[len(sinks) % 2].submit(left.pop(0)))
            for replica in replicas:
                if replica._server is None:
                    await replica.restart()
            event = random.random()
            if event < 0.05:
                await one.close()
                one = RouterService(config, log=LOG)
                await one.start(bind_unix(path))
            elif event < 0.1:
                for link in list(one._links):
                    link.end("test")
            await asyncio.sleep(0.001)
        for sink, request in zip(sinks, requests, strict=True):
            check(sink, request)
        await empty(boss)
        assert not one._owners
        one.placer.router.check_integrity()
    await one.close()
