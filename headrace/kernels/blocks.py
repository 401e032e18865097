"""Weights in quantized blocks as torch tensors: joined, looked up, dequantized, made.

A buffer is that of block_layout.py, a tensor (bytes,) of uint8. Correct rather than fast: kernels of a pack
compute on the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.block_layout import NAMES, TYPES, Part, TensorType, header, lay_out, row_bytes
from headrace.kernels.dequantize import dequantize


def join_blocks(parts: Sequence[tuple[str, Tensor]], in_features: int) -> Tensor:
    """The buffer of several weights, rows below rows: each a format and its blocks (rows, bytes of a row)."""
    placed, size = lay_out([(name, data.shape[0]) for name, data in parts], in_features)
    buffer = torch.zeros(size, dtype=torch.uint8)
    start = header(placed)
    buffer[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
    for part, (_, data) in zip(placed, parts, strict=True):
        flat = data.reshape(-1).view(torch.uint8)
        buffer[part.offset : part.offset + flat.shape[0]] = flat
    return buffer


def read_parts(buffer: Tensor) -> list[Part]:
    """The parts that a buffer says it has."""
    words = buffer[:8].view(torch.int64)
    count = int(words[0])
    table = buffer[8 : 8 + 24 * count].view(torch.int64).reshape(count, 3).tolist()
    return [Part(NAMES[TensorType(kind)], rows, offset) for kind, rows, offset in table]


def part_rows(buffer: Tensor, part: Part, in_features: int) -> Tensor:
    """A part's blocks, a view: (rows, bytes of a row)."""
    width = row_bytes(part.format, in_features)
    return buffer[part.offset : part.offset + part.rows * width].view(part.rows, width)


def dense_rows(blocks: Tensor, format: str) -> Tensor:
    """(rows, bytes of a row) → (rows, in_features) float32, exactly what the blocks say."""
    values = dequantize(blocks.contiguous().numpy(), TYPES[format])
    return torch.from_numpy(values).view(blocks.shape[0], -1)


def dense_blocks(buffer: Tensor, in_features: int) -> Tensor:
    """The whole weight as float32, exactly what the blocks say."""
    parts = [dense_rows(part_rows(buffer, part, in_features), part.format) for part in read_parts(buffer)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def lookup(buffer: Tensor, in_features: int, ids: Tensor) -> Tensor:
    """Some rows of the weight as float32: (ids,) → (ids, in_features)."""
    parts = read_parts(buffer)
    if len(parts) == 1:
        return dense_rows(part_rows(buffer, parts[0], in_features)[ids], parts[0].format)
    out = torch.empty(ids.shape[0], in_features)
    start = 0
    for part in parts:
        mine = ((ids >= start) & (ids < start + part.rows)).nonzero()[:, 0]
        if len(mine):
            out[mine] = dense_rows(part_rows(buffer, part, in_features)[ids[mine] - start], part.format)
        start += part.rows
    return out


def quantize_blocks(weight: Tensor) -> Tensor:
    """A weight (out, in) as Q8_0 blocks (out, bytes of a row): 32 numbers to a float16 scale, the largest
    magnitude / 127, and each rounded to the nearest multiple of it."""
    rows, width = weight.shape
    assert width % 32 == 0, width
    out = torch.empty(rows, width // 32, 34, dtype=torch.uint8)
    for start in range(0, rows, 4096):
        groups = weight[start : start + 4096].float().view(-1, width // 32, 32)
        scale = (groups.abs().amax(dim=2, keepdim=True) / 127.0).half()
        wide = scale.float()
        # a group that is all but 0 has no scale in float16, and then no numbers
        steps = torch.where(wide > 0, groups / wide, 0).round_().clamp_(-127, 127)
        piece = out[start : start + 4096]
        piece[:, :, :2] = scale.contiguous().view(torch.uint8)
        piece[:, :, 2:] = steps.to(torch.int8).view(torch.uint8)
    return out.view(rows, -1)
