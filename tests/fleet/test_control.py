"""The control socket: who may have it, what it answers, and clients that behave badly."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.control import (
    Done,
    FromServer,
    Progress,
    Ps,
    PsReply,
    Refusal,
    Reload,
    Scale,
    ToServer,
    Why,
    WhyReply,
    control_path,
)
from headrace.core.errors import InsufficientMemoryError, NotFoundError, UsageError
from headrace.core.routing import Decision, FleetStatus, Role
from headrace.core.wire import FrameDecoder, encode_frame
from headrace.fleet import control
from headrace.fleet.control import ControlServer, claim
from tests.fleet.registrars import until

STATUS = FleetStatus(policy="p", replicas=[], models=[], num_queued=3)
DECISION = Decision(
    request_id="known",
    caller_id="",
    model="m",
    at=0.0,
    policy="p",
    attempt=0,
    num_prompt_tokens=1,
    candidates=[],
    chosen="a",
    reason="",
)


class FakeSupervisor:
    def __init__(self) -> None:
        self.model_names: list[str] = []
        self.done: list[str] = []
        self.go_on = asyncio.Event()
        self.lines = 1

    async def scale(
        self, model: str, replicas: int, report: Callable[[str], None], role: Role | None = None
    ) -> str:
        for _ in range(self.lines):
            report("starting" + " " * (1000 if self.lines > 1 else 0))
        await self.go_on.wait()
        if replicas > 9:
            raise InsufficientMemoryError("needs 9 GiB", hint="lower it")
        self.done.append(f"{model} {replicas}" if role is None else f"{model} {replicas} {role}")
        return "scaled"

    async def reload(self, target: str, report: Callable[[str], None]) -> str:
        if target == "bug":
            raise ZeroDivisionError("a bug")
        self.done.append(target)
        return "reloaded"


class Stack:
    def __init__(self, path: Path) -> None:
        self.supervisor = FakeSupervisor()
        self.server = ControlServer(
            path,
            status=self.status,
            why=self.why,
            supervisor=self.supervisor,  # type: ignore[arg-type]
        )

    async def status(self) -> FleetStatus:
        return STATUS

    async def why(self, request_id: str) -> list[Decision]:
        return [DECISION] if request_id == "known" else []

    async def ask(self, message: ToServer | bytes) -> list[FromServer]:
        """Every reply to one message."""
        reader, writer = await asyncio.open_unix_connection(self.server.path)
        writer.write(message if isinstance(message, bytes) else encode_frame(message))
        decoder: FrameDecoder[FromServer] = FrameDecoder(FromServer)
        replies: list[FromServer] = []
        async with asyncio.timeout(60):
            while data := await reader.read(1 << 16):
                replies += decoder.feed(data)
        writer.close()
        await writer.wait_closed()
        return replies


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    built = Stack(tmp_path / "run" / "control.sock")
    await built.server.start()
    yield built
    await built.server.close()
    assert not built.server.path.exists()


async def test_every_request_has_its_answer(stack: Stack) -> None:
    path = stack.server.path
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert await stack.ask(Ps()) == [PsReply(STATUS)]
    assert await stack.ask(Why("known")) == [WhyReply([DECISION])]
    stack.supervisor.model_names = ["m"]  # which has no replica in STATUS
    assert await stack.ask(Ps()) == [PsReply(msgspec.structs.replace(STATUS, scaled_to_zero=["m"]))]
    stack.supervisor.go_on.set()
    assert await stack.ask(Scale(2, "m")) == [Progress("starting"), Done("scaled")]
    assert await stack.ask(Scale(1, "m", "prefill")) == [Progress("starting"), Done("scaled")]
    assert await stack.ask(Reload("r")) == [Done("reloaded")]
    assert stack.supervisor.done == ["m 2", "m 1 prefill", "r"]


async def test_refusals_keep_their_kind_and_hint(stack: Stack) -> None:
    stack.supervisor.go_on.set()
    progress, refusal = await stack.ask(Scale(10))
    assert progress == Progress("starting") and isinstance(refusal, Refusal)
    assert (refusal.failed.message, refusal.hint) == ("needs 9 GiB", "lower it")
    (refusal,) = await stack.ask(Why("unknown"))
    assert isinstance(refusal, Refusal) and refusal.failed.status == NotFoundError.status
    (refusal,) = await stack.ask(Reload("bug"))
    assert isinstance(refusal, Refusal) and refusal.failed.message == "ZeroDivisionError: a bug"


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x05\x00\x00\x00hello",
        b"\x00\x00\x01\x00" + b"x" * 70_000,
        encode_frame(7),
    ],
)
async def test_nonsense_is_refused(stack: Stack, nonsense: bytes) -> None:
    (refusal,) = await stack.ask(nonsense)
    assert isinstance(refusal, Refusal) and refusal.failed.status == 400
    assert await stack.ask(Ps()) == [PsReply(STATUS)]


async def test_silent_clients_are_dropped_and_too_many_are_turned_away(
    stack: Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "MAX_CONNECTIONS", 3)
    silent = [await asyncio.open_unix_connection(stack.server.path) for _ in range(3)]
    assert await stack.ask(b"") == []
    silent[0][1].close()
    await until(lambda: len(stack.server._tasks) == 2)
    monkeypatch.setattr(control, "REQUEST_TIMEOUT_S", 0.05)
    late = await asyncio.open_unix_connection(stack.server.path)
    async with asyncio.timeout(60):
        assert await late[0].read() == b""
    for _, writer in [*silent, late]:
        writer.close()
        await writer.wait_closed()


async def test_a_command_goes_on_without_its_client(stack: Stack) -> None:
    reader, writer = await asyncio.open_unix_connection(stack.server.path)
    writer.write(encode_frame(Scale(3)))
    await reader.read(1)
    writer.close()
    await writer.wait_closed()
    stack.supervisor.go_on.set()
    await until(lambda: stack.supervisor.done == [" 3"])
    assert await stack.ask(Ps()) == [PsReply(STATUS)]


async def test_one_that_does_not_read_is_cut_off(stack: Stack) -> None:
    stack.supervisor.lines = 3000  # 3 MB, of which a socket takes little
    _, writer = await asyncio.open_unix_connection(stack.server.path, limit=1)
    writer.write(encode_frame(Scale(3)))
    stack.supervisor.go_on.set()
    await until(lambda: stack.supervisor.done == [" 3"])
    await until(lambda: not stack.server._tasks)
    writer.close()
    with contextlib.suppress(ConnectionError):  # a reset
        await writer.wait_closed()


async def test_closing_ends_commands(stack: Stack) -> None:
    asked = asyncio.create_task(stack.ask(Scale(3)))
    await until(lambda: bool(stack.server._tasks))
    await stack.server.close()
    with contextlib.suppress(ConnectionError):
        assert not any(isinstance(reply, Done) for reply in await asked)
    assert not stack.supervisor.done and not stack.server._tasks


async def test_a_stale_socket_is_replaced_and_a_live_one_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "run" / "control.sock"
    first = Stack(path)
    await first.server.start()
    second = Stack(path)
    with pytest.raises(UsageError, match="another server answers"):
        await second.server.start()
    await second.server.close()
    assert await first.ask(Ps()) == [PsReply(STATUS)]
    # as a killed server leaves it
    stale = socket.socket(socket.AF_UNIX)
    await first.server.close()
    stale.bind(str(path))
    stale.close()
    await second.server.start()
    assert await second.ask(Ps()) == [PsReply(STATUS)]
    # whoever takes the path from a server keeps it when that one ends
    path.unlink()
    third = Stack(path)
    await third.server.start()
    await second.server.close()
    assert await third.ask(Ps()) == [PsReply(STATUS)]
    await third.server.close()


def test_only_a_folder_of_ones_own_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(UsageError, match="nobody else can write"):
        claim(open_to_all / "s")
    link = tmp_path / "link"
    mine = tmp_path / "mine"
    mine.mkdir(0o700)
    link.symlink_to(mine)
    with pytest.raises(UsageError, match="must be a folder"):
        claim(link / "s")
    (mine / "s").write_text("precious")
    with pytest.raises(UsageError, match="in the way"):
        claim(mine / "s")
    assert (mine / "s").read_text() == "precious"
    with pytest.raises(UsageError, match=r"File exists|Not a directory"):
        claim(mine / "s" / "t")
    with pytest.raises(UsageError, match="too long"):
        claim(mine / ("x" * 200))
    someone: Any = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: someone)
    with pytest.raises(UsageError, match="belongs to user"):
        claim(mine / "t")


def test_each_port_has_a_path_in_a_folder_of_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert control_path(8000) == Path("/run/user/7/headrace-8000.sock")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert str(os.getuid()) in control_path(8000).parent.name
