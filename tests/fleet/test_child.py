"""Supervised processes that behave, complain, and die."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.engine_environment import ENGINE_ENVIRONMENT, engine_environment
from headrace.core.errors import EngineError, InsufficientMemoryError
from headrace.core.knobs import EngineConfig, GatewayConfig, LogConfig, RouterConfig
from headrace.core.launch import GatewaySpec, ReplicaSpec, RouterSpec, ServedModelSpec
from headrace.fleet import child
from headrace.fleet.child import Child, start_all, stop_all
from headrace.fleet.children import gateway_process, router_process
from headrace.fleet.local import LocalReplica
from tests.fleet.children import READY, exists, install


def replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, progress: list[tuple[int, int]] | None = None
) -> LocalReplica:
    install(tmp_path, monkeypatch, 'assert spec["logs"]["log_json"]\n' + body)
    seen = progress if progress is not None else []
    return LocalReplica(
        ReplicaSpec(
            replica_id="r0",
            model="m",
            folder=str(tmp_path),
            revision="1",
            socket=str(tmp_path / "socket"),
            engine=EngineConfig(),
            logs=LogConfig(log_json=True),
        ),
        on_loading=lambda done, total: seen.append((done, total)),
    )


async def another_process(subject: Child, first: int | None) -> int:
    """The pid of the process that replaced ``first``, once it has said that it is ready."""
    async with asyncio.timeout(60):
        while subject.pid == first or not subject.ready:
            await asyncio.sleep(0.01)
    assert subject.pid is not None
    return subject.pid


async def test_ready_then_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[int, int]] = []
    subject = replica(tmp_path, monkeypatch, READY, progress)
    await subject.start()
    pid = subject.pid
    assert pid is not None and progress == [(1, 2)] and subject.ready
    await subject.stop(1.0)
    assert not exists(pid) and not subject.ready
    await subject.stop(1.0)


async def test_a_startup_error_arrives_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'say(event="error", kind="InsufficientMemoryError", message="needs 9 GiB", hint="lower it")'
    subject = replica(tmp_path, monkeypatch, body)
    with pytest.raises(InsufficientMemoryError, match="needs 9 GiB") as caught:
        await subject.start()
    assert caught.value.hint == "lower it"


@pytest.mark.parametrize("body", ["sys.exit(3)", "print('nonsense', flush=True); sys.exit(3)"])
async def test_a_death_at_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    with pytest.raises(EngineError, match="replica r0 ended while starting"):
        await replica(tmp_path, monkeypatch, body).start()


@pytest.mark.parametrize(
    ("number", "words"), [("SIGKILL", "memory ran out"), ("SIGBUS", "--pack none"), ("SIGTERM", "last words")]
)
async def test_the_hint_is_the_signals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str, words: str
) -> None:
    body = f"os.kill(os.getpid(), signal.{number})\nsys.stdin.read()"
    with pytest.raises(EngineError, match=f"killed by {number}") as caught:
        await replica(tmp_path, monkeypatch, body).start()
    assert words in (caught.value.hint or "")
    assert ("memory" in (caught.value.hint or "")) == (number == "SIGKILL")


async def test_nonsense_from_one_that_lives_on_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = replica(tmp_path, monkeypatch, "print('nonsense', flush=True)\nsys.stdin.read()")
    with pytest.raises(EngineError, match="SIGTERM"):
        await subject.start()
    assert subject.pid is not None and not exists(subject.pid)


@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_one_that_dies_comes_back(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    subject = replica(tmp_path, monkeypatch, READY)
    await subject.start()
    first = subject.pid
    assert first is not None
    if how == "killed":
        os.kill(first, signal.SIGKILL)
    else:
        os.kill(first, signal.SIGSTOP)
        subject.kill(first + 1)  # another process's pid
        assert exists(first)
        subject.kill(first)
    second = await another_process(subject, first)
    assert subject.num_restarts == 1
    await subject.stop(1.0)
    assert not exists(first) and not exists(second)


async def test_it_is_tried_again_until_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the machine has no room for a process, then the process refuses twice."""
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(child, "LONGEST_BACKOFF_S", 0.02)
    trouble = tmp_path / "trouble"
    body = f"""
trouble = {str(trouble)!r}
if os.path.exists(trouble):
    left = int(open(trouble).read())
    if left:
        open(trouble, "w").write(str(left - 1))
        say(event="error", kind="InsufficientMemoryError", message="no memory")
        sys.exit(1)
"""
    subject = replica(tmp_path, monkeypatch, body + READY)
    restarts: list[int] = []
    subject._on_restart = lambda: restarts.append(subject.num_restarts)
    await subject.start()
    first = subject.pid
    assert first is not None
    spawn = asyncio.create_subprocess_exec

    async def refuse(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
        raise OSError(errno.EAGAIN, "no process to be had")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    trouble.write_text("2")
    os.kill(first, signal.SIGKILL)
    await another_process(subject, first)
    assert trouble.read_text() == "0" and restarts == [1, 2, 3, 4]
    await subject.stop(1.0)


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "STOP_MARGIN_S", 0.1)
    body = (
        'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(event="ready")\nsys.stdin.read()\nsignal.pause()'
    )
    subject = replica(tmp_path, monkeypatch, body)
    await subject.start()
    pid = subject.pid
    assert pid is not None
    await subject.stop(0.1)
    assert not exists(pid)


