"""The pack in packs/cpu, put on small random models of every family."""

from __future__ import annotations

import hashlib
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from headrace.core.packs import KernelEntry, PackConditions, PackManifest
from headrace.kernels.native.pack import load_pack
from headrace.kernels.table import OpTable
from headrace.kernels.weights import PackedLinear
from headrace.models.decoder import Decoder
from headrace.models.load import load_model
from tests.kernels.native.layers import in_float64, wide_linear, wide_norm
from tests.models.tiny import make_tiny

SOURCES = Path(__file__).parents[2] / "packs" / "cpu"
OPS = tuple(op for op in ("decoder_layer", "rms_norm", "logits_head") if (SOURCES / f"{op}.cpp").exists())

FORMATS = ("bfloat16", "q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k")


def write_pack(folder: Path, ops: tuple[str, ...] = OPS) -> Path:
    """A pack of the kernels in packs/cpu for any model, not signed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (*SOURCES.glob("*.h"), *(SOURCES / f"{op}.cpp" for op in ops)):
        shutil.copyfile(path, folder / path.name)
    manifest = PackManifest(
        format=1,
        name="cpu",
        kind="kernels",
        kernels=[_entry(op) for op in ops],
        conditions=PackConditions(),
        author="tests",
        round_id="",
        licence="Apache-2.0",
        created="2026-01-01T00:00:00Z",
        files={path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())},
    )
    (folder / "pack.json").write_bytes(msgspec.json.encode(manifest))
    return folder


def _entry(op: str) -> KernelEntry:
    return KernelEntry(
        op=op,
        source=f"{op}.cpp",
        flags=["-ffp-contract=off"],
        phases=["decode", "prefill"],
        max_rows=0,
        activation_dtypes=["float32"],
        weight_formats=list(FORMATS),
        batch_invariant=True,
        activations="int8",
    )


@dataclass
class Packed:
    """A model on stock's table, on the pack's, and in float64 on the reference's.

    What the pack's layer does not cover fails here instead of falling through.
    """

    stock: Decoder
    table: OpTable
    wide: Decoder


def load_packed(model: Path, pack: Path, built: Path, quantization: str = "none") -> Packed:
    """With ``quantization`` "int8" weights are blocks of Q8_0."""
    decoder = load_model(
        model,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        quantization=quantization,
        pack_formats=frozenset() if quantization == "none" else frozenset(FORMATS),
    ).model
    assert isinstance(decoder, Decoder)
    base = decoder.ops.replace(decoder_layer=_refuse)
    table = load_pack(pack, base, decoder, build_folder=built)
    wide = Decoder(
        decoder.config,
        OpTable.reference(),
        embedding=_dense(decoder._embedding).double(),
        layers=[in_float64(layer) for layer in decoder.weights.layers],
        final_norm=wide_norm(decoder.weights.final_norm),
        head=wide_linear(decoder.weights.head),
    )
    return Packed(decoder, table, wide)


def load_tiny(
    family: str, folder: Path, pack: Path, built: Path, *, quantization: str = "none", **fields: Any
) -> Packed:
    made = make_tiny(family, folder / family, dtype=torch.bfloat16, **fields)
    return load_packed(made, pack, built, quantization)


def _dense(weight: Tensor | PackedLinear) -> Tensor:
    return weight.dense() if isinstance(weight, PackedLinear) else weight


def _refuse(*_: Any) -> Tensor:
    raise AssertionError("the kernel does not cover this call")
