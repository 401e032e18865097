"""What gateways count, in Prometheus' format under vLLM's stems.

Counting on the token path is plain arithmetic on our own records. Several gateways exchange theirs as
bytes, so that each can show the sums; prometheus-client formats them when they are asked for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

PREFIX = "headrace_"
MAX_FIELD_NAMES = 64
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_TTFT_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0,
           160.0)  # fmt: skip
_E2E_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 60.0, 120.0, 240.0)
_TEXT_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_REASONS = ("stop", "length", "abort", "error")


class Histogram(msgspec.Struct):
    """Counts per bucket and the sum; cheaper than prometheus-client's, which locks."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def add(self, other: Histogram) -> None:
        """Adds what another gateway saw; one with other bounds (another version) is left out."""
        if other.bounds == self.bounds:
            self.counts = [mine + its for mine, its in zip(self.counts, other.counts, strict=True)]
            self.total += other.total

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative counts by upper bound, as the exposition format wants them."""
        result = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            result.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
        return result


def _histogram(bounds: Sequence[float]) -> Any:
    return msgspec.field(default_factory=lambda: Histogram(tuple(bounds), [0] * (len(bounds) + 1)))


class ModelCounters(msgspec.Struct, kw_only=True):
    """What one gateway counts about one model."""

    time_to_first_token: Histogram = _histogram(_TTFT_S)
    inter_token_latency: Histogram = _histogram(_GAP_S)
    time_per_output_token: Histogram = _histogram(_GAP_S)
    e2e_request_latency: Histogram = _histogram(_E2E_S)
    text: Histogram = _histogram(_TEXT_S)
    request_prompt_tokens: Histogram = _histogram(_TOKENS)
    request_generation_tokens: Histogram = _histogram(_TOKENS)
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    num_rescues: int = 0
    finished: dict[str, int] = msgspec.field(default_factory=lambda: dict.fromkeys(_REASONS, 0))

    def add(self, other: ModelCounters) -> None:
        for name in self.__struct_fields__:
            mine, its = getattr(self, name), getattr(other, name)
            if isinstance(mine, Histogram):
                mine.add(its)
            elif isinstance(mine, dict):
                _add(mine, its)
            else:
                setattr(self, name, mine + its)


class Counters(msgspec.Struct, kw_only=True):
    """All that one gateway counts; ``models`` by the name that is reported."""

    gateway_id: str
    models: dict[str, ModelCounters] = {}
    num_admitted: int = 0
    http_errors: dict[tuple[str, str], int] = msgspec.field(default_factory=Counter)
    ignored_fields: dict[str, int] = msgspec.field(default_factory=Counter)

    def count_error(self, status: int, kind: str) -> None:
        """One error answer."""
        self.http_errors[str(status), kind] += 1

    def ignore(self, names: Iterable[str]) -> None:
        """Counts ignored fields; beyond MAX_FIELD_NAMES different names they count as ``other``."""
        ignored = self.ignored_fields
        for name in names:
            known = name in ignored or len(ignored) < MAX_FIELD_NAMES
            ignored[name if known else "other"] += 1

    def add(self, other: Counters) -> None:
        for name, counters in other.models.items():
            self.models.setdefault(name, ModelCounters()).add(counters)
        self.num_admitted += other.num_admitted
        _add(self.http_errors, other.http_errors)
        _add(self.ignored_fields, other.ignored_fields)

    def encode(self) -> bytes:
        return _encode(self)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Counters).decode


def sums(own: Counters, reports: Iterable[bytes]) -> Counters:
    """One gateway's counters plus what other gateways reported last; its own report is not counted twice."""
    total = _decode(own.encode())
    for report in reports:
        try:
            other = _decode(report)
        except msgspec.DecodeError:
            continue  # a gateway of another version
        if other.gateway_id != own.gateway_id:
            total.add(other)
    return total


def page(counters: Counters, others: Iterable[Metric] = ()) -> bytes:
    """The exposition text of these counters and of other families."""
    return generate_latest(_Families([*_families(counters), *others]))


class _Families(Collector):
    """What ``generate_latest`` wants of a registry."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _families(counters: Counters) -> Iterable[Metric]:
    admitted = GaugeMetricFamily(PREFIX + "num_requests_admitted", "Requests inside the gateways.")
    admitted.add_metric([], counters.num_admitted)
    yield admitted
    models = counters.models.items()
    for name, text in (
        ("prompt_tokens", "Prompt tokens of requests that began to answer."),
        ("cached_prompt_tokens", "Those found in a prefix cache."),
        ("generation_tokens", "Generated tokens, as billed."),
        ("num_rescues", "Times that a request went on at another replica."),
    ):
        shown = {"cached_prompt_tokens": "prompt_tokens_cached", "num_rescues": "request_rescues"}
        counter = CounterMetricFamily(PREFIX + shown.get(name, name), text, labels=["model_name"])
        for model, each in models:
            counter.add_metric([model], getattr(each, name))
        yield counter
    success = CounterMetricFamily(
        PREFIX + "request_success", "Finished samples by reason.", labels=["model_name", "finished_reason"]
    )
    for model, each in models:
        for reason, count in each.finished.items():
            success.add_metric([model, reason], count)
    yield success
    errors = CounterMetricFamily(
        PREFIX + "http_errors", "Error answers by status and type.", labels=["status", "type"]
    )
    for (status, kind), count in counters.http_errors.items():
        errors.add_metric([status, kind], count)
    yield errors
    ignored = CounterMetricFamily(
        PREFIX + "ignored_fields", "Fields of bodies that nobody defines.", labels=["field"]
    )
    for field, count in counters.ignored_fields.items():
        ignored.add_metric([field], count)
    yield ignored
    for name, stem, text in (
        ("time_to_first_token", "time_to_first_token_seconds", "From arrival to the first token."),
        ("inter_token_latency", "inter_token_latency_seconds", "Gaps between a sample's tokens."),
        ("time_per_output_token", "request_time_per_output_token_seconds", "(E2EL - TTFT) / (tokens - 1)."),
        ("e2e_request_latency", "e2e_request_latency_seconds", "From arrival to the end."),
        ("text", "gateway_text_seconds", "Parse, template, tokenize and identities of one request."),
        ("request_prompt_tokens", "request_prompt_tokens", "Prompt tokens a request."),
        ("request_generation_tokens", "request_generation_tokens", "Generated tokens a sample."),
    ):
        family = HistogramMetricFamily(PREFIX + stem, text, labels=["model_name"])
        for model, each in models:
            histogram: Histogram = getattr(each, name)
            family.add_metric([model], histogram.buckets(), histogram.total)
        yield family


def _add(mine: dict[Any, int], its: dict[Any, int]) -> None:
    for key, count in its.items():
        mine[key] = mine.get(key, 0) + count
