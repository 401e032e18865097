"""One HTTP request's samples, from the submit to the last token.

Generation ── ReplicaStream (all engine requests of the body)
  └─ Sample (one per choice) ── TextStream (detokenizing, stop strings)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.core.messages import Output, TokenLogprobs
from headrace.core.request import Request
from headrace.gateway.sse import DONE, error_event
from headrace.text.stream import TextDelta, TextStream, TokenText

if TYPE_CHECKING:
    from headrace.gateway.exchange import Exchange
    from headrace.gateway.metrics import Metrics
    from headrace.gateway.prompts import Prompts
    from headrace.router.replica_client import ReplicaClient

INLINE_ENTRIES = 4000
"""Log-probabilities above which a response is written in a worker thread, not in the loop."""

CUT_AFTER_S = 30.0
"""How long a reader that was cut off may take to fetch what is buffered, before its connection closes."""


class Sample:
    """One choice of the response and its state."""

    __slots__ = ("finish_reason", "first_at", "index", "last_at", "logprobs", "num_tokens",
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
        self.logprobs: list[TokenText] = []
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None


class Shape(Protocol):
    """How an endpoint writes what is generated."""

    def opening(self) -> bytes:
        """Events sent before any token."""

    def event(self, sample: Sample, delta: TextDelta) -> bytes:
        """The event for new text of one sample, empty when there is nothing to say."""

    def closing(self, generation: Generation) -> bytes:
        """Events between the last token and DONE."""

    def response(self, generation: Generation) -> bytes:
        """The whole response of a request that does not stream."""


class Generation:
    """Runs a body's engine requests and writes what comes back."""

    def __init__(
        self,
        client: ReplicaClient,
        prompts: Prompts,
        metrics: Metrics,
        requests: list[Request],
        *,
        arrival: float,
        max_backlog_bytes: int,
        text_offsets: Sequence[int] = (),
    ) -> None:
        """``text_offsets``: characters before the output of each request, where its prompt is echoed."""
        self.requests = requests
        self.samples: list[Sample] = []
        self.cached_tokens: dict[str, int] = {}
        self._metrics = metrics
        tokenizer = self._tokenizer = prompts.tokenizer
        self._prompts = prompts
        self._arrival = arrival
        self._unfinished = 0
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
        self.stream = client.submit(*requests, max_backlog_bytes=max_backlog_bytes)

    @property
    def num_prompt_tokens(self) -> int:
        return sum([request.num_prompt_tokens for request in self.requests])

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object."""
        prompt = self.num_prompt_tokens
        completion = sum([sample.num_tokens for sample in self.samples])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self.cached_tokens.values())},
        }

    async def stream_events(self, exchange: Exchange, shape: Shape) -> None:
        """Answers with server-sent events; an error on the way becomes the last event."""
        stream = self.stream
        cutter: asyncio.TimerHandle | None = None

        def cut_later() -> None:
            nonlocal cutter
            cutter = asyncio.get_running_loop().call_later(CUT_AFTER_S, exchange.cut)

        stream.on_overflow = cut_later
        try:
            with stream:
                exchange.watch(stream.abort)
                await exchange.start_events(shape.opening())
                async for outputs in stream:
                    events = b"".join(
                        [shape.event(sample, delta) for sample, delta in self._advance(outputs)]
                    )
                    if not self._unfinished:
                        await exchange.send_events(events + shape.closing(self) + DONE, last=True)
                    elif events:
                        await exchange.send_events(events)
                if exchange.disconnected:
                    self._count_aborted()
                elif self._unfinished:
                    raise UnavailableError("the engine ended the request before it was finished")
        except HeadraceError as error:
            self._metrics.finished["error"] += self._unfinished
            self._metrics.http_errors[str(error.status), error.kind] += 1
            await exchange.send_events(error_event(error), last=True)
        finally:
            if cutter is not None:
                cutter.cancel()

    async def respond(self, exchange: Exchange, shape: Shape) -> None:
        """Answers once everything is generated."""
        try:
            with self.stream as stream:
                exchange.watch(stream.abort)
                async for outputs in stream:
                    for sample, delta in self._advance(outputs):
                        if delta.logprobs:
                            sample.logprobs += delta.logprobs
            if exchange.disconnected:
                self._count_aborted()
                return
            if self._unfinished:
                raise UnavailableError("the engine ended the request before it was finished")
        except HeadraceError:
            self._metrics.finished["error"] += self._unfinished
            raise
        if self._num_entries() > INLINE_ENTRIES:
            body = await self._prompts.off_loop(lambda: shape.response(self))
        else:
            body = shape.response(self)
        await exchange.send_json(body)

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

    def _advance(self, outputs: list[Output]) -> list[tuple[Sample, TextDelta]]:
        """Text for new tokens, sample by sample; counts them and stops what a stop string ended."""
        now = time.perf_counter()
        metrics = self._metrics
        deltas = []
        for output in outputs:
            request_id = output.request_id
            sample = self._of[request_id][output.sample_index]
            if sample.finish_reason is not None:
                continue
            if output.finish_reason == "abort":
                raise UnavailableError("the engine stopped the request before it was finished")
            delta = sample.text_stream.push(
                output.token_ids, output.logprobs, output.finish_reason, output.stop_token
            )
            if sample.last_at:
                metrics.inter_token_latency.observe(now - sample.last_at)
            else:
                self._begin(sample, output, now)
            sample.last_at = now
            sample.num_tokens += delta.num_tokens
            metrics.generation_tokens += delta.num_tokens
            if delta.finish_reason is not None:
                self._finish(sample, delta, now)
            if delta.needs_abort:
                self.stream.abort_sample(request_id, output.sample_index)
            deltas.append((sample, delta))
        return deltas

    def _begin(self, sample: Sample, output: Output, now: float) -> None:
        metrics = self._metrics
        metrics.time_to_first_token.observe(now - self._arrival)
        if output.prompt_logprobs is not None:
            for each in self._of[output.request_id]:
                each.prompt_logprobs = output.prompt_logprobs
        if output.request_id not in self.cached_tokens:
            num_prompt = sample.request.num_prompt_tokens
            self.cached_tokens[output.request_id] = output.num_cached_tokens
            metrics.prompt_tokens += num_prompt
            metrics.cached_prompt_tokens += output.num_cached_tokens
            metrics.request_prompt_tokens.observe(num_prompt)
        sample.first_at = now

    def _finish(self, sample: Sample, delta: TextDelta, now: float) -> None:
        metrics = self._metrics
        self._unfinished -= 1
        reason = delta.finish_reason or "stop"
        sample.finish_reason = reason
        stop_reason = delta.stop_reason
        if (
            isinstance(stop_reason, int)
            and stop_reason in self._tokenizer.eos_token_ids
            and stop_reason not in sample.request.sampling.stop_token_ids
        ):
            stop_reason = None
        sample.stop_reason = stop_reason
        metrics.finished[reason] += 1
        metrics.e2e_request_latency.observe(now - self._arrival)
        metrics.request_generation_tokens.observe(sample.num_tokens)
        if sample.num_tokens > 1:
            metrics.time_per_output_token.observe((now - sample.first_at) / (sample.num_tokens - 1))

    def _count_aborted(self) -> None:
        self._metrics.finished["abort"] += self._unfinished
