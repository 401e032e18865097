"""The disk tier: what goes in comes out, restarts, the bound, order of eviction, trouble with the disk."""

from __future__ import annotations

import errno
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.errors import UsageError
from headrace.kvcache.disk_folder import TOUCH_S, DiskFolder
from headrace.kvcache.source import WINDOW_BYTES
from tests.kvcache.disk import FILE_BYTES, file_of, files_of, put, read, tier_in, told
from tests.kvcache.transfers import (
    BLOCK_BYTES,
    WAIT_S,
    Sink,
    job_of,
    nothing_left,
    payload_of,
    wait_until,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    with nothing_left():
        yield


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    tier = tier_in(tmp_path / "kv")
    job = job_of(50)
    assert tier.prefix(job.block_ids) == 0 and not tier.contains(job.block_ids[0])
    put(tier, job)
    assert tier.prefix(job.block_ids) == 50 and tier.contains(job.block_ids[49])
    assert tier.prefix(job.block_ids, 20) == 30
    assert read(tier, job) == (50, "")
    assert read(tier, job_of(50, first=49)) == (1, "")
    assert read(tier, job_of(50, first=50)) == (0, "")
    stats = tier.stats()
    assert (stats.num_blocks, stats.num_bytes) == (50, 50 * FILE_BYTES)
    assert (stats.written_blocks, stats.hit_blocks, stats.read_bytes) == (50, 51, 51 * BLOCK_BYTES)
    assert (stats.refused_blocks, stats.damaged_blocks, stats.evicted_blocks) == (0, 0, 0)
    assert tier.read_rate() > 0
    tier.close()


def test_a_chain_is_read_up_to_its_first_gap(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    job = job_of(9)
    put(tier, job, [0, 1, 2, 4, 5])
    assert tier.prefix(job.block_ids) == 3
    assert tier.prefix(job.block_ids, 4) == 2
    assert read(tier, job) == (3, "block 3 is not on disk")
    tier.close()


def test_a_restart_finds_the_blocks(tmp_path: Path) -> None:
    job = job_of(30)
    tier = tier_in(tmp_path)
    put(tier, job)
    tier.close()
    tier = tier_in(tmp_path)
    assert tier.prefix(job.block_ids) == 30  # at once, whether or not the scan is through
    wait_until(lambda: tier.stats().num_blocks == 30)
    assert read(tier, job) == (30, "")
    tier.close()


def test_the_router_is_told(tmp_path: Path) -> None:
    wakes: list[None] = []
    job = job_of(6)
    tier = tier_in(tmp_path, wake=lambda: wakes.append(None))
    put(tier, job)
    wait_until(lambda: bool(wakes))
    assert told(tier)[0] == set(job.block_ids)
    assert told(tier) == (set(), set())
    assert {i for run in tier.snapshot() for i in run.block_ids} == set(job.block_ids)
    file_of(tmp_path, job, 2).unlink()
    assert read(tier, job)[0] == 2
    assert told(tier)[1] == {job.block_ids[2]}
    tier.close()

    tier = tier_in(tmp_path)
    wait_until(lambda: tier.stats().num_blocks == 5)
    assert told(tier)[0] == set(job.block_ids) - {job.block_ids[2]}
    tier.close()


def test_the_bound_is_kept_and_the_oldest_go_first(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, limit_bytes=10 * FILE_BYTES + 5)
    old, new = job_of(8), job_of(5, seed=1)
    for index in range(8):
        put(tier, old, [index])
    read(tier, job_of(2))  # blocks 0 and 1 are in use
    put(tier, new)
    assert len(files_of(tmp_path)) == 10
    assert [tier.contains(i) for i in old.block_ids] == [True, True, False, False, False, True, True, True]
    assert tier.prefix(new.block_ids) == 5
    assert told(tier)[1] == set(old.block_ids[2:5])
    assert tier.stats().evicted_blocks == 3
    tier.close()


def test_use_outlives_a_restart(tmp_path: Path) -> None:
    job = job_of(4)
    tier = tier_in(tmp_path)
    put(tier, job)
    for index in range(4):
        long_ago = time.time() - 10 * TOUCH_S + index
        os.utime(file_of(tmp_path, job, index), (long_ago, long_ago))
    assert read(tier, job_of(1))[0] == 1
    tier.close()
    tier = tier_in(tmp_path, limit_bytes=4 * FILE_BYTES)
    wait_until(lambda: tier.stats().num_blocks == 4)
    put(tier, job_of(1, seed=1))
    assert [tier.contains(i) for i in job.block_ids] == [True, False, True, True]
    tier.close()


def test_a_smaller_bound_is_reached_after_a_restart(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    put(tier, job_of(12))
    tier.close()
    tier = tier_in(tmp_path, limit_bytes=5 * FILE_BYTES)
    wait_until(lambda: tier.stats().num_blocks == 12)
    put(tier, job_of(1, seed=1))
    assert len(files_of(tmp_path)) == 5
    tier.close()


def test_a_bound_below_one_block_takes_nothing(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, limit_bytes=FILE_BYTES - 1)
    put(tier, job_of(2))
    assert not files_of(tmp_path) and tier.stats().refused_blocks == 2
    tier.close()


def test_other_models_blocks_are_kept_apart_and_share_the_bound(tmp_path: Path) -> None:
    first = tier_in(tmp_path)
    put(first, job_of(6))
    first.close()
    other = tier_in(tmp_path, root=b"x" * 32, limit_bytes=8 * FILE_BYTES)
    job = job_of(6)
    assert other.prefix(job.block_ids) == 0
    assert read(other, job)[0] == 0, "a job of another root gets nothing"
    for index in range(6):
        other.put(job.block_ids[index], b"", payload_of(job.block_ids[index]))
    assert other.flush(WAIT_S)
    wait_until(lambda: len(files_of(tmp_path)) == 8)
    assert len(list(tmp_path.glob(f"{b'x'.hex() * 8}/??/*"))) == 6
    assert other.stats().num_blocks == 6
    other.close()


def test_the_writer_that_falls_behind_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    writev = os.writev

    def slow(fd: int, buffers: list[memoryview]) -> int:
        release.wait()
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", slow)
    tier = tier_in(tmp_path, queue_bytes=4 * BLOCK_BYTES)
    job = job_of(8)
    assert tier.room() == 4
    taken = [tier.put(i, job.parent_of(n), payload_of(i)) for n, i in enumerate(job.block_ids)]
    assert taken == [True] * 4 + [False] * 4
    assert tier.room() == 0 and tier.stats().queued_bytes == 4 * BLOCK_BYTES
    assert tier.put(job.block_ids[0], job.root, payload_of(job.block_ids[0])), "it is queued already"
    other = DiskFolder(tmp_path)
    wait_until(lambda: len(list((tmp_path / "tmp").iterdir())) == 1)
    assert other.remove_leftovers() == 0, "its writer is alive"
    other.close()
    # What is on its way can be had back.
    assert tier.prefix(job.block_ids) == 4
    assert read(tier, job_of(4)) == (4, "")
    release.set()
    assert tier.flush(WAIT_S)
    assert len(files_of(tmp_path)) == 4 and tier.stats().refused_blocks == 4
    tier.close()


def test_a_sink_that_takes_nothing_gets_one_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kvcache.disk_reader.WINDOW_BYTES", 5 * BLOCK_BYTES)
    assert WINDOW_BYTES > 5 * BLOCK_BYTES
    tier = tier_in(tmp_path)
    job = job_of(20)
    put(tier, job)
    sink = Sink(tier, job, hold=True).open()
    sink.wait_delivered(5)
    assert read(tier, job_of(20, name="other")) == (20, ""), "others go on"
    assert len(sink.delivered) == 5
    tier.consumed(job.job_id, 2)
    sink.wait_delivered(7)
    tier.cancel(job.job_id)
    assert sink.wait() == "cancelled"
    expired = job_of(20, name="expired", deadline=time.monotonic() + 0.2)
    assert "deadline" in Sink(tier, expired, hold=True).open().wait()
    tier.close()


def test_many_jobs_at_once(tmp_path: Path) -> None:
    tier = tier_in(tmp_path)
    jobs = [job_of(20, seed=seed) for seed in range(6)]
    for job in jobs:
        put(tier, job)
    sinks = [Sink(tier, job).open() for job in jobs]
    assert [sink.wait() for sink in sinks] == [""] * 6
    tier.close()


def test_closing_ends_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.kvcache.disk_reader.WINDOW_BYTES", BLOCK_BYTES)
    tier = tier_in(tmp_path)
    put(tier, job_of(9))
    sink = Sink(tier, job_of(9), hold=True).open()
    sink.wait_delivered(1)
    tier.close()
    assert sink.wait() == "the disk tier is closed"
    assert Sink(tier, job_of(9)).open().wait() == "the disk tier is closed"
    assert not tier.put(b"n" * 32, b"", bytes(BLOCK_BYTES))


# Trouble with the disk


def failing(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Makes every write of a block fail while the list has an item; a part of it gets written. The list
    grows with each."""
    trouble = [number]
    writev = os.writev

    def fail(fd: int, buffers: list[memoryview]) -> int:
        if trouble:
            trouble.append(number)
            writev(fd, buffers[:1])
            raise OSError(trouble[0], os.strerror(trouble[0]))
        return writev(fd, buffers)

    monkeypatch.setattr(os, "writev", fail)
    return trouble


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES])
def test_a_full_disk_stops_the_tier_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    caplog.set_level(logging.INFO)
    tier = tier_in(tmp_path, retry_s=0.1)
    first, later = job_of(4), job_of(10, seed=1)
    put(tier, first)
    trouble = failing(monkeypatch, number)
    while len(trouble) < 4:
        put(tier, later)
    assert tier.stats().stopped == os.strerror(number)
    assert tier.stats().refused_blocks >= 10 and tier.stats().written_blocks == 4
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert os.strerror(number) in caplog.text and "serving goes on" in caplog.text
    assert not list((tmp_path / "tmp").iterdir()), "a half-written file is left behind"
    assert read(tier, first) == (4, "")

    trouble.clear()
    wait_until(lambda: tier.room() > 0)
    put(tier, later)
    wait_until(lambda: not tier.stats().stopped)
    put(tier, later)
    assert read(tier, later) == (10, "")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    tier.close()


def test_while_stopped_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = tier_in(tmp_path, retry_s=1000.0)
    trouble = failing(monkeypatch, errno.ENOSPC)
    put(tier, job_of(1))
    trouble.clear()
    assert tier.room() == 0
    assert not tier.put(b"n" * 32, b"", bytes(BLOCK_BYTES))
    tier.close()


def test_a_file_size_limit_is_trouble_like_any(tmp_path: Path) -> None:
    """A real limit of the kernel, in a process of its own."""
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from tests.kvcache.disk import *; from tests.kvcache.transfers import job_of\n"
        "tier = tier_in(Path(sys.argv[1]), retry_s=1000.0)\n"
        "put(tier, job_of(2))\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({BLOCK_BYTES // 2}, {resource.RLIM_INFINITY}))\n"
        "put(tier, job_of(3, seed=1))\n"
        "print(tier.stats().stopped, read(tier, job_of(2)))\n"
        "tier.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_S,
    )
    assert done.stdout.strip() == "File too large (2, '')"
    assert "File too large" in done.stderr
    assert not list((tmp_path / "tmp").iterdir())


def test_a_disk_that_is_full_at_the_start_is_no_reason_not_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trouble = [errno.ENOSPC]
    real = os.open

    def fail(path: str, flags: int, mode: int = 0o777, **options: int) -> int:
        if trouble and str(path).endswith("usage"):
            raise OSError(trouble[0], os.strerror(trouble[0]))
        return real(path, flags, mode, **options)

    monkeypatch.setattr(os, "open", fail)
    tier = tier_in(tmp_path, retry_s=0.1)
    wait_until(lambda: bool(tier.stats().stopped))
    put(tier, job_of(2))
    assert not files_of(tmp_path)
    trouble.clear()
    while tier.prefix(job_of(2).block_ids) < 2:
        put(tier, job_of(2))
    assert read(tier, job_of(2)) == (2, "")
    assert caplog.text.count("takes no blocks for now") == 1
    tier.close()


def test_a_folder_that_vanishes_is_made_again(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    tier = tier_in(path, rescan_s=0.05)
    put(tier, job_of(5))
    shutil.rmtree(path)
    assert read(tier, job_of(5)) == (0, "block 0 is not on disk")
    while len(files_of(path)) < 3:
        put(tier, job_of(3, seed=1))
    assert read(tier, job_of(3, seed=1)) == (3, "")
    wait_until(lambda: tier.stats().num_blocks == 3)
    assert not tier.stats().stopped
    tier.close()


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_what_cannot_be_a_folder_is_refused_at_the_start(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError) as error:
        tier_in(tmp_path / where)
    assert error.value.hint and error.value.param == "kv_disk_path"


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kv"
    path.mkdir()
    path.chmod(0o777)
    with pytest.raises(UsageError, match="other users") as error:
        tier_in(path)
    assert "chmod" in str(error.value.hint)


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    tier = tier_in(tmp_path / "kv")
    put(tier, job_of(3))
    for path in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
    tier.close()
