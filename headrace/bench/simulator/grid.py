"""Many replays: what one cell of the grid is, how its traffic is made, and what is kept of a run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from headrace.bench.metrics import output_throughput, percentile
from headrace.bench.simulator.callers import engine_request
from headrace.bench.simulator.capacity import work_off_seconds
from headrace.bench.simulator.fleet import replay
from headrace.bench.simulator.ideal import ideal_hit_rate
from headrace.bench.simulator.replica import PacedModel
from headrace.bench.traces import TraceRequest, arrivals, read_trace, slices
from headrace.core.identity import split_identities


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One fleet under one stretch of traffic: part ``part`` of ``num_parts`` of a trace, at ``load``.

    Load 1 is the rate at which an ideal fleet of the same size works off the same requests when all of
    them wait at once (``capacity.work_off_seconds``).
    """

    trace: Path
    part: int
    num_parts: int
    seed: int
    model: PacedModel
    num_replicas: int
    load: float

    def requests(self) -> list[TraceRequest]:
        return slices(read_trace(self.trace), self.num_parts)[self.part]


class Bound(msgspec.Struct, frozen=True):
    """What holds for a cell whatever the policy: how long its arrivals take, what an ideal cache hits."""

    seconds: float
    ideal_hit_rate: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``hit_share`` is the hit rate over the ideal one; times in seconds."""

    hit_rate: float
    hit_share: float
    ttft_mean: float
    ttft_p50: float
    ttft_p99: float
    output_rate: float
    busy_share: float
    num_requests: int


def bound(cell: Cell) -> Bound:
    """Works off a cell's requests on an ideal fleet, and through an ideal cache."""
    requests, model = cell.requests(), cell.model
    work = (engine_request(str(number), request, model) for number, request in enumerate(requests))
    seconds = work_off_seconds(work, model, cell.num_replicas) / cell.load

    def prompts() -> Iterator[tuple[bytes, list[bytes], int]]:
        for request in requests:
            sent = engine_request("", request, model)
            yield sent.prompt, split_identities(sent.block_ids), request.output_length

    return Bound(seconds, ideal_hit_rate(prompts(), model.num_blocks * cell.num_replicas, model.block_size))


def measure(
    cell: Cell, limits: Bound, policy: str, door: Literal["dispatcher", "http"] = "dispatcher"
) -> Figures:
    """Replays a cell under one policy. The seed gives every policy the same arrivals and noise."""
    arriving = arrivals(cell.requests(), limits.seconds, random.Random(cell.seed))
    run = replay(arriving, cell.model, cell.num_replicas, policy, seed=cell.seed, over_http=door == "http")
    ttfts = [trace.ttft for trace in run.requests]
    return Figures(
        hit_rate=run.hit_rate,
        hit_share=run.hit_rate / limits.ideal_hit_rate if limits.ideal_hit_rate else 0.0,
        ttft_mean=sum(ttfts) / len(ttfts),
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        output_rate=output_throughput(run.requests),
        busy_share=run.busy_share,
        num_requests=len(ttfts),
    )
