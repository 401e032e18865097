"""One HTTP request's samples, from the submit to the last token.

Generation ── Flight (one per engine request of the body) ── whichever replica it is on
  └─ Sample (one per choice) ── TextStream (detokenizing, stop strings)

Everything on the token path is a call: a step's outputs come in, their events go out to the transport at the
end of the event loop's turn. The handler sleeps on one future until the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.core.errors import HeadraceError, OverloadedError, UnavailableError
from headrace.core.messages import Output, TokenLogprobs
from headrace.core.request import Request
from headrace.gateway.passthrough import forward_overflow
from headrace.gateway.sse import DONE
from headrace.text.stream import TextStream, TokenText

if TYPE_CHECKING:
    from headrace.core.routing import Placement
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.shape import Shape
    from headrace.gateway.state import Gateway, ServedModel
    from headrace.router.external.text_worker import TextLease, TextWorker
    from headrace.router.flight import Flight

INLINE_ENTRIES = 4000
"""Log-probabilities above which a response is written in a worker thread, not in the loop."""


class Sample:
    """One choice of the response and its state."""

    __slots__ = ("finish_reason", "first_at", "held", "index", "last_at", "logprobs", "num_tokens",
                 "prompt_logprobs", "request", "stop_reason", "text_stream")  # fmt: skip

    def __init__(self, index: int, request: Request, text_stream: TextStream) -> None:
        self.index = index
        self.request = request
        self.text_stream = text_stream
        self.num_tokens = 0
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.first_at = 0.0
        self.last_at = 0.0
        self.held: list[int] = []  # tokens of a whole answer, which become text at its end
        self.logprobs: list[TokenText] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None


class First(NamedTuple):
    """What is known of an engine request when its first token has come: the placement that it came from."""

    at: float
    placed_at: float
    placement: Placement | None
    num_cached_tokens: int


class Generation:
    """Runs a body's engine requests and writes what comes back. It is the Sink of their flights."""

    def __init__(
        self,
        gateway: Gateway,
        served: ServedModel,
        exchange: Exchange,
        shape: Shape,
        requests: Sequence[Request],
        *,
        body: bytes,
        streams: bool,
        arrival: float,
        text_s: float,
        text_offsets: Sequence[int] = (),
    ) -> None:
        """``text_offsets``: characters before the output of each request, where its prompt is echoed;
        ``text_s``: seconds that the text work took; ``body``: the caller's, for servers that take text."""
        assert served.prompts is not None, "a model without a tokenizer is passed through"
        self.requests = requests
        self.samples: list[Sample] = []
        self.flights: dict[str, Flight] = {}
        self.arrival = arrival
        self.text_s = text_s
        self.caller_id = exchange.request_id.decode()
        self._gateway = gateway
        self._exchange = exchange
        self._shape = shape
        self._body = body
        self._streams = streams
        self._metrics = served.metrics
        self._tokenizer = tokenizer = served.prompts.tokenizer
        self._escaped = served.prompts.escaped(requests[0].sampling.skip_special_tokens)
        self.firsts: dict[str, First] = {}
        self._of: dict[str, list[Sample]] = {}
        for number, request in enumerate(requests):
            offset = text_offsets[number] if text_offsets else 0
            group = [
                Sample(
                    len(self.samples) + index,
                    request,
                    TextStream(tokenizer, request.sampling, text_offset=offset),
                )
                for index in range(request.sampling.n)
            ]
            self._of[request.request_id] = group
            self.samples += group
        self._unfinished = len(self.samples)
        self._num_waiting = len(requests)
        recorder = gateway.recorder
        self._recording = None if recorder is None else recorder.begin(shape.response_id, served)
        self._forwarded: Callable[[], None] | None = None  # what aborts a body that went on as text
        self._observe_gap = served.metrics.inter_token_latency.observe
        self._unsent: list[bytes] = []  # parts of events that go out at the end of this turn
        self._lags = False  # the transport holds more than a little that its reader has not taken
        self._over = False
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submitted_at = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return sum([request.num_prompt_tokens for request in self.requests])

    @property
    def num_cached_tokens(self) -> int:
        return sum([first.num_cached_tokens for first in self.firsts.values()])

    def samples_of(self, request_id: str) -> list[Sample]:
        """Those of one engine request, in order."""
        return self._of[request_id]

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = self.num_prompt_tokens
        completion = sum([sample.num_tokens for sample in self.samples])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    async def run(self) -> None:
        """Answers; raises the HeadraceError that ended it, before or after something was sent."""
        exchange = self._exchange
        if self._streams:
            exchange.watch_writable(self._on_full, self._on_room)
        self.submitted_at = time.perf_counter()
        for request in self.requests:
            flight = self._gateway.dispatcher.submit(request, self, caller_id=self.caller_id)
            self.flights[request.request_id] = flight
        exchange.watch(self._on_disconnect)
        try:
            await self._done
        finally:
            if not self._over:
                self._over = True
                self._unsent = []
                self._abort()
            self._metrics.num_rescues += sum([flight.num_rescues for flight in self.flights.values()])
        if self._recording is not None and not self._unfinished:
            record = self._recording.record(self)
            if record is not None and self._gateway.recorder is not None:
                self._gateway.recorder.keep(record)
        if not self._streams and not self._unfinished:  # else the caller has gone, or was answered elsewhere
            await self._respond()

    # What flights call

    def on_started(self) -> None:
        """The stream begins once no request waits for a place: until then it may be refused with a status."""
        self._num_waiting -= 1
        if not self._num_waiting and self._streams and not self._exchange.started:
            self._exchange.start_events(self._shape.opening())

    def on_outputs(self, outputs: list[Output]) -> None:
        if self._over:
            return
        if self._recording is not None:
            outputs = self._recording.take(outputs, self._of)
        try:
            self._advance(outputs)
        except HeadraceError as error:
            self.on_error(error)
        except Exception as error:
            # Our own mistake must not reach the replica's connection: the handler raises it.
            self._end(error)

    def on_error(self, error: HeadraceError) -> None:
        if not self._over:
            self._metrics.finished["error"] += self._unfinished
            self._end(error)

    def on_text_worker(self, worker: TextWorker, lease: TextLease) -> None:
        if len(self.requests) > 1 or self._exchange.started:
            error = UnavailableError("only a request of one prompt can go to a server that takes text")
            lease.failed(error, "replica_gone")
            return
        self._forwarded = forward_overflow(
            self._gateway, self._exchange, self._body, worker, lease, self._on_forwarded
        )

    # On the way

    def _advance(self, outputs: list[Output]) -> None:
        """Text for new tokens, sample by sample; counts them and stops what a stop string ended."""
        now = time.perf_counter()
        shape = self._shape
        parts: list[bytes] = []
        for output in outputs:
            sample = self._of[output.request_id][output.sample_index]
            if sample.finish_reason is not None:
                continue
            if sample.last_at:
                self._observe_gap(now - sample.last_at)
            else:
                self._begin(sample, output, now)
            sample.last_at = now
            token_ids = output.token_ids
            if output.finish_reason is not None or not sample.text_stream.transparent:
                parts.append(self._push(sample, output, now))
                continue
            if not self._streams:
                sample.held += token_ids
            else:
                text = self._escaped[token_ids[0]] if len(token_ids) == 1 else self._whole_text(token_ids)
                if text is None:
                    parts.append(self._push(sample, output, now))
                    continue
                if text:
                    parts += (shape.before[sample.index], text, shape.after)
            sample.num_tokens += len(token_ids)
            self._metrics.generation_tokens += len(token_ids)
        if self._streams:
            if parts and not self._unsent:
                self._gateway.outbox.add(self._flush)
            self._unsent += parts
        if not self._unfinished:
            self._complete()

    def _flush(self) -> None:
        """Sends what was written since the last time."""
        parts, self._unsent = self._unsent, []
        data = b"".join(parts)
        if not data:
            return
        exchange = self._exchange
        if not exchange.started:
            exchange.start_events(self._shape.opening())
        exchange.send_events(data)
        if self._lags and not self._over and exchange.unsent_bytes() > self._gateway.max_backlog_bytes:
            self._give_up_on_reader()

    def _whole_text(self, token_ids: list[int]) -> bytes | None:
        """Several tokens as they stand in a JSON string; None when one is not a text of its own."""
        texts: list[bytes] = []
        for token_id in token_ids:
            text = self._escaped[token_id]
            if text is None:
                return None
            texts.append(text)
        return b"".join(texts)

    def _push(self, sample: Sample, output: Output, now: float) -> bytes:
        """What a TextStream makes of an output, as an event."""
        if output.finish_reason == "abort":
            raise UnavailableError("the engine stopped the request before it was finished")
        if output.num_cached_tokens:
            self._learn_cached(output)
        token_ids = output.token_ids
        num_counted = len(sample.held)
        if num_counted:
            token_ids = sample.held + token_ids
            sample.held = []
        delta = sample.text_stream.push(token_ids, output.logprobs, output.finish_reason, output.stop_token)
        sample.num_tokens += delta.num_tokens - num_counted
        self._metrics.generation_tokens += delta.num_tokens - num_counted
        if delta.finish_reason is not None:
            self._finish(sample, delta.finish_reason, delta.stop_reason, now)
        if delta.needs_abort:
            self.flights[output.request_id].abort_sample(output.sample_index)
        if self._streams:
            return self._shape.event(sample, delta)
        if delta.logprobs:
            sample.logprobs += delta.logprobs
        return b""

    def _learn_cached(self, output: Output) -> None:
        """Servers of others tell only with the last tokens what was cached; after a rescue that is of another
        prompt."""
        first = self.firsts[output.request_id]
        more = output.num_cached_tokens - first.num_cached_tokens
        if more > 0 and not self.flights[output.request_id].num_rescues:
            self.firsts[output.request_id] = first._replace(num_cached_tokens=output.num_cached_tokens)
            self._metrics.cached_prompt_tokens += more

    def _complete(self) -> None:
        """Every sample has ended: the last events, or a handler that writes the whole response."""
        if self._streams:
            parts, self._unsent = self._unsent, []
            exchange = self._exchange
            if not exchange.started:
                exchange.start_events(self._shape.opening())
            exchange.send_events(b"".join([*parts, self._shape.closing(self), DONE]), last=True)
        self._end()

    def _begin(self, sample: Sample, output: Output, now: float) -> None:
        metrics = self._metrics
        metrics.time_to_first_token.observe(now - self.arrival)
        if output.prompt_logprobs is not None:
            for each in self._of[output.request_id]:
                each.prompt_logprobs = output.prompt_logprobs
        if output.request_id not in self.firsts:
            flight = self.flights[output.request_id]
            self.firsts[output.request_id] = First(
                now, flight.lease_placed_at, flight.placement, output.num_cached_tokens
            )
            num_prompt = sample.request.num_prompt_tokens
            metrics.prompt_tokens += num_prompt
            metrics.cached_prompt_tokens += output.num_cached_tokens
            metrics.request_prompt_tokens.observe(num_prompt)
        sample.first_at = now

    def _finish(self, sample: Sample, reason: str, stop_reason: int | str | None, now: float) -> None:
        metrics = self._metrics
        self._unfinished -= 1
        sample.finish_reason = reason
        if (
            isinstance(stop_reason, int)
            and stop_reason in self._tokenizer.eos_token_ids
            and stop_reason not in sample.request.sampling.stop_token_ids
        ):
            stop_reason = None
        sample.stop_reason = stop_reason
        metrics.finished[reason] += 1
        metrics.e2e_request_latency.observe(now - self.arrival)
        metrics.request_generation_tokens.observe(sample.num_tokens)
        if sample.num_tokens > 1:
            metrics.time_per_output_token.observe((now - sample.first_at) / (sample.num_tokens - 1))

    # How it ends

    def _end(self, error: Exception | None = None) -> None:
        """Wakes the handler; nothing that comes later counts."""
        self._over = True
        self._flush()
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
        if self._unfinished:
            self._abort()

    def _abort(self) -> None:
        for flight in self.flights.values():
            flight.abort()
        if self._forwarded is not None:
            self._forwarded()

    def _on_disconnect(self) -> None:
        if not self._over:
            self._metrics.finished["abort"] += self._unfinished
            self._end()

    def _on_forwarded(self) -> None:
        self._forwarded = None
        if not self._over:
            self._over = True
            self._done.set_result(None)

    def _on_full(self) -> None:
        self._lags = True

    def _on_room(self) -> None:
        self._lags = False

    def _give_up_on_reader(self) -> None:
        """Ends the answer of a caller that does not read, and its connection behind it."""
        self._exchange.keep_alive = False
        self.on_error(
            OverloadedError(
                f"the answer was not read: more than {self._gateway.max_backlog_bytes} bytes of it waited",
                hint="Read faster, or raise --max-response-backlog-mb.",
                code="slow_reader",
            )
        )

    async def _respond(self) -> None:
        if self._num_entries() > INLINE_ENTRIES:
            body = await self._gateway.texts.off_loop(lambda: self._shape.response(self))
        else:
            body = self._shape.response(self)
        self._exchange.send_json(body)

    def _num_entries(self) -> int:
        """Log-probabilities that the response describes, an echoed prompt's tokens included."""
        num_entries = 0
        for sample in self.samples:
            sampling = sample.request.sampling
            if sampling.prompt_logprobs is not None:
                num_entries += sample.request.num_prompt_tokens * (1 + sampling.prompt_logprobs)
            if sampling.logprobs is not None:
                num_entries += sample.num_tokens * (1 + sampling.logprobs)
        return num_entries
