"""The supervisor against child processes that behave, complain, and die."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
from pathlib import Path

import pytest

from headrace.core.errors import EngineError, InsufficientMemoryError
from headrace.core.knobs import EngineConfig, LogConfig
from headrace.fleet import local

CHILD = """#!{python}
import json, os, signal, sys
spec = json.loads(sys.stdin.readline())
assert spec["logs"]["log_json"]
def say(**event): print(json.dumps(event), flush=True)
say(event="loading", done=1, total=2)
{body}
"""
READY = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
say(event="ready")
sys.stdin.read()
"""


def replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, progress: list[tuple[int, int]] | None = None
) -> local.LocalReplica:
    child = tmp_path / "child"
    child.write_text(CHILD.format(python=sys.executable, body=body))
    child.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(child))
    seen = progress if progress is not None else []
    return local.LocalReplica(
        replica_id="r0",
        model="m",
        folder=tmp_path,
        revision="1",
        engine=EngineConfig(),
        logs=LogConfig(log_json=True),
        on_loading=lambda done, total: seen.append((done, total)),
    )


async def test_ready_then_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress: list[tuple[int, int]] = []
    subject = replica(tmp_path, monkeypatch, READY, progress)
    await subject.start()
    pid = subject.pid
    assert pid is not None and progress == [(1, 2)]
    await subject.stop(1.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert not Path(subject.socket).parent.exists()


async def test_a_startup_error_arrives_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'say(event="error", kind="InsufficientMemoryError", message="needs 9 GiB", hint="lower it")'
    subject = replica(tmp_path, monkeypatch, body)
    with pytest.raises(InsufficientMemoryError, match="needs 9 GiB") as caught:
        await subject.start()
    assert caught.value.hint == "lower it"


@pytest.mark.parametrize("body", ["sys.exit(3)", "print('nonsense', flush=True); sys.exit(3)"])
async def test_a_death_at_start_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    with pytest.raises(EngineError, match="exit code 3"):
        await replica(tmp_path, monkeypatch, body).start()


async def test_a_killed_replica_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "FIRST_BACKOFF_S", 0.01)
    subject = replica(tmp_path, monkeypatch, READY)
    await subject.start()
    first = subject.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    while subject.num_restarts == 0 or subject.pid == first:
        await asyncio.sleep(0.01)
    await subject.stop(1.0)


async def test_one_that_hangs_is_killed_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "FIRST_BACKOFF_S", 0.01)
    subject = replica(tmp_path, monkeypatch, READY)
    await subject.start()
    first = subject.pid
    assert first is not None
    os.kill(first, signal.SIGSTOP)
    subject.kill(first + 1)  # another process's pid
    subject.kill(first)
    async with asyncio.timeout(30):
        while subject.num_restarts == 0 or subject.pid == first:
            await asyncio.sleep(0.01)
    await subject.stop(1.0)


async def test_a_machine_without_room_for_a_process_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "FIRST_BACKOFF_S", 0.01)
    subject = replica(tmp_path, monkeypatch, READY)
    await subject.start()
    first = subject.pid
    assert first is not None
    spawn = asyncio.create_subprocess_exec

    async def refuse(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(asyncio, "create_subprocess_exec", spawn)
        raise OSError(errno.EAGAIN, "no process to be had")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refuse)
    os.kill(first, signal.SIGKILL)
    while subject.num_restarts < 2 or subject.pid == first:
        await asyncio.sleep(0.01)
    await subject.stop(1.0)


async def test_one_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "STOP_MARGIN_S", 0.1)
    body = (
        'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsay(event="ready")\nsys.stdin.read()\nsignal.pause()'
    )
    subject = replica(tmp_path, monkeypatch, body)
    await subject.start()
    pid = subject.pid
    assert pid is not None
    await subject.stop(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
