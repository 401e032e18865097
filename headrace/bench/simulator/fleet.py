"""One replay: requests arrive at a fleet of paced replicas, in virtual time.

arrivals ──► Dispatcher ──► LocalPlacer (Router) ──► ReplicaClient ══ socket ══► PacedReplica × N
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
from headrace.bench.simulator.replica import PacedModel, PacedReplica
from headrace.bench.traces import Arrival, TraceRequest
from headrace.core.errors import EngineError, HeadraceError
from headrace.core.identity import block_identities
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Output, Stats
from headrace.core.request import Request, SamplingParams
from headrace.core.routing import Endpoint
from headrace.router.dispatcher import Dispatcher
from headrace.router.external.text_worker import TextLease, TextWorker
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


def engine_request(request_id: str, trace: TraceRequest, model: PacedModel) -> Request:
    """A recorded request as the gateway would send it: its prompt, as many tokens as were answered then."""
    prompt = trace.prompt(model.vocab_size)
    return Request(
        request_id=request_id,
        model=model.name,
        prompt=prompt,
        block_ids=b"".join(block_identities(model.root, prompt, model.block_size)),
        sampling=SamplingParams(temperature=0.0, max_tokens=trace.output_length, ignore_eos=True, seed=0),
    )


def replay(
    arrivals: Sequence[Arrival], model: PacedModel, num_replicas: int, policy: str, *, seed: int
) -> Replay:
    """Sends all requests at their times and waits for the last token; EngineError if any fails."""
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        return clock.run(_replay(arrivals, model, num_replicas, policy, seed, Path(folder)))


async def _replay(
    arrivals: Sequence[Arrival], model: PacedModel, num_replicas: int, policy: str, seed: int, folder: Path
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
    for replica in replicas:
        await replica.start()
        placer.set_endpoint(
            Endpoint(
                replica_id=replica.replica_id, model=model.name, address=str(replica.path), kind="headrace"
            )
        )
    while any(member.state != "ready" for member in dispatcher.members()):
        await asyncio.sleep(0.01)
    try:
        began = loop.time()
        callers = Callers(dispatcher, model, arrivals, began)
        await callers.done
        seconds = max(trace.finished for trace in callers.traces) - began
        for replica in replicas:
            replica.scheduler.check_integrity()
        placer.router.check_integrity()
    finally:
        await dispatcher.close()
        await placer.close()
        for replica in replicas:
            await replica.close()
    return Replay(
        requests=callers.traces,
        stats=[replica.stats() for replica in replicas],
        busy_s=[replica.busy_s for replica in replicas],
        seconds=seconds,
    )


class Callers:
    """Submits each request at its time. ``done`` is set when all have ended; ``traces`` are then complete."""

    def __init__(
        self, dispatcher: Dispatcher, model: PacedModel, arrivals: Sequence[Arrival], began: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._dispatcher = dispatcher
        self._model = model
        self._arrivals = arrivals
        self._began = began
        self._num_open = len(arrivals)
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.traces: list[RequestTrace] = []
        self._wait_for(0)

    def _wait_for(self, number: int) -> None:
        self._loop.call_at(self._began + self._arrivals[number].at, self._submit, number)

    def _submit(self, number: int) -> None:
        if number + 1 < len(self._arrivals):
            self._wait_for(number + 1)
        request = engine_request(str(number), self._arrivals[number].request, self._model)
        try:
            self._dispatcher.submit(request, _Caller(self, request, self._loop))
        except Exception as error:  # a bug on the way would otherwise be waited for for ever
            if not self.done.done():
                self.done.set_exception(error)

    def ended(self, trace: RequestTrace) -> None:
        self.traces.append(trace)
        self._num_open -= 1
        if not self._num_open and not self.done.done():
            self.done.set_result(None)

    def failed(self, request: Request, error: HeadraceError) -> None:
        if not self.done.done():
            self.done.set_exception(
                EngineError(f"request {request.request_id} of the replay failed: {error.message}")
            )


class _Caller:
    """One request's Sink: notes when its first and its last token came."""

    __slots__ = ("_callers", "_first", "_loop", "_num_cached", "_num_output", "_request", "_sent")

    def __init__(self, callers: Callers, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self._callers = callers
        self._request = request
        self._loop = loop
        self._sent = loop.time()
        self._first = 0.0
        self._num_cached = 0
        self._num_output = 0

    def on_outputs(self, outputs: list[Output]) -> None:
        """See Sink."""
        for output in outputs:
            if not self._num_output:
                self._first = self._loop.time()
                self._num_cached = output.num_cached_tokens
            self._num_output += len(output.token_ids)
            if output.finish_reason is not None:
                now = self._loop.time()
                self._callers.ended(
                    RequestTrace(
                        sent=self._sent,
                        text_times=[self._first, now],
                        finished=now,
                        prompt_tokens=self._request.num_prompt_tokens,
                        cached_tokens=self._num_cached,
                        output_tokens=self._num_output,
                        finish_reason=output.finish_reason,
                    )
                )

    def on_error(self, error: HeadraceError) -> None:
        """See Sink."""
        self._callers.failed(self._request, error)

    def on_text_worker(self, worker: TextWorker, lease: TextLease) -> None:
        """See Sink."""
        raise AssertionError("paced replicas take tokens")
