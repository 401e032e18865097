"""How blocks move from a replica that computed them to one that needs them: one protocol, two transports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.kvcache.source import FillJob, FillSink


@dataclass(frozen=True)
class SendJob:
    """What a receiver wants: the full blocks of ``tokens`` (packed uint32) from number ``first`` on.

    ``key`` is unique in this server over all its connections.
    """

    key: str
    tokens: bytes
    first: int


class SendStream(Protocol):
    """Where a handler puts one job's blocks; from any thread. Once cancelled it ignores everything."""

    def room(self) -> int:
        """Blocks that may be sent now; hold the others in the cache until ``SendHandler.room`` is called."""

    def send(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        """Queues block number ``index``, the one after the last; the stream owns ``payload`` from now on.
        To send more than there is room for breaks the job."""

    def computed(self) -> None:
        """All blocks are computed; what is not sent yet waits only for room. ``end`` implies it."""

    def end(self, reason: str = "") -> None:
        """Nothing follows. Empty: every block has been queued; else why not, in words."""


class SendHandler(Protocol):
    """Who computes the blocks; called from the server's thread, so it only leaves word and wakes a loop."""

    def start(self, job: SendJob, stream: SendStream) -> None:
        """Compute, or find, the job's blocks, and put them into ``stream``, in order."""

    def room(self, key: str) -> None:
        """The job's stream has room again after it had none."""

    def cancel(self, key: str) -> None:
        """The receiver is gone, or does not want the job any more: let go of its blocks."""


class ConnectorServer:
    """Listens for receivers, and sends them blocks. Its thread runs from here to ``close``.

    ``listen`` is ``unix:/path`` (shared memory) or ``tcp://host:port`` (0: any free port); ``address`` is
    what peers connect to. Receivers of another ``root`` or ``kv_format`` are refused with the reason.
    Raises UsageError if it cannot listen there.
    """

    address: str

    def __init__(
        self, listen: str, handler: SendHandler, *, root: bytes, kv_format: str, block_bytes: int
    ) -> None: ...

    def close(self) -> None:
        """Cancels every job and closes every connection."""


class ConnectorClient:
    """The receiving side: a ``BlockSource`` over one connection per address, opened when first needed."""

    def __init__(self, *, kv_format: str, block_bytes: int) -> None: ...

    def open(self, job: FillJob, sink: FillSink) -> None: ...

    def consumed(self, job_id: str, num_blocks: int) -> None: ...

    def cancel(self, job_id: str) -> None: ...

    @property
    def damaged_blocks(self) -> int:
        """Blocks that failed a check on arrival and were dropped, since the start."""

    def close(self) -> None:
        """Ends every job and closes every connection."""
