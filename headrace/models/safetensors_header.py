"""The header of a safetensors file, trusting nothing that it says.

    8 bytes   header length N, little-endian
    N bytes   JSON: {name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__": {...}}
    rest      tensors; offsets count from here

No torch here: the command line checks a folder before it starts the process that needs it. The
``safetensors`` package reads headers too, but aborts on some damaged ones with messages that name no file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from headrace.core.errors import CorruptFileError, ModelNotFoundError

MAX_HEADER_BYTES = 100 * 1024 * 1024
ITEM_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: ``begin`` and ``end`` are byte positions in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """``raw`` is the JSON as it stands in the file, ``size`` the whole file's."""

    raw: bytes
    size: int
    entries: dict[str, TensorEntry]


def check_safetensors(path: Path) -> None:
    """Raises as ``open_safetensors`` does; reads no tensors."""
    with open_safetensors(path):
        pass


@contextmanager
def open_safetensors(path: Path) -> Iterator[tuple[BinaryIO, SafetensorsHeader]]:
    """The open file and its header.

    Raises ModelNotFoundError when there is none, CorruptFileError, naming it, for anything that does not
    add up or cannot be read.
    """
    try:
        with path.open("rb") as file:
            yield file, _Reader(path, os.fstat(file.fileno()).st_size).read(file)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist", hint="download the model again") from None
    except OSError as error:
        raise CorruptFileError(f"{path} cannot be read: {error}") from error


class _Reader:
    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self.data_start = 8

    def read(self, file: BinaryIO) -> SafetensorsHeader:
        if self.size < 8:
            raise self.corrupt(f"it is {self.size} bytes long; the header's length alone takes 8")
        length = int.from_bytes(file.read(8), "little")
        if length > min(MAX_HEADER_BYTES, self.size - 8):
            raise self.corrupt(
                f"its header claims {length} bytes; {self.size - 8} follow and {MAX_HEADER_BYTES} are allowed"
            )
        self.data_start += length
        raw = file.read(length)
        return SafetensorsHeader(raw, self.size, self.entries(raw))

    def corrupt(self, what: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.path} is no sound safetensors file: {what}",
            hint="the download may be incomplete; download the file again",
        )

    def entries(self, raw: bytes) -> dict[str, TensorEntry]:
        try:
            header = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise self.corrupt(f"its header is no JSON ({str(error)[:100]})") from error
        if not isinstance(header, dict):
            raise self.corrupt("its header is no JSON object")
        header.pop("__metadata__", None)
        entries = {name: self.entry(name, fields) for name, fields in header.items()}
        previous = self.data_start
        for entry in sorted(entries.values(), key=lambda entry: (entry.begin, entry.end)):
            if entry.begin < previous:
                raise self.corrupt("tensors overlap")
            previous = entry.end
        if previous != self.size:
            raise self.corrupt(f"its tensors end at byte {previous} of {self.size}")
        return entries

    def entry(self, name: str, fields: Any) -> TensorEntry:
        shown = repr(name[:100])
        if not isinstance(fields, dict):
            raise self.corrupt(f"the header's entry for {shown} is no object")
        dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
        if not isinstance(dtype, str):
            raise self.corrupt(f"tensor {shown} has no dtype")
        if not _is_counts(shape) or len(shape) > 16:
            raise self.corrupt(f"tensor {shown} has the shape {str(shape)[:100]}")
        if not _is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
            raise self.corrupt(f"tensor {shown} has the offsets {str(offsets)[:100]}")
        begin, end = self.data_start + offsets[0], self.data_start + offsets[1]
        if end > self.size:
            raise self.corrupt(f"tensor {shown} ends at byte {end} of {self.size}")
        item_bytes = ITEM_BYTES.get(dtype)
        if item_bytes is not None and math.prod(shape) * item_bytes != end - begin:
            raise self.corrupt(f"tensor {shown} of {dtype} {list(shape)} occupies {end - begin} bytes")
        return TensorEntry(dtype, tuple(shape), begin, end)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 2**63 for item in value
    )
