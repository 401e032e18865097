"""A pack judged as one: every kernel on every model, all of them together, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.core.errors import PackError, UsageError
from headrace.core.packs import KernelEntry, PackConditions
from headrace.optimize import whole_pack
from headrace.optimize.digest import candidate_digest
from headrace.optimize.journal import measurement_line
from headrace.optimize.judge import lesser_cpu
from headrace.optimize.judge.build import Built, Taken
from headrace.optimize.judge.end_to_end import EndToEnd
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.sandbox import Sandbox
from headrace.optimize.keys import Keys
from headrace.optimize.packing import make_pack, read_evidence, verify_pack
from headrace.optimize.profile.workloads import Workload
from headrace.optimize.records import Ratio, Target, Verdict
from headrace.optimize.targets import whole_target
from headrace.optimize.whole_pack import Model, judge_pack, read_entries, split_candidates
from tests.optimize.fakes import CONFIG, ratio

OPS = ("decoder_layer", "rms_norm")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "common.h").write_text('#include "headrace_kernel.h"\n#include "deep.h"\n')
    (folder / "deep.h").write_text("// both\n")
    (folder / "unused.h").write_text("// neither\n")
    for op in OPS:
        (folder / f"{op}.cpp").write_text(f'#include "common.h"\n// {op}\n')
    entries = [KernelEntry(op=op, source=f"{op}.cpp", max_rows=0, batch_invariant=True) for op in OPS]
    (folder / "kernels.json").write_bytes(msgspec.json.encode(entries))
    return folder


def models(count: int) -> list[Model]:
    made = []
    for number in range(count):
        formats = [[], ["q8_0"], ["q4_0"], ["q4_1"]][number]
        targets = [whole_target(op, f"m{number}", CONFIG, formats=formats) for op in OPS]
        made.append(Model(targets, [Workload(name=name, requests=[]) for name in ("decode", "prefill")]))
    return made


class World:
    """A judge that finds what it is told to find; ``calls`` is what it was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.alone: dict[str, Ratio] = {"decode/1": ratio(1.5), "prefill/256": ratio(1.2)}
        self.together: dict[str, float] = {"decode": 1.4, "prefill": 1.1}
        self.wrong = ""
        self.agrees = True
        for name in ("verified", "measure_alone", "build", "compare_engines"):
            monkeypatch.setattr(whole_pack, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(whole_pack.Setting, "of", staticmethod(lambda *asked: asked))

    def _verified(
        self, folder: Path, target: Target, scratch: Path, **_: Any
    ) -> tuple[Verdict, Built | None]:
        self.calls.append(f"verify {target.op} {target.model}")
        right = self.wrong != target.op
        verdict = Verdict(
            candidate=folder.name,
            digest=candidate_digest(folder),
            passed=right,
            reason="ok" if right else "not_invariant",
            detail="",
            seconds=1.0,
            sandbox="none",
        )
        return verdict, self._build(folder, target, scratch) if right else None

    def _build(self, folder: Path, target: Target, scratch: Path, **_: Any) -> Built:
        entry = msgspec.json.decode((folder / "kernel.json").read_bytes(), type=KernelEntry)
        taken = Taken(folder, entry, candidate_digest(folder))
        return Built(taken, folder / "k.so", None, Sandbox("none"), 1.0)  # type: ignore[arg-type]

    def _measure_alone(self, built: Built, *_: Any) -> dict[str, Ratio]:
        return self.alone

    def _compare_engines(
        self, kernels: list[Built], setting: Any, options: Any, *, formats: list[str]
    ) -> EndToEnd:
        target, workload = setting[0], setting[1]
        self.calls.append(f"run {workload.name} {target.model} {'+'.join(formats)}")
        assert [each.taken.entry.op for each in kernels] == list(OPS)
        if self.wrong == workload.name:
            raise Rejected("crashed", "in the engine")
        return EndToEnd({"workload": ratio(self.together[workload.name])}, "close", self.agrees)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


@pytest.fixture
def judge(sources: Path, tmp_path: Path) -> Callable[..., Any]:
    entries = read_entries(sources)
    candidates = split_candidates(sources, entries, tmp_path / "candidates")

    def run(count: int, options: JudgeOptions | None = None) -> Any:
        return judge_pack(
            candidates,
            entries,
            models(count),
            author="me",
            options=options or JudgeOptions(),
            say=lambda line: None,
            kept=tmp_path / "kept",
        )

    return run


def test_kernels_share_headers_only(sources: Path, tmp_path: Path) -> None:
    headers = {"common.h", "deep.h", "kernel.json"}
    first, second = split_candidates(sources, read_entries(sources), tmp_path / "out")
    assert {path.name for path in first.iterdir()} == {*headers, "decoder_layer.cpp"}
    assert {path.name for path in second.iterdir()} == {*headers, "rms_norm.cpp"}


def test_a_pack_for_any_model(judge: Callable[..., Any], world: World, tmp_path: Path) -> None:
    winners = judge(3)
    assert len(winners) == 6 and len([call for call in world.calls if call.startswith("verify")]) == 6
    assert "run prefill m1 q8_0" in world.calls
    folder, keys = tmp_path / "pack", Keys(tmp_path / "keys")
    folder.mkdir()
    make_pack(folder, *winners, name="any", conditions=PackConditions(), round_id="r", keys=keys)
    manifest = verify_pack(folder, keys)
    assert manifest.author == "me" and [entry.op for entry in manifest.kernels] == list(OPS)
    for entry in manifest.kernels:
        evidence = read_evidence(folder, entry)
        assert {one.target.model for one in evidence} == {"m0", "m1", "m2"}
        assert all(set(one.measurement.end_to_end) == {"decode", "prefill"} for one in evidence)


def test_nothing_is_done_twice(judge: Callable[..., Any], world: World) -> None:
    world.wrong = "prefill"
    with pytest.raises(PackError, match=r"m0 .*prefill: crashed: in the engine"):
        judge(2)
    done = len(world.calls)
    world.wrong = ""
    judge(2)
    assert "verify decoder_layer m0" not in world.calls[done:]
    done = len(world.calls)
    judge(2)
    assert len(world.calls) == done


def test_evidence_for_a_lesser_cpu(
    judge: Callable[..., Any], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how torch was limited, and is no evidence for this CPU."""
    monkeypatch.setattr(lesser_cpu, "cpu_features", lambda: frozenset({"avx2", "avx512f"}))
    assert judge(1)[0].measurement.limited == ""
    done = len(world.calls)
    lesser = JudgeOptions().for_cpu(("avx2", "fma"))
    found = judge(1, lesser)[0].measurement
    assert "ATEN_CPU_CAPABILITY=avx2" in found.limited and "limited to AVX2" in measurement_line(found)
    assert len(world.calls) == 2 * done, "what was found without limits does not count"
    judge(1, lesser)
    assert len(world.calls) == 2 * done


def test_what_makes_no_pack(judge: Callable[..., Any], world: World) -> None:
    world.wrong = "rms_norm"
    with pytest.raises(PackError, match=r"rms_norm on m0 .*: not_invariant"):
        judge(1)
    world.wrong = ""
    world.alone["prefill/256"] = ratio(0.9)
    with pytest.raises(PackError, match="slower at prefill/256"):
        judge(1)
    world.alone["prefill/256"] = ratio(1.0)  # as fast
    world.together["prefill"] = 0.9
    with pytest.raises(PackError, match="prefill: not faster"):
        judge(1)
    world.together.update(prefill=1.0, decode=1.0)
    with pytest.raises(PackError, match="decode: not faster"):
        judge(1)
    world.together["decode"] = 1.2
    world.agrees = False
    with pytest.raises(PackError, match="its answers differ"):
        judge(1)
    world.agrees = True
    assert judge(1)[0].measurement.won


def test_a_header_that_is_missing(sources: Path, tmp_path: Path) -> None:
    (sources / "deep.h").unlink()
    with pytest.raises(UsageError, match=r"has no deep\.h"):
        split_candidates(sources, read_entries(sources), tmp_path / "out")


def test_sources_that_say_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"kernels\.json"):
        read_entries(tmp_path)
    (tmp_path / "kernels.json").write_text("[]")
    with pytest.raises(UsageError, match="names no kernels"):
        read_entries(tmp_path)
