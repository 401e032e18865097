"""A fleet of fake replicas behind a real router, placer and dispatcher, all in this process."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.router.dispatcher import Dispatcher
from headrace.router.flight import Flight
from headrace.router.placer import LocalPlacer
from tests.router.replicas import MODEL, FakeReplica, until

LOG = logging.getLogger("tests.router")


class Sink:
    """Notes what it is told and checks that nothing comes after the end."""

    def __init__(self) -> None:
        self.num_starts = 0
        self.outputs: list[Output] = []
        self.error: HeadraceError | None = None
        self.texts: list[tuple[object, object]] = []
        self.flight: Flight | None = None
        self.after = lambda outputs: None
        self.deaf = False  # set by a test that has aborted

    def on_started(self) -> None:
        assert self.error is None and not self.deaf
        self.num_starts += 1

    def on_outputs(self, outputs: list[Output]) -> None:
        assert outputs and self.error is None and not self.deaf and self.num_starts
        assert self.flight is not None, "called from within submit"
        for output in outputs:
            assert self.reason(output.sample_index) is None, "a sample goes on after its end"
            self.outputs.append(output)
        self.after(outputs)

    def on_error(self, error: HeadraceError) -> None:
        assert self.error is None and not self.deaf
        assert self.flight is not None, "called from within submit"
        self.error = error

    def on_text_worker(self, worker: object, lease: object) -> None:
        self.texts.append((worker, lease))

    def tokens(self, sample: int = 0) -> list[int]:
        return [t for o in self.outputs if o.sample_index == sample for t in o.token_ids]

    def reason(self, sample: int = 0) -> str | None:
        reasons = [o.finish_reason for o in self.outputs if o.sample_index == sample and o.finish_reason]
        return reasons[0] if reasons else None

    @property
    def ended(self) -> bool:
        return self.error is not None or (self.flight is not None and self.flight.ended)


class FleetUnderTest:
    def __init__(self, placer: LocalPlacer, dispatcher: Dispatcher, replicas: list[FakeReplica]) -> None:
        self.placer = placer
        self.dispatcher = dispatcher
        self.replicas = replicas

    def submit(self, request: Request) -> Sink:
        return submit(self.dispatcher, request)

    def on(self, flight: Flight | None) -> FakeReplica:
        """The replica that a flight runs on."""
        assert flight is not None and flight.placement is not None
        return next(r for r in self.replicas if r.replica_id == flight.placement.replica_id)

    async def quiet(self) -> None:
        """Nothing runs, nothing waits, no lease is open, anywhere."""
        await until(lambda: not any(replica.samples for replica in self.replicas))
        assert self.dispatcher.num_open == 0
        assert not self.placer._waiters
        status = self.placer.router.status()
        assert status.num_queued == 0
        assert [replica.num_in_flight for replica in status.replicas] == [0] * len(status.replicas)
        self.placer.router.check_integrity()


def submit(dispatcher: Dispatcher, request: Request) -> Sink:
    sink = Sink()
    sink.flight = dispatcher.submit(request, sink, caller_id=f"caller-{request.request_id}")
    return sink


def num_ready(dispatcher: Dispatcher) -> int:
    return sum(member.state == "ready" for member in dispatcher.members())


@contextlib.asynccontextmanager
async def fleet(
    folder: Path, count: int = 2, *, config: RouterConfig | None = None, ready: bool = True
) -> AsyncIterator[FleetUnderTest]:
    """``count`` replicas named a, b, c and so on."""
    config = config or RouterConfig(routing_policy="round_robin")
    replicas = [FakeReplica(folder / f"{name}.sock", name) for name in "abcdefgh"[:count]]
    placer = LocalPlacer(config, log=LOG)
    placer.start()
    dispatcher = Dispatcher(placer, config, log=LOG)
    dispatcher.start()
    try:
        for replica in replicas:
            await replica.start()
            placer.set_endpoint(replica.endpoint)
        if ready:
            await until(lambda: num_ready(dispatcher) == count)
            assert dispatcher.ready(MODEL)
        yield FleetUnderTest(placer, dispatcher, replicas)
    finally:
        await dispatcher.close()
        await placer.close()
        for replica in replicas:
            await replica.close()
