"""The router's view of each replica as series of /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.core.routing import FleetStatus, ReplicaStatus
from headrace.gateway.metrics import PREFIX

_LABELS = ["model_name", "replica"]
_BREAKER = {"closed": 0, "half-open": 1, "open": 2}
_GAUGES: tuple[tuple[str, str, Callable[[ReplicaStatus], float]], ...] = (
    ("replica_up", "1 while it is ready for requests.", lambda one: one.member.state == "ready"),
    ("num_requests_running", "Sequences in the engine's batch.", lambda one: one.num_running),
    ("num_requests_waiting", "Sequences that wait for the engine.", lambda one: one.num_waiting),
    ("num_requests_in_flight", "Requests placed there and not ended.", lambda one: one.num_in_flight),
    ("kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1.", lambda one: one.kv_cache_usage),
    ("replica_ttft_seconds", "Recent mean from placement to the first token.", lambda one: one.ttft_s),
    ("replica_predicted_ttft_seconds", "What was predicted of them.", lambda one: one.predicted_ttft_s),
    ("replica_ttft_error_seconds", "Mean absolute difference of the two.", lambda one: one.ttft_error_s),
    ("replica_prefill_tokens_per_second", "Measured prefill rate.", lambda one: one.prefill_rate),
    ("replica_decode_tokens_per_second", "Measured decode rate.", lambda one: one.decode_rate),
    ("replica_breaker", "Circuit breaker: 0 closed, 1 half-open, 2 open.", lambda one: _BREAKER[one.breaker]),
    ("replica_indexed_blocks", "Blocks in the router's prefix index.", lambda one: one.num_indexed_blocks),
)
_COUNTERS: tuple[tuple[str, str, Callable[[ReplicaStatus], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the cache.", lambda one: one.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found there.", lambda one: one.prefix_cache_hits),
    ("num_preemptions", "Sequences preempted for want of blocks.", lambda one: one.num_preemptions),
    ("computed_prompt_tokens", "Prompt tokens computed there.", lambda one: one.computed_prompt_tokens),
    ("replica_placements", "Requests placed there.", lambda one: one.num_placed),
    ("replica_faults", "Requests that it failed.", lambda one: one.num_faults),
    ("replica_rescued", "Requests that moved away in mid-stream.", lambda one: one.num_rescued),
    ("replica_restarts", "Restarts of its process.", lambda one: one.member.endpoint.num_restarts),
    (
        "replica_index_resets",
        "Times that its index began anew.",
        lambda one: one.num_index_resets,
    ),
)


def fleet_families(status: FleetStatus, names: Mapping[str, str]) -> Iterable[Metric]:
    """Families of a fleet; ``names`` gives the reported name of a model."""
    queued = GaugeMetricFamily(PREFIX + "router_queue", "Requests that wait in the router for a place.")
    queued.add_metric([], status.num_queued)
    yield queued
    labels = []
    for one in status.replicas:
        model = one.member.endpoint.model
        labels.append([names.get(model, model), one.member.endpoint.replica_id])
    for name, text, read in _GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
        for label, one in zip(labels, status.replicas, strict=True):
            gauge.add_metric(label, float(read(one)))
        yield gauge
    for name, text, read in _COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
        for label, one in zip(labels, status.replicas, strict=True):
            counter.add_metric(label, float(read(one)))
        yield counter
