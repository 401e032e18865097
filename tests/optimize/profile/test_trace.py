"""Traces taken elsewhere: by hand as from a GPU, and by torch's own profiler here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.core.errors import UsageError
from headrace.optimize.profile.page import html_page
from headrace.optimize.profile.table import print_profile
from headrace.optimize.profile.trace import read_trace
from headrace.optimize.records import KernelProfile, OpProfile, PhaseProfile, Roofs
from tests.optimize.profile.synthetic import ATTENTION_US, GRAPH_US, PRODUCT_US, STEP_US, synthetic_trace

VLLM = ("execute_context_1(32)_generation_0(0)", *["execute_context_0(0)_generation_1(1)"] * 2)
VLLM_NEW = (
    "execute_1_context_1(sq32sk32sqsq1sqsk1)_generation_0()",
    *["execute_2_context_0()_generation_1(sq1sk33sqsq1sqsk33)"] * 2,
)
SGLANG = ("step[EXTEND bs=1 toks=32]", "step[DECODE bs=1]", "step[DECODE bs=1]")
LAYER = "ToyForCausalLM/ToyDecoderLayer"
ROOFS = Roofs(stream={2**20: 1e12}, gemm={"bfloat16": 1e13}, method="made up")


def write(path: Path, trace: dict[str, Any]) -> Path:
    text = json.dumps(trace).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def phases(profile: KernelProfile) -> dict[str, PhaseProfile]:
    return {phase.phase: phase for phase in profile.phases}


def ops(phase: PhaseProfile) -> dict[str, OpProfile]:
    return {op.path: op for op in phase.ops}


@pytest.mark.parametrize("names", [VLLM, VLLM_NEW, SGLANG])
def test_a_gpu_trace_becomes_phases_layers_and_kernels(tmp_path: Path, names: tuple[str, str, str]) -> None:
    profile = read_trace(write(tmp_path / "gpu.json.gz", synthetic_trace(names)), model="toy", roofs=ROOFS)
    assert (profile.hardware, profile.dtype, profile.model) == ("Toy GPU", "bfloat16", "toy")
    found = phases(profile)
    assert [(name, phase.num_steps, phase.rows) for name, phase in found.items()] == [
        ("prefill", 1, 32),
        ("decode", 2, 1),
    ]
    decode = found["decode"]
    by_path = ops(decode)
    assert list(by_path) == [
        "ToyForCausalLM",
        LAYER,
        f"{LAYER}/linear",
        f"{LAYER}/unified_attention",
        "ToyForCausalLM/fused_sample",
    ]
    product = by_path[f"{LAYER}/linear"]
    assert product.calls_per_step == 2 and product.self_s == pytest.approx(2 * PRODUCT_US * 1e-6)
    assert (product.flops, product.bytes) == (2 * 2 * 64 * 128, 2 * 2 * (64 + 128 + 64 * 128))
    [shape] = product.shapes
    assert (shape.rows, shape.dtype) == (1, "bfloat16")
    assert shape.dims == {"in_features": 64, "out_features": 128}
    assert product.bound == "overhead" and 0 < product.roof_share < 0.1
    layer = by_path[LAYER]
    assert layer.layers == [0, 1]
    assert layer.layer_s == pytest.approx([(PRODUCT_US + ATTENTION_US) * 1e-6] * 2)
    assert layer.self_s == pytest.approx(0) and layer.flops == product.flops
    busy = (2 * (PRODUCT_US + ATTENTION_US) + GRAPH_US) * 1e-6
    assert sum(op.self_s for op in decode.ops) == pytest.approx(busy)
    # the first of the two decodes lasts until the second begins, the second until its last kernel
    last = 630 + 150 + GRAPH_US - (20 + 30 + 150)
    assert decode.step_s == pytest.approx((STEP_US + last) / 2 * 1e-6)
    assert decode.unnamed_s == pytest.approx(decode.step_s - busy)


def test_kernels_that_overlap_or_lost_their_launch(tmp_path: Path) -> None:
    trace = synthetic_trace(VLLM)
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event.get("cat") != "cuda_runtime"]
    profile = read_trace(write(tmp_path / "gpu.json", trace))
    decode = phases(profile)["decode"]
    assert set(ops(decode)) == {"gemm", "flash_fwd_kernel", "fused_sample"}
    trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("cat") == "kernel"]
    for event in trace["traceEvents"]:
        event["ts"] = 0.0
    [phase] = read_trace(write(tmp_path / "all.json", trace)).phases
    assert phase.step_s == pytest.approx(PRODUCT_US * 1e-6) and phase.unnamed_s == pytest.approx(0)


def test_a_cpu_trace_of_torch_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    x = torch.randn(1, 64)
    with torch.inference_mode():
        model(x)
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_stack=True
        ) as profiler:
            for _ in range(3):
                with torch.profiler.record_function(VLLM[1]):
                    model(x)
    path = tmp_path / "cpu.json"
    profiler.export_chrome_trace(str(path))
    profile = read_trace(path)
    [decode] = profile.phases
    assert (decode.phase, decode.num_steps, profile.hardware) == ("decode", 3, "cpu")
    products = [op for op in decode.ops if op.op == "linear"]
    assert sum(op.calls_per_step for op in products) == 2
    assert sum(op.flops for op in products) == 2 * 2 * 64 * 128
    assert sum(op.self_s for op in decode.ops) + decode.unnamed_s == pytest.approx(decode.step_s)
    print_profile(profile)
    assert "unnamed" in capsys.readouterr().out
    assert "<svg" in html_page(profile)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"traceEvents": []}', b"\x1f\x8bno", b'{"traceEvents": 3}']
)
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"trace\.json"):
        read_trace(path)
    with pytest.raises(UsageError, match="cannot read"):
        read_trace(tmp_path / "absent.json")
