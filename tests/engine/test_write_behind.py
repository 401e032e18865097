"""What goes to disk, when, and how much at a time; keys are those of ``kv_oracle``."""

from __future__ import annotations

import pytest

from headrace.core.identity import block_identities
from headrace.core.request import pack_tokens
from headrace.engine import write_behind
from tests.engine.kv_oracle import make_request
from tests.engine.scheduling import ROOT, distinct, make_scheduler
from tests.engine.sources import FillingRig, true_payloads


def make_rig(**config: int) -> FillingRig:
    return FillingRig(make_scheduler(**config))


def compute(rig: FillingRig, prompt: list[int]) -> dict[bytes, bytes]:
    """Computes a prompt; returns what its blocks should be on disk."""
    rig.scheduler.add(make_request(f"r{prompt[0]}", prompt, max_tokens=1))
    rig.finish()
    packed = pack_tokens(prompt)
    return dict(zip(block_identities(ROOT, packed, 4), true_payloads(packed, 4), strict=True))


def test_while_idle_everything_cached_is_written_as_it_is() -> None:
    rig = make_rig()
    wanted = compute(rig, distinct(22)) | compute(rig, distinct(9, 300))
    assert rig.write_behind.wait_s() == 0.0
    rig.write_behind.advance(busy=False)
    assert rig.disk.files == wanted and rig.write_behind.wait_s() is None


def test_the_next_to_be_evicted_goes_first_and_only_so_much_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_behind, "IDLE_BYTES_PER_STEP", 2 * 64)
    rig = make_rig()
    compute(rig, distinct(12, 300))
    compute(rig, distinct(12, 100))
    order = [block_id for _, block_id, _ in rig.pool.unsaved(6)]
    for count in (2, 4, 6):
        rig.write_behind.advance(busy=False)
        assert list(rig.disk.files) == order[:count]


def test_while_busy_nothing_is_written_before_eviction_is_near() -> None:
    rig = make_rig(num_blocks=16, max_model_len=60)
    compute(rig, distinct(21))
    rig.write_behind.advance(busy=True)
    assert not rig.disk.files
    compute(rig, distinct(33, 300))
    assert rig.pool.num_empty <= 4
    rig.write_behind.advance(busy=True)
    assert rig.disk.files


def test_what_is_there_already_is_not_copied_again() -> None:
    rig = make_rig()
    wanted = compute(rig, distinct(12))
    rig.write_behind.advance(busy=False)
    rig.scheduler.forget_cached()
    compute(rig, distinct(12))
    rig.disk.capacity = 0
    rig.write_behind.advance(busy=False)
    assert rig.disk.files == wanted and rig.pool.unsaved(1) == []


def test_blocks_that_came_from_disk_are_not_written_back() -> None:
    rig = make_rig()
    compute(rig, distinct(13))
    rig.write_behind.advance(busy=False)
    rig.scheduler.forget_cached()
    rig.scheduler.add(make_request("again", distinct(13), max_tokens=1))
    rig.disk.deliver(4)
    rig.finish()
    assert rig.filler.counters.disk_hit_blocks == 3 and rig.pool.unsaved(1) == []


def test_a_tier_without_room_is_left_alone_for_a_while_and_longer_each_time() -> None:
    rig = make_rig()
    wanted = compute(rig, distinct(12))
    rig.disk.capacity = 0
    waits = []
    for _ in range(4):
        rig.write_behind.advance(busy=False)
        wait = rig.write_behind.wait_s()
        assert wait is not None
        rig.now += wait + 0.001
        waits.append(round(wait, 3))
    assert waits == sorted(waits) and waits[0] > 0.0 and waits[-1] > waits[0]
    rig.disk.capacity = 100
    rig.write_behind.advance(busy=False)
    assert rig.disk.files == wanted and rig.write_behind.wait_s() is None


def test_a_flush_writes_the_rest_and_gives_up_on_a_disk_that_takes_nothing() -> None:
    rig = make_rig()
    wanted = compute(rig, distinct(12))
    rig.disk.capacity = 0
    assert not rig.write_behind.flush(3.0)
    rig.disk.capacity = 2
    rig.now += 10.0
    newest = [block_id for _, block_id, _ in rig.pool.unsaved(9)][:-3:-1]
    assert not rig.write_behind.flush(3.0) and list(rig.disk.files) == newest
    rig.disk.capacity = 100
    rig.now += 10.0
    assert rig.write_behind.flush(3.0) and rig.disk.files == wanted


def test_an_evicted_block_that_was_not_written_is_lost_and_nothing_else() -> None:
    rig = make_rig(num_blocks=12, max_model_len=48)
    first = compute(rig, distinct(20))
    compute(rig, distinct(40, 300))
    rig.write_behind.advance(busy=False)
    assert not first.keys() <= rig.disk.files.keys()
    compute(rig, distinct(20))
    rig.check_integrity()
