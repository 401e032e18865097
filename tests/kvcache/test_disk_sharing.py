"""Several processes, or several tiers of one, over one folder."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.kvcache.disk_folder import TOUCH_S, DiskFolder
from tests.kvcache.disk import FILE_BYTES, files_of, put, read, tier_in, told
from tests.kvcache.transfers import WAIT_S, job_of, nothing_left, wait_until

CHILD = """
import sys
from pathlib import Path
from tests.kvcache.disk import *
from tests.kvcache.transfers import job_of
path, limit, seeds = Path(sys.argv[1]), int(sys.argv[2]), [int(seed) for seed in sys.argv[3:]]
tier = tier_in(path, limit_bytes=limit * FILE_BYTES)
for number in range(1000 if -1 in seeds else 1):
    for seed in seeds if -1 not in seeds else seeds[:1]:
        put(tier, job_of(20, seed=seed + 100 * number))
    if not number:
        print("wrote", flush=True)
print(tier.stats().damaged_blocks, flush=True)
tier.close()
"""


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


def start(path: Path, limit: int, *seeds: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), str(limit), *map(str, seeds)],
        stdout=subprocess.PIPE,
        text=True,
    )


def test_one_finds_what_the_other_wrote(tmp_path: Path) -> None:
    writer, reader = tier_in(tmp_path), tier_in(tmp_path)
    wait_until(lambda: reader._counted)
    job = job_of(10)
    assert reader.prefix(job.block_ids) == 0
    put(writer, job)
    assert reader.prefix(job.block_ids) == 10
    assert read(reader, job) == (10, "")
    put(reader, job)
    assert len(files_of(tmp_path)) == 10 and reader.stats().written_blocks == 0
    writer.close()
    reader.close()


def test_what_the_other_removed_is_a_miss(tmp_path: Path) -> None:
    first = tier_in(tmp_path, rescan_s=0.05)
    put(first, job_of(5))
    second = tier_in(tmp_path, limit_bytes=5 * FILE_BYTES)
    wait_until(lambda: second.stats().num_blocks == 5)
    put(second, job_of(3, seed=1))
    assert read(first, job_of(5))[0] == 0
    wait_until(lambda: first.stats().num_blocks == 5)  # two of its own, three of the other's
    held, removed = told(first)
    assert set(job_of(3, seed=1).block_ids) <= held and len(held) == 5 and len(removed) == 3
    first.close()
    second.close()


def test_use_by_one_counts_for_the_other(tmp_path: Path) -> None:
    job = job_of(3)
    first = tier_in(tmp_path)
    put(first, job)
    for number, path in enumerate(sorted(tmp_path.glob("????????????????/??/*"))):
        os.utime(path, (time.time() - 10 * TOUCH_S + number,) * 2)
    second = tier_in(tmp_path, limit_bytes=3 * FILE_BYTES)
    wait_until(lambda: second.stats().num_blocks == 3)
    assert read(first, job_of(2)) == (2, "")
    put(second, job_of(1, seed=1))
    assert second.prefix(job.block_ids) == 2
    first.close()
    second.close()


def test_processes_share_one_bound(tmp_path: Path) -> None:
    """Four at once, ten times as many blocks as fit; two of them write the same ones."""
    limit = 40
    children = [start(tmp_path, limit, *range(seed, seed + 4)) for seed in (0, 0, 10, 20)]
    tier = tier_in(tmp_path)
    most = 0
    while any(child.poll() is None for child in children):
        with tier._folder._locked():  # nobody changes anything while we count
            most = max(most, len(files_of(tmp_path)))
        for seed in range(4):
            read(tier, job_of(20, seed=seed))  # right bytes or none
    assert [child.wait() for child in children] == [0] * 4
    for child in children:
        assert child.stdout is not None
        assert child.stdout.read().split()[-1] == "0"
        child.stdout.close()
    assert 0 < most <= limit
    assert len(files_of(tmp_path)) <= limit
    assert tier._folder.usage().num_bytes == len(files_of(tmp_path)) * FILE_BYTES
    assert not list((tmp_path / "tmp").iterdir())
    assert tier.stats().damaged_blocks == 0
    tier.close()


def test_a_writer_that_is_killed_leaves_whole_blocks_only(tmp_path: Path) -> None:
    for round_ in range(3):
        with start(tmp_path, 10**6, round_, -1) as child:
            assert child.stdout is not None
            assert child.stdout.readline() == "wrote\n"
            child.kill()
    tier = tier_in(tmp_path)
    wait_until(lambda: tier._counted)
    assert not list((tmp_path / "tmp").iterdir())
    assert all(path.stat().st_size == FILE_BYTES for path in files_of(tmp_path))
    for round_ in range(3):
        assert read(tier, job_of(20, seed=round_)) == (20, "")
    assert tier.stats().damaged_blocks == 0
    assert tier._folder.usage().num_bytes == len(files_of(tmp_path)) * FILE_BYTES
    assert tier.flush(WAIT_S)
    tier.close()


def test_a_process_that_stops_with_the_lock_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.kvcache.disk_folder.LOCK_WAIT_S", 0.1)
    tier = tier_in(tmp_path, retry_s=0.1)
    put(tier, job_of(5))
    other = DiskFolder(tmp_path)
    with other._locked():
        put(tier, job_of(2, seed=1))
        assert "does not let go" in tier.stats().stopped
        assert read(tier, job_of(5)) == (5, "")
    while tier.prefix(job_of(2, seed=1).block_ids) < 2:
        put(tier, job_of(2, seed=1))
    assert not tier.stats().stopped
    other.close()
    tier.close()
