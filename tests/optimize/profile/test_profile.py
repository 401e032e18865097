"""The engine's profile: what is found, what adds up, and that nothing of the instrument stays behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from headrace.core.errors import EngineError, UsageError
from headrace.engine.engine import Engine
from headrace.kernels.blocks import join_blocks, quantize_blocks
from headrace.kernels.weights import blocks_linear
from headrace.optimize.profile import instrument
from headrace.optimize.profile.collect import profile_engine
from headrace.optimize.profile.costs import call_cost
from headrace.optimize.profile.instrument import NUMBERS, PARTS, Overhead, calibrate, unfold
from headrace.optimize.profile.page import html_page
from headrace.optimize.profile.roofline import ceilings
from headrace.optimize.profile.roofs import main as roofs_main
from headrace.optimize.profile.summary import middle_half, tree_order
from headrace.optimize.profile.table import caveats, print_profile
from headrace.optimize.profile.workloads import Workload, WorkloadRequest, load_workload, run
from headrace.optimize.records import KernelProfile, PhaseProfile, Roofs
from tests.engine.harness import make_engine

ROOFS = Roofs(stream={2**20: 2e11, 2**28: 1e11}, gemm={"float32": 2e11, "bfloat16": 8e11}, method="made up")
WORKLOAD = Workload(
    name="mixed",
    requests=[
        WorkloadRequest(prompt=list(range(20, 40)), max_tokens=4),
        WorkloadRequest(prompt=list(range(50, 60)), max_tokens=6),
    ],
)


def profile(engine: Engine, workload: Workload = WORKLOAD) -> KernelProfile:
    return profile_engine(engine, workload, model="tiny", seconds=0.01, roofs=ROOFS)


@pytest.fixture(scope="module")
def llama(tiny: Callable[..., Path]) -> KernelProfile:
    return profile(make_engine(tiny("llama"), max_num_batched_tokens=64))


def phase(found: KernelProfile, name: str) -> PhaseProfile:
    return next(each for each in found.phases if each.phase == name)


def test_the_hierarchy_is_that_of_the_table(llama: KernelProfile) -> None:
    decode = phase(llama, "decode")
    paths = [op.path for op in decode.ops if op.op not in PARTS]
    assert paths == [
        "embedding",
        "decoder_layer",
        "decoder_layer/rms_norm.input",
        "decoder_layer/attention_block",
        "decoder_layer/attention_block/linear.qkv",
        "decoder_layer/attention_block/rope",
        "decoder_layer/attention_block/attention",
        "decoder_layer/attention_block/linear.out",
        "decoder_layer/rms_norm.pre_mlp",
        "decoder_layer/mlp_block",
        "decoder_layer/mlp_block/gated_linear",
        "decoder_layer/mlp_block/gated_linear/linear.gate_up",
        "decoder_layer/mlp_block/gated_linear/activation_and_mul",
        "decoder_layer/mlp_block/linear.down",
        "rms_norm.final",
        "logits_head",
    ]
    assert {op.op for op in decode.ops} >= set(PARTS)
    calls = {op.path: op.calls_per_step for op in decode.ops}
    assert calls["decoder_layer"] == calls["decoder_layer/mlp_block/linear.down"] == 3
    assert calls["logits_head"] == calls["schedule"] == 1
    layer = next(op for op in decode.ops if op.op == "decoder_layer")
    assert layer.layers == [0, 1, 2] and sum(layer.layer_s) == pytest.approx(layer.total_s)


@pytest.mark.parametrize("family", ["gemma3", "qwen3", "olmo2"])
def test_every_norm_has_its_name(tiny: Callable[..., Path], family: str) -> None:
    found = profile(make_engine(tiny(family)))
    norms = {op.path.rpartition(".")[2] for op in found.phases[-1].ops if op.op == "rms_norm"}
    expected = {
        "gemma3": {"input", "post_attention", "pre_mlp", "post_mlp", "q", "k", "final"},
        "qwen3": {"input", "pre_mlp", "q", "k", "final"},
        "olmo2": {"post_attention", "post_mlp", "q", "k", "final"},
    }
    assert norms == expected[family]


def test_a_model_of_transformers_shows_its_attention(tiny: Callable[..., Path]) -> None:
    decode = phase(profile(make_engine(tiny("gpt2"))), "decode")
    calls = {op.path: op.calls_per_step for op in decode.ops}
    assert calls["attention"] == 3 and calls["forward"] == 1


def test_shapes_occur_as_often_as_they_did(llama: KernelProfile) -> None:
    prefill, decode = phase(llama, "prefill"), phase(llama, "decode")
    assert (prefill.num_steps, decode.num_steps) == (1, 5)
    qkv = next(op for op in decode.ops if op.path.endswith("linear.qkv"))
    assert {(shape.rows, shape.calls_per_step) for shape in qkv.shapes} == {(2, 9 / 5), (1, 6 / 5)}
    assert all(shape.dtype == "float32" for shape in qkv.shapes)
    assert qkv.shapes[0].dims == {"in_features": 64, "out_features": (4 + 2 * 2) * 16}
    rows_per_step = (2 * 3 + 1 * 2) / 5
    assert qkv.flops == pytest.approx(3 * 2 * rows_per_step * 64 * 128)
    attention = next(op for op in decode.ops if op.op == "attention")
    assert attention.shapes[0].context in (10, 11, 12, 20, 21, 22)
    embedding = next(op for op in prefill.ops if op.op == "embedding")
    assert [shape.rows for shape in embedding.shapes] == [30]


def test_times_add_up_to_the_step(llama: KernelProfile) -> None:
    for each in llama.phases:
        assert each.step_s > 0 and each.unprofiled_step_s > 0 and each.instrument_s > 0
        assert sum(op.self_s for op in each.ops) + each.unnamed_s == pytest.approx(each.step_s)
        shares = sum(op.share for op in each.ops)
        assert shares == pytest.approx(sum(op.self_s for op in each.ops) / each.step_s)
        for op in each.ops:
            assert op.recoverable_s <= max(op.total_s, 0) and op.end_to_end_gain >= 1
            assert op.roof_share == 0 or op.shapes
    footprint = phase(llama, "decode").footprint
    layers = 3 * 4 * (64 * 128 + 64 * 64 + 64 * 192 + 96 * 64)
    assert footprint > layers + 4 * 320 * 64


def test_nothing_of_the_instrument_stays(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"))
    ops, workload = engine.runner.model.ops, load_workload("chat", 320, max_len=64)
    before = run(engine, workload)
    profile(engine, workload)
    assert engine.runner.model.ops is ops
    holders = (
        engine,
        engine.moves,
        engine.scheduler,
        engine.runner,
        engine.runner.model,
        engine.runner.sampler,
    )
    for holder in holders:
        assert not {"take_events", "before_step", "schedule", "execute", "forward", "sample"} & set(
            vars(holder)
        )
    assert run(engine, workload, admissions=before.admissions).tokens == before.tokens
    engine.check_integrity()


def test_a_step_that_is_another_one_ends_the_profile(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tiny("llama"))
    original = instrument.Survey.take
    monkeypatch.setattr(instrument.Survey, "take", lambda self: original(self)[:-1])
    ops = engine.runner.model.ops
    with pytest.raises(EngineError, match="other calls"):
        profile(engine)
    assert engine.runner.model.ops is ops


def test_gpus_are_sent_to_traces(tiny: Callable[..., Path]) -> None:
    engine = make_engine(tiny("llama"))
    engine.device = torch.device("meta")
    with pytest.raises(UsageError, match="GPU") as error:
        profile(engine)
    assert error.value.hint is not None and "--trace" in error.value.hint


def test_unfolding_takes_the_timers_cost_off() -> None:
    outer, inner = NUMBERS["decoder_layer"], NUMBERS["linear"]
    # inside 2, outside 3: the outer call made two inner ones of 10 and 20 and worked 100 itself
    readings = [outer, 0, inner, 50, -1, 62, inner, 70, -1, 92]
    readings += [-1, 2 + 100 + (10 + 5) + (20 + 5)]
    numbers, times = unfold(readings, Overhead(2.0, 3.0))
    assert numbers == [outer, inner, inner]
    np.testing.assert_allclose(times.own, [100, 10, 20])
    np.testing.assert_allclose(times.total, [130, 10, 20])


def test_runs_under_a_neighbour_do_not_count() -> None:
    assert middle_half([5.0, 90.0, 6.0]) == [2]
    assert middle_half([1.0, 2.0]) == [0, 1]
    assert sorted(middle_half([8.0, 1.0, 3.0, 2.0, 99.0, 4.0, 5.0, 6.0])) == [2, 5, 6, 7]


def test_calibration_finds_a_cost() -> None:
    overhead = calibrate()
    assert overhead.total > 0 and overhead.inside >= 0 and overhead.outside >= 0


def test_a_window_bounds_what_attention_has_to_do(tiny: Callable[..., Path]) -> None:
    from headrace.kernels.batch import AttentionBatch, BatchEntry
    from headrace.kernels.cache import LayerKV
    from headrace.kernels.weights import AttentionSpec

    q, k = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
    kv = LayerKV.allocate(16, 4, 2, 8, dtype=torch.float32)
    batch = AttentionBatch.build([BatchEntry(19, 1, list(range(5))), BatchEntry(3, 5, [5, 6])], block_size=4)
    costs = []
    for window in (None, 4):
        spec = AttentionSpec(4, 2, 8, 8, 1.0, sliding_window=window)
        costs.append(call_cost("attention", (q, k, k, kv, batch, spec), {}))
    per_pair = 4 * (2 * 16 + 4)
    assert costs[0].flops == (20 + 4 + 5 + 6 + 7 + 8) * per_pair
    assert costs[1].flops == (4 + 4 * 5) * per_pair
    assert costs[0].resident == (20 + 8 + 6) * 2 * 16 * 4
    assert costs[0].rows == 6 and costs[0].context == 19


def test_blocks_cost_the_bytes_that_they_have() -> None:
    buffer = join_blocks([("q8_0", quantize_blocks(torch.randn(64, 96)))], 96)
    packed = blocks_linear(buffer, 96, dtype=torch.bfloat16)
    ids = torch.zeros(3, dtype=torch.int64)
    found = call_cost("embedding", (ids, packed), {})
    assert found.dims == {"vocab_size": 64, "hidden_size": 96} and found.dtype == "bfloat16"
    assert found.nbytes == pytest.approx(3 * (buffer.nbytes / 64 + 96 * 2) + 3 * 8)
    head = call_cost("logits_head", (torch.zeros(1, 96, dtype=torch.bfloat16), packed), {})
    assert head.resident == buffer.nbytes
    assert head.products == {"int8": 2 * 64 * 96}
    floats = torch.randn(32, 96).bfloat16().view(torch.uint8)
    buffer = join_blocks([("q8_0", quantize_blocks(torch.randn(64, 96))), ("bfloat16", floats)], 96)
    mixed = call_cost("linear", (torch.zeros(5, 96), blocks_linear(buffer, 96, dtype=torch.bfloat16)), {})
    assert mixed.products == {"int8": 5 * 2 * 64 * 96, "bfloat16": 5 * 2 * 32 * 96}
    assert mixed.flops == sum(mixed.products.values()) and mixed.dtype == "float32"


def test_the_roof_of_products_is_that_of_what_they_are_stored_in() -> None:
    rates = {"float32": 1e11, "bfloat16": 2e11, "int8": 4e11}
    roofs = Roofs(stream={2**28: 1e15}, gemm=rates, method="made up")
    assert ceilings(roofs, 1e8, "float32").gemm == 1e11
    assert ceilings(roofs, 1e8, "float32", 6e9, {"int8": 6e9}).gemm == pytest.approx(4e11)
    found = ceilings(roofs, 1e8, "float32", 7e9, {"int8": 4e9, "bfloat16": 2e9})
    assert found.seconds(7e9, 1.0) == pytest.approx(0.01 + 0.01 + 0.01)
    # bytes that were not measured have no roof but that of the memory; other dtypes are held to float32
    without = msgspec.structs.replace(roofs, gemm={"float32": 1e11})
    assert ceilings(without, 1e8, "float32", 6e9, {"int8": 6e9}).seconds(6e9, 1e9) == 1e-6
    assert ceilings(without, 1e8, "float32", 6e9, {"bfloat16": 6e9}).gemm == pytest.approx(1e11)


def test_the_roof_is_the_one_of_the_footprint() -> None:
    assert ceilings(ROOFS, 1000.0, "float32").stream == 2e11
    assert ceilings(ROOFS, 2.7e8, "bfloat16").stream == 1e11
    found = ceilings(ROOFS, 2.7e8, "bfloat16")
    assert found.bound(flops=1e9, nbytes=1e9, spent_s=0.02) == "memory"
    assert found.bound(flops=1e12, nbytes=1e9, spent_s=2.0) == "compute"
    assert found.bound(flops=1e9, nbytes=1e9, spent_s=1.0) == "overhead"


def test_parts_follow_what_they_are_part_of() -> None:
    assert tree_order(["a", "b", "a/x", "c", "a/x/y", "b/z", "a/w"]) == [
        "a",
        "a/x",
        "a/x/y",
        "a/w",
        "b",
        "b/z",
        "c",
    ]


def test_what_is_shown(llama: KernelProfile, capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(llama)
    shown = capsys.readouterr().out
    assert "linear.down" in shown and "unnamed" in shown and "without timers" in shown
    assert "recipe: command: headrace profile tiny --workload mixed" in shown
    page = html_page(llama)
    assert page.count("<svg") == 2 and "decoder_layer/mlp_block" in page
    assert "http" not in page and "<script" not in page
    assert msgspec.json.decode(msgspec.json.encode(llama), type=KernelProfile) == llama


def test_roofs_that_were_measured_badly_are_told(llama: KernelProfile) -> None:
    decode = llama.phases[-1]
    op = next(op for op in decode.ops if op.op == "logits_head")
    above = msgspec.structs.replace(op, share=0.1, roof_share=1.4)
    phases = [msgspec.structs.replace(decode, ops=[above])]
    [caveat] = caveats(msgspec.structs.replace(llama, phases=phases))
    assert "logits_head reached 140 %" in caveat


def test_the_roofs_are_measured(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    roofs_main(["--threads", "1", "--footprint", str(2**20), "--dtype", "float32", "--dtype", "int8"])
    roofs = msgspec.json.decode(capfdbinary.readouterr().out, type=Roofs)
    assert set(roofs.stream) == {2**20} and set(roofs.gemm) == {"float32", "int8"}
    assert min(roofs.stream[2**20], *roofs.gemm.values()) > 1e6
