"""The loop on a real engine, compiler and registry; only the judge is told what to say."""

from __future__ import annotations

import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli.control_client import ask_started
from headrace.cli.kernel_loop import KernelLoop
from headrace.core.control import Ps, PsReply
from headrace.core.errors import StartupError, TimeUpError, UnavailableError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.request import SamplingParams
from headrace.core.routing import Endpoint, FleetStatus, Member, ModelInfo, ReplicaStatus
from headrace.kernels.native import shipped
from headrace.llm import LLM
from headrace.optimize.digest import candidate_digest
from headrace.optimize.keys import TRUSTED
from headrace.optimize.loop import Judged, Limits
from headrace.optimize.packing import read_manifest
from headrace.optimize.proposal import CandidateSource
from headrace.optimize.proposers.brief import SOURCE, default_entry, op_text, skeleton
from headrace.optimize.records import KernelProfile, Measurement, Target, Verdict
from headrace.optimize.registry import Listed, Registry, verify
from headrace.optimize.rounds import RoundStore
from tests.cli.test_commands import PORT, Control
from tests.engine.shipped import PackShelf
from tests.optimize.fakes import ratio
from tests.system.tiny import write_model

pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None and shutil.which("clang++") is None, reason="no C++ compiler"
)


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setattr("headrace.cli.kernel_loop.PROFILE_S", 0.5)
    monkeypatch.setattr(shipped, "shipped_folder", lambda: tmp_path / "no packs")


GREEDY = SamplingParams(temperature=0, max_tokens=16)


class Declining:
    """Kernels that compile fast and leave every call to what ran before."""

    author = "declining"

    def propose(self, target: Target, best: object, history: object, rng: object) -> CandidateSource | None:
        source = skeleton(target, op_text(target))
        return CandidateSource(files={SOURCE: source}, entry=default_entry(target), author=self.author)


def make_loop(model: Path, said: list[str], **changes: Any) -> KernelLoop:
    settings: dict[str, Any] = {
        "model": str(model),
        "workload": "decode",
        "engine": EngineConfig(max_model_len=64, kv_cache_gib=0.02),
        "proposer": Declining(),
        "wanted": lambda target: True,
        "limits": Limits(candidates=2),
        "rounds_dir": None,
        "registry_url": "",
        "base": "latest",
        "op": "",
        "port": None,
        "approver": "test",
        "seed": 0,
        "say": said.append,
    }
    return KernelLoop(**{**settings, **changes})


def judged(self: KernelLoop, folder: Path, target: Target, base: Path | None, *, end_to_end: bool) -> Judged:
    """Everything is right, and faster."""
    digest = candidate_digest(folder)
    verdict = Verdict(
        candidate=folder.name, digest=digest, passed=True, reason="ok", detail="", seconds=0, sandbox="none"
    )
    measurement = Measurement(
        candidate=folder.name,
        digest=digest,
        alone={"decode/1": ratio(1.5)},
        end_to_end={"workload": ratio(1.3)} if end_to_end else {},
        agreement="",
        won=end_to_end,
        detail="",
    )
    return verdict, measurement


