"""What `bench long` measured, turned into rows with the bounds that they are held to."""

from __future__ import annotations

from collections import defaultdict

from headrace.bench.gaps import gaps_between, gaps_within, longest_after
from headrace.bench.load import parse_server_timing
from headrace.bench.metrics import RequestTrace, interquartile_range, median, percentile
from headrace.bench.report import Row, Target, make_row

NEXT_TURN_TARGET = Target("ratio", "<=", 1.3)
TEXT_TARGET = Target("value", "<", 60.0)
GAP_TARGET = Target("value", "<", 50.0)
TURNS = ("first", "next")


class LongRun:
    """Traces and gaps of one run; times in seconds, text work in milliseconds."""

    def __init__(self) -> None:
        self.first_turn: RequestTrace | None = None
        self.next_turns: list[RequestTrace] = []
        self.baseline_gaps: list[float] = []
        self.window_gaps: dict[str, list[float]] = defaultdict(list)
        self.chunk_gaps: dict[str, list[float]] = defaultdict(list)
        self.windows: dict[str, list[float]] = defaultdict(list)
        self.visit_text: dict[str, list[float]] = defaultdict(list)
        self.body_bytes: dict[str, int] = {}

    def add_baseline(self, streams: list[list[float]]) -> None:
        """Light streams with nothing beside them."""
        self.baseline_gaps += [gap for times in streams for gap in gaps_between(times)]

    def add_visit(
        self,
        turn: str,
        streams: list[list[float]],
        began: float,
        ended: float,
        text_ms: float,
        body_bytes: int,
    ) -> None:
        """Light streams around a long body that was handled from ``began`` to ``ended``."""
        for times in streams:
            self.window_gaps[turn] += gaps_within(times, began, ended)
            self.chunk_gaps[turn].append(longest_after(times, ended))
        self.windows[turn].append(ended - began)
        self.visit_text[turn].append(text_ms)
        self.body_bytes[turn] = body_bytes

    def text_ms(self) -> list[float]:
        """The gateway's own share of each next turn, as its Server-Timing header says."""
        return [parse_server_timing(turn.server_timing).get("text", float("nan")) for turn in self.next_turns]


def rows_of(run: LongRun, operators: dict[str, float] | None) -> list[Row]:
    """Turns first, then the gateway's share, then other streams' gaps; without turns, rows without values."""
    rows = _turn_rows(run, operators)
    text = run.text_ms()
    rows.append(
        make_row(
            "gateway.text.next_turn",
            median(text),
            "ms",
            spread=interquartile_range(text),
            target=TEXT_TARGET,
        )
    )
    rows.append(make_row("gateway.text.next_turn.max", max(text, default=None), "ms"))
    beside = run.visit_text["next"]
    rows.append(
        make_row(
            "gateway.text.next_turn.beside_streams",
            median(beside),
            "ms",
            spread=interquartile_range(beside),
            note="the same while light streams decode on every core",
        )
    )
    rows += _gap_rows("gaps.alone", run.baseline_gaps)
    for name in TURNS:
        rows += _gap_rows(f"gaps.{name}_turn", run.window_gaps[name], GAP_TARGET)
        window = [1000 * seconds for seconds in run.windows[name]]
        rows.append(make_row(f"window.{name}_turn", median(window), "ms", spread=interquartile_range(window)))
        chunk = [1000 * seconds for seconds in run.chunk_gaps[name]]
        rows.append(
            make_row(
                f"gaps.{name}_turn.engine_chunk",
                max(chunk, default=None),
                "ms",
                note="after the hand-over: the engine computes a chunk of the long prompt",
            )
        )
    return rows


def _turn_rows(run: LongRun, operators: dict[str, float] | None) -> list[Row]:
    ttfts = [trace.ttft for trace in run.next_turns]
    predicted = raw = first_text = None
    rates = length = ""
    if run.first_turn is not None and operators is not None:
        turn = run.next_turns[0]
        predicted = operators["linear_seconds"] + operators["attention_seconds"]
        flops = operators["linear_flops"] + operators["attention_flops"]
        raw = flops / operators["gemm_bf16"]
        first_text = parse_server_timing(run.first_turn.server_timing).get("text")
        length = f"{run.first_turn.prompt_tokens:,} tokens, none cached"
        rates = (
            f"{flops / 1e12:.2f} TFLOP for {turn.prompt_tokens - turn.cached_tokens:,} tokens after "
            f"{turn.cached_tokens:,} cached; linear {_gflops(operators, 'linear')} and attention "
            f"{_gflops(operators, 'attention')} GFLOP/s alone, "
            f"raw bf16 GEMM {operators['gemm_bf16'] / 1e9:.0f}"
        )
    value, spread = median(ttfts), interquartile_range(ttfts)
    return [
        make_row("ttft.first_turn", run.first_turn.ttft if run.first_turn else None, "s", note=length),
        make_row(
            "ttft.next_turn",
            value,
            "s",
            spread=spread,
            peer="its operators alone",
            peer_value=predicted,
            target=NEXT_TURN_TARGET,
            note=rates,
        ),
        make_row("ttft.next_turn/gemm", value, "s", spread=spread, peer="raw bf16 GEMM rate", peer_value=raw),
        make_row("gateway.text.first_turn", first_text, "ms"),
    ]


def _gap_rows(name: str, gaps: list[float], target: Target | None = None) -> list[Row]:
    values = [1000 * gap for gap in gaps]
    return [
        make_row(f"{name}.p50", percentile(values, 50), "ms"),
        make_row(f"{name}.p99", percentile(values, 99), "ms"),
        make_row(f"{name}.max", max(values, default=None), "ms", target=target, note=f"{len(values)} gaps"),
    ]


def _gflops(operators: dict[str, float], kind: str) -> str:
    return f"{operators[kind + '_flops'] / operators[kind + '_seconds'] / 1e9:.0f}"
