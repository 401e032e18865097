"""The Python side of the C interface says the same as the header."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable

import torch

from headrace.kernels.native.abi import (
    ABI,
    CALL_WORDS,
    DTYPES,
    MAX_DIMS,
    TENSOR_WORDS,
    Call,
    HrCall,
    HrTensor,
)
from headrace.kernels.native.build import INCLUDE
from headrace.kernels.native.op import NativeKernel
from headrace.kernels.native.signature import SIGNATURES, Signature, Slot, slots

# writes what it sees of its call into slot 1, an int64 tensor
SEES = """
#include "headrace_kernel.h"
extern "C" int hr_run(const hr_call *call) {
    const hr_tensor &x = call->tensors[0];
    int64_t *out = (int64_t *)call->tensors[1].data;
    int64_t seen[] = {call->num_tensors, call->threads, x.dtype, x.ndim, x.shape[0], x.shape[1], x.stride[0],
                      x.stride[1], call->ints[0], (int64_t)(call->floats[0] * 1000), call->packed != 0,
                      call->tensors[2].data == 0, sizeof(hr_tensor), sizeof(hr_call), HR_ABI,
                      HR_MAX_DIMS, HR_BOOL};
    for (int64_t i = 0; i < call->tensors[1].shape[0]; i++) out[i] = seen[i];
    return 0;
}
"""


def test_a_call_arrives_as_it_was_written(build_text: Callable[[str], NativeKernel]) -> None:
    signature = Signature("some", slots("x out:output more?"), ("number",), ("half",))
    kernel = build_text(SEES)
    x, out = torch.zeros(7, 5, dtype=torch.bfloat16)[:, ::2], torch.zeros(17, dtype=torch.int64)
    call = Call(signature, threads=3)
    call.set_tensor("more", x)
    call.set_tensor("more", None)
    call.set_tensor("x", x)
    call.set_tensor("out", out)
    call.set_int("number", -(2**40))
    call.set_float("half", 0.5)
    call.set_packed(64)
    assert kernel.run(call.address) == 0
    sizes = [ctypes.sizeof(HrTensor), ctypes.sizeof(HrCall), ABI, MAX_DIMS, DTYPES["bool"]]
    assert out.tolist() == [3, 3, 1, 2, 7, 3, 5, 2, -(2**40), 500, 1, 1, *sizes]


def test_words_and_structures_agree() -> None:
    assert ctypes.sizeof(HrTensor) == 8 * TENSOR_WORDS
    assert ctypes.sizeof(HrCall) == 8 * CALL_WORDS
    call = Call(SIGNATURES["decoder_layer"], threads=2)
    call.set_tensor("down", torch.ones(4, 3))
    call.set_float("norm_eps", 1e-5)
    seen = HrCall.from_address(call.address)
    assert (seen.num_tensors, seen.threads, seen.packed) == (26, 2, None)
    tensor = (HrTensor * seen.num_tensors).from_address(seen.tensors)[
        SIGNATURES["decoder_layer"].index("down")
    ]
    assert tensor.data is not None and list(tensor.shape) == [4, 3, 0, 0, 0, 0]
    place = SIGNATURES["decoder_layer"].floats.index("norm_eps")
    assert struct.unpack("=d", ctypes.string_at(seen.floats + 8 * place, 8)) == (1e-5,)


def test_dtypes_are_the_headers() -> None:
    header = (INCLUDE / "headrace_kernel.h").read_text()
    names = header.partition("enum hr_dtype {")[2].partition("}")[0].replace(" ", "").split(",")
    ours = ["F32", "BF16", "F16", "F64", "I8", "U8", "I32", "I64", "BOOL", "BLOCKS"]
    assert names == [f"HR_{name}" for name in ours]
    assert list(DTYPES.values()) == list(range(len(names)))


def test_signatures_name_slots() -> None:
    signature = SIGNATURES["linear"]
    assert signature.slot("bias") == Slot("bias", "weight", optional=True)
    assert signature.names("input", "output") == ("x", "residual", "out")
    assert [s.op for s in SIGNATURES.values() if s.has_batch] == [
        "attention",
        "attention_block",
        "decoder_layer",
    ]
