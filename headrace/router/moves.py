"""How long it takes to bring blocks to a replica, learned from what it says of its moves.

    fetch:  seconds per byte = (time with a transfer open − part of it while the sender computed) / bytes

What overlaps the sender's computing costs nothing, so it is not counted: a transfer is as slow as what of it
remains once the prompt is computed.
"""

from __future__ import annotations

from headrace.core.messages import Moves
from headrace.router.disk_index import DiskFolder

DEFAULT_FETCH_RATE = 1e9  # bytes/s, until it is learned
FETCH_LATENCY_S = 0.005  # a message each way, and a step on either side
WRITE_RATE = 3e9  # bytes/s of blocks copied into a cache between steps, while its streams stand still
KEPT = 0.9  # of what was learned, with each new transfer


class MoveRates:
    """Of one replica."""

    __slots__ = ("_bytes", "_last", "_seconds")

    def __init__(self) -> None:
        self._last = Moves()
        self._bytes = self._seconds = 0.0

    def restart(self) -> None:
        """Another process counts from zero; the machine is the same."""
        self._last = Moves()

    def on_moves(self, moves: Moves, folder: DiskFolder | None) -> None:
        """Its counters now."""
        last, self._last = self._last, moves
        num_bytes = moves.fetched_bytes - last.fetched_bytes
        seconds = (moves.fetch_s - moves.fetch_overlap_s) - (last.fetch_s - last.fetch_overlap_s)
        if num_bytes > 0 and seconds > 0:
            self._bytes = KEPT * self._bytes + num_bytes
            self._seconds = KEPT * self._seconds + seconds
        if folder is not None:
            folder.on_read(moves.disk_read_bytes - last.disk_read_bytes, moves.disk_read_s - last.disk_read_s)

    def fetch_s(self, num_bytes: float) -> float:
        """Predicted seconds by which the blocks come later than they were computed."""
        rate = self._bytes / self._seconds if self._seconds else DEFAULT_FETCH_RATE
        return FETCH_LATENCY_S + num_bytes / rate

    def stall_s(self, num_bytes: float) -> float:
        """Seconds for which the receiver's streams stand still while the blocks are put into its cache."""
        return num_bytes / WRITE_RATE
