"""Latency of served requests, under the names and in the order that vLLM's users parse.

sent            first text     …    last text
│◄──── TTFT ────►│◄─ ITL ─►│ … │◄─ ITL ─►│
│◄───────────────── E2EL ────────────────►│      TPOT = (E2EL - TTFT) / (output tokens - 1)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

DEFINITIONS = (
    "TTFT: from sending the request to its first non-empty text.",
    "TPOT: (E2EL - TTFT) / (output tokens - 1), one value per request.",
    "ITL: every single gap between consecutive pieces of text, over all requests.",
    "E2EL: from sending the request to its last piece of text.",
)


class RequestTrace(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller saw of one request. Times are seconds of one monotonic clock.

    ``text_times`` holds the arrival of each non-empty piece of text; ``error`` is set when the request
    did not end as it should have.
    """

    sent: float
    text_times: list[float] = []
    finished: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    server_timing: str | None = None
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.text_times[0] - self.sent if self.text_times else math.nan

    @property
    def e2el(self) -> float:
        return self.text_times[-1] - self.sent if self.text_times else math.nan

    @property
    def tpot(self) -> float:
        """NaN for an output of one token: it has no time per further token."""
        return (self.e2el - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else math.nan

    @property
    def itls(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.text_times, self.text_times[1:], strict=False)]


class Summary(msgspec.Struct, frozen=True):
    """One metric over many requests or gaps, in the metric's own unit."""

    mean: float
    median: float
    p99: float
    maximum: float
    count: int


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100), linear between order statistics; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100.0
    low = math.floor(place)
    high = math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def time_percentile(gaps: Sequence[float], q: float) -> float:
    """The gap that ``q`` percent of the time lies in gaps of at most; NaN of nothing.

    A stream that stands still has few gaps, so a share of all gaps is blind to what it suffers. Here each gap
    counts as long as it lasts, as it does for who waits ("coordinated omission", Gil Tene).
    """
    beyond = sum(gaps) * (1.0 - q / 100.0)
    for gap in sorted(gaps, reverse=True):
        beyond -= gap
        if beyond < 0:
            return gap
    return min(gaps, default=math.nan)


def median(values: Sequence[float]) -> float:
    return percentile(values, 50.0)


def interquartile_range(values: Sequence[float]) -> float:
    """Distance from the 25th to the 75th percentile: the spread that goes with a median."""
    return percentile(values, 75.0) - percentile(values, 25.0)


# Student's t at 97.5 % for 1, 2, … degrees of freedom; beyond the table, the normal's.
_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % confidence interval of the mean by Student's t; infinitely wide for less than two values."""
    count = len(values)
    if count < 2:
        return -math.inf, math.inf
    mean = sum(values) / count
    variance = sum((value - mean) ** 2 for value in values) / (count - 1)
    factor = _T_975[count - 2] if count - 2 < len(_T_975) else 1.96
    half = factor * math.sqrt(variance / count)
    return mean - half, mean + half


def summarise(values: Iterable[float]) -> Summary:
    """NaN entries (metrics that a request does not have) are left out."""
    known = [value for value in values if not math.isnan(value)]
    mean = sum(known) / len(known) if known else math.nan
    return Summary(mean, median(known), percentile(known, 99.0), max(known, default=math.nan), len(known))


def output_throughput(traces: Sequence[RequestTrace]) -> float:
    """Output tokens per second from the first request's sending to the last one's end."""
    good = [trace for trace in traces if trace.error is None]
    if not good:
        return math.nan
    span = max(trace.finished for trace in good) - min(trace.sent for trace in good)
    return sum(trace.output_tokens for trace in good) / span if span > 0 else math.nan
