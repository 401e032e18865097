from __future__ import annotations

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from headrace.core.errors import CorruptFileError, HeadraceError, ModelNotFoundError, UnsupportedModelError
from headrace.kernels.block_layout import TensorType
from headrace.models.gguf.config import map_model
from headrace.models.gguf.reader import read_gguf
from headrace.models.gguf.tokenizer import map_tokenizer
from tests.models.gguf.files import MODELS, tiny_model, write_model

U32, STRING, ARRAY = 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def info(name: str = "t", dims: tuple[int, ...] = (32,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    pairs: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = bytes(256),
    num_pairs: int | None = None,
    num_infos: int | None = None,
    alignment: int = 32,
) -> bytes:
    head = magic + struct.pack(
        "<IQQ",
        version,
        len(infos) if num_infos is None else num_infos,
        len(pairs) if num_pairs is None else num_pairs,
    )
    head += b"".join(pairs) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def read(tmp_path: Path, content: bytes) -> Any:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    return read_gguf(path)


def test_every_value_type_is_read(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, tuple[Any, gguf.GGUFValueType]] = {
        "u8": (200, gguf.GGUFValueType.UINT8),
        "i8": (-5, gguf.GGUFValueType.INT8),
        "u16": (60000, gguf.GGUFValueType.UINT16),
        "i16": (-300, gguf.GGUFValueType.INT16),
        "u32": (4000000000, gguf.GGUFValueType.UINT32),
        "i32": (-70000, gguf.GGUFValueType.INT32),
        "f32": (0.5, gguf.GGUFValueType.FLOAT32),
        "yes": (True, gguf.GGUFValueType.BOOL),
        "word": ("Größe ▁", gguf.GGUFValueType.STRING),
        "u64": (2**63 + 1, gguf.GGUFValueType.UINT64),
        "i64": (-(2**60), gguf.GGUFValueType.INT64),
        "f64": (0.1, gguf.GGUFValueType.FLOAT64),
    }
    for key, (value, kind) in values.items():
        writer.add_key_value(key, value, kind)
    writer.add_array("words", ["a", "", "日本"])
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("flags", [True, False])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_tensor("t", np.arange(64, dtype=np.float32).reshape(2, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = read_gguf(path)
    for key, (value, _) in values.items():
        assert file.metadata[key] == value and type(file.metadata[key]) is type(value), key
    assert file.metadata["words"] == ["a", "", "日本"]
    assert file.metadata["numbers"].tolist() == [1, -2, 3]
    assert file.metadata["flags"].tolist() == [True, False]
    assert [row.tolist() for row in file.metadata["nested"]] == [[1, 2], [3]]
    tensor = file.tensors["t"]
    assert (tensor.type, tensor.shape) == (TensorType.F32, (2, 32))
    assert tensor.rows.view(np.float32).tolist() == np.arange(64.0).reshape(2, 32).tolist()
    assert not tensor.data.flags.writeable


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_and_other_alignments(version: int, tmp_path: Path) -> None:
    content = build(
        version=version,
        pairs=(pair("general.alignment", U32, struct.pack("<I", 64)),),
        infos=(info(), info("u", offset=128)),
        data=bytes(128) + struct.pack("<32f", *range(32)),
        alignment=64,
    )
    assert read(tmp_path, content).tensors["u"].data.view(np.float32).tolist() == list(range(32))


@pytest.mark.parametrize(
    "content", [build(version=1), build(version=4), build(version=3 << 24)], ids=["1", "4", "big-endian"]
)
def test_other_versions_and_byte_orders_are_unsupported(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="versions 2 and 3"):
        read(tmp_path, content)


def test_an_unsupported_tensor_type_is_named_with_its_tensor(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"tensor blk\.7\.w has type IQ2_XS.*Q4_K"):
        read(tmp_path, build(infos=(info("blk.7.w", kind=17),)))
    with pytest.raises(UnsupportedModelError, match="number 4000"):
        read(tmp_path, build(infos=(info(kind=4000),)))


def nested_arrays(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQB", 0, 1, 7)


HUGE = 2**63
HOSTILE = {
    "empty": (b"", "at least 24 bytes"),
    "magic": (build(magic=b"GGML"), "starts with b'GGUF', this with b'GGML'"),
    "tensor count": (build(num_infos=HUGE), "tensor count"),
    "tensor count, plausible": (build(num_infos=9), "tensor count 9 needs at least 288 bytes, 272 are left"),
    "metadata count": (build(num_pairs=2**40), "metadata count"),
    "metadata keys, too many": (
        build(num_pairs=2**18 + 1, data=bytes(13 * (2**18 + 1))),
        "262145 metadata keys, at most 262144",
    ),
    "key length": (build(pairs=(struct.pack("<Q", HUGE),)), "metadata key"),
    "key not text": (build(pairs=(struct.pack("<Q", 2) + b"\xff\xfe",)), "not UTF-8"),
    "value type": (build(pairs=(pair("k", 77, b""),)), "type 77"),
    "string length": (build(pairs=(pair("k", STRING, struct.pack("<Q", HUGE)),)), "bytes at offset"),
    "string not text": (build(pairs=(pair("k", STRING, struct.pack("<Q", 1) + b"\x80"),)), "not UTF-8"),
    "array length": (build(pairs=(pair("k", ARRAY, struct.pack("<IQ", U32, HUGE)),)), "array length of k"),
    "array of strings": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQ", STRING, 2**50)),)),
        "array length of k",
    ),
    "array of strings, short": (
        build(pairs=(pair("k", ARRAY, struct.pack("<IQQ", STRING, 2, 2**40)),)),
        "a string of k ends at",
    ),
    "array type": (build(pairs=(pair("k", ARRAY, struct.pack("<IQ", 55, 1)),)), "type 55"),
    "nesting": (build(pairs=(pair("k", ARRAY, nested_arrays(5)),)), "nests arrays"),
    "nesting without end": (build(pairs=(pair("k", ARRAY, nested_arrays(20000)),)), "nests arrays"),
    "key twice": (build(pairs=(pair("k", 7, b"\1"), pair("k", 7, b"\1"))), "'k' appears twice"),
    "tensor twice": (build(infos=(info(), info(offset=128))), "tensor t appears twice"),
    "tensor name": (build(infos=(info("n" * 500),)), "tensor name"),
    "no dimension": (build(infos=(info(dims=()),)), "0 dimensions"),
    "dimension count": (build(infos=(text("t") + struct.pack("<I", 2**31),)), "2147483648 dimensions"),
    "zero rows": (build(infos=(info(dims=(32, 0)),)), "impossible shape"),
    "dims overflow": (build(infos=(info(dims=(2**40, 2**40, 2**40, 2**40)),)), "impossible shape"),
    "dims wrap to small": (build(infos=(info(dims=(2**32, 2**32)),)), "impossible shape"),
    "ragged row": (build(infos=(info(dims=(33,), kind=8),)), "no multiple of Q8_0's 32"),
    "offset beyond": (build(infos=(info(offset=2**40),)), "there are 256"),
    "offset wraps": (build(infos=(info(offset=2**64 - 32),)), "there are 256"),
    "offset unaligned": (build(infos=(info(offset=4),)), "not a multiple of 32"),
    "overlap": (build(infos=(info(), info("u", offset=96))), "overlap"),
    "one byte short": (build(infos=(info(dims=(64,)),), data=bytes(255)), "bytes 0 to 256, there are 255"),
    "no data": (build(infos=(info(),), data=b"", alignment=1), "there are 0"),
    "alignment 0": (build(pairs=(pair("general.alignment", U32, struct.pack("<I", 0)),)), "power of two"),
    "alignment 24": (build(pairs=(pair("general.alignment", U32, struct.pack("<I", 24)),)), "power of two"),
    "alignment text": (build(pairs=(pair("general.alignment", STRING, text("x")),)), "power of two"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_get_a_typed_error_and_no_memory(case: str, tmp_path: Path) -> None:
    content, message = HOSTILE[case]
    tracemalloc.start()
    try:
        with pytest.raises(CorruptFileError, match=message):
            read(tmp_path, content)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_missing_file_and_a_folder_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="does not exist"):
        read_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelNotFoundError, match="cannot be read"):
        read_gguf(tmp_path)


def test_shards_are_one_file_and_a_missing_one_is_named(tmp_path: Path) -> None:
    def shard(number: int, name: str) -> Path:
        path = tmp_path / f"m-{number:05d}-of-00002.gguf"
        pairs = (
            pair("split.count", 2, struct.pack("<H", 2)),
            pair("split.tensors.count", 5, struct.pack("<i", 2)),
        )
        path.write_bytes(build(pairs=pairs, infos=(info(name),)))
        return path

    first = shard(1, "a")
    with pytest.raises(ModelNotFoundError, match=r"1 of 2 shards are missing, first m-00002-of-00002\.gguf"):
        read_gguf(first)
    second = shard(2, "b")
    assert set(read_gguf(second).tensors) == set(read_gguf(first).tensors) == {"a", "b"}
    shard(2, "a")
    with pytest.raises(CorruptFileError, match="also in an earlier shard"):
        read_gguf(first)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = write_model(tmp_path_factory.mktemp("small") / "m.gguf", tiny_model(MODELS["llama"]))
    return path.read_bytes()


def digest(path: Path) -> None:
    """Everything that looks at a file's header."""
    file = read_gguf(path)
    model = map_model(file)
    map_tokenizer(file, model.config["vocab_size"])


@pytest.mark.parametrize("seed", range(4))
def test_damaged_files_end_in_typed_errors_or_success(seed: int, small_file: bytes, tmp_path: Path) -> None:
    rng = random.Random(seed)
    path = tmp_path / "x.gguf"
    header = small_file.rfind(b"blk.") + 80  # where the numbers are
    outcomes = {"fine": 0, "typed": 0}
    tracemalloc.start()
    try:
        for turn in range(150):
            content = bytearray(small_file)
            if turn % 3 == 0:
                del content[rng.randrange(len(content)) :]
            for _ in range(rng.choice([1, 1, 2, 8])):
                if content:
                    place = rng.randrange(min(len(content), header))
                    content[place] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            path.unlink(missing_ok=True)  # rewriting in place waits for the disk on ext4
            path.write_bytes(content)
            try:
                digest(path)
                outcomes["fine"] += 1
            except HeadraceError as error:
                assert str(path) in error.message
                outcomes["typed"] += 1
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert outcomes["fine"] > 5 and outcomes["typed"] > 50, outcomes
    assert peak < 32 << 20


def test_every_truncation_of_the_header_is_noticed(small_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for length in [*range(0, small_file.rfind(b"blk."), 97), len(small_file) - 1]:
        path.unlink(missing_ok=True)
        path.write_bytes(small_file[:length])
        with pytest.raises(CorruptFileError):
            read_gguf(path)
