"""The blocks of one KV cache: who holds them, what they contain, which goes next.

    held      refs > 0    in some sequence's block table; may have an identity and be shared
    cached    refs == 0   full, computed, findable by its identity; evicted oldest first
    empty     refs == 0   nothing worth keeping; handed out before any cached block

    order of allocation:   empty (head → tail), then cached (head = oldest → tail)

With ``track_saved`` the pool also knows which cached blocks are not on disk yet, in order of eviction, so
that they can be copied out before they go.

Both free lists are doubly linked through two arrays of block numbers, so a cached block that is hit
again leaves the middle of its list in O(1). Each list is a ring closed by a sentinel.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int, *, track_saved: bool = False) -> None:
        """``track_saved``: answer ``unsaved``, which costs a little on every reuse."""
        assert num_blocks > 0 and block_size > 0, (num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_frees = 0  # calls of free(); lets a waiting caller see that something changed
        self._num_free = num_blocks
        self._num_empty = num_blocks
        self._track_saved = track_saved
        self._saved: set[int] = set()  # blocks with an identity that are on disk, or on their way
        self._unsaved: dict[int, None] = {}  # cached, free and not saved: first to be evicted first
        self._refs = [0] * num_blocks
        self._ids: list[bytes | None] = [None] * num_blocks
        self._parents: list[bytes] = [b""] * num_blocks  # of those with an identity: the one before it
        self._block_of: dict[bytes, int] = {}
        self._empty = num_blocks
        self._cached = num_blocks + 1
        self._next = [0] * (num_blocks + 2)
        self._prev = [0] * (num_blocks + 2)
        self._events: list[CacheEvent] = []
        self._first_event = 0
        self._link_all_free()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now: empty and cached ones."""
        return self._num_free

    @property
    def num_empty(self) -> int:
        """Free blocks that hold nothing: so many can be allocated before anything is evicted."""
        return self._num_empty

    @property
    def num_cached(self) -> int:
        """Identities that can be found now, in held and in free blocks."""
        return len(self._block_of)

    def lookup(self, block_ids: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a chain of identities; takes no reference."""
        find = self._block_of.get
        blocks = []
        for block_id in block_ids:
            block = find(block_id)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_free(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` nobody holds, so that acquiring them lowers ``num_free``."""
        refs = self._refs
        return sum([1 for block in blocks if not refs[block]])

    def acquire(self, blocks: Iterable[int]) -> None:
        """Takes one reference on each block that ``lookup`` found; their contents stay."""
        refs, prev, next_, unsaved = self._refs, self._prev, self._next, self._unsaved
        taken = 0
        for block in blocks:
            if not refs[block]:
                before, after = prev[block], next_[block]
                next_[before] = after
                prev[after] = before
                taken += 1
                if unsaved:
                    unsaved.pop(block, None)
            refs[block] += 1
        self._num_free -= taken

    def allocate(self, count: int, after: int = -1) -> list[int]:
        """``count`` blocks with one reference each and no identity; the caller checked ``num_free``.

        Runs of consecutive numbers are preferred where that evicts nothing more: first the empty
        blocks right behind ``after`` (the sequence's last block, or -1), then the lists' heads, sorted.
        """
        assert count <= self._num_free, (count, self._num_free)
        refs, ids, prev, next_ = self._refs, self._ids, self._prev, self._next
        blocks: list[int] = []
        if after >= 0:
            block = after + 1
            while len(blocks) < count and block < self.num_blocks and not refs[block] and ids[block] is None:
                before, behind = prev[block], next_[block]
                next_[before] = behind
                prev[behind] = before
                refs[block] = 1
                blocks.append(block)
                block += 1
        self._num_empty -= len(blocks)
        missing = count - len(blocks)
        if missing:
            others = self._pop(self._empty, missing)
            self._num_empty -= len(others)
            if len(others) < missing:
                evicted = self._pop(self._cached, missing - len(others))
                self._forget(evicted)
                others += evicted
            for block in others:
                refs[block] = 1
            others.sort()
            blocks += others
        self._num_free -= count
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Drops one reference on each block of a table. Of those that nobody holds any more, the last
        of the table is evicted first, so that prefixes, which more requests share, survive longest."""
        refs, ids, prev, next_ = self._refs, self._ids, self._prev, self._next
        unsaved, saved = self._unsaved if self._track_saved else None, self._saved
        tail = prev[self._cached]
        empty: list[int] = []
        freed = 0
        for block in reversed(blocks):
            count = refs[block] - 1
            assert count >= 0, f"block {block} was freed more often than it was taken"
            refs[block] = count
            if count:
                continue
            freed += 1
            if ids[block] is None:
                empty.append(block)
            else:
                next_[tail] = block
                prev[block] = tail
                tail = block
                if unsaved is not None and block not in saved:
                    unsaved[block] = None
        next_[tail] = self._cached
        prev[self._cached] = tail
        if empty:
            empty.reverse()
            self._num_empty += len(empty)
            self._append_empty(empty)
        self._num_free += freed
        self.num_frees += 1

    def register(self, blocks: Iterable[int], block_ids: Iterable[bytes], parent: bytes) -> None:
        """Gives held, full and computed blocks their identities; ``parent`` is the one before the first.

        Where another block already has the identity (two sequences computed the same tokens at
        once), that one stays findable and this one stays without, so it becomes empty when freed.
        """
        refs, ids, parents, block_of = self._refs, self._ids, self._parents, self._block_of
        stored: list[bytes] = []
        before = parent
        for block, block_id in zip(blocks, block_ids, strict=True):
            assert refs[block] and ids[block] is None, block
            if block_id not in block_of:
                block_of[block_id] = block
                ids[block] = block_id
                parents[block] = before
                stored.append(block_id)
            else:
                self._announce(stored, parent)
                stored, parent = [], block_id
            before = block_id
        self._announce(stored, parent)

    def unsaved(self, limit: int, *, newest_first: bool = False) -> list[tuple[int, bytes, bytes]]:
        """Up to ``limit`` cached blocks that nobody holds and that are not saved, the next to be evicted
        first, or last: (block, identity, parent's identity). Only with ``track_saved``."""
        found: list[tuple[int, bytes, bytes]] = []
        order = reversed(self._unsaved) if newest_first else iter(self._unsaved)
        for block in itertools.islice(order, limit):
            block_id = self._ids[block]
            assert block_id is not None, block
            found.append((block, block_id, self._parents[block]))
        return found

    def mark_saved(self, blocks: Iterable[int]) -> None:
        """Notes that blocks with an identity are on disk: to evict them loses nothing."""
        if not self._track_saved:
            return
        for block in blocks:
            assert self._ids[block] is not None, block
            self._saved.add(block)
            self._unsaved.pop(block, None)

    def add_events(self, events: Sequence[CacheEvent]) -> None:
        """Puts events of another tier into the numbered stream."""
        self._events.extend(events)

    def reset(self) -> None:
        """Forgets every identity. Held blocks stay held; free ones are empty and in ascending order.

        When the meaning of contents changes (other weights), let running sequences finish first.
        """
        self._ids = [None] * self.num_blocks
        self._block_of.clear()
        self._saved.clear()
        self._unsaved.clear()
        self._link_all_free()
        self._events.append(CacheCleared())

    def take_events(self) -> tuple[int, list[CacheEvent]]:
        """What happened since the last call, in order, and the running number of the first event."""
        first, events = self._first_event, self._events
        self._first_event += len(events)
        self._events = []
        return first, events

    def snapshot(self) -> list[BlocksStored]:
        """All that can be found now, parents before children: what the events up to now come to.

        A block whose parent was evicted while somebody held it is among them. O(cached blocks).
        """
        parents, block_of = self._parents, self._block_of
        children: dict[bytes, list[bytes]] = {}
        for block_id, block in block_of.items():
            children.setdefault(parents[block], []).append(block_id)
        heads = [
            (child, parent) for parent in children if parent not in block_of for child in children[parent]
        ]
        stored: list[BlocksStored] = []
        while heads:
            block_id, parent = heads.pop()
            run = [block_id]
            while following := children.get(run[-1]):
                heads += [(other, run[-1]) for other in following[1:]]
                run.append(following[0])
            stored.append(BlocksStored(block_ids=run, parent=parent))
        return stored

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that ``tables`` are all that is held, and that lists, counts and map agree."""
        expected = [0] * self.num_blocks
        for table in tables:
            assert len(set(table)) == len(table), f"a block occurs twice in a table: {table}"
            for block in table:
                expected[block] += 1
        wrong = [b for b in range(self.num_blocks) if expected[b] != self._refs[b]]
        assert not wrong, f"references differ from the tables' at blocks {wrong[:8]}"
        empty, cached = self._walk(self._empty), self._walk(self._cached)
        free = set(empty) | set(cached)
        assert len(free) == len(empty) + len(cached) == self._num_free, "a free block is lost or doubled"
        assert free == {b for b in range(self.num_blocks) if not self._refs[b]}, "the wrong blocks are free"
        assert all(self._ids[b] is None for b in empty), "an empty block has an identity"
        assert all(self._ids[b] is not None for b in cached), "a cached block has no identity"
        assert self._num_empty == len(empty), "empty blocks are miscounted"
        expected_unsaved = [b for b in cached if b not in self._saved] if self._track_saved else []
        assert list(self._unsaved) == expected_unsaved, "what is not saved is out of order"
        assert all(self._ids[b] is not None for b in self._saved), "a block without identity counts as saved"
        found = {i: b for b, i in enumerate(self._ids) if i is not None}
        assert self._block_of == found, "map and identities differ"

    def _pop(self, sentinel: int, limit: int) -> list[int]:
        """Unlinks up to ``limit`` blocks from the head of a list."""
        next_ = self._next
        blocks: list[int] = []
        block = next_[sentinel]
        while block != sentinel and len(blocks) < limit:
            blocks.append(block)
            block = next_[block]
        next_[sentinel] = block
        self._prev[block] = sentinel
        return blocks

    def _append_empty(self, blocks: Iterable[int]) -> None:
        prev, next_ = self._prev, self._next
        tail = prev[self._empty]
        for block in blocks:
            next_[tail] = block
            prev[block] = tail
            tail = block
        next_[tail] = self._empty
        prev[self._empty] = tail

    def _link_all_free(self) -> None:
        self._num_empty = self._num_free
        for sentinel in (self._empty, self._cached):
            self._next[sentinel] = self._prev[sentinel] = sentinel
        self._append_empty(b for b in range(self.num_blocks) if not self._refs[b])

    def _forget(self, blocks: Iterable[int]) -> None:
        ids = self._ids
        removed: list[bytes] = []
        for block in blocks:
            block_id = ids[block]
            assert block_id is not None, block
            del self._block_of[block_id]
            ids[block] = None
            removed.append(block_id)
            if self._track_saved:
                self._saved.discard(block)
                self._unsaved.pop(block, None)
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksRemoved) and last.tier == "memory":
            last.block_ids.extend(removed)  # not handed out yet, so still ours
        else:
            self._events.append(BlocksRemoved(block_ids=removed))

    def _announce(self, stored: list[bytes], parent: bytes) -> None:
        if not stored:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, BlocksStored) and last.tier == "memory" and last.block_ids[-1] == parent:
            last.block_ids.extend(stored)  # not handed out yet, so still ours
        else:
            self._events.append(BlocksStored(block_ids=stored, parent=parent))

    def _walk(self, sentinel: int) -> list[int]:
        blocks: list[int] = []
        before, block = sentinel, self._next[sentinel]
        while block != sentinel:
            assert self._prev[block] == before, f"broken link between {before} and {block}"
            assert len(blocks) < self.num_blocks, "a free list runs in a circle"
            blocks.append(block)
            before, block = block, self._next[block]
        assert self._prev[sentinel] == before, "the tail of a free list is broken"
        return blocks
