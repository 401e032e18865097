"""One layer's keys and values.

Head-major: each head's slots lie side by side (slot = block * block_size + offset in the block), so a run
of consecutive blocks is a dense matrix (slots, head_dim) that a matrix product reads without copying.

    head 0      │ block 0 │ block 1 │ …          keys and values share one tensor when their widths are
    head 1      │ block 0 │ block 1 │ …          equal: ``joint`` (2 * heads, slots, head_dim), keys first,
    …                                            so that one op writes, and one op gathers, both
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_CACHE_LINE = 64


@dataclass(frozen=True)
class LayerKV:
    """Paged storage of one layer; make it with ``allocate``.

    keys          (num_kv_heads, slots, head_dim)
    values        (num_kv_heads, slots, v_head_dim)
    joint         (2 * num_kv_heads, slots, head_dim), both of the above; None when their widths differ
    key_blocks    keys as (num_kv_heads, num_blocks, block_size * head_dim); likewise the other two
    """

    keys: Tensor
    values: Tensor
    joint: Tensor | None
    key_blocks: Tensor
    value_blocks: Tensor
    joint_blocks: Tensor | None
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
        slots = num_blocks * block_size
        where = torch.device(device)
        joint = joint_blocks = None
        if v_dim == head_dim:
            joint = _zeros((2 * num_kv_heads, slots, head_dim), dtype, where)
            joint_blocks = joint.view(2 * num_kv_heads, num_blocks, -1)
            keys, values = joint[:num_kv_heads], joint[num_kv_heads:]
        else:
            keys = _zeros((num_kv_heads, slots, head_dim), dtype, where)
            values = _zeros((num_kv_heads, slots, v_dim), dtype, where)
        return cls(
            keys=keys,
            values=values,
            joint=joint,
            key_blocks=keys.view(num_kv_heads, num_blocks, -1),
            value_blocks=values.view(num_kv_heads, num_blocks, -1),
            joint_blocks=joint_blocks,
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
        return self.keys.nbytes + self.values.nbytes

    def gather(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the keys and values of ``blocks`` (n,): (num_kv_heads, n * block_size, dim) each."""
        heads, slots = self.num_kv_heads, blocks.shape[0] * self.block_size
        if self.joint_blocks is not None:
            both = self.joint_blocks.index_select(1, blocks).view(2 * heads, slots, self.head_dim)
            return both[:heads], both[heads:]
        return (
            self.key_blocks.index_select(1, blocks).view(heads, slots, self.head_dim),
            self.value_blocks.index_select(1, blocks).view(heads, slots, self.v_head_dim),
        )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, on a CPU without touching the memory: numpy leaves it to the system to hand out zeroed pages
    as they are first written, so that starting up costs nothing and an idle cache takes no memory.

    It begins at a cache line. Huge pages are not asked for: slots of a block lie apart, one
    stretch a head and layer, so that a few blocks would take a huge page for each of them.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    count = 1
    for size in shape:
        count *= size
    size = count * dtype.itemsize
    raw = np.zeros(size + _CACHE_LINE, dtype=np.uint8)
    start = -raw.ctypes.data % _CACHE_LINE
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(shape)
