"""The supervisor over stand-in replicas: who starts, who leaves, in which order, and what if one cannot."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.core.deployment import ModelDeployment, ReplicaDeployment, WorkerDeployment
from headrace.core.errors import (
    EngineError,
    InsufficientMemoryError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
)
from headrace.core.knobs import EngineConfig
from headrace.core.routing import Endpoint
from headrace.fleet import child, supervisor
from headrace.fleet.place import LocalModel
from headrace.fleet.runtime_directory import RuntimeDirectory
from headrace.fleet.supervisor import Supervisor
from tests.fleet.children import exists, install_replica
from tests.fleet.registrars import FakeRegistrar, until


@dataclass
class Stack:
    registrar: FakeRegistrar
    supervisor: Supervisor
    folder: Path
    directory: RuntimeDirectory
    lines: list[str] = field(default_factory=list)

    def report(self, line: str) -> None:
        self.lines.append(line)

    def trouble(self, *replica_ids: str) -> None:
        """These cannot start any more."""
        (self.folder / "trouble").write_text(" ".join(replica_ids))

    @property
    def pids(self) -> list[int]:
        return [pid for pid in self.supervisor.pids.values() if pid is not None]


def model(folder: Path, name: str = "m", count: int = 2, prefix: str = "replica-") -> LocalModel:
    plans = [ReplicaDeployment(id=f"{prefix}{i}", engine=EngineConfig()) for i in range(count)]
    workers = [WorkerDeployment(url="http://x", id=f"{prefix}3")]
    return LocalModel(
        ModelDeployment(
            model="path",
            names=[name, f"{name}-alias"],
            replicas=plans,
            workers=workers,
            replica_prefix=prefix,
        ),
        folder,
        "1",
    )


@pytest.fixture
async def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """Two models with two and one replicas, not started; nothing of them is left afterwards."""
    install_replica(tmp_path, monkeypatch)
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "POLL_S", 0.005)
    folder = tmp_path / "model"
    folder.mkdir()
    registrar = FakeRegistrar()
    with RuntimeDirectory(tmp_path) as directory:
        models = [model(folder), model(folder, "other", 1, "other-")]
        subject = Supervisor(registrar, models, directory=directory, grace_s=30.0)
        stack = Stack(registrar, subject, folder, directory)
        yield stack
        pids = stack.pids
        await subject.stop(1.0)
        assert not any(map(exists, pids))
        assert not registrar.endpoints
        assert not list(directory.path.glob("*.sock"))
    assert not directory.path.exists()


async def test_all_start_together_and_share_the_machine(stack: Stack) -> None:
    progress: list[tuple[int, int]] = []
    await stack.supervisor.start(lambda done, total: progress.append((done, total)))
    assert list(stack.registrar.endpoints) == ["replica-0", "replica-1", "other-0"]
    assert [e.model for e in stack.registrar.endpoints.values()] == ["m", "m", "other"]
    assert all(e.kind == "headrace" for e in stack.registrar.endpoints.values())
    assert progress[-1] == (6, 6), "of all together"
    hellos = stack.supervisor.hellos
    assert [hello.replica_id for hello in hellos.values()] == list(hellos) == list(stack.registrar.endpoints)
    shares = [json.loads(hello.device) for hello in hellos.values()]
    assert {share["num_replicas"] for share in shares} == {3}
    (memory,) = {share["memory_bytes"] for share in shares}
    assert 0 < memory < 2**50


async def test_when_one_cannot_start_none_does(stack: Stack) -> None:
    stack.trouble("replica-1")
    with pytest.raises(InsufficientMemoryError, match="9 GiB") as caught:
        await stack.supervisor.start()
    assert caught.value.hint == "lower it, or run fewer: 3 replicas share this machine's memory"
    assert not stack.registrar.log and not stack.pids


async def test_more_are_added_and_the_last_ones_leave_first(stack: Stack) -> None:
    await stack.supervisor.start()
    line = await stack.supervisor.scale("m", 5, stack.report)
    assert line == "m runs 5 replicas (before: 2)"
    # the name of a worker is not taken twice
    assert list(stack.registrar.endpoints)[3:] == ["replica-2", "replica-4", "replica-5"]
    share = json.loads(stack.supervisor.hellos["replica-5"].device)
    assert share["num_replicas"] == 6
    line = await stack.supervisor.scale("m-alias", 1, stack.report)
    assert line == "m runs 1 replica (before: 5)"
    assert list(stack.registrar.endpoints) == ["replica-0", "other-0"]
    await stack.supervisor.scale("m", 2, stack.report)
    assert list(stack.registrar.endpoints) == ["replica-0", "other-0", "replica-1"]
    before = len(stack.registrar.log)
    await stack.supervisor.scale("m", 2, stack.report)
    assert len(stack.registrar.log) == before
    await stack.supervisor.scale("m", 0, stack.report)
    assert list(stack.registrar.endpoints) == ["other-0"]


async def test_a_fleet_that_cannot_grow_stays_as_it_was(stack: Stack) -> None:
    await stack.supervisor.start()
    pids = stack.pids
    before = list(stack.registrar.log)
    stack.trouble("replica-4")
    with pytest.raises(InsufficientMemoryError, match="9 GiB"):
        await stack.supervisor.scale("m", 4, stack.report)
    assert stack.pids == pids and all(map(exists, pids))
    assert stack.registrar.log == before
    assert len(list(stack.directory.path.glob("*.sock"))) == 3


async def test_one_that_the_router_never_reaches_is_taken_back(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.supervisor.start()
    monkeypatch.setattr(supervisor, "REACH_TIMEOUT_S", 0.05)
    stack.registrar.unreachable = True
    with pytest.raises(EngineError, match="replica-2"):
        await stack.supervisor.scale("m", 3, stack.report)
    assert "replica-2" not in stack.registrar.endpoints and len(stack.pids) == 3


async def test_who_leaves_finishes_first(stack: Stack) -> None:
    """Nothing new is placed, what runs ends, the router forgets it, and only then the process ends."""
    await stack.supervisor.start()
    stack.registrar.in_flight["replica-1"] = 2
    pid = stack.supervisor.pids["replica-1"]
    assert pid is not None
    task = asyncio.create_task(stack.supervisor.scale("m", 1, stack.report))
    await until(lambda: stack.registrar.endpoints["replica-1"].draining)
    asked = stack.registrar.asked
    await until(lambda: stack.registrar.asked > asked + 3)
    assert exists(pid) and not task.done()
    stack.registrar.away = True  # the router is restarted meanwhile: nothing is known, nothing is concluded
    asked = stack.registrar.asked
    await until(lambda: stack.registrar.asked > asked + 3)
    assert exists(pid) and not task.done()
    stack.registrar.away = False
    del stack.registrar.in_flight["replica-1"]
    await task
    assert not exists(pid)
    told = [
        (what, e if isinstance(e, str) else (e.replica_id, e.draining, e.hand_over))
        for what, e in stack.registrar.log[3:]
    ]
    assert told == [("set", ("replica-1", True, False)), ("remove", "replica-1")]


async def test_what_still_runs_after_the_grace_is_handed_over(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stack.supervisor.start()
    stack.supervisor._grace_s = 0.05
    stack.registrar.in_flight["replica-1"] = 1
    set_endpoint = stack.registrar.set_endpoint
    handed_over: list[str] = []

    def hand_over(endpoint: Endpoint) -> None:
        set_endpoint(endpoint)
        if endpoint.hand_over:
            handed_over.append(endpoint.replica_id)
            pid = stack.supervisor.pids[endpoint.replica_id]
            assert pid is not None and exists(pid), "it lives until its work has moved"
            stack.registrar.in_flight.clear()

    monkeypatch.setattr(stack.registrar, "set_endpoint", hand_over)
    await stack.supervisor.scale("m", 1, stack.report)
    assert handed_over == ["replica-1"] and "replica-1" not in stack.registrar.endpoints


async def test_a_reload_replaces_one_after_the_other(stack: Stack) -> None:
    await stack.supervisor.start()
    before = stack.supervisor.pids
    assert await stack.supervisor.reload("m", stack.report) == "reloaded 2 replicas"
    assert list(stack.registrar.endpoints) == ["other-0", "replica-0.1", "replica-1.1"]
    assert stack.supervisor.pids["other-0"] == before["other-0"]
    calls = [(what, e if isinstance(e, str) else e.replica_id) for what, e in stack.registrar.log[3:]]
    one = [("set", "replica-0.1"), ("set", "replica-0"), ("remove", "replica-0")]
    two = [("set", "replica-1.1"), ("set", "replica-1"), ("remove", "replica-1")]
    assert calls == [*one, *two], "the new one is there before the old one leaves"
    # by slot, by the name of the moment, all
    await stack.supervisor.reload("replica-0", stack.report)
    await stack.supervisor.reload("replica-0.2", stack.report)
    assert await stack.supervisor.reload("", stack.report) == "reloaded 3 replicas"
    assert sorted(stack.registrar.endpoints) == ["other-0.1", "replica-0.4", "replica-1.2"]


async def test_a_reload_that_fails_leaves_the_old_one(stack: Stack) -> None:
    await stack.supervisor.start()
    stack.trouble("replica-1.1")
    with pytest.raises(InsufficientMemoryError):
        await stack.supervisor.reload("m", stack.report)
    assert sorted(stack.registrar.endpoints) == ["other-0", "replica-0.1", "replica-1"]
    assert not stack.registrar.endpoints["replica-1"].draining


async def test_a_dead_one_comes_back_and_the_router_hears_of_it(stack: Stack) -> None:
    await stack.supervisor.start()
    first = stack.supervisor.pids["replica-0"]
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await until(lambda: stack.registrar.endpoints["replica-0"].num_restarts == 1)
    await until(lambda: stack.supervisor.pids["replica-0"] != first)
    # one that hangs is killed on the router's word, once
    second = stack.supervisor.pids["replica-0"]
    assert second is not None
    stack.supervisor.kill("replica-0", first)
    stack.supervisor.kill("nobody", second)
    assert exists(second)
    await until(lambda: any(stack.directory.path.glob("0-replica-0.sock")))
    stack.supervisor.kill("replica-0", second)
    await until(lambda: stack.registrar.endpoints["replica-0"].num_restarts == 2)
    await until(lambda: any(stack.directory.path.glob("0-replica-0.sock")))


async def test_a_crash_looping_one_can_be_taken_away(stack: Stack) -> None:
    await stack.supervisor.start()
    stack.trouble("replica-1")
    pid = stack.supervisor.pids["replica-1"]
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: stack.registrar.endpoints["replica-1"].num_restarts >= 2)
    await stack.supervisor.scale("m", 1, stack.report)
    assert list(stack.registrar.endpoints) == ["replica-0", "other-0"]


async def test_what_is_not_there_is_refused_by_name(stack: Stack) -> None:
    await stack.supervisor.start()
    with pytest.raises(NotFoundError, match="say which model; there are m, other"):
        await stack.supervisor.scale("", 1, stack.report)
    with pytest.raises(NotFoundError, match="'x'"):
        await stack.supervisor.scale("x", 1, stack.report)
    with pytest.raises(InvalidRequestError, match=r"\[0, 64\], got 65"):
        await stack.supervisor.scale("m", 65, stack.report)
    with pytest.raises(NotFoundError, match="replica-1"):
        await stack.supervisor.reload("x", stack.report)


async def test_models_that_only_workers_serve_have_nothing_to_scale(tmp_path: Path) -> None:
    with RuntimeDirectory(tmp_path) as directory:
        subject = Supervisor(FakeRegistrar(), [], directory=directory, grace_s=1.0)
        for name in ("", "m"):
            with pytest.raises(NotFoundError, match="other servers answer for all of them") as caught:
                await subject.scale(name, 1, lambda line: None)
            assert "--replicas 1" in (caught.value.hint or "")
        assert subject.model_names == []


async def test_commands_wait_for_each_other(stack: Stack) -> None:
    await stack.supervisor.start()
    stack.registrar.in_flight["replica-1"] = 1
    first = asyncio.create_task(stack.supervisor.scale("m", 1, stack.report))
    await until(lambda: stack.registrar.endpoints["replica-1"].draining)
    second = asyncio.create_task(stack.supervisor.scale("m", 2, stack.report))
    await until(lambda: any("waiting" in line for line in stack.lines))
    stack.registrar.in_flight.clear()
    await first
    assert await second == "m runs 2 replicas (before: 1)"


async def test_a_command_that_is_cut_short_leaves_no_process(stack: Stack) -> None:
    await stack.supervisor.start()
    stack.registrar.in_flight["replica-1"] = 1
    leaving = asyncio.create_task(stack.supervisor.scale("m", 1, stack.report))
    await until(lambda: stack.registrar.endpoints["replica-1"].draining)
    leaving.cancel()
    await asyncio.wait([leaving])
    pids = stack.pids
    coming = asyncio.create_task(stack.supervisor.scale("m", 4, stack.report))
    await until(lambda: any("starting" in line for line in stack.lines))
    coming.cancel()
    await asyncio.wait([coming])
    assert stack.pids == pids and len(stack.registrar.endpoints) == 3


@pytest.mark.parametrize("what", ["scaling up", "draining"])
async def test_a_shutdown_ends_a_command(what: str, stack: Stack) -> None:
    await stack.supervisor.start()
    if what == "draining":
        stack.registrar.in_flight["replica-1"] = 1
        task = asyncio.create_task(stack.supervisor.scale("m", 1, stack.report))
        await until(lambda: stack.registrar.endpoints["replica-1"].draining)
    else:
        task = asyncio.create_task(stack.supervisor.scale("m", 4, stack.report))
        await until(lambda: any("starting" in line for line in stack.lines))
    await stack.supervisor.stop(1.0)
    await asyncio.wait([task])
    assert task.exception() is not None or what == "draining"
    assert not list(stack.directory.path.glob("*.sock")) and not stack.registrar.endpoints
    with pytest.raises(UnavailableError, match="shutting down"):
        await stack.supervisor.scale("m", 2, stack.report)
