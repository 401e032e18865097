"""Packed products against float64, for every form and number of rows."""

from __future__ import annotations

import pytest
import torch

from headrace.core.errors import UsageError
from headrace.kernels import linear
from headrace.kernels.table import OpTable
from headrace.kernels.weights import PackedLinear

ROWS = (1, 3, 4, 5, 31, 32, 77)
SHAPES = ((96, 64), (33, 17), (130, 576))


def weights(shape: tuple[int, int], dtype: torch.dtype, bias: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    made = [torch.randn(shape, generator=generator).mul_(shape[1] ** -0.5).to(dtype)]
    if bias:
        made.append(torch.randn(shape[0], generator=generator).to(dtype))
    return made


def rows_of(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert out.shape == expected.shape
    assert (out.double() - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "copies", "tolerance"),
    [(torch.float32, True, 1e-6), (torch.bfloat16, True, 6e-3), (torch.bfloat16, False, 6e-3)],
)
def test_linear(
    dtype: torch.dtype, copies: bool, tolerance: float, shape: tuple[int, int], residual: bool, bias: bool
) -> None:
    ops = OpTable.stock("cpu", dtype, decode_copies=copies)
    made = weights(shape, dtype, bias)
    packed = ops.pack_linear(*made)
    for count in ROWS:
        x = rows_of(count, shape[1], dtype)
        rest = rows_of(count, shape[0], dtype) if residual else None
        expected = x.double() @ made[0].double().T
        if bias:
            expected += made[1].double()
        if rest is not None:
            expected += rest.double()
        kept = None if rest is None else rest.clone()
        out = ops.linear(x, packed, rest)
        assert out.dtype is dtype
        assert_close(out, expected, tolerance)
        if rest is not None and kept is not None:
            assert torch.equal(rest, kept)


def test_few_rows_in_float32_are_exact() -> None:
    """The half-precision pack holds these bfloat16 weights exactly, and adds in float32."""
    ops = OpTable.stock("cpu", torch.bfloat16)
    (weight,) = weights((64, 96), torch.bfloat16)
    packed = ops.pack_linear(weight)
    x = rows_of(2, 96, torch.float32)
    assert_close(ops.linear(x, packed), x.double() @ weight.double().T, 1e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_gated_linear(dtype: torch.dtype, tolerance: float, bias: bool, activation: str) -> None:
    stock, reference = OpTable.stock("cpu", dtype), OpTable.reference()
    made = weights((96, 64), dtype, bias)
    packed = stock.pack_linear(*made, gated=True)
    plain = reference.pack_linear(*(tensor.double() for tensor in made))
    for count in ROWS:
        x = rows_of(count, 64, dtype)
        expected = reference.gated_linear(x.double(), plain, activation)
        assert_close(stock.gated_linear(x, packed, activation), expected, tolerance)
        assert_close(stock.linear(x, packed), reference.linear(x.double(), plain), 6e-3)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize(
    ("dtype", "quantization", "tolerance"),
    [(torch.float32, "none", 1e-6), (torch.bfloat16, "none", 6e-3), (torch.bfloat16, "int8", 3e-2)],
)
def test_logits_head(dtype: torch.dtype, quantization: str, tolerance: float, softcap: float | None) -> None:
    ops = OpTable.stock("cpu", dtype, quantization)
    (weight,) = weights((160, 64), dtype)
    head = ops.pack_linear(weight, few_rows=True)
    for count in ROWS:
        hidden = rows_of(count, 64, dtype)
        expected = hidden.double() @ weight.double().T
        if softcap is not None:
            expected = softcap * torch.tanh(expected / softcap)
        out = ops.logits_head(hidden, head, softcap)
        assert out.dtype is torch.float32
        assert_close(out, expected, tolerance)


@pytest.mark.parametrize(("quantization", "copies"), [("none", True), ("none", False), ("int8", True)])
def test_logits_are_not_rounded_to_bfloat16(quantization: str, copies: bool) -> None:
    """Two rows that differ in the last bit of bfloat16 keep their order."""
    ops = OpTable.stock("cpu", torch.bfloat16, quantization, decode_copies=copies)
    weight = torch.ones(32, 64)
    weight[7] += 2**-7
    head = ops.pack_linear(weight.bfloat16(), few_rows=True)
    hidden = torch.full((2, 64), 0.25, dtype=torch.bfloat16)
    hidden[:, 0] = 17.0
    logits = ops.logits_head(hidden, head)
    held = head.dense().double()
    if head.weight is not None and head.scales is not None:
        held = head.weight.double() * head.scales.double()[:, None]
    assert logits[0, 7] > logits[0, 6]
    assert (logits.double() - hidden.double() @ held.T).abs().max() < 1e-4


def test_a_tall_head_is_packed_in_slices() -> None:
    ops = OpTable.stock("cpu", torch.bfloat16)
    weight, bias = weights((40000, 32), torch.bfloat16, bias=True)
    head = ops.pack_linear(weight, bias, few_rows=True)
    assert (head.dense() - weight).abs().max() <= 3e-8
    hidden = rows_of(3, 32, torch.bfloat16)
    expected = hidden.double() @ weight.double().T + bias.double()
    assert_close(ops.logits_head(hidden, head), expected, 1e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_int8_error_is_bounded_by_its_scales(shape: tuple[int, int], bias: bool) -> None:
    """Each weight is off by at most half its channel's scale, plus the scale's own rounding."""
    ops = OpTable.stock("cpu", torch.bfloat16, "int8")
    made = weights(shape, torch.bfloat16, bias)
    packed = ops.pack_linear(*made)
    peak = made[0].float().abs().amax(dim=1)
    error = (packed.dense().float() - made[0].float()).abs().amax(dim=1)
    assert (error <= peak * (0.5 / 127 + 2**-8)).all()
    assert packed.nbytes < 0.6 * made[0].nbytes + shape[0] * 4
    for count in ROWS:
        x = rows_of(count, shape[1], torch.bfloat16)
        expected = x.double() @ made[0].double().T + (made[1].double() if bias else 0.0)
        rounded = (x.double().abs().sum(1)[:, None] * peak.double() * (0.5 / 127 + 2**-8)).max()
        assert (
            ops.linear(x, packed).double() - expected
        ).abs().max() <= rounded + 2**-7 * expected.abs().max()


@pytest.mark.parametrize(
    ("dtype", "quantization", "copies", "exact"),
    [
        (torch.float32, "none", True, True),
        (torch.bfloat16, "none", True, True),
        (torch.bfloat16, "none", False, True),
        (torch.bfloat16, "int8", True, False),
    ],
)
def test_dense_gives_the_weight_back(
    dtype: torch.dtype, quantization: str, copies: bool, exact: bool
) -> None:
    ops = OpTable.stock("cpu", dtype, quantization, decode_copies=copies)
    for hints in ({}, {"gated": True}, {"few_rows": True}):
        (weight,) = weights((96, 64), dtype)
        packed: PackedLinear = ops.pack_linear(weight, **hints)
        assert packed.dense().dtype is dtype
        if exact:
            assert torch.equal(packed.dense(), weight)
        assert packed.shares(weight) == (packed.form == "plain")


def test_a_weight_beyond_half_precision_gets_no_half_pack() -> None:
    ops = OpTable.stock("cpu", torch.bfloat16)
    weight = torch.full((32, 16), 1e5, dtype=torch.bfloat16)
    x = torch.ones(1, 16)
    assert_close(ops.linear(x, ops.pack_linear(weight)), torch.full((1, 32), 1.6e6).double(), 6e-3)


def test_unknown_quantization() -> None:
    with pytest.raises(UsageError, match="int4"):
        OpTable.stock("cpu", torch.bfloat16, "int4")


@pytest.mark.skipif(not linear.HAS_FBGEMM, reason="this CPU has no half pack")
def test_without_bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU where oneDNN has none: the half pack, at any number of rows and in either dtype."""
    monkeypatch.setattr(linear, "WIDENS", True)
    for quantization, form, tolerance in (("none", "half", 6e-3), ("int8", "int8", 2e-2)):
        ops = OpTable.stock("cpu", torch.bfloat16, quantization)
        made = weights((96, 64), torch.bfloat16, bias=True)
        packed = ops.pack_linear(*made)
        assert packed.form == form
        for count in ROWS:
            for dtype in (torch.float32, torch.bfloat16):
                x = rows_of(count, 64, dtype)
                out = ops.linear(x, packed)
                assert out.dtype is dtype
                assert_close(out, x.double() @ made[0].double().T + made[1].double(), tolerance)
    huge = weights((96, 64), torch.bfloat16)[0] * 1e6
    packed = OpTable.stock("cpu", torch.bfloat16).pack_linear(huge)
    assert packed.form == "plain", "half precision ends at 65504"
