"""Real replicas behind the real router, while they are added, replaced, handed over and taken away."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.core.deployment import ModelDeployment, ReplicaDeployment
from headrace.core.errors import HeadraceError
from headrace.core.knobs import EngineConfig, RouterConfig
from headrace.core.messages import Output
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.fleet import child
from headrace.fleet.place import LocalModel
from headrace.fleet.runtime_directory import RuntimeDirectory
from headrace.fleet.supervisor import Supervisor
from headrace.router.dispatcher import Dispatcher
from headrace.router.placer import LocalPlacer
from tests.fleet.children import exists
from tests.fleet.registrars import until
from tests.models.tiny import make_tiny

LENGTH = 60
KNOBS = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 500, "kv_cache_gib": 0.01}


class Collector:
    """A Sink that keeps what it gets."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_started(self) -> None:
        """It is with a replica; nothing here waits for that."""

    def on_outputs(self, outputs: list[Output]) -> None:
        for output in outputs:
            assert not self.end.done(), "output after the end"
            self.tokens += output.token_ids
            if output.finish_reason is not None:
                self.end.set_result(output.finish_reason)

    def on_error(self, error: HeadraceError) -> None:
        self.end.set_exception(error)


class Traffic:
    """Streams that never cease until told to; every one must be what a quiet replica gives."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.expected: dict[int, list[int]] = {}
        self.finished = 0
        self._names = iter(range(10**6))
        self._stop = False

    async def one(self, kind: int) -> list[int]:
        sink = Collector()
        request = Request(
            request_id=f"r{next(self._names)}",
            model="m",
            prompt=pack_tokens([7 + kind, *range(3, 40)]),
            sampling=SamplingParams(
                temperature=float(kind % 2), seed=kind, max_tokens=LENGTH, ignore_eos=True
            ),
        )
        self._dispatcher.submit(request, sink)
        assert await sink.end == "length"
        return sink.tokens

    async def learn(self, kinds: int) -> None:
        for kind in range(kinds):
            self.expected[kind] = await self.one(kind)

    async def _keep_on(self, kind: int) -> None:
        while not self._stop:
            assert await self.one(kind) == self.expected[kind]
            self.finished += 1

    async def stop(self, tasks: list[asyncio.Task[None]]) -> None:
        self._stop = True
        await asyncio.gather(*tasks)

    def start(self) -> list[asyncio.Task[None]]:
        return [asyncio.create_task(self._keep_on(kind)) for kind in self.expected]


class Stack:
    def __init__(self, folder: Path, directory: RuntimeDirectory) -> None:
        log = logging.getLogger("test")
        config = RouterConfig()
        self.placer = LocalPlacer(config, log=log, on_hang=lambda name, pid: self.supervisor.kill(name, pid))
        self.dispatcher = Dispatcher(self.placer, config, log=log)
        engine = EngineConfig(**KNOBS)  # type: ignore[arg-type]
        plans = [ReplicaDeployment(id=f"replica-{i}", engine=engine) for i in range(2)]
        deployment = ModelDeployment(model="tiny", names=["m"], replicas=plans, engine=engine)
        self.supervisor = Supervisor(
            self.placer, [LocalModel(deployment, folder, "1")], directory=directory, grace_s=30.0
        )

    async def start(self) -> None:
        self.placer.start()
        self.dispatcher.start()
        await self.supervisor.start()

    async def busy(self, replica_id: str) -> None:
        """Returns while several requests run there."""
        async with asyncio.timeout(60):
            while True:
                for replica in (await self.placer.status()).replicas:
                    if replica.member.endpoint.replica_id == replica_id and replica.num_running > 1:
                        return
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.dispatcher.close()
        await self.supervisor.stop(5.0)
        await self.placer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def stack(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    with RuntimeDirectory(tmp_path) as directory:
        built = Stack(folder, directory)
        await built.start()
        yield built
        pids = list(built.supervisor.pids.values())
        await built.close()
        assert not any(pid is not None and exists(pid) for pid in pids)
        assert not list(directory.path.glob("*.sock"))


async def test_no_request_notices_how_the_fleet_changes(stack: Stack) -> None:
    supervisor, traffic = stack.supervisor, Traffic(stack.dispatcher)
    await traffic.learn(6)
    tasks = traffic.start()
    lines: list[str] = []
    await supervisor.scale("", 3, lines.append)
    await supervisor.scale("", 1, lines.append)
    assert list(supervisor.pids) == ["replica-0"]
    await supervisor.reload("", lines.append)
    assert list(supervisor.pids) == ["replica-0.1"]
    # without any grace, what runs goes on elsewhere in mid-stream
    await supervisor.scale("", 2, lines.append)
    supervisor._grace_s = 0.0
    await stack.busy("replica-1")
    await supervisor.scale("", 1, lines.append)
    assert any("hands over" in line for line in lines)
    # and so it does when a process is killed
    await supervisor.scale("", 2, lines.append)
    pid = supervisor.pids["replica-1"]
    assert pid is not None
    await stack.busy("replica-1")
    os.kill(pid, signal.SIGKILL)
    finished = traffic.finished
    await until(lambda: traffic.finished > finished + 10)
    await traffic.stop(tasks)
    status = await stack.placer.status()
    assert sum(replica.num_in_flight for replica in status.replicas) == 0
    assert sum(replica.num_rescued for replica in status.replicas) > 0
