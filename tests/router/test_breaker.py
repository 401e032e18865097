from __future__ import annotations

from headrace.router.breaker import COOL_DOWN_S, FAULTS, MAX_COOL_DOWN_S, WINDOW_MIN, Breaker


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for i in range(FAULTS):
        assert breaker.allows(now)
        breaker.on_fault(f"f{i}", now)
    assert breaker.state == "open"
    return breaker


def test_opens_after_faults_in_a_row() -> None:
    breaker = opened()
    assert not breaker.allows(0.5 * COOL_DOWN_S)


def test_success_in_between_starts_anew() -> None:
    breaker = Breaker()
    for i in range(3 * FAULTS):
        breaker.on_fault(f"f{i}", 0.0)
        for j in range(2):
            breaker.on_finished(f"s{i}-{j}", 0.0)
    assert breaker.state == "closed", "a third of requests is not yet too much"


def test_opens_at_a_high_share_without_a_row() -> None:
    breaker = Breaker()
    for i in range(WINDOW_MIN):
        breaker.on_fault(f"f{i}", 0.0)
        if breaker.state == "open":
            break
        breaker.on_finished(f"s{i}", 0.0)
    assert breaker.state == "open"


def test_a_share_long_ago_does_not_count() -> None:
    breaker = Breaker()
    for i in range(4):
        breaker.on_fault(f"f{i}", 0.0)
    breaker.on_finished("s", 0.0)
    for i in range(12):
        breaker.on_finished(f"l{i}", 600.0)
    for i in range(4):
        breaker.on_fault(f"g{i}", 600.0)
    assert breaker.state == "closed"


def test_what_the_caller_did_says_nothing() -> None:
    breaker = Breaker()
    for i in range(FAULTS - 1):
        breaker.on_fault(f"f{i}", 0.0)
    for i in range(100):
        breaker.on_neutral(f"n{i}")
    assert breaker.state == "closed"
    breaker.on_fault("last", 0.0)
    assert breaker.state == "open", "nor does it end the row"


def test_one_request_on_trial() -> None:
    breaker = opened()
    assert breaker.allows(COOL_DOWN_S)
    assert breaker.state == "half-open"
    breaker.on_placed("trial")
    assert not breaker.allows(COOL_DOWN_S + 1.0)
    breaker.on_finished("of before", COOL_DOWN_S)
    assert not breaker.allows(COOL_DOWN_S + 1.0), "an old request says nothing of the trial"
    breaker.on_began("trial")
    assert breaker.state == "closed"
    assert breaker.allows(COOL_DOWN_S + 1.0)


def test_a_fault_soon_after_the_trial_opens_again_for_longer() -> None:
    breaker = opened()
    breaker.allows(COOL_DOWN_S)
    breaker.on_placed("trial")
    breaker.on_began("trial")
    breaker.on_fault("trial", COOL_DOWN_S)
    assert breaker.state == "open"
    assert not breaker.allows(2.5 * COOL_DOWN_S)
    assert breaker.allows(3.0 * COOL_DOWN_S)


def cool_down(breaker: Breaker, since: float) -> float:
    """Seconds until it lets one request try, which it does from then on."""
    waits = (2.0**power * COOL_DOWN_S for power in range(-1, 10))
    return next(
        min(wait, MAX_COOL_DOWN_S) for wait in waits if breaker.allows(since + min(wait, MAX_COOL_DOWN_S))
    )


def test_cool_down_doubles_up_to_a_limit_and_shrinks_after_success() -> None:
    breaker = opened()
    now, waits = 0.0, []
    for i in range(10):
        waits.append(cool_down(breaker, now))
        now += waits[-1]
        breaker.on_placed(f"t{i}")
        breaker.on_fault(f"t{i}", now)
    assert waits[:4] == [COOL_DOWN_S, 2 * COOL_DOWN_S, 4 * COOL_DOWN_S, 8 * COOL_DOWN_S]
    assert waits[-1] == MAX_COOL_DOWN_S
    now += cool_down(breaker, now)
    breaker.on_placed("good")
    breaker.on_finished("good", now)
    assert breaker.state == "closed"
    for i in range(FAULTS):
        breaker.on_fault(f"x{i}", now)
    assert cool_down(breaker, now) == COOL_DOWN_S


def test_an_aborted_trial_lets_another_one_try() -> None:
    breaker = opened()
    breaker.allows(COOL_DOWN_S)
    breaker.on_placed("trial")
    breaker.on_neutral("trial")
    assert breaker.allows(COOL_DOWN_S)
    assert breaker.state == "half-open"
