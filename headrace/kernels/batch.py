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
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class BatchEntry:
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
    decode_first_slots   for each decode the slot of its token 0 if its blocks are consecutive, else None
    """

    positions: Tensor
    slot_mapping: Tensor
    num_decodes: int
    decode_block_tables: Tensor
    decode_lens: Tensor
    decode_lens_list: list[int]
    decode_first_slots: list[int | None]
    prefills: list[PrefillChunk]
    block_size: int
    _memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def first_slot(self) -> int:
        """The first row's slot."""
        return int(self.slot_mapping[0])

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
        tables = [_table(entry, block_size) for entry in entries]
        first_slots = [_first_slot(table, block_size) for table in tables]
        num_decodes = 0
        while num_decodes < len(entries) and entries[num_decodes].num_new_tokens == 1:
            num_decodes += 1
        assert all(e.num_new_tokens > 1 for e in entries[num_decodes:]), "one-token entries come first"

        lens = [e.context_len + 1 for e in entries[:num_decodes]]
        width = max((len(t) for t in tables[:num_decodes]), default=0)
        padded = np.zeros((num_decodes, width), dtype=np.int64)
        for row, table in zip(padded, tables, strict=False):
            row[: len(table)] = table

        positions = np.concatenate(
            [np.arange(e.context_len, e.context_len + e.num_new_tokens) for e in entries]
            or [np.zeros(0, dtype=np.int64)]
        )
        slots = np.empty_like(positions)
        prefills = []
        row_start = 0
        for index, (entry, table) in enumerate(zip(entries, tables, strict=True)):
            row_end = row_start + entry.num_new_tokens
            where = positions[row_start:row_end]
            slots[row_start:row_end] = table[where // block_size] * block_size + where % block_size
            if index >= num_decodes:
                blocks = torch.from_numpy(table).to(device)
                prefills.append(
                    PrefillChunk(row_start, row_end, entry.context_len, blocks, first_slots[index])
                )
            row_start = row_end
        return cls(
            positions=torch.from_numpy(positions).to(device),
            slot_mapping=torch.from_numpy(slots).to(device),
            num_decodes=num_decodes,
            decode_block_tables=torch.from_numpy(padded).to(device),
            decode_lens=torch.tensor(lens, dtype=torch.int64, device=device),
            decode_lens_list=lens,
            decode_first_slots=first_slots[:num_decodes],
            prefills=prefills,
            block_size=block_size,
        )


def _table(entry: BatchEntry, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The blocks that hold the entry's tokens, as int64."""
    needed = -(-(entry.context_len + entry.num_new_tokens) // block_size)
    table = np.array(entry.block_table[:needed], dtype=np.int64)
    assert len(table) == needed, f"{needed} blocks needed, block table has {len(table)}"
    return table


def _first_slot(table: np.ndarray[Any, np.dtype[np.int64]], block_size: int) -> int | None:
    """The first block's first slot when the blocks are consecutive."""
    if len(table) > 1 and (int(table[-1]) - int(table[0]) != len(table) - 1 or (np.diff(table) != 1).any()):
        return None
    return int(table[0]) * block_size
