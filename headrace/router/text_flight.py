"""A request whose body passes through as text: placed, forwarded, and placed again while that is safe.

waiting ──► forwarded ──► ended        safe: nothing of an answer has reached the caller
    ▲            │ failed
    └────────────┘
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.core.routing import Outcome, Placement, Route
from headrace.router.worker import TextPlacement

if TYPE_CHECKING:
    from headrace.router.dispatcher import Dispatcher
    from headrace.router.external.text_worker import TextLease, TextWorker

CONNECT_S = 5.0
"""How long a placed body waits for this process to learn of the server."""

RETRY_S = 0.01


class TextSink(Protocol):
    """Takes the placements of one body. Nothing is called from within ``start``, nothing after ``abort``."""

    def on_text_worker(self, worker: TextWorker, lease: TextLease) -> None:
        """It was placed: forward the body; once more after ``lease.failed``."""

    def on_error(self, error: HeadraceError) -> None:
        """It has ended unanswered; nothing follows."""


class TextFlight:
    """One body; ``Dispatcher.submit_text`` makes it. Times are of the dispatcher's clock."""

    __slots__ = ("_began_at", "_connecting", "_dispatcher", "_has_place", "_leg", "_num_moves", "_sink",
                 "_submitting", "ended", "first_at", "placed_at", "placement", "request_id", "route",
                 "submitted_at")  # fmt: skip

    def __init__(self, dispatcher: Dispatcher, route: Route, sink: TextSink) -> None:
        self.route = route
        self.request_id = route.request_id
        self.placement: Placement | None = None
        self.ended = False
        self.submitted_at = dispatcher.clock()
        self.placed_at = 0.0
        self.first_at = 0.0
        self._dispatcher = dispatcher
        self._sink = sink
        self._num_moves = 0
        self._has_place = False
        self._began_at = 0.0
        self._leg: _TextLeg | None = None
        self._connecting: asyncio.Handle | None = None
        self._submitting = False

    def start(self) -> None:
        """Asks for the first placement."""
        self._submitting = True
        self._place()
        self._submitting = False

    def abort(self) -> None:
        """Gives the request up, wherever it is; whoever forwards closes the server's connection itself."""
        self._end("aborted", 0)

    def fail(self, error: HeadraceError) -> None:
        """Ends the request with an error."""
        if self.ended:
            return
        self._end("aborted", 0)
        if self._submitting:
            self._dispatcher.loop.call_soon(self._sink.on_error, error)
        else:
            self._sink.on_error(error)

    def hand_over(self) -> None:
        """Text cannot go on elsewhere: it stays as long as its server does."""

    # Called by the placer

    def on_placed(self, placement: Placement) -> None:
        """A server and a lease on it."""
        self.placement = placement
        self.placed_at = self._dispatcher.clock()
        self._launch(self.placed_at + CONNECT_S)

    def on_refused(self, error: HeadraceError) -> None:
        """There is no server for it, or none became free in time."""
        self._has_place = False
        self.fail(error)

    def _launch(self, deadline: float) -> None:
        self._connecting = None
        assert self.placement is not None
        dispatcher = self._dispatcher
        worker = dispatcher.text_worker(self.placement.replica_id)
        if worker is not None and worker.alive:
            leg = self._leg = _TextLeg(self)
            if self._submitting:
                self._connecting = dispatcher.loop.call_soon(self._sink.on_text_worker, worker, leg)
            else:
                self._sink.on_text_worker(worker, leg)
        elif dispatcher.clock() < deadline:
            self._connecting = dispatcher.loop.call_later(RETRY_S, self._launch, deadline)
        else:
            replica_id = self.placement.replica_id
            self._failed(UnavailableError(f"replica {replica_id} cannot be reached"), "replica_gone")

    # Called by the leg

    def _began(self) -> None:
        if not self._began_at:
            now = self._began_at = self._dispatcher.clock()
            self.first_at = self.first_at or now
            expected = self.placement.num_cached_tokens if self.placement is not None else 0
            self._dispatcher.placer.began(self.request_id, now - self.placed_at, expected)

    def _failed(self, error: HeadraceError, outcome: Outcome) -> None:
        assert self.placement is not None
        dispatcher, replica_id = self._dispatcher, self.placement.replica_id
        self._leave(outcome, 0)
        may_move = (
            outcome != "caller_fault"
            and self._num_moves < dispatcher.config.max_rescues
            and (outcome == "replica_gone" or dispatcher.budget.take(dispatcher.clock()))
        )
        if not may_move:
            self.fail(error)
            return
        self._num_moves += 1
        self.placement = None
        dispatcher.left(replica_id)
        route = self.route
        self.route = replace(route, attempt=route.attempt + 1, exclude=[*route.exclude, replica_id])
        self._place()

    def _place(self) -> None:
        self._began_at = 0.0
        self._has_place = True
        self._dispatcher.placer.place(self.route, self)

    def _leave(self, outcome: Outcome, num_output_tokens: int) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._leg is not None:
            self._leg.flight = None
            self._leg = None
        if self._has_place:
            self._has_place = False
            decode_s = self._dispatcher.clock() - self._began_at if self._began_at else 0.0
            self._dispatcher.placer.release(self.request_id, outcome, num_output_tokens, decode_s)

    def _end(self, outcome: Outcome, num_output_tokens: int) -> None:
        if not self.ended:
            self.ended = True
            self._leave(outcome, num_output_tokens)
            self._dispatcher.forget(self)


class _TextLeg:
    """One attempt's TextLease; deaf once the flight has moved on or ended."""

    __slots__ = ("flight",)

    def __init__(self, flight: TextFlight) -> None:
        self.flight: TextFlight | None = flight

    @property
    def placed(self) -> TextPlacement:
        flight = self.flight
        assert flight is not None and flight.placement is not None
        return TextPlacement(flight.placement, flight.submitted_at, flight.placed_at, flight.route.attempt)

    def began(self) -> None:
        if self.flight is not None:
            self.flight._began()

    def release(self, outcome: Outcome, num_output_tokens: int = 0) -> None:
        if self.flight is not None:
            self.flight._end(outcome, num_output_tokens)

    def failed(self, error: HeadraceError, outcome: Outcome) -> None:
        if self.flight is not None:
            self.flight._failed(error, outcome)
