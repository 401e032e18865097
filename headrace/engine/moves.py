"""All that moves blocks in and out of one engine's cache, between its steps.

before_step   word from other threads ─► Prefiller;   inboxes ─► cache (Filler)
after_step    computed prompts ─► streams (Prefiller);   cached blocks ─► disk (WriteBehind)
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
from collections.abc import Callable

from headrace.core.errors import UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.messages import BlocksStored, CacheEvent, Moves
from headrace.core.request import Request
from headrace.engine.block_io import BlockIO
from headrace.engine.fill import Filler
from headrace.engine.prefill_only import Prefiller
from headrace.engine.rates import Rate
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.write_behind import WriteBehind
from headrace.kvcache.block_format import HEADER_BYTES
from headrace.kvcache.connector import ConnectorClient
from headrace.kvcache.disk_tier import DiskTier
from headrace.kvcache.receiving import Patience
from headrace.kvcache.source import BlockSource
from headrace.models.cache import kv_folder

log = logging.getLogger("headrace.engine")

# What a graceful stop may take to write what memory still holds.
FLUSH_S = 3.0
_GB = 1_000_000_000


class BlockMoves:
    """The movers of one engine; called from its thread alone, except for what their own docs say."""

    def __init__(
        self,
        config: EngineConfig,
        scheduler: Scheduler,
        io: BlockIO,
        *,
        root: bytes,
        kv_format: str,
        check: Callable[[Request], None],
        wake: Callable[[], None],
    ) -> None:
        """Opens the disk tier that ``config`` asks for, unless prefixes are not kept. Raises UsageError if
        that cannot be.

        ``check`` raises HeadraceError for a prompt that the model cannot take; ``wake`` is called from other
        threads when something arrives."""
        self.prefill_rate = Rate()
        self._kv_format = kv_format
        self._block_bytes = io.block_bytes
        self._pool = scheduler.block_pool
        self._scheduler = scheduler
        self._woken = False
        self._disabled = False
        self._wake_caller = wake
        self._remote: BlockSource | None = None
        self._disk_path = kv_folder(config.kv_disk_path)
        self._disk_gb = config.kv_disk_gb
        self.disk: DiskTier | None = None
        if config.kv_disk_gb and config.enable_prefix_caching:
            least = HEADER_BYTES + io.block_bytes
            if config.kv_disk_gb * _GB < least:
                raise UsageError(
                    f"--kv-disk-gb {config.kv_disk_gb:g} has no room for a block, which has {least:,} bytes",
                    hint=f"give {1000 * least / _GB:.2g} for a thousand blocks, or 0 for no disk tier",
                    param="kv_disk_gb",
                )
            self.disk = DiskTier(
                self._disk_path,
                root=root,
                kv_format=kv_format,
                block_bytes=io.block_bytes,
                limit_bytes=int(config.kv_disk_gb * _GB),
                wake=self._wake,
                is_sound=io.is_finite,
            )
        self._write_behind: WriteBehind | None = None
        if self.disk is not None:
            self._write_behind = WriteBehind(self._pool, self.disk, read=io.read, block_bytes=io.block_bytes)
        self.filler = Filler(
            scheduler,
            root=root,
            block_bytes=io.block_bytes,
            write=io.write,
            prefill_rate=self.prefill_rate,
            wake=self._wake,
            disk=self.disk,
            remote=self._client,
        )
        self.prefiller = Prefiller(
            scheduler, read=io.read, block_bytes=io.block_bytes, check=check, wake=self._wake
        )
        scheduler.fills = self.filler

    @property
    def disk_name(self) -> str:
        """Equal for two replicas if they share the tier's folder; empty without a tier."""
        if self.disk is None:
            return ""
        path = self._disk_path.resolve()
        name = f"{socket.gethostname()}:{path}"
        with contextlib.suppress(OSError):  # the disk may be away just now
            found = path.stat()
            name += f":{found.st_dev:x}.{found.st_ino:x}"
        return name

    @property
    def notes(self) -> list[str]:
        """What a start says of the tier."""
        return [] if self.disk is None else [f"disk tier: up to {self._disk_gb:g} GB in {self._disk_path}"]

    def use_remote(self, source: BlockSource) -> None:
        """Fetches from ``source`` instead of over a connector of its own."""
        self._remote = source

    def before_step(self) -> None:
        self._woken = False
        if self.prefiller.has_word:
            self.prefiller.take_word()
        if self.filler.num_filling:
            self.filler.advance()

    def after_step(self) -> None:
        if self.prefiller.num_jobs:
            self.prefiller.advance()
        if self._write_behind is not None:
            self._write_behind.advance(busy=self._scheduler.num_running > 0)

    def sweep(self) -> None:
        """After an abort: nothing is fetched any more for who is gone."""
        if self.filler.num_filling:
            self.filler.sweep()

    def prompt_failed(self, prompt: Sequence, reason: str) -> None:
        """The model could not compute a prompt for another replica."""
        self.prefiller.failed(prompt, reason)

    def wait_s(self) -> float | None:
        """Seconds until something is to be moved, beside what a step brings; None: not before a wake."""
        if self._woken:
            return 0.0
        waits = [self.filler.wait_s(), self.prefiller.wait_s()]
        if self._write_behind is not None and not self._scheduler.num_running:
            waits.append(self._write_behind.wait_s())
        return min((wait for wait in waits if wait is not None), default=None)

    def take_events(self) -> list[CacheEvent]:
        """What the disk tier took and dropped since the last call."""
        events: list[CacheEvent] = []
        while self.disk is not None and (more := self.disk.take_events()):
            events += more
        return events

    def snapshot(self) -> list[BlocksStored]:
        """All that the disk tier holds."""
        return [] if self.disk is None else self.disk.snapshot()

    def stats(self) -> Moves | None:
        """None as long as nothing has moved and there is no tier."""
        counters, prefiller, disk = self.filler.counters, self.prefiller, self.disk
        tier = None if disk is None else disk.stats()
        damaged = counters.damaged_blocks + (tier.damaged_blocks if tier is not None else 0)
        if isinstance(self._remote, ConnectorClient):
            damaged += self._remote.damaged_blocks
        moves = Moves(
            num_filling=self.filler.num_filling,
            fetched_blocks=counters.fetched_blocks,
            fetched_bytes=counters.fetched_bytes,
            fetch_s=counters.fetch_s,
            fetch_overlap_s=counters.fetch_overlap_s,
            failed_fetches=counters.failed_fetches,
            sent_blocks=prefiller.num_sent_blocks,
            sent_bytes=prefiller.num_sent_bytes,
            disk_blocks=tier.num_blocks if tier is not None else 0,
            disk_bytes=tier.num_bytes if tier is not None else 0,
            disk_hit_blocks=counters.disk_hit_blocks,
            disk_read_bytes=tier.read_bytes if tier is not None else 0,
            disk_read_s=tier.read_s if tier is not None else 0.0,
            disk_written_bytes=tier.written_bytes if tier is not None else 0,
            disk_refused_blocks=tier.refused_blocks if tier is not None else 0,
            damaged_blocks=damaged,
        )
        return None if tier is None and moves == Moves() else moves

    def disable(self, reason: str) -> None:
        """Moves nothing from here on: what others computed is not what this engine would compute."""
        if not self._disabled:
            log.warning("no blocks are fetched, sent or kept on disk any more: %s", reason)
        self._disabled = True
        self.filler.stop()
        self.prefiller.refuse(reason)
        self._write_behind = None

    def close(self) -> None:
        """Writes what is cached to disk, for a few seconds at most, and ends all threads."""
        self.filler.stop()
        self.prefiller.close()
        if self._write_behind is not None and not self._write_behind.flush(FLUSH_S):
            stopped = self.disk.stats().stopped if self.disk is not None else ""
            log.warning(
                "not all cached blocks were written to disk: %s", stopped or f"{FLUSH_S:g} s are over"
            )
        if self.disk is not None:
            self.disk.close()
        if isinstance(self._remote, ConnectorClient):
            self._remote.close()

    def check_integrity(self) -> None:
        self.filler.check_integrity()
        self.prefiller.check_integrity()

    def _client(self) -> BlockSource:
        if self._remote is None:
            patience = Patience(stall_s=math.inf)  # how long to wait for a block is the filler's to say
            self._remote = ConnectorClient(
                kv_format=self._kv_format, block_bytes=self._block_bytes, patience=patience
            )
        return self._remote

    def _wake(self) -> None:
        """From any thread; what was left before it is seen by the next step."""
        self._woken = True
        self._wake_caller()
