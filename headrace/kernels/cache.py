"""One layer's keys and values.

Row layout, one row a slot (slot = block * block_size + offset in the block):

    │ k head 0 … k head Hk-1 │ v head 0 … v head Hk-1 │
      head_dim each            v_head_dim each

so a block is one contiguous piece of memory, a token's K and V are written by one index copy, and a
run of consecutive blocks is read without copying.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class LayerKV:
    """Paged storage of one layer; make it with ``allocate``.

    rows    (num_blocks * block_size, num_kv_heads * (head_dim + v_head_dim))
    blocks  the same memory as (num_blocks, block_size * row size)
    keys    the same memory as (num_kv_heads, slots, head_dim), strided
    values  the same memory as (num_kv_heads, slots, v_head_dim), strided
    """

    rows: Tensor
    blocks: Tensor
    keys: Tensor
    values: Tensor
    block_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int

    @classmethod
    def allocate(
        cls,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> LayerKV:
        """Zeroed storage for ``num_blocks`` blocks (zeroed so that no padding read is ever NaN)."""
        v_dim = head_dim if v_head_dim is None else v_head_dim
        width = num_kv_heads * (head_dim + v_dim)
        rows = _zeros(num_blocks * block_size, width, dtype, torch.device(device))
        split = num_kv_heads * head_dim
        return cls(
            rows=rows,
            blocks=rows.view(num_blocks, block_size * width),
            keys=rows[:, :split].view(-1, num_kv_heads, head_dim).transpose(0, 1),
            values=rows[:, split:].view(-1, num_kv_heads, v_dim).transpose(0, 1),
            block_size=block_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            v_head_dim=v_dim,
        )

    @staticmethod
    def bytes_per_block(
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> int:
        """Bytes that one block takes in one layer."""
        v_dim = head_dim if v_head_dim is None else v_head_dim
        return block_size * num_kv_heads * (head_dim + v_dim) * dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes


def _zeros(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU without touching the memory: numpy leaves it to the system to hand out zeroed pages
    as they are first written, so that starting up costs nothing and an idle cache takes no memory."""
    if device.type != "cpu":
        return torch.zeros(num_rows, width, dtype=dtype, device=device)
    raw = np.zeros(num_rows * width * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).view(num_rows, width)
