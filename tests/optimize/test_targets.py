"""The roofline chooses between an op, its block and the whole layer."""

from __future__ import annotations

import msgspec
import pytest

from headrace.kernels.native.signature import SIGNATURES
from headrace.optimize.dims import LINEARS, op_dims
from headrace.optimize.records import KernelProfile, PhaseProfile, Target
from headrace.optimize.targets import Tried, find_targets, part_of
from tests.optimize.fakes import CONFIG, HEAD, LAYER, MLP, kernel_profile, phase_profile

GATED = "decoder_layer/mlp_block/gated_linear"


def targets(profile: KernelProfile | PhaseProfile, tried: list[Tried] | None = None) -> list[Target]:
    if isinstance(profile, PhaseProfile):
        profile = kernel_profile(profile)
    return find_targets(profile, CONFIG, tried or [], block_size=32)


def test_the_whole_layer_where_its_parts_hold_little_each() -> None:
    found = targets(phase_profile({LAYER: 5e-3, MLP: 2e-3, GATED: 1.2e-3, HEAD: 1e-3}))
    assert [target.op for target in found][:2] == ["decoder_layer", "mlp_block"]
    first = found[0]
    assert first.end_to_end_gain == pytest.approx(2.0)
    assert first.baseline_s == pytest.approx(2e-3)
    assert (first.max_rows, first.layers) == (8, 3)
    assert "runs at 20 % of its roof" in first.why


def test_the_part_that_holds_most_of_it() -> None:
    found = targets(phase_profile({LAYER: 5e-3, MLP: 4.5e-3, GATED: 4e-3}, phase="prefill", rows=512))
    assert [target.op for target in found] == ["gated_linear", "decoder_layer", "mlp_block"]
    assert found[0].max_rows == 512
    # what is above counts only for what it has beyond the part
    assert found[1].end_to_end_gain == pytest.approx(1 / 0.9)


def test_what_was_tried_in_vain_is_left_out_and_what_won_counts_less() -> None:
    profile = phase_profile({LAYER: 3e-3, HEAD: 2e-3})
    layer, head = targets(profile)
    assert [target.op for target in targets(profile, [Tried(layer, won=False)])] == ["logits_head"]
    assert [target.op for target in targets(profile, [Tried(layer, won=True)])] == [
        "logits_head",
        "decoder_layer",
    ]
    assert targets(profile, [Tried(layer, won=False), Tried(head, won=False)]) == []


def test_uses_of_one_op_are_one_target_but_each_product_is_its_own() -> None:
    paths = {
        "decoder_layer/rms_norm": 1e-3,
        "rms_norm": 0.5e-3,
        "decoder_layer/attention_block/linear.qkv": 2e-3,
        "decoder_layer/mlp_block/linear.down": 1.5e-3,
    }
    found = targets(phase_profile(paths))
    assert [(target.op, target.dims.get("in_features")) for target in found] == [
        ("linear", CONFIG.hidden_size),
        ("rms_norm", None),
        ("linear", CONFIG.intermediate_size),
    ]
    assert found[1].end_to_end_gain == pytest.approx(1 / 0.85)


def test_a_phase_counts_by_its_share_of_the_workload() -> None:
    rare = phase_profile({LAYER: 9e-3}, phase="prefill", rows=64, num_steps=1)
    usual = phase_profile({HEAD: 1e-3}, num_steps=99)
    assert [target.op for target in targets(kernel_profile(rare, usual))] == ["logits_head"]


def test_nothing_without_worth_and_nothing_that_is_no_kernels_op() -> None:
    assert targets(phase_profile({LAYER: 0.1e-3, "embedding": 5e-3, "schedule": 5e-3})) == []


@pytest.mark.parametrize("op", SIGNATURES)
def test_every_op_has_its_dimensions(op: str) -> None:
    for part in LINEARS if op == "linear" else ("",):
        found = op_dims(op, CONFIG, phase="decode", block_size=32, part=part)
        signature = SIGNATURES[op]
        assert set(signature.ints) - {"num_decodes"} <= set(found.dims)
        assert set(found.floats) == set(signature.floats)
        assert all(signature.slot(name).optional for name in found.present)


def test_windows_and_norms_follow_the_model() -> None:
    import dataclasses

    gemma = dataclasses.replace(
        CONFIG, norm_placement="both", sliding_windows=(8, 8, None), qk_norm="head", norm_plus_one=True
    )
    found = op_dims("decoder_layer", gemma, phase="prefill", block_size=32)
    assert (found.dims["window"], found.dims["max_window"]) == (0, 8)
    assert {"post_attention_norm", "q_norm", "chunks"} <= set(found.present)
    assert (found.floats["norm_offset"], found.floats["qk_norm_eps"]) == (0.0, gemma.norm_eps)
    assert "residual" not in op_dims("mlp_block", gemma, phase="decode", block_size=32).present
    same = dataclasses.replace(CONFIG, sliding_windows=(16, 16, 16))
    assert op_dims("attention", same, phase="decode", block_size=32).dims["window"] == 16


def test_parts_are_read_from_paths() -> None:
    assert part_of("a/b/linear.down") == "down"
    assert part_of("a.x/linear.o") == "out"
    assert part_of("a.x/rms_norm") == ""


def test_targets_survive_their_file() -> None:
    (target, *_) = targets(phase_profile({LAYER: 5e-3}))
    assert msgspec.json.decode(msgspec.json.encode(target), type=Target) == target
