"""The router in another process, as a gateway or the supervisor sees it.

    RemotePlacer ══ Unix socket ══► python -m headrace.router

All that the router must know of this process is kept here as well, so that its death loses nothing: leases
are told again to the one that comes next (Attach), and so are endpoints; whoever waits for a placement goes
on waiting there. Streams that run do not notice: tokens never pass through the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from headrace.core.errors import OverloadedError, UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Timing
from headrace.core.routing import (
    Answer,
    Ask,
    Attach,
    Began,
    Decision,
    Endpoint,
    Fleet,
    FleetStatus,
    FromRouter,
    HandOver,
    Hung,
    Lease,
    Outcome,
    Place,
    Placed,
    Refused,
    Release,
    RemoveEndpoint,
    Report,
    Route,
    SetEndpoint,
)
from headrace.core.wire import encode_frame, peer_decoder
from headrace.router.link import Link, stay_connected
from headrace.router.placer import FleetListener, Waiter
from headrace.router.replica_client import ReplicaClient

ANSWER_S = 5.0
SWEEP_S = 0.5

LATE_S = 2.0
"""How much longer than the router's own limit a request waits here: for a router that says nothing."""

MAX_UNSENT_BYTES = 256 * 1024 * 1024


class RemotePlacer:
    """A Placer over a socket that may go away and come back; all in one event loop."""

    def __init__(
        self,
        path: str,
        *,
        peer: str,
        log: logging.Logger,
        config: RouterConfig | None = None,
        on_hang: Callable[[str, int], None] | None = None,
    ) -> None:
        """``peer`` is this process's name there. ``on_hang`` is told the replica and the pid of a process of
        ours that does not answer the router any more."""
        self._path = path
        self._config = config or RouterConfig()
        self._peer = peer
        self._log = log
        self._on_hang = on_hang
        self._link: Link[FromRouter] | None = None
        self._connected = asyncio.Event()
        self._closing = False
        self._waiting: dict[str, _Waiting] = {}
        self._leases: dict[str, Lease] = {}
        self._endpoints: dict[str, Endpoint] = {}
        self._removed: set[str] = set()  # while nobody could be told
        self._report = b""
        self._fleet: Fleet | None = None
        self._told = asyncio.Event()
        self._listeners: list[FleetListener] = []
        self._questions: dict[int, asyncio.Future[Answer]] = {}
        self._nonces = itertools.count(1)
        self._runner: asyncio.Task[None] | None = None
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop

    def start(self) -> None:
        """Begins to connect, and to connect again whenever the router goes away."""
        self._loop = asyncio.get_running_loop()
        self._runner = self._loop.create_task(
            stay_connected(self._path, self._make_link, asyncio.Event(), self._log), name="router-client"
        )

    async def wait_told(self, seconds: float) -> bool:
        """Whether the router has told of the fleet, once it has or ``seconds`` have passed."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._told.wait(), seconds)
        return self._told.is_set()

    async def close(self) -> None:
        """Ends the connection; what waits is refused."""
        self._closing = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
        if self._link is not None:
            self._link.end("closed")
        waiting, self._waiting = self._waiting, {}
        for each in waiting.values():
            each.waiter.on_refused(UnavailableError("the server is shutting down", code="shutting_down"))

    # Requests

    @property
    def is_away(self) -> bool:
        return self._link is None

    def place(self, route: Route, waiter: Waiter) -> None:
        """See Placer."""
        if len(self._waiting) >= self._config.max_queue:
            waiter.on_refused(
                OverloadedError(
                    f"{len(self._waiting)} requests of this gateway wait for a replica already",
                    hint="retry later, add replicas, or raise --max-queue",
                )
            )
            return
        self._waiting[route.request_id] = _Waiting(route, waiter, time.monotonic())
        self._send(Place(route))
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    def began(
        self, request_id: str, ttft_s: float, num_cached_tokens: int, timing: Timing | None = None
    ) -> None:
        """See Placer."""
        lease = self._leases.get(request_id)
        if lease is not None:
            self._leases[request_id] = replace(lease, began=True)
            self._send(Began(request_id, ttft_s, num_cached_tokens, timing))

    def release(
        self,
        request_id: str,
        outcome: Outcome,
        num_output_tokens: int = 0,
        decode_s: float = 0.0,
        prefill_outcome: Outcome | None = None,
    ) -> None:
        """See Placer."""
        if self._leases.pop(request_id, None) is None and self._waiting.pop(request_id, None) is None:
            return
        self._send(Release(request_id, outcome, num_output_tokens, decode_s, prefill_outcome))

    def _sweep(self) -> None:
        """Refuses what has waited so long that a router that is there would have refused it."""
        self._sweeper = None
        longest = self._config.queue_timeout_s + LATE_S
        now = time.monotonic()
        for request_id, each in list(self._waiting.items()):
            if now - each.since >= longest and self._waiting.pop(request_id, None) is not None:
                self._send(Release(request_id, "aborted"))
                each.waiter.on_refused(
                    UnavailableError(
                        f"the router did not answer for {now - each.since:.0f} s",
                        hint="it is being restarted, or overloaded; try again",
                    )
                )
        if self._waiting and self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP_S, self._sweep)

    # The fleet

    def watch(self, listener: FleetListener) -> None:
        """See Placer."""
        self._listeners.append(listener)
        if self._fleet is not None:
            listener.on_fleet(self._fleet)

    def connection(self, replica_id: str) -> ReplicaClient | None:
        """None: a router in another process shares no connection."""
        return None

    def set_endpoint(self, endpoint: Endpoint) -> None:
        """See Placer."""
        self._removed.discard(endpoint.replica_id)
        self._endpoints[endpoint.replica_id] = endpoint
        self._send(SetEndpoint(endpoint))

    def remove_endpoint(self, replica_id: str) -> None:
        """See Placer."""
        if self._endpoints.pop(replica_id, None) is None:
            return
        if self._link is None:
            self._removed.add(replica_id)
        self._send(RemoveEndpoint(replica_id))

    # Questions

    async def status(self) -> FleetStatus:
        """See Placer."""
        answer = await self._ask("status")
        if answer.status is None:
            raise UnavailableError("the router gave no status")
        return answer.status

    async def why(self, request_id: str) -> list[Decision]:
        """See Placer."""
        return (await self._ask("why", request_id)).decisions

    async def reports(self) -> list[bytes]:
        """See Placer."""
        return (await self._ask("reports")).reports

    def report(self, metrics: bytes) -> None:
        """See Placer."""
        self._report = metrics
        self._send(Report(metrics))

    async def _ask(self, what: Literal["status", "why", "reports"], request_id: str = "") -> Answer:
        nonce = next(self._nonces)
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._questions[nonce] = future
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._connected.wait()
                self._send(Ask(nonce, what, request_id))
                return await future
        except TimeoutError:
            raise UnavailableError(
                f"the router did not answer within {ANSWER_S:g} s", hint="it is starting or being restarted"
            ) from None
        finally:
            self._questions.pop(nonce, None)

    # The connection

    def _make_link(self) -> Link[FromRouter]:
        return Link(self, peer_decoder(), self._log)

    def _send(self, message: object) -> None:
        link = self._link
        if link is None:
            return
        link.send(message)
        if link.num_unsent_bytes() > MAX_UNSENT_BYTES:
            link.end("the router does not read")

    def connected(self, link: Link[FromRouter]) -> None:
        """Says who this is and all that this router may not know."""
        self._link = link
        self._connected.set()
        messages: list[object] = [Attach(self._peer, list(self._leases.values()))]
        messages += [SetEndpoint(endpoint) for endpoint in self._endpoints.values()]
        messages += [RemoveEndpoint(replica_id) for replica_id in self._removed]
        messages += [Place(each.route) for each in self._waiting.values()]
        if self._report:
            messages.append(Report(self._report))
        self._removed.clear()
        link.write(b"".join([encode_frame(message) for message in messages]))

    def receive(self, link: Link[FromRouter], message: FromRouter) -> None:
        """One message from the router."""
        if type(message) is Placed:
            placement = message.placement
            each = self._waiting.pop(placement.request_id, None)
            if each is not None:  # otherwise the release is on its way
                self._leases[placement.request_id] = Lease(route=each.route, placement=placement, began=False)
                each.waiter.on_placed(placement)
        elif type(message) is Refused:
            each = self._waiting.pop(message.failed.request_id, None)
            if each is not None:
                each.waiter.on_refused(message.failed.to_error())
        elif type(message) is Fleet:
            self._fleet = message
            self._told.set()
            for listener in self._listeners:
                listener.on_fleet(message)
        elif type(message) is HandOver:
            for listener in self._listeners:
                listener.on_hand_over(message.replica_id)
        elif type(message) is Answer:
            future = self._questions.get(message.nonce)
            if future is not None and not future.done():
                future.set_result(message)
        elif type(message) is Hung and self._on_hang is not None:
            self._on_hang(message.replica_id, message.pid)

    def lose(self, link: Link[FromRouter], reason: str) -> None:
        """The router has gone; whoever waits goes on waiting, whoever asked is told."""
        if self._link is not link:
            return
        self._link = None
        self._connected.clear()
        if not self._closing:
            self._log.warning("the router's connection ended (%s); connecting again", reason)
        for future in self._questions.values():
            if not future.done():
                future.set_exception(UnavailableError(f"the router went away ({reason})"))


class _Waiting:
    """A request that no router has answered yet."""

    __slots__ = ("route", "since", "waiter")

    def __init__(self, route: Route, waiter: Waiter, since: float) -> None:
        self.route = route
        self.waiter = waiter
        self.since = since
