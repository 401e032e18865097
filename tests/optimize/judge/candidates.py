"""Candidates for the judge's tests: an rms_norm, honest or wrong in one way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.packs import KernelEntry
from headrace.optimize.records import CallShape, Target

HERE = Path(__file__).parent
SIZE = 576


def target(**changes: Any) -> Target:
    dims = {"size": SIZE}
    shape = CallShape(phase="decode", rows=1, context=0, calls_per_step=61.0, dtype="float32", dims=dims)
    whole = Target(
        op="rms_norm",
        model="none",
        phase="decode",
        weight_dtype="bfloat16",
        activation_dtypes=["float32", "bfloat16"],
        max_rows=8,
        shapes=[shape],
        dims=dims,
        floats={"eps": 1e-5, "offset": 0.0},
        present=[],
        layers=30,
        baseline_s=1e-5,
        end_to_end_gain=1.1,
        why="",
    )
    return msgspec.structs.replace(whole, **changes)


def candidate(folder: Path, text: Path, /, **changes: Any) -> Path:
    """``folder`` with the source in ``text`` as a candidate."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(text, folder / "kernel.cpp")
    shutil.copyfile(HERE / "cheats" / "common.h", folder / "common.h")
    entry = msgspec.structs.replace(KernelEntry(op="rms_norm", source="kernel.cpp"), **changes)
    (folder / "kernel.json").write_bytes(msgspec.json.encode(entry))
    return folder
