"""Two servers of one kind for one request: one computes its prompt, the other answers.

    Flight ── submit, abort ──► PairWorker ──┬─► prefill half: a call of its own     (vllm_pair, sglang_pair)
    Flight ◄── on_outputs, on_failed ────────┴── decode half: the ExternalWorker's own call
    Flight ◄── on_prefill_failed                 the prefill half failed before the sample began to answer

Each sample has its two halves. Whatever ends one of them early ends both, as a server frees what it holds for
a connection that is closed; blocks that were computed and not fetched are freed by the prefill server's own
timeout. What the prefill server says of its token, or of how that ended, reaches nobody.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import msgspec

from headrace.core.errors import HeadraceError, OverloadedError, UnavailableError
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.core.routing import Outcome
from headrace.router.external.faults import ServerFault, fault_of_failure, garbage
from headrace.router.external.http_client import Call, Headers, HTTPFailure
from headrace.router.worker import PairReceiver, Receiver

if TYPE_CHECKING:
    from headrace.router.external.worker import ExternalWorker

MAX_ANSWER_BYTES = 16 * 1024 * 1024
"""Of a prefill half: a token, and what the decode side must know."""

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


class Sample(Protocol):
    """One sample of one request on a pair of servers."""

    def start(self) -> None:
        """Sends what can be sent."""

    def stop(self) -> None:
        """Closes both connections; nothing more is heard."""


class MakeSample(Protocol):
    """How one kind of server splits its work. UnsupportedFieldError for what it cannot do that way."""

    def __call__(self, pair: PairWorker, request: Request, index: int, ear: Ear) -> Sample: ...


class PairWorker:
    """A Worker for one request; gone with it. ``submit``'s receiver is a PairReceiver."""

    def __init__(self, prefill: ExternalWorker, decode: ExternalWorker, make_sample: MakeSample) -> None:
        self.prefill = prefill
        self.decode = decode
        self._make_sample = make_sample
        self._samples: dict[int, Sample] = {}

    @property
    def alive(self) -> bool:
        """Whether requests can be sent to both."""
        return self.prefill.alive and self.decode.alive

    def submit(self, request: Request, receiver: Receiver) -> None:
        """See Worker."""
        if not self.alive:
            raise UnavailableError("the connection to this pair of servers was closed")
        ear = Ear(self, cast(PairReceiver, receiver))
        first = request.sample_index
        made = {
            index: self._make_sample(self, request, index, ear)
            for index in range(first, first + request.sampling.n)
        }
        self._samples |= made
        for sample in made.values():
            sample.start()

    def abort(self, request_id: str, sample_index: int | None = None) -> None:
        """See Worker."""
        for index in list(self._samples) if sample_index is None else [sample_index]:
            sample = self._samples.pop(index, None)
            if sample is not None:
                sample.stop()

    def forget(self, index: int) -> None:
        """A sample has all its tokens."""
        self._samples.pop(index, None)


class Ear:
    """Hears all samples of one ``submit``, whose first failure ends all that run of the request."""

    def __init__(self, pair: PairWorker, receiver: PairReceiver) -> None:
        self._pair = pair
        self._receiver = receiver

    def on_outputs(self, outputs: list[Output]) -> None:
        """See Receiver."""
        for output in outputs:
            if output.finish_reason is not None:
                self._pair.forget(output.sample_index)
        self._receiver.on_outputs(outputs)

    def on_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The decode side failed."""
        self._pair.abort("")
        self._receiver.on_failed(error, outcome)

    def on_prefill_failed(self, fault: ServerFault) -> None:
        """The prefill side failed. One that is full is not at fault: another may not be."""
        self._pair.abort("")
        outcome: Outcome = "aborted" if isinstance(fault.error, OverloadedError) else fault.outcome
        self._receiver.on_prefill_failed(fault.error, outcome)


class PrefillCall:
    """Sends a prefill half and collects its answer; an HTTP client's Receiver.

    ``on_answer`` takes status and body, ``on_fault`` what came instead; one of them is called once, unless it
    is stopped before.
    """

    def __init__(
        self,
        worker: ExternalWorker,
        request: Request,
        body: bytes,
        on_answer: Callable[[int, bytes], None],
        on_fault: Callable[[ServerFault], None],
    ) -> None:
        self._worker = worker
        self._on_answer = on_answer
        self._on_fault = on_fault
        self._parts: list[bytes] = []
        self._size = 0
        self._status = 0
        self._call: Call = worker.post(request, body, self)

    def stop(self) -> None:
        """Closes the connection if it has not ended."""
        self._call.abort()

    def on_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > MAX_ANSWER_BYTES:
            self._call.abort()
            self._on_fault(garbage(self._worker.name, f"more than {MAX_ANSWER_BYTES} bytes"))

    def on_end(self) -> None:
        self._on_answer(self._status, b"".join(self._parts))

    def on_failed(self, failure: HTTPFailure) -> None:
        self._on_fault(fault_of_failure(self._worker.name, failure))


def with_fields(body: bytes, **fields: Any) -> bytes:
    """The same JSON object with other values for these fields; None takes one out."""
    known = _decoder.decode(body)
    for name, value in fields.items():
        known.pop(name, None)
        if value is not None:
            known[name] = msgspec.Raw(_encoder.encode(value))
    return _encoder.encode(known)
