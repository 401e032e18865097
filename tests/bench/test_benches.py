"""The side-by-side runs without their peers: names, rows, arithmetic, the sides' protocol."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import __main__ as front
from benchmarks import engine
from benchmarks.child import Child, ChildError
from benchmarks.contenders import Model
from benchmarks.engine_rows import TARGETS, Measurements, prefill_flops_per_token, rows_of
from benchmarks.forms import FORMS, QUANTIZATION, SIDES
from benchmarks.long_rows import LongRun
from benchmarks.long_rows import rows_of as long_rows_of
from benchmarks.quality import kl_divergence
from benchmarks.sides import operators
from benchmarks.sides.protocol import Timeline
from headrace.bench.metrics import RequestTrace

CONFIG = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 100,
}


def test_names_are_listed_and_a_wrong_one_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert front.main([]) == 0
    assert "engine" in capsys.readouterr().out
    assert front.main(["engin"]) == 2
    error = capsys.readouterr().err
    assert "no bench 'engin'" in error and "did you mean engine?" in error


def model(folder: Path, **changes: object) -> Model:
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    return Model("tiny", folder, folder / "tiny.gguf", 100, 1000)


def test_prefill_arithmetic_counts_every_causal_pair(tmp_path: Path) -> None:
    length, window = 20, 6
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    tiny = model(tmp_path, layer_types=kinds, sliding_window=window)
    linear = attention = 0
    for kind in kinds:
        for position in range(length):
            keys = position + 1 if kind == "full_attention" else min(position + 1, window)
            attention += 2 * 2 * 4 * 8 * keys
            linear += 2 * (32 * (4 + 2 * 2) * 8 + 32 * 4 * 8 + 3 * 32 * 48)
    expected = (linear + attention + 2 * 32 * 100) / length
    assert prefill_flops_per_token(tiny, length) == pytest.approx(expected)


def test_arithmetic_at_depth_counts_every_key() -> None:
    depth, new = 50, 7
    linear, attention = operators.flops(CONFIG, depth, new)
    keys = sum(depth + index + 1 for index in range(new))
    assert attention == 3 * 4 * 4 * 8 * keys
    assert linear == 3 * 2 * new * (32 * 64 + 32 * 32 + 3 * 32 * 48) + 2 * 32 * 100
    assert operators.chunks_of(depth, new, 3) == [(50, 3), (53, 3), (56, 1)]


def test_operators_are_timed_at_their_depth() -> None:
    measured = operators.measure(CONFIG, 1, 64, 40, 32)
    assert measured["linear_seconds"] > 0 and measured["attention_seconds"] > 0


METRICS = ("pp512", "pp2048", "tg128", "tg64x8")
BITS = {"bf16": 16.0, "8-bit": 8.0, "file": 4.0}
GEMM = 1e9


def filled() -> Measurements:
    """Ours twice as fast as anybody else; openvino-file holds more bits."""
    measured = Measurements()
    for form in FORMS:
        for side in form.sides:
            factor = 2.0 if side in QUANTIZATION else 1.0
            for metric in METRICS:
                for value in (10.0, 11.0, 12.0):
                    measured.add(side, metric, factor * value)
            measured.add(side, "stream", 1e6)  # 500 weights take 1000, 500 and 250 bytes
            measured.add(side, "bits", BITS[form.name] * (1.2 if side == "openvino-file" else 1.0))
    measured.add("headrace", "load.engine", 1.0)
    return measured


def test_every_bound_has_its_row(tmp_path: Path) -> None:
    measured = filled()
    with measured.failures("llama-file", ChildError):
        raise ChildError("gone")
    rows = {row.id: row for row in rows_of(model(tmp_path), list(SIDES), measured, GEMM, http=True)}
    bound = {row.id for row in rows.values() if row.target is not None}
    expected = {f"tiny/{metric}/{peer}" for metric, peer in TARGETS} | {"tiny/load.engine"}
    for form in FORMS:
        expected |= {f"tiny/{metric}/best at {form.name}" for metric in (*METRICS, "http.output")}
        expected |= {f"tiny/kl/{peer}" for peer in form.peers} | {f"tiny/tg128/roof at {form.name}"}
    assert bound == expected
    assert rows["tiny/tg128/vllm-eager"].ratio == 2.0 and rows["tiny/tg128/vllm-eager"].met is True
    assert rows["tiny/tg128/transformers"].met is False  # 2.0 is below 2.5
    assert rows["tiny/tg128/vllm-eager"].spread == 2.0
    assert rows["tiny/tg128/roof at bf16"].peer_value == 1000.0
    assert rows["tiny/tg128/roof at file"].peer_value == 4000.0
    assert rows["tiny/pp512/llama-file"].note == "gone"
    assert "tiny/http.output/transformers" not in rows


def test_the_best_peer_holds_as_many_bits(tmp_path: Path) -> None:
    measured = filled()
    for value in (100.0, 100.0, 100.0, 100.0):
        measured.add("openvino-file", "tg128", value)
    measured.add("onnxruntime-int4", "tg128", 14.0)
    measured.add("onnxruntime-int4", "tg128", 14.0)
    rows = {row.id: row for row in rows_of(model(tmp_path), list(SIDES), measured, GEMM, http=False)}
    best = rows["tiny/tg128/best at file"]
    assert (best.peer, best.peer_value, best.met) == ("onnxruntime-int4", 12.0, True)
    assert "not at equal bits: 4.00 and 4.80" in rows["tiny/tg128/openvino-file"].note


def test_divergence_is_that_of_the_definition() -> None:
    wide = np.log(np.array([[0.5, 0.25, 0.25], [0.9, 0.05, 0.05]]))
    other = np.log(np.array([[0.25, 0.5, 0.25], [0.9, 0.05, 0.05]])) + 3.0  # logits need not be normalised
    expected = (0.5 * math.log(2) + 0.25 * math.log(0.5)) / 2
    assert kl_divergence(wide, other) == pytest.approx(expected)
    assert kl_divergence(wide, other[:1]) == pytest.approx(2 * expected)


def test_without_our_side_nothing_is_met(tmp_path: Path) -> None:
    rows = rows_of(model(tmp_path), list(SIDES), Measurements(), GEMM, http=False)
    assert all(row.met is False for row in rows if row.target is not None)


def test_long_rows_hold_the_three_bounds() -> None:
    run = LongRun()
    run.first_turn = RequestTrace(sent=0.0, text_times=[9.0], prompt_tokens=1000)
    for ttft, text in ((1.0, 40.0), (1.2, 50.0), (3.0, 70.0)):
        run.next_turns.append(
            RequestTrace(
                sent=0.0,
                text_times=[ttft],
                prompt_tokens=1200,
                cached_tokens=1000,
                server_timing=f"text;dur={text}",
            )
        )
    run.add_baseline([[0.0, 0.01, 0.02]])
    for turn in ("first", "next"):
        run.add_visit(turn, [[0.0, 0.01, 0.08, 0.5]], 0.02, 0.07, 45.0, 1000)
    speeds = {
        "linear_seconds": 0.5,
        "attention_seconds": 0.5,
        "linear_flops": 1e9,
        "attention_flops": 1e9,
        "gemm_bf16": 4e9,
    }
    rows = {row.id: row for row in long_rows_of(run, speeds)}
    assert rows["ttft.next_turn"].value == 1.2 and rows["ttft.next_turn"].met is True
    assert rows["ttft.next_turn/gemm"].ratio == pytest.approx(1.2 / 0.5)
    assert rows["gateway.text.next_turn"].value == 50.0 and rows["gateway.text.next_turn"].met is True
    # The gap began at 10 ms and the window ended at 70 ms: 60 ms, cut there.
    gaps = rows["gaps.next_turn.max"]
    assert gaps.value == pytest.approx(60.0) and gaps.met is False
    assert rows["gaps.next_turn.engine_chunk"].value == pytest.approx(420.0)


def test_timeline_splits_prefill_from_decode() -> None:
    timeline = Timeline(2)
    timeline.record("a", 1)
    timeline.stamp()
    assert timeline.all_started is None
    timeline.record("a", 2)
    timeline.record("b", 1)
    timeline.stamp()
    timeline.record("a", 4)
    timeline.record("b", 3)
    timeline.stamp()
    assert timeline.prefill()["seconds"] > 0
    assert timeline.decode()["tokens"] == 4
    with pytest.raises(RuntimeError, match="0 of 1"):
        Timeline(1).prefill()


SIDE = """
import sys
sys.path.insert(0, {root!r})
from benchmarks.sides import protocol
class Side:
    weights_seconds = 0.5
    notes = "tiny"
    def run(self, prompts, new_tokens):
        print("noise that must not reach the bench")
        if new_tokens > 50:
            raise ValueError("too many")
        timeline = protocol.Timeline(len(prompts))
        for count in range(1, new_tokens + 1):
            for index in range(len(prompts)):
                timeline.record(str(index), count)
            timeline.stamp()
        return timeline
