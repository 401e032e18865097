"""The small ops against the reference in float64."""

from __future__ import annotations

import pytest
import torch

from headrace.kernels.table import OpTable
from headrace.kernels.weights import Norm

DTYPES = ((torch.float32, 1e-6), (torch.bfloat16, 1e-2))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_close(out: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert out.shape == expected.shape
    assert (out.double() - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(1, 576), (7, 96), (5, 3, 64)])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rms_norm(
    dtype: torch.dtype, tolerance: float, shape: tuple[int, ...], scale: float, offset: float
) -> None:
    x = (random(*shape) * scale).to(dtype)
    weight = random(shape[-1], seed=1).to(dtype)
    expected = OpTable.reference().rms_norm(x.double(), Norm(weight.double(), 1e-5, offset))
    for ops in (OpTable.stock("cpu", dtype), OpTable.reference()):
        out = ops.rms_norm(x, Norm(weight, 1e-5, offset))
        assert out.dtype is dtype
        assert_close(out, expected, tolerance)
    # float32 weights beside bfloat16 rows, as Gemma's
    assert OpTable.stock("cpu", dtype).rms_norm(x, Norm(weight.float(), 1e-5, offset)).dtype is dtype


def test_rms_norm_of_zeros_is_zero() -> None:
    assert OpTable.stock().rms_norm(torch.zeros(2, 8), Norm(torch.ones(8), 1e-6)).eq(0).all()


@pytest.mark.parametrize("rotated", [64, 16])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rope(dtype: torch.dtype, tolerance: float, rotated: int) -> None:
    angles = random(9, 1, rotated // 2).repeat(1, 1, 2)
    sign = torch.ones(rotated)
    sign[: rotated // 2] = -1.0
    cos, sin = angles.cos().to(dtype), (angles.sin() * sign).to(dtype)
    rows = random(9, 6, 64).to(dtype)
    expected = OpTable.reference().rope(rows.double(), cos.double(), sin.double())
    # the reference against the rotation written out for one pair
    half = rotated // 2
    angle = angles[4, 0, 3]
    first, second = rows[4, 2, 3].double(), rows[4, 2, 3 + half].double()
    assert abs(expected[4, 2, 3] - (first * angle.cos() - second * angle.sin())) < 2e-2
    assert torch.equal(expected[..., rotated:], rows[..., rotated:].double())
    wider = torch.cat((rows, rows), dim=1)
    assert_close(OpTable.stock("cpu", dtype).rope(wider[:, 6:], cos, sin), expected, tolerance)
    assert torch.equal(wider[:, :6], rows)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_activation_and_mul(dtype: torch.dtype, tolerance: float, rows: int, activation: str) -> None:
    x = random(rows, 96).to(dtype)
    expected = OpTable.reference().activation_and_mul(x.double(), activation)
    gate, up = x.double().chunk(2, dim=1)
    if activation == "silu":
        assert torch.allclose(expected, gate / (1 + torch.exp(-gate)) * up)
    assert_close(OpTable.stock("cpu", dtype).activation_and_mul(x, activation), expected, tolerance)


def test_embedding() -> None:
    weight = random(50, 8).bfloat16()
    for count in (1, 4, 5, 20):
        ids = torch.arange(count) * 2
        out = OpTable.stock().embedding(ids, weight)
        assert torch.equal(out.bfloat16(), weight[ids])
        assert torch.equal(out.bfloat16(), OpTable.reference().embedding(ids, weight))
