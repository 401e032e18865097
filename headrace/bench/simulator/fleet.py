"""One replay: requests arrive at a fleet of paced replicas, in virtual time.

arrivals ──► (HTTP ──► Gateway ──►) Dispatcher ──► LocalPlacer (Router)
                                        └────────► ReplicaClient ══ socket ══► PacedReplica × N
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from headrace.bench.metrics import RequestTrace
from headrace.bench.simulator import clock
from headrace.bench.simulator.callers import submit_all
from headrace.bench.simulator.front_door import post_all
from headrace.bench.simulator.replica import PacedModel, PacedReplica
from headrace.bench.traces import Arrival
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Stats
from headrace.core.routing import Endpoint
from headrace.router.dispatcher import Dispatcher
from headrace.router.placer import LocalPlacer

log = logging.getLogger("headrace.bench.simulator")
log.addHandler(logging.NullHandler())

# Requests are never turned away here: a policy that overloads a replica shall show it in its latency.
MAX_QUEUE = 1_000_000
QUEUE_TIMEOUT_S = 1e9


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to: one trace for each request, and each replica's counters and busy seconds."""

    requests: list[RequestTrace]
    stats: list[Stats]
    busy_s: list[float]
    seconds: float

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that were found in a cache."""
        asked = sum(stats.prefix_cache_queries for stats in self.stats)
        return sum(stats.prefix_cache_hits for stats in self.stats) / asked if asked else 0.0

    @property
    def busy_share(self) -> float:
        """Share of the replicas' time with a step in progress."""
        return sum(self.busy_s) / len(self.busy_s) / self.seconds


def replay(
    arrivals: Sequence[Arrival],
    model: PacedModel,
    num_replicas: int,
    policy: str,
    *,
    seed: int,
    over_http: bool = False,
) -> Replay:
    """Sends all requests at their times and waits for the last token; EngineError if any fails.

    ``over_http``: through the gateway, as streamed completions; otherwise straight to its dispatcher.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        return clock.run(_replay(arrivals, model, num_replicas, policy, seed, over_http, Path(folder)))


async def _replay(
    arrivals: Sequence[Arrival],
    model: PacedModel,
    num_replicas: int,
    policy: str,
    seed: int,
    over_http: bool,
    folder: Path,
) -> Replay:
    loop = asyncio.get_running_loop()
    config = RouterConfig(
        routing_policy=policy,  # type: ignore[arg-type]
        max_queue=MAX_QUEUE,
        queue_timeout_s=QUEUE_TIMEOUT_S,
    )
    replicas = [
        PacedReplica(f"{model.name}-{i}", folder / f"{i}.sock", model, seed=1000 * seed + i)
        for i in range(num_replicas)
    ]
    placer = LocalPlacer(config, log=log, seed=seed, clock=loop.time)
    placer.start()
    dispatcher = Dispatcher(placer, config, log=log, clock=loop.time)
    dispatcher.start()
    try:
        for replica in replicas:
            await replica.start()
            placer.set_endpoint(
                Endpoint(
                    replica_id=replica.replica_id,
                    model=model.name,
                    address=str(replica.path),
                    kind="headrace",
                )
            )
        while any(member.state != "ready" for member in dispatcher.members()):
            await asyncio.sleep(0.01)
        began = loop.time()
        if over_http:
            traces = await post_all(arrivals, model, dispatcher, folder, log)
        else:
            traces = await submit_all(arrivals, model, dispatcher)
        for replica in replicas:
            replica.scheduler.check_integrity()
        placer.router.check_integrity()
    finally:
        await dispatcher.close()
        await placer.close()
        for replica in replicas:
            await replica.close()
    return Replay(
        requests=traces,
        stats=[replica.stats() for replica in replicas],
        busy_s=[replica.busy_s for replica in replicas],
        seconds=max(trace.finished for trace in traces) - began,
    )
