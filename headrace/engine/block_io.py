"""A block's bytes out of the cache, and into it.

payload   │ layer 0: keys of head 0, head 1, … │ its values, likewise │ layer 1: keys … │ …
          as they are stored: what one cache wrote, another of the same format reads
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.cache import LayerKV

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
# Of each type: as an unsigned integer, and its exponent's bits, all of them set in NaN and infinities.
_EXPONENTS: dict[torch.dtype, tuple[type[np.unsignedinteger[Any]], int]] = {
    torch.float32: (np.uint32, 0x7F80_0000),
    torch.bfloat16: (np.uint16, 0x7F80),
    torch.float16: (np.uint16, 0x7C00),
}


class BlockIO:
    """Copies whole blocks of ``kv``, all layers' caches. ``read`` may be called from any thread."""

    def __init__(self, kv: list[LayerKV], *, direct: bool | None = None) -> None:
        """``direct``: by plain copies in main memory, rather than through a buffer there, as it must be for a
        cache on a card; None: wherever that is possible."""
        stores: list[Tensor] = []
        for layer in kv:
            # keys and values of one tensor are one copy: keys come first in it
            joint = layer.joint_blocks
            stores += [joint] if joint is not None else [layer.key_blocks, layer.value_blocks]
        (self._dtype,) = {store.dtype for store in stores}
        self._stores = [store.view(torch.uint8) for store in stores]  # (heads, num_blocks, bytes)
        self.block_bytes = sum(store.shape[0] * store.shape[2] for store in self._stores)
        self._arrays: list[Bytes] = []  # the same memory, where it is main memory
        if direct is None:
            direct = all(store.device.type == "cpu" for store in self._stores)
        if direct:
            self._arrays = [store.numpy() for store in self._stores]
        self._staging = torch.empty(0 if self._arrays else self.block_bytes, dtype=torch.uint8)

    def read(self, blocks: Sequence[int]) -> list[bytearray]:
        """Copies of ``blocks``, ``block_bytes`` each."""
        payloads = [bytearray(self.block_bytes) for _ in blocks]
        for block, payload in zip(blocks, payloads, strict=True):
            row = np.frombuffer(payload, dtype=np.uint8)
            if self._arrays:
                for source, part in zip(self._arrays, _parts(row, self._arrays), strict=True):
                    part[...] = source[:, block]
            else:
                parts = [store[:, block].reshape(-1) for store in self._stores]
                row[...] = torch.cat(parts).cpu().numpy()
        return payloads

    def is_finite(self, payload: bytes | bytearray) -> bool:
        """Whether every number in ``payload`` is: one that is not makes NaN of whoever reads the block."""
        known = _EXPONENTS.get(self._dtype)
        if known is None:
            return True
        unsigned, exponent = known
        # numpy, not torch: reader threads call this, and each would get a pool of threads of its own
        numbers = np.frombuffer(payload, dtype=unsigned)
        return int((numbers & unsigned(exponent)).max(initial=0)) != exponent

    def write(self, block: int, payload: bytes | bytearray) -> None:
        """Puts ``payload``, of ``block_bytes``, into a block that nobody reads."""
        row = np.frombuffer(payload, dtype=np.uint8)
        assert len(row) == self.block_bytes, (len(row), self.block_bytes)
        if self._arrays:
            for array, values in zip(self._arrays, _parts(row, self._arrays), strict=True):
                array[:, block] = values
            return
        self._staging.numpy()[...] = row
        start = 0
        for store in self._stores:
            heads, _, width = store.shape
            part = self._staging[start : start + heads * width].view(heads, width)
            store[:, block].copy_(part)
            start += heads * width


def _parts(row: Bytes, stores: list[Bytes]) -> list[Bytes]:
    """Views of a payload, one for each store: (heads, bytes)."""
    parts, start = [], 0
    for store in stores:
        heads, _, width = store.shape
        parts.append(row[start : start + heads * width].reshape(heads, width))
        start += heads * width
    return parts
