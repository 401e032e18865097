"""Blocks that memory lacks, brought from the disk tier or another replica instead of being computed.

    memory has these │ the disk tier brings these │ a prefill replica brings these │ computed here │
    0                  first_filled_block ─────────────────────────────────────────► the last token, always

    Scheduler ── begin(sequence) ──► job: a source delivers into its inbox, from threads of its own
    advance(), between steps:        inbox ─► checked ─► a block of the pool ─► registered under its identity,
                                     held by the sequence
                                     nothing more comes, or it takes too long ─► Scheduler.resume

A block counts only if it is the sequence's own next one: identity, number and length. So whatever a source
does, or does not do, can cost time but never change a token.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.core.request import pack_tokens
from headrace.engine.rates import Rate
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence, SequenceStatus
from headrace.kvcache.source import BlockSource, FillJob

# Copied into the cache in one step while others run: 2 to 5 ms, a fraction of a decode step of the models
# whose blocks are large, so that running streams notice nothing. While nothing runs, the larger bound keeps
# the caller's loop answering.
BYTES_PER_STEP = 16 * 1024 * 1024
IDLE_BYTES_PER_STEP = 256 * 1024 * 1024
# A fill is given up when nothing arrived for this long, and beside that for as long as computing it here
# would take (UNKNOWN_S where that is not known), or twice as long where the source is a prefill replica: it
# may have others to serve first, and its steps may be long.
STALL_S = 5.0
UNKNOWN_S = 10.0
# Reading from disk: until it is learned, so fast (bytes a second), and so late (seconds).
DEFAULT_READ_RATE = 400e6
READ_LATENCY_S = 0.001
# A disk that was found too slow is tried again once in so many times, as its rate is learned by reading.
RETRY_EVERY = 32


class DiskSource(BlockSource, Protocol):
    """What a fill needs to know of the disk tier."""

    def prefix(self, block_ids: list[bytes], start: int = 0) -> int:
        """How many blocks from number ``start`` on, without a gap, are believed to be there."""

    def read_rate(self) -> float:
        """Learned bytes a second; 0: not yet."""


@dataclass
class FillCounters:
    """Sums since the start; seconds are summed over transfers."""

    fetched_blocks: int = 0
    fetched_bytes: int = 0
    fetch_s: float = 0.0
    fetch_overlap_s: float = 0.0
    failed_fetches: int = 0
    disk_hit_blocks: int = 0
    damaged_blocks: int = 0


class _Outcome(enum.Enum):
    """What became of a job when blocks were taken out of its inbox."""

    GOES_ON = "goes on"
    DAMAGED = "a block is not what was asked for"
    NO_ROOM = "who runs, or comes first, needs the blocks"


class _Inbox:
    """What a source delivered and the engine has not taken yet: a ``FillSink`` for one job."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.blocks: deque[tuple[int, bytes, bytes | bytearray]] = deque()
        self.reason: str | None = None  # set once nothing follows
        self.computed_at = 0.0
        self._wake = wake

    def deliver(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        self.blocks.append((index, block_id, payload))
        self._wake()

    def computed(self) -> None:
        if not self.computed_at:
            self.computed_at = time.monotonic()

    def ended(self, reason: str = "") -> None:
        self.reason = reason
        self._wake()


@dataclass
class _Job:
    """One sequence and one source; ``stop`` is how many blocks of the chain it has in the end."""

    sequence: Sequence
    source: BlockSource
    inbox: _Inbox
    job_id: str
    from_disk: bool
    stop: int
    started: float
    deadline: float
    stall_s: float
    last_progress: float
    wants_remote: bool  # after the disk

    @property
    def give_up_at(self) -> float:
        return min(self.deadline, self.last_progress + self.stall_s)


class Filler:
    """The scheduler's ``Fills``. Not thread-safe, except for what sources call on a job's inbox."""

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        root: bytes,
        block_bytes: int,
        write: Callable[[int, bytes | bytearray], None],
        prefill_rate: Rate,
        wake: Callable[[], None],
        disk: DiskSource | None = None,
        remote: Callable[[], BlockSource] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``write`` puts a block's bytes into a block of the cache, ``prefill_rate`` is in tokens a second,
        ``remote`` gives the source for a request's ``prefill_from``."""
        self.counters = FillCounters()
        self.disk = disk
        self._scheduler = scheduler
        self._pool = scheduler.block_pool
        self._root = root
        self._block_bytes = block_bytes
        self._write = write
        self._prefill_rate = prefill_rate
        self._wake = wake
        self._remote = remote
        self._clock = clock
        self._jobs: list[_Job] = []
        self._num_opened = 0
        self._num_slow = 0

    @property
    def num_filling(self) -> int:
        return len(self._jobs)

    def begin(self, sequence: Sequence, num_blocks: int) -> int:
        """Opens a job for what memory lacks if that is there, pays and has room; see ``Fills``."""
        pool, block_size = self._pool, self._scheduler.config.block_size
        # A replica that failed is not asked again, and what memory lost of its blocks later may be on disk.
        first_try = not sequence.num_fills and not sequence.num_preemptions
        wants_remote = first_try and bool(sequence.request.prefill_from) and self._remote is not None
        if self.disk is None and not wants_remote:
            return 0
        stop = min(sequence.num_reusable_blocks(block_size), len(sequence.block_ids))
        expected = sum(job.stop - len(job.sequence.held_blocks) for job in self._jobs)
        hits = pool.count_free(pool.lookup(sequence.block_ids[:num_blocks]))
        if stop - num_blocks + hits + expected + self._scheduler.num_running > pool.num_free:
            return 0
        on_disk = self._num_worth_reading(sequence, num_blocks, stop)
        if not on_disk and not wants_remote:
            return 0
        sequence.first_filled_block = num_blocks
        sequence.num_disk_blocks = sequence.num_fetched_blocks = 0
        if on_disk:
            self._open(sequence, num_blocks, num_blocks + on_disk, from_disk=True, wants_remote=wants_remote)
        else:
            self._open(sequence, num_blocks, stop, from_disk=False)
        return stop - num_blocks if wants_remote else on_disk

    def advance(self) -> None:
        """Moves what arrived into the cache, within the step's bounds, and lets go on whose fill is over."""
        budget = BYTES_PER_STEP if self._scheduler.num_running else IDLE_BYTES_PER_STEP
        now = self._clock()
        for job in sorted(self._jobs, key=lambda job: job.sequence.arrival):
            if job.sequence.status is not SequenceStatus.FILLING:
                self._close(job)
                continue
            reason = job.inbox.reason  # read before the inbox, as it is written after
            budget, outcome = self._take(job, budget, now)
            if outcome is not _Outcome.GOES_ON:
                self._close(job, failed=outcome is _Outcome.DAMAGED)
            elif reason is not None and not job.inbox.blocks:
                self._close(job, failed=bool(reason), told=True)
            elif now > job.give_up_at and not job.inbox.blocks:
                self._close(job, failed=True)
            else:
                continue
            self._go_on(job)

    def sweep(self) -> None:
        """Cancels the jobs of sequences that do not wait for them any more."""
        for job in list(self._jobs):
            if job.sequence.status is not SequenceStatus.FILLING:
                self._close(job)

    def stop(self) -> None:
        """Ends every job; what has arrived stays, the sequences go on."""
        for job in list(self._jobs):
            self._close(job)
            if job.sequence.status is SequenceStatus.FILLING:
                self._resume(job)
        self.disk = self._remote = None

    def wait_s(self) -> float | None:
        """Seconds until there is something for ``advance`` to do; None: not before a source calls."""
        if any(job.inbox.blocks or job.inbox.reason is not None for job in self._jobs):
            return 0.0
        if not self._jobs:
            return None
        soonest = min(job.give_up_at for job in self._jobs)
        return max(0.001, soonest - self._clock() + 0.001)

    def check_integrity(self) -> None:
        """Asserts that exactly the filling sequences have a job, which is not behind what they hold."""
        filling = [job.sequence for job in self._jobs if job.sequence.status is SequenceStatus.FILLING]
        assert len({id(s) for s in filling}) == len(filling) == self._scheduler.num_filling, "a fill is lost"

    def _num_worth_reading(self, sequence: Sequence, first: int, stop: int) -> int:
        """How many blocks from number ``first`` on to read from disk: none if computing them is faster."""
        if self.disk is None:
            return 0
        count = self.disk.prefix(sequence.block_ids[:stop], first)
        if not count:
            return 0
        queued = sum(job.stop - len(job.sequence.held_blocks) for job in self._jobs if job.from_disk)
        rate = self.disk.read_rate() or DEFAULT_READ_RATE
        read_s = READ_LATENCY_S + (queued + count) * self._block_bytes / rate
        if read_s >= self._compute_s(count):
            self._num_slow += 1
            return 0 if self._num_slow % RETRY_EVERY else count
        return count

    def _compute_s(self, num_blocks: int) -> float:
        """Predicted seconds to compute so many blocks here; endless while no rate is known."""
        rate = self._prefill_rate.value
        return num_blocks * self._scheduler.config.block_size / rate if rate else float("inf")

    def _open(
        self, sequence: Sequence, first: int, stop: int, *, from_disk: bool, wants_remote: bool = False
    ) -> None:
        now = self._clock()
        self._num_opened += 1
        predicted = self._compute_s(stop - first)
        stall_s = STALL_S + (1 if from_disk else 2) * (predicted if predicted < float("inf") else UNKNOWN_S)
        source: BlockSource
        if from_disk:
            assert self.disk is not None
            source = self.disk
        else:
            assert self._remote is not None
            source = self._remote()
        job = _Job(
            sequence=sequence,
            source=source,
            inbox=_Inbox(self._wake),
            job_id=f"{sequence.request_id}/{sequence.sample_index}/{self._num_opened}",
            from_disk=from_disk,
            stop=stop,
            started=now,
            deadline=now + 3 * stall_s,
            stall_s=stall_s,
            last_progress=now,
            wants_remote=wants_remote,
        )
        self._jobs.append(job)
        num_tokens = stop * self._scheduler.config.block_size
        source.open(
            FillJob(
                job_id=job.job_id,
                root=self._root,
                tokens=pack_tokens(sequence.tokens[:num_tokens]),
                block_ids=sequence.block_ids[:stop],
                first=first,
                address="" if from_disk else sequence.request.prefill_from,
                deadline=job.deadline,
            ),
            job.inbox,
        )

    def _take(self, job: _Job, budget: int, now: float) -> tuple[int, _Outcome]:
        """Takes blocks out of the inbox while the budget lasts; returns what is left of it."""
        sequence, inbox, pool = job.sequence, job.inbox, self._pool
        taken, outcome = 0, _Outcome.GOES_ON
        first = sequence.first_filled_block + sequence.num_disk_blocks + sequence.num_fetched_blocks
        if len(sequence.held_blocks) != first:
            return budget, _Outcome.NO_ROOM  # others needed its blocks
        while inbox.blocks and budget > 0 and outcome is _Outcome.GOES_ON:
            index, block_id, payload = inbox.blocks.popleft()
            taken += 1
            if not self._is_own(job, index, block_id, payload):
                self.counters.damaged_blocks += 1
                outcome = _Outcome.DAMAGED
            elif known := pool.lookup([block_id]):
                pool.acquire(known)  # somebody else computed or fetched it meanwhile
                self._hold(job, known[0])
            elif pool.num_free <= self._scheduler.num_running:
                outcome = _Outcome.NO_ROOM
            else:
                self._store(job, block_id, payload)
                budget -= self._block_bytes
        if taken:
            job.last_progress = now
            job.source.consumed(job.job_id, taken)
        return budget, outcome

    def _is_own(self, job: _Job, index: int, block_id: bytes, payload: bytes | bytearray) -> bool:
        held = len(job.sequence.held_blocks)
        return (
            index == held < job.stop
            and block_id == job.sequence.block_ids[index]
            and len(payload) == self._block_bytes
        )

    def _store(self, job: _Job, block_id: bytes, payload: bytes | bytearray) -> None:
        pool, held = self._pool, job.sequence.held_blocks
        (block,) = pool.allocate(1, held[-1] if held else -1)
        self._write(block, payload)
        pool.register([block], [block_id], job.sequence.block_ids[len(held) - 1] if held else self._root)
        if job.from_disk:
            pool.mark_saved([block])
        self._hold(job, block)

    def _hold(self, job: _Job, block: int) -> None:
        job.sequence.held_blocks.append(block)
        if job.from_disk:
            job.sequence.num_disk_blocks += 1
            self.counters.disk_hit_blocks += 1
        else:
            job.sequence.num_fetched_blocks += 1
            self.counters.fetched_blocks += 1
            self.counters.fetched_bytes += self._block_bytes

    def _close(self, job: _Job, *, failed: bool = False, told: bool = False) -> None:
        """Forgets a job; ``failed``: for its source's fault; ``told``: its source said that nothing follows,
        and needs no word from us."""
        self._jobs.remove(job)
        if not told:
            job.source.cancel(job.job_id)
        now = self._clock()
        if job.sequence.num_preemptions == 0:
            job.sequence.fill_s += now - job.started
        if not job.from_disk:
            self.counters.fetch_s += now - job.started
            self.counters.fetch_overlap_s += max(0.0, (job.inbox.computed_at or now) - job.started)
            self.counters.failed_fetches += failed

    def _go_on(self, job: _Job) -> None:
        """What the disk did not have comes from the prefill replica, if there is one; else back in line."""
        sequence, block_size = job.sequence, self._scheduler.config.block_size
        first = len(sequence.held_blocks)
        stop = min(sequence.num_reusable_blocks(block_size), len(sequence.block_ids))
        complete = first == sequence.first_filled_block + sequence.num_disk_blocks
        if job.wants_remote and complete and first < stop and self._remote is not None:
            self._open(sequence, first, stop, from_disk=False)
        else:
            self._resume(job)

    def _resume(self, job: _Job) -> None:
        self._scheduler.resume(job.sequence)
