"""Quantized weights in blocks, as GGUF files store them, in one buffer that says what it holds.

    num_parts │ format, rows, offset │ format, rows, offset │ … │ part 0 │ part 1 │ …
     int64           3 int64 a part                              at multiples of 64

Rows lie below rows: a fused projection has a part for each of its weights, and their formats may differ.
``hr_blocks`` in headrace_kernel.h is the same from a kernel's side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np


class TensorType(IntEnum):
    """ggml's numbers of the tensor types that can be dequantized here."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


BLOCK_SIZES: dict[TensorType, tuple[int, int]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.Q4_0: (32, 2 + 16),
    TensorType.Q4_1: (32, 2 + 2 + 16),
    TensorType.Q5_0: (32, 2 + 4 + 16),
    TensorType.Q5_1: (32, 2 + 2 + 4 + 16),
    TensorType.Q8_0: (32, 2 + 32),
    TensorType.Q4_K: (256, 2 + 2 + 12 + 128),
    TensorType.Q5_K: (256, 2 + 2 + 12 + 32 + 128),
    TensorType.Q6_K: (256, 128 + 64 + 16 + 2),
}
"""Elements and bytes of one block."""

ALIGNMENT = 64
NAMES = {
    TensorType.Q4_0: "q4_0",
    TensorType.Q4_1: "q4_1",
    TensorType.Q8_0: "q8_0",
    TensorType.Q4_K: "q4_k",
    TensorType.Q5_K: "q5_k",
    TensorType.Q6_K: "q6_k",
    TensorType.BF16: "bfloat16",
}
"""Formats that a buffer may hold, as a pack's entry names them."""
TYPES = {name: kind for kind, name in NAMES.items()}


@dataclass(frozen=True)
class Part:
    """``offset`` counts bytes from the start of the buffer."""

    format: str
    rows: int
    offset: int


def row_bytes(format: str, in_features: int) -> int:
    """Bytes of one row, whose length must be whole blocks."""
    elements, block_bytes = BLOCK_SIZES[TYPES[format]]
    assert in_features % elements == 0, (format, in_features)
    return in_features // elements * block_bytes


def lay_out(parts: Sequence[tuple[str, int]], in_features: int) -> tuple[list[Part], int]:
    """Places for parts of (format, rows), and the size of their buffer, a multiple of ALIGNMENT."""
    end = _aligned(8 + 24 * len(parts))
    placed = []
    for name, rows in parts:
        placed.append(Part(name, rows, end))
        end += _aligned(rows * row_bytes(name, in_features))
    return placed, end


def header(parts: Sequence[Part]) -> bytes:
    """What stands at the start of a buffer."""
    words = [len(parts)]
    for part in parts:
        words += [int(TYPES[part.format]), part.rows, part.offset]
    return np.array(words, "<i8").tobytes()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
