"""What the tests of the disk tier share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from headrace.core.messages import BlocksRemoved, BlocksStored
from headrace.kvcache.block_format import HEADER_BYTES
from headrace.kvcache.disk_tier import DiskTier
from headrace.kvcache.source import FillJob
from tests.kvcache.transfers import BLOCK_BYTES, FORMAT, ROOT, WAIT_S, Sink, payload_of

FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
MANY = 10**12


def tier_in(
    path: Path,
    *,
    root: bytes = ROOT,
    kv_format: str = FORMAT,
    limit_bytes: int = MANY,
    wake: Callable[[], None] | None = None,
    is_sound: Callable[[bytes | bytearray], bool] | None = None,
    **options: float,
) -> DiskTier:
    return DiskTier(
        path,
        root=root,
        kv_format=kv_format,
        block_bytes=BLOCK_BYTES,
        limit_bytes=limit_bytes,
        wake=wake,
        is_sound=is_sound,
        **options,  # type: ignore[arg-type]
    )


def put(tier: DiskTier, job: FillJob, indices: Iterable[int] | None = None) -> None:
    """Puts blocks of a chain, and waits until they are written or dropped."""
    for index in range(len(job.block_ids)) if indices is None else indices:
        block_id = job.block_ids[index]
        while not tier.room() and not tier.stats().stopped:
            assert tier.flush(WAIT_S)
        tier.put(block_id, job.parent_of(index), payload_of(block_id))
    assert tier.flush(WAIT_S)


def read(tier: DiskTier, job: FillJob) -> tuple[int, str]:
    """How many blocks came, and why it ended; each is checked byte for byte."""
    sink = Sink(tier, job).open()
    reason = sink.wait()
    return len(sink.delivered), reason


def files_of(path: Path) -> list[Path]:
    """Files of blocks, the least recently used first."""
    return sorted(path.glob("????????????????/??/*"), key=lambda file: file.stat().st_mtime_ns)


def file_of(path: Path, job: FillJob, index: int) -> Path:
    (found,) = path.glob(f"{job.root[:8].hex()}/??/{job.block_ids[index].hex()}")
    return found


def told(tier: DiskTier) -> tuple[set[bytes], set[bytes]]:
    """Identities stored and removed in order, as a router would see them now; and those ever removed."""
    held: set[bytes] = set()
    removed: set[bytes] = set()
    while events := tier.take_events():
        for event in events:
            assert isinstance(event, BlocksStored | BlocksRemoved) and event.tier == "disk"
            if isinstance(event, BlocksStored):
                held |= set(event.block_ids)
            else:
                removed |= set(event.block_ids)
                held -= set(event.block_ids)
    return held, removed
