"""One request on its way: placed, sent, and placed again when its replica fails.

    submit ──► waiting ──► running ──► ended            waiting: in the router's queue
                  ▲  placed    │  failed, hand-over
                  └────────────┘  the samples that have not ended go on elsewhere, each from its last token

A flight keeps the tokens of every sample that has not ended. Before the first token the same request is
sent again; afterwards each such sample is sent alone, its output so far behind the prompt
(Request.num_output_tokens), so that the next token is the one that would have come. Tokens reach the sink
once each: they are noted as they are handed on, and what a former worker still says falls on deaf ears.

Times are seconds of the dispatcher's clock.
"""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from headrace.core.errors import EngineError, HeadraceError, UnavailableError
from headrace.core.messages import Output, Timing
from headrace.core.request import Request
from headrace.core.routing import ModelInfo, Outcome, Placement, Route
from headrace.router.continuation import block_ids_with, continued, end_of
from headrace.router.leg import Leg
from headrace.router.worker import Worker

if TYPE_CHECKING:
    from headrace.router.dispatcher import Dispatcher
    from headrace.router.external.text_worker import TextLease, TextWorker

CONNECT_S = 5.0
"""How long a placed request waits for this process's own connection to the replica."""

RETRY_S = 0.01

MAX_REFUSALS = 8
"""Replicas that may answer that they just began to drain, before a request gives up."""


class Sink(Protocol):
    """Takes what one request produces. Nothing is called after ``abort``, and from within ``submit`` only
    ``on_started``."""

    def on_started(self) -> None:
        """It was sent to a replica that takes tokens; again after each rescue."""

    def on_outputs(self, outputs: list[Output]) -> None:
        """New tokens, each exactly once; the last of a sample come with its ``finish_reason``. After a
        rescue that may be an Output without tokens."""

    def on_error(self, error: HeadraceError) -> None:
        """The request has ended unfinished; nothing follows."""

    def on_text_worker(self, worker: TextWorker, lease: TextLease) -> None:
        """It was placed on a server that takes text only: the sink forwards the caller's body itself."""


