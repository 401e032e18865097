"""Timing: what is faster wins, what is slower does not, and what cannot be is rejected."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.core.packs import KernelEntry
from headrace.optimize.judge import alone, measure
from headrace.optimize.judge.cases import OpProblem
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.statistics import ratio
from tests.optimize.judge.candidates import HERE, candidate, target

OPTIONS = JudgeOptions(threads=1, compile_s=300.0, call_s=30.0, alone_s=0.5, roof=1e15)
SLOW = """#include "common.h"
extern "C" int hr_run(const hr_call *call) {
    for (int i = 0; i < 300; i++) norm_all(call);
    return HR_DONE;
}
"""
WRONG_LATER = """#include "common.h"
// Verification is over by now, it thinks.
static int calls;
extern "C" int hr_run(const hr_call *call) {
    norm_all(call);
    if (++calls > 3000) put(call->tensors[2], 3, 0.0f);
    return HR_DONE;
}
"""


def test_faster_alone(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "plain", HERE / "honest" / "plain.cpp")
    found = measure.alone(folder, target(), options=OPTIONS)
    assert found.alone["decode/1"].median > 1.0, found
    assert not found.won  # not without the workload
    problem = OpProblem(target(), KernelEntry(op="rms_norm", source="kernel.cpp"))
    module = measure.alone(folder, target(module="model.py:Norm"), problem=problem, options=OPTIONS)
    # a user's module has none: it wins if a busy machine left it significant
    assert module.won == (module.alone["decode/1"].low > 1.0), module


def test_slower_alone(tmp_path: Path) -> None:
    source = tmp_path / "slow.cpp"
    source.write_text(SLOW)
    found = measure.alone(candidate(tmp_path / "slow", source), target(), options=OPTIONS)
    assert found.alone["decode/1"].high < 1.0
    assert not found.won and "not faster alone" in found.detail


def test_wrong_while_it_is_timed(tmp_path: Path) -> None:
    source = tmp_path / "later.cpp"
    source.write_text(WRONG_LATER)
    found = measure.alone(candidate(tmp_path / "later", source), target(), options=OPTIONS)
    assert not found.won and found.detail.startswith("stale_result"), found.detail


def test_faster_than_the_machine(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "plain", HERE / "honest" / "plain.cpp")
    found = measure.alone(folder, target(), options=JudgeOptions(threads=1, alone_s=0.2, roof=1e3))
    assert found.detail.startswith("too_fast")


def test_a_busy_neighbour_is_no_reason_to_reject(monkeypatch: pytest.MonkeyPatch) -> None:
    """What two threads cannot stream while one of them waits, one can; a low roof is measured again."""
    asked: list[tuple[int, float]] = []

    def rate(footprint: int, threads: int, *, seconds: float) -> tuple[float, str]:
        asked.append((threads, seconds))
        return (9e9 if (threads, seconds) == (1, 1.0) else 1e8 * threads), ""

    monkeypatch.setattr(alone, "stream_rate", rate)
    assert alone._roof(1 << 20, 4e9, JudgeOptions(threads=2)) == 9e9
    assert asked == [(2, 0.4), (1, 0.4), (2, 1.0), (1, 1.0)]
    assert alone._roof(1 << 20, 1e8, JudgeOptions(threads=2)) == 2e8  # enough at once
    assert alone._roof(1 << 20, 1e12, JudgeOptions(threads=2)) == 9e9  # the most that was seen


def test_interval_of_pairs() -> None:
    found = ratio([2.0, 2.2, 1.9, 2.1, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0], calls=10)
    assert found.median == pytest.approx(2.0)
    assert found.low <= found.median <= found.high
    assert found.baseline_s == pytest.approx(0.2) and found.pairs == 5
