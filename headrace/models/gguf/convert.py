"""A GGUF file made into a model folder that our loader, Transformers and vLLM read, once, on disk.

converted/<sha256 of the file>-<dtype>-v<CONVERTER_VERSION>/
    config.json  model.safetensors  generation_config.json
    tokenizer.json  tokenizer_config.json  chat_template.jinja
    headrace.json        what it was made of; the folder counts only when sizes match it
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headrace.core.errors import CorruptFileError, ModelNotFoundError, StartupError
from headrace.kernels.block_layout import BLOCK_SIZES
from headrace.kernels.dequantize import dequantize, to_bfloat16
from headrace.models.cache import (
    Progress,
    cache_folder,
    file_digest,
    locked,
    new_folder,
    no_progress,
    read_record,
    write_json,
)
from headrace.models.gguf.config import MappedModel, WeightSource, interleaved_rows, map_model
from headrace.models.gguf.reader import read_gguf, shard_paths
from headrace.models.gguf.tokenizer import MappedTokenizer, map_tokenizer

CONVERTER_VERSION = 1
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}
_SAFETENSORS_NAMES = {"bfloat16": "BF16", "float32": "F32"}
_CHUNK_ELEMENTS = 1 << 21
_MAX_THREADS = 8


def converted_folder(path: Path, *, dtype: str, progress: Progress = no_progress) -> Path:
    """The model folder for a GGUF file, made now unless it was made before.

    ``dtype`` is "bfloat16" or "float32". Raises what ``read_gguf``, ``map_model`` and ``map_tokenizer``
    raise, and StartupError where the cache has no room.
    """
    return folder_for_digest(gguf_digest(path, progress), dtype) or _convert(path, dtype, progress)


def gguf_digest(path: Path, progress: Progress = no_progress) -> str:
    """SHA-256 that names a GGUF file, or all shards of a split one together."""
    shards = shard_paths(path)
    for shard in shards:
        _check_start(shard)
    digests = [file_digest(shard, progress) for shard in shards]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _check_start(path: Path) -> None:
    """Tells a missing or wrong file before anything hashes gigabytes of it."""
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error.strerror}") from error
    if start != b"GGUF":
        raise CorruptFileError(
            f"{path}: a GGUF file starts with b'GGUF', this with {start!r}",
            hint="The file is damaged, half downloaded, or something else: fetch it again.",
        )


def folder_for_digest(digest: str, dtype: str) -> Path | None:
    """The complete converted folder of a file with that SHA-256, if there is one."""
    folder = _target(digest, dtype)
    record = read_record(folder / "headrace.json")
    if not isinstance(record, dict) or not isinstance(record.get("files"), dict):
        return None
    with contextlib.suppress(OSError):
        if all((folder / name).stat().st_size == size for name, size in record["files"].items()):
            return folder
    return None


def _target(digest: str, dtype: str) -> Path:
    return cache_folder() / "converted" / f"{digest}-{dtype}-v{CONVERTER_VERSION}"


def _convert(path: Path, dtype: str, progress: Progress) -> Path:
    digest = gguf_digest(path)
    target = _target(digest, dtype)
    with locked(target.name):
        made = folder_for_digest(digest, dtype)  # by another process, while this one waited
        if made is not None:
            return made
        file = read_gguf(path)
        model = map_model(file)
        tokenizer = map_tokenizer(file, model.config["vocab_size"])
        plan = SafetensorsPlan.of(model.weights, dtype)
        with new_folder(target, needed_bytes=plan.file_bytes + (64 << 20)) as folder:
            write_safetensors(folder / "model.safetensors", plan, progress)
            _write_texts(folder, model, tokenizer, dtype)
            record = {
                "source": str(path.resolve()),
                "sha256": digest,
                "dtype": dtype,
                "converter_version": CONVERTER_VERSION,
                "revision": f"{digest}-{dtype}-v{CONVERTER_VERSION}",
                "files": {entry.name: entry.stat().st_size for entry in sorted(folder.iterdir())},
            }
            write_json(folder / "headrace.json", record)
    return target


def _write_texts(folder: Path, model: MappedModel, tokenizer: MappedTokenizer, dtype: str) -> None:
    eos = tokenizer.eos_token_ids
    ids: dict[str, Any] = {"bos_token_id": tokenizer.bos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = model.config | ids | {"eos_token_id": eos[0] if eos else None, "torch_dtype": dtype}
    generation = {name: value for name, value in ids.items() if value is not None}
    if eos:
        generation["eos_token_id"] = eos
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", generation)
    write_json(folder / "tokenizer_config.json", tokenizer.tokenizer_config)
    text = json.dumps(tokenizer.tokenizer, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, "utf-8")
    if tokenizer.chat_template is not None:
        (folder / "chat_template.jinja").write_text(tokenizer.chat_template, "utf-8")


@dataclass(frozen=True)
class SafetensorsPlan:
    """Where each tensor goes in a safetensors file: header first, then the data without gaps."""

    dtype: str
    header: bytes
    places: list[tuple[WeightSource, int]]  # offset in the file
    file_bytes: int

    @staticmethod
    def of(weights: list[WeightSource], dtype: str) -> SafetensorsPlan:
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        starts = []
        end = 0
        for source in weights:
            starts.append(end)
            end += source.tensor.num_elements * _ITEM_BYTES[dtype]
            entries[source.name] = {
                "dtype": _SAFETENSORS_NAMES[dtype],
                "shape": list(source.tensor.shape),
                "data_offsets": [starts[-1], end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 64)
        header = len(text).to_bytes(8, "little") + text
        places = [(source, len(header) + start) for source, start in zip(weights, starts, strict=True)]
        return SafetensorsPlan(dtype, header, places, len(header) + end)


def write_safetensors(path: Path, plan: SafetensorsPlan, progress: Progress = no_progress) -> None:
    """Dequantizes every tensor of the plan into the file, in chunks of about 2 million elements.

    Memory in use is a few chunks per thread, whatever the model's size.
    """
    if sys.byteorder != "little":
        raise StartupError("GGUF files can only be converted on little-endian machines")
    what = "converting the model"
    done = len(plan.header)
    with path.open("wb") as file, ThreadPoolExecutor(_num_threads()) as pool:
        file.write(plan.header)
        file.truncate(plan.file_bytes)
        file.flush()
        descriptor = file.fileno()
        jobs = [
            pool.submit(_write_rows, descriptor, source, start, rows, plan.dtype)
            for source, start in plan.places
            for rows in _row_ranges(source)
        ]
        try:
            for job in jobs:
                done += job.result()
                progress(what, done, plan.file_bytes)
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


def _write_rows(descriptor: int, source: WeightSource, start: int, rows: tuple[int, int], dtype: str) -> int:
    """Converts one range of rows and writes it to its place; the number of bytes written."""
    tensor = source.tensor
    blocks = tensor.rows[rows[0] : rows[1]]
    if source.interleaved_heads:
        if len(tensor.shape) == 1:  # a bias: every element is its own row
            block_bytes = BLOCK_SIZES[tensor.type][1]
            blocks = tensor.data.reshape(-1, block_bytes)
            blocks = blocks[interleaved_rows(len(blocks), source.interleaved_heads)]
        else:
            order = interleaved_rows(len(tensor.rows), source.interleaved_heads)
            blocks = tensor.rows[order[rows[0] : rows[1]]]
    values = dequantize(blocks.reshape(-1), tensor.type)
    if source.minus_one:
        values -= np.float32(1)
    payload = (to_bfloat16(values).data if dtype == "bfloat16" else values.data).cast("B")
    offset = start + rows[0] * tensor.shape[-1] * _ITEM_BYTES[dtype]
    written = 0
    while written < len(payload):
        written += os.pwrite(descriptor, payload[written:], offset + written)
    return written
