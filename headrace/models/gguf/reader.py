"""Reads GGUF files (versions 2 and 3, little endian) without trusting a single number in them.

    ┌ header ──────────────────────────────┐ "GGUF", version, tensor count, metadata count
    │ metadata: key, type, value           │ value: scalar, string, or array of these
    │ tensor infos: name, dims, type, off  │ off counts from the start of the data
    ├ padding to `general.alignment` ──────┤
    │ tensor data, each aligned            │ memory-mapped, never copied here
    └──────────────────────────────────────┘

Every count is checked against the bytes that are left, and the number of objects against a limit, before
anything of that size is made: a hostile header costs memory in proportion to the file, up to a bound.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.core.errors import CorruptFileError, ModelNotFoundError, UnsupportedModelError
from headrace.kernels.block_layout import BLOCK_SIZES, TensorType

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MAX_NAME_BYTES = 128
MAX_KEY_BYTES = 65535
MAX_ARRAY_DEPTH = 4
MAX_OBJECTS = 1 << 24
MAX_ENTRIES = 1 << 18
_MIN_KV_BYTES = 8 + 4 + 1
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_SCALARS: dict[int, np.dtype[Any]] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_STRING = 8
_ARRAY = 9
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True)
class Tensor:
    """One tensor: ``shape`` row-major (outermost first), ``data`` its raw blocks, mapped from the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    data: Bytes  # (nbytes,)

    @property
    def num_elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def rows(self) -> Bytes:
        """The blocks row by row: (product of the outer dimensions, bytes of one row)."""
        return self.data.reshape(self.num_elements // self.shape[-1], -1)


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensors of a file, or of all shards of a split one.

    Metadata values are int, float, bool, str, numpy arrays (of numbers) or lists (of strings, arrays).
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def architecture(self) -> str:
        return self.string("general.architecture")

    def string(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise CorruptFileError(
                f"{self.path}: metadata needs the string {key}, there is {describe(value)}"
            )
        return value


def describe(value: object) -> str:
    """What a metadata value is, short enough for a message."""
    if value is None:
        return "none"
    if isinstance(value, (list, np.ndarray)):
        return f"an array of {len(value)}"
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 40 else text[:37] + '...'}"


def read_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Metadata and tensor table of a GGUF file; a shard of a split file brings all its shards.

    Raises ModelNotFoundError (no such file, a shard missing), CorruptFileError (truncated, damaged,
    hostile), UnsupportedModelError (version, byte order or tensor type not readable here).
    """
    shards = [_Parser(shard).parse() for shard in shard_paths(Path(path))]
    first = shards[0]
    count = first.metadata.get("split.count", len(shards))
    if isinstance(count, int) and count not in (0, len(shards)):
        raise ModelNotFoundError(
            f"{first.path} says it is one of {count} shards, there is {len(shards)}",
            hint="Keep all shards in one folder under their original names (-00001-of-0000N.gguf).",
        )
    tensors = dict(first.tensors)
    for shard in shards[1:]:
        twice = tensors.keys() & shard.tensors.keys()
        if twice:
            raise CorruptFileError(f"{shard.path}: tensor {min(twice)} is also in an earlier shard")
        tensors |= shard.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if len(shards) > 1 and total != len(tensors):
        raise CorruptFileError(f"{first.path}: {total} tensors announced, its shards hold {len(tensors)}")
    return GGUFFile(first.path, first.version, first.metadata, tensors)


def shard_paths(path: Path) -> list[Path]:
    """All shards, first one first, of the split file that ``path`` is one shard of; else ``[path]``."""
    match = re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})\.gguf", path.name)
    if match is None or not 1 <= int(match[3]) <= 999:
        return [path]
    shards = [path.with_name(f"{match[1]}-{i:05d}-of-{match[3]}.gguf") for i in range(1, int(match[3]) + 1)]
    missing = [shard.name for shard in shards if not shard.is_file()]
    if missing:
        raise ModelNotFoundError(
            f"{path.parent}: {len(missing)} of {len(shards)} shards are missing, first {missing[0]}",
            hint="Download all shards into one folder.",
        )
    return shards


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise CorruptFileError(f"{path}: a GGUF file has at least 24 bytes, this has {size}")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"{path} cannot be read: {error}") from error


class _Parser:
    """A position in one mapped file; every read is checked against the file's end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.map = _map(path)
        self.size = len(self.map)
        self.position = 0
        self.objects = 0

    def fail(self, message: str) -> NoReturn:
        raise CorruptFileError(
            f"{self.path}: {message}", hint="The file is damaged or half downloaded: fetch it again."
        )

    def parse(self) -> GGUFFile:
        if self.map[:4] != MAGIC:
            self.fail(f"a GGUF file starts with {MAGIC!r}, this with {self.map[:4]!r}")
        self.position = 4
        version = self.u32("version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            what = f"big-endian GGUF version {swapped}" if swapped in VERSIONS else f"GGUF version {version}"
            raise UnsupportedModelError(
                f"{self.path}: {what}; little-endian versions 2 and 3 can be read",
                hint="Convert the model again with a current converter.",
            )
        num_tensors = self.count("tensor count", _MIN_TENSOR_BYTES)
        num_pairs = self.count("metadata count", _MIN_KV_BYTES)
        if max(num_tensors, num_pairs) > MAX_ENTRIES:
            self.fail(f"{num_tensors} tensors and {num_pairs} metadata keys, at most {MAX_ENTRIES} of each")
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self.string("a metadata key", MAX_KEY_BYTES)
            if key in metadata:
                self.fail(f"metadata key {key!r} appears twice")
            metadata[key] = self.value(key, self.u32(key), 0)
        infos = [self.tensor_info() for _ in range(num_tensors)]
        return GGUFFile(self.path, version, metadata, self.tensors(infos, metadata))

    # numbers and strings

    def take(self, num_bytes: int, what: str) -> int:
        """The position before moving on by ``num_bytes``."""
        start = self.position
        if num_bytes > self.size - start:
            self.fail(f"{what} needs {num_bytes} bytes at offset {start}, {self.size - start} are left")
        self.position = start + num_bytes
        return start

    def u32(self, what: str) -> int:
        value: int = _U32.unpack_from(self.map, self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        value: int = _U64.unpack_from(self.map, self.take(8, what))[0]
        return value

    def count(self, what: str, element_bytes: int) -> int:
        """A number of elements, each at least ``element_bytes`` long, that the rest of the file can hold."""
        value = self.u64(what)
        if value * element_bytes > self.size - self.position:
            left = self.size - self.position
            self.fail(f"{what} {value} needs at least {value * element_bytes} bytes, {left} are left")
        return value

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(what)
        if limit is not None and length > limit:
            self.fail(f"{what} may have {limit} bytes, it has {length}")
        start = self.take(length, what)
        try:
            return self.map[start : start + length].decode()
        except UnicodeDecodeError as error:
            self.fail(f"{what} is not UTF-8 at offset {start + error.start}")

    # metadata

    def value(self, key: str, kind: int, depth: int) -> Any:
        if kind == _STRING:
            return self.string(f"metadata {key}")
        if kind == _ARRAY:
            return self.array(key, depth + 1)
        dtype = self.scalar_type(key, kind)
        start = self.take(dtype.itemsize, f"metadata {key}")
        return np.frombuffer(self.map, dtype, 1, start)[0].item()

    def scalar_type(self, key: str, kind: int) -> np.dtype[Any]:
        if kind not in _SCALARS:
            self.fail(f"metadata {key} has type {kind}, known are 0 to 12")
        return _SCALARS[kind]

    def array(self, key: str, depth: int) -> Any:
        if depth > MAX_ARRAY_DEPTH:
            self.fail(f"metadata {key} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        kind = self.u32(f"metadata {key}")
        what = f"array length of {key}"
        if kind not in (_STRING, _ARRAY):
            dtype = self.scalar_type(key, kind)
            length = self.count(what, dtype.itemsize)
            start = self.take(length * dtype.itemsize, what)
            return np.frombuffer(self.map, dtype, length, start).copy()
        length = self.count(what, 8 if kind == _STRING else 12)
        self.objects += length
        if self.objects > MAX_OBJECTS:
            self.fail(f"metadata holds more than {MAX_OBJECTS} strings and arrays, at {key}")
        if kind == _STRING:
            return self.strings(key, length)
        return [self.array(key, depth + 1) for _ in range(length)]

    def strings(self, key: str, length: int) -> list[str]:
        """Like ``string`` repeated, in one tight loop: vocabularies have a quarter of a million."""
        data, size, position = self.map, self.size, self.position
        unpack = _U64.unpack_from
        result = []
        try:
            for _ in range(length):
                start = position + 8
                position = start + unpack(data, position)[0]
                if position > size:
                    self.fail(f"a string of {key} ends at {position}, the file at {size}")
                result.append(data[start:position].decode())
        except struct.error:
            self.fail(f"array {key} ends after {len(result)} of {length} strings")
        except UnicodeDecodeError:
            self.fail(f"string {len(result)} of {key} is not UTF-8")
        self.position = position
        return result

    # tensors

    def tensor_info(self) -> tuple[str, tuple[int, ...], TensorType, int]:
        name = self.string("a tensor name", MAX_NAME_BYTES)
        num_dims = self.u32(f"tensor {name}")
        if not 1 <= num_dims <= MAX_DIMS:
            self.fail(f"tensor {name} has {num_dims} dimensions, 1 to {MAX_DIMS} are possible")
        dims = [self.u64(f"tensor {name}") for _ in range(num_dims)]
        kind = self.u32(f"tensor {name}")
        offset = self.u64(f"tensor {name}")
        if kind not in TensorType.__members__.values():
            raise UnsupportedModelError(
                f"{self.path}: tensor {name} has type {_OTHER_TYPES.get(kind, f'number {kind}')}; "
                f"readable are {', '.join(TensorType.__members__)}",
                hint="Use a file quantized as Q8_0, Q6_K, Q5_K_M, Q4_K_M or BF16.",
            )
        return name, tuple(reversed(dims)), TensorType(kind), offset

    def tensors(
        self, infos: list[tuple[str, tuple[int, ...], TensorType, int]], metadata: dict[str, Any]
    ) -> dict[str, Tensor]:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if (
            not isinstance(alignment, int)
            or not 1 <= alignment <= MAX_ALIGNMENT
            or alignment & (alignment - 1)
        ):
            self.fail(f"general.alignment must be a power of two up to {MAX_ALIGNMENT}, is {alignment!r}")
        start = -(-self.position // alignment) * alignment
        available = max(self.size - start, 0)
        tensors: dict[str, Tensor] = {}
        spans = []
        for name, shape, kind, offset in infos:
            if name in tensors:
                self.fail(f"tensor {name} appears twice")
            num_bytes = self.tensor_bytes(name, shape, kind)
            if offset % alignment:
                self.fail(f"tensor {name} starts at {offset}, not a multiple of {alignment}")
            if offset + num_bytes > available:
                self.fail(
                    f"tensor {name} needs bytes {offset} to {offset + num_bytes}, there are {available}"
                )
            spans.append((offset, offset + num_bytes, name))
            data = np.frombuffer(self.map, np.uint8, num_bytes, start + offset)
            tensors[name] = Tensor(name, kind, shape, data)
        spans.sort()
        for (_, end, name), (following, _, next_name) in pairwise(spans):
            if end > following:
                self.fail(f"tensors {name} and {next_name} overlap: {end} > {following}")
        return tensors

    def tensor_bytes(self, name: str, shape: tuple[int, ...], kind: TensorType) -> int:
        elements, block_bytes = BLOCK_SIZES[kind]
        total = 1
        for dim in shape:
            total *= dim
        if not 0 < total < 1 << 48:
            self.fail(f"tensor {name} has the impossible shape {list(shape)}")
        if shape[-1] % elements:
            self.fail(f"tensor {name}: rows of {shape[-1]} are no multiple of {kind.name}'s {elements}")
        return total // elements * block_bytes
