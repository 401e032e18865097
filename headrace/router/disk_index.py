"""Which blocks the disk tiers hold. Replicas of one host that share a folder share its blocks.

    folder name ──► DiskFolder: its blocks by key, how fast it is read, how many replicas use it

All members tell what they write and drop; what one of them tells of the folder holds for all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import islice

DEFAULT_READ_RATE = 400e6  # bytes/s, until it is learned; what the engine assumes as well
READ_LATENCY_S = 0.001
KEPT = 0.9  # of what was learned, with each new reading


class DiskFolder:
    """One folder; at most ``max_blocks`` are remembered, the oldest are forgotten first."""

    __slots__ = ("_bytes", "_keys", "_max_blocks", "_seconds", "name", "num_members")

    def __init__(self, name: str, max_blocks: int) -> None:
        self.name = name
        self.num_members = 0
        self._max_blocks = max_blocks
        self._keys: dict[int, None] = {}
        self._bytes = self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: int) -> bool:
        return key in self._keys

    def store(self, keys: Iterable[int]) -> None:
        """These blocks are on disk."""
        held = self._keys
        held.update(dict.fromkeys(keys))
        if len(held) > self._max_blocks:  # a sixteenth more, so that this is rare
            count = len(held) - self._max_blocks + self._max_blocks // 16
            for key in list(islice(held, count)):
                del held[key]

    def remove(self, keys: Iterable[int]) -> None:
        """These are not any more; unknown ones are ignored."""
        for key in keys:
            self._keys.pop(key, None)

    def clear(self) -> None:
        """Nothing is known to be there."""
        self._keys.clear()

    def runs(self, keys: Sequence[int], starts: Sequence[int]) -> list[int]:
        """For each start, the place behind the blocks that follow it without a gap (the start: there are
        none)."""
        first, last, held = min(starts), max(starts), self._keys
        gaps = []
        for place in range(first, len(keys)):
            if keys[place] not in held:
                gaps.append(place)
                if place >= last:
                    break
        else:
            gaps.append(len(keys))
        return [gaps[bisect_left(gaps, min(start, len(keys)))] for start in starts]

    def on_read(self, num_bytes: float, seconds: float) -> None:
        """So much was read in so long."""
        if num_bytes > 0 and seconds > 0:
            self._bytes = KEPT * self._bytes + num_bytes
            self._seconds = KEPT * self._seconds + seconds

    def read_s(self, num_bytes: float) -> float:
        """Predicted seconds to read so much."""
        rate = self._bytes / self._seconds if self._seconds else DEFAULT_READ_RATE
        return READ_LATENCY_S + num_bytes / rate


class DiskIndex:
    """All folders, for as long as a replica uses them."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._folders: dict[str, DiskFolder] = {}

    def __len__(self) -> int:
        return len(self._folders)

    def move(self, member: DiskFolder | None, name: str) -> DiskFolder | None:
        """The folder of that name (empty: none) for a replica that was a member of another, or of none."""
        if member is not None and member.name == name:
            return member
        if member is not None:
            member.num_members -= 1
            if not member.num_members:
                del self._folders[member.name]
        if not name:
            return None
        folder = self._folders.get(name)
        if folder is None:
            folder = self._folders[name] = DiskFolder(name, self._max_blocks)
        folder.num_members += 1
        return folder
