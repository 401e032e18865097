"""What starts a round by itself, and what keeps it from starting too many."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pytest

from headrace.optimize.rounds import RoundEnd, RoundStore
from headrace.optimize.watch import Budget, drift, find_triggers, shape_shares, watch
from tests.optimize.fakes import LAYER, kernel_profile, phase_profile

BEFORE = kernel_profile()


def test_the_same_workload_on_the_same_machine_triggers_nothing() -> None:
    assert find_triggers(BEFORE, kernel_profile(), {"decode": 1.0}) == []


def test_each_trigger_says_what_was_seen() -> None:
    assert [one.kind for one in find_triggers(None, BEFORE, {})] == ["no_round_yet"]
    elsewhere = msgspec.structs.replace(BEFORE, hardware="another machine")
    assert [one.kind for one in find_triggers(BEFORE, elsewhere, {})] == ["new_hardware"]
    (missed,) = find_triggers(BEFORE, BEFORE, {"decode": 0.005, "prefill": 0.001})
    assert (missed.kind, missed.detail) == ("missed_target", "a decode step takes 10.00 ms, it may 5.00")
    wider = kernel_profile(phase_profile({LAYER: 5e-3}, rows=8))
    assert [one.kind for one in find_triggers(BEFORE, wider, {})] == ["workload_drifted"]


def test_drift_is_a_distance() -> None:
    one, other = shape_shares(BEFORE), shape_shares(kernel_profile(phase_profile({LAYER: 1e-3}, rows=64)))
    assert drift(one, one) == 0
    assert drift(one, other) == pytest.approx(1)
    mixed = {key: value / 2 for key, value in {**one, **other}.items()}
    assert 0.3 < drift(one, mixed) < 0.7
    assert drift(one, mixed) == pytest.approx(drift(mixed, one))


def test_the_budget_counts_rounds_of_the_last_day(tmp_path: Path) -> None:
    store = RoundStore(tmp_path)
    one = store.create(model="m", workload="w", proposer="p", seed=0)
    end = RoundEnd(outcome="no_win", summary="", candidates=1, right=0, seconds=600)
    one.save("end", end)
    now = datetime.now(UTC)
    assert Budget(30).left(store, now) == pytest.approx(20)
    assert Budget(30).left(store, now + timedelta(hours=25)) == pytest.approx(30)


def test_it_starts_rounds_within_the_budget_and_not_twice_for_one_reason() -> None:
    slow = kernel_profile()
    looks = [slow, None, slow, kernel_profile(phase_profile({LAYER: 5e-3}, rows=64)), slow]
    started: list[float] = []
    said: list[str] = []
    left = iter([30.0, 0.0])

    watch(
        look=lambda: looks.pop(0),
        start=lambda minutes: started.append(minutes) or [],  # type: ignore[func-returns-value]
        last=lambda: BEFORE,
        budget_left=lambda: next(left),
        targets={"decode": 0.001},
        say=said.append,
        every_s=1,
        sleep=lambda seconds: None,
        looks=5,
    )
    assert started == [30.0]
    assert [line.partition(":")[0] for line in said] == [
        "missed target",
        "workload drifted",
        "the budget of 24 hours is used up",
    ]
