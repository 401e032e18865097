from __future__ import annotations

from headrace.router.budget import MAX_SAVED, RetryBudget


def spend(budget: RetryBudget, now: float) -> int:
    count = 0
    while budget.take(now):
        count += 1
    return count


def test_few_retries_without_traffic_and_time_earns_them_again() -> None:
    budget = RetryBudget(0.2)
    assert spend(budget, 0.0) == 3
    assert spend(budget, 0.0) == 0
    assert spend(budget, 10.0) == 1
    assert spend(budget, 1e6) == 3, "time saves up no more than the minimum"


def test_a_share_of_the_requests() -> None:
    budget = RetryBudget(0.25)
    spend(budget, 0.0)
    for _ in range(40):
        budget.on_request()
    assert spend(budget, 0.0) == 10


def test_savings_are_bounded() -> None:
    budget = RetryBudget(1.0)
    for _ in range(10_000):
        budget.on_request()
    assert spend(budget, 0.0) == MAX_SAVED


def test_none_at_all() -> None:
    budget = RetryBudget(0.0)
    for _ in range(100):
        budget.on_request()
    assert not budget.take(0.0)
    assert not budget.take(1e6)
