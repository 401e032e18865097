"""Another engine that takes token ids and gives token ids."""

from __future__ import annotations

import logging

from headrace.core.request import Request
from headrace.core.routing import Capabilities, Endpoint
from headrace.router.worker import Receiver


class ExternalWorker:
    """Implements Worker over one HTTP request a sample group."""

    def __init__(self, endpoint: Endpoint, capabilities: Capabilities, *, log: logging.Logger) -> None:
        self.endpoint = endpoint
        self.capabilities = capabilities

    @property
    def alive(self) -> bool:
        return True

    def submit(self, request: Request, receiver: Receiver) -> None:
        """See Worker."""
        raise AssertionError("under construction")

    def abort(self, request_id: str, sample_index: int | None = None) -> None:
        """See Worker."""

    async def close(self) -> None:
        """Ends what runs with UnavailableError and closes all connections."""
