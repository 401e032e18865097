"""A replay through dispatcher, router and wire: every request ends, figures add up, seeds repeat."""

from __future__ import annotations

import random

import pytest

from headrace.bench.metrics import RequestTrace
from headrace.bench.simulator.callers import engine_request
from headrace.bench.simulator.capacity import work_off_seconds
from headrace.bench.simulator.fleet import replay
from headrace.bench.simulator.replica import PacedModel
from headrace.bench.simulator.step_time import StepTime
from headrace.bench.traces import Arrival, TraceRequest, arrivals

POLICIES = (
    "predicted_ttft",
    "round_robin",
    "random",
    "least_load",
    "power_of_two",
    "prefix_only",
)
MODEL = PacedModel(
    name="paced", step_time=StepTime(base=0.01, per_prefill=1e-4, noise=0.05), num_blocks=160, max_num_seqs=8
)


def conversations(num_users: int = 12, num_turns: int = 5) -> list[Arrival]:
    """Turns of several users, each turn a block longer than the one before."""
    requests = [
        TraceRequest(
            1000.0 * turn + user, 512 * (turn + 1) + 100, 5, [100 * user + t for t in range(turn + 2)]
        )
        for turn in range(num_turns)
        for user in range(num_users)
    ]
    return arrivals(requests, 10.0, random.Random(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_in_full(policy: str) -> None:
    arriving = conversations()
    result = replay(arriving, MODEL, 3, policy, seed=1)
    assert len(result.requests) == len(arriving)
    assert all(trace.output_tokens == 5 and trace.ttft > 0 for trace in result.requests)
    assert sum(stats.generation_tokens for stats in result.stats) == 5 * len(arriving)
    cached = sum(trace.cached_tokens for trace in result.requests)
    asked = sum(trace.prompt_tokens for trace in result.requests)
    assert result.hit_rate == pytest.approx(cached / asked)
    assert 0.0 < result.busy_share < 1.0


def test_time_to_first_token_is_that_of_the_formula_when_nothing_else_runs() -> None:
    model = PacedModel(name="paced", step_time=StepTime(base=1.0, per_prefill=1e-3), num_blocks=160)
    lonely = [Arrival(0.0, TraceRequest(0, 1000, 3, [1, 2]))]
    (trace,) = replay(lonely, model, 2, "round_robin", seed=1).requests
    assert trace.ttft == pytest.approx(2.0)
    assert trace.e2el == pytest.approx(4.0)


def test_conversations_find_their_prefix_with_the_default_policy() -> None:
    arriving = conversations()
    share = {policy: replay(arriving, MODEL, 3, policy, seed=1).hit_rate for policy in POLICIES}
    assert share["predicted_ttft"] > 0.6
    assert share["predicted_ttft"] > share["random"] + 0.1


def test_the_same_seed_gives_the_same_run() -> None:
    first, again = (replay(conversations(), MODEL, 3, "random", seed=4) for _ in range(2))
    other = replay(conversations(), MODEL, 3, "random", seed=5)
    assert first == again
    assert first.requests != other.requests


def test_the_capacity_of_a_fleet_grows_with_it() -> None:
    requests = [engine_request(str(i), a.request, MODEL) for i, a in enumerate(conversations())]
    one, three = (work_off_seconds(requests, MODEL, count) for count in (1, 3))
    assert 0.0 < three < one / 2


def test_the_gateway_in_front_changes_no_figure() -> None:
    arriving = conversations()
    direct = replay(arriving, MODEL, 3, "predicted_ttft", seed=1)
    over_http = replay(arriving, MODEL, 3, "predicted_ttft", seed=1, over_http=True)

    def figures(traces: list[RequestTrace]) -> list[tuple[float, ...]]:
        return sorted(
            (t.sent, t.ttft, t.e2el, t.prompt_tokens, t.cached_tokens, t.output_tokens) for t in traces
        )

    assert over_http.stats == direct.stats
    assert figures(over_http.requests) == figures(direct.requests)
