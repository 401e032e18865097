"""What a step's attention needs besides the tensors: groups of decodes, block indices, masks.

Made once a step for each window size and shared by all layers (``AttentionBatch.memo``).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.batch import AttentionBatch

# decodes share one padded product as long as padding at most doubles its work …
_PADDING = 2
# … or the whole group is so small that another group's calls would cost more
_SMALL_GROUP_KEYS = 4096
# rows of a prefill tile, and the most elements of its scratch tensor
_TILE_ROWS = 128
_SCRATCH_ELEMENTS = 32 * 1024 * 1024


@dataclass(frozen=True)
class DecodeGroup:
    """Decodes that attend together.

    rows        their rows, (n,) int64
    num_keys    keys each is padded to
    blocks      their blocks side by side, (n * num_keys / block_size,) int64, when gathered
    mask        (1, n, 1, num_keys): 0, or -inf at padding; None without any
    first_slot  set for a lone decode whose visible keys, ``visible`` of them, lie side by side in the cache
    """

    rows: Tensor
    num_keys: int
    blocks: Tensor
    mask: Tensor | None
    first_slot: int | None
    visible: int


def decode_plan(batch: AttentionBatch, window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
    """The batch's decodes in groups of similar length."""
    if window is not None and max(batch.decode_lens_list) <= window:
        window = None
    return batch.memo(("decode", window, dtype), lambda: _decode_groups(batch, window, dtype))


def _decode_groups(batch: AttentionBatch, window: int | None, dtype: torch.dtype) -> list[DecodeGroup]:
    size = batch.block_size
    spans = []  # (number of blocks, row, first block) of what each decode sees
    for row, length in enumerate(batch.decode_lens_list):
        first = 0 if window is None else max(0, length - window) // size
        spans.append((-(-length // size) - first, row, first))
    spans.sort(reverse=True)
    groups: list[list[tuple[int, int, int]]] = []
    for span in spans:
        if groups:
            widest = groups[-1][0][0]
            small = widest * (len(groups[-1]) + 1) * size <= _SMALL_GROUP_KEYS
            if small or widest <= _PADDING * span[0]:
                groups[-1].append(span)
                continue
        groups.append([span])
    return [_decode_group(batch, sorted(group, key=lambda s: s[1]), window, dtype) for group in groups]


def _decode_group(
    batch: AttentionBatch, spans: list[tuple[int, int, int]], window: int | None, dtype: torch.dtype
) -> DecodeGroup:
    device, size = batch.positions.device, batch.block_size
    row_list = [row for _, row, _ in spans]
    rows = torch.tensor(row_list, dtype=torch.int64, device=device)
    first_slot, visible = None, 0
    if len(spans) == 1:
        length = batch.decode_lens_list[row_list[0]]
        visible = length if window is None else min(length, window)
        first_slot = batch.decode_first_slots[row_list[0]]
        if first_slot is not None:
            first_slot += length - visible
    width = max(count for count, _, _ in spans)
    firsts = torch.tensor([first for _, _, first in spans], dtype=torch.int64, device=device)
    columns = firsts[:, None] + torch.arange(width, device=device)
    # past a row's own blocks any block will do: the mask hides it
    columns.clamp_(max=batch.decode_block_tables.shape[1] - 1)
    blocks = batch.decode_block_tables[rows].gather(1, columns).flatten()
    position = firsts[:, None] * size + torch.arange(width * size, device=device)
    lengths = batch.decode_lens[rows][:, None]
    hidden = position >= lengths
    if window is not None:
        hidden |= position < lengths - window
    mask = None
    if bool(hidden.any()):
        zeros = torch.zeros(hidden.shape, dtype=dtype, device=device)
        mask = zeros.masked_fill_(hidden, float("-inf"))[None, :, None, :]
    return DecodeGroup(rows, width * size, blocks, mask, first_slot, visible)


def tile_rows(queries: int, fan: int, keys: int, device: torch.device) -> int:
    """Queries in one tile: few enough that fan * tile * keys scores fit the scratch, and for the caches."""
    limit = _TILE_ROWS if device.type == "cpu" else 1024
    return max(1, min(queries, limit, _SCRATCH_ELEMENTS // (fan * keys)))


def tile_mask(
    batch: AttentionBatch, size: int, width: int, window: int | None, dtype: torch.dtype
) -> tuple[Tensor, int]:
    """Mask (size, 1, columns) for a tile of ``size`` queries over ``width`` keys, and its first column.

    The last ``size`` columns are the queries' own positions. Without a window everything left of them
    is visible, so only they are masked.
    """
    if window is None or width < window + 1:
        return batch.memo(
            ("tile", size, dtype), lambda: _triangle(batch, size, size, None, dtype)
        ), width - size
    key = ("tile", size, width, window, dtype)
    return batch.memo(key, lambda: _triangle(batch, size, width, window, dtype)), 0


def _triangle(batch: AttentionBatch, size: int, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    device = batch.positions.device
    query = torch.arange(width - size, width, device=device)[:, None]
    key = torch.arange(width, device=device)
    hidden = key > query
    if window is not None:
        hidden |= key <= query - window
    mask = torch.zeros(size, width, dtype=dtype, device=device)
    return mask.masked_fill_(hidden, float("-inf"))[:, None, :]
