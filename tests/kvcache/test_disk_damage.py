"""Whatever happens to the tier's files, a read gives the right bytes or none, and the file goes."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.kvcache.block_format import HEADER_BYTES
from tests.kvcache.disk import FILE_BYTES, file_of, files_of, put, read, tier_in, told
from tests.kvcache.transfers import (
    BLOCK_BYTES,
    FORMAT,
    ROOT,
    WAIT_S,
    job_of,
    nothing_left,
    payload_of,
    wait_until,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x10
        path.write_bytes(data)

    return damage


def truncate(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def foreign(path: Path) -> None:
    path.write_bytes(b"\x7fELF" + random.Random(0).randbytes(FILE_BYTES - 4))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def zeros_at_the_end(path: Path) -> None:
    """What a crash of the machine leaves of a file whose last pages were not written."""
    path.write_bytes(path.read_bytes()[:-4096] + bytes(4096))


DAMAGE = {
    "magic": flip(0),
    "version": flip(9),
    "checksum": flip(12),
    "length": flip(20),
    "identity": flip(30),
    "parent": flip(60),
    "root": flip(100),
    "format": flip(140),
    "header check": flip(HEADER_BYTES - 1),
    "first byte": flip(HEADER_BYTES),
    "middle": flip(FILE_BYTES // 2),
    "last byte": flip(FILE_BYTES - 1),
    "empty": truncate(0),
    "half a header": truncate(HEADER_BYTES // 2),
    "header only": truncate(HEADER_BYTES),
    "one byte short": truncate(FILE_BYTES - 1),
    "one byte longer": longer,
    "lost pages": zeros_at_the_end,
    "somebody else's": foreign,
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_block_is_dropped_and_computed_anew(tmp_path: Path, kind: str) -> None:
    tier = tier_in(tmp_path)
    job = job_of(6)
    put(tier, job)
    DAMAGE[kind](file_of(tmp_path, job, 3))
    count, reason = read(tier, job)
    assert count == 3 and reason.startswith("block 3 on disk is"), reason
    assert tier.stats().damaged_blocks == 1
    assert told(tier)[1] == {job.block_ids[3]}
    assert len(files_of(tmp_path)) == 5
    assert tier.prefix(job.block_ids) == 3
    put(tier, job, [3])
    assert read(tier, job) == (6, "")
    assert tier.stats().damaged_blocks == 1
    tier.close()


def test_two_blocks_that_were_swapped_are_both_found_out(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    job = job_of(5)
    put(tier, job)
    one, two = file_of(tmp_path, job, 1), file_of(tmp_path, job, 3)
    one.rename(tmp_path / "x")
    two.rename(one)
    (tmp_path / "x").rename(two)
    assert read(tier, job)[1] == "block 1 on disk is foreign: it holds another block"
    put(tier, job, [1])
    assert read(tier, job)[1] == "block 3 on disk is foreign: it holds another block"
    assert tier.stats().damaged_blocks == 2
    tier.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [({"kv_format": "bfloat16"}, "another dtype"), ({"root": ROOT[:8] + b"s" * 24}, "another model")],
)
def test_a_sound_block_of_another_format_or_root_is_foreign(
    tmp_path: Path, change: dict[str, bytes], words: str
) -> None:
    """Roots share a folder when they begin alike."""
    other = tier_in(tmp_path, **change)  # type: ignore[arg-type]
    job = job_of(2)
    other.put(job.block_ids[0], job.root, payload_of(job.block_ids[0]))
    assert other.flush(WAIT_S)
    other.close()
    tier = tier_in(tmp_path, kv_format=FORMAT)
    count, reason = read(tier, job)
    assert count == 0 and words in reason
    assert tier.stats().damaged_blocks == 1 and not files_of(tmp_path)
    tier.close()


@pytest.mark.parametrize("kind", ["folder", "link", "pipe"])
def test_what_is_no_file_is_never_read(tmp_path: Path, kind: str) -> None:
    tier = tier_in(tmp_path / "kv")
    job = job_of(3)
    put(tier, job)
    path = file_of(tmp_path / "kv", job, 1)
    data = path.read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    assert read(tier, job)[0] == 1
    tier.close()
    if kind == "link":
        assert (tmp_path / "elsewhere").read_bytes() == data
    tier = tier_in(tmp_path / "kv")
    assert tier.prefix(job.block_ids) == 1
    tier.close()


def test_strange_files_in_the_folder_stay_and_do_not_count(tmp_path: Path) -> None:
    strangers = [tmp_path / "README", tmp_path / "72" / "x", tmp_path / ("0" * 16) / "ab" / "notes.txt"]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(3 * FILE_BYTES))
    tier = tier_in(tmp_path, limit_bytes=2 * FILE_BYTES)
    put(tier, job_of(4))
    assert tier.stats().num_blocks == 2
    assert all(path.exists() for path in strangers)
    tier.close()


def test_what_a_dead_process_was_writing_is_removed(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / "0123456789abcdef").write_bytes(bytes(100))
    tier = tier_in(tmp_path)
    wait_until(lambda: not list((tmp_path / "tmp").iterdir()))
    tier.close()


@pytest.mark.parametrize(
    "data", [None, b"", b"\xff" * 24, b"\0" * 5], ids=["gone", "empty", "absurd", "short"]
)
def test_a_damaged_count_is_mended_by_a_scan(tmp_path: Path, data: bytes | None) -> None:
    tier = tier_in(tmp_path)
    put(tier, job_of(6))
    tier.close()
    usage = tmp_path / "usage"
    usage.unlink()
    if data is not None:
        usage.write_bytes(data)
    tier = tier_in(tmp_path, limit_bytes=7 * FILE_BYTES)
    put(tier, job_of(4, seed=1))
    assert len(files_of(tmp_path)) == 7
    assert tier._folder.usage().num_bytes == 7 * FILE_BYTES
    tier.close()


@pytest.mark.parametrize("wrong", [-3, 3])
def test_a_count_that_is_off_is_mended_by_a_scan(tmp_path: Path, wrong: int) -> None:
    """As after a death between a change and its count."""
    tier = tier_in(tmp_path)
    put(tier, job_of(6))
    usage = tier._folder.usage()
    with tier._folder._locked():
        tier._folder._write_usage(dataclasses.replace(usage, num_bytes=usage.num_bytes + wrong * FILE_BYTES))
    tier.close()
    tier = tier_in(tmp_path)
    wait_until(lambda: tier._folder.usage().num_bytes == 6 * FILE_BYTES)
    tier.close()


def test_random_damage_never_passes(tmp_path: Path) -> None:
    """Any byte of any file, changed, cut or doubled; Sink compares every byte that is delivered."""
    choose = random.Random(7)
    tier = tier_in(tmp_path)
    job = job_of(8)
    for _ in range(60):
        put(tier, job)
        victim = choose.randrange(8)
        path = file_of(tmp_path, job, victim)
        data = bytearray(path.read_bytes())
        position = choose.randrange(len(data))
        kind = choose.randrange(3)
        if kind == 0:
            data[position] ^= 1 << choose.randrange(8)
        elif kind == 1:
            del data[position:]
        else:
            data[position:position] = data[position : position + choose.randrange(1, 50)] or b"x"
        path.write_bytes(data)
        assert read(tier, job)[0] == victim
    assert tier.stats().damaged_blocks == 60
    assert tier.stats().hit_blocks * BLOCK_BYTES == tier.stats().read_bytes
    tier.close()


def test_a_payload_that_is_of_no_use_goes_as_if_it_were_damaged(tmp_path: Path) -> None:
    """Its checksum is right: whoever wrote it was wrong."""
    job = job_of(3)
    bad = payload_of(job.block_ids[1])
    tier = tier_in(tmp_path, is_sound=lambda payload: bytes(payload) != bad)
    put(tier, job)
    count, reason = read(tier, job)
    assert count == 1 and "block 1 on disk is of no use" in reason
    assert tier.stats().damaged_blocks == 1 and not tier.contains(job.block_ids[1])
    assert len(files_of(tmp_path)) == 2
    assert job.block_ids[1] in told(tier)[1]
    tier.close()