async def test_one_that_is_starting_can_be_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[int, int]] = []
    subject = replica(
        tmp_path, monkeypatch, 'say(event="loading", done=1, total=9)\nsys.stdin.read()', progress
    )
    starting = asyncio.create_task(subject.start())
    async with asyncio.timeout(60):
        while not progress:
            await asyncio.sleep(0.01)
    await subject.stop(1.0)
    with pytest.raises(EngineError):
        await starting
    assert subject.pid is not None and not exists(subject.pid)


async def test_a_start_that_is_cancelled_at_any_moment_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, READY)
    for turns in range(1, 12):  # of the event loop, which a process takes several of to be made
        subject = Child("c", "m", RouterSpec(socket="s", router=RouterConfig()))
        starting = asyncio.create_task(subject.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        assert subject.pid is None or not exists(subject.pid)


async def test_several_start_together_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(
        tmp_path,
        monkeypatch,
        'if spec["socket"] == "bad":\n'
        '    say(event="error", kind="UsageError", message="bad socket")\n'
        "    sys.exit(2)\n" + READY,
    )
    router = RouterConfig()
    good = [Child(f"good {i}", "m", RouterSpec(socket="good", router=router)) for i in range(2)]
    await start_all(good)
    assert all(one.ready for one in good)
    await stop_all(good, 1.0)
    both = [Child(name, "m", RouterSpec(socket=name, router=router)) for name in ("good", "bad")]
    with pytest.raises(Exception, match="bad socket"):
        await start_all(both)
    assert not any(one.pid and exists(one.pid) for one in [*good, *both])


async def test_a_gateway_gets_the_listening_socket_and_a_router_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = """
import socket
assert sys.argv[1:] == ["-m", "headrace." + ("gateway" if "listener" in spec else "router")], sys.argv
if "listener" in spec:
    listener = socket.socket(fileno=spec["listener"])
    say(event="ready")
    listener.accept()[0].sendall(spec["gateway_id"].encode())
"""
    install(tmp_path, monkeypatch, body + READY)
    listener = socket.create_server(("127.0.0.1", 0))
    gateway = gateway_process(
        GatewaySpec(
            gateway_id="gateway-0",
            listener=listener.fileno(),
            router_socket="r",
            models=[ServedModelSpec(model="m", names=["m"])],
            gateway=GatewayConfig(),
            router=RouterConfig(),
        )
    )
    router = router_process(RouterSpec(socket="r", router=RouterConfig()))
    await start_all([router, gateway])
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    assert await reader.readexactly(9) == b"gateway-0"
    writer.close()
    await writer.wait_closed()
    await stop_all([gateway, router], 1.0)
    listener.close()


def test_an_engines_environment_leaves_the_users_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENGINE_ENVIRONMENT, "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert engine_environment().items() >= ENGINE_ENVIRONMENT.items()
    monkeypatch.setenv("GLIBC_TUNABLES", "mine")
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    environment = engine_environment()
    assert environment["GLIBC_TUNABLES"] == "mine" and "GOMP_SPINCOUNT" not in environment


def test_children_go_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    """Standard input ends with the parent, however that one ends."""
    script = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from tests.fleet.children import READY, CHILD
from headrace.core.knobs import RouterConfig
from headrace.core.launch import RouterSpec
from headrace.fleet.child import Child
child = Path({str(tmp_path)!r}) / "child"
child.write_text(CHILD.format(python=sys.executable, body=READY))
child.chmod(0o700)
sys.executable = str(child)
async def main():
    subject = Child("c", "m", RouterSpec(socket="s", router=RouterConfig()))
    await subject.start()
    print(subject.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert exists(pid)
    # a pidfd becomes readable when the process ends
    watched = os.pidfd_open(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert select.select([watched], [], [], 60.0)[0], "the child outlives its parent"
    os.close(watched)