def test_a_budget_that_is_too_small_for_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A workload of many steps: the profile ends within the budget, and says what it lacked."""
    model = write_model(tmp_path / "model")
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": [5, 6, 7], "max_tokens": 40}\n' * 2000)
    loop = make_loop(model, [], workload=str(requests))
    with pytest.raises(
        TimeUpError, match=r"in pass \d of the 8 that a profile of requests\.jsonl needs"
    ) as caught:
        loop.run(1, minutes=0.1)
    assert "--minutes" in (caught.value.hint or "")
    assert RoundStore().rounds()[0].end is None


def served(*names: str, vocab_size: int) -> PsReply:
    """What a server of these models says."""
    return PsReply(
        FleetStatus(
            policy="least_load",
            replicas=[
                ReplicaStatus(
                    member=Member(
                        endpoint=Endpoint(replica_id=name, model=name, address="/x", kind="headrace"),
                        state="ready",
                    )
                )
                for name in names
            ],
            models=[
                ModelInfo(
                    model=name, max_model_len=64, block_size=16, root_identity=b"", vocab_size=vocab_size
                )
                for name in names
            ],
            num_queued=0,
        )
    )


def test_the_server_that_is_to_take_packs_is_looked_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    model = write_model(tmp_path / "model")
    loop = make_loop(model, [], port=PORT)
    size = loop._config.vocab_size
    with pytest.raises(UnavailableError, match="no headrace server runs") as caught:
        loop.check_server()
    assert "--rollout" in (caught.value.hint or "")
    control = Control()
    try:
        control.script = [served("other", vocab_size=size + 1)]
        with pytest.raises(UsageError, match="that server has other, and not"):
            loop.check_server()
        control.script = [served("a", "b", vocab_size=size)]
        with pytest.raises(UsageError, match="which of them"):
            loop.check_server()
        control.script = [served("another", str(model), vocab_size=size)]
        loop.check_server()
        assert loop._served_name == str(model)
        control.script = [served("renamed", vocab_size=size)]
        loop.check_server()
        assert loop._served_name == "renamed"
    finally:
        control.close()


def test_a_server_that_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has its port, lets requests wait, and says what it is once it runs."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as starting:
        port = starting.getsockname()[1]
        monkeypatch.setattr("tests.cli.test_commands.PORT", port)
        controls: list[Control] = []

        def say(line: str) -> None:
            said.append(line)
            controls.append(Control())
            controls[0].script = [served("m", vocab_size=1)]
            starting.close()

        reply = ask_started(port, Ps(), PsReply, timeout_s=5.0, say=say)
        controls[0].close()
    assert len(said) == 1
    assert [info.model for info in reply.status.models] == ["m"]


def test_packs_of_two_rounds_run_in_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KernelLoop, "_judge", judged)
    model = write_model(tmp_path / "model")
    said: list[str] = []
    first, second = make_loop(model, said).run(2)
    assert [first.outcome, second.outcome] == ["won", "won"]
    registry = Registry()
    folder = registry.fetch(second.pack)
    assert verify(folder) == second.pack
    manifest = read_manifest(folder)
    assert (manifest.builds_on, manifest.author) == (first.pack, "declining")
    assert manifest.conditions.shapes["hidden_size"] == 64

    # the second round was profiled on the first one's pack, and the next command begins from the second's
    _, two = RoundStore().rounds()
    profile = two.load("profile", KernelProfile)
    assert profile is not None
    assert profile.packs == [first.pack]
    assert make_loop(model, said)._base == second.pack
    assert make_loop(model, said, base="none")._base == ""
    assert make_loop(model, said, base=first.pack[:10])._base == first.pack

    # and an engine takes the pack
    prompt = list(range(3, 40))
    with LLM(str(model), max_model_len=64, kv_cache_gib=0.02) as llm:
        expected = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    with LLM(str(model), max_model_len=64, kv_cache_gib=0.02, pack=str(folder)) as llm:
        assert second.pack in llm.engine.runner.model.ops.provenance.values()
        found = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
    assert found == expected


def test_candidates_are_judged_in_the_form_that_was_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[str] = set()

    def judge(
        self: KernelLoop, folder: Path, target: Target, base: Path | None, *, end_to_end: bool
    ) -> Judged:
        seen.add(target.quantization)
        return judged(self, folder, target, base, end_to_end=end_to_end)

    monkeypatch.setattr(KernelLoop, "_judge", judge)
    engine = EngineConfig(max_model_len=64, kv_cache_gib=0.02, quantization="none")
    make_loop(write_model(tmp_path / "model"), [], engine=engine).run(1)
    assert seen == {"none"}


def test_a_pack_of_another_model_or_that_does_not_hold_is_no_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelLoop, "_judge", judged)
    model = write_model(tmp_path / "model")
    said: list[str] = []
    (end,) = make_loop(model, said).run(1)
    assert end.outcome == "won"
    other = write_model(tmp_path / "other", vocab_size=416)
    assert make_loop(other, said)._base == ""
    next(Registry().fetch(end.pack).rglob("*.cpp")).write_text("// evil")
    assert make_loop(model, said)._base == ""
    assert "is passed over" in said[-1]
    with pytest.raises(StartupError):
        make_loop(model, said, base=end.pack).run(1)


def test_rounds_build_on_the_pack_that_ships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that is what a server runs: a pack of the registry is better only if it contains it."""
    monkeypatch.setattr(KernelLoop, "_judge", judged)
    model = write_model(tmp_path / "model")
    said: list[str] = []
    (alone,) = make_loop(model, said).run(1)
    shelf = PackShelf(tmp_path / "shelf")
    ships = shelf.add("cpu")
    shelf.add("other", dtype="float32")
    find = partial(shipped.find_shipped, keys=shelf.keys.folder / TRUSTED)
    monkeypatch.setattr(shipped, "find_shipped", find)
    monkeypatch.setattr(shipped, "shipped_folder", lambda: shelf.folder)
    loop = make_loop(model, said)
    assert loop._base == ships and loop._pack_folder(ships) == shelf.folder / "cpu"
    assert f"pack {alone.pack[:12]} is passed over: it does not build on pack {ships[:12]}" in said[-1]
    assert make_loop(model, said, base="none")._base == ""
    assert make_loop(model, said, base=alone.pack)._base == alone.pack
    manifest = msgspec.structs.replace(read_manifest(Registry().fetch(alone.pack)), builds_on=ships)
    listed = [Listed(id=alone.pack, manifest=manifest)]
    monkeypatch.setattr(Registry, "packs", lambda self: listed)
    assert make_loop(model, said)._base == alone.pack


def test_a_family_that_runs_on_transformers_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    config = '{"model_type": "bloom", "architectures": ["BloomForCausalLM"]}'
    (tmp_path / "m" / "config.json").write_text(config)
    with pytest.raises((UsageError, StartupError)):
        make_loop(tmp_path / "m", [])
