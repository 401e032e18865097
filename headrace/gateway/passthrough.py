"""Bodies for servers that take text: forwarded as they come, answered as they answer.

    caller ── body ──► TextFlight (which server?) ──► Relay ── body ──► server
    caller ◄── bytes of each read, one write ─────── Relay ◄── answer ─ server

A stream's head goes out with its first whole event, so that until then another server can be tried; whole
events only, so that a stream which breaks ends with an error event of its own. Any other answer is collected
and sent when it is complete. While the caller does not read, the server is not read either.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core.errors import EngineError, HeadraceError, OverloadedError
from headrace.core.identity import block_identities
from headrace.core.routing import Route
from headrace.gateway.caller import MAX_SESSION_CHARS, wants_receipt
from headrace.gateway.errors import decode_error
from headrace.gateway.receipt import text_receipt
from headrace.gateway.sse import error_event, event, json_value
from headrace.router.external.faults import ServerFault

if TYPE_CHECKING:
    from headrace.core.routing import ModelInfo, Outcome
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.metrics import ModelCounters
    from headrace.gateway.state import Gateway, ServedModel
    from headrace.router.external.http_client import Call, Headers, HTTPFailure
    from headrace.router.external.text_worker import TextLease, TextWorker
    from headrace.router.text_flight import TextFlight
    from headrace.router.worker import TextPlacement

STALL_S = 60.0
"""How long a caller may leave its stream unread before it is ended."""

MAX_HELD_BYTES = 256 * 1024 * 1024
MAX_EVENT_BYTES = 16 * 1024 * 1024
TAIL_READS = 4
TAIL_BYTES = 2048
"""Of the last reads of an answer, where its usage and finish reason are found."""

_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_FORWARDED = frozenset({b"accept", b"content-type", b"traceparent", b"tracestate", b"x-session-id"})
_COMPLETION_TOKENS = re.compile(rb'"completion_tokens"\s*:\s*(\d+)')
_PROMPT_TOKENS = re.compile(rb'"prompt_tokens"\s*:\s*(\d+)')
_CACHED_TOKENS = re.compile(rb'"cached_tokens"\s*:\s*(\d+)')
_DONE = re.compile(rb"^data: ?\[DONE\]", re.MULTILINE)
_FINISH_REASON = re.compile(rb'"finish_reason"\s*:\s*"(\w+)"')


class _Body(msgspec.Struct):
    """The little that is read of a body: who it is for, and what makes its prefix."""

    model: str | None = None
    stream: bool | None = None
    messages: list[msgspec.Raw] | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    user: str | None = None
    prompt_cache_key: str | None = None


_body_decoder = msgspec.json.Decoder(_Body)
_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


async def pass_through(
    gateway: Gateway, served: ServedModel, exchange: Exchange, body: bytes, arrival: float
) -> None:
    """Answers a chat or completions request of a model whose replicas take text only."""
    fields = read_body(body)
    gateway.model(fields.model)
    info = gateway.require(served)
    relay = _Relay(gateway, served, exchange, body, fields, arrival)
    await relay.run(route_of(fields, served.model, info, exchange))


def forward_overflow(
    gateway: Gateway,
    exchange: Exchange,
    body: bytes,
    worker: TextWorker,
    lease: TextLease,
    on_done: Callable[[], None],
) -> Callable[[], None]:
    """Answers a token request that was placed on a server that takes text (``Sink.on_text_worker``).

    ``body`` is the caller's. Calls ``on_done`` once the answer is complete, broken or the caller has gone
    (not after ``lease.failed``, when the flight decides). Returns what aborts it.
    """
    fields = read_body(body)
    relay = _Relay(gateway, gateway.model(fields.model), exchange, body, fields, exchange.arrival)
    relay.on_done = on_done
    relay.on_text_worker(worker, lease)
    return relay.abort


def read_body(body: bytes) -> _Body:
    """The fields that matter here; InvalidRequestError for what is no JSON object or has them of a wrong
    type."""
    try:
        return _body_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise decode_error(error, body) from None


def route_of(fields: _Body, model: str, info: ModelInfo, exchange: Exchange) -> Route:
    """Where to: keyed by chunks of the conversation's text, four bytes counted as a token.

    Turn N is a prefix of turn N + 1, as messages are joined as they were written.
    """
    text = b"".join([fields.tools, *(fields.messages or ()), fields.prompt])
    max_tokens = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    named = [value for name, value in exchange.headers if name == b"x-session-id"]
    session = named[0].decode("latin-1")[:MAX_SESSION_CHARS] if named else None
    return Route(
        request_id=exchange.new_id(),
        model=model,
        num_prompt_tokens=len(text) // 4 + 1,
        block_ids=b"".join(block_identities(info.root_identity, text, info.block_size)),
        caller_id=exchange.request_id.decode(),
        num_samples=fields.n or 1,
        max_tokens=max_tokens,
        text_only=True,
        session=session or fields.prompt_cache_key or fields.user,
    )


class _Relay:
    """Carries one body to a server and its answer back. It is the TextSink of a flight and the receiver of
    the server's answer."""

    __slots__ = ("_arrival", "_body", "_call", "_done", "_exchange", "_fields", "_first", "_first_at",
                 "_flight", "_gateway", "_held", "_held_bytes", "_last_at", "_lease", "_metrics",
                 "_num_events", "_placed", "_receipt_due", "_response_headers", "_rest", "_stall", "_status",
                 "_streams", "_tail", "_worker", "on_done")  # fmt: skip

    def __init__(
        self,
        gateway: Gateway,
        served: ServedModel,
        exchange: Exchange,
        body: bytes,
        fields: _Body,
        arrival: float,
    ) -> None:
        self.on_done: Callable[[], None] | None = None
        self._gateway = gateway
        self._metrics: ModelCounters = served.metrics
        self._exchange = exchange
        self._body = body
        self._fields = fields
        self._arrival = arrival
        self._flight: TextFlight | None = None
        self._done: asyncio.Future[None] | None = None
        self._worker: TextWorker | None = None
        self._lease: TextLease | None = None
        self._placed: TextPlacement | None = None
        self._receipt_due = wants_receipt(exchange)
        self._call: Call | None = None
        self._stall: asyncio.TimerHandle | None = None
        self._reset()

    def _reset(self) -> None:
        """Nothing has come of an answer."""
        self._status = 0
        self._streams = False
        self._response_headers: Headers = []
        self._held: list[bytes] = []  # an answer that is sent as a whole
        self._held_bytes = 0
        self._rest = bytearray()  # an event that is not complete
        self._first = True
        self._first_at = 0.0
        self._tail: deque[bytes] = deque(maxlen=TAIL_READS)
        self._num_events = 0
        self._last_at = 0.0

    async def run(self, route: Route) -> None:
        """Answers; HeadraceError when nothing was sent yet."""
        self._done = asyncio.get_running_loop().create_future()
        self._flight = self._gateway.dispatcher.submit_text(route, self)
        self._exchange.watch(self._on_disconnect)
        try:
            await self._done
        finally:
            if not self._done.done():
                self._stop("aborted")

    def abort(self) -> None:
        """Gives the answer up: the server's connection is closed, and nothing more is sent."""
        if self._call is not None:
            self._stop("aborted")

    # From the flight (TextSink)

    def on_text_worker(self, worker: TextWorker, lease: TextLease) -> None:
        self._worker = worker
        self._lease = lease
        self._placed = lease.placed
        self._reset()
        exchange = self._exchange
        headers = [header for header in exchange.headers if header[0] in _FORWARDED]
        headers.append((b"x-request-id", exchange.request_id))
        try:
            self._call = worker.forward(
                exchange.path,
                headers,
                self._body,
                self._fields.model,
                self,
                ttft_s=self._placed.placement.ttft_s,
            )
        except HeadraceError as error:
            lease.failed(error, "replica_gone")

    def on_error(self, error: HeadraceError) -> None:
        if self._exchange.started:  # the gateway stops
            self._break(error, "aborted")
            return
        call, self._call = self._call, None
        if call is not None:
            call.abort()
        self._metrics.finished["error"] += 1
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)

    # From the server (Receiver)

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status
        self._first_at = time.perf_counter()
        self._response_headers = headers
        self._streams = status == 200 and any(
            name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
        )

    def on_body(self, data: bytes) -> None:
        if not self._streams:
            self._hold(data)
            return
        # Whole events only: a server that dies inside one leaves no half of it with the caller.
        rest = self._rest
        if rest or not data.endswith(_EVENT_ENDS):
            # No event ends in what is held, so that only its seam with what is new is looked at again.
            seam = bytes(rest[-3:])
            recent = seam + data
            ends = [at + len(mark) for mark in _EVENT_ENDS if (at := recent.rfind(mark)) >= 0]
            if not ends:
                rest += data
                if len(rest) > MAX_EVENT_BYTES:
                    self._refuse(f"the server sent an event of more than {MAX_EVENT_BYTES} bytes")
                return
            end = max(ends)
            data = bytes(rest[: len(rest) - len(seam)]) + recent[:end]
            self._rest = bytearray(recent[end:])
        now = time.perf_counter()
        if self._first:
            self._begin(now)
        else:
            self._metrics.inter_token_latency.observe(now - self._last_at)
        self._last_at = now
        self._num_events += data.count(b"\n\ndata:") + 1
        self._tail.append(data)
        if self._receipt_due and (found := _DONE.search(data)):
            data = data[: found.start()] + self._receipt_event(now) + data[found.start() :]
        self._exchange.send_raw(data)

    def on_end(self) -> None:
        exchange = self._exchange
        if not self._streams:
            self._send_whole()
            return
        if self._first:
            self._begin(time.perf_counter())
        rest = bytes(self._rest)
        self._tail.append(rest)
        if self._receipt_due and not rest:
            rest = self._receipt_event(time.perf_counter())  # a server that ends without a word
        exchange.send_raw(rest, last=True)
        self._finish("finished")

    def on_failed(self, failure: HTTPFailure) -> None:
        assert self._worker is not None
        fault = self._worker.fault_of_failure(failure)
        if self._exchange.started:
            self._break(fault.error, fault.outcome)
        else:
            self._give_back(fault)

    # On the way

    def _begin(self, now: float) -> None:
        """The first event: from here on the answer is this server's."""
        self._first = False
        assert self._lease is not None
        self._lease.began()
        self._first_at = now
        self._metrics.time_to_first_token.observe(now - self._arrival)
        exchange = self._exchange
        # Of no known length: an error event may have to follow.
        headers = [header for header in self._response_headers if header[0] != b"content-length"]
        exchange.start_raw(200, headers)
        exchange.watch_writable(self._pause, self._resume)

    def _hold(self, data: bytes) -> None:
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes > MAX_HELD_BYTES:
            self._refuse(f"the server's answer has more than {MAX_HELD_BYTES} bytes")

    def _send_whole(self) -> None:
        """An answer that does not stream: as it is, unless it is the server's own failure."""
        assert self._worker is not None
        body = b"".join(self._held)
        if self._status >= 500:
            self._give_back(self._worker.fault_of_status(self._status, body))
            return
        if self._receipt_due and self._status == 200:
            body = self._with_receipt(body)
        headers = [header for header in self._response_headers if header[0] != b"content-length"]
        headers.append((b"content-length", b"%d" % len(body)))
        self._exchange.start_raw(self._status, headers)
        self._exchange.send_raw(body, last=True)
        self._tail.append(body)
        if self._status >= 400:
            self._gateway.metrics.count_error(self._status, "invalid_request_error")
            self._metrics.finished["error"] += 1
            self._stop("caller_fault")
        else:
            self._finish("finished")

    def _receipt(self, now: float) -> dict[str, Any]:
        assert self._placed is not None
        return text_receipt(
            self._exchange.request_id.decode(),
            self._placed,
            arrival=self._arrival,
            first_at=self._first_at or now,
            end=now,
        )

    def _receipt_event(self, now: float) -> bytes:
        """The receipt in a chunk of its own, the last before DONE."""
        self._receipt_due = False
        is_chat = self._exchange.path.endswith("/chat/completions")
        chunk: dict[str, Any] = {
            "id": self._exchange.request_id.decode(),
            "object": "chat.completion.chunk" if is_chat else "text_completion",
            "created": int(time.time()),
            "model": self._fields.model or "",
            "choices": [],
            "receipt": self._receipt(now),
        }
        return event(json_value(chunk))

    def _with_receipt(self, body: bytes) -> bytes:
        """A whole answer with the receipt behind its other fields, which stay as they were written."""
        try:
            fields = _fields_decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return body
        fields["receipt"] = msgspec.Raw(json_value(self._receipt(time.perf_counter())))
        return msgspec.json.encode(fields)

    def _finish(self, outcome: Outcome) -> None:
        """The answer is complete: what it says of itself is counted."""
        metrics, tail = self._metrics, b"".join([piece[-TAIL_BYTES:] for piece in self._tail])
        prompt, cached = _number(_PROMPT_TOKENS, tail), _number(_CACHED_TOKENS, tail)
        generated = _number(_COMPLETION_TOKENS, tail) or (self._num_events if self._streams else 0)
        now = time.perf_counter()
        metrics.e2e_request_latency.observe(now - self._arrival)
        metrics.request_generation_tokens.observe(generated)
        metrics.generation_tokens += generated
        if prompt:
            metrics.prompt_tokens += prompt
            metrics.cached_prompt_tokens += cached
            metrics.request_prompt_tokens.observe(prompt)
        found = _FINISH_REASON.findall(tail)
        metrics.finished["length" if found and found[-1] == b"length" else "stop"] += 1
        self._end(outcome, generated)

    def _refuse(self, what: str) -> None:
        """The server's answer is not one that can go on."""
        error = EngineError(what)
        if self._exchange.started:
            self._break(error)
        else:
            self._give_back(ServerFault(error, "replica_fault"))

    def _give_back(self, fault: ServerFault) -> None:
        """Nothing was sent yet: the flight tries elsewhere, or ends with ``on_error``."""
        call, self._call = self._call, None
        if call is not None:
            call.abort()
        assert self._lease is not None
        self._lease.failed(fault.error, fault.outcome)

    def _break(self, error: HeadraceError, outcome: Outcome = "replica_fault") -> None:
        """The stream cannot go on: its last event says why."""
        self._metrics.finished["error"] += 1
        self._gateway.metrics.count_error(error.status, error.kind)
        self._exchange.send_raw(error_event(error), last=True)
        self._stop(outcome)

    def _pause(self) -> None:
        if self._call is not None:
            self._call.pause()
        if self._stall is None:
            self._stall = asyncio.get_running_loop().call_later(STALL_S, self._give_up_on_reader)

    def _resume(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        if self._call is not None:
            self._call.resume()

    def _give_up_on_reader(self) -> None:
        self._stall = None
        error = OverloadedError(
            f"the answer was not read for {STALL_S:g} s", hint="Read faster.", code="slow_reader"
        )
        self._exchange.keep_alive = False
        self._break(error, "aborted")

    def _on_disconnect(self) -> None:
        self._metrics.finished["abort"] += 1
        self._stop("aborted")

    # How it ends

    def _stop(self, outcome: Outcome) -> None:
        """Ends it before the server's answer did, whose connection is closed."""
        call, self._call = self._call, None
        if call is not None:
            call.abort()
        self._end(outcome, self._num_events if self._streams else 0)

    def _end(self, outcome: Outcome, num_output_tokens: int) -> None:
        self._call = None
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.release(outcome, num_output_tokens)
        if self._flight is not None and not self._flight.ended:
            self._flight.abort()
        if self._done is not None and not self._done.done():
            self._done.set_result(None)
        if self.on_done is not None:
            self.on_done()


def _number(pattern: re.Pattern[bytes], text: bytes) -> int:
    """The last number that the pattern finds, 0 if none."""
    found = pattern.findall(text)
    return int(found[-1]) if found else 0
