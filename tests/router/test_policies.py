"""Each policy alone, on replicas as it sees them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest

from headrace.core.knobs import RouterConfig
from headrace.router.policies import make_policy
from headrace.router.policies.base import RouteView


@dataclass
class View:
    """A replica that computes ``rate`` tokens/s, after the ``num_queued_tokens`` ahead."""

    replica_id: str
    num_in_flight: int = 0
    num_running: int = 0
    max_in_flight: int = 64
    num_queued_tokens: int = 0
    pressure: float = 0.0
    last_turn: int = 0
    price_per_hour: float = 0.0
    rate: float = 1000.0

    def prefill_s(self, num_uncached_tokens: int, num_tokens: int) -> float:
        return num_uncached_tokens / self.rate

    def predict_ttft(
        self, num_uncached_tokens: int, num_tokens: int, num_samples: int, now: float, fill_s: float = 0.0
    ) -> float:
        return 0.01 + (self.num_queued_tokens + num_uncached_tokens) / self.rate


def views(count: int) -> list[View]:
    return [View(f"r{i}") for i in range(count)]


def route(*cached: int, tokens: int = 1000, users: float = 0.0, home: str | None = None) -> RouteView:
    return RouteView(tokens, 1, cached, users, home)


def choose(name: str, view: RouteView, replicas: list[View]) -> int:
    return make_policy(name).choose(view, replicas, 0.0).position


def test_every_configured_policy_exists_under_its_name() -> None:
    names = msgspec.inspect.type_info(RouterConfig).fields[0].type.type.values  # type: ignore[union-attr]
    assert set(names) >= {"predicted_ttft", "round_robin"}
    for name in names:
        policy = make_policy(name)
        assert policy.name == name
        assert policy.choose(route(0), views(1), 0.0).position == 0


def test_round_robin_takes_turns() -> None:
    replicas = views(3)
    policy = make_policy("round_robin")
    order = []
    for turn in range(1, 7):
        index = policy.choose(route(900, 0, 0), replicas, 0.0).position
        replicas[index].last_turn = turn
        order.append(index)
    assert order == [0, 1, 2, 0, 1, 2]


def test_random_reaches_all_and_repeats_with_its_seed() -> None:
    def draw(seed: int) -> list[int]:
        policy = make_policy("random", seed)
        return [policy.choose(route(0, 0, 0), views(3), 0.0).position for _ in range(300)]

    counts = Counter(draw(1))
    assert min(counts[i] for i in range(3)) > 70
    assert draw(1) == draw(1) != draw(2)


def test_least_load_is_relative_to_size() -> None:
    replicas = [
        View("big", num_in_flight=20, max_in_flight=100),
        View("small", num_in_flight=5, max_in_flight=10),
    ]
    assert choose("least_load", route(0, 900), replicas) == 0


def test_power_of_two_never_takes_the_worst_of_three() -> None:
    replicas = [View("a", num_in_flight=9), View("b", num_in_flight=1), View("c", num_in_flight=3)]
    policy = make_policy("power_of_two")
    counts = Counter(policy.choose(route(0, 0, 0), replicas, 0.0).position for _ in range(200))
    assert set(counts) == {1, 2}
    assert counts[1] > counts[2] > 20


def test_prefix_only_ignores_load() -> None:
    replicas = views(2)
    replicas[0].num_in_flight = replicas[0].num_queued_tokens = 60
    assert choose("prefix_only", route(500, 400), replicas) == 0
    assert choose("prefix_only", route(0, 0), replicas) == 1, "without any prefix it does not"


def test_prefers_the_replica_that_has_the_prefix() -> None:
    assert choose("predicted_ttft", route(0, 900, 0), views(3)) == 1


def test_gives_up_affinity_for_the_hot_replica_alone() -> None:
    replicas = views(3)
    replicas[0].num_queued_tokens = 100_000
    assert choose("predicted_ttft", route(900, 500, 0), replicas) == 1, "the next best prefix still counts"


def test_waits_a_while_for_a_prefix_but_not_for_ever() -> None:
    replicas = views(2)
    replicas[0].num_queued_tokens = 3_000
    assert choose("predicted_ttft", route(900, 0), replicas) == 0
    replicas[0].num_queued_tokens = 30_000
    assert choose("predicted_ttft", route(900, 0), replicas) == 1
    replicas[0].num_queued_tokens = 1_000_000
    assert choose("predicted_ttft", route(99_000, 0, tokens=100_000), replicas) == 1


def test_nothing_cached_goes_to_the_shortest_queue() -> None:
    replicas = views(3)
    replicas[0].num_queued_tokens, replicas[1].num_queued_tokens = 500, 200
    replicas[2].num_queued_tokens = 900
    assert choose("predicted_ttft", route(0, 0, 0), replicas) == 1


def test_idle_equals_take_turns() -> None:
    replicas = views(4)
    policy = make_policy("predicted_ttft")
    order = []
    for turn in range(1, 9):
        index = policy.choose(route(0, 0, 0, 0), replicas, 0.0).position
        replicas[index].last_turn = turn
        order.append(index)
    assert order == [0, 1, 2, 3] * 2


def test_a_prefix_that_everybody_wants_spreads() -> None:
    """The replica that has it was written to more than the others; how many want it decides."""
    replicas = views(2)
    replicas[0].pressure, replicas[1].pressure = 1.0, 0.2
    assert choose("predicted_ttft", route(200, 0), replicas) == 0
    assert choose("predicted_ttft", route(200, 0, users=50.0), replicas) == 1


def test_faster_hardware_gets_the_long_prompt() -> None:
    replicas = [View("slow", rate=500.0), View("fast", rate=5_000.0, num_queued_tokens=5_000)]
    assert choose("predicted_ttft", route(0, 0, tokens=10_000), replicas) == 1
    assert choose("predicted_ttft", route(0, 0, tokens=100), replicas) == 0


def test_spares_running_streams() -> None:
    replicas = views(2)
    replicas[0].num_running = replicas[0].num_in_flight = 30
    assert choose("predicted_ttft", route(0, 0), replicas) == 1


def test_session_stays_where_that_is_no_worse() -> None:
    replicas = views(3)
    replicas[2].last_turn = 9
    assert choose("predicted_ttft", route(0, 0, 0, home="r2"), replicas) == 2
    replicas[2].num_queued_tokens = 5_000
    assert choose("predicted_ttft", route(0, 0, 0, home="r2"), replicas) == 0


def test_price_decides_among_near_equals() -> None:
    replicas = [View("dear", price_per_hour=4.0), View("cheap", price_per_hour=1.0, num_queued_tokens=10)]
    assert choose("predicted_ttft", route(0, 0), replicas) == 1
    assert choose("predicted_ttft", route(0, 0, home="dear"), replicas) == 0, "its session is there"
    replicas[1].num_queued_tokens = 500
    assert choose("predicted_ttft", route(0, 0), replicas) == 0


def test_says_what_it_saw() -> None:
    choice = make_policy("predicted_ttft").choose(route(900, 0), views(2), 0.0)
    assert choice.ttfts == pytest.approx([0.11, 1.01])
    assert choice.scores[0] < choice.scores[1]
    assert choice.reason
