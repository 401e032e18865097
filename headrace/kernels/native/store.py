"""Memory for the forms of weights that native kernels read, counted once."""

from __future__ import annotations

import ctypes
import mmap
from weakref import WeakValueDictionary

from torch import Tensor

from headrace.kernels.native.abi import ALIGNMENT
from headrace.kernels.weights import PackedLinear

_CHUNK = 256 * 1024 * 1024


class WeightStore:
    """One pack's copies of a model's weights; they live as long as the store or who took them does.

    Packed forms lie side by side in the order in which they are made, in huge pages where the system
    grants them: a model is read in that order, token by token.
    """

    def __init__(self) -> None:
        self.packed_bytes = 0
        self._chunks: list[mmap.mmap] = []
        self._next = self._end = 0
        self._kept: dict[int, tuple[PackedLinear, Tensor]] = {}
        self._dense: WeakValueDictionary[int, Tensor] = WeakValueDictionary()

    def allot(self, nbytes: int) -> int:
        """The address of ``nbytes`` zeroed bytes, aligned to ALIGNMENT."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if self._next + size > self._end:
            self._grow(size)
        address = self._next
        self._next += size
        self.packed_bytes += size
        return address

    def take_back(self, address: int, nbytes: int) -> None:
        """Undoes the last ``allot``."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        assert address + size == self._next
        self._next = address
        self.packed_bytes -= size

    def dense(self, packed: PackedLinear) -> Tensor:
        """The weight as a contiguous (out_features, in_features) tensor, or the buffer of its blocks;
        the same one while anybody holds it."""
        if packed.form == "blocks":
            assert packed.weight is not None
            return packed.weight
        found = self._dense.get(id(packed))
        if found is None:
            found = self._dense[id(packed)] = packed.dense().contiguous()
        return found

    def keep(self, packed: PackedLinear, dense: Tensor) -> int:
        """Holds a dense form for good; the bytes that this takes more than before."""
        if id(packed) in self._kept or packed.shares(dense):
            return 0
        self._kept[id(packed)] = (packed, dense)
        return dense.nbytes

    def _grow(self, size: int) -> None:
        """A new chunk; memory that is not touched costs nothing."""
        length = max(_CHUNK, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        chunk = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            chunk.madvise(mmap.MADV_HUGEPAGE)
        self._chunks.append(chunk)
        self._next = ctypes.addressof(ctypes.c_char.from_buffer(chunk))
        self._end = self._next + length
