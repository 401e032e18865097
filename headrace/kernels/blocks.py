"""Weights in quantized blocks as torch tensors: joined, looked up, dequantized, made.

A buffer is that of block_layout.py, a tensor (bytes,) of uint8. Correct rather than fast: kernels of a pack
compute on the blocks themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.block_layout import (
    ALIGNMENT,
    BLOCK_SIZES,
    NAMES,
    TYPES,
    Part,
    TensorType,
    header,
    lay_out,
    row_bytes,
)
from headrace.kernels.dequantize import dequantize

_KINDS = frozenset(int(kind) for kind in NAMES)
_PIECE_ELEMENTS = 1 << 20
_QUANTIZED_ELEMENTS = 1 << 15


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
    return [Part(NAMES[TensorType(kind)], rows, offset) for kind, rows, offset in _table(buffer)]


def check_buffer(buffer: Tensor, rows: Sequence[int], in_features: int) -> str:
    """What keeps a buffer from being parts of these rows, for a message; empty: nothing. Nothing else may be
    read from a buffer that is not ours before this."""
    size = buffer.shape[0]
    if buffer.data_ptr() % ALIGNMENT:
        return f"they do not start at a multiple of {ALIGNMENT}"
    table = _table(buffer)
    if len(table) != len(rows):
        return f"they are {len(table)} parts, {len(rows)} are needed"
    end = 8 + 24 * len(table)
    for wanted, (kind, number, offset) in zip(rows, table, strict=True):
        if kind not in _KINDS:
            return f"format {kind} is not known"
        elements, block_bytes = BLOCK_SIZES[TensorType(kind)]
        if number != wanted or in_features % elements:
            return f"{number} rows of {in_features} in blocks of {elements}, {wanted} rows are needed"
        if offset < end or offset % ALIGNMENT:
            return f"a part starts at {offset}, a multiple of {ALIGNMENT} from {end} on is needed"
        end = offset + number * (in_features // elements) * block_bytes
    return f"they end at {end} of {size}" if end > size else ""


def count_elements(buffer: Tensor) -> int:
    """Numbers in a buffer, from its size and formats alone, at most a few more than there are; for one that
    is damaged its bytes."""
    table = _table(buffer)
    ends = [offset for _, _, offset in table[1:]] + [buffer.shape[0]]
    total = 0 if table else buffer.shape[0]
    for (kind, _, offset), end in zip(table, ends, strict=False):
        elements, block_bytes = BLOCK_SIZES[TensorType(kind)] if kind in _KINDS else (1, 1)
        inside = min(end, buffer.shape[0]) - max(offset, 0)
        total += max(inside, 0) // block_bytes * elements
    return total


def buffer_formats(buffer: Tensor) -> list[str]:
    """Formats of the parts; of one that is damaged as much as is known."""
    return [NAMES[TensorType(kind)] if kind in _KINDS else "unknown" for kind, _, _ in _table(buffer)]


def _table(buffer: Tensor) -> list[list[int]]:
    """(format, rows, offset) of each part, unchecked; none where there is no such table."""
    content = buffer.numpy()
    count = int(content[:8].view(np.int64)[0]) if len(content) >= 8 else 0
    if not 0 < count <= (len(content) - 8) // 24:
        return []
    found: list[list[int]] = content[8 : 8 + 24 * count].view(np.int64).reshape(count, 3).tolist()
    return found


def part_rows(buffer: Tensor, part: Part, in_features: int) -> Tensor:
    """A part's blocks, a view: (rows, bytes of a row)."""
    width = row_bytes(part.format, in_features)
    return buffer[part.offset : part.offset + part.rows * width].view(part.rows, width)


def dense_rows(blocks: Tensor, format: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """(rows, bytes of a row) → (rows, in_features): in float32 exactly what the blocks say, else rounded."""
    rows, width = blocks.shape
    elements, block_bytes = BLOCK_SIZES[TYPES[format]]
    out = torch.empty(rows, width // block_bytes * elements, dtype=dtype)

    inference = torch.is_inference_mode_enabled()  # a thread's own, and so is what may be written

    def fill(start: int) -> None:
        with torch.inference_mode(inference):
            piece = blocks[start : start + step].contiguous()
            values = torch.from_numpy(dequantize(piece.numpy(), TYPES[format]))
            out[start : start + step] = values.view(piece.shape[0], -1)

    step = max(_PIECE_ELEMENTS // max(out.shape[1], 1), 1)
    starts = range(0, rows, step)
    if len(starts) <= 1:
        for start in starts:
            fill(start)
    else:
        with ThreadPoolExecutor(min(torch.get_num_threads(), len(starts))) as pool:
            list(pool.map(fill, starts))
    return out


def dense_blocks(buffer: Tensor, in_features: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The whole weight, as ``dense_rows``."""
    parts = [
        dense_rows(part_rows(buffer, part, in_features), part.format, dtype) for part in read_parts(buffer)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def lookup(buffer: Tensor, in_features: int, ids: Tensor) -> Tensor:
    """Some rows of the weight as float32: (ids,) → (ids, in_features)."""
    # in numpy: a step has few rows, and nothing here may wait for a thread
    content, index = buffer.numpy(), ids.numpy()
    parts = read_parts(buffer)
    out = np.empty((len(index), in_features), np.float32)
    start = 0
    for part in parts:
        mine = slice(None) if len(parts) == 1 else (index >= start) & (index < start + part.rows)
        width = row_bytes(part.format, in_features)
        rows = content[part.offset : part.offset + part.rows * width].reshape(part.rows, width)
        out[mine] = dequantize(rows[index[mine] - start], TYPES[part.format]).reshape(-1, in_features)
        start += part.rows
    return torch.from_numpy(out)


def quantize_blocks(weight: Tensor) -> Tensor:
    """A weight (out, in) as Q8_0 blocks (out, bytes of a row): 32 numbers to a float16 scale, the largest
    magnitude / 127, and each rounded to the nearest multiple of it."""
    rows, width = weight.shape
    assert width % 32 == 0, width
    out = torch.empty(rows, width // 32, 34, dtype=torch.uint8)

    def fill(start: int) -> None:
        groups = weight[start : start + step].float().view(-1, width // 32, 32)
        scale = (groups.abs().amax(dim=2, keepdim=True) / 127.0).half()
        wide = scale.float()
        # a group that is all but 0 has no scale in float16, and then no numbers
        steps = torch.where(wide > 0, groups / wide, 0).round_().clamp_(-127, 127)
        piece = out[start : start + step]
        piece[:, :, :2] = scale.view(torch.uint8)
        piece[:, :, 2:] = steps.to(torch.int8).view(torch.uint8)

    # so small that torch computes a piece on one thread, and in the cache
    step = max(_QUANTIZED_ELEMENTS // width, 1)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, range(0, rows, step)))
    return out.view(rows, -1)
