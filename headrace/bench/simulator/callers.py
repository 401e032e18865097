"""Recorded requests as callers within the process: straight to the dispatcher, without HTTP and text."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from headrace.bench.metrics import RequestTrace
from headrace.bench.simulator.replica import PacedModel
from headrace.bench.traces import Arrival, TraceRequest
from headrace.core.errors import EngineError, HeadraceError
from headrace.core.identity import block_identities
from headrace.core.messages import Output
from headrace.core.request import Request, SamplingParams
from headrace.router.dispatcher import Dispatcher
from headrace.router.external.text_worker import TextLease, TextWorker


def engine_request(request_id: str, trace: TraceRequest, model: PacedModel) -> Request:
    """A recorded request as the gateway would send it: its prompt, as many tokens as were answered then."""
    prompt = trace.prompt(model.vocab_size)
    return Request(
        request_id=request_id,
        model=model.name,
        prompt=prompt,
        block_ids=b"".join(block_identities(model.root, prompt, model.block_size)),
        sampling=SamplingParams(temperature=0.0, max_tokens=trace.output_length, ignore_eos=True, seed=0),
    )


async def submit_all(
    arrivals: Sequence[Arrival], model: PacedModel, dispatcher: Dispatcher
) -> list[RequestTrace]:
    """Submits each request at its time, from now on, until all have ended. EngineError if one fails."""
    callers = _Callers(dispatcher, model, arrivals)
    await callers.done
    return callers.traces


class _Callers:
    """Submits each request at its time. ``done`` is set when all have ended; ``traces`` are then complete."""

    def __init__(self, dispatcher: Dispatcher, model: PacedModel, arrivals: Sequence[Arrival]) -> None:
        self._loop = asyncio.get_running_loop()
        self._dispatcher = dispatcher
        self._model = model
        self._arrivals = arrivals
        self._began = self._loop.time()
        self._num_open = len(arrivals)
        self.done: asyncio.Future[None] = self._loop.create_future()
        self.traces: list[RequestTrace] = []
        self._wait_for(0)

    def _wait_for(self, number: int) -> None:
        self._loop.call_at(self._began + self._arrivals[number].at, self._submit, number)

    def _submit(self, number: int) -> None:
        if number + 1 < len(self._arrivals):
            self._wait_for(number + 1)
        request = engine_request(str(number), self._arrivals[number].request, self._model)
        try:
            self._dispatcher.submit(request, _Caller(self, request, self._loop))
        except Exception as error:  # a bug on the way would otherwise be waited for for ever
            if not self.done.done():
                self.done.set_exception(error)

    def ended(self, trace: RequestTrace) -> None:
        self.traces.append(trace)
        self._num_open -= 1
        if not self._num_open and not self.done.done():
            self.done.set_result(None)

    def failed(self, request: Request, error: HeadraceError) -> None:
        if not self.done.done():
            self.done.set_exception(
                EngineError(f"request {request.request_id} of the replay failed: {error.message}")
            )


class _Caller:
    """One request's Sink: notes when its first and its last token came."""

    __slots__ = ("_callers", "_first", "_loop", "_num_cached", "_num_output", "_request", "_sent")

    def __init__(self, callers: _Callers, request: Request, loop: asyncio.AbstractEventLoop) -> None:
        self._callers = callers
        self._request = request
        self._loop = loop
        self._sent = loop.time()
        self._first = 0.0
        self._num_cached = 0
        self._num_output = 0

    def on_outputs(self, outputs: list[Output]) -> None:
        """See Sink."""
        for output in outputs:
            if not self._num_output:
                self._first = self._loop.time()
                self._num_cached = output.num_cached_tokens
            self._num_output += len(output.token_ids)
            if output.finish_reason is not None:
                now = self._loop.time()
                self._callers.ended(
                    RequestTrace(
                        sent=self._sent,
                        text_times=[self._first, now],
                        finished=now,
                        prompt_tokens=self._request.num_prompt_tokens,
                        cached_tokens=self._num_cached,
                        output_tokens=self._num_output,
                        finish_reason=output.finish_reason,
                    )
                )

    def on_started(self) -> None:
        """See Sink."""

    def on_error(self, error: HeadraceError) -> None:
        """See Sink."""
        self._callers.failed(self._request, error)

    def on_text_worker(self, worker: TextWorker, lease: TextLease) -> None:
        """See Sink."""
        raise AssertionError("paced replicas take tokens")
