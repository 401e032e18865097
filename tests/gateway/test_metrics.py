"""Counters: added up over gateways, and the fleet's state beside them."""

from __future__ import annotations

from headrace.core.errors import UnavailableError
from headrace.gateway.metrics import Counters, Histogram, ModelCounters, page, sums
from tests.gateway.tiny import call, chat


def counters(gateway_id: str, tokens: int) -> Counters:
    mine = Counters(gateway_id=gateway_id, models={"m": ModelCounters()}, num_admitted=tokens)
    mine.models["m"].generation_tokens = tokens
    mine.models["m"].finished["stop"] += tokens
    mine.models["m"].time_to_first_token.observe(0.03 * tokens)
    mine.count_error(429, "rate_limit_error")
    mine.ignore(["mood"])
    return mine


def test_the_page_shows_the_sums_of_all_gateways():
    own, other = counters("a", 1), counters("b", 3)
    other.models["n"] = ModelCounters()
    other.count_error(500, "server_error")
    text = page(sums(own, [other.encode(), counters("a", 100).encode()])).decode()
    for line in (
        'headrace_generation_tokens_total{model_name="m"} 4.0',
        'headrace_generation_tokens_total{model_name="n"} 0.0',
        'headrace_request_success_total{finished_reason="stop",model_name="m"} 4.0',
        'headrace_time_to_first_token_seconds_count{model_name="m"} 2.0',
        'headrace_time_to_first_token_seconds_bucket{le="0.04",model_name="m"} 1.0',
        'headrace_http_errors_total{status="429",type="rate_limit_error"} 2.0',
        'headrace_http_errors_total{status="500",type="server_error"} 1.0',
        'headrace_ignored_fields_total{field="mood"} 2.0',
        "headrace_num_requests_admitted 4.0",
    ):
        assert line in text.splitlines(), line
    assert own.models["m"].generation_tokens == 1, "adding up changes nothing"


def test_a_report_of_another_version_is_left_out():
    own = counters("a", 1)
    odd = counters("b", 1)
    odd.models["m"].time_to_first_token = Histogram((1.0,), [5, 5])
    total = sums(own, [b"\x00garbage", odd.encode()])
    assert sum(total.models["m"].time_to_first_token.counts) == 1
    assert total.models["m"].generation_tokens == 2


def test_ignored_fields_are_bounded():
    own = Counters(gateway_id="a")
    own.ignore(f"field-{index}" for index in range(1000))
    assert len(own.ignored_fields) == 65
    assert own.ignored_fields["other"] == 936


def test_each_replica_has_its_series(stack):
    chat(stack)
    text = call(stack, "/metrics").body.decode()
    label = '{model_name="tiny",replica="fake-0"}'
    for name in (
        "replica_up", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total", "replica_ttft_seconds", "replica_predicted_ttft_seconds",
        "replica_faults_total",
        "replica_rescued_total", "replica_breaker", "replica_placements_total",
    ):  # fmt: skip
        assert f"headrace_{name}{label}" in text, name
    assert f"headrace_num_preemptions_total{label} 5.0" in text
    assert f"headrace_kv_cache_usage_perc{label} 0.25" in text
    assert "headrace_router_queue 0.0" in text


def test_the_page_comes_without_the_router_too(stack, monkeypatch):
    async def gone():
        raise UnavailableError("the router is being restarted")

    monkeypatch.setattr(stack.placer, "status", gone)
    answer = call(stack, "/metrics")
    assert answer.status == 200
    assert b"headrace_generation_tokens_total" in answer.body
    assert b"headrace_replica_up" not in answer.body
