"""The one interface to the router, and the router in this very process.

Flight ── place, began, release ──► Placer        LocalPlacer: calls     RemotePlacer (remote.py): a socket
Flight ◄── on_placed, on_refused ── Placer
Dispatcher ◄── on_fleet, on_hand_over ── Placer

LocalPlacer ── owns ──► Router (sans-IO), a ReplicaClient or an ExternalMonitor for each replica, one timer
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from headrace.core.errors import EngineError, HeadraceError, UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import CacheEvent, CacheSnapshot, Stats, Timing
from headrace.core.routing import (
    Capabilities,
    Decision,
    Endpoint,
    Fleet,
    FleetStatus,
    Lease,
    ModelInfo,
    Outcome,
    Placement,
    Route,
)
from headrace.router.kv_traits import NO_TRAITS, KvTraits
from headrace.router.replica_client import ReplicaClient
from headrace.router.router import Router
from headrace.router.worker import is_ours

if TYPE_CHECKING:
    from headrace.router.external.monitor import ExternalMonitor, MonitorListener

POLL_S = 0.1
"""How often requests that wait are looked at when nothing happens."""


class Waiter(Protocol):
    """What waits for a placement. It hears once, maybe from within ``place``, never after ``release``."""

    def on_placed(self, placement: Placement) -> None: ...
    def on_refused(self, error: HeadraceError) -> None: ...


class FleetListener(Protocol):
    """What follows the fleet."""

    def on_fleet(self, fleet: Fleet) -> None:
        """All members and models, at first and at every change."""

    def on_hand_over(self, replica_id: str) -> None:
        """What runs there moves to others now."""


class Placer(Protocol):
    """The router as flights, the dispatcher and the supervisor see it. Only questions are awaited."""

    @property
    def is_away(self) -> bool:
        """Whether the router cannot be reached just now."""

    def place(self, route: Route, waiter: Waiter) -> None:
        """Asks for a lease on a replica. Unless refused, it ends with one ``release``."""

    def began(
        self, request_id: str, ttft_s: float, num_cached_tokens: int, timing: Timing | None = None
    ) -> None:
        """The first token came ``ttft_s`` seconds after the placement."""

    def release(
        self,
        request_id: str,
        outcome: Outcome,
        num_output_tokens: int = 0,
        decode_s: float = 0.0,
        prefill_outcome: Outcome | None = None,
    ) -> None:
        """Ends a lease, or the wait for one; see ``core.routing.Release``."""

    def watch(self, listener: FleetListener) -> None:
        """Tells ``listener`` of the fleet from now on, at once as far as it is known."""

    def connection(self, replica_id: str) -> ReplicaClient | None:
        """The connection that the router itself has to one of our replicas, for requests as well."""

    def set_endpoint(self, endpoint: Endpoint) -> None: ...
    def remove_endpoint(self, replica_id: str) -> None: ...

    async def status(self) -> FleetStatus:
        """UnavailableError when the router does not answer; so for the other questions."""

    async def why(self, request_id: str) -> list[Decision]: ...
    async def reports(self) -> list[bytes]:
        """The latest report of each gateway."""

    def report(self, metrics: bytes) -> None:
        """This gateway's counters."""


class MakeMonitor(Protocol):
    """Makes what watches a server that is not ours (``router.external.make_monitor``)."""

    def __call__(
        self, endpoint: Endpoint, listener: MonitorListener, *, log: logging.Logger
    ) -> ExternalMonitor: ...


