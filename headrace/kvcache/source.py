"""Where blocks come from that this engine has not computed: the disk tier, or another replica.

    engine ── open(job, sink) ──► source     its threads do the IO
           ◄── deliver(…) … ──── sink        in order, without gaps, each block checked
           ── consumed(job, n) ─► source     so that it runs at most WINDOW_BYTES ahead
           ◄── ended(reason) ───             exactly once, and nothing follows

A source may end a job at any point: what it has not delivered is computed, so a source can cost time, never
a token. It calls a sink from its own threads and never after ``ended``, except that one call under way
when ``cancel`` is called may still arrive.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# Bytes of one job that lie delivered and not consumed; a source waits beyond. At least one block is allowed.
WINDOW_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True)
class FillJob:
    """The blocks ``block_ids[first:]`` of one chain.

    tokens      packed little-endian uint32, all the tokens of the chain's blocks (from the first block on)
    block_ids   identity of every block of the chain, including those before ``first``
    first       index of the first block that is wanted
    address     where to fetch from (``unix:/path`` or ``tcp://host:port``); empty for the disk tier
    deadline    on ``time.monotonic()``: nothing is delivered later; 0: none
    """

    job_id: str
    root: bytes
    tokens: bytes
    block_ids: list[bytes]
    first: int
    address: str = ""
    deadline: float = 0.0

    def parent_of(self, index: int) -> bytes:
        """Identity before block number ``index``: the root, for the first."""
        return self.block_ids[index - 1] if index else self.root


class FillSink(Protocol):
    """Takes one job's blocks; its methods are called from a source's threads and must not block."""

    def deliver(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        """Block number ``index`` of the job's chain, the one after the last; ``payload`` is the sink's own
        from now on. Its identity, length and checksum have been checked."""

    def computed(self) -> None:
        """The sender computes no more for this job: what is missing is only on its way. At most once; not
        where the last block was there first, and not from disk."""

    def ended(self, reason: str = "") -> None:
        """Nothing follows. Empty: all blocks were delivered; else why not, in words."""


class BlockSource(Protocol):
    """Delivers blocks into sinks; every method may be called from any thread and returns at once."""

    def open(self, job: FillJob, sink: FillSink) -> None:
        """Starts a job; its ``job_id`` must not be in use. Failing is told by ``ended``, never raised."""

    def consumed(self, job_id: str, num_blocks: int) -> None:
        """So many more of the blocks delivered have been taken out of the sink; unknown ids are ignored."""

    def cancel(self, job_id: str) -> None:
        """Ends a job with reason ``cancelled``; unknown ids are ignored."""
