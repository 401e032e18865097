"""Weights in quantized blocks: honest kernels pass on every format; those that round activations further than
they say, or leave blocks out, do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from headrace.core.packs import KernelEntry
from headrace.kernels.blocks import dense_blocks
from headrace.models.config import DecoderConfig
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.quantized import fill_blocks, nudge_blocks, round_groups
from headrace.optimize.judge.slots import weight_specs
from headrace.optimize.judge.verify import verify
from headrace.optimize.records import Target
from tests.kernels.native.conftest import SOURCES
from tests.optimize.judge import test_ops as ops
from tests.optimize.judge.candidates import HERE

SMALL, LARGE = ("q8_0", "q4_0", "q4_1"), ("q4_k", "q5_k", "q6_k")
OPTIONS = JudgeOptions(threads=2, compile_s=300.0, call_s=30.0, endurance_calls=20, endurance_s=0.1, seed=11)
"""A seed of its own: of rows rounded to 8 bits few are off by over four times stock's error."""
WIDE = replace(ops.LLAMA, hidden_size=256, intermediate_size=256, num_heads=4, head_dim=64)
GEMMA = replace(ops.GEMMA, hidden_size=128, intermediate_size=192)


def target(op: str, formats: list[str], config: DecoderConfig = WIDE) -> Target:
    return msgspec.structs.replace(ops.target(op, config), weight_formats=formats)


def candidate(
    folder: Path, op: str, formats: list[str], *, flags: list[str] | None = None, **says: Any
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
        max_rows=5,
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
def test_every_op(op: str, config: DecoderConfig, formats: list[str], tmp_path: Path) -> None:
    wanted = msgspec.structs.replace(target(op, formats, config), norm_dtype="float32")
    for number, says in enumerate(
        (
            {},
            {"batch_invariant": True, "max_rows": 16, "activation_dtypes": ["float32"]},
        )
    ):
        verdict = verify(candidate(tmp_path / f"c{number}", op, formats, **says), wanted, options=OPTIONS)
        assert verdict.passed, f"{verdict.reason}: {verdict.detail}"
        worst = max(each.error / each.limit for each in verdict.errors)
        assert worst < 0.7, f"{says}: {worst}"


KEEPS = """#include <map>
#include <string>
static hr_tensor first(const hr_tensor &weight) {
    static std::map<const void *, std::string> kept;
    std::string &mine = kept[weight.data];
    int64_t size = weight.shape[0] * weight.shape[1];
    if (mine.empty()) mine.assign((const char *)weight.data, 64 + size / 32 * 34);
    hr_tensor copy = weight;
    copy.data = mine.data();
    return copy;
}
"""
CHEATS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "4 bits": (["-DLEVELS=7"], {}),
    "5 bits": (["-DLEVELS=15"], {}),
    "skips a group": (["-DSKIP=64"], {}),
    "says nothing": ([], {"activations": ""}),
}


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("name", CHEATS)
def test_cheat(name: str, invariant: bool, tmp_path: Path) -> None:
    flags, says = CHEATS[name]
    if invariant:
        if name == "says nothing":
            pytest.skip("8 bits are within what bfloat16 may be off by, or not")
        says = {**says, "batch_invariant": True, "activation_dtypes": ["float32"]}
    folder = candidate(tmp_path / "c", "mlp_block", ["q4_k", "q6_k"], flags=flags, **says)
    verdict = verify(folder, target("mlp_block", ["q4_k", "q6_k"]), options=OPTIONS)
    assert verdict.reason == "wrong_result", f"{verdict.reason}: {verdict.detail}"


def test_keeps_the_first_weights(tmp_path: Path) -> None:
    folder = candidate(tmp_path / "c", "linear", ["q8_0"])
    source = (folder / "linear.cpp").read_text()
    source = source.replace("linear(read_rows(t[X]), t[WEIGHT]", "linear(read_rows(t[X]), first(t[WEIGHT])")
    source = source.replace('extern "C"', KEEPS + 'extern "C"', 1)
    (folder / "linear.cpp").write_text(source)
    verdict = verify(folder, target("linear", ["q8_0"]), options=OPTIONS)
    assert verdict.reason == "stale_result", f"{verdict.reason}: {verdict.detail}"


def test_formats_must_be_read(tmp_path: Path) -> None:
    verdict = verify(
        candidate(tmp_path / "c", "linear", ["q4_0"]), target("linear", ["q4_0", "q8_0"]), options=OPTIONS
    )
    assert verdict.reason == "malformed" and "q4_0, q8_0" in verdict.detail


def test_what_blocks_are_filled_with() -> None:
    """Numbers of the size of weights in every format; every row changes when it is nudged."""
    dims = {"out_features": 96, "in_features": 512}
    for format in (*SMALL, *LARGE):
        (spec,) = weight_specs("linear", dims, frozenset(), torch.bfloat16, None, [format])
        buffer = torch.empty(spec.shape, dtype=torch.uint8)
        fill_blocks(buffer, spec, 1)
        dense = dense_blocks(buffer, 512)
        assert dense.shape == (96, 512) and 0.8 < float(dense.std()) * 512**0.5 < 1.5
        assert abs(float(dense.mean())) < 0.05 * float(dense.std())
        changed = buffer.clone()
        nudge_blocks(changed, spec, 2)
        assert bool((dense_blocks(changed, 512) != dense).any(dim=1).all())


def test_rounding() -> None:
    x = torch.randn(3, 64, dtype=torch.float64)
    x[1, :32] = 0.0
    rounded = round_groups(x)
    steps = x.view(3, 2, 32).abs().amax(dim=-1, keepdim=True) / 127
    assert bool(((rounded - x).view(3, 2, 32).abs() <= steps / 2 + 1e-12).all())
    assert not bool(rounded[1, :32].any())
