"""Reads one safetensors file through a memory map, trusting nothing that its header says.

    8 bytes   header length N, little-endian
    N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
    rest      tensors; offsets count from here

The ``safetensors`` package maps files too, but aborts on some damaged ones with messages that name no file;
this reader also gives what ``revision`` hashes.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from headrace.core.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError

MAX_HEADER_BYTES = 100 * 1024 * 1024
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


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``begin`` and ``end`` are byte positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One open file. Raises CorruptFileError, naming the file, for anything that does not add up."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < 8:
                    raise self._corrupt(f"it is {size} bytes long; the header's length alone takes 8")
                # a private mapping, so that torch may see it as writable; nothing writes
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise ModelNotFoundError(f"{path} does not exist", hint="download the model again") from None
        except OSError as error:
            raise CorruptFileError(f"{path} cannot be read: {error}") from error
        length = int.from_bytes(self._map[:8], "little")
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise self._corrupt(
                f"its header claims {length} bytes; {size - 8} follow and {MAX_HEADER_BYTES} are allowed"
            )
        self._data_start = 8 + length
        self._size = size
        self._header = bytes(self._map[8 : self._data_start])
        self.entries = self._read_entries()

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
        state = sha256(self._header)
        state.update(self._size.to_bytes(8, "little"))
        for entry in self.entries.values():
            middle = (entry.begin + entry.end) // 2
            state.update(self._map[middle : min(entry.end, middle + _SAMPLE_BYTES)])
        return state.digest()

    def _corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path} is no sound safetensors file: {what}",
            hint="the download may be incomplete; download the file again",
        )

    def _read_entries(self) -> dict[str, TensorEntry]:
        try:
            header = json.loads(self._header)
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"its header is no JSON ({str(error)[:100]})") from error
        if not isinstance(header, dict):
            raise self._corrupt("its header is no JSON object")
        header.pop("__metadata__", None)
        entries = {name: self._read_entry(name, fields) for name, fields in header.items()}
        previous = self._data_start
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin < previous:
                raise self._corrupt("tensors overlap")
            previous = entry.end
        return entries

    def _read_entry(self, name: str, fields: Any) -> TensorEntry:
        shown = repr(name[:100])
        if not isinstance(fields, dict):
            raise self._corrupt(f"the header's entry for {shown} is no object")
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str):
            raise self._corrupt(f"tensor {shown} has no dtype")
        if not _is_counts(shape) or len(shape) > 16:
            raise self._corrupt(f"tensor {shown} has the shape {str(shape)[:100]}")
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self._corrupt(f"tensor {shown} has the offsets {str(offsets)[:100]}")
        begin, end = self._data_start + offsets[0], self._data_start + offsets[1]
        if end > self._size:
            raise self._corrupt(f"tensor {shown} ends at byte {end} of {self._size}")
        known = _DTYPES.get(dtype)
        if known is not None and math.prod(shape) * known.itemsize != end - begin:
            raise self._corrupt(f"tensor {shown} of {dtype} {list(shape)} occupies {end - begin} bytes")
        return TensorEntry(dtype, tuple(shape), begin, end)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )
