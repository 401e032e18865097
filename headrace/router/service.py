"""The router as a process of its own: one LocalPlacer behind a Unix socket, for gateways and the supervisor.

    gateway 1 ══► ┐
    gateway 2 ══► ┤ RouterService ──► LocalPlacer ──► Router          one _Peer a connection
    supervisor ═► ┘                        └══ a connection to each replica: stats and cache events

What a peer holds ends with its connection. A router that has just started knows nothing: it answers nobody
until the supervisor has named the fleet and its replicas have spoken, or a while has passed ("settled"). So
gateways keep what they knew from its former life, and their requests wait rather than being refused.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import Any

from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Failed
from headrace.core.routing import (
    Answer,
    Ask,
    Attach,
    Began,
    Fleet,
    HandOver,
    Hung,
    Place,
    Placed,
    Placement,
    Refused,
    Release,
    RemoveEndpoint,
    Report,
    Route,
    SetEndpoint,
    ToRouter,
)
from headrace.core.wire import router_decoder
from headrace.router.link import Link
from headrace.router.placer import LocalPlacer, MakeMonitor

MAX_BACKLOG_BYTES = 64 * 1024 * 1024
"""Unread messages at which a peer is cut off. It comes back and says what it holds."""

SETTLE_S = 3.0
"""How long replicas may take to greet a new router before it answers without them."""

GRACE_S = 15.0
"""How long a new router waits for the supervisor."""


class RouterService:
    """Serves peers until closed; all in one event loop."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        log: logging.Logger,
        make_monitor: MakeMonitor | None = None,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        settle_s: float = SETTLE_S,
        grace_s: float = GRACE_S,
    ) -> None:
        self.placer = LocalPlacer(
            config, log=log, make_monitor=make_monitor, on_hang=self._on_hang, watch_idle=True
        )
        self._log = log
        self._max_backlog_bytes = max_backlog_bytes
        self._settle_s = settle_s
        self._grace_s = grace_s
        self._links: dict[Link[ToRouter], _Peer] = {}
        self._owners: dict[str, _Peer] = {}  # of leases and of waiting requests
        self._held: dict[str, Route] = {}  # until it is settled
        self._settled = False
        self._timer: asyncio.TimerHandle | None = None
        self._named = False  # an endpoint at least
        self._server: asyncio.Server | None = None
        self._loop: asyncio.AbstractEventLoop

    async def start(self, listener: socket.socket) -> None:
        """Accepts peers on a bound Unix socket."""
        self._loop = asyncio.get_running_loop()
        self.placer.start()
        self.placer.watch(self)
        self._timer = self._loop.call_later(self._grace_s, self._settle)
        self._server = await self._loop.create_unix_server(
            lambda: Link(self, router_decoder(), self._log), sock=listener
        )

    async def close(self) -> None:
        """Ends every connection; gateways wait for the next router."""
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self._links):
            link.end("the router is stopping")
        await self.placer.close()
        if self._server is not None:
            await self._server.wait_closed()

    # Peers (LinkOwner)

    def connected(self, link: Link[ToRouter]) -> None:
        """A peer, nameless yet."""
        self._links[link] = _Peer(link)

    def lose(self, link: Link[ToRouter], reason: str) -> None:
        """A peer has gone, and with it all that it held."""
        peer = self._links.pop(link)
        level = logging.WARNING if peer.held else logging.DEBUG
        self._log.log(level, "%s is gone (%s); it held %d requests", peer.name, reason, len(peer.held))
        for request_id in list(peer.held):
            self._release(request_id, peer)

    def receive(self, link: Link[ToRouter], message: ToRouter) -> None:
        """One message of a peer."""
        peer = self._links[link]
        if type(message) is Place:
            self._place(peer, message.route)
        elif type(message) is Began:
            if message.request_id in peer.held:
                self.placer.began(
                    message.request_id, message.ttft_s, message.num_cached_tokens, message.timing
                )
        elif type(message) is Release:
            self._release(message.request_id, peer, message)
        elif type(message) is Attach:
            self._attach(peer, message)
        elif type(message) is SetEndpoint:
            if not self._named:
                self._named = True
                self._settle_within(self._settle_s)
            self.placer.set_endpoint(message.endpoint)
        elif type(message) is RemoveEndpoint:
            self.placer.remove_endpoint(message.replica_id)
        elif type(message) is Report:
            peer.report = message.metrics
        elif type(message) is Ask:
            task = self._loop.create_task(self._answer(peer, message))
            peer.answers.add(task)
            task.add_done_callback(peer.answers.discard)

    def send(self, peer: _Peer, message: Any) -> None:
        """Writes to a peer, and cuts it off if it does not read."""
        link = peer.link
        link.send(message)
        if link.num_unsent_bytes() > self._max_backlog_bytes:
            # not from within: a broadcast iterates over the links
            self._loop.call_soon(link.end, f"it does not read: {link.num_unsent_bytes()} bytes wait")

    def _attach(self, peer: _Peer, message: Attach) -> None:
        peer.name = message.peer
        if message.leases:
            self._log.info("%s is back with %d requests that run", peer.name, len(message.leases))
        for lease in message.leases:
            self._own(lease.route.request_id, peer)
            self.placer.adopt(lease)
        if self._settled:
            self.send(peer, self.placer.fleet)

    def _own(self, request_id: str, peer: _Peer) -> None:
        former = self._owners.get(request_id)
        if former is not None:  # the same gateway, whose former connection has not ended here yet
            former.held.discard(request_id)
        self._owners[request_id] = peer
        peer.held.add(request_id)

    def _place(self, peer: _Peer, route: Route) -> None:
        request_id = route.request_id
        former = self._owners.get(request_id)
        if former is not None:
            self._release(request_id, former)
        self._own(request_id, peer)
        if self._settled:
            self.placer.place(route, _Waiter(self, peer, request_id))
        else:
            self._held[request_id] = route

    def _release(self, request_id: str, peer: _Peer, message: Release | None = None) -> None:
        if request_id not in peer.held:
            return
        self.disown(request_id, peer)
        if self._held.pop(request_id, None) is not None:
            return
        if message is None:
            self.placer.release(request_id, "aborted")
        else:
            self.placer.release(
                request_id,
                message.outcome,
                message.num_output_tokens,
                message.decode_s,
                message.prefill_outcome,
            )

    def disown(self, request_id: str, peer: _Peer) -> None:
        """A request has ended as far as the router is concerned."""
        peer.held.discard(request_id)
        self._owners.pop(request_id, None)

    async def _answer(self, peer: _Peer, ask: Ask) -> None:
        if ask.what == "status":
            status = await self.placer.status()
            names = sorted(each.name for each in self._links.values() if each.report)
            answer = Answer(ask.nonce, status=replace(status, gateways=names))
        elif ask.what == "why":
            answer = Answer(ask.nonce, decisions=await self.placer.why(ask.request_id))
        else:
            reports = [each.report for each in self._links.values() if each.report]
            answer = Answer(ask.nonce, reports=reports)
        self.send(peer, answer)

    # The fleet (FleetListener)

    def on_fleet(self, fleet: Fleet) -> None:
        """Tells everybody, unless that would make gateways forget what is still there."""
        if self._settled:
            self._broadcast(fleet)
        elif fleet.members and all(member.state == "ready" for member in fleet.members):
            # once what the supervisor says in one go has been read
            self._settle_within(0.0)

    def on_hand_over(self, replica_id: str) -> None:
        """Tells everybody."""
        self._broadcast(HandOver(replica_id))

    def _on_hang(self, replica_id: str, pid: int) -> None:
        self._broadcast(Hung(replica_id, pid))

    def _broadcast(self, message: Any) -> None:
        for peer in list(self._links.values()):
            self.send(peer, message)

    def _settle_within(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = self._loop.call_later(seconds, self._settle)

    def _settle(self) -> None:
        """From now on the router answers."""
        self._timer = None
        self._settled = True
        self._broadcast(self.placer.fleet)
        held, self._held = self._held, {}
        for request_id, route in held.items():
            peer = self._owners[request_id]
            self.placer.place(route, _Waiter(self, peer, request_id))


class _Peer:
    """One connection, and the requests that it holds or waits for."""

    __slots__ = ("answers", "held", "link", "name", "report")

    def __init__(self, link: Link[ToRouter]) -> None:
        self.link = link
        self.name = "a peer"
        self.held: set[str] = set()
        self.report = b""
        self.answers: set[asyncio.Task[None]] = set()


class _Waiter:
    """Tells a peer what became of one Place."""

    __slots__ = ("_peer", "_request_id", "_service")

    def __init__(self, service: RouterService, peer: _Peer, request_id: str) -> None:
        self._service = service
        self._peer = peer
        self._request_id = request_id

    def on_placed(self, placement: Placement) -> None:
        self._service.send(self._peer, Placed(placement))

    def on_refused(self, error: HeadraceError) -> None:
        self._service.disown(self._request_id, self._peer)
        self._service.send(self._peer, Refused(Failed.of_error(self._request_id, error)))
