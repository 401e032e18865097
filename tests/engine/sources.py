"""Sources, streams and a disk made of dictionaries, for schedulers whose keys are digests (``kv_oracle``)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from headrace.engine.fill import Filler
from headrace.engine.prefill_only import Prefiller
from headrace.engine.rates import Rate
from headrace.engine.schedule import Schedule
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.engine.write_behind import WriteBehind
from headrace.kvcache.source import FillJob, FillSink
from tests.engine.kv_oracle import KVOracle, digests
from tests.engine.scheduling import ROOT

DIGEST_BYTES = 16


class OracleIO:
    """Blocks of a ``KVOracle``'s cache as bytes: the digests of its slots, in order."""

    def __init__(self, oracle: KVOracle, block_size: int) -> None:
        self._cache = oracle.cache
        self._block_size = block_size
        self.block_bytes = block_size * DIGEST_BYTES

    def read(self, blocks: Seq[int]) -> list[bytearray]:
        size = self._block_size
        return [bytearray().join(self._cache[b * size + i] for i in range(size)) for b in blocks]

    def write(self, block: int, payload: bytes | bytearray) -> None:
        assert len(payload) == self.block_bytes
        for i in range(self._block_size):
            digest = bytes(payload[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES])
            self._cache[block * self._block_size + i] = digest


def true_payloads(tokens: bytes, block_size: int) -> list[bytes]:
    """What the full blocks of packed ``tokens`` hold."""
    found = digests(array("I", tokens))
    return [b"".join(found[i : i + block_size]) for i in range(0, len(found) - block_size + 1, block_size)]


@dataclass
class OpenJob:
    """A job that a source works on; what it brings next is block number ``next``."""

    job: FillJob
    sink: FillSink
    payloads: list[bytes]
    next: int

    @property
    def is_done(self) -> bool:
        return self.next >= min(len(self.payloads), len(self.job.block_ids))


@dataclass
class ScriptedSource:
    """A ``BlockSource`` that does only what a test tells it to."""

    block_size: int
    jobs: dict[str, OpenJob] = field(default_factory=dict)
    opened: list[FillJob] = field(default_factory=list)
    num_consumed: int = 0

    def open(self, job: FillJob, sink: FillSink) -> None:
        assert job.job_id not in self.jobs
        self.opened.append(job)
        self.jobs[job.job_id] = OpenJob(job, sink, self.payloads(job), job.first)

    def payloads(self, job: FillJob) -> list[bytes]:
        return true_payloads(job.tokens, self.block_size)

    def consumed(self, job_id: str, num_blocks: int) -> None:
        self.num_consumed += num_blocks

    def cancel(self, job_id: str) -> None:
        self.jobs.pop(job_id, None)

    def deliver(self, count: int = 1, which: int = 0) -> None:
        """The next ``count`` blocks of a job; after the last one, its end."""
        if not self.jobs:
            return
        job_id, open_job = list(self.jobs.items())[which % len(self.jobs)]
        for _ in range(count):
            if open_job.is_done:
                self.end("", which)
                return
            index = open_job.next
            open_job.next += 1
            open_job.sink.deliver(index, open_job.job.block_ids[index], bytearray(open_job.payloads[index]))
        assert job_id in self.jobs

    def deliver_wrong(self, how: str, which: int = 0) -> None:
        """A block of a foreign identity, of wrong length, or one too early, where a right one is expected."""
        if not self.jobs:
            return
        open_job = list(self.jobs.values())[which % len(self.jobs)]
        index = min(open_job.next, len(open_job.job.block_ids) - 1)
        block_id, payload = open_job.job.block_ids[index], b"\0" * len(open_job.payloads[0])
        if how == "identity":
            block_id = b"x" * len(block_id)
        elif how == "length":
            payload = payload[:-1]
        else:
            index += 1
            block_id = open_job.job.block_ids[index % len(open_job.job.block_ids)]
            payload = open_job.payloads[index % len(open_job.payloads)]
        open_job.sink.deliver(index, block_id, payload)

    def end(self, reason: str, which: int = 0) -> None:
        if self.jobs:
            job_id = list(self.jobs)[which % len(self.jobs)]
            self.jobs.pop(job_id).sink.ended(reason)


