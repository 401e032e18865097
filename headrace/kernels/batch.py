"""What one step attends to: whose token rows, at which positions, over which cache blocks.

rows of the batch
┌──────────────────────┬──────────────────┬──────────────────┐
│ num_decodes rows,    │ prefills[0]      │ prefills[1]      │
│ one per sequence     │ [start, end)     │ [start, end)     │
└──────────────────────┴──────────────────┴──────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")
_Ids = np.ndarray[Any, np.dtype[np.int64]]


class BatchEntry(NamedTuple):
    """One sequence's part of a step: ``num_new_tokens`` after ``context_len`` tokens already cached.

    ``block_table`` is the sequence's blocks in order (any sequence of ints; ``array('q')`` is fastest);
    it must cover context_len + num_new_tokens tokens and may be longer.
    """

    context_len: int
    num_new_tokens: int
    block_table: Sequence[int]


@dataclass(frozen=True)
class PrefillChunk:
    """Token rows [start, end) of the batch: one sequence's next tokens after ``context_len`` cached ones.

    ``block_table``: (num_blocks,) int64, covers exactly context_len + (end - start) tokens.
    ``first_slot`` is set when the blocks are consecutive: token t then lies in slot first_slot + t.
    """

    start: int
    end: int
    context_len: int
    block_table: Tensor
    first_slot: int | None = None


@dataclass(frozen=True)
class AttentionBatch:
    """One step's rows. Built once a step, shared by all layers; make it with ``build``.

    positions            (num_tokens,) int64
    slot_mapping         (num_tokens,) int64: block * block_size + offset, where each row's K and V go
    num_decodes          the first rows, one token of one sequence each
    decode_block_tables  (num_decodes, max_blocks) int64, padded with block 0
    decode_lens          (num_decodes,) int64: keys each row attends to, its own included
    """

    positions: Tensor
    slot_mapping: Tensor
    num_decodes: int
    decode_block_tables: Tensor
    decode_lens: Tensor
    decode_lens_list: list[int]
    prefills: list[PrefillChunk]
    block_size: int
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def first_slot(self) -> int:
        """The first row's slot."""
        return int(self.slot_mapping[0])

    @cached_property
    def decode_first_slots(self) -> list[int | None]:
        """For each decode the slot of its token 0 if its blocks are consecutive, else None."""
        tables = self.decode_block_tables.cpu().numpy()
        return [
            _first_slot(table[: -(-length // self.block_size)], self.block_size)
            for table, length in zip(tables, self.decode_lens_list, strict=True)
        ]

    @cached_property
    def num_positions(self) -> int:
        """One more than the highest of ``positions``."""
        chunks = [chunk.context_len + chunk.end - chunk.start for chunk in self.prefills]
        return max(*self.decode_lens_list, *chunks, 0, 0)

    @property
    def num_tokens(self) -> int:
        return self.positions.shape[0]

    def memo(self, key: Any, make: Callable[[], T]) -> T:
        """``make()``, kept for the rest of the step: masks and indices that all layers share."""
        try:
            found: T = self._memo[key]
        except KeyError:
            found = self._memo[key] = make()
        return found

    @classmethod
    def build(
        cls, entries: Sequence[BatchEntry], block_size: int, device: torch.device | str = "cpu"
    ) -> AttentionBatch:
        """The batch of ``entries`` in order; all one-token entries must come first.

        Token rows follow the entries: row order of the caller's token ids. A one-token entry anywhere
        is a decode, whatever its context (0 included).
        """
        num_decodes = 0
        while num_decodes < len(entries) and entries[num_decodes].num_new_tokens == 1:
            num_decodes += 1
        assert all(e.num_new_tokens > 1 for e in entries[num_decodes:]), "one-token entries come first"

        lens = [entry.context_len + 1 for entry in entries[:num_decodes]]
        padded = np.zeros((num_decodes, -(-max(lens, default=0) // block_size)), dtype=np.int64)
        for row, entry in zip(padded, entries, strict=False):
            blocks = _blocks(entry, block_size)
            row[: len(blocks)] = blocks
        decode_lens = np.array(lens, dtype=np.int64)
        block, offset = np.divmod(decode_lens - 1, block_size)
        positions = [decode_lens - 1]
        slots = [padded[np.arange(num_decodes), block] * block_size + offset]
        prefills = []
        start = num_decodes
        for entry in entries[num_decodes:]:
            table = np.array(_blocks(entry, block_size), dtype=np.int64)
            where = np.arange(entry.context_len, entry.context_len + entry.num_new_tokens)
            positions.append(where)
            slots.append(table[where // block_size] * block_size + where % block_size)
            first_slot, table_tensor = _first_slot(table, block_size), torch.from_numpy(table).to(device)
            end = start + entry.num_new_tokens
            prefills.append(PrefillChunk(start, end, entry.context_len, table_tensor, first_slot))
            start = end
        return cls(
            positions=_tensor(positions, device),
            slot_mapping=_tensor(slots, device),
            num_decodes=num_decodes,
            decode_block_tables=torch.from_numpy(padded).to(device),
            decode_lens=torch.from_numpy(decode_lens).to(device),
            decode_lens_list=lens,
            prefills=prefills,
            block_size=block_size,
        )


def _blocks(entry: BatchEntry, block_size: int) -> Sequence[int]:
    """The blocks that hold the entry's tokens."""
    needed = -(-(entry.context_len + entry.num_new_tokens) // block_size)
    blocks = entry.block_table[:needed]
    assert len(blocks) == needed, f"{needed} blocks needed, block table has {len(blocks)}"
    return blocks


def _tensor(parts: list[_Ids], device: torch.device | str) -> Tensor:
    """Parts side by side."""
    return torch.from_numpy(parts[0] if len(parts) == 1 else np.concatenate(parts)).to(device)


def _first_slot(table: _Ids, block_size: int) -> int | None:
    """The first block's first slot when the blocks are consecutive."""
    if len(table) > 1 and (int(table[-1]) - int(table[0]) != len(table) - 1 or (np.diff(table) != 1).any()):
        return None
    return int(table[0]) * block_size