class LocalPlacer:
    """The router in this process. ``start`` and everything after it happen in one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        log: logging.Logger,
        make_monitor: MakeMonitor | None = None,
        on_hang: Callable[[str, int], None] | None = None,
        watch_idle: bool = False,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_hang`` is told the replica and the pid of a process of ours that does not answer any more;
        ``watch_idle``: also when no request goes through this process's own connection."""
        self.router = Router(config, seed=seed)
        self._config = config
        self._clock = clock
        self._log = log
        self._make_monitor = make_monitor
        self._on_hang = on_hang
        self._watch_idle = watch_idle
        self._loop: asyncio.AbstractEventLoop
        self._endpoints: dict[str, Endpoint] = {}
        self._clients: dict[str, ReplicaClient] = {}
        self._monitors: dict[str, ExternalMonitor] = {}
        self._waiters: dict[str, Waiter] = {}
        self._listeners: list[FleetListener] = []
        self._fleet = Fleet(members=[], models=[])
        self._poll_soon: asyncio.Handle | None = None
        self._poll_later: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._reports: dict[str, bytes] = {}

    def start(self) -> None:
        """Remembers the running event loop."""
        self._loop = asyncio.get_running_loop()

    async def close(self) -> None:
        """Ends every connection; what runs there fails with UnavailableError, what waits is refused."""
        for handle in (self._poll_soon, self._poll_later):
            if handle is not None:
                handle.cancel()
        waiters, self._waiters = self._waiters, {}
        for request_id, waiter in waiters.items():
            self.router.release(request_id, "aborted", 0, 0.0, self._clock())
            waiter.on_refused(UnavailableError("the router is shutting down", code="shutting_down"))
        self._listeners.clear()
        for replica_id in list(self._endpoints):
            self._disconnect(replica_id)
        if self._closing:
            await asyncio.wait(self._closing)

    # Requests

    @property
    def is_away(self) -> bool:
        return False

    def place(self, route: Route, waiter: Waiter) -> None:
        """See Placer."""
        try:
            placement = self.router.place(route, self._clock(), time.time())
        except HeadraceError as error:
            waiter.on_refused(error)
            return
        except Exception as error:  # a fault of ours costs one request, not the connection that it came by
            self._log.exception("request %s could not be placed", route.request_id)
            waiter.on_refused(EngineError(f"the router failed: {error!r}"))
            return
        if placement is None:
            self._waiters[route.request_id] = waiter
            if self._poll_later is None:
                self._poll_later = self._loop.call_later(POLL_S, self._poll)
        else:
            waiter.on_placed(placement)

    def adopt(self, lease: Lease) -> None:
        """A placement that runs since before this router did."""
        self.router.adopt(lease, self._clock())

    def began(
        self, request_id: str, ttft_s: float, num_cached_tokens: int, timing: Timing | None = None
    ) -> None:
        """See Placer."""
        self.router.began(request_id, ttft_s, num_cached_tokens, self._clock(), timing)

    def release(
        self,
        request_id: str,
        outcome: Outcome,
        num_output_tokens: int = 0,
        decode_s: float = 0.0,
        prefill_outcome: Outcome | None = None,
    ) -> None:
        """See Placer."""
        self._waiters.pop(request_id, None)
        now = self._clock()
        self.router.release(request_id, outcome, num_output_tokens, decode_s, now, prefill_outcome)
        if self._waiters:
            self._wake()

    def _wake(self) -> None:
        """Looks at what waits, once for all that happens in this turn of the event loop."""
        if self._poll_soon is None:
            self._poll_soon = self._loop.call_soon(self._poll)

    def _poll(self) -> None:
        for handle in (self._poll_soon, self._poll_later):
            if handle is not None:
                handle.cancel()
        self._poll_soon = self._poll_later = None
        for request_id, answer in self.router.poll(self._clock(), time.time()):
            waiter = self._waiters.pop(request_id, None)
            if waiter is None:
                continue  # released by what an earlier one in this list did
            if isinstance(answer, Placement):
                waiter.on_placed(answer)
            else:
                waiter.on_refused(answer)
        if self._waiters and self._poll_later is None:
            self._poll_later = self._loop.call_later(POLL_S, self._poll)

    # The fleet

    def watch(self, listener: FleetListener) -> None:
        """See Placer."""
        self._listeners.append(listener)
        listener.on_fleet(self._fleet)

    @property
    def fleet(self) -> Fleet:
        """All members and models as they are now."""
        return self._fleet

    def connection(self, replica_id: str) -> ReplicaClient | None:
        """See Placer."""
        return self._clients.get(replica_id)

    def set_endpoint(self, endpoint: Endpoint) -> None:
        """See Placer."""
        replica_id = endpoint.replica_id
        before = self._endpoints.get(replica_id)
        if before is not None and (before.address, before.kind) != (endpoint.address, endpoint.kind):
            self.remove_endpoint(replica_id)
            before = None
        self._endpoints[replica_id] = endpoint
        self.router.set_endpoint(endpoint, self._clock())
        if before is None:
            self._connect(endpoint)
        self._changed()
        if endpoint.hand_over and (before is None or not before.hand_over):
            for listener in self._listeners:
                listener.on_hand_over(replica_id)

    def remove_endpoint(self, replica_id: str) -> None:
        """See Placer. What still runs there through the router's own connection moves on."""
        if replica_id in self._endpoints:
            self.router.remove_endpoint(replica_id, self._clock())
            self._disconnect(replica_id)
            self._changed()

    def _connect(self, endpoint: Endpoint) -> None:
        replica_id = endpoint.replica_id
        if is_ours(endpoint):
            on_hang = self._on_hang
            client = self._clients[replica_id] = ReplicaClient(
                endpoint.address,
                replica_id=replica_id,
                model=endpoint.model,
                listener=self,
                silence_s=self._config.replica_timeout_s,
                watch_idle=self._watch_idle,
                on_hang=None if on_hang is None else lambda pid: on_hang(replica_id, pid),
                log=self._log,
            )
            client.start()
        elif self._make_monitor is not None:
            monitor = self._monitors[replica_id] = self._make_monitor(endpoint, self, log=self._log)
            monitor.start()

    def _disconnect(self, replica_id: str) -> None:
        del self._endpoints[replica_id]
        for known in (self._clients, self._monitors):
            watcher = known.pop(replica_id, None)
            if watcher is not None:
                task = self._loop.create_task(watcher.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    def _changed(self) -> None:
        fleet = Fleet(members=self.router.members(), models=self.router.models())
        if fleet != self._fleet:
            self._fleet = fleet
            for listener in self._listeners:
                listener.on_fleet(fleet)
        if self._waiters:
            self._wake()

    # What replicas say (MonitorListener)

    def model_info(self, model: str) -> ModelInfo | None:
        """The identity space that the model's replicas share now, if any is up."""
        return next((info for info in self._fleet.models if info.model == model), None)

    def on_up(
        self,
        replica_id: str,
        *,
        instance: str,
        capabilities: Capabilities,
        model: ModelInfo,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        hardware: str,
        kv: KvTraits = NO_TRAITS,
    ) -> None:
        """A replica is connected, or another process of it."""
        if replica_id not in self._endpoints:
            return
        known = next(m for m in self._fleet.members if m.endpoint.replica_id == replica_id)
        self.router.up(
            replica_id,
            instance=instance,
            capabilities=capabilities,
            model=model,
            max_num_seqs=max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            hardware=hardware,
            kv=kv,
            now=self._clock(),
        )
        level = logging.DEBUG if known.state == "starting" else logging.INFO
        self._log.log(level, "replica %s is up", replica_id)
        self._changed()

    def on_down(self, replica_id: str, reason: str) -> None:
        """A replica does not answer."""
        if replica_id not in self._endpoints:
            return
        self.router.down(replica_id, self._clock(), reason)
        self._log.warning("replica %s is down: %s", replica_id, reason)
        self._changed()

    def on_stats(self, replica_id: str, stats: Stats) -> None:
        """A replica's load."""
        if replica_id in self._endpoints:
            self.router.on_stats(replica_id, stats, self._clock())
            if self._waiters:
                self._wake()

    def on_events(self, replica_id: str, first_seq: int, events: Sequence[CacheEvent]) -> None:
        """What entered and left a replica's cache; where something is missing, the replica is asked again."""
        if replica_id not in self._endpoints:
            return
        next_seq = self.router.on_events(replica_id, first_seq, events, self._clock())
        client = self._clients.get(replica_id)
        if next_seq is not None and client is not None:
            self._log.info("replica %s: cache events are missing from %d on", replica_id, next_seq)
            client.subscribe(next_seq)

    def on_snapshot(self, replica_id: str, snapshot: CacheSnapshot) -> None:
        """All that a replica's cache holds."""
        if replica_id in self._endpoints:
            self.router.on_snapshot(replica_id, snapshot, self._clock())

    # Questions

    async def status(self) -> FleetStatus:
        """See Placer."""
        return self.router.status()

    async def why(self, request_id: str) -> list[Decision]:
        """See Placer."""
        return self.router.why(request_id)

    async def reports(self) -> list[bytes]:
        """See Placer."""
        return list(self._reports.values())

    def report(self, metrics: bytes) -> None:
        """See Placer."""
        self._reports[""] = metrics
