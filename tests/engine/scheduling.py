"""Small schedulers without a model, driven by hand."""

from __future__ import annotations

from headrace.engine.schedule import Schedule, SchedulerConfig
from headrace.engine.scheduler import Scheduler
from headrace.kvcache.block_pool import BlockPool
from tests.engine.kv_oracle import EOS

ROOT = b"r" * 32


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 100,
    enable_prefix_caching: bool = True,
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        enable_prefix_caching=enable_prefix_caching,
    )
    return Scheduler(config, BlockPool(num_blocks, block_size, track_saved=True), ROOT, [EOS])


def step(scheduler: Scheduler, token: int = 1) -> Schedule:
    """One step in which every sample gets ``token``."""
    schedule = scheduler.schedule()
    scheduler.update(schedule, [token for entry in schedule.entries if entry.samples])
    scheduler.check_integrity()
    return schedule


def finish(scheduler: Scheduler, token: int = 1) -> None:
    for _ in range(1000):
        if not scheduler.has_work:
            break
        step(scheduler, token)
    assert not scheduler.has_work
    assert scheduler.block_pool.num_free == scheduler.block_pool.num_blocks


def shape(schedule: Schedule) -> list[tuple[str, int, bool]]:
    return [(e.sequence.request_id, e.num_new_tokens, e.samples) for e in schedule.entries]


def distinct(count: int, start: int = 10) -> list[int]:
    return list(range(start, start + count))