class Flight:
    """One submitted request; made by ``Dispatcher.submit``."""

    __slots__ = (
        "_alone",
        "_caller_id",
        "_connecting",
        "_dispatcher",
        "_excluded",
        "_has_place",
        "_lease_began_at",
        "_lease_num_tokens",
        "_leg",
        "_num_refusals",
        "_num_tokens",
        "_samples",
        "_sink",
        "_submitting",
        "_worker",
        "_worker_id",
        "attempt",
        "ended",
        "first_token_at",
        "last_token_at",
        "lease_placed_at",
        "num_rescues",
        "placed_at",
        "placement",
        "request",
        "submitted_at",
        "timing",
    )

    def __init__(self, dispatcher: Dispatcher, request: Request, sink: Sink, caller_id: str) -> None:
        self.request = request
        self.placement: Placement | None = None  # the latest; None while it waits for one
        self.submitted_at = dispatcher.clock()
        self.placed_at = 0.0  # the first time
        self.first_token_at = 0.0
        self.last_token_at = 0.0
        self.timing: Timing | None = None  # of the first token
        self.num_rescues = 0
        self.ended = False
        self._dispatcher = dispatcher
        self._sink = sink
        self._caller_id = caller_id
        self.attempt = 0
        self._excluded: list[str] = []
        self._num_refusals = 0
        self._alone = False  # not split any more
        self._num_tokens = 0
        first = request.sample_index
        # those that have not ended, with their output
        self._samples = {index: array("I") for index in range(first, first + request.sampling.n)}
        self._has_place = False  # in the router: waiting for a lease, or holding one
        self.lease_placed_at = 0.0
        self._lease_began_at = 0.0
        self._lease_num_tokens = 0
        self._leg: Leg | None = None
        self._worker: Worker | None = None
        self._worker_id = ""  # what the worker calls the request
        self._connecting: asyncio.TimerHandle | None = None
        self._submitting = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    # Called by whoever submitted it

    def abort(self) -> None:
        """Stops the request wherever it is; the sink hears nothing more of it."""
        self._end("aborted")

    def abort_sample(self, sample_index: int) -> None:
        """Stops one sample, as when a stop string was found in it."""
        if self._samples.pop(sample_index, None) is None:
            return
        if self._worker is not None:
            self._worker.abort(self._worker_id, sample_index)
        if not self._samples:
            self._end("finished" if self._num_tokens else "aborted")

    # Called by the dispatcher

    def start(self) -> None:
        """Asks for the first placement."""
        self._submitting = True
        self._place()
        self._submitting = False

    def hand_over(self) -> None:
        """Leaves its replica, which is about to stop. With no move left it stays while the replica does."""
        if self._worker is None or self.num_rescues >= self._dispatcher.config.max_rescues:
            return
        self._leave("aborted")
        self.num_rescues += 1
        assert self.placement is not None
        self._move(self.placement.replica_id)

    def fail(self, error: HeadraceError) -> None:
        """Ends the request with an error."""
        if self.ended:
            return
        self._end("aborted")
        if self._submitting:
            self._dispatcher.loop.call_soon(self._tell_error, error)
        else:
            self._tell_error(error)

    def _tell_error(self, error: HeadraceError) -> None:
        try:
            self._sink.on_error(error)
        except Exception:  # nothing more can be said to it, and others wait for their turn
            self._dispatcher.log.exception("request %s: its error cannot be told", self.request.request_id)

    # Called by the placer

    def on_placed(self, placement: Placement) -> None:
        """A replica and a lease on it."""
        now = self._dispatcher.clock()
        self.placement = placement
        self.placed_at = self.placed_at or now
        self.lease_placed_at = now
        self._launch(now + CONNECT_S)

    def on_refused(self, error: HeadraceError) -> None:
        """There is no replica for it, or none became free in time."""
        self._has_place = False
        self.fail(error)

    def _place(self) -> None:
        self._lease_began_at = 0.0
        self._lease_num_tokens = 0
        self._has_place = True
        self._dispatcher.placer.place(self._route(), self)

    def _route(self) -> Route:
        request = self.request
        num_prompt_tokens, block_ids = len(request.prompt) // 4, request.block_ids
        max_tokens = request.sampling.max_tokens
        if self._num_tokens:
            outputs = self._samples.values()
            num_prompt_tokens += max(map(len, outputs))
            if len(outputs) == 1:
                (output,) = outputs
                block_ids = block_ids_with(request, output, self._info())
            if max_tokens is not None:
                max_tokens -= min(map(len, outputs))
        return Route(
            request_id=request.request_id,
            model=request.model,
            num_prompt_tokens=num_prompt_tokens,
            block_ids=block_ids,
            caller_id=self._caller_id,
            num_samples=len(self._samples),
            max_tokens=max_tokens,
            tier=request.tier,
            session=request.session,
            deadline=request.deadline,
            attempt=self.attempt,
            exclude=self._excluded,
            whole=self._alone or (request.sampling.prompt_logprobs is not None and not self._num_tokens),
        )

    def _launch(self, deadline: float) -> None:
        """Sends the request to where it was placed, as soon as this process is connected there."""
        self._connecting = None
        assert self.placement is not None
        dispatcher, replica_id = self._dispatcher, self.placement.replica_id
        worker = dispatcher.worker(replica_id, self.placement.prefill_replica)
        if worker is None or not worker.alive:
            text_worker = dispatcher.text_worker(replica_id)
            if text_worker is not None and self._num_tokens:
                self._leave("aborted")
                self.fail(UnavailableError("the only server left takes text, and cannot go on from tokens"))
            elif text_worker is not None:
                leg = self._leg = Leg(self)
                # Not from within submit: the sink does not know its flight yet.
                dispatcher.loop.call_soon(leg.forward, self._sink, text_worker)
            elif dispatcher.clock() < deadline:
                dispatcher.hurry(replica_id)
                self._connecting = dispatcher.loop.call_later(RETRY_S, self._launch, deadline)
            elif worker is None and dispatcher.worker(replica_id) is not None:
                name = self.placement.prefill_replica
                self.on_prefill_failed(UnavailableError(f"replica {name} cannot be reached"), "replica_gone")
            else:
                self.on_failed(UnavailableError(f"replica {replica_id} cannot be reached"), "replica_gone")
            return
        self._worker = worker
        # Another name each time: what is still on its way from an earlier attempt at the same worker must not
        # be taken for this one's.
        request_id = self.request.request_id
        self._worker_id = f"{request_id}-r{self.attempt}" if self.attempt else request_id
        leg = self._leg = Leg(self)
        try:
            for request in self._requests():
                worker.submit(request, leg)
        except HeadraceError as error:
            gone = error.status == UnavailableError.status
            self.on_failed(error, "replica_gone" if gone else "caller_fault")
        else:
            self._sink.on_started()

    def _requests(self) -> list[Request]:
        """What is left to do: the request as it is before any token, else each open sample alone."""
        request = self.request
        assert self.placement is not None
        prefill_from = self.placement.prefill_address
        if self.attempt or prefill_from:
            request = replace(request, request_id=self._worker_id, prefill_from=prefill_from)
        if not self._num_tokens and len(self._samples) == request.sampling.n:
            return [request]
        return continued(request, self._samples, self._info(), has_begun=self._num_tokens > 0)

    def _info(self) -> ModelInfo | None:
        return self._dispatcher.info(self.request.model)

    # Called by the worker, through the leg

    def on_outputs(self, outputs: list[Output]) -> None:
        """Notes one step's tokens and hands them on."""
        now = self._dispatcher.clock()
        samples = self._samples
        num_tokens = 0
        stopped = False
        for output in outputs:
            if output.sample_index not in samples or output.finish_reason == "abort":
                outputs, stopped = self._sift(outputs)
                break
        for output in outputs:
            token_ids = output.token_ids
            samples[output.sample_index].extend(token_ids)
            num_tokens += len(token_ids)
            if output.finish_reason is not None:
                del samples[output.sample_index]
        if outputs:
            self._hand_on(outputs, num_tokens, now)
        if self.ended:
            return
        if not samples:
            self._end("finished")
        elif stopped:
            self.on_failed(UnavailableError("the engine stopped the request unfinished"), "replica_fault")

    def _hand_on(self, outputs: list[Output], num_tokens: int, now: float) -> None:
        self._num_tokens += num_tokens
        self._lease_num_tokens += num_tokens
        self.last_token_at = now
        if not self.first_token_at:
            self.first_token_at = now
            self.timing = outputs[0].timing
        self._tell(outputs)
        if not self._lease_began_at and self._has_place:
            self._lease_began_at = now
            num_cached, timing = outputs[0].num_cached_tokens, outputs[0].timing
            if not num_cached and timing is None and self.placement is not None:
                num_cached = self.placement.num_cached_tokens  # an engine that tells it later, or never
            ttft_s = now - self.lease_placed_at
            self._dispatcher.placer.began(self.request.request_id, ttft_s, num_cached, timing)

    def _tell(self, outputs: list[Output]) -> None:
        try:
            self._sink.on_outputs(outputs)
        except Exception as error:
            self._dispatcher.log.exception(
                "request %s: its answer cannot be written", self.request.request_id
            )
            self.fail(EngineError(f"the answer cannot be written: {type(error).__name__}: {error}"))

    def _sift(self, outputs: list[Output]) -> tuple[list[Output], bool]:
        """What may be handed on: not what belongs to samples that ended here earlier, and not the end of one
        that the engine stopped without being asked; whether there is such a one."""
        kept = []
        stopped = False
        for output in outputs:
            if output.sample_index not in self._samples:
                continue
            if output.finish_reason == "abort":
                stopped = True
                if not output.token_ids:
                    continue
                output = replace(output, finish_reason=None)
            kept.append(output)
        return kept, stopped

    def on_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The worker gave up; the request goes on elsewhere where that can help and is allowed."""
        assert self.placement is not None
        self._leave(outcome)
        self._fail_or_move(error, outcome, self.placement.replica_id)

    def on_prefill_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The prefill side of a pair gave up: another one may do it, or the decode side alone."""
        assert self.placement is not None
        self._leave("aborted", outcome)
        self._fail_or_move(error, outcome, self.placement.prefill_replica, alone=not self._alone)

    def _fail_or_move(
        self, error: HeadraceError, outcome: Outcome, failed_id: str, *, alone: bool = False
    ) -> None:
        """``alone``: once no other attempt is allowed, one that is not split still is."""
        dispatcher = self._dispatcher
        if outcome == "caller_fault":
            self.fail(error)
            return
        if outcome == "aborted":
            self._num_refusals += 1
            may_move = self._num_refusals <= MAX_REFUSALS
        else:
            may_move = self.num_rescues < dispatcher.config.max_rescues and (
                outcome == "replica_gone" or dispatcher.budget.take(dispatcher.clock())
            )
            self.num_rescues += may_move
        if not may_move and alone:
            may_move = self._alone = True
        if may_move:
            self._move(failed_id)
        else:
            self.fail(error)

    def text_began(self) -> None:
        """A server that takes text began to answer."""
        if not self._lease_began_at:
            now = self._lease_began_at = self.first_token_at = self._dispatcher.clock()
            expected = self.placement.num_cached_tokens if self.placement is not None else 0
            self._dispatcher.placer.began(self.request.request_id, now - self.lease_placed_at, expected)

    def text_ended(self, outcome: Outcome, num_output_tokens: int) -> None:
        """A server that takes text has answered, or was given up."""
        self.last_token_at = self._dispatcher.clock()
        self._lease_num_tokens = num_output_tokens
        self._end(outcome)

    # Moving and ending

    def _move(self, failed_id: str) -> None:
        """Places what has not ended again, without the replica that is to be avoided."""
        assert self.placement is not None
        replica_id = self.placement.replica_id
        self.attempt += 1
        if failed_id not in self._excluded:
            self._excluded.append(failed_id)
        self.placement = None
        self._dispatcher.left(replica_id)
        info = self._info()
        ends = [end_of(self.request, index, output, info) for index, output in self._samples.items()]
        complete = [output for output in ends if output is not None]
        if complete:
            for output in complete:
                del self._samples[output.sample_index]
            self._tell(complete)
            if self.ended:
                return
            if not self._samples:
                self._end("finished")
                return
        self._place()

    def _leave(self, outcome: Outcome, prefill_outcome: Outcome | None = None) -> None:
        """Ends the present attempt: nothing more comes of it, and the router knows how it went."""
        request_id = self.request.request_id
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        if self._leg is not None:
            self._leg.flight = None
            self._leg = None
        if self._worker is not None:
            worker, self._worker = self._worker, None
            if outcome != "finished":
                worker.abort(self._worker_id)
        if self._has_place:
            self._has_place = False
            decode_s = self.last_token_at - self._lease_began_at if self._lease_began_at else 0.0
            num_tokens = self._lease_num_tokens
            self._dispatcher.placer.release(request_id, outcome, num_tokens, decode_s, prefill_outcome)

    def _end(self, outcome: Outcome) -> None:
        if self.ended:
            return
        self.ended = True
        self._leave(outcome)
        self._samples = {}
        self._dispatcher.forget(self)
