"""Threads of a step beside other processes."""

from __future__ import annotations

import pytest

from headrace.engine import free_cores
from headrace.engine.free_cores import INTERVAL_S, PAUSE_S, FreeCores, busy_seconds


class Machine:
    """Cores of which others use ``others`` and this process ``own``."""

    def __init__(self, most: int, known: bool = True) -> None:
        self.now = self.worked = self.mine = 0.0
        self.cores = FreeCores(
            most,
            busy=lambda: self.worked if known else None,
            own=lambda: self.mine,
            clock=lambda: self.now,
        )

    def after(self, others: float, own: float = 1.0, seconds: float = 2 * INTERVAL_S) -> int:
        self.now += seconds
        self.mine += own * seconds
        self.worked += (own + others) * seconds
        self.cores.step_ended()
        return self.cores.threads()

    def paused(self, others: float, seconds: float = 2 * INTERVAL_S) -> int:
        self.now += seconds
        self.worked += others * seconds
        return self.cores.threads()


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_cores, "num_cores", lambda: 4)


def test_a_busy_neighbour_takes_a_thread_and_gives_it_back() -> None:
    machine = Machine(4)
    assert machine.after(others=0.0, own=4.0) == 4
    assert machine.after(others=1.0, own=3.0) == 3
    assert machine.after(others=2.9, own=1.0) == 1
    assert machine.after(others=0.0, own=1.0) == 4


def test_one_thread_is_always_left() -> None:
    machine = Machine(4)
    assert machine.after(others=4.0, own=0.0) == 1
    assert machine.after(others=7.0, own=0.0) == 1


def test_no_more_threads_than_were_asked_for() -> None:
    machine = Machine(2)
    assert machine.after(others=0.0) == 2
    assert machine.after(others=1.9) == 2  # two of four cores are left
    assert machine.after(others=3.0) == 1


def test_a_neighbour_of_half_a_core_changes_nothing_either_way() -> None:
    machine = Machine(4)
    assert machine.after(others=0.5, own=3.5) == 4
    assert machine.after(others=0.9, own=3.0) == 3
    assert machine.after(others=0.5, own=3.0) == 3
    assert machine.after(others=0.2, own=3.0) == 4


def test_it_looks_only_now_and_then() -> None:
    machine = Machine(4)
    assert machine.after(others=3.0, seconds=INTERVAL_S / 2) == 4
    assert machine.after(others=3.0, seconds=INTERVAL_S) == 1


def test_what_others_did_while_it_paused_does_not_count() -> None:
    machine = Machine(4)
    assert machine.paused(others=4.0) == 4
    assert machine.after(others=0.0, own=4.0) == 4
    assert machine.after(others=2.0, own=2.0) == 2
    assert machine.paused(others=0.0, seconds=2 * PAUSE_S) == 2
    assert machine.after(others=0.0, own=2.0) == 4


def test_all_threads_where_the_system_tells_nothing() -> None:
    assert Machine(4, known=False).after(others=3.0) == 4


def test_seconds_of_all_cores_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    before = busy_seconds()
    assert before is not None
    sum(range(3_000_000))
    after = busy_seconds()
    assert after is not None and after >= before
    monkeypatch.setattr(free_cores, "_STAT", "/nowhere")
    assert busy_seconds() is None
