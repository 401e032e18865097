"""Another engine that takes token ids and gives token ids.

    submit(Request) ──► one _Sample per sample ──► one HTTP request ──► reader of the engine's file ──► Output

Closing the connection is how the server hears of an abort.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.core.routing import Capabilities, Endpoint, EngineKind
from headrace.router.external.engine import Lookup, Reader, TokenEngine
from headrace.router.external.faults import ServerFault, fault_of_failure, fault_of_status, garbage
from headrace.router.external.http_client import Call, Headers, HTTPClient, HTTPFailure
from headrace.router.external.http_client import Receiver as HTTPReceiver
from headrace.router.external.llama_server import LlamaServer
from headrace.router.external.pair import MakeSample, PairWorker
from headrace.router.external.sglang import SGLang
from headrace.router.external.sglang_pair import SGLangSample
from headrace.router.external.silence import SilenceWatch
from headrace.router.external.sse import EventTooLargeError, SSEReader
from headrace.router.external.tensorrt_llm import TensorRTLLM
from headrace.router.external.vllm import VLLMCompletions
from headrace.router.external.vllm_generate import VLLMGenerate
from headrace.router.external.vllm_pair import VLLMSample
from headrace.router.worker import PairingWorker, Receiver

MAX_WHOLE_BYTES = 256 * 1024 * 1024
LOOKUP_TIMEOUT_S = 10.0
_JSON = (b"content-type", b"application/json")

_ENGINES: list[tuple[EngineKind, type[TokenEngine]]] = [
    ("vllm", VLLMCompletions),
    ("vllm", VLLMGenerate),
    ("sglang", SGLang),
    ("llama-server", LlamaServer),
    ("tensorrt-llm", TensorRTLLM),
]
_PAIRS: dict[EngineKind, MakeSample] = {"vllm": VLLMSample, "sglang": SGLangSample}
_BY_PATH = {(kind, engine.path): engine for kind, engine in _ENGINES}


class ExternalWorker:
    """Implements Worker over HTTP requests to one server."""

    def __init__(
        self,
        endpoint: Endpoint,
        capabilities: Capabilities,
        *,
        log: logging.Logger,
        silence_s: float = 60.0,
    ) -> None:
        self.endpoint = endpoint
        self.capabilities = capabilities
        self.log = log
        self.loop = asyncio.get_running_loop()
        self.client = HTTPClient(endpoint.address, api_key_env=endpoint.api_key_env, log=log)
        self.name = f"{capabilities.kind} at {endpoint.address}"
        self._engine = _BY_PATH[capabilities.kind, capabilities.path]()
        self._samples: dict[str, dict[int, _Sample]] = {}
        self._closed = False
        self._silence = SilenceWatch(self.client, silence_s, log=log)

    @property
    def alive(self) -> bool:
        """Whether requests can be sent; whether it answers is the monitor's business."""
        return not self._closed

    def submit(self, request: Request, receiver: Receiver) -> None:
        """See Worker; UnsupportedFieldError for what the server cannot do."""
        if self._closed:
            raise UnavailableError("the connection to this server was closed")
        first = request.sample_index
        # all bodies before the first is sent: a refusal must leave nothing running
        bodies = {index: self.encode(request, index) for index in range(first, first + request.sampling.n)}
        self.send(request, bodies, receiver)

    def encode(self, request: Request, index: int) -> tuple[bytes, bool]:
        """The body for one sample, and whether its answer streams; see TokenEngine."""
        remote_model = self.endpoint.remote_model or self.capabilities.remote_model
        return self._engine.encode(request, index, remote_model)

    def send(self, request: Request, bodies: dict[int, tuple[bytes, bool]], receiver: Receiver) -> None:
        """Sends samples of a request, by index; they fail together."""
        group: list[_Sample] = []
        samples = self._samples.setdefault(request.request_id, {})
        for index, (body, streams) in bodies.items():
            sample = _Sample(self, request, index, streams, receiver, group)
            samples[index] = sample
            group.append(sample)
            sample.call = self.post(request, body, sample)

    def post(self, request: Request, body: bytes, receiver: HTTPReceiver) -> Call:
        """One HTTP request for tokens."""
        headers = [_JSON, (b"x-request-id", request.request_id.encode("latin-1", "replace"))]
        return self.client.request("POST", self._engine.path, headers, body, receiver)

    def paired(self, prefill: PairingWorker) -> PairWorker:
        """See PairingWorker."""
        assert isinstance(prefill, ExternalWorker)
        return PairWorker(prefill, self, _PAIRS[self.capabilities.kind])

    def abort(self, request_id: str, sample_index: int | None = None) -> None:
        """See Worker."""
        samples = self._samples.get(request_id, {})
        for index in list(samples) if sample_index is None else [sample_index]:
            sample = samples.get(index)
            if sample is not None:
                sample.stop()

    async def close(self) -> None:
        """Ends what runs with UnavailableError and closes all connections."""
        self._closed = True
        await self._silence.close()
        await self.client.close()

    def forget(self, sample: _Sample) -> None:
        """Called by a sample that has ended."""
        request_id = sample.request.request_id
        samples = self._samples.get(request_id)
        if samples is not None and samples.get(sample.index) is sample:
            del samples[sample.index]
            if not samples:
                del self._samples[request_id]

    def reader_of(self, request: Request, index: int) -> Reader:
        return self._engine.reader(request, index)


