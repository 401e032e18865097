"""The dispatch table: swapping ops, composites over parts, provenance."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.core.errors import UsageError
from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV
from headrace.kernels.table import OpTable
from headrace.kernels.weights import AttentionSpec, AttentionWeights, LayerWeights, MLPWeights, Norm

HIDDEN, INNER, HEADS, KV_HEADS, DIM = 48, 80, 4, 2, 16
ENTRIES = [BatchEntry(30, 1, [5, 2]), BatchEntry(3, 1, [6]), BatchEntry(20, 25, [1, 4, 3])]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make_layer(ops: OpTable, dtype: torch.dtype, placement: str, qk_norm: str) -> LayerWeights:
    def pack(rows: int, columns: int, seed: int, **hints: Any) -> Any:
        # bfloat16 values in every dtype, so that all tables hold the same weights
        weight = (random(rows, columns, seed=seed) * columns**-0.5).bfloat16()
        return ops.pack_linear(weight.to(dtype), **hints)

    def norm(size: int, seed: int) -> Norm:
        return Norm(random(size, seed=seed).to(dtype) * 0.1 + 1.0, 1e-5)

    q_norm = k_norm = None
    if qk_norm == "head":
        q_norm, k_norm = norm(DIM, 11), norm(DIM, 12)
    if qk_norm == "full":
        q_norm, k_norm = norm(HEADS * DIM, 11), norm(KV_HEADS * DIM, 12)
    pre, post = placement in ("pre", "both"), placement in ("post", "both")
    return LayerWeights(
        AttentionWeights(
            pack((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, 1),
            pack(HIDDEN, HEADS * DIM, 2),
            AttentionSpec(HEADS, KV_HEADS, DIM, DIM, DIM**-0.5),
            q_norm,
            k_norm,
            qk_norm == "full",
        ),
        MLPWeights(pack(2 * INNER, HIDDEN, 3, gated=True), pack(HIDDEN, INNER, 4)),
        norm(HIDDEN, 5) if pre else None,
        norm(HIDDEN, 6) if post else None,
        norm(HIDDEN, 7) if pre else None,
        norm(HIDDEN, 8) if post else None,
    )


def run_layer(
    ops: OpTable, layer: LayerWeights, dtype: torch.dtype, entries: list[BatchEntry] = ENTRIES
) -> torch.Tensor:
    batch = AttentionBatch.build(entries, 16)
    kv = LayerKV.allocate(7, 16, KV_HEADS, DIM, dtype=dtype)
    kv.keys.copy_(random(*kv.keys.shape, seed=20).bfloat16())
    kv.values.copy_(random(*kv.values.shape, seed=21).bfloat16())
    angles = batch.positions[:, None, None] * torch.linspace(0.1, 1, DIM // 2)
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    x = random(batch.num_tokens, HIDDEN, seed=22).bfloat16().to(dtype)
    if layer.mlp.down.few is not None and batch.num_tokens <= 4:
        x, cos, sin = x.float(), cos.float(), sin.float()
    return ops.decoder_layer(x, layer, cos, sin, kv, batch)


@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
@pytest.mark.parametrize("placement", ["pre", "post", "both"])
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [
        (torch.float32, "none", 2e-6),
        (torch.bfloat16, "none", 2e-2),
        (torch.bfloat16, "int8", 5e-2),
    ],
)
def test_layer(dtype: torch.dtype, quantization: str, tolerance: float, placement: str, qk_norm: str) -> None:
    reference, stock = OpTable.reference(), OpTable.stock("cpu", dtype, quantization)
    wide = make_layer(reference, torch.float64, placement, qk_norm)
    layer = make_layer(stock, dtype, placement, qk_norm)
    for entries in (ENTRIES, ENTRIES[:1], ENTRIES[:2]):
        expected = run_layer(reference, wide, torch.float64, entries)
        out = run_layer(stock, layer, dtype, entries)
        assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()


def test_reference_reads_weights_that_stock_packed() -> None:
    """A swap back to the reference needs no reload."""
    stock = OpTable.stock("cpu", torch.bfloat16)
    layer = make_layer(stock, torch.bfloat16, "pre", "none")
    out = run_layer(OpTable.reference(), layer, torch.bfloat16)
    other = run_layer(stock, layer, torch.bfloat16)
    assert (out - other).float().abs().max() < 3e-2 * out.float().abs().max()


def test_a_composite_calls_its_parts_through_the_table() -> None:
    calls = []
    base = OpTable.reference()

    def counted(x: torch.Tensor, norm: Norm) -> torch.Tensor:
        calls.append(norm)
        return base.rms_norm(x, norm)

    swapped = base.replace(source="pack-1", rms_norm=counted)
    layer = make_layer(swapped, torch.float64, "both", "head")
    assert torch.equal(run_layer(swapped, layer, torch.float64), run_layer(base, layer, torch.float64))
    assert len(calls) == 6
    assert swapped.provenance["rms_norm"] == "pack-1"
    assert swapped.provenance["linear"] == base.provenance["rms_norm"] == "reference"


def test_a_composite_that_is_given_wins_over_its_parts() -> None:
    def doubled(ops: OpTable, x: torch.Tensor, weights: MLPWeights, residual: Any = None) -> torch.Tensor:
        return x * 2 if residual is None else residual + x * 2

    swapped = OpTable.reference().replace(mlp_block=doubled)
    layer = make_layer(swapped, torch.float64, "pre", "none")
    out = run_layer(swapped, layer, torch.float64)
    assert not torch.equal(out, run_layer(OpTable.reference(), layer, torch.float64))


def test_unknown_op() -> None:
    with pytest.raises(UsageError, match="softmaxx"):
        OpTable.reference().replace(softmaxx=torch.softmax)


def test_provenance_names_every_op() -> None:
    table = OpTable.stock("cpu", torch.bfloat16)
    assert set(table.provenance) == set(OpTable.names())
    assert table.provenance["attention"] == "stock"
    assert table.provenance["decoder_layer"] == "reference"
