"""Another engine's cached blocks in our identities.

Its events name blocks by hashes of its own and carry their tokens when they are stored; a removal carries the
hash alone. Block sizes may differ, so that one of theirs may complete several of ours, or several of theirs
are needed for one:

    theirs   │ a  (16) │ b  (16) │ c  (16) │ d  (16) │
    ours     │ id₀ = H(root, a b)  │ id₁ = H(id₀, c d)  │      id₀ is there while a and b are

A hash is counted: the engine may hold the same block twice, and tells of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence

from headrace.core.identity import block_identities
from headrace.core.messages import BlocksRemoved, BlocksStored, CacheEvent

Key = Hashable  # their hash: bytes, or an int


class _Theirs:
    """One of their blocks: how often it is there, which of ours it is part of, and where the chain stands."""

    __slots__ = ("chain", "count", "ids", "tail", "tail_keys")

    def __init__(self, chain: bytes, tail: bytes, tail_keys: tuple[Key, ...]) -> None:
        self.count = 0
        self.ids: list[bytes] = []
        self.chain = chain  # identity of our last full block up to its end
        self.tail = tail  # tokens behind that, packed
        self.tail_keys = tail_keys  # the blocks of theirs that these are in


class _Ours:
    """One of our blocks: the blocks of theirs that it is made of, and how many of them are not there."""

    __slots__ = ("keys", "num_missing", "parent")

    def __init__(self, keys: tuple[Key, ...], parent: bytes) -> None:
        self.keys = keys
        self.parent = parent
        self.num_missing = 0


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
        return sum(not block.num_missing for block in self._ours.values())

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
            if block is None:
                tokens = tail + packed[place * width : (place + 1) * width]
                block = self._add(key, chain, tokens, (*tail_keys, key), added)
            elif not block.count:
                self._revive(block, added)
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
            for identity in list(block.ids):
                ours = self._ours[identity]
                if not ours.num_missing:
                    gone.append(identity)
                ours.num_missing += 1
                if ours.num_missing == len(ours.keys):
                    self._forget(identity, ours)
            if not block.ids:
                self._theirs.pop(key, None)
        return [BlocksRemoved(gone)] if gone else []

    def snapshot(self) -> list[BlocksStored]:
        """All that is there, parents before children."""
        return _runs(
            [(identity, ours.parent) for identity, ours in self._ours.items() if not ours.num_missing]
        )

    def _add(
        self, key: Key, chain: bytes, tokens: bytes, keys: tuple[Key, ...], added: list[tuple[bytes, bytes]]
    ) -> _Theirs:
        """A block not seen before; ``tokens`` begins behind ``chain`` and lies in ``keys``, this one last."""
        size = 4 * self._block_size
        identities = block_identities(chain, tokens, self._block_size)
        rest = tokens[len(identities) * size :]
        tail_keys = () if not rest else ((key,) if identities else keys)
        block = _Theirs(identities[-1] if identities else chain, rest, tail_keys)
        self._theirs[key] = block
        for place, identity in enumerate(identities):
            if identity in self._ours:
                continue  # their hash covers more than tokens; one way to hold it is enough
            ours = _Ours(keys if not place else (key,), identities[place - 1] if place else chain)
            for each in ours.keys:
                theirs = self._theirs[each]
                theirs.ids.append(identity)
                if each != key and not theirs.count:
                    ours.num_missing += 1
            self._ours[identity] = ours
            if not ours.num_missing:
                added.append((identity, ours.parent))
        return block

    def _revive(self, block: _Theirs, added: list[tuple[bytes, bytes]]) -> None:
        for identity in block.ids:
            ours = self._ours[identity]
            ours.num_missing -= 1
            if not ours.num_missing:
                added.append((identity, ours.parent))

    def _forget(self, identity: bytes, ours: _Ours) -> None:
        """None of what it was made of is there any more."""
        del self._ours[identity]
        for key in ours.keys:
            theirs = self._theirs.get(key)
            if theirs is not None:
                theirs.ids.remove(identity)
                if not theirs.ids and not theirs.count:
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
