"""The gateway's or the router's end of one replica's socket.

    Flight ── submit(request, receiver) ──► ReplicaClient ── Submit ──►┐
    Flight ◄── on_outputs, on_failed ────── ReplicaClient ◄── Step ────┤ one Unix socket
    placer ◄── on_up, on_stats, on_events, on_snapshot, on_down ───────┘ one connection

One connection carries every request. A Step frame is decoded once and its outputs are handed, request by
request, to whoever waits for them, before anything else is done with the frame. When the connection ends,
whatever ended it, the listener is told first, so that it sends nothing more there, and then every receiver.
The client connects again, with back-off, for as long as it lives: whoever supervises replicas restarts
them on the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.core.errors import EngineError, HeadraceError, UnavailableError
from headrace.core.messages import (
    Abort,
    CacheSnapshot,
    Drain,
    Failed,
    FromReplica,
    Health,
    Hello,
    Output,
    Probe,
    Stats,
    Step,
    Submit,
    Subscribe,
)
from headrace.core.request import Request
from headrace.core.routing import Capabilities, ModelInfo, Outcome
from headrace.core.version import __version__
from headrace.core.wire import encode_frame, gateway_decoder
from headrace.router.kv_traits import traits_of_hello
from headrace.router.link import Link, stay_connected
from headrace.router.worker import Receiver

if TYPE_CHECKING:
    from headrace.router.external.monitor import MonitorListener

MAX_UNSENT_BYTES = 256 * 1024 * 1024
DEFAULT_SILENCE_S = 60.0

# The silence is looked at so many times in its length; a replica is probed at half of it.
_CHECKS = 16


class ReplicaClient:
    """Submits requests to the replica that listens on a Unix socket; implements Worker.

    ``hello`` is the replica's latest greeting and stays while disconnected; ``alive`` says whether it is
    connected and greeted now. Everything runs in the event loop that called ``start``.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        replica_id: str = "",
        model: str = "",
        listener: MonitorListener | None = None,
        silence_s: float = DEFAULT_SILENCE_S,
        watch_idle: bool = False,
        on_hang: Callable[[int], None] | None = None,
        log: logging.Logger | None = None,
    ) -> None:
        """``listener`` hears of the replica's state and cache, under ``replica_id`` and ``model``'s name.

        A replica that does not say a word for ``silence_s`` seconds, a probe included, while it holds
        requests (``watch_idle``: at any time), is given up, and ``on_hang`` is told its pid.
        """
        self.path = str(path)
        self.replica_id = replica_id
        self.hello: Hello | None = None
        self.stats = Stats()
        self._model = model
        self._listener = listener
        self._silence_s = silence_s
        self._watch_idle = watch_idle
        self._on_hang = on_hang
        self._log = log or logging.getLogger(__name__)
        self._open: dict[str, dict[int, Receiver]] = {}  # request id -> its samples that have not ended
        self._link: Link[FromReplica] | None = None
        self._heard_at = 0.0  # when the replica last spoke, or was last given work while idle
        self._probed = False  # since then
        self._closing = False
        self._probes: dict[int, asyncio.Future[Health]] = {}
        self._nonces = itertools.count(1)
        self._loop: asyncio.AbstractEventLoop
        self._greeted = asyncio.Event()
        self._hurry = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None

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
        return len(self._open)

    def start(self) -> None:
        """Begins to connect, and to connect again whenever the replica goes away."""
        assert self._runner is None, "already started"
        self._loop = asyncio.get_running_loop()
        self._runner = self._loop.create_task(
            stay_connected(self.path, self._make_link, self._hurry, self._log),
            name=f"replica-client {self.path}",
        )
        self._watchdog = self._loop.call_later(self._silence_s / _CHECKS, self._watch)

    async def close(self) -> None:
        """Ends the connection; open requests fail with UnavailableError as if the replica had gone."""
        self._closing = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._link is not None:
            self._link.end("it was removed")
        if self._runner is not None:
            self._runner.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._runner

    async def wait_ready(self, timeout: float | None = None) -> Hello:
        """Waits for a greeted connection; UnavailableError after ``timeout`` seconds."""
        try:
            await asyncio.wait_for(self._greeted.wait(), timeout)
        except TimeoutError:
            raise UnavailableError(f"no replica answered on {self.path} within {timeout:g} s") from None
        assert self.hello is not None
        return self.hello

    def hurry(self) -> None:
        """Connects now if it waits for its next try: somebody heard that the replica is there."""
        self._hurry.set()

    def submit(self, request: Request, receiver: Receiver) -> None:
        """See Worker."""
        link = self._link
        if link is None or not self._greeted.is_set():
            raise UnavailableError("no replica is connected; it is starting or being restarted")
        if link.num_unsent_bytes() > MAX_UNSENT_BYTES:
            raise UnavailableError("the replica does not read its requests")
        frame = encode_frame(Submit(request, time.monotonic()))
        if not self._open:
            self._heard_at = self._loop.time()
        first, n = request.sample_index, request.sampling.n
        samples = self._open.setdefault(request.request_id, {})
        if n == 1:
            assert first not in samples, "a sample may run once at a time"
            samples[first] = receiver
        else:
            assert samples.keys().isdisjoint(range(first, first + n)), "a sample may run once at a time"
            samples.update(dict.fromkeys(range(first, first + n), receiver))
        link.write(frame)

    def abort(self, request_id: str, sample_index: int | None = None) -> None:
        """See Worker."""
        samples = self._open.get(request_id)
        if samples is None:
            return
        if sample_index is not None and samples.pop(sample_index, None) is None:
            return
        if sample_index is None or not samples:
            del self._open[request_id]
            sample_index = None
        if self._link is not None:
            self._link.send(Abort(request_id=request_id, sample_index=sample_index))

    def subscribe(self, next_seq: int = 0) -> None:
        """Asks for cache events from number ``next_seq`` on; 0: all that the cache holds."""
        if self._link is None:
            return
        instance = self.hello.instance if self.hello is not None and next_seq else ""
        self._link.send(Subscribe(next_seq=next_seq, instance=instance))

    def drain(self) -> None:
        """Asks the replica to take nothing new, finish what runs and exit."""
        if self._link is not None:
            self._link.send(Drain())

    async def probe(self, timeout: float = 5.0) -> Health:
        """The replica's own word on its health; UnavailableError when it does not answer in time."""
        if self._link is None or not self._greeted.is_set():
            raise UnavailableError("no replica is connected")
        nonce = next(self._nonces)
        future: asyncio.Future[Health] = self._loop.create_future()
        self._probes[nonce] = future
        self._link.send(Probe(nonce=nonce))
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            raise UnavailableError(f"the replica did not answer a probe within {timeout:g} s") from None
        finally:
            self._probes.pop(nonce, None)

    # Called by the link

    def _make_link(self) -> Link[FromReplica]:
        return Link(self, gateway_decoder(), self._log)

    def connected(self, link: Link[FromReplica]) -> None:
        """The link is open; its greeting is the first that will be read."""
        self._link = link

    def receive(self, link: Link[FromReplica], message: FromReplica) -> None:
        """Hands one decoded message to whoever waits for it."""
        self._heard_at = self._loop.time()
        self._probed = False
        if type(message) is Step:
            if message.outputs:
                self._deliver(message.outputs)
            if message.failed:
                for failed in message.failed:
                    self._fail(failed)
            self.stats = message.stats
            listener = self._listener
            if listener is not None and self._greeted.is_set():
                if message.events:
                    listener.on_events(self.replica_id, message.event_seq, message.events)
                listener.on_stats(self.replica_id, message.stats)
        elif type(message) is Health:
            self.stats = message.stats
            future = self._probes.get(message.nonce)
            if future is not None and not future.done():
                future.set_result(message)
        elif type(message) is CacheSnapshot:
            if self._listener is not None:
                self._listener.on_snapshot(self.replica_id, message)
        elif type(message) is Hello:
            self._greet(link, message)

    def _deliver(self, outputs: list[Output]) -> None:
        known = self._open
        groups: dict[Receiver, list[Output]] = {}
        for output in outputs:
            samples = known.get(output.request_id)
            if samples is None:
                continue  # aborted meanwhile
            receiver = samples.get(output.sample_index)
            if receiver is None:
                continue
            if output.finish_reason is not None:
                del samples[output.sample_index]
                if not samples:
                    del known[output.request_id]
            if receiver in groups:
                groups[receiver].append(output)
            else:
                groups[receiver] = [output]
        for receiver, group in groups.items():
            try:
                receiver.on_outputs(group)
            except Exception as error:
                # One request's trouble must not cost the others their connection.
                self._log.exception("request %s: its output could not be taken", group[0].request_id)
                self.abort(group[0].request_id)
                receiver.on_failed(EngineError(f"the output could not be used: {error!r}"), "caller_fault")

    def _fail(self, failed: Failed) -> None:
        samples = self._open.get(failed.request_id)
        if samples is None:
            return
        error = failed.to_error()
        outcome: Outcome = "replica_fault"
        if error.status == UnavailableError.status:
            outcome = "aborted"  # it drains: nobody's fault
        elif error.status < EngineError.status:
            outcome = "caller_fault"
        self.abort(failed.request_id)  # one sample may have been refused while others of a rescue run
        self._tell_failed(samples, error, outcome)

    def _tell_failed(self, samples: dict[int, Receiver], error: HeadraceError, outcome: Outcome) -> None:
        for receiver in set(samples.values()):
            try:
                receiver.on_failed(error, outcome)
            except Exception:  # the others are still to be told
                self._log.exception("a failed request could not be handled")

    def _greet(self, link: Link[FromReplica], hello: Hello) -> None:
        self.hello = hello
        self.stats = Stats()
        self._greeted.set()
        if self._listener is not None:
            self._listener.on_up(
                self.replica_id,
                instance=hello.instance,
                capabilities=CAPABILITIES,
                model=ModelInfo(
                    model=self._model or hello.model,
                    max_model_len=hello.max_model_len,
                    block_size=hello.block_size,
                    root_identity=hello.root_identity,
                    vocab_size=hello.vocab_size,
                    eos_token_ids=hello.eos_token_ids,
                    revision=hello.model_revision,
                ),
                max_num_seqs=hello.max_num_seqs,
                num_blocks=hello.num_blocks,
                block_size=hello.block_size,
                hardware=hello.hardware,
                kv=traits_of_hello(hello),
            )
            self.subscribe()

    def lose(self, link: Link[FromReplica], reason: str) -> None:
        """The link has ended: whoever waits is told now, the listener first."""
        if self._link is not link:
            return
        was_alive = self._greeted.is_set()
        self._link = None
        self._greeted.clear()
        lost, self._open = self._open, {}
        if was_alive:
            level = logging.DEBUG if self._closing else logging.WARNING
            self._log.log(level, "replica at %s: connection ended (%s)", self.path, reason)
        if self._listener is not None and was_alive:
            self._listener.on_down(self.replica_id, reason)
        error = UnavailableError(f"the replica went away ({reason}); the request was not finished")
        for samples in lost.values():
            self._tell_failed(samples, error, "replica_gone")
        for future in self._probes.values():
            if not future.done():
                future.set_exception(UnavailableError(f"the replica went away ({reason})"))

    def _watch(self) -> None:
        """Notices a replica that is alive and does nothing, as long as requests wait for it."""
        self._watchdog = self._loop.call_later(self._silence_s / _CHECKS, self._watch)
        link = self._link
        if link is None or not self._greeted.is_set() or not (self._open or self._watch_idle):
            return
        silence = self._loop.time() - self._heard_at
        if silence >= self._silence_s:
            pid = self.hello.pid if self.hello is not None else 0
            self._log.error("replica at %s (pid %d) hangs: not a word for %.1f s", self.path, pid, silence)
            link.end(f"it did not answer for {silence:.0f} s and is being restarted")
            if self._on_hang is not None:
                self._on_hang(pid)
        elif silence >= self._silence_s / 2 and not self._probed:
            self._probed = True
            link.send(Probe(nonce=0))


CAPABILITIES = Capabilities(
    kind="headrace",
    version=__version__,
    tokens=True,
    exact_rescue=True,
    cache_events=True,
    abort=True,
    load=True,
)
"""What every replica of ours can do."""
