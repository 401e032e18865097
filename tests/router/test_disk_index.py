"""Blocks on disk: who sees them, how they continue what is in memory, and what they are worth."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared, CacheSnapshot, Moves, Stats
from headrace.router.cache_feed import CacheFeed
from headrace.router.disk_index import DEFAULT_READ_RATE, DiskFolder, DiskIndex
from headrace.router.kv_traits import KvTraits
from headrace.router.prefix_index import PrefixIndex
from headrace.router.router import Router
from tests.router.routing import BLOCK, add, block, make, route, stored, up

BLOCK_BYTES = 100_000
LONG = tuple(range(1, 101))


def on_disk(*numbers: int) -> BlocksStored:
    return BlocksStored([block(number) for number in numbers], bytes(32), "disk")


def gone(*numbers: int, tier="disk") -> BlocksRemoved:
    return BlocksRemoved([block(number) for number in numbers], tier)


def kv(disk: str, **fields: object) -> KvTraits:
    return KvTraits("unified", "", BLOCK_BYTES, "bf16", disk)._replace(**fields)


def share(*folders: str) -> Router:
    """Replicas r0, r1, … each with a disk tier in that folder."""
    router = make()
    for i, folder in enumerate(folders):
        add(router, f"r{i}", kv=kv(folder))
    return router


def seen(router: Router, name: str) -> dict[str, tuple[int, int]]:
    """By replica: tokens that it has, and those of them on disk."""
    candidates = router.why(name)[-1].candidates
    return {one.replica_id: (one.num_cached_tokens, one.num_disk_tokens) for one in candidates}


def place(router: Router, name: str, *numbers: int, **fields: object):
    placement = router.place(route(name, *numbers, **fields), 0.0, 0.0)
    router.check_integrity()
    assert placement is not None
    return placement


# The folder


@given(
    held=st.sets(st.integers(0, 30)),
    length=st.integers(0, 30),
    starts=st.lists(st.integers(0, 35), min_size=1, max_size=6),
)
def test_runs_end_at_the_first_gap(held, length, starts):
    folder = DiskFolder("f", 1000)
    folder.store(held)
    keys = list(range(length))

    def end(start: int) -> int:
        while start < length and start in held:
            start += 1
        return min(start, length)

    assert folder.runs(keys, starts) == [end(start) for start in starts]


@settings(max_examples=50)
@given(ops=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 200), max_size=40)), max_size=30))
def test_a_folder_is_bounded_and_never_holds_what_was_removed(ops):
    folder, told = DiskFolder("f", 64), set()
    for is_store, keys in ops:
        if is_store:
            folder.store(keys)
            told |= set(keys)
        else:
            folder.remove(keys)
            told -= set(keys)
        assert len(folder) <= 64
        assert all(key in told for key in range(201) if key in folder)


def test_the_newest_are_kept():
    folder = DiskFolder("f", 64)
    folder.store(range(64))
    folder.store([1000])
    assert 1000 in folder and 63 in folder and 0 not in folder


def test_a_folder_lives_as_long_as_somebody_uses_it():
    disks = DiskIndex(100)
    one = disks.move(None, "f")
    two = disks.move(None, "f")
    assert one is two and one is not None and one.num_members == 2
    assert disks.move(one, "f") is one and one.num_members == 2
    assert disks.move(one, "") is None and len(disks) == 1
    assert disks.move(two, "g") is not one and len(disks) == 1


def test_the_speed_of_reading_is_learned():
    folder = DiskFolder("f", 10)
    before = folder.read_s(1e9)
    assert before == pytest.approx(1e9 / DEFAULT_READ_RATE, rel=0.01)
    folder.on_read(1e8, 0.05)
    assert folder.read_s(1e9) == pytest.approx(0.5, rel=0.01)
    folder.on_read(0, 0.0)
    assert folder.read_s(1e9) == pytest.approx(0.5, rel=0.01)


# The feed


def feed_of(index: PrefixIndex, folder: DiskFolder | None) -> tuple[CacheFeed, int]:
    slot = index.add_slot()
    feed = CacheFeed(index, slot)
    feed.folder = folder
    return feed, slot


def test_tiers_are_kept_apart():
    index, folder = PrefixIndex(100), DiskFolder("f", 100)
    feed, slot = feed_of(index, folder)
    feed.on_events(0, [stored(1, 2), on_disk(2, 3)], 0.0)
    assert index.match([1, 2, 3])[slot] == 2 and folder.runs([1, 2, 3], [1]) == [3]
    feed.on_events(2, [gone(2, tier="memory")], 0.0)
    assert index.match([1, 2])[slot] == 1 and 2 in folder
    feed.on_events(3, [gone(2)], 0.0)
    assert 2 not in folder
    feed.on_events(4, [CacheCleared()], 0.0)
    assert index.count(slot) == 0 and 3 in folder, "what is on disk outlives the memory"


def test_disk_blocks_of_a_replica_without_a_tier_are_nobodys():
    index = PrefixIndex(100)
    feed, slot = feed_of(index, None)
    feed.on_events(0, [on_disk(1), gone(1)], 0.0)
    feed.on_snapshot(CacheSnapshot(stored=[on_disk(1)], next_seq=2))
    assert index.count(slot) == 0


def test_a_snapshot_replaces_what_one_alone_knew_and_adds_to_what_is_shared():
    index, disks = PrefixIndex(100), DiskIndex(100)
    folder = disks.move(None, "f")
    assert folder is not None
    feed, _ = feed_of(index, folder)
    feed.on_events(0, [on_disk(1, 2)], 0.0)
    feed.on_snapshot(CacheSnapshot(stored=[on_disk(3)], next_seq=1))
    assert 1 not in folder and 3 in folder
    disks.move(None, "f")
    feed.on_snapshot(CacheSnapshot(stored=[on_disk(4)], next_seq=1))
    assert 3 in folder and 4 in folder


# The router


def test_replicas_of_one_folder_see_each_others_blocks():
    router = share("host:/kv", "host:/kv", "host:/other")
    router.on_events("r0", 0, [on_disk(*LONG)], 0.0)
    place(router, "r", *LONG)
    tokens = len(LONG) * BLOCK
    assert seen(router, "r") == {"r0": (tokens, tokens), "r1": (tokens, tokens), "r2": (0, 0)}
    router.on_events("r1", 0, [gone(*LONG)], 0.0)
    router.release("r", "aborted", 0, 0.0, 0.0)
    place(router, "s", *LONG)
    assert seen(router, "s")["r0"] == (0, 0)


def test_the_disk_continues_what_is_in_memory():
    router = share("f")
    router.on_events("r0", 0, [stored(*LONG[:30]), on_disk(*LONG[30:90])], 0.0)
    placement = place(router, "r", *LONG)
    assert seen(router, "r") == {"r0": (90 * BLOCK, 60 * BLOCK)}
    assert placement.num_cached_tokens == 90 * BLOCK
    fill_s = router.why("r")[-1].candidates[0].fill_s
    assert fill_s == pytest.approx(60 * BLOCK_BYTES / DEFAULT_READ_RATE, abs=0.002)
    assert placement.ttft_s > fill_s


def test_a_gap_ends_what_can_be_read():
    router = share("f")
    router.on_events("r0", 0, [on_disk(*LONG[:10], *LONG[20:])], 0.0)
    place(router, "r", *LONG)
    assert seen(router, "r") == {"r0": (10 * BLOCK, 10 * BLOCK)}


def test_the_last_token_is_computed_although_all_blocks_are_there():
    router = share("f")
    router.on_events("r0", 0, [on_disk(*LONG)], 0.0)
    place(router, "r", *LONG, tokens=len(LONG) * BLOCK)
    assert seen(router, "r") == {"r0": (99 * BLOCK, 99 * BLOCK)}


def test_memory_beats_disk_and_disk_beats_computing():
    router = share("f", "g", "h")
    router.on_events("r1", 0, [on_disk(*LONG)], 0.0)
    router.on_events("r2", 0, [stored(*LONG)], 0.0)
    assert place(router, "first", *LONG).replica_id == "r2"
    router = share("f", "g", "h")
    router.on_events("r1", 0, [on_disk(*LONG)], 0.0)
    assert place(router, "second", *LONG).replica_id == "r1"


def test_a_disk_that_is_slower_than_computing_is_worth_nothing():
    router = share("f")
    router.on_events("r0", 0, [on_disk(*LONG)], 0.0)
    slow = Moves(disk_read_bytes=1_000_000, disk_read_s=10.0)
    router.on_stats("r0", Stats(num_blocks=1000, num_free_blocks=1000, moves=slow), 0.0)
    place(router, "r", *LONG)
    assert seen(router, "r") == {"r0": (0, 0)}


def test_what_one_learns_of_a_folder_holds_for_all():
    router = share("f", "f")
    router.on_events("r0", 0, [on_disk(*LONG)], 0.0)
    fast = Moves(disk_read_bytes=1_000_000_000, disk_read_s=0.1)
    router.on_stats("r1", Stats(num_blocks=1000, num_free_blocks=1000, moves=fast), 0.0)
    place(router, "r", *LONG)
    fills = {one.replica_id: one.fill_s for one in router.why("r")[-1].candidates}
    assert fills["r0"] == fills["r1"] == pytest.approx(0.002, abs=0.0001)


def test_a_restarted_replica_finds_its_disk_again():
    router = share("f")
    router.on_events("r0", 0, [stored(1), on_disk(*LONG)], 0.0)
    up(router, "r0", instance="two", kv=kv("f"))
    place(router, "r", *LONG)
    assert seen(router, "r") == {"r0": (100 * BLOCK, 100 * BLOCK)}
    router.on_snapshot("r0", CacheSnapshot(stored=[on_disk(*LONG[:50])], next_seq=0), 0.0)
    router.release("r", "aborted", 0, 0.0, 0.0)
    place(router, "s", *LONG)
    assert seen(router, "s") == {"r0": (50 * BLOCK, 50 * BLOCK)}


def test_a_replica_that_comes_back_without_its_tier_does_not_count_it():
    router = share("f", "f")
    router.on_events("r0", 0, [on_disk(*LONG)], 0.0)
    up(router, "r0", instance="two", kv=kv(""))
    place(router, "r", *LONG)
    assert seen(router, "r") == {"r0": (0, 0), "r1": (100 * BLOCK, 100 * BLOCK)}
    router.remove_endpoint("r1", 0.0)
    router.check_integrity()


def test_what_is_on_disk_is_not_fetched_and_what_a_giver_has_on_disk_is_not_computed():
    router = make()
    add(router, "p0", role="prefill", kv=kv("g", role="prefill", address="unix:/p0"))
    add(router, "d0", role="decode", kv=kv("f", role="decode"))
    for i in range(4):
        place(router, f"stream{i}", 9000 + i)
        router.began(f"stream{i}", 0.1, 0, 0.1)
    router.on_events("d0", 0, [on_disk(*LONG[:40])], 0.0)
    router.on_events("p0", 0, [on_disk(*LONG[:90])], 0.0)
    placement = place(router, "r", *LONG)
    assert placement.prefill_replica == "p0" and placement.num_cached_tokens == 40 * BLOCK
    (mine,) = [one for one in router.why("r")[-1].candidates if one.replica_id == "d0"]
    assert (mine.num_disk_tokens, mine.num_fetched_tokens) == (40 * BLOCK, 60 * BLOCK)
    status = {s.member.endpoint.replica_id: s for s in router.status().replicas}
    assert status["p0"].num_in_flight == 1
    # 40 blocks are read; then of 1,600 tokens the giver reads 1,440 and computes 160; then 60 blocks move
    assert mine.fill_s == pytest.approx((0.011) + (0.01 + 0.0235 + 0.08) + (0.005 + 0.006), abs=0.001)
