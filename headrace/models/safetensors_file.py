"""The tensors of one safetensors file, through a memory map."""

from __future__ import annotations

import math
import mmap
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.errors import UnsupportedModelError
from headrace.models.safetensors_header import open_safetensors

_SAMPLE_BYTES = 4096

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class SafetensorsFile:
    """One open file. Raises what ``open_safetensors`` raises."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open_safetensors(path) as (file, header):
            self._header = header
            # a private mapping, so that torch may see it as writable; nothing writes
            self._map = mmap.mmap(file.fileno(), header.size, access=mmap.ACCESS_COPY)
        self.entries = header.entries

    def get(self, name: str) -> Tensor:
        """A view of the file's bytes; copy it before the file may change."""
        entry = self.entries[name]
        dtype = _DTYPES.get(entry.dtype)
        if dtype is None:
            raise UnsupportedModelError(
                f"{self.path.name}: tensor {name} is stored as {entry.dtype}; "
                "float32, float16 or bfloat16 is needed",
                hint="use the original checkpoint with --quantization int8, or a GGUF file",
            )
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=dtype)
        if entry.begin % dtype.itemsize:
            data = bytearray(self._map[entry.begin : entry.end])
            return torch.frombuffer(data, dtype=dtype).view(entry.shape)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=entry.begin).view(entry.shape)

    def release(self) -> None:
        """Lets the system drop the pages read so far; views stay valid and read them again."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def digest(self) -> bytes:
        """SHA-256 over the header, the size and a sample of every tensor: cheap, and unlike for any
        two checkpoints that were trained differently."""
        state = sha256(self._header.raw)
        state.update(self._header.size.to_bytes(8, "little"))
        for entry in self.entries.values():
            middle = (entry.begin + entry.end) // 2
            state.update(self._map[middle : min(entry.end, middle + _SAMPLE_BYTES)])
        return state.digest()
