"""Turns GGUF blocks into float32 or bfloat16, in numpy, a cache-sized piece at a time.

The results equal ``gguf.quants.dequantize`` bit for bit: the same products in the same order, in float32.
Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.kernels.block_layout import BLOCK_SIZES, TensorType

Bytes: TypeAlias = "npt.NDArray[np.uint8]"
Floats: TypeAlias = "npt.NDArray[np.float32]"
Bits: TypeAlias = "npt.NDArray[np.uint16]"
PIECE_ELEMENTS = 1 << 16
_LOW = np.uint8(0x0F)


def dequantize(data: Bytes, kind: TensorType) -> Floats:
    """All elements of ``data`` (whole blocks, contiguous) as float32, flat."""
    elements, block_bytes = BLOCK_SIZES[kind]
    blocks = np.ascontiguousarray(data).reshape(-1, block_bytes)
    out = np.empty(len(blocks) * elements, np.float32)
    step = max(PIECE_ELEMENTS // elements, 1)
    # Files are allowed any scale, also inf and nan; the arithmetic on them is defined.
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), step):
            piece = blocks[start : start + step]
            _DECODERS[kind](piece, out[start * elements : (start + len(piece)) * elements])
    return out


def to_bfloat16(values: Floats) -> Bits:
    """Bit patterns of ``values`` rounded to bfloat16, to nearest even, as torch rounds.

    Works in place: ``values`` is destroyed.
    """
    flat = values.reshape(-1)
    bits = flat.view(np.uint32)
    out = np.empty(len(flat), np.uint16)
    for start in range(0, len(flat), PIECE_ELEMENTS):
        piece = bits[start : start + PIECE_ELEMENTS]
        nans = np.isnan(flat[start : start + PIECE_ELEMENTS])
        odd = piece >> np.uint32(16)
        odd &= np.uint32(1)
        odd += np.uint32(0x7FFF)
        piece += odd
        # The upper halves: little-endian memory, so every second uint16.
        rounded = piece.view(np.uint16)[1::2]
        out[start : start + PIECE_ELEMENTS] = rounded
        if nans.any():
            out[start : start + PIECE_ELEMENTS][nans] = 0x7FC0
    return out.reshape(values.shape)


def q8_0_of_q5_0(data: Bytes) -> Bytes:
    """Q5_0 blocks as Q8_0 blocks, without loss: the same scale, and 5-bit numbers fit in 8. (blocks, 34)."""
    blocks = np.ascontiguousarray(data).reshape(-1, BLOCK_SIZES[TensorType.Q5_0][1])
    out = np.empty((len(blocks), BLOCK_SIZES[TensorType.Q8_0][1]), np.uint8)
    for start in range(0, len(blocks), PIECE_ELEMENTS // 32):
        piece = slice(start, start + PIECE_ELEMENTS // 32)
        quants = _nibbles(blocks[piece, 6:], 16).reshape(-1, 32)
        quants |= _fifth_bits(blocks[piece], 2)
        out[piece, :2] = blocks[piece, :2]
        out[piece, 2:] = quants - np.uint8(16)
    return out


def _half(blocks: Bytes, start: int) -> Floats:
    """The float16 at byte ``start`` of each block, as float32: (blocks, 1)."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view(np.float16).astype(np.float32)


