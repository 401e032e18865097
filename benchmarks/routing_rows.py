"""From replays to rows: each policy's figures in each cell, and the default's paired differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from headrace.bench.metrics import interquartile_range, mean_interval
from headrace.bench.report import Row, Target, figure, make_row
from headrace.bench.simulator.grid import Figures

HIT_TARGET = Target("value", ">=", 0.95)
DIFFERENCE_TARGET = Target("value", "<", 0.0)
COMPARED = ("ttft_mean", "ttft_p99")
UNITS = {
    "hit_share": "",
    "ttft_mean": "s",
    "ttft_p50": "s",
    "ttft_p99": "s",
    "output_rate": "tok/s",
    "busy_share": "",
}

# (trace, tokens of cache per replica) → policy → one Figures a repeat, in the same order for every policy
Runs = Mapping[tuple[str, int], Mapping[str, Sequence[Figures]]]


def rows_of(runs: Runs, default: str) -> list[Row]:
    """Cell by cell: figures of the default and then of the others, then what sets them apart."""
    rows: list[Row] = []
    for (trace, cache_tokens), policies in runs.items():
        name = f"{trace}.{cache_tokens}"
        for policy, repeats in policies.items():
            rows += _figures(f"{name}.{policy}", repeats, HIT_TARGET if policy == default else None)
        for policy, repeats in policies.items():
            if policy != default:
                rows += _differences(name, default, policies[default], policy, repeats)
    return rows


def _figures(name: str, repeats: Sequence[Figures], hit_target: Target | None) -> list[Row]:
    """Means over the repeats. The hit rate's target is the ideal's share."""
    rows = []
    for field, unit in UNITS.items():
        values = [float(getattr(repeat, field)) for repeat in repeats]
        rows.append(
            make_row(
                f"{name}.{field}",
                sum(values) / len(values),
                unit,
                spread=interquartile_range(values),
                target=hit_target if field == "hit_share" else None,
            )
        )
    return rows


def _differences(
    name: str, default: str, ours: Sequence[Figures], policy: str, theirs: Sequence[Figures]
) -> list[Row]:
    """Upper ends of the paired intervals of default minus other: below 0, the default is faster."""
    rows = []
    for field in COMPARED:
        pairs = list(zip(ours, theirs, strict=True))
        values = [getattr(one, field) - getattr(other, field) for one, other in pairs]
        low, high = mean_interval(values)
        mean = sum(values) / len(values)
        rows.append(
            make_row(
                f"{name}.{field}.{default}-{policy}.upper95",
                high if math.isfinite(high) else None,
                "s",
                spread=interquartile_range(values),
                target=DIFFERENCE_TARGET,
                note=f"{field} of {default} minus {policy}'s: {mean:+.3g} s, 95 % interval "
                f"[{low:+.3g}, {high:+.3g}] of {len(values)} pairs",
            )
        )
    return rows


def ranking(runs: Runs) -> list[str]:
    """All policies, best first, by the geometric mean of their mean TTFT over all cells and repeats."""
    logs: dict[str, list[float]] = {}
    for policies in runs.values():
        for policy, repeats in policies.items():
            logs.setdefault(policy, []).extend(math.log(repeat.ttft_mean) for repeat in repeats)
    return sorted(logs, key=lambda policy: sum(logs[policy]) / len(logs[policy]))


def table(runs: Runs) -> list[str]:
    """The cells as people compare them: one line a policy."""
    lines = ["", "trace          cache  policy          hits/ideal  TTFT mean    p50     p99   tok/s   busy"]
    for (trace, cache_tokens), policies in runs.items():
        for policy, repeats in policies.items():
            means = {
                field: sum(getattr(repeat, field) for repeat in repeats) / len(repeats) for field in UNITS
            }
            lines.append(
                f"{trace:12}  {cache_tokens:6}  {policy:14}  {100 * means['hit_share']:8.1f} %"
                f"  {figure(means['ttft_mean']):>9}  {figure(means['ttft_p50']):>5}"
                f"  {figure(means['ttft_p99']):>6}  {figure(means['output_rate']):>6}"
                f"  {100 * means['busy_share']:4.0f} %"
            )
    return lines
