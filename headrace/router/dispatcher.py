"""The gateway's way to the replicas: a worker for each member of the fleet, a flight for each request.

Dispatcher.submit(request, sink) ──► Flight ──► placer: which replica? ──► workers[replica_id]
placer ── on_fleet, on_hand_over ──► Dispatcher
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, cast

from headrace.core.errors import UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.request import Request
from headrace.core.routing import Capabilities, Endpoint, Fleet, Member, ModelInfo, Route
from headrace.router.budget import RetryBudget
from headrace.router.flight import Flight, Sink
from headrace.router.replica_client import ReplicaClient
from headrace.router.text_flight import TextFlight, TextSink
from headrace.router.worker import PairingWorker, Worker, is_ours

if TYPE_CHECKING:
    from headrace.router.external.text_worker import TextWorker
    from headrace.router.external.worker import ExternalWorker
    from headrace.router.placer import Placer


class MakeWorker(Protocol):
    """Makes what requests to a server that is not ours are sent through (``router.external.make_worker``)."""

    def __call__(
        self, endpoint: Endpoint, capabilities: Capabilities, *, log: logging.Logger, silence_s: float
    ) -> ExternalWorker | TextWorker: ...


class Dispatcher:
    """Owns the workers of this process and the flights of its requests; all in one event loop."""

    def __init__(
        self,
        placer: Placer,
        config: RouterConfig,
        *,
        log: logging.Logger,
        make_worker: MakeWorker | None = None,
        on_hang: Callable[[str, int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``make_worker`` is for servers that are not ours. ``on_hang`` is told the replica and the pid of a
        process of ours that this one has given up; only where the placer has no connection of its own."""
        self.placer = placer
        self.config = config
        self.log = log
        self.budget = RetryBudget(config.retry_budget)
        self.clock = clock
        self.loop: asyncio.AbstractEventLoop
        self._make_worker = make_worker
        self._on_hang = on_hang
        self._links: dict[str, _Link] = {}
        self._infos: dict[str, ModelInfo] = {}
        self._ready: set[str] = set()
        self._flights: dict[str, Flight | TextFlight] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Begins to follow the fleet; from within the event loop."""
        self.loop = asyncio.get_running_loop()
        self.placer.watch(self)

    async def close(self) -> None:
        """Ends what runs and every connection of this process's own."""
        self.end_all("the server is shutting down")
        for replica_id in list(self._links):
            self._drop(replica_id)
        if self._closing:
            await asyncio.wait(self._closing)

    def submit(self, request: Request, sink: Sink, *, caller_id: str = "") -> Flight:
        """Sends a request on its way. Never raises: errors come to ``sink.on_error``, later."""
        flight = Flight(self, request, sink, caller_id)
        self._flights[request.request_id] = flight
        self.budget.on_request()
        flight.start()
        return flight

    def submit_text(self, route: Route, sink: TextSink) -> TextFlight:
        """Finds a server for a body that passes through as text. Never raises, as ``submit``."""
        flight = TextFlight(self, route, sink)
        self._flights[route.request_id] = flight
        self.budget.on_request()
        flight.start()
        return flight

    def end_all(self, reason: str) -> None:
        """Ends every open flight with UnavailableError, and stops its work."""
        for flight in list(self._flights.values()):
            flight.fail(UnavailableError(reason, code="shutting_down"))

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return len(self._flights)

    def info(self, model: str) -> ModelInfo | None:
        """What is known of a model since a replica of it was up; None before."""
        return self._infos.get(model)

    def ready(self, model: str) -> bool:
        """Whether a replica of the model takes requests now, or may: without its router nobody knows, and
        requests wait for it."""
        return model in self._ready or (model in self._infos and self.placer.is_away)

    def has_members(self, model: str) -> bool:
        """Whether the fleet has any replica of the model, up or not."""
        return any(link.member.endpoint.model == model for link in self._links.values() if not link.removed)

    def members(self) -> list[Member]:
        """The fleet as the router told it last."""
        return [link.member for link in self._links.values() if not link.removed]

    # Called by flights

    def worker(self, replica_id: str, prefill_replica: str = "") -> Worker | None:
        """What takes token ids for a replica; None if nothing does. ``prefill_replica`` computes the prompt:
        one of ours fetches it by itself, other servers are sent their halves one by one."""
        link = self._links.get(replica_id)
        if link is None or not prefill_replica or is_ours(link.member.endpoint):
            return None if link is None else link.worker
        prefill = self._links.get(prefill_replica)
        if link.worker is None or prefill is None or prefill.worker is None:
            return None
        return cast(PairingWorker, link.worker).paired(cast(PairingWorker, prefill.worker))

    def text_worker(self, replica_id: str) -> TextWorker | None:
        """What takes text for a replica; None if nothing does."""
        link = self._links.get(replica_id)
        return None if link is None else link.text_worker

    def hurry(self, replica_id: str) -> None:
        """Connects to a replica now, if this process still waits to try again."""
        worker = self.worker(replica_id)
        if isinstance(worker, ReplicaClient):
            worker.hurry()

    def forget(self, flight: Flight | TextFlight) -> None:
        """A flight has ended."""
        self._flights.pop(flight.request_id, None)
        if flight.placement is not None:
            self.left(flight.placement.replica_id)

    def left(self, replica_id: str) -> None:
        """A flight has left a replica."""
        link = self._links.get(replica_id)
        if link is not None and link.removed and not self._flights_on(replica_id):
            self._drop(replica_id)

    # Called by the placer

    def on_fleet(self, fleet: Fleet) -> None:
        """Keeps one worker for each member. One that was removed keeps its own as long as requests run there:
        whoever removes it waits for them or ends its process."""
        for info in fleet.models:
            self._infos[info.model] = info
        self._ready = {member.endpoint.model for member in fleet.members if member.state == "ready"}
        present = set()
        for member in fleet.members:
            replica_id = member.endpoint.replica_id
            present.add(replica_id)
            link = self._links.get(replica_id)
            if link is None or not link.serves(member, self.placer.connection(replica_id)):
                self._drop(replica_id)
                self._links[replica_id] = self._connect(member)
            else:
                link.member = member
                link.removed = False
        for replica_id in self._links.keys() - present:
            self._links[replica_id].removed = True
            if not self._flights_on(replica_id):
                self._drop(replica_id)

    def on_hand_over(self, replica_id: str) -> None:
        """What runs on this replica moves to others now."""
        flights = self._flights_on(replica_id)
        if flights:
            self.log.info("replica %s hands over %d requests", replica_id, len(flights))
        for flight in flights:
            flight.hand_over()

    def _flights_on(self, replica_id: str) -> list[Flight | TextFlight]:
        return [
            flight
            for flight in self._flights.values()
            if flight.placement is not None and flight.placement.replica_id == replica_id
        ]

    def _connect(self, member: Member) -> _Link:
        endpoint = member.endpoint
        link = _Link(member)
        if is_ours(endpoint):
            client = self.placer.connection(endpoint.replica_id)
            if client is None:
                client = ReplicaClient(
                    endpoint.address,
                    replica_id=endpoint.replica_id,
                    silence_s=self.config.replica_timeout_s,
                    on_hang=self._hang_of(endpoint.replica_id),
                    log=self.log,
                )
                client.start()
                link.close = client.close
            link.worker = client
        elif member.capabilities is not None and self._make_worker is not None:
            silence_s = self.config.replica_timeout_s
            made = self._make_worker(endpoint, member.capabilities, log=self.log, silence_s=silence_s)
            link.close = made.close
            if _takes_text_only(member):
                link.text_worker = made  # type: ignore[assignment]
            else:
                link.worker = made  # type: ignore[assignment]
        return link

    def _hang_of(self, replica_id: str) -> Callable[[int], None] | None:
        on_hang = self._on_hang
        return None if on_hang is None else lambda pid: on_hang(replica_id, pid)

    def _drop(self, replica_id: str) -> None:
        link = self._links.pop(replica_id, None)
        if link is not None and link.close is not None:
            task = self.loop.create_task(link.close())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _takes_text_only(member: Member) -> bool:
    capabilities = member.capabilities
    return member.endpoint.text_only or (capabilities is not None and not capabilities.tokens)


class _Link:
    """How this process reaches one member; ``close`` is None for a connection that is the placer's."""

    __slots__ = ("close", "member", "removed", "text_worker", "worker")

    def __init__(self, member: Member) -> None:
        self.member = member
        self.removed = False
        self.worker: Worker | None = None
        self.text_worker: TextWorker | None = None
        self.close: Callable[[], Coroutine[Any, Any, None]] | None = None

    def serves(self, member: Member, connection: ReplicaClient | None) -> bool:
        """Whether the member, as it is now, is reached in the same way; ``connection``: the placer's."""
        old, new = self.member, member
        fields = ("address", "kind", "text_only", "bootstrap_port")
        same = all(getattr(old.endpoint, name) == getattr(new.endpoint, name) for name in fields)
        if is_ours(new.endpoint):
            # a connection finds out by itself that the process behind it is another one
            return same and (connection is None or connection is self.worker)
        return same and (old.capabilities, old.instance) == (new.capabilities, new.instance)
