"""What kernels get of weights in quantized blocks, and which weights an entry's formats cover."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.core.packs import KernelEntry
from headrace.kernels.blocks import join_blocks, quantize_blocks
from headrace.kernels.native.op import NativeKernel, NativeOp, make_op
from headrace.kernels.native.store import WeightStore
from headrace.kernels.native.weight_sets import linear_set
from headrace.kernels.table import OpTable
from headrace.kernels.weights import PackedLinear, blocks_linear, plain_linear

WIDTH = 64
SOURCE = """
#include <cstring>
#include "headrace_kernel.h"

enum { X, WEIGHT, BIAS, RESIDUAL, OUT };

static float number(const char *row, int64_t format, int64_t i) {
    if (format == HR_BF16_ROWS) {
        uint16_t half;
        memcpy(&half, row + 2 * i, 2);
        uint32_t bits = (uint32_t)half << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
    }
    const char *block = row + i / 32 * 34;
    _Float16 scale;
    memcpy(&scale, block, 2);
    return (float)scale * (signed char)block[2 + i % 32];
}

static int covers(const hr_tensor &weight) {
    return weight.dtype == HR_BLOCKS && weight.ndim == 2 && !weight.stride[0] && !weight.stride[1];
}

static void rows_of(const hr_tensor &weight, float *to) {
    const hr_blocks *blocks = (const hr_blocks *)weight.data;
    int64_t in = weight.shape[1];
    for (int64_t p = 0; p < blocks->num_parts; p++) {
        const hr_part &part = blocks->part[p];
        int64_t bytes = part.format == HR_BF16_ROWS ? 2 * in : in / 32 * 34;
        const char *row = (const char *)blocks + part.offset;
        for (int64_t r = 0; r < part.rows; r++, row += bytes)
            for (int64_t i = 0; i < in; i++) *to++ = number(row, part.format, i);
    }
}
PACKING
extern "C" int hr_run(const hr_call *call) {
    const hr_tensor *t = call->tensors;
    int64_t in = t[X].shape[1], out = t[OUT].shape[1];
    const float *w = (const float *)call->packed, *x = (const float *)t[X].data;
    float own[256 * 64];
    if (!w) {
        if (!covers(t[WEIGHT])) return HR_NOT_MINE;
        rows_of(t[WEIGHT], own);
        w = own;
    }
    float *y = (float *)t[OUT].data;
    for (int64_t r = 0; r < t[X].shape[0]; r++)
        for (int64_t o = 0; o < out; o++) {
            float sum = 0;
            for (int64_t i = 0; i < in; i++) sum += x[r * in + i] * w[o * in + i];
            y[r * out + o] = sum;
        }
    return HR_DONE;
}
"""
PACKING = """
extern "C" int64_t hr_packed_bytes(const hr_call *call) {
    const hr_tensor &weight = call->tensors[WEIGHT];
    return covers(weight) ? 4 * weight.shape[0] * weight.shape[1] : 0;
}
extern "C" int hr_pack(const hr_call *call, void *packed) {
    rows_of(call->tensors[WEIGHT], (float *)packed);
    return HR_DONE;
}
"""


def mixed(rows: int = 24) -> PackedLinear:
    """Rows in Q8_0 above rows in bfloat16."""
    generator = torch.Generator().manual_seed(rows)
    top, below = torch.randn(2, rows, WIDTH, generator=generator).bfloat16()
    parts = [("q8_0", quantize_blocks(top)), ("bfloat16", below.view(torch.uint8))]
    return blocks_linear(join_blocks(parts, WIDTH), WIDTH, dtype=torch.bfloat16)


def prepared(kernel: NativeKernel, weight: PackedLinear, **conditions: Any) -> tuple[NativeOp, bool]:
    entry = {"max_rows": 0, "weight_formats": ["bfloat16", "q8_0"], "activation_dtypes": ["float32"]}
    op = make_op(
        kernel,
        KernelEntry(op="linear", source="x.cpp", **(entry | conditions)),
        OpTable.reference().unbound("linear"),
    )
    return op, op.bind(linear_set(weight), WeightStore())


@pytest.mark.parametrize("packing", ["", PACKING])
def test_a_kernel_reads_the_buffer(packing: str, build_text: Callable[[str], NativeKernel]) -> None:
    weight = mixed()
    op, known = prepared(build_text(SOURCE.replace("PACKING", packing)), weight)
    assert known and op.covers(weight)
    assert op.nbytes == (4 * 48 * WIDTH if packing else 0)  # the buffer is the model's own
    with torch.inference_mode():
        for rows in (1, 300):
            x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
            expected = x.double() @ weight.dense().double().T
            assert (op(x, weight).double() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_formats_decide_what_is_covered(build_text: Callable[[str], NativeKernel]) -> None:
    kernel = build_text(SOURCE.replace("PACKING", PACKING))
    for formats in (["q8_0"], ["bfloat16"], ["q4_0", "bfloat16"], []):
        assert not prepared(kernel, mixed(), weight_formats=formats)[1]
    assert prepared(kernel, mixed(), weight_formats=["q6_k", "q8_0", "bfloat16"])[1]
    # covered by name, but no blocks: the kernel itself declines
    assert not prepared(kernel, plain_linear(torch.ones(4, WIDTH).bfloat16()))[1]
    eight_bits = OpTable.stock("cpu", torch.bfloat16, "int8").pack_linear(torch.ones(32, WIDTH).bfloat16())
    assert not prepared(kernel, eight_bits)[1]
