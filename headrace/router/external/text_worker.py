"""A server that is sent the caller's body and whose answer goes back as it is."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import msgspec

from headrace.core.errors import HeadraceError, UnavailableError
from headrace.core.routing import Capabilities, Endpoint, Outcome
from headrace.router.external.faults import ServerFault, fault_of_failure, fault_of_status
from headrace.router.external.http_client import Call, Headers, HTTPClient, HTTPFailure, Receiver
from headrace.router.external.silence import SilenceWatch, patience_of
from headrace.router.worker import TextPlacement

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()


class TextLease(Protocol):
    """A placement on a TextWorker, as the flight hands it to whoever forwards the body; ended once."""

    @property
    def placed(self) -> TextPlacement:
        """To be asked for before it ends."""

    def began(self) -> None:
        """The first piece of a streamed answer arrived."""

    def release(self, outcome: Outcome, num_output_tokens: int = 0) -> None:
        """The answer is complete, or was given up by its caller."""

    def failed(self, error: HeadraceError, outcome: Outcome) -> None:
        """The server failed before anything was sent to the caller: the flight may place it elsewhere,
        or ends with ``sink.on_error``."""


class TextWorker:
    """Forwards bodies to one server over a pool of kept connections."""

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
        self.name = f"{capabilities.kind} at {endpoint.address}"
        self.remote_model = endpoint.remote_model or capabilities.remote_model
        self._client = HTTPClient(endpoint.address, api_key_env=endpoint.api_key_env, log=log)
        self._silence = SilenceWatch(self._client, silence_s, log=log)
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether bodies can be sent; whether the server answers is the monitor's business."""
        return not self._closed

    def forward(
        self,
        path: str,
        headers: Headers,
        body: bytes,
        model: str | None,
        receiver: Receiver,
        *,
        ttft_s: float = 0.0,
    ) -> Call:
        """POSTs ``body``, whose model is ``model``, under the name that the server knows. The receiver hears
        nothing from within. Where nothing comes for far longer than the predicted ``ttft_s``, the server is
        asked whether it is there."""
        if self._closed:
            raise UnavailableError("the connection to this server was closed")
        if self.remote_model and model != self.remote_model:
            body = _renamed(body, self.remote_model)
        call = self._client.request("POST", path, headers, body, receiver)
        call.patience_s = patience_of(ttft_s)
        return call

    def fault_of_failure(self, failure: HTTPFailure) -> ServerFault:
        """What a broken answer means for the caller."""
        return fault_of_failure(self.name, failure)

    def fault_of_status(self, status: int, body: bytes) -> ServerFault:
        """What an answer of this status means for the caller."""
        return fault_of_status(self.name, status, body)

    async def close(self) -> None:
        """Ends what runs with UnavailableError and closes all connections."""
        self._closed = True
        await asyncio.gather(self._silence.close(), self._client.close())


def _renamed(body: bytes, model: str) -> bytes:
    """The same JSON object with another model; every other field as it was written."""
    fields = _fields.decode(body)
    fields["model"] = msgspec.Raw(_encoder.encode(model))
    return _encoder.encode(fields)
