"""BlockPool: references, identities, order of eviction, events; by example and against a model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared
from headrace.kvcache.block_pool import BlockPool

ROOT = b"r" * 32


def ids(text: str) -> list[bytes]:
    """One 32-byte identity a letter."""
    return [letter.encode() * 32 for letter in text]


def cache(pool: BlockPool, text: str) -> list[int]:
    """Computes, registers and frees one chain."""
    blocks = pool.allocate(len(text))
    pool.register(blocks, ids(text), ROOT)
    pool.free(blocks)
    return blocks


def test_fresh_pool_hands_out_consecutive_blocks() -> None:
    pool = BlockPool(8, 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]
    assert pool.num_free == 3


def test_growth_prefers_the_block_behind_the_last() -> None:
    pool = BlockPool(8, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(second)
    pool.allocate(1, after=5)
    assert pool.allocate(2, after=first[-1]) == [2, 3]


def test_growth_never_evicts_for_the_sake_of_order() -> None:
    pool = BlockPool(4, 4)
    cache(pool, "ab")
    held = pool.allocate(1)
    assert held == [2]
    pool.free(held)
    assert pool.lookup(ids("ab")) == [0, 1]
    assert pool.allocate(1, after=0) == [3], "block 1 is cached, an empty block is there"
    assert pool.lookup(ids("ab")) == [0, 1]


def test_evicted_run_comes_back_in_ascending_order() -> None:
    pool = BlockPool(6, 4)
    cache(pool, "abcdef")
    assert pool.allocate(6) == [0, 1, 2, 3, 4, 5]


def test_lookup_stops_at_the_first_miss() -> None:
    pool = BlockPool(8, 4)
    blocks = cache(pool, "abc")
    assert pool.lookup(ids("abxc")) == blocks[:2]
    assert pool.lookup(ids("xbc")) == []


def test_tail_is_evicted_before_prefix_and_old_before_new() -> None:
    pool = BlockPool(6, 4)
    cache(pool, "abc")
    cache(pool, "xyz")
    pool.take_events()
    pool.allocate(4)
    assert pool.take_events()[1] == [BlocksRemoved(block_ids=ids("cbaz"))]
    assert len(pool.lookup(ids("xyz"))) == 2


def test_empty_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4, 4)
    cache(pool, "ab")
    partial = pool.allocate(2)
    pool.free(partial)
    assert pool.allocate(2) == partial
    assert len(pool.lookup(ids("ab"))) == 2


def test_hit_takes_a_block_out_of_the_middle_of_the_free_list() -> None:
    pool = BlockPool(3, 4)
    cache(pool, "abc")
    pool.acquire(pool.lookup(ids("ab")))
    pool.check_integrity([[0, 1]])
    assert pool.num_free == 1
    assert pool.allocate(1) == [2]
    pool.free([0, 1])
    assert pool.lookup(ids("abc")) == [0, 1]


def test_hit_makes_a_block_young_again() -> None:
    pool = BlockPool(4, 4)
    cache(pool, "ab")
    cache(pool, "xy")
    hit = pool.lookup(ids("ab"))
    pool.acquire(hit)
    pool.free(hit)
    pool.allocate(2)
    assert pool.lookup(ids("ab")) == hit
    assert pool.lookup(ids("xy")) == []


def test_shared_block_is_free_when_the_last_holder_lets_go() -> None:
    pool = BlockPool(4, 4)
    first = pool.allocate(2)
    pool.register(first, ids("ab"), ROOT)
    pool.acquire(first)
    assert pool.count_free(first) == 0
    pool.free(first)
    assert pool.num_free == 2
    pool.check_integrity([first])
    pool.free(first)
    assert pool.num_free == 4
    assert pool.count_free(first) == 2


def test_duplicate_content_keeps_the_first_block_findable() -> None:
    pool = BlockPool(6, 4)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.register(first, ids("ab"), ROOT)
    pool.register(second, ids("abc"), ROOT)
    assert pool.lookup(ids("abc")) == [*first, second[2]]
    pool.free(second)
    pool.check_integrity([first])
    assert pool.lookup(ids("abc")) == [*first, second[2]]
    pool.free(first)
    assert pool.num_cached == 3
    pool.check_integrity([])


def test_events_are_numbered_in_order_and_coalesced() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(3)
    pool.register(blocks[:1], ids("a"), ROOT)
    pool.register(blocks[1:2], ids("b"), ids("a")[0])
    assert pool.take_events() == (0, [BlocksStored(block_ids=ids("ab"), parent=ROOT)])
    pool.register(blocks[2:], ids("c"), ids("b")[0])
    pool.free(blocks)
    pool.allocate(2)
    pool.allocate(1)
    pool.reset()
    assert pool.take_events() == (
        1,
        [
            BlocksStored(block_ids=ids("c"), parent=ids("b")[0]),
            BlocksRemoved(block_ids=ids("cb")),
            CacheCleared(),
        ],
    )
    assert pool.take_events() == (4, [])


def test_chains_of_one_step_are_told_apart() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.register(first, ids("ab"), ROOT)
    pool.register(second, ids("xy"), ROOT)
    assert pool.take_events()[1] == [
        BlocksStored(block_ids=ids("ab"), parent=ROOT),
        BlocksStored(block_ids=ids("xy"), parent=ROOT),
    ]


def test_taken_events_never_change() -> None:
    pool = BlockPool(4, 4)
    blocks = pool.allocate(2)
    pool.register(blocks[:1], ids("a"), ROOT)
    taken = pool.take_events()[1]
    pool.register(blocks[1:], ids("b"), ids("a")[0])
    assert taken == [BlocksStored(block_ids=ids("a"), parent=ROOT)]


def test_reset_forgets_and_keeps_what_is_held() -> None:
    pool = BlockPool(5, 4)
    held = pool.allocate(2)
    pool.register(held, ids("ab"), ROOT)
    cache(pool, "xy")
    pool.reset()
    assert pool.lookup(ids("ab")) == pool.lookup(ids("xy")) == []
    pool.check_integrity([held])
    assert pool.allocate(3) == [2, 3, 4]
    pool.free(held)
    assert pool.num_free == 2


def test_a_snapshot_tells_chains_branches_and_orphans() -> None:
    pool = BlockPool(8, 4)
    trunk = pool.allocate(3)
    pool.register(trunk, ids("abc"), ROOT)
    branch = pool.allocate(1)
    pool.register(branch, ids("x"), ids("b")[0])
    assert pool.snapshot() == [
        BlocksStored(block_ids=ids("abc"), parent=ROOT),
        BlocksStored(block_ids=ids("x"), parent=ids("b")[0]),
    ]
    pool.free(trunk)
    pool.allocate(7)  # evicts a chain of which one later block is held
    assert pool.snapshot() == [BlocksStored(block_ids=ids("x"), parent=ids("b")[0])]
    pool.reset()
    assert pool.snapshot() == []


def test_integrity_check_finds_a_lost_and_a_doubly_freed_block() -> None:
    pool = BlockPool(4, 4)
    held = pool.allocate(2)
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="references differ"):
        pool.check_integrity([held, held])
    pool.free(held)
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(held)


def test_what_is_not_saved_is_told_with_its_parent_in_order_of_eviction() -> None:
    pool = BlockPool(8, 4, track_saved=True)
    a, b, c = cache(pool, "abc")
    assert pool.unsaved(2) == [(c, *ids("cb")), (b, *ids("ba"))]
    assert pool.unsaved(9)[-1] == (a, ids("a")[0], ROOT)
    pool.mark_saved([c, a])
    assert pool.unsaved(9) == [(b, *ids("ba"))]


def test_a_block_counts_as_saved_as_long_as_it_keeps_its_content() -> None:
    pool = BlockPool(4, 4, track_saved=True)
    blocks = cache(pool, "ab")
    pool.mark_saved(blocks)
    pool.acquire(blocks)
    assert pool.unsaved(9) == []
    pool.free(blocks)
    assert pool.unsaved(9) == []
    pool.free(pool.allocate(4))
    again = cache(pool, "ab")
    assert [block for block, _, _ in pool.unsaved(9)] == again[::-1]


def test_what_somebody_holds_is_not_about_to_go() -> None:
    pool = BlockPool(4, 4, track_saved=True)
    a, b = cache(pool, "ab")
    pool.acquire([a])
    assert [block for block, _, _ in pool.unsaved(9)] == [b]
    pool.free([a])
    assert [block for block, _, _ in pool.unsaved(9)] == [b, a]
    pool.reset()
    assert pool.unsaved(9) == [] and pool.num_empty == 4


def test_events_of_another_tier_take_their_numbers_in_the_same_stream() -> None:
    pool = BlockPool(4, 4)
    cache(pool, "a")
    on_disk = BlocksStored(block_ids=ids("a"), parent=ROOT, tier="disk")
    pool.add_events([on_disk])
    blocks = pool.lookup(ids("a"))
    pool.acquire(blocks)
    more = pool.allocate(1)
    pool.register(more, ids("b"), ids("a")[0])
    pool.add_events([BlocksRemoved(block_ids=ids("a"), tier="disk")])
    pool.free(blocks + more)
    pool.allocate(4)
    first, events = pool.take_events()
    assert first == 0
    assert events == [
        BlocksStored(block_ids=ids("a"), parent=ROOT),
        on_disk,
        BlocksStored(block_ids=ids("b"), parent=ids("a")[0]),
        BlocksRemoved(block_ids=ids("a"), tier="disk"),
        BlocksRemoved(block_ids=ids("ba")),
    ]
    assert pool.take_events() == (5, [])


class PoolMachine(RuleBasedStateMachine):
    """Random sequences over few chains, so that they share, collide and evict. The model keeps holders,
    contents, the order of eviction, and an index built from the events alone."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(12, 4, track_saved=True)
        self.saved: set[bytes] = set()  # identities that are on disk as far as the pool was told
        self.tables: list[tuple[str, list[int], int]] = []  # chain, blocks, how many are registered
        self.content: dict[int, bytes] = {}  # block → identity, as registered
        self.order: list[int] = []  # cached free blocks, next to be evicted first
        self.index: dict[bytes, int] = {}  # identity → event that stored it
        self.next_event = 0

    def chain(self, text: str) -> list[bytes]:
        """Identities depend on all that precedes: prefixes of one text share, others do not."""
        return [text[: i + 1].rjust(32, "-").encode() for i in range(len(text))]

    def holders(self, block: int) -> int:
        return sum(block in table for _, table, _ in self.tables)

    @rule(text=st.text("ab", min_size=1, max_size=6), extra=st.integers(0, 2))
    def start(self, text: str, extra: int) -> None:
        pool, chain = self.pool, self.chain(text)
        hits = pool.lookup(chain)
        known = {identity: block for block, identity in self.content.items()}
        expected = []
        for identity in chain:
            if identity not in known:
                break
            expected.append(known[identity])
        assert hits == expected, "a known prefix was missed or a wrong block returned"
        missing = len(text) + extra - len(hits)
        if missing + pool.count_free(hits) > pool.num_free:
            return
        pool.acquire(hits)
        self.order = [b for b in self.order if b not in hits]
        self.tables.append((text, hits + self.allocated(missing, hits), len(hits)))

    def allocated(self, count: int, table: list[int]) -> list[int]:
        empty = self.pool.num_free - len(self.order)
        evicted, self.order = self.order[: max(0, count - empty)], self.order[max(0, count - empty) :]
        blocks = self.pool.allocate(count, table[-1] if table else -1)
        assert set(evicted) <= set(blocks), "not the oldest cached block was evicted"
        assert not set(self.order) & set(blocks), "more was evicted than needed"
        assert not any(self.holders(b) for b in blocks), "a held block was handed out"
        for block in evicted:
            self.saved.discard(self.content.pop(block))
        return blocks

    @rule(count=st.integers(1, 4))
    def save(self, count: int) -> None:
        found = self.pool.unsaved(count)
        self.pool.mark_saved(block for block, _, _ in found)
        self.saved.update(block_id for _, block_id, _ in found)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        which = data.draw(st.integers(0, len(self.tables) - 1))
        text, table, done = self.tables[which]
        end = data.draw(st.integers(done, len(text)))
        chain = self.chain(text)
        parent = chain[done - 1] if done else ROOT
        self.pool.register(table[done:end], chain[done:end], parent)
        for block, identity in zip(table[done:end], chain[done:end], strict=True):
            if identity not in self.content.values():
                self.content[block] = identity
        self.tables[which] = (text, table, end)

    @precondition(lambda self: self.tables and self.pool.num_free)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        _, table, _ = data.draw(st.sampled_from(self.tables))
        table += self.allocated(1, table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        _, table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        self.order += [b for b in reversed(table) if b in self.content and not self.holders(b)]

    @precondition(lambda self: not self.tables)
    @rule()
    def reset(self) -> None:
        self.pool.reset()
        self.content.clear()
        self.order.clear()
        self.saved.clear()

    @rule()
    def read_events(self) -> None:
        first, events = self.pool.take_events()
        assert first == self.next_event
        self.next_event += len(events)
        for event in events:
            if isinstance(event, BlocksStored):
                parent = event.parent
                for identity in event.block_ids:
                    assert identity not in self.index, "stored twice"
                    assert parent == ROOT or parent.decode()[1:] == identity.decode()[1:-1].rjust(31, "-")
                    self.index[identity] = 1
                    parent = identity
            elif isinstance(event, BlocksRemoved):
                for identity in event.block_ids:
                    del self.index[identity]
            else:
                self.index.clear()
        assert set(self.index) == set(self.content.values()), "the events tell another story"
        self.read_snapshot()

    def read_snapshot(self) -> None:
        told: set[bytes] = set()
        for run in self.pool.snapshot():
            parent = run.parent
            assert parent in told or parent not in self.index, "a child was told before its parent"
            for identity in run.block_ids:
                assert parent == ROOT or parent.decode()[1:] == identity.decode()[1:-1].rjust(31, "-")
                assert identity not in told, "told twice"
                told.add(identity)
                parent = identity
        assert told == set(self.index), "the snapshot and the events differ"

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool.check_integrity([table for _, table, _ in self.tables])
        assert self.pool.num_cached == len(self.content)
        assert self.pool.num_empty == self.pool.num_free - len(self.order)
        expected = [(b, self.content[b]) for b in self.order if self.content[b] not in self.saved]
        assert [(block, block_id) for block, block_id, _ in self.pool.unsaved(12)] == expected

    def teardown(self) -> None:
        for _, table, _ in self.tables:
            self.pool.free(table)
        self.pool.check_integrity([])
        assert self.pool.num_free == self.pool.num_blocks


PoolMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, database=None
)
TestPoolMachine = PoolMachine.TestCase
