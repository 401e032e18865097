"""Which replica holds which blocks, so that a prompt finds the replica that has computed most of it.

    blocks      key ──► replicas that hold it            exact: fed by cache events, or guessed: ``assume``
    coming      key ──► replicas that will compute it    requests placed there whose blocks are not stored yet
    per slot    its keys, oldest first                   what to forget, and what to clear

Replicas are bits of an int (their *slot*), so that one look-up per block follows all replicas at once. A
key is the first 8 of an identity's 32 bytes: a collision (about 1 in 10^7 for a million blocks) would
send one request to the wrong replica, never serve it another's cache, and it takes 48 bytes, not 80.
Measured at 100,000 blocks on each of 16 replicas: 160 bytes per block and replica
where all differ, 105 where all are the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from headrace.core.errors import EngineError
from headrace.core.identity import ID_BYTES

MAX_SHARED_MASKS = 4096


def keys_of(packed: bytes) -> list[int]:
    """Keys of concatenated identities, in order."""
    if len(packed) % ID_BYTES:
        raise EngineError(f"block identities have {ID_BYTES} bytes each, got {len(packed)} bytes in all")
    return memoryview(packed).cast("Q")[:: ID_BYTES // 8].tolist()


class PrefixIndex:
    """Blocks by replica; at most ``max_blocks`` of each, the oldest are forgotten first."""

    def __init__(self, max_blocks: int) -> None:
        assert max_blocks > 0, max_blocks
        self._max_blocks = max_blocks
        self._blocks: dict[int, int] = {}
        self._coming: dict[int, int] = {}
        self._slots: list[OrderedDict[int, float] | dict[int, float] | None] = []  # guesses: when used last
        self._claims: list[dict[int, int]] = []  # slot → key → requests that will compute it
        self._free_slots: list[int] = []
        self._shared_masks: dict[int, int] = {}
        self._num_fillers = 0

    def add_slot(self) -> int:
        """A number for a new replica, with nothing known of it."""
        if self._free_slots:
            slot = self._free_slots.pop()
            self._slots[slot] = {}
        else:
            slot = len(self._slots)
            self._slots.append({})
            self._claims.append({})
        return slot

    def drop_slot(self, slot: int) -> None:
        """Forgets a replica; its number may be given to another."""
        self.clear(slot)
        self._unmark(self._coming, self._claims[slot], slot)
        self._claims[slot] = {}
        self._slots[slot] = None
        self._free_slots.append(slot)

    def count(self, slot: int) -> int:
        """Blocks known of one replica."""
        return len(self._held(slot))

    def match(self, keys: Sequence[int]) -> list[int]:
        """How many of the first ``keys`` each slot holds, or will once its queue is computed; by slot."""
        depths = [0] * len(self._slots)
        if not keys:
            return depths
        find, find_coming = self._blocks.get, self._coming.get
        key = keys[0]
        alive = find(key, 0) | find_coming(key, 0)
        if not alive:
            return depths
        depth = 0
        if self._coming:
            for depth, key in enumerate(keys):
                held = (find(key, 0) | find_coming(key, 0)) & alive
                if held != alive:
                    _set_depth(depths, alive ^ held, depth)
                    alive = held
                    if not held:
                        return depths
        else:
            for depth, key in enumerate(keys):
                held = find(key, 0) & alive
                if held != alive:
                    _set_depth(depths, alive ^ held, depth)
                    alive = held
                    if not held:
                        return depths
        _set_depth(depths, alive, depth + 1)
        return depths

    # Exact: a replica's own word

    def store(self, slot: int, keys: Iterable[int]) -> None:
        """The replica holds these blocks."""
        bit = 1 << slot
        blocks, share = self._blocks, self._shared_masks.setdefault
        held = self._held(slot)
        find = blocks.get
        for key in keys:
            mask = find(key, 0) | bit
            blocks[key] = share(mask, mask)
            held[key] = 0.0
        if len(self._shared_masks) > MAX_SHARED_MASKS:
            self._shared_masks.clear()
        if len(held) > self._max_blocks:  # a sixteenth more, as finding the oldest costs a walk
            self._forget_oldest(slot, len(held) - self._max_blocks + self._max_blocks // 16)

    def remove(self, slot: int, keys: Iterable[int]) -> None:
        """The replica evicted these blocks; unknown ones are ignored."""
        held = self._held(slot)
        self._unmark(self._blocks, [key for key in keys if held.pop(key, None) is not None], slot)

    def clear(self, slot: int) -> None:
        """The replica holds nothing any more."""
        self._unmark(self._blocks, self._held(slot), slot)
        self._slots[slot] = {}

    # In flight

    def claim(self, slot: int, keys: Iterable[int]) -> None:
        """A request that was placed on the replica will store these blocks."""
        bit = 1 << slot
        claims, coming = self._claims[slot], self._coming
        for key in keys:
            count = claims.get(key, 0)
            claims[key] = count + 1
            if not count:
                coming[key] = coming.get(key, 0) | bit

    def unclaim(self, slot: int, keys: Iterable[int]) -> None:
        """That request has ended; each claim is taken back once."""
        claims = self._claims[slot]
        gone = []
        for key in keys:
            count = claims.get(key, 0)
            if count > 1:
                claims[key] = count - 1
            elif count:
                del claims[key]
                gone.append(key)
        self._unmark(self._coming, gone, slot)

    # Guessed: a replica without cache events

    def assume(
        self, slot: int, keys: Sequence[int], now: float, *, num_blocks: int = 0, num_other: int = 0
    ) -> None:
        """Guesses that the replica holds these blocks since it was sent a request with them.

        ``num_blocks`` is the size of its cache (0: unknown): beyond it, the least recently used are
        forgotten as its engine would. A request's last blocks count as older than its first, as
        engines free them in that order. ``num_other`` blocks of unknown identity (output) were used too.
        """
        held = self._held(slot)
        if not isinstance(held, OrderedDict):
            held = self._slots[slot] = OrderedDict(held)
        bit = 1 << slot
        blocks, share = self._blocks, self._shared_masks.setdefault
        limit = min(self._max_blocks, num_blocks or self._max_blocks)
        for _ in range(min(num_other, limit)):
            self._num_fillers -= 1  # identities are never negative
            held[self._num_fillers] = now
        for key in islice(reversed(keys), max(0, len(keys) - limit), None):
            if key in held:
                held.move_to_end(key)
            else:
                mask = blocks.get(key, 0) | bit
                blocks[key] = share(mask, mask)
            held[key] = now
        if len(held) > limit:
            self._forget_oldest(slot, len(held) - limit)

    def expire(self, slot: int, before: float) -> None:
        """Drops guesses that were last confirmed before that time."""
        held = self._held(slot)
        count = 0
        for used in held.values():  # in order of use
            if used >= before:
                break
            count += 1
        self._forget_oldest(slot, count)

    def check_integrity(self, expected: dict[int, set[int]] | None = None) -> None:
        """Asserts that maps and slots agree, and that each slot of ``expected`` holds exactly its keys."""
        assert self._blocks == _masks_of(self._slots), "the map and the replicas' blocks differ"
        assert self._coming == _masks_of(self._claims), "the map and the claims differ"
        assert all(self._slots[slot] is None and not self._claims[slot] for slot in self._free_slots)
        for held in self._slots:
            assert held is None or len(held) <= self._max_blocks, "a replica has too many blocks"
        for slot, told in (expected or {}).items():
            assert set(self._held(slot)) == told, f"slot {slot} does not hold what its replica told"

    def _held(self, slot: int) -> OrderedDict[int, float] | dict[int, float]:
        held = self._slots[slot]
        assert held is not None, f"slot {slot} belongs to no replica"
        return held

    def _forget_oldest(self, slot: int, count: int) -> None:
        held = self._held(slot)
        oldest = list(islice(held, count))
        for key in oldest:
            del held[key]
        self._unmark(self._blocks, oldest, slot)

    def _unmark(self, masks: dict[int, int], keys: Iterable[int], slot: int) -> None:
        others, share = ~(1 << slot), self._shared_masks.setdefault
        for key in keys:
            if key < 0:
                continue
            mask = masks[key] & others
            if mask:
                masks[key] = share(mask, mask)
            else:
                del masks[key]


def _masks_of(slots: Sequence[Iterable[int] | None]) -> dict[int, int]:
    masks: dict[int, int] = {}
    for slot, keys in enumerate(slots):
        for key in keys or ():
            if key >= 0:
                masks[key] = masks.get(key, 0) | 1 << slot
    return masks


def _set_depth(depths: list[int], mask: int, depth: int) -> None:
    while mask:
        low = mask & -mask
        depths[low.bit_length() - 1] = depth
        mask ^= low
