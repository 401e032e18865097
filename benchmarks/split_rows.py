"""What `bench split` measured, turned into rows with the bounds that were set."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from benchmarks.split_break_even import BreakEven
from benchmarks.split_load import Window
from headrace.bench.metrics import interquartile_range, median, percentile, time_percentile
from headrace.bench.report import Row, Target, figure, make_row

ITL_TARGET = Target("ratio", "<=", 0.5)
TTFT_TARGET = Target("ratio", "<=", 1.5)
_BLIND = (
    "a share of all gaps: streams that stand still for seconds have few, so that fewer than one in a hundred "
    "may tell of it; itl_time_p99 counts each gap as long as it lasts"
)
_COST = "cost: TTFT plus the seconds that all running decodes lost until then"


class Targets(msgspec.Struct, frozen=True):
    """What a request must meet to count as good, in seconds."""

    gap_s: float
    ttft_s: float


class SplitRun(msgspec.Struct, kw_only=True):
    """All windows of one run by the side's name; ``split`` is the split's."""

    interval: float
    prompt_tokens: int
    split: str
    screening: dict[str, Window] = {}
    final: dict[str, list[Window]] = {}
    answers: dict[str, Window] = {}
    break_even: BreakEven | None = None


def rows_of(run: SplitRun, targets: Targets) -> list[Row]:
    """The final comparisons first, then moves, break-even and the screening of every setting."""
    rows: list[Row] = []
    unified = _unified_gaps(run)
    by_form, by_time = _best_of_forms(unified), _best_by_time(unified)
    for peer in dict.fromkeys([*by_form, by_time]):
        bounds = {"ttft_mean": TTFT_TARGET}
        if peer in by_form:
            bounds["itl_p99"] = ITL_TARGET
        if peer == by_time:
            bounds["itl_time_p99"] = ITL_TARGET
        rows += _beside_rows(run, peer, bounds, targets)
    rows += _answer_rows(run, by_time)
    rows += _move_rows(run.final[run.split])
    if run.break_even is not None:
        rows += _break_even_rows(run.break_even)
    for name, window in run.screening.items():
        rows += [
            make_row(f"screening.{name}.itl_p50", 1e3 * percentile(window.gaps, 50), "ms"),
            make_row(f"screening.{name}.itl_p99", 1e3 * percentile(window.gaps, 99), "ms"),
            make_row(f"screening.{name}.itl_time_p99", 1e3 * time_percentile(window.gaps, 99), "ms"),
            make_row(f"screening.{name}.ttft_mean", _mean(window.ttfts), "s"),
            make_row(f"screening.{name}.goodput", _goodput(window, targets), "1/s"),
        ]
    return rows


def finalists(screening: dict[str, Window], split: str) -> list[str]:
    """The unified settings that the split is compared with: of each form the one with the lowest p99 ITL, and
    of all the one with the lowest p99 ITL of the time. Names begin with their form."""
    gaps = {name: window.gaps for name, window in screening.items() if name != split}
    return list(dict.fromkeys([*_best_of_forms(gaps), _best_by_time(gaps)]))


def best_unified(run: SplitRun) -> str:
    """The unified finalist with the lowest p99 ITL of the time, its windows pooled."""
    return _best_by_time(_unified_gaps(run))


def _unified_gaps(run: SplitRun) -> dict[str, list[float]]:
    return {name: _pooled(windows) for name, windows in run.final.items() if name != run.split}


def _best_by_time(gaps: dict[str, list[float]]) -> str:
    return min(gaps, key=lambda name: time_percentile(gaps[name], 99))


def _best_of_forms(gaps: dict[str, list[float]]) -> list[str]:
    best_last = sorted(gaps, key=lambda name: percentile(gaps[name], 99), reverse=True)
    return list({_form(name): name for name in best_last}.values())


def _form(name: str) -> str:
    return name.partition(".")[0]


def table(run: SplitRun, targets: Targets) -> list[str]:
    """Every setting as people compare them: screening, then the final windows pooled."""
    lines = [
        "",
        "phase      side         ITL p50     p99  of time  max ms   TTFT mean   p50   p99 s   goodput 1/s",
    ]
    for name, window in run.screening.items():
        lines.append(_line("screening", name, [window], targets))
    for name, windows in run.final.items():
        lines.append(_line("final", name, windows, targets))
    for name, window in run.answers.items():
        lines.append(_line("answers", name, [window], targets))
    return lines


def short(window: Window) -> str:
    p50, p99 = (1e3 * percentile(window.gaps, q) for q in (50, 99))
    of_time = 1e3 * time_percentile(window.gaps, 99)
    ttfts = ", ".join(f"{ttft:.1f}" for ttft in window.ttfts)
    return (
        f"ITL p50 {p50:.0f}, p99 {p99:.0f}, of the time {of_time:.0f} ms ({len(window.gaps):,} gaps); TTFT "
        f"{ttfts} s; {window.moves.get('fetched_bytes', 0.0) / 1e6:.0f} MB moved, load average "
        f"{window.load_average:.1f}"
    )


def _beside_rows(run: SplitRun, peer: str, bounds: dict[str, Target], targets: Targets) -> list[Row]:
    """The split's final figures beside a unified setting's."""
    ours, theirs = (_figures(run.final[name], targets) for name in (run.split, peer))
    return [
        make_row(
            f"{run.split}/{peer}.{field}",
            value,
            unit,
            spread=spread,
            peer=f"unified, {peer}",
            peer_value=theirs[field][0],
            peer_spread=theirs[field][1],
            target=bounds.get(field),
            note=_BLIND if field == "itl_p99" else "",
        )
        for field, (value, spread, unit) in ours.items()
    ]


def _figures(windows: Sequence[Window], targets: Targets) -> dict[str, tuple[float, float, str]]:
    """Value of the pooled windows, spread between them, unit."""
    gaps, ttfts = _pooled(windows), [ttft for window in windows for ttft in window.ttfts]
    figures = {}
    for q in (50, 99):
        single = [1e3 * percentile(window.gaps, q) for window in windows]
        figures[f"itl_p{q}"] = (1e3 * percentile(gaps, q), interquartile_range(single), "ms")
    single = [1e3 * time_percentile(window.gaps, 99) for window in windows]
    figures["itl_time_p99"] = (1e3 * time_percentile(gaps, 99), interquartile_range(single), "ms")
    figures["itl_max"] = (1e3 * max(gaps, default=math.nan), 0.0, "ms")
    figures["ttft_mean"] = (_mean(ttfts), interquartile_range(ttfts), "s")
    for q in (50, 99):
        figures[f"ttft_p{q}"] = (percentile(ttfts, q), interquartile_range(ttfts), "s")
    goodputs = [_goodput(window, targets) for window in windows]
    figures["goodput"] = (_mean(goodputs), interquartile_range(goodputs), "1/s")
    good = [met for window in windows for met in _met(window, targets)]
    figures["good_share"] = (sum(good) / len(good) if good else math.nan, 0.0, "")
    tokens = [window.pieces_per_token for window in windows]
    figures["pieces_per_token"] = (_mean(tokens), interquartile_range(tokens), "")
    return figures


def _answer_rows(run: SplitRun, best: str) -> list[Row]:
    """The same load with answers: a prompt is one more running decode for a while."""
    ours, theirs = run.answers[run.split], run.answers[best]

    def beside(field: str, value: float, peer_value: float, unit: str) -> Row:
        name = f"answers.{run.split}.{field}"
        return make_row(name, value, unit, peer=f"unified, {best}", peer_value=peer_value)

    return [
        beside("itl_p50", 1e3 * percentile(ours.gaps, 50), 1e3 * percentile(theirs.gaps, 50), "ms"),
        beside("itl_p99", 1e3 * percentile(ours.gaps, 99), 1e3 * percentile(theirs.gaps, 99), "ms"),
        beside(
            "itl_time_p99", 1e3 * time_percentile(ours.gaps, 99), 1e3 * time_percentile(theirs.gaps, 99), "ms"
        ),
        beside("ttft_mean", _mean(ours.ttfts), _mean(theirs.ttfts), "s"),
    ]


def _move_rows(windows: Sequence[Window]) -> list[Row]:
    moves = {
        name: sum(window.moves.get(name, 0.0) for window in windows)
        for name in ("fetched_bytes", "fetched_blocks", "fetch_s", "fetch_overlap_s", "failed_fetches")
    }
    prompts = sum(len(window.ttfts) for window in windows)
    open_s, overlap_s = moves["fetch_s"], moves["fetch_overlap_s"]
    after = (open_s - overlap_s) / prompts if prompts else math.nan
    return [
        make_row("moves.bytes_per_prompt", moves["fetched_bytes"] / prompts / 1e6, "MB"),
        make_row("moves.blocks_per_prompt", moves["fetched_blocks"] / prompts, ""),
        make_row("moves.open_per_prompt", open_s / prompts, "s", note="prefill included: moves overlap it"),
        make_row("moves.after_prefill_per_prompt", 1e3 * after, "ms"),
        make_row("moves.overlap", overlap_s / open_s if open_s else math.nan, ""),
        make_row("moves.failed", moves["failed_fetches"], ""),
    ]


def _break_even_rows(found: BreakEven) -> list[Row]:
    rows = [
        make_row("break_even.measured", found.by_cost(), "tokens", note=_COST),
        make_row("break_even.measured.ttft_alone", found.by_ttft(), "tokens"),
        make_row(
            "break_even.router",
            found.of_router(),
            "tokens",
            note="the shortest of the measured lengths from which on the router has prompts moved",
        ),
    ]
    for length in sorted(found.here.costs):
        unmoved = "" if found.router_moves.get(length) else "the router does not move this length"
        for name, here, moved, note in (
            ("ttft", found.here.ttfts[length], found.moved.ttfts[length], unmoved),
            ("cost", found.here.costs[length], found.moved.costs[length], _COST),
        ):
            rows.append(
                make_row(
                    f"break_even.{length}.{name}_moved",
                    median(moved),
                    "s",
                    spread=interquartile_range(moved),
                    peer="computed by the decode replica",
                    peer_value=median(here),
                    peer_spread=interquartile_range(here),
                    note=note,
                )
            )
    return rows


def _line(phase: str, name: str, windows: Sequence[Window], targets: Targets) -> str:
    gaps, ttfts = _pooled(windows), [ttft for window in windows for ttft in window.ttfts]
    goodput = _mean([_goodput(window, targets) for window in windows])
    cells = [1e3 * percentile(gaps, 50), 1e3 * percentile(gaps, 99), 1e3 * time_percentile(gaps, 99)]
    cells += [1e3 * max(gaps, default=math.nan), _mean(ttfts)]
    cells += [percentile(ttfts, 50), percentile(ttfts, 99), goodput]
    widths = (7, 7, 8, 7, 10, 5, 7, 12)
    return f"{phase:9}  {name:11}  " + " ".join(
        f"{figure(cell):>{width}}" for cell, width in zip(cells, widths, strict=True)
    )


def _pooled(windows: Sequence[Window]) -> list[float]:
    return [gap for window in windows for gap in window.gaps]


def _met(window: Window, targets: Targets) -> list[bool]:
    return [p99 <= targets.gap_s for p99 in window.stream_p99s] + [
        ttft <= targets.ttft_s for ttft in window.ttfts
    ]


def _goodput(window: Window, targets: Targets) -> float:
    return sum(_met(window, targets)) / window.seconds


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
