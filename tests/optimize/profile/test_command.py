"""`headrace profile` as a user calls it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from headrace.cli.main import main
from headrace.optimize.records import KernelProfile
from tests.optimize.profile.synthetic import synthetic_trace

ENGINE = ["--device", "cpu", "--threads", "1", "--kv-cache-gib", "0.02", "--seconds", "0.1"]


def test_a_model_on_a_file_of_requests(
    tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = tmp_path / "recorded.jsonl"
    requests.write_text(json.dumps({"prompt": [3, 4, 5, 6], "max_tokens": 3}) + "\n")
    record, page = tmp_path / "profile.json", tmp_path / "profile.html"
    command = ["profile", str(tiny("llama")), "--workload", str(requests), *ENGINE]
    assert main([*command, "--json", str(record), "--html", str(page)]) == 0
    shown = capsys.readouterr()
    assert "kernels: " in shown.err
    assert "decoder_layer" in shown.out and "measuring the machine's roofs" in shown.err
    profile = msgspec.json.decode(record.read_bytes(), type=KernelProfile)
    assert [phase.phase for phase in profile.phases] == ["prefill", "decode"]
    assert profile.workload == "recorded.jsonl" and profile.revision
    assert min(profile.roofs.stream.values()) > 0 and set(profile.roofs.gemm) <= {"bfloat16", "float32"}
    assert page.read_text().startswith("<!doctype html>")


def test_a_trace_on_stdout(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    trace, roofs = tmp_path / "trace.json", tmp_path / "roofs.json"
    names = ("step[EXTEND bs=1 toks=32]", "step[DECODE bs=1]", "step[DECODE bs=1]")
    trace.write_text(json.dumps(synthetic_trace(names)))
    roofs.write_text('{"stream": {"1048576": 1e12}, "gemm": {"bfloat16": 1e13}, "method": "made up"}')
    assert main(["profile", "--trace", str(trace), "--roofs", str(roofs), "--json", "-"]) == 0
    profile = msgspec.json.decode(capsysbinary.readouterr().out, type=KernelProfile)
    assert profile.roofs.method == "made up" and profile.source == str(trace)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL or --trace"),
        (["x", "--seconds", "0"], "--seconds"),
        (["x", "--roofs", "y"], "--roofs goes with --trace"),
        (["--trace", "/nowhere.json"], "cannot read the trace"),
        (["--trace", "/dev/null", "--roofs", "/nowhere.json"], "--roofs /nowhere.json"),
    ],
)
def test_wrong_usage(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == 2
    assert said in capsys.readouterr().err