protocol.serve(lambda arguments: Side())
"""


def child(tmp_path: Path, source: str) -> Child:
    script = tmp_path / "side.py"
    script.write_text(source.format(root=str(Path(__file__).parents[2])))
    return Child(
        [sys.executable, str(script)], environment={"PATH": "/usr/bin:/bin"}, log=tmp_path / "log", timeout=30
    )


def test_a_side_is_asked_stopped_and_ended(tmp_path: Path) -> None:
    side = child(tmp_path, SIDE)
    try:
        assert side.ready["weights_seconds"] == 0.5 and side.spawn_seconds > 0
        assert side.ask({"op": "decode", "prompts": [[1], [2]], "tokens": 8})["tokens"] == 16
        side.pause()
        with pytest.raises(ChildError, match="no answer"):
            side.ask({"op": "prefill", "prompts": [[1]], "tokens": 1}, timeout=0.3)
        side.resume()
        assert side.peak_memory() > 1_000_000
        assert math.isfinite(side._read(10)["seconds"])
        with pytest.raises(ChildError, match="too many"):
            side.ask({"op": "decode", "prompts": [[1]], "tokens": 60})
    finally:
        side.close()
    assert side.process.returncode is not None


def test_a_side_that_dies_says_why(tmp_path: Path) -> None:
    with pytest.raises(ChildError, match="no such engine"):
        child(tmp_path, "raise SystemExit('no such engine')")


def test_a_run_that_is_stopped_tells_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(tiny: Model, sides: list[str], plan: engine.Plan, measured: Measurements) -> None:
        measured.add("headrace", "tg128", 20.0)
        measured.add("vllm-eager", "tg128", 10.0)
        raise SystemExit(143)

    monkeypatch.setattr(engine, "_measure_engines", stopped)
    monkeypatch.setattr(engine, "_roof", lambda plan, *footprints: {"gemm_bf16": GEMM})
    monkeypatch.setattr(Model, "resolve", classmethod(lambda cls, name: model(tmp_path)))
    parser = argparse.ArgumentParser()
    engine.add_arguments(parser)
    report, _ = engine.run(parser.parse_args(["--models", "tiny"]), "scripts/bench engine")
    rows = {row.id: row for row in report.rows}
    assert "tiny" in report.recipe["interrupted"]
    assert rows["tiny/tg128/vllm-eager"].met is True
    assert rows["tiny/pp512/vllm-eager"].met is False
