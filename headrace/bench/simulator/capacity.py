"""How much traffic a fleet can take at most, so that a replay can ask for a share of it."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from headrace.bench.simulator.replica import PacedModel
from headrace.bench.simulator.step_time import StepTime, StepWork
from headrace.core.request import Request
from headrace.kvcache.block_pool import BlockPool


def work_off_seconds(requests: Iterable[Request], model: PacedModel, num_replicas: int) -> float:
    """The time in which an ideal fleet serves ``requests`` when all wait at its door at once.

    Ideal: one replica with the fleet's whole cache, so nothing is cached twice and nobody idles, and with
    ``num_replicas`` times its limits and speed.
    """
    pace = model.step_time
    fleet = msgspec.structs.replace(
        model,
        num_blocks=model.num_blocks * num_replicas,
        max_num_seqs=model.max_num_seqs * num_replicas,
        max_num_batched_tokens=model.max_num_batched_tokens * num_replicas,
        step_time=StepTime(
            base=pace.base,
            per_decode=pace.per_decode / num_replicas,
            per_prefill=pace.per_prefill / num_replicas,
            per_context=pace.per_context / num_replicas,
            per_pair=pace.per_pair / num_replicas,
        ),
    )
    scheduler = fleet.scheduler(BlockPool(fleet.num_blocks, fleet.block_size))
    for request in requests:
        scheduler.add(request)
    seconds = 0.0
    while scheduler.has_work:
        schedule = scheduler.schedule()
        seconds += fleet.step_time.seconds(StepWork.of(schedule))
        scheduler.update(schedule, [0] * sum(entry.samples for entry in schedule.entries))
        scheduler.block_pool.take_events()
    return seconds
