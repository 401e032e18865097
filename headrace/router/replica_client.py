"""The gateway's end of one replica's socket.

One connection carries every request. A Step frame is decoded once and its outputs are handed to the
streams that wait for them; no task exists per token or per request. When the connection ends, all open
streams end with UnavailableError and the client connects again, with back-off, for as long as it lives:
whoever supervises replicas restarts them on the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from headrace.core.errors import EngineError, UnavailableError
from headrace.core.messages import (
    Abort,
    CacheEvent,
    Drain,
    Failed,
    FromReplica,
    Health,
    Hello,
    Probe,
    Stats,
    Step,
    Submit,
)
from headrace.core.request import Request
from headrace.core.wire import FrameError, encode_frame, gateway_decoder
from headrace.router.replica_stream import ReplicaStream

MIN_BACKOFF_S = 0.02
MAX_BACKOFF_S = 1.0
MAX_UNSENT_BYTES = 256 * 1024 * 1024
DEFAULT_BACKLOG_BYTES = 16 * 1024 * 1024

# A replica answers between two steps, and one step may take long on a busy machine: it is asked whether
# it is alive after much silence only, and gets much time to answer.
SILENCE_S = 120.0
PROBE_TIMEOUT_S = 60.0


class ReplicaClient:
    """Submits requests to the replica that listens on a Unix socket.

    ``hello`` is the replica's latest greeting and stays while disconnected; ``alive`` says whether it is
    connected and greeted now. Everything runs in the event loop that called ``start``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        log: logging.Logger | None = None,
        max_backlog_bytes: int = DEFAULT_BACKLOG_BYTES,
        on_hang: Callable[[int], None] | None = None,
    ) -> None:
        """``on_hang`` is told the pid of a replica that has stopped answering."""
        self.path = str(path)
        self.hello: Hello | None = None
        self.stats = Stats()
        self.on_events: Callable[[int, Sequence[CacheEvent]], None] | None = None
        self._log = log or logging.getLogger(__name__)
        self._max_backlog_bytes = max_backlog_bytes
        self._on_hang = on_hang
        self._heard_at = 0.0  # when the replica last spoke, or was last given work while idle
        self._link: _Link | None = None
        self._streams: dict[str, ReplicaStream] = {}
        self._probes: dict[int, asyncio.Future[Health]] = {}
        self._nonces = itertools.count(1)
        self._greeted: asyncio.Event = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def connect(cls, path: str | Path, *, timeout: float | None = 30.0) -> ReplicaClient:
        """A client whose replica has greeted it; UnavailableError after ``timeout`` seconds."""
        client = cls(path)
        client.start()
        try:
            await client.wait_ready(timeout)
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def alive(self) -> bool:
        return self._greeted.is_set()

    @property
    def num_open(self) -> int:
        """Requests submitted and not ended yet."""
        return len(self._streams)

    def start(self) -> None:
        """Begins to connect, and to connect again whenever the replica goes away."""
        assert self._runner is None, "already started"
        loop = asyncio.get_running_loop()
        self._runner = loop.create_task(self._run(), name="replica-client")
        self._watchdog = loop.create_task(self._watch(), name="replica-watchdog")

    async def close(self) -> None:
        """Ends the connection; open streams end with UnavailableError."""
        for task in (self._watchdog, self._runner):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._watchdog = self._runner = None
        if self._link is not None:
            self._link.abort()
        self._lose("the client was closed")

    async def wait_ready(self, timeout: float | None = None) -> Hello:
        """Waits for a greeted connection; UnavailableError after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._greeted.wait(), timeout)
        except TimeoutError:
            raise UnavailableError(f"no replica answered on {self.path} within {timeout:g} s") from None
        assert self.hello is not None
        return self.hello

    def submit(self, *requests: Request, max_backlog_bytes: int | None = None) -> ReplicaStream:
        """Sends requests whose outputs come back as one stream; UnavailableError without a replica.

        The ids must be unique among all open requests.
        """
        link = self._link
        if link is None or not self.alive:
            raise UnavailableError("no replica is connected; it is starting or being restarted")
        if link.num_unsent_bytes() > MAX_UNSENT_BYTES:
            raise UnavailableError("the replica does not read its requests")
        stream = ReplicaStream(
            self,
            {request.request_id: request.sampling.n for request in requests},
            max_backlog_bytes or self._max_backlog_bytes,
        )
        frames = b"".join([encode_frame(Submit(request)) for request in requests])
        if not self._streams:
            self._heard_at = asyncio.get_running_loop().time()
        for request in requests:
            assert request.request_id not in self._streams, "request ids must be unique"
            self._streams[request.request_id] = stream
        link.write(frames)
        return stream

    def abort(self, request_id: str, sample_index: int | None = None) -> None:
        """Stops a request, or one sample of it, before the engine's next step; unknown ids are ignored."""
        stream = self._streams.get(request_id)
        if stream is None:
            return
        if sample_index is None:
            stream.abort_request(request_id)
        else:
            stream.abort_sample(request_id, sample_index)

    def drain(self) -> None:
        """Asks the replica to take nothing new, finish what runs and exit."""
        if self._link is not None:
            self._link.write(encode_frame(Drain()))

    async def probe(self, timeout: float = 5.0) -> Health:
        """The replica's own word on its health; UnavailableError when it does not answer in time."""
        if self._link is None or not self.alive:
            raise UnavailableError("no replica is connected")
        nonce = next(self._nonces)
        future: asyncio.Future[Health] = asyncio.get_running_loop().create_future()
        self._probes[nonce] = future
        self._link.write(encode_frame(Probe(nonce=nonce)))
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise UnavailableError(f"the replica did not answer a probe within {timeout:g} s") from None
        finally:
            self._probes.pop(nonce, None)

    def fail_all(self, reason: str) -> None:
        """Ends every open stream with UnavailableError and aborts it in the engine."""
        for stream in set(self._streams.values()):
            stream.fail(UnavailableError(reason))

    # Called by the streams

    def send_abort(self, request_id: str, sample_index: int | None = None) -> None:
        """Writes an Abort; nothing to do while disconnected, as the replica aborts on EOF by itself."""
        if self._link is not None:
            self._link.write(encode_frame(Abort(request_id=request_id, sample_index=sample_index)))

    def forget(self, request_id: str) -> None:
        """Drops a request that has ended: later messages about it are ignored."""
        self._streams.pop(request_id, None)

    # Called by the link

    def receive(self, message: FromReplica) -> None:
        """Hands one decoded message to whoever waits for it."""
        self._heard_at = asyncio.get_running_loop().time()
        if type(message) is Step:
            self.stats = message.stats
            streams = self._streams
            for output in message.outputs:
                stream = streams.get(output.request_id)
                if stream is not None:
                    stream.put(output)
            for failed in message.failed:
                self._fail(failed)
            if message.events and self.on_events is not None:
                self.on_events(message.event_seq, message.events)
        elif type(message) is Health:
            self.stats = message.stats
            future = self._probes.get(message.nonce)
            if future is not None and not future.done():
                future.set_result(message)
        elif type(message) is Hello:
            self.hello = message
            self.stats = Stats()
            self._greeted.set()

    def _fail(self, failed: Failed) -> None:
        stream = self._streams.pop(failed.request_id, None)
        if stream is not None:
            stream.fail(failed.to_error())

    def _lose(self, reason: str) -> None:
        self._greeted.clear()
        self._link = None
        streams, self._streams = set(self._streams.values()), {}
        for stream in streams:
            stream.fail(UnavailableError(f"the replica went away ({reason}); the request was not finished"))
        for future in self._probes.values():
            if not future.done():
                future.set_exception(UnavailableError(f"the replica went away ({reason})"))

    async def _watch(self) -> None:
        """Notices a replica that is alive and does nothing, as long as requests wait for it."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SILENCE_S / 8)
            link, heard_at = self._link, self._heard_at
            if link is None or not self._streams or loop.time() - heard_at < SILENCE_S:
                continue
            try:
                await self.probe(PROBE_TIMEOUT_S)
            except UnavailableError:
                # any frame is a sign of life, and another connection another replica
                if self._link is link and self._heard_at == heard_at:
                    self._give_up(link)

    def _give_up(self, link: _Link) -> None:
        pid = self.hello.pid if self.hello is not None else 0
        silence = SILENCE_S + PROBE_TIMEOUT_S
        self._log.error("replica at %s (pid %d) hangs: not a word for %.0f s", self.path, pid, silence)
        self.fail_all("the replica does not answer and is being restarted; the request was not finished")
        link.abort()
        if self._on_hang is not None:
            self._on_hang(pid)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        delay = MIN_BACKOFF_S
        while True:
            link = _Link(self, loop.create_future())
            try:
                await loop.create_unix_connection(lambda link=link: link, self.path)  # type: ignore[misc]
            except OSError as error:
                self._log.debug("replica at %s: %s", self.path, error)
            else:
                self._link = link
                try:
                    reason = await link.ended
                finally:
                    link.abort()
                was_alive = self.alive
                self._lose(reason)
                if was_alive:
                    self._log.warning("replica at %s: connection ended (%s)", self.path, reason)
                    delay = MIN_BACKOFF_S
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_BACKOFF_S)


class _Link(asyncio.Protocol):
    """One connection: bytes in, messages to the client; ends at EOF or at bytes that are no message."""

    def __init__(self, client: ReplicaClient, ended: asyncio.Future[str]) -> None:
        self.ended = ended
        self._client = client
        self._decoder = gateway_decoder()
        self._transport: asyncio.Transport | None = None
        self._reason: str | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        if self._reason is not None:
            return
        try:
            for message in self._decoder.feed(data):
                self._client.receive(message)
        except FrameError as error:
            self._end(f"it sent garbage: {error}")
        except Exception as error:
            self._client._log.exception("reading from the replica failed")
            self._end(f"{EngineError.default_code}: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._end("connection closed" if exc is None else str(exc))

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def num_unsent_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _end(self, reason: str) -> None:
        if self._reason is None:
            self._reason = reason
            if not self.ended.done():
                self.ended.set_result(reason)
