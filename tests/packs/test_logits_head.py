"""The CPU pack's output head: right on its own, and the same bits for a row in any call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.kernels.native.abi import ALIGNMENT, DONE, NOT_MINE, Call
from headrace.kernels.native.build import compile_kernel
from headrace.kernels.native.library import NativeKernel
from headrace.kernels.native.signature import SIGNATURES
from tests.packs.pack import SOURCES

UNIT_ROUNDOFF = 2.0**-24
VOCAB, HIDDEN = 515, 72


@pytest.fixture(scope="module")
def kernel(built: Path) -> NativeKernel:
    return NativeKernel(
        compile_kernel(SOURCES / "logits_head.cpp", ["-ffp-contract=off", "-DHR_WITHOUT_BLOCKS"], built)
    )


class Head:
    """A head packed for a number of threads."""

    def __init__(self, kernel: NativeKernel, weight: Tensor, bias: Tensor | None, threads: int = 2) -> None:
        assert kernel.packed_bytes is not None
        assert kernel.pack is not None
        self._kernel = kernel
        self._call = call = Call(SIGNATURES["logits_head"], threads)
        call.set_tensor("weight", weight)
        call.set_tensor("bias", bias)
        size = kernel.packed_bytes(call.address)
        assert size > 0
        self._memory = np.zeros(size + ALIGNMENT, np.uint8)
        packed = -(-self._memory.ctypes.data // ALIGNMENT) * ALIGNMENT
        assert kernel.pack(call.address, packed) == DONE
        call.set_tensor("weight", None)
        call.set_tensor("bias", None)
        call.set_packed(packed)

    def run(self, x: Tensor, softcap: float = 0.0, *, out: Tensor | None = None, threads: int = 2) -> Tensor:
        out = torch.full((len(x), VOCAB), torch.nan) if out is None else out
        self._call.set_threads(threads)
        self._call.set_float("softcap", softcap)
        self._call.set_tensor("x", x)
        self._call.set_tensor("out", out)
        assert self._kernel.run(self._call.address) == DONE
        return out

    def refuses(self, x: Tensor, out: Tensor) -> bool:
        self._call.set_tensor("x", x)
        self._call.set_tensor("out", out)
        return self._kernel.run(self._call.address) == NOT_MINE


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WEIGHT = _normal(VOCAB, HIDDEN).bfloat16()
BIAS = _normal(VOCAB, seed=1).bfloat16()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("bias", [None, BIAS])
def test_logits_are_as_exact_as_their_sums(
    kernel: NativeKernel, dtype: torch.dtype, softcap: float, bias: Tensor | None
) -> None:
    head = Head(kernel, WEIGHT, bias)
    for rows in (1, 2, 8, 17, 300):
        x = _normal(rows, HIDDEN, seed=rows).to(dtype)
        sums = x.bfloat16().double() @ WEIGHT.double().T
        sizes = x.bfloat16().double().abs() @ WEIGHT.double().abs().T
        if bias is not None:
            sums, sizes = sums + bias.double(), sizes + bias.double().abs()
        slack = 1.01 * UNIT_ROUNDOFF * (HIDDEN + 2) * sizes
        if softcap:
            sums = softcap * torch.tanh(sums / softcap)
            slack += 16 * UNIT_ROUNDOFF * softcap
        assert bool(((head.run(x, softcap) - sums).abs() <= slack).all())


def test_a_row_has_the_same_bits_in_any_call(kernel: NativeKernel) -> None:
    x = _normal(300, HIDDEN)
    head = Head(kernel, WEIGHT, BIAS, threads=1)
    expected = torch.cat([head.run(row[None], 30.0, threads=1) for row in x])
    for parts in (1, 2, 3):
        head = Head(kernel, WEIGHT, BIAS, threads=parts)
        for rows, threads in ((1, 2), (7, 1), (8, 3), (14, 2), (15, 2), (64, 1), (300, 2), (300, 3)):
            assert torch.equal(head.run(x[-rows:], 30.0, threads=threads), expected[-rows:])


def test_rows_may_lie_apart_and_nothing_is_written_beside_them(kernel: NativeKernel) -> None:
    head = Head(kernel, WEIGHT, None)
    x = _normal(5, 2 * HIDDEN)[:, :HIDDEN]
    wide = torch.full((5, VOCAB + 40), torch.nan)
    head.run(x, out=wide[:, :VOCAB])
    assert torch.equal(wide[:, :VOCAB], head.run(x.contiguous()))
    assert bool(wide[:, VOCAB:].isnan().all())


def test_calls_of_other_shapes_and_dtypes_are_refused(kernel: NativeKernel) -> None:
    head = Head(kernel, WEIGHT, None)
    assert head.refuses(_normal(2, HIDDEN + 1), torch.empty(2, VOCAB))
    assert head.refuses(_normal(2, HIDDEN), torch.empty(2, VOCAB - 1))
    assert head.refuses(_normal(2, HIDDEN), torch.empty(2, VOCAB, dtype=torch.bfloat16))
    assert head.refuses(_normal(2, HIDDEN).double(), torch.empty(2, VOCAB))
