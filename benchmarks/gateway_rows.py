"""From samples of ``scripts/bench gateway`` to rows with their targets."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.bench.report import Row, Target, make_row

OURS = ("headrace text", "headrace token")
BOUNDED = ("vllm-router", "smg", "sglang-router")
"""Peers whose saturated rate is to be beaten."""


@dataclass(frozen=True)
class Sample:
    """One run: microseconds of CPU a request, milliseconds, requests a second."""

    cpu_us: float
    harness_us: float
    requests_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    gap_p99_ms: float
    errors: int

    def short(self) -> str:
        return (
            f"{self.cpu_us:.0f} µs, {self.requests_per_s:.0f} req/s, TTFT {self.ttft_p50_ms:.2f} /"
            f" {self.ttft_p99_ms:.2f} ms, harness {self.harness_us:.0f} µs, errors {self.errors}"
        )


Samples = Mapping[tuple[str, str], list[Sample]]


def rows(samples: Samples, loads: list[str]) -> list[Row]:
    """Every figure of every load; a side that did not run has no rows, ours then show as not measured."""
    result: list[Row] = []
    for load in loads:
        peers = [side for name, side in samples if name == load and side not in (*OURS, "direct")]
        for ours in OURS:
            if load == "saturated":
                result += _saturated(samples, load, ours, peers)
            else:
                result += _paced(samples, load, ours, peers)
        result += _controls(samples, load)
    return result


def _paced(samples: Samples, load: str, ours: str, peers: list[str]) -> list[Row]:
    own = samples.get((load, ours), [])
    result = []
    for peer in dict.fromkeys(["vllm-router", *peers]):
        target = Target("ratio", "<=", 1.0) if peer == "vllm-router" else None
        others = samples.get((load, peer), [])
        result.append(_row(f"{load} cpu/request {ours}", "µs", own, lambda s: s.cpu_us, peer, others, target))
    direct = samples.get((load, "direct"), [])
    for figure, bound, of in (("p50", 0.5, _p50), ("p99", 1.0, _p99)):
        added = _added(own, direct, of)
        for peer in dict.fromkeys(["vllm-router", *peers]):
            beside = _added(samples.get((load, peer), []), direct, of)
            target = Target("value", "<=", bound) if peer == "vllm-router" else None
            result.append(make_row(
                f"{load} TTFT added {figure} {ours}", _median(added), "ms", spread=_spread(added), peer=peer,
                peer_value=_median(beside), peer_spread=_spread(beside), target=target, note=_errors(own),
            ))  # fmt: skip
    return result


def _saturated(samples: Samples, load: str, ours: str, peers: list[str]) -> list[Row]:
    own = samples.get((load, ours), [])
    result = []
    for peer in dict.fromkeys([*BOUNDED, *peers]):
        target = Target("ratio", ">", 1.0) if peer in BOUNDED else None
        others = samples.get((load, peer), [])
        name = f"{load} requests/s {ours}"
        result.append(_row(name, "req/s", own, lambda s: s.requests_per_s, peer, others, target))
    return result


def _controls(samples: Samples, load: str) -> list[Row]:
    return [
        _row(f"{load} harness cpu/request, {side}", "µs", found, lambda s: s.harness_us, None, [], None)
        for (name, side), found in samples.items()
        if name == load
    ]


def _row(
    name: str,
    unit: str,
    own: list[Sample],
    figure: Callable[[Sample], float],
    peer: str | None,
    others: list[Sample],
    target: Target | None,
) -> Row:
    mine, theirs = [figure(s) for s in own], [figure(s) for s in others]
    return make_row(
        name,
        _median(mine),
        unit,
        spread=_spread(mine),
        peer=peer,
        peer_value=_median(theirs),
        peer_spread=_spread(theirs),
        target=target,
        note=_errors(own),
    )


def _added(own: list[Sample], direct: list[Sample], of: Callable[[Sample], float]) -> list[float]:
    """Each round's figure minus the direct load's of the same round."""
    return [of(mine) - of(base) for mine, base in zip(own, direct, strict=False)]


def _p50(sample: Sample) -> float:
    return sample.ttft_p50_ms


def _p99(sample: Sample) -> float:
    return sample.ttft_p99_ms


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def _spread(values: list[float]) -> float | None:
    if len(values) < 2:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def _errors(own: list[Sample]) -> str:
    count = sum(sample.errors for sample in own)
    return f"{count} requests failed" if count else ""
