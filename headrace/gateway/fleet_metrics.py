"""The router's view of each replica as series of /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.core.messages import Moves
from headrace.core.routing import FleetStatus, ReplicaStatus
from headrace.gateway.metrics import PREFIX

_LABELS = ["model_name", "replica"]
_BREAKER = {"closed": 0, "half-open": 1, "open": 2}
_GAUGES: tuple[tuple[str, str, Callable[[ReplicaStatus], float | None]], ...] = (
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
    ("replica_splits", "Requests whose prompt another replica computed.", lambda one: one.num_split),
    ("replica_unsplit", "Requests not split, though they could be.", lambda one: one.num_unsplit),
    ("replica_rescued", "Requests that moved away in mid-stream.", lambda one: one.num_rescued),
    ("replica_restarts", "Restarts of its process.", lambda one: one.member.endpoint.num_restarts),
    (
        "replica_index_resets",
        "Times that its index began anew.",
        lambda one: one.num_index_resets,
    ),
)

_MOVES_GAUGES: tuple[tuple[str, str, Callable[[Moves], float]], ...] = (
    ("num_requests_filling", "Sequences that wait for blocks from elsewhere.", lambda one: one.num_filling),
    ("kv_disk_blocks", "Blocks on disk that it can use.", lambda one: one.disk_blocks),
    ("kv_disk_bytes", "Bytes of those blocks.", lambda one: one.disk_bytes),
)
_MOVES_COUNTERS: tuple[tuple[str, str, Callable[[Moves], float]], ...] = (
    ("kv_fetched_blocks", "Blocks from prefill replicas.", lambda one: one.fetched_blocks),
    ("kv_fetched_bytes", "Their bytes.", lambda one: one.fetched_bytes),
    ("kv_fetch_seconds", "Time with a transfer open.", lambda one: one.fetch_s),
    ("kv_fetch_overlap_seconds", "Of it, while the sender still computed.", lambda one: one.fetch_overlap_s),
    ("kv_fetches_failed", "Transfers that ended early.", lambda one: one.failed_fetches),
    ("kv_sent_blocks", "Blocks to decode replicas.", lambda one: one.sent_blocks),
    ("kv_sent_bytes", "Their bytes.", lambda one: one.sent_bytes),
    ("kv_disk_hit_blocks", "Blocks from disk.", lambda one: one.disk_hit_blocks),
    ("kv_disk_read_bytes", "Bytes read from disk.", lambda one: one.disk_read_bytes),
    ("kv_disk_read_seconds", "Time of reading them.", lambda one: one.disk_read_s),
    ("kv_disk_written_bytes", "Bytes written to disk.", lambda one: one.disk_written_bytes),
    (
        "kv_disk_refused_blocks",
        "Blocks that the disk tier did not take.",
        lambda one: one.disk_refused_blocks,
    ),
    ("kv_damaged_blocks", "Blocks dropped as a check failed.", lambda one: one.damaged_blocks),
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
            value = read(one)
            if value is not None:  # not measured yet
                gauge.add_metric(label, float(value))
        yield gauge
    packs = GaugeMetricFamily(
        PREFIX + "replica_pack_info", "1 beside the pack that it runs.", labels=[*_LABELS, "pack"]
    )
    for label, one in zip(labels, status.replicas, strict=True):
        packs.add_metric([*label, one.pack], 1.0)
    yield packs
    for name, text, count in _COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
        for label, one in zip(labels, status.replicas, strict=True):
            counter.add_metric(label, float(count(one)))
        yield counter
    moves = [
        (label, one.moves)
        for label, one in zip(labels, status.replicas, strict=True)
        if one.moves is not None
    ]
    if moves:
        yield from _moves_families(moves)


def _moves_families(moves: list[tuple[list[str], Moves]]) -> Iterable[Metric]:
    """What moved, of those where something did or a tier is open."""
    for name, text, read in _MOVES_GAUGES:
        gauge = GaugeMetricFamily(PREFIX + name, text, labels=_LABELS)
        for label, one in moves:
            gauge.add_metric(label, float(read(one)))
        yield gauge
    for name, text, read in _MOVES_COUNTERS:
        counter = CounterMetricFamily(PREFIX + name, text, labels=_LABELS)
        for label, one in moves:
            counter.add_metric(label, float(read(one)))
        yield counter
