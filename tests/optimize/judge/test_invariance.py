"""Kernels that say that a row's bits depend on nothing else: each way in which they may is found."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest

from headrace.core.packs import KernelEntry
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.verify import verify
from tests.kernels.native.conftest import SOURCES
from tests.optimize.judge import test_ops as ops

OPTIONS = JudgeOptions(threads=2, compile_s=300.0, call_s=30.0, endurance_calls=20, endurance_s=0.1)
NUDGE = "((float *)t[OUT].data)[i] *= 1.0000005f"
LINEAR_SLOTS = "enum { X, WEIGHT, BIAS, RESIDUAL, OUT };"
LAYER_SLOTS = (
    "enum { X, SLOT_MAPPING = 15, LENS = 17, CHUNKS = 18, OUT = 25 };  // block_size, num_decodes, …"
)
CHEATS = {
    # op, what makes a row's bits depend on it
    "rows": ("linear", "t[X].shape[0] > 4"),
    "threads": ("linear", "call->threads == 1"),
    "place": ("linear", "i / t[OUT].shape[1] == 6"),
    "company": ("linear", "((float *)t[X].data)[0] > 0.5f"),
    "decodes": ("decoder_layer", "i / t[OUT].shape[1] < call->ints[1]"),
    "chunking": (
        "decoder_layer",
        "t[CHUNKS].data && i / t[OUT].shape[1] == ((int64_t *)t[CHUNKS].data)[0] + 3",
    ),
    "blocks": ("decoder_layer", "((int64_t *)t[SLOT_MAPPING].data)[i / t[OUT].shape[1]] < 64"),
}


def candidate(folder: Path, op: str, condition: str, **says: object) -> Path:
    """The plain kernel; outputs for which ``condition`` holds are off by one bit or so."""
    folder.mkdir()
    for name in ("plain.h", f"{op}.cpp"):
        shutil.copyfile(SOURCES / name, folder / name)
    slots = LINEAR_SLOTS if op == "linear" else LAYER_SLOTS
    source = (
        f'#define hr_run plain_run\n#include "{op}.cpp"\n#undef hr_run\n'
        f'extern "C" int hr_run(const hr_call *call) {{\n    {slots}\n'
        "    const hr_tensor *t = call->tensors;\n    int said = plain_run(call);\n"
        "    for (int64_t i = 0; i < t[OUT].shape[0] * t[OUT].shape[1]; i++)\n"
        f"        if ({condition}) {NUDGE};\n    return said;\n}}\n"
    )
    if op == "linear":
        source = source.replace('#include "linear.cpp"', 'namespace plain {\n#include "linear.cpp"\n}')
        source = source.replace("= plain_run", "= plain::plain_run")
        source = '#include "plain.h"\n' + source
    else:
        source = source.replace(f'#include "{op}.cpp"', f'namespace plain {{\n#include "{op}.cpp"\n}}')
        source = source.replace("= plain_run", "= plain::plain_run")
        source = '#include "plain.h"\n' + source
    (folder / "kernel.cpp").write_text(source)
    entry = KernelEntry(
        op=op,
        source="kernel.cpp",
        phases=["decode", "prefill"],
        max_rows=24,
        activation_dtypes=["float32"],
        batch_invariant=True,
    )
    entry = msgspec.structs.replace(entry, **says)
    (folder / "kernel.json").write_bytes(msgspec.json.encode(entry))
    return folder


@pytest.mark.parametrize("name", CHEATS)
def test_cheat(name: str, tmp_path: Path) -> None:
    op, condition = CHEATS[name]
    folder = candidate(tmp_path / "c", op, condition)
    verdict = verify(folder, ops.target(op, ops.LLAMA), options=OPTIONS)
    assert verdict.reason == "not_invariant", f"{verdict.reason}: {verdict.detail}"
    assert "other bits" in verdict.detail


@pytest.mark.parametrize("op", ["linear", "decoder_layer"])
def test_what_does_not_say_so_need_not_be(op: str, tmp_path: Path) -> None:
    condition = CHEATS["rows" if op == "linear" else "decodes"][1]
    folder = candidate(tmp_path / "c", op, condition, batch_invariant=False, max_rows=4)
    target = ops.target(op, ops.LLAMA)
    target = msgspec.structs.replace(target, activation_dtypes=["float32"])
    verdict = verify(folder, target, options=OPTIONS)
    assert verdict.passed, f"{verdict.reason}: {verdict.detail}"


@pytest.mark.parametrize("op", ["attention", "rope", "rms_norm", "attention_block"])
def test_honest(op: str, tmp_path: Path) -> None:
    for name in ("plain.h", f"{op}.cpp"):
        shutil.copyfile(SOURCES / name, tmp_path / name)
    entry = KernelEntry(
        op=op, source=f"{op}.cpp", phases=["decode", "prefill"], max_rows=0, batch_invariant=True
    )
    (tmp_path / "kernel.json").write_bytes(msgspec.json.encode(entry))
    verdict = verify(tmp_path, ops.target(op, ops.GEMMA), options=OPTIONS)
    assert verdict.passed, f"{verdict.reason}: {verdict.detail}"
    assert "the same bits in any company" in verdict.detail


def test_decodes_alone(tmp_path: Path) -> None:
    """A kernel that covers no prefill is looked at in decodes."""
    target = msgspec.structs.replace(ops.target("decoder_layer", ops.LLAMA), phase="decode")
    honest = candidate(tmp_path / "honest", "decoder_layer", "false", phases=["decode"])
    verdict = verify(honest, target, options=OPTIONS)
    assert verdict.passed, f"{verdict.reason}: {verdict.detail}"
    cheat = candidate(tmp_path / "cheat", "decoder_layer", "t[X].shape[0] > 2", phases=["decode"])
    assert verify(cheat, target, options=OPTIONS).reason == "not_invariant"
