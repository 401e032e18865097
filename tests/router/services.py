"""A router behind a socket with its gateways, its supervisor and replicas, as the tests of it share them."""

from __future__ import annotations

import asyncio
import contextlib

from headrace.core.knobs import RouterConfig
from headrace.core.process import bind_unix
from headrace.router.dispatcher import Dispatcher
from headrace.router.remote import RemotePlacer
from headrace.router.service import RouterService
from tests.router.fleet import LOG, num_ready, submit
from tests.router.replicas import FakeReplica, expected, running, until

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
