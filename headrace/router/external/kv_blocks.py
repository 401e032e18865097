"""Another engine's cached blocks in our identities.

Its events name blocks by hashes of its own and carry their tokens when they are stored; a removal carries the
hash alone. Block sizes may differ, so that one of theirs may complete several of ours, or several of theirs
are needed for one:

    theirs   │ a  (16) │ b  (16) │ c  (16) │ d  (16) │
    ours     │ id₀ = H(root, a b)  │ id₁ = H(id₀, c d)  │      id₀ is there while a and b are

A hash is counted: the engine may hold the same block twice, and tells of each. One of ours may be there in
several ways: two of theirs that differ only behind it.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from headrace.core.identity import block_identities
from headrace.core.messages import BlocksRemoved, BlocksStored, CacheEvent

Key = Hashable  # their hash: bytes, or an int


class _Way:
    """One way to hold a block of ours: the blocks of theirs that it is made of, in order, and how many of
    them are not there."""

    __slots__ = ("identity", "keys", "num_missing")

    def __init__(self, identity: bytes, keys: tuple[Key, ...]) -> None:
        self.identity = identity
        self.keys = keys
        self.num_missing = 0


class _Ours:
    """One of our blocks; it is there while at least one way is whole."""

    __slots__ = ("num_ways", "num_whole", "parent")

    def __init__(self, parent: bytes) -> None:
        self.parent = parent
        self.num_ways = 0
        self.num_whole = 0


class _Theirs:
    """One of their blocks: how often it is there, which of ours it is part of, and where the chain stands."""

    __slots__ = ("chain", "count", "tail", "tail_keys", "ways")

    def __init__(self, chain: bytes, tail: bytes, tail_keys: tuple[Key, ...]) -> None:
        self.count = 0
        self.ways: list[_Way] = []
        self.chain = chain  # identity of our last full block up to its end
        self.tail = tail  # tokens behind that, packed
        self.tail_keys = tail_keys  # the blocks of theirs that these are in


class BlockTranslator:
    """Turns stored and removed blocks of another engine into ours."""

    def __init__(self, root: bytes, block_size: int) -> None:
        self._root = root
        self._block_size = block_size
        self._theirs: dict[Key, _Theirs] = {}
        self._ours: dict[bytes, _Ours] = {}
        self.num_orphans = 0  # stored behind blocks that we do not know

    def __len__(self) -> int:
        """Blocks of ours that are there."""
        return sum(block.num_whole > 0 for block in self._ours.values())

    def clear(self) -> None:
        """Forgets everything."""
        self._theirs.clear()
        self._ours.clear()

    def stored(
        self, keys: Sequence[Key], parent: Key | None, token_ids: Sequence[int], block_size: int
    ) -> list[CacheEvent]:
        """Their blocks ``keys`` of ``block_size`` tokens each, in chain order behind ``parent``."""
        if len(token_ids) != len(keys) * block_size:
            self.num_orphans += len(keys)
            return []
        chain, tail = self._root, b""
        tail_keys: tuple[Key, ...] = ()
        if parent is not None:
            before = self._theirs.get(parent)
            if before is None:
                self.num_orphans += len(keys)
                return []
            chain, tail, tail_keys = before.chain, before.tail, before.tail_keys
        packed = array("I", token_ids).tobytes()
        width = 4 * block_size
        added: list[tuple[bytes, bytes]] = []  # (identity, parent)
        for place, key in enumerate(keys):
            block = self._theirs.get(key)
            if block is None or not block.count:
                tokens = tail + packed[place * width : (place + 1) * width]
                block = self._place(key, block, chain, tokens, (*tail_keys, key), added)
            block.count += 1
            chain, tail, tail_keys = block.chain, block.tail, block.tail_keys
        return [*_runs(added)]

    def removed(self, keys: Sequence[Key]) -> list[CacheEvent]:
        """Their blocks that are gone, or one of several copies of each; unknown ones are ignored."""
        gone: list[bytes] = []
        for key in keys:
            block = self._theirs.get(key)
            if block is None or not block.count:
                continue
            block.count -= 1
            if block.count:
                continue
            for way in list(block.ways):
                ours = self._ours[way.identity]
                if not way.num_missing:
                    ours.num_whole -= 1
                    if not ours.num_whole:
                        gone.append(way.identity)
                way.num_missing += 1
                if way.num_missing == len(way.keys):
                    self._forget(way, ours)
            if not block.ways:
                self._theirs.pop(key, None)
        return [BlocksRemoved(gone)] if gone else []

    def snapshot(self) -> list[BlocksStored]:
        """All that is there, parents before children."""
        return _runs([(identity, ours.parent) for identity, ours in self._ours.items() if ours.num_whole])

    def _place(
        self,
        key: Key,
        block: _Theirs | None,
        chain: bytes,
        tokens: bytes,
        keys: tuple[Key, ...],
        added: list[tuple[bytes, bytes]],
    ) -> _Theirs:
        """A block that was not there; ``block`` is what is still known of it, because a neighbour stayed.

        ``tokens`` begin behind ``chain`` and lie in ``keys``, this one last.
        """
        identities = block_identities(chain, tokens, self._block_size)
        if block is None:
            rest = tokens[4 * self._block_size * len(identities) :]
            tail_keys = () if not rest else ((key,) if identities else keys)
            block = _Theirs(identities[-1] if identities else chain, rest, tail_keys)
            self._theirs[key] = block
        known = set()
        for way in block.ways:
            known.add(way.identity)
            way.num_missing -= 1
            if not way.num_missing:
                self._whole(way, self._ours[way.identity], added)
        for place, identity in enumerate(identities):
            if identity in known:
                continue
            ours = self._ours.get(identity)
            if ours is None:
                ours = self._ours[identity] = _Ours(identities[place - 1] if place else chain)
            way = _Way(identity, keys if not place else (key,))
            ours.num_ways += 1
            for each in way.keys:
                theirs = self._theirs.get(each)
                if theirs is not None:
                    theirs.ways.append(way)
                way.num_missing += theirs is None or (each != key and not theirs.count)
            if not way.num_missing:
                self._whole(way, ours, added)
        return block

    def _whole(self, way: _Way, ours: _Ours, added: list[tuple[bytes, bytes]]) -> None:
        ours.num_whole += 1
        if ours.num_whole == 1:
            added.append((way.identity, ours.parent))

    def _forget(self, way: _Way, ours: _Ours) -> None:
        """None of what it was made of is there any more."""
        ours.num_ways -= 1
        if not ours.num_ways:
            del self._ours[way.identity]
        for key in way.keys:
            theirs = self._theirs.get(key)
            if theirs is not None:
                theirs.ways.remove(way)
                if not theirs.ways and not theirs.count:
                    del self._theirs[key]


def _runs(blocks: list[tuple[bytes, bytes]]) -> list[BlocksStored]:
    """Blocks as events: one for each run in which every block is the next one's parent."""
    events: list[BlocksStored] = []
    last = None
    for identity, parent in blocks:
        if parent == last:
            events[-1].block_ids.append(identity)
        else:
            events.append(BlocksStored([identity], parent))
        last = identity
    return events
