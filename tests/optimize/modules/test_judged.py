"""Modules before the judge and in the loop: right kernels pass, wrong ones do not, gains must hold twice."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.core.packs import KernelEntry
from headrace.optimize.journal import Journal
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.verify import verify
from headrace.optimize.keys import Keys
from headrace.optimize.loop import Limits, Loop
from headrace.optimize.modules import load, stages
from headrace.optimize.modules.host import ModuleHost
from headrace.optimize.modules.problem import ModuleProblem
from headrace.optimize.modules.stages import ModuleStages
from headrace.optimize.proposers.brief import op_text
from headrace.optimize.proposers.module_search import ModuleSearch
from headrace.optimize.records import Measurement, Ratio, Target, Verdict
from headrace.optimize.registry import Registry
from headrace.optimize.rounds import RoundStore
from tests.optimize.modules.support import EXAMPLES, FIVE, first_candidate, opened, target_of

OPTIONS = JudgeOptions(threads=2, endurance_calls=50, endurance_s=0.1, alone_s=0.2, roof=1e13, call_s=20.0)


@pytest.fixture(params=FIVE)
def example(request: pytest.FixtureRequest) -> Iterator[tuple[ModuleHost, Target]]:
    name = f"{EXAMPLES}/{request.param}"
    with ModuleHost(name) as host:
        yield host, target_of(name, host.describe())


def entry_of(folder: Path) -> KernelEntry:
    return msgspec.json.decode((folder / "kernel.json").read_bytes(), type=KernelEntry)


def judged(folder: Path, target: Target, host: ModuleHost) -> Verdict:
    return verify(folder, target, problem=ModuleProblem(target, entry_of(folder), host), options=OPTIONS)


def test_the_searchs_kernel_is_right_and_one_that_forgets_something_is_not(
    example: tuple[ModuleHost, Target], tmp_path: Path
) -> None:
    host, target = example
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    source = first_candidate(target, right)
    verdict = judged(right, target, host)
    assert verdict.passed, verdict.detail
    assert len(verdict.errors) == len(target.call.contents if target.call else [])
    wrong.mkdir()
    text = source.files[source.entry.source]
    spoiled = text
    for before, after in SPOILED:
        if before in text:
            spoiled = text.replace(before, after)
            break
    assert spoiled != text
    (wrong / source.entry.source).write_text(spoiled)
    (wrong / "kernel.json").write_bytes(msgspec.json.encode(source.entry))
    verdict = judged(wrong, target, host)
    assert not verdict.passed
    assert verdict.reason in ("wrong_result", "incomplete")


SPOILED = (
    ("constexpr bool CAUSAL = false", "constexpr bool CAUSAL = true"),
    ("shift += ", "shift -= "),  # batch norm's offset
    ("1e-05f", "1e-03f"),  # an epsilon
    ("* 30.0f", "* 28.0f"),  # the cap
)


def test_weights_are_drawn_so_that_none_can_be_ignored() -> None:
    name = f"{EXAMPLES}/conv.py:Stem"
    with ModuleHost(name) as host:
        target = target_of(name, host.describe())
        problem = ModuleProblem(target, KernelEntry(op="module", source="k.cpp"), host)
        weights = {spec.slot: torch.empty(spec.shape, dtype=spec.dtype) for spec in problem.weights()}
        problem.fill_weights(weights, 1)
        first = {slot: tensor.clone() for slot, tensor in weights.items()}
        problem.fill_weights(weights, 2)
        (case,) = problem.timed_cases(0)
        inputs = {spec.slot: torch.empty(spec.shape, dtype=spec.dtype) for spec in case.tensors}
        problem.fill(case, inputs, "normal", 1)
        truth = problem.reference(case, first, inputs)
        stock = problem.stock(case, first, inputs)
    for slot, tensor in first.items():
        assert not torch.equal(tensor, weights[slot]), slot
        assert bool(tensor.any())
    assert bool((first["norm_running_var"] > 0).all())
    assert truth["out"].dtype is torch.float64
    assert torch.allclose(truth["out"].float(), stock["out"], atol=1e-3)


def test_the_baselines_process_gets_the_problem_without_the_host() -> None:
    found, target = opened(f"{EXAMPLES}/mlp.py:MLP")
    problem = ModuleProblem(target, KernelEntry(op="module", source="k.cpp"))
    again = pickle.loads(pickle.dumps(problem))
    (case,) = again.timed_cases(0)
    weights = {spec.slot: torch.randn(spec.shape) * 0.1 for spec in again.weights()}
    x = torch.randn(4, 320)
    call = again.prepare(case, weights, {"x": x}, "")
    (first,) = call()
    x.add_(1.0)  # tensors are read at every call
    (second,) = call()
    state = {slot.source: weights[slot.name] for slot in target.call.slots if slot.role == "weight"}  # type: ignore[union-attr]
    found.module.load_state_dict(state)
    assert not torch.equal(first, second)
    assert torch.allclose(second, found.module(x), atol=1e-5)


def test_writers_of_kernels_read_the_users_file() -> None:
    _, target = opened(f"{EXAMPLES}/mlp.py:MLP")
    text = op_text(target)
    assert "class MLP" in text.reference
    assert text.signature.names("output") == ("out",)


def measurement(won: bool) -> Measurement:
    return Measurement(
        candidate="1", digest="d", alone={"prefill/8": RATIO}, end_to_end={}, agreement="", won=won, detail=""
    )


RATIO = Ratio(median=1.5, low=1.4, high=1.6, pairs=9, baseline_s=1.0, candidate_s=0.7)
SLOWER = Ratio(median=1.0, low=0.9, high=1.1, pairs=9, baseline_s=1.0, candidate_s=1.0)


@pytest.mark.parametrize(
    ("forward", "names", "won"),
    [
        ([RATIO, RATIO], ["forward", "again"], True),
        ([RATIO, SLOWER], ["forward", "again"], False),
        ([SLOWER], ["forward"], False),
    ],
)
def test_a_gain_must_hold_in_a_second_fresh_process(
    forward: list[Ratio], names: list[str], won: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, target = opened(f"{EXAMPLES}/mlp.py:MLP")
    first_candidate(target, tmp_path / "candidate")
    verdict = Verdict(candidate="1", digest="d", passed=True, reason="ok", detail="", seconds=0.0, sandbox="")
    monkeypatch.setattr(stages, "judge", lambda *args, **named: (verdict, measurement(True)))
    left = list(forward)
    monkeypatch.setattr(stages, "measure_forward", lambda *args, **named: left.pop(0))
    made = ModuleStages(target.module, None, Registry(str(tmp_path)), Keys(tmp_path), approver="t")  # type: ignore[arg-type]
    _, found = made.stages().confirm(tmp_path / "candidate", target, None)
    assert found is not None
    assert (list(found.end_to_end), found.won) == (names, won)


def test_a_whole_round_ends_in_a_pack_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed on a busy machine decides nothing here: it runs, and counts as a win."""
    name = f"{EXAMPLES}/softmax.py:CappedSoftmax"
    keys, said = Keys(tmp_path / "keys"), list[str]()
    registry = Registry(str(tmp_path / "registry"), keys=keys)
    timed = list[Ratio]()

    def forward(*args: object, **named: object) -> Ratio:
        timed.append(stages_measure(*args, pairs=9, **named))  # type: ignore[arg-type]
        return RATIO

    def judge(folder: Path, *args: object, **named: object) -> tuple[Verdict, Measurement | None]:
        verdict, found = stages_judge(folder, *args, **named)  # type: ignore[arg-type]
        won = msgspec.structs.replace(measurement(True), digest=verdict.digest)
        return verdict, won if verdict.passed and found is not None else None

    stages_measure, stages_judge = stages.measure_forward, stages.judge
    monkeypatch.setattr(stages, "measure_forward", forward)
    monkeypatch.setattr(stages, "judge", judge)
    monkeypatch.setattr(stages, "_MAX_CALLS", 8)
    with ModuleHost(name) as host:
        made = ModuleStages(name, host, registry, keys, approver="t", options=OPTIONS, once=True)
        loop = Loop(
            RoundStore(tmp_path / "rounds"),
            made.stages(),
            ModuleSearch(2),
            Journal(said.append),
            model=name,
            workload="get_inputs()",
            limits=Limits(candidates=2),
        )
        first, second = loop.run(2)
    assert (first.outcome, second.outcome) == ("won", "nothing_to_gain"), said
    assert len(timed) == 2
    assert all(each.baseline_s > 0 and each.candidate_s > 0 for each in timed)
    module = opened(name)[0].module
    bound = load(registry.fetch(first.pack), module, keys=keys)
    with torch.inference_mode():
        x = torch.randn(48, 1000)
        assert torch.allclose(bound(x), module(x), atol=1e-6)
    assert bound.calls == 1
