"""What the router learns of its replicas' speed from the requests that they served."""

from __future__ import annotations

import pytest

from headrace.core.messages import Timing
from tests.router.routing import add, make, place, release, route


def test_predictions_are_compared_with_what_came() -> None:
    router = make(1)
    now = 0.0
    for i in range(30):
        name = f"q{i}"
        place(router, name, tokens=2000, now=now)
        router.began(name, 0.51, 0, now + 0.51)
        router.release(name, "finished", 100, 2.0, now + 2.51)
        now += 3.0
    status = router.status().replicas[0]
    assert status.ttft_s == pytest.approx(0.51)
    assert status.ttft_error_s < 0.05
    assert status.prefill_rate == pytest.approx(4000, rel=0.1)
    assert status.decode_rate == pytest.approx(99 / 2, rel=0.05)
    assert status.num_placed == 30


def test_a_continuation_teaches_what_was_computed_of_it() -> None:
    """1,000 tokens of prompt and 1,500 of output are found in the cache; told as cached are those of the
    prompt alone."""
    router = make(1)
    for i in range(30):
        now = 3.0 * i
        place(router, f"q{i}", tokens=3000, now=now, attempt=1)
        router.began(f"q{i}", 0.26, 1000, now + 0.26, Timing(0.0, 0.25, 500))
        release(router, f"q{i}", now=now + 1.0)
    assert router.status().replicas[0].prefill_rate == pytest.approx(2000, rel=0.05)


def test_nothing_is_told_before_it_was_measured() -> None:
    router = make(1)
    (status,) = router.status().replicas
    told = (status.prefill_rate, status.decode_rate, status.ttft_s, status.predicted_ttft_s)
    assert told == (None, None, None, None)
    place(router, "q")
    router.began("q", 0.5, 0, 0.5)
    router.release("q", "finished", 1, 0.0, 0.5)
    assert router.status().replicas[0].decode_rate is None, "one token tells no rate"
    assert router.status().replicas[0].ttft_s == 0.5


def test_time_spent_waiting_for_a_seat_is_not_taken_for_slowness() -> None:
    router = make(1)
    now = 0.0
    for i in range(30):
        place(router, f"w{i}", tokens=2000, now=now)
        router.began(f"w{i}", 0.51, 0, now + 0.51)
        router.release(f"w{i}", "finished", 10, 1.0, now + 2.0)
        now += 3.0
    before = router.status().replicas[0].prefill_rate
    for i in range(8):
        place(router, f"q{i}", now=now)
        router.began(f"q{i}", 0.1, 0, now)
    place(router, "ninth", tokens=2000, now=now)
    router.began("ninth", 40.0, 0, now + 40.0)
    assert router.status().replicas[0].prefill_rate == before


def test_what_has_been_computed_meanwhile_shortens_the_queue() -> None:
    router = make(1)
    place(router, "long", tokens=20_000, now=0.0)
    early = router.place(route("a", tokens=100), 1.0, 0.0)
    late = router.place(route("b", tokens=100), 6.0, 0.0)
    assert early is not None and late is not None
    assert early.ttft_s - late.ttft_s == pytest.approx(5.0, abs=0.2)


def test_mates_learn_from_each_other_and_strangers_do_not() -> None:
    router = make()
    add(router, "r0", hardware="gpu")
    for i in range(20):
        place(router, f"q{i}", tokens=10_000, now=10.0 * i)
        router.began(f"q{i}", 1.01, 0, 10.0 * i + 1.01)
        release(router, f"q{i}", now=10.0 * i + 2.0)
    add(router, "mate", hardware="gpu")
    add(router, "stranger", hardware="cpu")
    rates = {s.member.endpoint.replica_id: s.prefill_rate for s in router.status().replicas}
    assert rates["mate"] == pytest.approx(10_000, rel=0.1)
    assert rates["stranger"] is None, "nothing was measured"
