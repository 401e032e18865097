"""scripts/bench routing: its rows, its order of policies, and a whole small run on a made-up trace."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from benchmarks import routing
from benchmarks.routing_real import NUM_TURNS, NUM_USERS, _schedule
from benchmarks.routing_rows import ranking, rows_of, table
from headrace.bench.report import Report, render
from headrace.bench.simulator.grid import Bound, Cell, Figures, bound, measure
from headrace.bench.simulator.replica import PacedModel
from headrace.bench.simulator.step_time import A100_8B
from headrace.core.errors import UsageError


def figures(ttft: float, hit_share: float = 0.97, p99: float | None = None) -> Figures:
    return Figures(
        hit_rate=0.3,
        hit_share=hit_share,
        ttft_mean=ttft,
        ttft_p50=ttft / 2,
        ttft_p99=10 * ttft if p99 is None else p99,
        output_rate=1000.0,
        busy_share=0.8,
        num_requests=100,
    )


RUNS = {
    ("conversation", 400): {
        "default": [figures(1.0), figures(1.2), figures(1.1)],
        "slower": [figures(2.0), figures(2.3), figures(2.1)],
        "equal": [figures(0.9), figures(1.3), figures(1.2)],
    }
}


def test_the_default_is_held_to_the_ideal_cache_and_to_every_other_policy() -> None:
    rows = {row.id: row for row in rows_of(RUNS, "default")}
    assert rows["conversation.400.default.hit_share"].met is True
    assert rows["conversation.400.slower.hit_share"].target is None
    slower = rows["conversation.400.ttft_mean.default-slower.upper95"]
    # differences -1.0, -1.1, -1.0: mean -1.033, deviation 0.0577, t 4.303 with 2 degrees of freedom
    assert slower.value == pytest.approx(-1.0333 + 4.303 * 0.05774 / math.sqrt(3), abs=1e-3)
    assert slower.met is True
    assert rows["conversation.400.ttft_mean.default-equal.upper95"].met is False
    assert rows["conversation.400.ttft_p99.default-slower.upper95"].met is True


def test_a_hit_rate_below_the_bound_and_a_single_repeat_meet_nothing() -> None:
    rows = {
        row.id: row
        for row in rows_of(
            {("t", 1): {"default": [figures(1.0, hit_share=0.94)], "other": [figures(9.0)]}}, "default"
        )
    }
    assert rows["t.1.default.hit_share"].met is False
    assert rows["t.1.ttft_mean.default-other.upper95"].met is False


def test_policies_are_ranked_by_their_ttft_over_all_cells() -> None:
    runs = {
        ("a", 1): {"x": [figures(1.0)], "y": [figures(2.0)], "z": [figures(1.5)]},
        ("b", 1): {"x": [figures(1.0)], "y": [figures(0.9)], "z": [figures(400.0)]},
    }
    assert ranking(runs) == ["x", "y", "z"]
    lines = table(runs)
    assert len(lines) == 2 + 6 and "97.0 %" in lines[-1]


def write_trace(path: Path) -> None:
    """Users in turns: each prompt a block longer than the one before."""
    lines = [
        json.dumps(
            {
                "timestamp": 1000 * turn + user,
                "input_length": 512 * (turn + 1) + 9,
                "output_length": 4,
                "hash_ids": [100 * user + t for t in range(turn + 2)],
            }
        )
        for turn in range(6)
        for user in range(10)
    ]
    path.write_text("\n".join(lines))


def arguments(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    routing.add_arguments(parser)
    return parser.parse_args(flags)


def test_a_whole_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in routing.TRACES:
        write_trace(tmp_path / f"{name}_trace.jsonl")
    flags = [
        "--traces",
        str(tmp_path),
        "--replicas",
        "2",
        "--cache-tokens",
        "10240",
        "--repeats",
        "2",
        "--no-real",
    ]
    flags += ["--processes", "1", "--policies", "predicted_ttft", "random"]
    report, footer = routing.run(arguments(*flags), "scripts/bench routing")
    text = render(Report(name="routing", recipe=report.recipe, rows=report.rows), footer=footer)
    assert "simulated" in report.recipe["level"] and str(tmp_path) not in text
    rows = {row.id: row for row in report.rows}
    for trace in routing.TRACES:
        assert 0.0 < (rows[f"{trace}.10240.predicted_ttft.hit_share"].value or 0.0) <= 1.2
        assert (rows[f"{trace}.10240.random.ttft_p99"].value or 0.0) > 0.0
        assert rows[f"{trace}.10240.ttft_mean.predicted_ttft-random.upper95"].target is not None
        assert rows[f"{trace}.10240.predicted_ttft.ttft_mean.http"].ratio == pytest.approx(1.0)
    assert "best first" in footer[-1]
    assert "over HTTP" in capsys.readouterr().err


def test_without_traces_it_says_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADRACE_TRACES", raising=False)
    with pytest.raises(UsageError) as caught:
        routing.run(arguments(), "scripts/bench routing")
    assert caught.value.hint is not None and "--traces DIR" in caught.value.hint
    monkeypatch.setenv("HEADRACE_TRACES", str(tmp_path))
    with pytest.raises(UsageError, match="cannot read the trace"):
        routing.run(arguments(), "scripts/bench routing")


def test_a_cell_is_stretched_to_its_load(tmp_path: Path) -> None:
    write_trace(tmp_path / "t.jsonl")

    def cell(load: float) -> Cell:
        model = PacedModel(name="paced", step_time=A100_8B, num_blocks=80)
        return Cell(
            trace=tmp_path / "t.jsonl", part=0, num_parts=1, seed=1, model=model, num_replicas=2, load=load
        )

    full, half = bound(cell(1.0)), bound(cell(0.5))
    assert half == Bound(2 * full.seconds, full.ideal_hit_rate)
    busy, calm = measure(cell(1.0), full, "random"), measure(cell(0.5), half, "random")
    assert calm.ttft_mean < busy.ttft_mean and calm.busy_share < busy.busy_share
    assert calm.num_requests == 60


def test_real_users_talk_in_turns() -> None:
    import random

    schedule = _schedule(random.Random(1))
    times = [at for at, _ in schedule]
    assert len(schedule) == NUM_USERS * NUM_TURNS and times == sorted(times)
    last = schedule[-1][1]
    earlier = [prompt for _, prompt in schedule[:-1] if last[: len(prompt)] == prompt]
    assert len(earlier) == NUM_TURNS - 1
