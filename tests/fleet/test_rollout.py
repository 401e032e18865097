"""Packs on their way to real replicas of a tiny model; their kernels are Python, the router is a stand-in.

Who is asked what, and what decides: test_rollout_order. Native kernels, streams: system/test_hot_swap.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.core.control import PACK_REFUSED, PACK_ROLLED_BACK
from headrace.core.deployment import ModelDeployment, ReplicaDeployment
from headrace.core.errors import InvalidRequestError, NotFoundError, PackError
from headrace.core.knobs import EngineConfig
from headrace.engine.packs import pack_id_of
from headrace.fleet import child, rollout, supervisor
from headrace.fleet.greeting import greeting
from headrace.fleet.place import LocalModel
from headrace.fleet.replica_link import ReplicaLink
from headrace.fleet.runtime_directory import RuntimeDirectory
from headrace.fleet.supervisor import Supervisor
from tests.engine.packs import write_pack
from tests.fleet.children import install_python_packs
from tests.fleet.registrars import FakeRegistrar
from tests.models.tiny import make_tiny

ENGINE = EngineConfig(
    dtype="float32", device="cpu", threads=1, max_model_len=256, block_size=4, kv_cache_gib=0.02
)


@dataclass
class Stack:
    supervisor: Supervisor
    folder: Path
    trusted: bool = True
    lines: list[str] = field(default_factory=list)

    def pack(self, kind: str, **settings: Any) -> str:
        """The folder of a new one."""
        folder = self.folder / f"{kind}-{len(list(self.folder.iterdir()))}"
        write_pack(folder, kind, **settings)
        return str(folder)

    def verify(self, folder: Path) -> str:
        if not self.trusted:
            raise PackError("signed with a key that is not trusted")
        return pack_id_of(folder)

    async def roll_out(self, folder: str) -> str:
        self.lines.clear()
        return await self.supervisor.roll_out("", folder, "a test", self.lines.append)

    async def runs(self) -> dict[str, str]:
        """The pack of each replica, as its process says."""
        found = {}
        for name, managed in self.supervisor._managed.items():
            link = ReplicaLink(name, managed.replica.spec.socket)
            await link.connect()
            found[name] = (await link.step_times()).pack_id
            link.close()
        return found

    async def replaced(self, name: str) -> None:
        """Kills a replica's process and waits for the next one."""
        replica = self.supervisor._managed[name].replica
        pid = replica.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await self.back(name, pid)

    async def back(self, name: str, pid: int) -> None:
        replica = self.supervisor._managed[name].replica
        async with asyncio.timeout(120):
            while replica.pid == pid or not replica.ready:
                await asyncio.sleep(0.02)
            await greeting(replica.spec.socket)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def stack(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    """Two replicas that run."""
    monkeypatch.setattr(child, "FIRST_BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "POLL_S", 0.005)
    monkeypatch.setattr(rollout, "LONG", 64)
    monkeypatch.setattr(rollout, "SHORT", 64)
    plans = [ReplicaDeployment(id=f"replica-{i}", engine=ENGINE) for i in range(2)]
    deployment = ModelDeployment(
        model="tiny", names=["m"], replicas=plans, engine=ENGINE, replica_prefix="replica-"
    )
    (tmp_path / "packs").mkdir()
    with RuntimeDirectory(tmp_path) as directory:
        install_python_packs(directory.path, monkeypatch)
        stack: Stack
        subject = Supervisor(
            FakeRegistrar(),
            [LocalModel(deployment, model_folder, "1")],
            directory=directory,
            grace_s=5.0,
            verify_pack=lambda folder: stack.verify(folder),
        )
        stack = Stack(subject, tmp_path / "packs")
        try:
            await subject.start()
            yield stack
        finally:
            await subject.stop(1.0)


async def refused(doing: Awaitable[str], code: str, words: str) -> None:
    with pytest.raises(PackError, match=words) as caught:
        await doing
    assert caught.value.code == code


async def test_a_pack_arrives_everywhere_and_stays_until_it_is_taken_back(stack: Stack) -> None:
    folder = stack.pack("same")
    pack = pack_id_of(Path(folder))
    assert await stack.roll_out(folder) == f"m runs pack {pack[:12]}"
    assert await stack.runs() == {"replica-0": pack, "replica-1": pack}
    words = "\n".join(stack.lines)
    assert "a test approved it" in words and "0 of " in words and "random sequences" in words
    order = [line for line in stack.lines if line.endswith(f"runs pack {pack[:12]}")]
    assert [line.split()[0] for line in order] == ["replica-0", "replica-1"]
    # whatever becomes of the folder, whoever is restarted or added runs it
    os.rename(folder, folder + "-elsewhere")
    await stack.replaced("replica-1")
    await stack.supervisor.scale("", 3, stack.lines.append)
    assert set((await stack.runs()).values()) == {pack}
    await stack.supervisor.reload("replica-0", stack.lines.append)
    assert set((await stack.runs()).values()) == {pack}
    assert await stack.supervisor.roll_back("m", "a test", stack.lines.append) == "m runs no pack again"
    assert set((await stack.runs()).values()) == {""}
    await stack.replaced("replica-1")
    assert set((await stack.runs()).values()) == {""}
    with pytest.raises(InvalidRequestError, match="nothing was rolled out"):
        await stack.supervisor.roll_back("m", "a test", stack.lines.append)


async def test_what_is_not_verified_or_cannot_be_built_changes_nothing(stack: Stack) -> None:
    await refused(stack.roll_out(stack.pack("broken")), PACK_REFUSED, "nothing can be made of this")
    await refused(stack.roll_out(stack.pack("raises")), PACK_REFUSED, "a kernel of its own mind")
    same = stack.pack("same")
    stack.trusted = False
    await refused(stack.roll_out(same), PACK_REFUSED, "not trusted")
    with pytest.raises(NotFoundError, match=r"no pack\.json"):
        await stack.roll_out(str(stack.folder))
    with pytest.raises(InvalidRequestError, match="approver"):
        await stack.supervisor.roll_out("", same, "", stack.lines.append)
    with pytest.raises(NotFoundError, match="no model"):
        await stack.supervisor.roll_out("other", same, "a test", stack.lines.append)
    assert set((await stack.runs()).values()) == {""}
    assert not any(" runs pack" in line for line in stack.lines)


async def test_a_canary_that_is_wrong_on_one_position_in_a_hundred_is_taken_back(stack: Stack) -> None:
    pack = stack.pack("wrong", every=100, error=0.01)
    await refused(stack.roll_out(pack), PACK_ROLLED_BACK, "is wrong on replica-0")
    assert any("1.00 %" in line or "0.9" in line for line in stack.lines), stack.lines
    # so little is rounding
    await stack.roll_out(stack.pack("wrong", every=100, error=0.0005))


async def test_a_canary_that_dies_comes_back_without_the_pack(stack: Stack) -> None:
    pid = stack.supervisor._managed["replica-0"].replica.pid
    assert pid is not None
    await refused(stack.roll_out(stack.pack("dies", after=50)), PACK_REFUSED, "went away")
    await stack.back("replica-0", pid)
    assert set((await stack.runs()).values()) == {""}
