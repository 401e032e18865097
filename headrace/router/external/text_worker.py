"""A server that is sent the caller's body and whose answer goes back as it is."""

from __future__ import annotations

import logging
from typing import Protocol

from headrace.core.errors import HeadraceError
from headrace.core.routing import Capabilities, Endpoint, Outcome

Headers = list[tuple[bytes, bytes]]


class TextReceiver(Protocol):
    """Takes the answer to one forwarded body, piece by piece as it is read."""

    def on_head(self, status: int, headers: Headers) -> None:
        """Status and end-to-end headers, lower-case names."""

    def on_body(self, data: bytes) -> None:
        """Some more of the body."""

    def on_end(self) -> None:
        """The answer is complete."""

    def on_failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The answer will not come, or not to its end; nothing follows."""


class TextCall(Protocol):
    """One forwarded body, until ``on_end`` or ``on_failed``."""

    def abort(self) -> None:
        """Closes the connection to the server, so that it stops; the receiver hears nothing more."""

    def pause(self) -> None:
        """Stops reading the answer."""

    def resume(self) -> None: ...


class TextLease(Protocol):
    """A placement on a TextWorker, as the flight hands it to whoever forwards the body; ended once."""

    def began(self) -> None:
        """The first byte of an answer arrived."""

    def release(self, outcome: Outcome, num_output_tokens: int = 0) -> None:
        """The answer is complete, or was given up by its caller."""

    def failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The server failed before anything was sent to the caller: the flight may place it elsewhere,
        or ends with ``sink.on_error``."""


class TextWorker:
    """Forwards bodies to one server over a pool of kept connections."""

    def __init__(self, endpoint: Endpoint, capabilities: Capabilities, *, log: logging.Logger) -> None:
        self.endpoint = endpoint
        self.capabilities = capabilities

    @property
    def alive(self) -> bool:
        return True

    def forward(self, path: str, headers: Headers, body: bytes, receiver: TextReceiver) -> TextCall:
        """POSTs ``body``; nothing is called from within. UnavailableError when closed."""
        raise AssertionError("under construction")

    async def close(self) -> None:
        """Ends what runs with UnavailableError and closes all connections."""
