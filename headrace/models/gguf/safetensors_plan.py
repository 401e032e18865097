"""The safetensors file that a GGUF file's weights are written to: what goes where, and the writing.

    header │ buffers of blocks, one a matrix or fused projection │ plain tensors

Buffers (kernels/block_layout.py) stand first because their sizes are multiples of 64: each starts at one, and
a kernel may read it where it is mapped.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import StartupError
from headrace.kernels.block_layout import BLOCK_SIZES, NAMES, TensorType, header, lay_out, row_bytes
from headrace.kernels.dequantize import Bytes, dequantize, q8_0_of_q5_0, to_bfloat16
from headrace.models.cache import Progress, no_progress
from headrace.models.gguf.config import WeightSource, interleaved_rows
from headrace.models.weight_files import joined_name

_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32"}
_CHUNK_ELEMENTS = 1 << 21
_MAX_THREADS = 8
_KEPT: dict[TensorType, str] = {kind: name for kind, name in NAMES.items() if kind != TensorType.BF16}
# Q5_0 is a Q8_0 whose numbers are small: nothing is lost, and kernels need not know one format more
_KEPT[TensorType.Q5_0] = _KEPT[TensorType.Q8_0]
_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class Place:
    """A source, where its first row goes in the file, and what its rows become: a dtype or a block format."""

    source: WeightSource
    offset: int
    form: str


@dataclass(frozen=True)
class SafetensorsPlan:
    """``starts`` are bytes to write at offsets: the file's header, and those of its buffers."""

    starts: list[tuple[int, bytes]]
    places: list[Place]
    file_bytes: int

    @staticmethod
    def is_quantized(source: WeightSource) -> bool:
        """Whether its blocks can be kept."""
        return len(source.tensor.shape) == 2 and source.tensor.type in _KEPT

    @staticmethod
    def of(weights: list[WeightSource], dtype: str, *, blocks: bool = False) -> SafetensorsPlan:
        """``blocks``: quantized matrices keep their blocks; all else becomes numbers of ``dtype``."""
        groups = _groups(weights) if blocks else []
        grouped = {source.name for group in groups for source in group}
        entries: dict[str, Any] = {"__metadata__": {"format": "headrace-blocks" if groups else "pt"}}
        starts, places = [], []
        end = 0
        for group in groups:
            columns = group[0].tensor.shape[-1]
            forms = [_KEPT[s.tensor.type] if SafetensorsPlan.is_quantized(s) else "bfloat16" for s in group]
            rows = [source.tensor.shape[0] for source in group]
            parts, size = lay_out(list(zip(forms, rows, strict=True)), columns)
            starts.append((end, header(parts)))
            places += [Place(s, end + part.offset, part.format) for s, part in zip(group, parts, strict=True)]
            name = joined_name([source.name for source in group])
            entries[name] = {"dtype": "U8", "shape": [size], "data_offsets": [end, end + size]}
            end += size
        for source in weights:
            if source.name in grouped:
                continue
            size = source.tensor.num_elements * _ITEM_BYTES[dtype]
            places.append(Place(source, end, dtype))
            entries[source.name] = {
                "dtype": _SAFETENSORS_NAMES[dtype],
                "shape": list(source.tensor.shape),
                "data_offsets": [end, end + size],
            }
            end += size
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % 64)
        first = len(text).to_bytes(8, "little") + text
        return SafetensorsPlan(
            [(0, first), *((len(first) + at, content) for at, content in starts)],
            [Place(place.source, len(first) + place.offset, place.form) for place in places],
            len(first) + end,
        )


def _groups(weights: list[WeightSource]) -> list[list[WeightSource]]:
    """Matrices that share a buffer, in the order of their rows; those in which nothing is quantized are left
    out."""
    by_name = {source.name: source for source in weights}
    groups = []
    for source in weights:
        head, _, last = source.name.removesuffix(".weight").rpartition(".")
        names = next((names for names in _FUSED if last in names), (last,))
        if not source.name.endswith(".weight") or len(source.tensor.shape) != 2 or last != names[0]:
            continue
        group = [by_name[f"{head}.{name}.weight" if head else f"{name}.weight"] for name in names]
        if any(SafetensorsPlan.is_quantized(member) for member in group):
            groups.append(group)
    return groups


def write_safetensors(path: Path, plan: SafetensorsPlan, progress: Progress = no_progress) -> None:
    """Writes every tensor of the plan into the file, in chunks of about 2 million elements.

    Memory in use is a few chunks per thread, whatever the model's size.
    """
    if sys.byteorder != "little":
        raise StartupError("GGUF files can only be converted on little-endian machines")
    what = "converting the model"
    done = 0
    with path.open("wb") as file, ThreadPoolExecutor(_num_threads()) as pool:
        file.truncate(plan.file_bytes)
        descriptor = file.fileno()
        for offset, content in plan.starts:
            _write(descriptor, content, offset)
        jobs = [
            pool.submit(_write_rows, descriptor, place, rows)
            for place in plan.places
            for rows in _row_ranges(place.source)
        ]
        try:
            for job in jobs:
                done += job.result()
                progress(what, done, plan.file_bytes)
            progress(what, plan.file_bytes, plan.file_bytes)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        os.fsync(descriptor)


def _num_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MAX_THREADS)


def _row_ranges(source: WeightSource) -> Iterator[tuple[int, int]]:
    num_rows = len(source.tensor.rows)
    step = max(_CHUNK_ELEMENTS // source.tensor.shape[-1], 1)
    for start in range(0, num_rows, step):
        yield start, min(start + step, num_rows)


def _write_rows(descriptor: int, place: Place, rows: tuple[int, int]) -> int:
    """Converts one range of rows and writes it to its place; the number of bytes written."""
    tensor = place.source.tensor
    blocks = _file_rows(place.source, rows)
    if place.form in _ITEM_BYTES:
        values = dequantize(blocks.reshape(-1), tensor.type)
        if place.source.minus_one:
            values -= np.float32(1)
        payload = (to_bfloat16(values).data if place.form == "bfloat16" else values.data).cast("B")
        width = tensor.shape[-1] * _ITEM_BYTES[place.form]
    else:
        kept = q8_0_of_q5_0(blocks) if tensor.type is TensorType.Q5_0 else np.ascontiguousarray(blocks)
        payload = kept.reshape(-1).data
        width = row_bytes(place.form, tensor.shape[-1])
    return _write(descriptor, payload, place.offset + rows[0] * width)


def _file_rows(source: WeightSource, rows: tuple[int, int]) -> Bytes:
    """The blocks of a range of rows, in the order of the model's rows."""
    tensor = source.tensor
    found: Bytes = tensor.rows[rows[0] : rows[1]]
    if source.interleaved_heads:
        if len(tensor.shape) == 1:  # a bias: every element is its own row
            found = tensor.data.reshape(-1, BLOCK_SIZES[tensor.type][1])
            found = found[interleaved_rows(len(found), source.interleaved_heads)]
        else:
            order = interleaved_rows(len(tensor.rows), source.interleaved_heads)
            found = tensor.rows[order[rows[0] : rows[1]]]
    return found


def _write(descriptor: int, payload: bytes | memoryview, offset: int) -> int:
    view = memoryview(payload)
    written = 0
    while written < len(view):
        written += os.pwrite(descriptor, view[written:], offset + written)
    return written
