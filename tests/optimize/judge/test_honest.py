"""Honest candidates pass, every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.verify import verify
from tests.optimize.judge.candidates import HERE, candidate, target

NAMES = sorted(path.stem for path in (HERE / "honest").glob("*.cpp"))
REPEATS = 4
"""Of each of the five: twenty judgements, each with its own hidden seed."""


@pytest.mark.parametrize("number", range(REPEATS))
@pytest.mark.parametrize("name", NAMES)
def test_honest(name: str, number: int, tmp_path: Path) -> None:
    folder = candidate(tmp_path / name, HERE / "honest" / f"{name}.cpp")
    options = JudgeOptions(threads=2, compile_s=200.0, call_s=10.0, endurance_calls=400, endurance_s=0.5)
    verdict = verify(folder, target(), options=options)
    assert verdict.passed, f"{verdict.reason}: {verdict.detail}"
    assert len(verdict.errors) >= 4
    assert "no network" in verdict.sandbox
