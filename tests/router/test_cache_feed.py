from __future__ import annotations

from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared, CacheSnapshot
from headrace.router.cache_feed import HEAL_S, CacheFeed
from headrace.router.prefix_index import PrefixIndex, keys_of

ROOT = bytes(32)


def block(number: int) -> bytes:
    return number.to_bytes(32, "little")


def stored(*numbers: int) -> BlocksStored:
    return BlocksStored([block(number) for number in numbers], ROOT)


def removed(*numbers: int) -> BlocksRemoved:
    return BlocksRemoved([block(number) for number in numbers])


def make() -> tuple[CacheFeed, PrefixIndex]:
    index = PrefixIndex(1000)
    return CacheFeed(index, index.add_slot()), index


def known(index: PrefixIndex, *numbers: int) -> list[int]:
    return [n for n in numbers if index.match(keys_of(block(n))) == [1]]


def test_events_in_order() -> None:
    feed, index = make()
    assert feed.on_events(0, [stored(1, 2), removed(2)], 0.0) is None
    assert feed.on_events(2, [stored(3)], 0.0) is None
    assert feed.next_seq == 3
    assert known(index, 1, 2, 3) == [1, 3]


def test_repeats_and_overlaps_are_applied_once() -> None:
    feed, index = make()
    first = [stored(1), removed(1), stored(2)]
    feed.on_events(0, first, 0.0)
    feed.on_events(3, [stored(1)], 0.0)
    assert feed.on_events(0, first, 0.0) is None, "all of it is old"
    assert known(index, 1, 2) == [1, 2]
    assert feed.on_events(2, [stored(2), stored(1), removed(2)], 0.0) is None, "its last one is new"
    assert known(index, 1, 2) == [1]
    assert feed.next_seq == 5


def test_a_gap_is_told_once_and_healed_by_a_replay() -> None:
    feed, index = make()
    feed.on_events(0, [stored(1)], 0.0)
    assert feed.on_events(3, [stored(4)], 1.0) == 1
    assert known(index, 1, 4) == [1], "nothing is applied behind a gap"
    assert feed.on_events(4, [stored(5)], 1.5) is None, "the answer is on its way"
    assert feed.on_events(5, [stored(6)], 1.0 + HEAL_S) == 1, "it did not come"
    assert feed.on_events(1, [stored(2), stored(3), stored(4), stored(5), stored(6)], 7.0) is None
    assert known(index, 1, 2, 3, 4, 5, 6) == [1, 2, 3, 4, 5, 6]
    assert feed.on_events(8, [stored(9)], 7.1) == 6, "another gap is told at once"


def test_a_snapshot_replaces_everything() -> None:
    feed, index = make()
    feed.on_events(0, [stored(1, 2)], 0.0)
    assert feed.on_events(9, [stored(9)], 0.0) == 1
    feed.on_snapshot(CacheSnapshot([stored(2), stored(3)], 12))
    assert known(index, 1, 2, 3, 9) == [2, 3]
    assert feed.num_resets == 1
    assert feed.on_events(11, [stored(1), stored(4)], 0.0) is None
    assert known(index, 1, 2, 3, 4) == [2, 3, 4]


def test_cleared_and_restarted() -> None:
    feed, index = make()
    feed.on_events(0, [stored(1), CacheCleared(), stored(2)], 0.0)
    assert known(index, 1, 2) == [2]
    feed.restart()
    assert known(index, 1, 2) == []
    assert feed.next_seq == 0
    assert feed.num_resets == 2
    feed.restart()
    assert feed.num_resets == 2, "nothing was known"
