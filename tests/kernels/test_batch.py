"""The record of a step's rows."""

from __future__ import annotations

from array import array

import pytest
import torch

from headrace.kernels.batch import AttentionBatch, BatchEntry
from headrace.kernels.cache import LayerKV


def test_rows_positions_and_slots() -> None:
    batch = AttentionBatch.build(
        [BatchEntry(3, 1, [5]), BatchEntry(4, 1, array("q", [2, 7, 9])), BatchEntry(2, 7, [1, 4, 3])], 4
    )
    assert batch.positions.tolist() == [3, 4, *range(2, 9)]
    assert batch.slot_mapping.tolist() == [23, 28, 6, 7, 16, 17, 18, 19, 12]
    assert batch.num_decodes == 2
    assert batch.decode_block_tables.tolist() == [[5, 0], [2, 7]]
    assert batch.decode_lens.tolist() == batch.decode_lens_list == [4, 5]
    (chunk,) = batch.prefills
    assert (chunk.start, chunk.end, chunk.context_len) == (2, 9, 2)
    assert chunk.block_table.tolist() == [1, 4, 3]


def test_consecutive_blocks_are_noticed() -> None:
    batch = AttentionBatch.build(
        [BatchEntry(8, 1, [4, 5, 6]), BatchEntry(8, 1, [4, 6, 5]), BatchEntry(0, 8, [2, 3])], 4
    )
    assert batch.decode_first_slots == [16, None]
    assert batch.prefills[0].first_slot == 8


def test_no_rows() -> None:
    batch = AttentionBatch.build([], 4)
    assert batch.num_tokens == batch.num_decodes == 0
    assert batch.prefills == []


def test_a_short_block_table_is_our_bug() -> None:
    with pytest.raises(AssertionError, match="3 blocks needed"):
        AttentionBatch.build([BatchEntry(8, 1, [1, 2])], 4)


def test_decodes_come_first() -> None:
    with pytest.raises(AssertionError, match="come first"):
        AttentionBatch.build([BatchEntry(0, 2, [1]), BatchEntry(0, 1, [2])], 4)


@pytest.mark.parametrize("v_head_dim", [None, 8])
def test_cache_size(v_head_dim: int | None) -> None:
    kv = LayerKV.allocate(10, 4, 2, 16, v_head_dim, dtype=torch.bfloat16)
    assert kv.nbytes == 10 * LayerKV.bytes_per_block(4, 2, 16, v_head_dim, torch.bfloat16)
    assert kv.keys.shape == (2, 40, 16)
    assert kv.values.shape == (2, 40, v_head_dim or 16)
    kv.keys[1, 12:16] = 3.0
    keys, values = kv.gather(torch.tensor([3, 0]))
    assert keys[1, :4].eq(3.0).all() and keys[1, 4:].eq(0.0).all() and values.eq(0.0).all()


@pytest.mark.parametrize("v_head_dim", [16, 32])
def test_a_cache_begins_at_a_cache_line(v_head_dim):
    for blocks in (1, 3, 1000):
        kv = LayerKV.allocate(blocks, 16, 2, 16, v_head_dim, dtype=torch.bfloat16)
        assert kv.keys.data_ptr() % 64 == kv.values.data_ptr() % 64 == 0
        assert not kv.keys.any() and not kv.values.any()
