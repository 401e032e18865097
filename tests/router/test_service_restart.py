"""A router that has just started, its process, its death and its return."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from random import Random

import msgspec
import pytest

from headrace.core.knobs import RouterConfig
from headrace.core.launch import RouterSpec, StartEvent
from headrace.core.process import bind_unix
from headrace.core.routing import Attach, Endpoint, FromRouter, Lease, Place, Placement, Release, Route
from headrace.core.wire import encode_frame, peer_decoder
from headrace.router.remote import RemotePlacer
from headrace.router.service import RouterService
from tests.router.fleet import LOG
from tests.router.replicas import MODEL, FakeReplica, make_request, running, until
from tests.router.services import CONFIG, Gateway, check, empty, in_flight, service, supervisor


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
