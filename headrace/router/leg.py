"""One attempt's ear and mouth. What is said to it once the flight has moved on or ended is ignored."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from headrace.core.errors import HeadraceError
from headrace.core.messages import Output
from headrace.core.routing import Outcome
from headrace.router.worker import TextPlacement

if TYPE_CHECKING:
    from headrace.router.external.text_worker import TextWorker
    from headrace.router.flight import Flight, Sink


class Leg:
    """A PairReceiver, and the TextLease of a body that is forwarded; ``flight`` is None once it is over."""

    __slots__ = ("flight",)

    def __init__(self, flight: Flight) -> None:
        self.flight: Flight | None = flight

    def on_outputs(self, outputs: list[Output]) -> None:
        """See Receiver."""
        flight = self.flight
        if flight is None:
            return
        if flight.attempt:
            request_id = flight.request.request_id
            outputs = [replace(output, request_id=request_id) for output in outputs]
        flight.on_outputs(outputs)

    def on_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """See Receiver."""
        if self.flight is not None:
            self.flight.on_failed(error, outcome)

    def on_prefill_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """See PairReceiver."""
        if self.flight is not None:
            self.flight.on_prefill_failed(error, outcome)

    def forward(self, sink: Sink, worker: TextWorker) -> None:
        """Lets the sink forward its body, unless it was aborted meanwhile."""
        if self.flight is not None:
            sink.on_text_worker(worker, self)

    @property
    def placed(self) -> TextPlacement:
        """See TextLease."""
        flight = self.flight
        assert flight is not None and flight.placement is not None
        return TextPlacement(flight.placement, flight.submitted_at, flight.lease_placed_at, flight.attempt)

    def began(self) -> None:
        """See TextLease."""
        if self.flight is not None:
            self.flight.text_began()

    def release(self, outcome: Outcome, num_output_tokens: int = 0) -> None:
        """See TextLease."""
        if self.flight is not None:
            self.flight.text_ended(outcome, num_output_tokens)

    def failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """See TextLease."""
        self.on_failed(error, outcome)
