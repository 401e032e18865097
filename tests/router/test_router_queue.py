"""Room on the replicas, and who waits for it."""

from __future__ import annotations

import pytest

from headrace.core.errors import OverloadedError
from headrace.core.messages import Stats
from headrace.core.routing import Placement
from tests.router.routing import VLLM, add, fill, make, place, poll, release, stats, stored


def test_a_quarter_more_than_run_at_once_then_the_queue() -> None:
    router = make(1)
    names = fill(router, "q", 10)
    assert place(router, "late") is None
    assert poll(router) == {}
    release(router, names[0])
    assert poll(router) == {"late": "r0"}
    assert router.status().num_queued == 0


def test_an_explicit_limit_is_exact() -> None:
    router = make()
    add(router, "r0", max_in_flight=3)
    fill(router, "q", 3)
    assert place(router, "late") is None


def test_samples_count() -> None:
    router = make(1)
    assert place(router, "wide", num_samples=8) == "r0"
    assert place(router, "three", num_samples=3) is None
    release(router, "wide")
    assert poll(router) == {"three": "r0"}
    release(router, "three")
    assert place(router, "giant", num_samples=128) == "r0", "an idle replica takes any"


def test_first_come_first_served_and_tiers() -> None:
    router = make(1)
    names = fill(router, "q", 10)
    for name, tier in (
        ("b", "batch"),
        ("s", "standard"),
        ("f", "flex"),
        ("p", "priority"),
        ("s2", "standard"),
    ):
        assert place(router, name, tier=tier) is None
    order = []
    for name in names[:5]:
        release(router, name)
        order += poll(router)
    assert order == ["p", "s", "s2", "f", "b"]


def test_nobody_overtakes_who_waits() -> None:
    router = make(1)
    names = fill(router, "q", 10)
    assert place(router, "first") is None
    release(router, names[0])
    assert place(router, "second") is None, "there is room, and somebody before it"
    assert place(router, "urgent", tier="priority") == "r0"
    assert poll(router) == {}


def test_one_full_model_does_not_hold_up_another() -> None:
    router = make(1)
    add(router, "x0", model="other")
    fill(router, "q", 10)
    assert place(router, "late") is None
    assert place(router, "y", model="other") == "x0"


def test_full_queue_is_refused_and_a_rescue_is_not() -> None:
    router = make(1, max_queue=2)
    fill(router, "q", 10)
    assert place(router, "w0") is None
    assert place(router, "w1") is None
    with pytest.raises(OverloadedError, match="2 requests wait already") as caught:
        place(router, "w2")
    assert 1 <= caught.value.retry_after <= 60
    assert place(router, "rescued", attempt=1, exclude=["r9"]) is None
    release(router, "q0")
    assert poll(router) == {"rescued": "r0"}, "and goes first"


def test_waiting_ends_after_the_timeout_or_at_the_deadline() -> None:
    router = make(1, queue_timeout_s=5.0)
    fill(router, "q", 10)
    assert place(router, "long", now=1.0) is None
    assert place(router, "soon", now=2.0, deadline=1003.0) is None
    assert poll(router, 2.5) == {}
    answers = poll(router, 3.5)
    assert list(answers) == ["soon"] and isinstance(answers["soon"], OverloadedError)
    answers = poll(router, 6.5)
    assert list(answers) == ["long"] and isinstance(answers["long"], OverloadedError)


def test_who_gave_up_waiting_is_not_placed() -> None:
    router = make(1)
    names = fill(router, "q", 10)
    assert place(router, "gone") is None
    release(router, "gone", "aborted")
    release(router, names[0])
    assert poll(router) == {}


def test_queue_time_is_told() -> None:
    router = make(1)
    fill(router, "q", 10)
    assert place(router, "late", now=1.0) is None
    release(router, "q0", now=3.5)
    ((_, placement),) = router.poll(3.5, 0.0)
    assert isinstance(placement, Placement) and placement.queue_s == 2.5
    assert router.why("late")[0].queue_s == 2.5


def test_cache_room_is_seen() -> None:
    """A prompt that would wait for memory goes where there is some."""
    router = make(2)
    router.on_events("r0", 0, [stored(*range(1, 11))], 0.0)
    router.on_stats("r0", stats(blocks=1000, free=2, running=4), 0.0)
    numbers = [*range(1, 11), *range(100, 400)]
    assert place(router, "q", *numbers) == "r1"


def test_what_others_run_on_a_shared_server_is_seen() -> None:
    router = make(2, capabilities=VLLM)
    router.on_stats("r0", Stats(num_running=8, num_waiting=20), 0.0)
    assert place(router, "once") in ("r0", "r1"), "told once it may be of what has just ended"
    release(router, "once")
    router.on_stats("r0", Stats(num_running=8, num_waiting=20), 0.0)
    assert [place(router, f"q{i}", tokens=200) for i in range(4)] == ["r1"] * 4
    router.on_stats("r0", Stats(), 1.0)
    assert place(router, "again", tokens=200) == "r0"
