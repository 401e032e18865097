"""Weights in quantized blocks: honest kernels pass on every format, with rounded activations and without; those
that round them further, or leave blocks out, do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from headrace.core.packs import KernelEntry
from headrace.kernels.blocks import dense_blocks
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.problem import TensorSpec
from headrace.optimize.judge.quantized import fill_blocks, nudge_blocks, round_groups
from headrace.optimize.judge.slots import weight_specs
from headrace.optimize.judge.verify import verify
from headrace.optimize.records import Target
from tests.kernels.native.conftest import SOURCES
from tests.optimize.judge import test_ops as ops
from tests.optimize.judge.candidates import HERE

SMALL, LARGE = ("q8_0", "q4_0", "q4_1"), ("q4_k", "q5_k", "q6_k")
OPTIONS = JudgeOptions(threads=2, compile_s=300.0, call_s=30.0, endurance_calls=60, endurance_s=0.3)
WIDE = replace(ops.LLAMA, hidden_size=256, intermediate_size=512, num_heads=4, head_dim=64)
GEMMA = replace(ops.GEMMA, hidden_size=128, intermediate_size=192)


def target(op: str, formats: list[str], config: ops.DecoderConfig = WIDE) -> Target:
    return msgspec.structs.replace(ops.target(op, config), weight_formats=formats)


def candidate(
    folder: Path, op: str, formats: list[str], *, flags: list[str] | None = None, **says: object
) -> Path:
    """A plain kernel for ``op`` that reads blocks."""
    folder.mkdir(exist_ok=True)
    plain = (SOURCES / "plain.h").read_text()
    head, rest = plain.split("static Rows linear(", 1)
    body, after = rest.split("\n}\n", 1)
    own = (HERE / "blocks" / "blocks.h").read_text().replace('#include "plain.h"\n', "")
    (folder / "plain.h").write_text(f"{head}static Rows plain_linear({body}\n}}\n{own}\n{after}")
    (folder / f"{op}.cpp").write_bytes((SOURCES / f"{op}.cpp").read_bytes())
    entry = KernelEntry(
        op=op,
        source=f"{op}.cpp",
        phases=["decode", "prefill"],
        max_rows=12,
        weight_formats=formats,
        flags=flags or [],
        activations="int8",
    )
    entry = msgspec.structs.replace(entry, **says)
    (folder / "kernel.json").write_bytes(msgspec.json.encode(entry))
    return folder


@pytest.mark.parametrize("format", (*SMALL, *LARGE))
def test_every_format(format: str, tmp_path: Path) -> None:
    folder = candidate(tmp_path / "c", "linear", [format])
    verdict = verify(folder, target("linear", [format]), options=OPTIONS)
    assert verdict.passed, f"{verdict.reason}: {verdict.detail}"


@pytest.mark.parametrize(
    ("op", "config", "formats"),
    [
        ("gated_linear", WIDE, ["q4_0"]),
        ("logits_head", WIDE, ["q6_k"]),
        ("mlp_block", WIDE, ["q4_k", "q6_k"]),
        ("attention_block", GEMMA, ["q8_0"]),
        ("decoder_layer", WIDE, ["q4_k", "q6_k"]),
        ("decoder_layer", GEMMA, ["q8_0"]),
        ("rms_norm", GEMMA, ["q8_0"]),
    ],
    ids=lambda each: getattr(each, "family", each) if not isinstance(each, list) else "+".join(each),
)
def test_every_op(op: str, config: ops.DecoderConfig, formats: list[str], tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(target(op, formats, config), norm_dtype="float32")
    for number, says in enumerate(
        (
            {},
            {"batch_invariant": True, "max_rows": 0, "activation_dtypes": ["float32"]},
        )
    ):
        verdict = verify(candidate(tmp_path / f"c{number}", op, formats, **says), wanted, options=OPTIONS)
        assert verdict.passed, f"{verdict.reason}: {verdict.detail}"
        worst = max(each.error / each.limit for each in verdict.errors)
        assert worst < 0.7, f"{says}: {worst}"
