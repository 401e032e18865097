"""packs/cpu's last norm and output head, as models of every family call them: near float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from headrace.kernels.native.coverage import native_ops
from tests.models.tiny import FAMILIES
from tests.packs.pack import load_tiny, write_pack
from tests.packs.test_layer import error, seeded


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pack(tmp_path_factory.mktemp("packs") / "cpu")


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_norm_and_head_are_near_float64(
    family: str, quantization: str, pack: Path, built: Path, tmp_path: Path
) -> None:
    packed = load_tiny(family, tmp_path, pack, built, quantization=quantization)
    weights, wide, softcap = packed.stock.weights, packed.wide.weights, packed.stock.config.final_softcap
    ops = native_ops(packed.table)
    assert ops["rms_norm"].covers(weights.final_norm) and ops["logits_head"].covers(weights.head)
    for rows in (1, 8, 17, 150):
        x = torch.randn(rows, packed.stock.config.hidden_size, generator=seeded(rows))
        with torch.inference_mode():
            normed = packed.table.rms_norm(x, weights.final_norm)
            logits = packed.table.logits_head(x, weights.head, softcap)
            right_norm = packed.wide.ops.rms_norm(x.double(), wide.final_norm)
            right_logits = packed.wide.ops.logits_head(x.double(), wide.head, softcap)
        assert error(normed, right_norm) < 1e-6, rows
        # the rows are rounded: to bfloat16, or to 8 bits in groups
        assert error(logits, right_logits) < (0.01 if quantization == "none" else 0.02), rows