def _f32(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.reshape(-1).view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[:] = blocks.reshape(-1).view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    bits = out.view(np.uint32)
    bits[:] = blocks.reshape(-1).view(np.uint16)
    bits <<= np.uint32(16)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    values = out.reshape(-1, 32)
    values[:] = blocks[:, 2:].view(np.int8)
    values *= _half(blocks, 0)


def _nibbles(packed: Bytes, width: int) -> Bytes:
    """(blocks, groups * width) bytes to (blocks, groups, 2, width): all low nibbles, then all high ones."""
    groups = packed.reshape(len(packed), -1, width)
    out = np.empty((*groups.shape[:2], 2, width), np.uint8)
    np.bitwise_and(groups, _LOW, out=out[:, :, 0])
    np.right_shift(groups, np.uint8(4), out=out[:, :, 1])
    return out


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """The 32 high bits of a Q5 block as 0 or 16: (blocks, 32)."""
    bits = np.unpackbits(blocks[:, start : start + 4], axis=1, bitorder="little")
    bits <<= np.uint8(4)
    return bits


def _q4_0(blocks: Bytes, out: Floats) -> None:
    quants = _nibbles(blocks[:, 2:], 16).reshape(-1, 32).view(np.int8)
    quants -= np.int8(8)
    np.multiply(_half(blocks, 0), quants, out=out.reshape(-1, 32), dtype=np.float32)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    values = out.reshape(-1, 32)
    np.multiply(_half(blocks, 0), _nibbles(blocks[:, 4:], 16).reshape(-1, 32), out=values, dtype=np.float32)
    values += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    quants = _nibbles(blocks[:, 6:], 16).reshape(-1, 32)
    quants |= _fifth_bits(blocks, 2)
    signed = quants.view(np.int8)
    signed -= np.int8(16)
    np.multiply(_half(blocks, 0), signed, out=out.reshape(-1, 32), dtype=np.float32)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    quants = _nibbles(blocks[:, 8:], 16).reshape(-1, 32)
    quants |= _fifth_bits(blocks, 4)
    values = out.reshape(-1, 32)
    np.multiply(_half(blocks, 0), quants, out=values, dtype=np.float32)
    values += _half(blocks, 2)


def _k_scales(blocks: Bytes) -> tuple[Floats, Floats]:
    """Scale and minimum of the 8 sub-blocks of Q4_K and Q5_K: each (blocks, 8, 1).

    Twelve bytes hold sixteen 6-bit numbers: bytes 0-3 scales and 4-7 minima of sub-blocks 0-3, whose two
    upper bits belong to sub-blocks 4-7; bytes 8-11 the lower four bits of scale and minimum of those.
    """
    low, middle, high = (blocks[:, start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=1)
    minima = np.concatenate([middle & 0x3F, (high >> 4) | ((middle >> 2) & 0x30)], axis=1)
    scale = _half(blocks, 0) * scales.astype(np.float32)
    minimum = _half(blocks, 2) * minima.astype(np.float32)
    return scale[:, :, None], minimum[:, :, None]


def _q4_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = _k_scales(blocks)
    values = out.reshape(-1, 8, 32)
    np.multiply(scale, _nibbles(blocks[:, 16:], 32).reshape(-1, 8, 32), out=values, dtype=np.float32)
    values -= minimum


def _q5_k(blocks: Bytes, out: Floats) -> None:
    scale, minimum = _k_scales(blocks)
    quants = _nibbles(blocks[:, 48:], 32).reshape(-1, 8, 32)
    high = blocks[:, 16:48]
    for i in range(8):
        quants[:, i] |= ((high >> np.uint8(i)) & np.uint8(1)) << np.uint8(4)
    values = out.reshape(-1, 8, 32)
    np.multiply(scale, quants, out=values, dtype=np.float32)
    values -= minimum


def _q6_k(blocks: Bytes, out: Floats) -> None:
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    # (blocks, half, nibble, 2 runs, 32): in each half of 128, runs 0 and 1 take low nibbles, 2 and 3 high.
    quants = _nibbles(blocks[:, :128], 64).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for i in range(4):
        quants[:, :, i] |= ((high >> np.uint8(2 * i)) & np.uint8(3)) << np.uint8(4)
    signed = quants.view(np.int8)
    signed -= np.int8(32)
    np.multiply(scale[:, :, None], signed.reshape(-1, 16, 16), out=out.reshape(-1, 16, 16), dtype=np.float32)


_DECODERS: dict[TensorType, Callable[[Any, Any], None]] = {
    TensorType.F32: _f32,
    TensorType.F16: _f16,
    TensorType.BF16: _bf16,
    TensorType.Q4_0: _q4_0,
    TensorType.Q4_1: _q4_1,
    TensorType.Q5_0: _q5_0,
    TensorType.Q5_1: _q5_1,
    TensorType.Q8_0: _q8_0,
    TensorType.Q4_K: _q4_k,
    TensorType.Q5_K: _q5_k,
    TensorType.Q6_K: _q6_k,
}
