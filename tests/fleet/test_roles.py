"""Prefill and decode replicas under the supervisor: how they are started, scaled, and what is refused."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.core.deployment import ModelDeployment, ReplicaDeployment
from headrace.core.errors import InvalidRequestError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.routing import Role
from headrace.fleet import child, supervisor
from headrace.fleet.place import LocalModel
from headrace.fleet.runtime_directory import RuntimeDirectory
from headrace.fleet.supervisor import Supervisor
from tests.fleet.children import exists, install_replica
from tests.fleet.registrars import FakeRegistrar

TCP = EngineConfig(kv_connector="tcp")


@dataclass
class Stack:
    registrar: FakeRegistrar
    supervisor: Supervisor
    folder: Path
    lines: list[str] = field(default_factory=list)

    async def scale(self, count: int, role: Role | None = None) -> str:
        return await self.supervisor.scale("", count, self.lines.append, role)

    @property
    def roles(self) -> dict[str, str]:
        """As the router was told."""
        return {name: endpoint.role for name, endpoint in self.registrar.endpoints.items()}


def plans(**roles: Role) -> list[ReplicaDeployment]:
    return [ReplicaDeployment(id=name, engine=EngineConfig(), role=role) for name, role in roles.items()]


@pytest.fixture
async def stack(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Stack]:
    """One model, not started, with the replicas of the parameter."""
    install_replica(tmp_path, monkeypatch)
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "POLL_S", 0.005)
    folder = tmp_path / "model"
    folder.mkdir()
    registrar = FakeRegistrar()
    with RuntimeDirectory(tmp_path) as directory:
        model = ModelDeployment(model="path", names=["m"], replicas=request.param)
        subject = Supervisor(registrar, [LocalModel(model, folder, "1")], directory=directory, grace_s=30.0)
        yield Stack(registrar, subject, folder)
        pids = [pid for pid in subject.pids.values() if pid is not None]
        await subject.stop(1.0)
        assert not any(map(exists, pids))
        assert not list(directory.path.glob("*.sock"))


SPLIT = plans(p="prefill", d="decode")


@pytest.mark.parametrize("stack", [[*SPLIT, *plans(u="unified")]], indirect=True)
async def test_each_is_started_in_its_role_and_told_where_to_give_blocks(stack: Stack) -> None:
    await stack.supervisor.start()
    assert stack.roles == {"p": "prefill", "d": "decode", "u": "unified"}
    hellos = stack.supervisor.hellos
    assert {name: hello.role for name, hello in hellos.items()} == stack.roles
    listen = {name: hello.notes[0] for name, hello in hellos.items()}
    assert listen["d"] == "" and listen["p"].startswith("unix:/") and listen["u"].startswith("unix:/")
    own = {endpoint.address for endpoint in stack.registrar.endpoints.values()}
    places = {listen["p"].removeprefix("unix:"), listen["u"].removeprefix("unix:")}
    assert len(places) == 2 and places.isdisjoint(own)


@pytest.mark.parametrize(
    "stack",
    [
        [
            ReplicaDeployment(id="p", engine=TCP, role="prefill"),
            ReplicaDeployment(id="u", engine=EngineConfig(enable_prefix_caching=False)),
            ReplicaDeployment(id="d", engine=TCP, role="decode"),
        ]
    ],
    indirect=True,
)
async def test_knobs_say_how_blocks_are_given(stack: Stack) -> None:
    await stack.supervisor.start()
    listen = {name: hello.notes[0] for name, hello in stack.supervisor.hellos.items()}
    assert listen == {"p": "tcp://127.0.0.1:0", "u": "", "d": ""}


@pytest.mark.parametrize("stack", [[*SPLIT, *plans(u="unified")], plans(u="unified")], indirect=True)
async def test_without_shared_memory_blocks_go_over_tcp_where_somebody_takes_them(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "memfd_create")
    await stack.supervisor.start()
    listen = {name: hello.notes[0] for name, hello in stack.supervisor.hellos.items()}
    if "p" in listen:
        assert listen == {"p": "tcp://127.0.0.1:0", "u": "tcp://127.0.0.1:0", "d": ""}
    else:
        assert listen == {"u": ""}


@pytest.mark.parametrize("stack", [SPLIT], indirect=True)
async def test_each_role_is_scaled_by_itself(stack: Stack) -> None:
    await stack.supervisor.start()
    with pytest.raises(InvalidRequestError, match="decode and prefill replicas: say which") as raised:
        await stack.scale(2)
    assert "--role" in (raised.value.hint or "")
    assert await stack.scale(3, "decode") == "m runs 3 decode replicas (before: 1)"
    assert stack.roles == {"p": "prefill", "d": "decode", "decode-0": "decode", "decode-1": "decode"}
    assert await stack.scale(1, "decode") == "m runs 1 decode replica (before: 3)"
    assert stack.roles == {"p": "prefill", "d": "decode"}
    assert await stack.scale(1, "unified") == "m runs 1 replica (before: 0)"
    assert stack.roles["replica-0"] == "unified"
    assert not any("now" in line for line in stack.lines)


@pytest.mark.parametrize("stack", [SPLIT], indirect=True)
async def test_a_side_that_is_taken_away_is_told(stack: Stack) -> None:
    await stack.supervisor.start()
    await stack.scale(0, "prefill")
    assert stack.lines[-1] == "nothing prefills for m now: its decode replicas compute prompts themselves"
    await stack.scale(1, "prefill")
    await stack.scale(0, "decode")
    assert stack.lines[-1] == "m has no decode replica now: its prefill replicas do everything"


@pytest.mark.parametrize("stack", [SPLIT], indirect=True)
async def test_a_reload_keeps_roles(stack: Stack) -> None:
    await stack.supervisor.start()
    await stack.supervisor.reload("", stack.lines.append)
    assert stack.roles == {"p.1": "prefill", "d.1": "decode"}


@pytest.mark.parametrize("stack", [[*SPLIT, *plans(other="decode")]], indirect=True)
async def test_sides_whose_blocks_differ_do_not_start(stack: Stack) -> None:
    (stack.folder / "odd").write_text("other")
    with pytest.raises(UsageError) as raised:
        await stack.supervisor.start()
    message = raised.value.message
    assert "p (prefill) keeps blocks as even" in message or "other (decode) keeps blocks as odd" in message
    assert "dtype" in (raised.value.hint or "")
    assert stack.roles == {} and stack.supervisor.pids == {}


@pytest.mark.parametrize("stack", [SPLIT], indirect=True)
async def test_one_that_would_not_fit_in_is_not_added(stack: Stack) -> None:
    await stack.supervisor.start()
    (stack.folder / "odd").write_text("decode-0")
    with pytest.raises(UsageError, match="they cannot exchange them"):
        await stack.scale(2, "decode")
    assert stack.roles == {"p": "prefill", "d": "decode"}