class _Sample:
    """One sample's HTTP request; takes its answer and gives outputs to the request's receiver."""

    def __init__(
        self,
        worker: ExternalWorker,
        request: Request,
        index: int,
        streams: bool,
        receiver: Receiver,
        group: list[_Sample],
    ) -> None:
        self.request = request
        self.index = index
        self.call: Call | None = None
        self._worker = worker
        self._receiver = receiver
        self._group = group  # those of the same submit: they fail together
        self._streams = streams
        self._reader = worker.reader_of(request, index)
        self._events = SSEReader()
        self._status = 0
        self._parts: list[bytes] = []
        self._size = 0
        self._ended = False
        self._lookup: asyncio.Task[None] | None = None
        self._waiting: list[bytes] = []  # events behind a lookup
        self._closed_early = False

    def stop(self) -> None:
        """Closes the connection; nothing more is heard of this sample."""
        if not self._ended:
            self._ended = True
            self._worker.forget(self)
            if self._lookup is not None:
                self._lookup.cancel()
            if self.call is not None:
                self.call.abort()

    # From the HTTP client

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        if self._ended:
            return
        if self._status != 200 or not self._streams:
            self._parts.append(data)
            self._size += len(data)
            if self._size > MAX_WHOLE_BYTES:
                self._fail(garbage(self._worker.name, f"more than {MAX_WHOLE_BYTES} bytes"))
            return
        try:
            events = self._events.feed(data)
        except EventTooLargeError as error:
            self._fail(garbage(self._worker.name, error))
            return
        if self._lookup is not None:
            self._waiting += events
        else:
            self._take(events)

    def on_end(self) -> None:
        if self._ended:
            return
        body = b"".join(self._parts)
        if self._status != 200:
            self._fail(fault_of_status(self._worker.name, self._status, body))
        elif not self._streams:
            self._read(lambda: self._reader.on_whole(body))
        elif self._lookup is not None:
            self._closed_early = True
            return
        if not self._ended:
            self._fail(
                ServerFault(
                    UnavailableError(f"{self._worker.name} ended the answer before it was finished"),
                    "replica_fault",
                )
            )

    def on_failed(self, failure: HTTPFailure) -> None:
        if not self._ended:
            self._fail(fault_of_failure(self._worker.name, failure))

    # Reading

    def _take(self, events: list[bytes]) -> None:
        """Outputs of all events of one read go out together."""
        outputs: list[Output] = []
        fault: ServerFault | None = None
        for place, data in enumerate(events):
            if outputs and outputs[-1].finish_reason is not None:
                break
            try:
                outputs += self._reader.on_event(data)
            except Lookup as lookup:
                self._waiting += events[place + 1 :]
                self._lookup = self._worker.loop.create_task(self._look_up(lookup))
                break
            except ServerFault as error:
                fault = error
                break
            except msgspec.DecodeError as error:
                fault = garbage(self._worker.name, error)
                break
        self._give(outputs)
        if fault is not None and not self._ended:
            self._fail(fault)

    async def _look_up(self, lookup: Lookup) -> None:
        answer: bytes | None = None
        try:
            status, body = await self._worker.client.fetch(
                "POST", lookup.path, lookup.body, timeout=LOOKUP_TIMEOUT_S
            )
            answer = body if status == 200 else None
        except HTTPFailure as failure:
            self._worker.log.warning("%s: %s failed: %s", self._worker.name, lookup.path, failure)
        if self._ended:
            return
        self._lookup = None
        self._read(lambda: self._reader.on_lookup(answer))
        events, self._waiting = self._waiting, []
        if not self._ended:
            self._take(events)
        if self._closed_early and not self._ended and self._lookup is None:
            self.on_end()

    def _read(self, read: Callable[[], list[Output]]) -> None:
        try:
            outputs = read()
        except ServerFault as error:
            self._fail(error)
        except msgspec.DecodeError as error:
            self._fail(garbage(self._worker.name, error))
        else:
            self._give(outputs)

    def _give(self, outputs: list[Output]) -> None:
        if not outputs or self._ended:
            return
        if outputs[-1].finish_reason is not None:
            # The rest of the answer says nothing more; a whole stream leaves its connection in the pool.
            self._ended = True
            self._worker.forget(self)
            if self._reader.goes_on and self.call is not None:
                self.call.abort()
        self._receiver.on_outputs(outputs)

    def _fail(self, fault: ServerFault) -> None:
        """Ends all samples of the request: its receiver hears of one failure only."""
        for sample in self._group:
            sample.stop()
        self._receiver.on_failed(fault.error, fault.outcome)
