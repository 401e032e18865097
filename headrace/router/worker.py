"""What a request is handed to, and what its outputs are handed to.

    Flight ── submit(request, receiver) ──► Worker       one of ours, or a server that takes tokens
    Flight ◄── on_outputs, on_failed ────── Worker

All calls happen in one event loop and none blocks.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from headrace.core.errors import HeadraceError
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.core.routing import Endpoint, Outcome, Placement


class Receiver(Protocol):
    """Takes what comes back for one request, until every sample has a ``finish_reason`` or it failed."""

    def on_outputs(self, outputs: list[Output]) -> None:
        """One step's outputs of the request; never called from within ``submit``."""

    def on_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The request has ended unfinished and nothing follows. ``outcome`` says whose fault it was:
        ``caller_fault`` (repeating it is useless), ``replica_fault`` (a living replica's),
        ``replica_gone``, or ``aborted``: nobody's, it just takes nothing new."""


class PairReceiver(Receiver, Protocol):
    """Takes what comes back from a pair of servers."""

    def on_prefill_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The prefill side failed before the answer began: the request has ended unfinished, as after
        ``on_failed``, and the decode side is not to blame."""


class Worker(Protocol):
    """A replica that takes token ids and gives token ids."""

    @property
    def alive(self) -> bool:
        """Whether it is connected and greeted now."""

    def submit(self, request: Request, receiver: Receiver) -> None:
        """Sends a request; UnavailableError when that is impossible now.

        After a rescue the samples of one request come as several requests with the same id and different
        ``sample_index``. No id comes again after an abort.
        """

    def abort(self, request_id: str, sample_index: int | None = None) -> None:
        """Stops a request, or one sample; its receiver hears nothing more of it. Unknown ids are ignored."""


class PairingWorker(Worker, Protocol):
    """A server that is not ours, and may answer what another one of its kind has prefilled."""

    def paired(self, prefill: PairingWorker) -> Worker:
        """Both as one worker, for one request whose receiver is a PairReceiver."""


class TextPlacement(NamedTuple):
    """How a body of text came to its server; times of the dispatcher's clock, attempts counted from 0."""

    placement: Placement
    submitted_at: float
    placed_at: float
    attempt: int


def is_ours(endpoint: Endpoint) -> bool:
    """Whether a replica speaks our own protocol, over the Unix socket that is its address."""
    return endpoint.kind == "headrace" or (endpoint.kind is None and "://" not in endpoint.address)
