"""The supervisor's connection to the router process.

It is made again whenever the router comes back, and all endpoints are told again then: the router keeps
nothing across its own death.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import Literal

from headrace.core.errors import UnavailableError
from headrace.core.routing import (
    Answer,
    Ask,
    Attach,
    Decision,
    Endpoint,
    FleetStatus,
    FromRouter,
    RemoveEndpoint,
    SetEndpoint,
    ToRouter,
)
from headrace.core.wire import FrameDecoder, FrameError, encode_frame

log = logging.getLogger("headrace.fleet")

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
ANSWER_TIMEOUT_S = 10.0
READ_BYTES = 1 << 16


class RouterRegistrar:
    """A Registrar over the router's socket; lives in one event loop, between ``start`` and ``close``."""

    def __init__(self, path: str, *, peer: str = "supervisor") -> None:
        self._path = path
        self._peer = peer
        self._endpoints: dict[str, Endpoint] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._nonces = itertools.count(1)
        self._runner: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to connect, and to connect again whenever the router goes away."""
        self._runner = asyncio.create_task(self._run(), name="router registrar")

    async def close(self) -> None:
        """Ends the connection; open questions end with UnavailableError."""
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner
            self._runner = None

    def set_endpoint(self, endpoint: Endpoint) -> None:
        """Tells the router of a replica, now or as soon as there is one."""
        self._endpoints[endpoint.replica_id] = endpoint
        self._send(SetEndpoint(endpoint))

    def remove_endpoint(self, replica_id: str) -> None:
        """Has the router forget a replica."""
        if self._endpoints.pop(replica_id, None) is not None:
            self._send(RemoveEndpoint(replica_id))

    async def status(self) -> FleetStatus:
        """All that the router knows of its replicas; UnavailableError while it does not answer."""
        answer = await self._ask("status")
        if answer.status is None:
            raise UnavailableError("the router gave no status")
        return answer.status

    async def why(self, request_id: str) -> list[Decision]:
        """How a request was placed; UnavailableError while the router does not answer."""
        return (await self._ask("why", request_id)).decisions

    def _send(self, message: ToRouter) -> bool:
        if self._writer is None:
            return False
        self._writer.write(encode_frame(message))
        return True

    async def _ask(self, what: Literal["status", "why"], request_id: str = "") -> Answer:
        nonce = next(self._nonces)
        if not self._send(Ask(nonce, what, request_id)):
            raise UnavailableError("the router is starting or being restarted")
        future = self._answers[nonce] = asyncio.get_running_loop().create_future()
        try:
            return await asyncio.wait_for(future, ANSWER_TIMEOUT_S)
        except TimeoutError:
            raise UnavailableError(f"the router did not answer within {ANSWER_TIMEOUT_S:g} s") from None
        finally:
            del self._answers[nonce]

    async def _run(self) -> None:
        delay = MIN_BACKOFF_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._path)
            except OSError as error:
                log.debug("no router at %s: %s", self._path, error)
            else:
                delay = MIN_BACKOFF_S
                await self._serve(reader, writer)
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_BACKOFF_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until it ends."""
        self._writer = writer
        decoder: FrameDecoder[FromRouter] = FrameDecoder(FromRouter)
        try:
            self._send(Attach(self._peer))
            for endpoint in self._endpoints.values():
                self._send(SetEndpoint(endpoint))
            while data := await reader.read(READ_BYTES):
                for message in decoder.feed(data):
                    if isinstance(message, Answer):
                        self._take(message)
            log.debug("the router closed the connection")
        except (OSError, FrameError) as error:
            log.warning("connection to the router lost: %s", error)
        finally:
            self._writer = None
            for future in self._answers.values():
                if not future.done():
                    future.set_exception(UnavailableError("the router went away"))
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _take(self, answer: Answer) -> None:
        future = self._answers.get(answer.nonce)
        if future is not None and not future.done():
            future.set_result(answer)
