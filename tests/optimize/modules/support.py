"""Modules in files, and candidates and packs made of them without the loop."""

from __future__ import annotations

import textwrap
from pathlib import Path

import msgspec

from headrace.core.packs import PackConditions
from headrace.optimize.digest import candidate_digest
from headrace.optimize.keys import Keys
from headrace.optimize.loop import write_candidate
from headrace.optimize.modules.source import OpenModule, open_module
from headrace.optimize.modules.trace import describe
from headrace.optimize.packing import Winner, make_pack
from headrace.optimize.proposal import CandidateSource
from headrace.optimize.proposers.module_search import ModuleSearch
from headrace.optimize.records import CallShape, Measurement, ModuleCall, Ratio, Target, Verdict

EXAMPLES = Path(__file__).parent / "examples"
FIVE = (
    "rms_norm.py:RMSNorm",
    "softmax.py:CappedSoftmax",
    "mlp.py:MLP",
    "conv.py:Stem",
    "attention.py:Attention",
)
HEADER = """
import torch
import torch.nn.functional as F
from torch import nn

"""


def write_module(folder: Path, text: str) -> str:
    """A file of a user's with torch, F and nn imported; the name of its class Model."""
    path = folder / "user.py"
    path.write_text(HEADER + textwrap.dedent(text), encoding="utf-8")
    return f"{path}:Model"


def target_of(name: str, call: ModuleCall) -> Target:
    main = next(slot for slot in call.slots if slot.role == "input")
    shape = CallShape(phase="prefill", rows=8, context=0, calls_per_step=1.0, dtype=main.dtype, dims={})
    return Target(
        op="module",
        model="user",
        phase="prefill",
        weight_dtype=main.dtype,
        activation_dtypes=[main.dtype],
        max_rows=8,
        shapes=[shape],
        dims={},
        floats={},
        present=[],
        layers=1,
        baseline_s=1e-4,
        end_to_end_gain=2.0,
        why="",
        module=name,
        call=call,
    )


def opened(name: str) -> tuple[OpenModule, Target]:
    """The module in this process: the tests' own files."""
    found = open_module(name)
    return found, target_of(name, describe(found))


def first_candidate(target: Target, folder: Path) -> CandidateSource:
    """The search's first, laid out in ``folder``."""
    import random

    source = ModuleSearch(2).propose(target, None, [], random.Random(0))
    assert source is not None
    write_candidate(folder, source, target)
    return source


def pack_of(folder: Path, target: Target, keys: Keys) -> Path:
    """A signed pack of the search's first candidate, with evidence that nobody measured."""
    candidate = folder / "candidate"
    source = first_candidate(target, candidate)
    digest = candidate_digest(candidate)
    verdict = Verdict(
        candidate="001", digest=digest, passed=True, reason="ok", detail="", seconds=0.0, sandbox="none"
    )
    once = Ratio(median=2.0, low=1.9, high=2.1, pairs=9, baseline_s=2.0, candidate_s=1.0)
    measurement = Measurement(
        candidate="001",
        digest=digest,
        alone={"prefill/8": once},
        end_to_end={"forward": once, "again": once},
        agreement="",
        won=True,
        detail="",
    )
    winner = Winner(candidate, source.entry, target, verdict, measurement, "search")
    pack = folder / "pack"
    pack.mkdir()
    conditions = PackConditions(dtype=target.weight_dtype, shapes={"module": 1})
    make_pack(pack, winner, name="user", conditions=conditions, round_id="r", keys=keys)
    return pack


def rewritten(path: Path, record: msgspec.Struct) -> None:
    path.write_bytes(msgspec.json.encode(record))
