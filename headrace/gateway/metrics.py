"""What the gateway counts, in Prometheus' format under vLLM's stems.

Counting on the token path is plain arithmetic on our own objects; prometheus-client formats them when
they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from headrace.core.messages import Stats

PREFIX = "headrace_"
MAX_FIELD_NAMES = 64
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_TTFT_S = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    10.0,
    20.0,
    40.0,
    80.0,
    160.0,
)
_E2E_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)
_TEXT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))


class Histogram:
    """Counts per bucket and the sum; cheaper than prometheus-client's, which locks."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition format wants them."""
        result = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            result.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
        return result


class Metrics(Collector):
    """One gateway's counters; ``stats`` gives the replica's state whenever the page is asked for."""

    def __init__(self, model_name: str, stats: Callable[[], Stats], inside: Callable[[], int]) -> None:
        self._model_name = model_name
        self._stats = stats
        self._inside = inside
        self.time_to_first_token = Histogram(_TTFT_S)
        self.inter_token_latency = Histogram(_GAP_S)
        self.time_per_output_token = Histogram(_GAP_S)
        self.e2e_request_latency = Histogram(_E2E_S)
        self.text = Histogram(_TEXT_S)
        self.request_prompt_tokens = Histogram(_TOKENS)
        self.request_generation_tokens = Histogram(_TOKENS)
        self.prompt_tokens = 0
        self.cached_prompt_tokens = 0
        self.generation_tokens = 0
        self.finished: Counter[str] = Counter()
        self.http_errors: Counter[tuple[str, str]] = Counter()
        self.ignored_fields: Counter[str] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def page(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self._registry)

    def ignore(self, names: Iterable[str]) -> None:
        """Counts ignored fields; beyond MAX_FIELD_NAMES different names they count as ``other``."""
        for name in names:
            known = name in self.ignored_fields or len(self.ignored_fields) < MAX_FIELD_NAMES
            self.ignored_fields[name if known else "other"] += 1

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        model = [self._model_name]
        stats = self._stats()
        for name, text, value in (
            ("num_requests_running", "Sequences in the engine's batch.", stats.num_running),
            ("num_requests_waiting", "Sequences that wait for the engine.", stats.num_waiting),
            ("kv_cache_usage_perc", "Share of KV-cache blocks in use, 0 to 1.", stats.kv_cache_usage),
            ("num_requests_admitted", "Requests inside the gateway.", self._inside()),
        ):
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric(model, value)
            yield gauge
        for name, text, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_cache_queries,
            ),
            ("prefix_cache_hits", "Prompt tokens found there.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences preempted for want of blocks.", stats.num_preemptions),
            ("prompt_tokens", "Prompt tokens of requests that began to answer.", self.prompt_tokens),
            ("prompt_tokens_cached", "Those found in the prefix cache.", self.cached_prompt_tokens),
            ("generation_tokens", "Generated tokens, as billed.", self.generation_tokens),
        ):
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric(model, value)
            yield counter
        yield from self._labelled_counters(model)
        for name, text, histogram in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self.time_to_first_token),
            ("inter_token_latency_seconds", "Gaps between a sample's tokens.", self.inter_token_latency),
            (
                "request_time_per_output_token_seconds",
                "(E2EL - TTFT) / (tokens - 1).",
                self.time_per_output_token,
            ),
            ("e2e_request_latency_seconds", "From arrival to the end.", self.e2e_request_latency),
            ("gateway_text_seconds", "Parse, template, tokenize and identities of one request.", self.text),
            ("request_prompt_tokens", "Prompt tokens a request.", self.request_prompt_tokens),
            ("request_generation_tokens", "Generated tokens a sample.", self.request_generation_tokens),
        ):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
            family.add_metric(model, histogram.buckets(), histogram.total)
            yield family

    def _labelled_counters(self, model: list[str]) -> Iterable[Metric]:
        success = CounterMetricFamily(
            PREFIX + "request_success",
            "Finished samples by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric([*model, reason], self.finished[reason])
        yield success
        errors = CounterMetricFamily(
            PREFIX + "http_errors", "Error answers by status and type.", labels=["status", "type"]
        )
        for (status, kind), count in self.http_errors.items():
            errors.add_metric([status, kind], count)
        yield errors
        ignored = CounterMetricFamily(
            PREFIX + "ignored_fields", "Fields of bodies that nobody defines.", labels=["field"]
        )
        for field, count in self.ignored_fields.items():
            ignored.add_metric([field], count)
        yield ignored
