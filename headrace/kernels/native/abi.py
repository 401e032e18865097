"""The C interface from Python: mirrors of headrace_kernel.h, and a call laid out once and rewritten cheaply.

A call lives in one block of memory, seen as 64-bit words:

    hr_call │ tensors[0] │ tensors[1] │ … │ ints │ floats          a tensor's words:
    5 words   14 words each                                         data │ dtype, ndim │ shape 6 │ stride 6

On the hot path only words change (``call.words[place] = pointer``, some 25 ns); a ctypes field costs several
times that.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.kernels.native.signature import Signature

if TYPE_CHECKING:
    from torch import Tensor

ABI = 1
DONE = 0
NOT_MINE = 1
MAX_DIMS = 6
ALIGNMENT = 64
"""Of a packed form's memory, in bytes."""

DTYPES = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "float64": 3,
    "int8": 4,
    "uint8": 5,
    "int32": 6,
    "int64": 7,
    "bool": 8,
    "blocks": 9,
}
"""``enum hr_dtype`` by torch's names, and quantized blocks."""

CALL_WORDS = 5
TENSOR_WORDS = 2 + 2 * MAX_DIMS
SHAPE, STRIDE = 2, 2 + MAX_DIMS
"""Where shape and stride begin within a tensor's words."""


class HrTensor(ctypes.Structure):
    """``hr_tensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("shape", ctypes.c_int64 * MAX_DIMS),
        ("stride", ctypes.c_int64 * MAX_DIMS),
    ]


class HrCall(ctypes.Structure):
    """``hr_call``."""

    _fields_ = [
        ("tensors", ctypes.c_void_p),
        ("ints", ctypes.c_void_p),
        ("floats", ctypes.c_void_p),
        ("packed", ctypes.c_void_p),
        ("num_tensors", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    ]


Run = Callable[[int], int]
"""``hr_run`` as called: the address of an hr_call → DONE, NOT_MINE or another value, a failure."""
PackedBytes = Callable[[int], int]
"""``hr_packed_bytes``: the address of an hr_call → bytes."""
Pack = Callable[[int, int], int]
"""``hr_pack``: the addresses of an hr_call and of the memory → as ``Run``."""

_PACKED_WORD = 3
THREADS_WORD = 4
"""Holds num_tensors and threads (``counts_word``)."""


class Call:
    """One ``hr_call`` of a signature; all slots absent and all numbers 0 at first.

    It holds addresses only: whoever sets a tensor keeps it alive.
    """

    def __init__(self, signature: Signature, threads: int = 1) -> None:
        self.signature = signature
        self._tensors = CALL_WORDS
        self._ints = self._tensors + TENSOR_WORDS * len(signature.slots)
        self._floats = self._ints + len(signature.ints)
        count = self._floats + len(signature.floats)
        self._memory = (ctypes.c_int64 * count)()
        self.address = ctypes.addressof(self._memory)
        self.words: memoryview = memoryview(self._memory).cast("B").cast("q")
        self.words[0] = self.address + 8 * self._tensors
        self.words[1] = self.address + 8 * self._ints
        self.words[2] = self.address + 8 * self._floats
        self.set_threads(threads)

    @property
    def nbytes(self) -> int:
        return self.words.nbytes

    def tensor_word(self, name: str) -> int:
        """The first word of a slot; its data pointer."""
        return self._tensors + TENSOR_WORDS * self.signature.index(name)

    def int_word(self, name: str) -> int:
        return self._ints + self.signature.ints.index(name)

    def set_tensor(self, name: str, tensor: Tensor | None) -> None:
        """A torch tensor on the CPU with its shape and strides; None: absent."""
        if tensor is None:
            self.set_array(name, 0, "float32", (), ())
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.set_array(name, tensor.data_ptr(), dtype, tensor.shape, tensor.stride())

    def set_array(
        self, name: str, address: int, dtype: str, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        """Memory at ``address``; ``dtype`` is one of DTYPES, ``strides`` count elements."""
        place, ndim = self.tensor_word(name), len(shape)
        assert ndim <= MAX_DIMS, f"{name} has {ndim} dimensions"
        words = self.words
        words[place] = address
        words[place + 1] = meta_word(dtype, ndim)
        for index in range(MAX_DIMS):
            words[place + SHAPE + index] = shape[index] if index < ndim else 0
            words[place + STRIDE + index] = strides[index] if index < ndim else 0

    def set_int(self, name: str, value: int) -> None:
        self.words[self.int_word(name)] = value

    def set_float(self, name: str, value: float) -> None:
        place = self._floats + self.signature.floats.index(name)
        self.words[place] = struct.unpack("=q", struct.pack("=d", value))[0]

    def set_packed(self, address: int) -> None:
        self.words[_PACKED_WORD] = address

    def set_threads(self, threads: int) -> None:
        self.words[THREADS_WORD] = counts_word(len(self.signature.slots), threads)


def meta_word(dtype: str, ndim: int) -> int:
    """The word that holds a tensor's dtype and ndim."""
    return _two(DTYPES[dtype], ndim)


def counts_word(num_tensors: int, threads: int) -> int:
    """The word that holds a call's num_tensors and threads."""
    return _two(num_tensors, threads)


def _two(first: int, second: int) -> int:
    """Two int32 that lie side by side, in this machine's byte order, as one word."""
    word: int = struct.unpack("=q", struct.pack("=ii", first, second))[0]
    return word