@dataclass
class DictDisk(ScriptedSource):
    """A disk tier whose files are a dictionary; it takes ``capacity`` more blocks."""

    files: dict[bytes, bytes] = field(default_factory=dict)
    capacity: int = 1000
    rate: float = 0.0

    def payloads(self, job: FillJob) -> list[bytes]:
        wrong = b"\0" * len(next(iter(self.files.values()), b""))
        return [self.files.get(block_id, wrong) for block_id in job.block_ids]

    def contains(self, block_id: bytes) -> bool:
        return block_id in self.files

    def prefix(self, block_ids: Seq[bytes], start: int = 0) -> int:
        count = start
        while count < len(block_ids) and block_ids[count] in self.files:
            count += 1
        return count - start

    def read_rate(self) -> float:
        return self.rate

    def room(self) -> int:
        return self.capacity

    def put(self, block_id: bytes, parent: bytes, payload: bytes | bytearray) -> bool:
        if not self.capacity:
            return False
        self.capacity -= 1
        self.files[block_id] = bytes(payload)
        return True

    def flush(self, timeout_s: float) -> bool:
        return True


@dataclass
class ListStream:
    """A ``SendStream`` that keeps what it is given, and has room for ``num_free`` more blocks."""

    num_free: int = 1000
    blocks: list[tuple[int, bytes, bytes]] = field(default_factory=list)
    reason: str | None = None
    is_computed: bool = False

    def room(self) -> int:
        return self.num_free

    def send(self, index: int, block_id: bytes, payload: bytes | bytearray) -> None:
        assert self.num_free > 0 and self.reason is None
        self.num_free -= 1
        self.blocks.append((index, block_id, bytes(payload)))

    def computed(self) -> None:
        assert not self.is_computed
        self.is_computed = True

    def end(self, reason: str = "") -> None:
        assert self.reason is None, "ended twice"
        self.reason = reason


class FillingRig:
    """A scheduler over digests with everything that moves blocks, sources and clock by hand."""

    def __init__(self, scheduler: Scheduler, vocab_size: int = 40) -> None:
        pool, block_size = scheduler.block_pool, scheduler.config.block_size
        self.now = 100.0
        self.num_wakes = 0
        self.scheduler, self.pool = scheduler, pool
        self.oracle = KVOracle(scheduler, vocab_size)
        self.io = OracleIO(self.oracle, block_size)
        self.disk, self.remote = DictDisk(block_size), ScriptedSource(block_size)
        self.prefill_rate = Rate()
        self.filler = Filler(
            scheduler,
            root=ROOT,
            block_bytes=self.io.block_bytes,
            write=self.io.write,
            prefill_rate=self.prefill_rate,
            wake=self._wake,
            disk=self.disk,
            remote=lambda: self.remote,
            clock=lambda: self.now,
        )
        self.prefiller = Prefiller(
            scheduler,
            read=self.io.read,
            block_bytes=self.io.block_bytes,
            check=lambda request: None,
            wake=self._wake,
            threaded=False,
            clock=lambda: self.now,
        )
        self.write_behind = WriteBehind(
            pool, self.disk, read=self.io.read, block_bytes=self.io.block_bytes, clock=lambda: self.now
        )
        scheduler.fills = self.filler

    def step(self) -> tuple[Schedule, list[Sequence]]:
        """One step of an engine; returns its schedule and what finished."""
        self.before_step()
        schedule = self.scheduler.schedule()
        finished = self.scheduler.update(schedule, self.oracle.execute(schedule))
        self.after_step()
        self.check_integrity()
        return schedule, finished

    def before_step(self) -> None:
        self.prefiller.take_word()
        self.filler.advance()

    def after_step(self) -> None:
        self.prefiller.advance()

    def finish(self) -> list[Sequence]:
        """Steps until everything has ended; what a source has not brought by then comes too late."""
        finished: list[Sequence] = []
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.now += 1.0
            finished += self.step()[1]
        assert not self.scheduler.has_work and self.pool.num_free == self.pool.num_blocks
        assert not self.remote.jobs and not self.disk.jobs, "a source still works for nobody"
        return finished

    def check_integrity(self) -> None:
        self.scheduler.check_integrity()
        self.filler.check_integrity()
        self.prefiller.check_integrity()

    def _wake(self) -> None:
        self.num_wakes += 1
