"""Plain, right kernels for every op of the table pass, in decode and in prefill, on several families."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from headrace.core.packs import KernelEntry
from headrace.kernels.native.signature import SIGNATURES
from headrace.models.config import DecoderConfig, RopeSpec
from headrace.optimize.dims import op_dims
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.verify import verify
from headrace.optimize.records import CallShape, Target
from tests.kernels.native.conftest import SOURCES

LLAMA = DecoderConfig(
    family="llama",
    vocab_size=384,
    hidden_size=96,
    intermediate_size=160,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=2048,
    norm_eps=1e-5,
    attention_scale=0.25,
    ropes=(RopeSpec("default", 10000.0, 16),),
    layer_ropes=(0, 0, 0),
    sliding_windows=(None, None, None),
)
GEMMA = replace(
    LLAMA,
    family="gemma3_text",
    activation="gelu_tanh",
    norm_placement="both",
    norm_plus_one=True,
    qk_norm="head",
    sliding_windows=(48, None, 48),
    final_softcap=30.0,
)
OLMO = replace(LLAMA, family="olmo2", norm_placement="post", qk_norm="projection", qkv_bias=True)
OPTIONS = JudgeOptions(threads=2, compile_s=300.0, call_s=30.0, endurance_calls=100, endurance_s=0.3)
COMPOSITES = ("attention", "attention_block", "decoder_layer")
CASES = [(op, LLAMA) for op in SIGNATURES] + [(op, one) for op in COMPOSITES for one in (GEMMA, OLMO)]


def target(op: str, config: DecoderConfig) -> Target:
    fixed = op_dims(op, config, phase="prefill", block_size=16, part="down")
    shapes = [
        CallShape(phase=phase, rows=rows, context=40, calls_per_step=1.0, dtype=dtype, dims=fixed.dims)
        for phase, rows, dtype in (("prefill", 12, "bfloat16"), ("decode", 1, "float32"))
    ]
    return Target(
        op=op,
        model="none",
        phase="prefill",
        weight_dtype="bfloat16",
        activation_dtypes=["float32", "bfloat16"],
        max_rows=12,
        shapes=shapes,
        dims=fixed.dims,
        floats=fixed.floats,
        present=fixed.present,
        layers=fixed.layers,
        baseline_s=1e-4,
        end_to_end_gain=1.1,
        why="",
    )


@pytest.mark.parametrize(("op", "config"), CASES, ids=lambda each: getattr(each, "family", each))
def test_plain_kernel_passes(op: str, config: DecoderConfig, tmp_path: Path) -> None:
    for name in ("plain.h", f"{op}.cpp"):
        shutil.copyfile(SOURCES / name, tmp_path / name)
    entry = KernelEntry(op=op, source=f"{op}.cpp", phases=["decode", "prefill"], max_rows=12)
    (tmp_path / "kernel.json").write_bytes(msgspec.json.encode(entry))
    verdict = verify(tmp_path, target(op, config), options=OPTIONS)
    assert verdict.passed, f"{verdict.reason}: {verdict.detail}"
    assert len(verdict.errors) >= 6
