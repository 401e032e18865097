"""A replica that speaks the wire protocol and produces scripted tokens, paced, dying, lying or silent.

One Step frame a step carries the outputs of every running request, as a real replica's does. It can also
run as a process: ``python -m tests.gateway.fake_replica SOCKET``.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from msgspec.structs import replace

from headrace.core.messages import (
    Abort,
    CacheSnapshot,
    Failed,
    Health,
    Hello,
    Origin,
    Output,
    Probe,
    Stats,
    Step,
    Submit,
    Subscribe,
    Timing,
    TokenLogprobs,
)
from headrace.core.request import Request
from headrace.core.wire import encode_frame, replica_decoder


@dataclass
class Plan:
    """What becomes of one request: ``tokens`` (repeated as needed), after ``start_after`` silent steps.

    ``die_after`` and ``garbage_after`` count tokens, ``failure`` answers at once with Failed. A request that
    was rescued goes on in ``tokens`` behind those it has.
    """

    tokens: Sequence[int] = (1, 2, 3)
    endless: bool = False
    start_after: int = 0
    silent: bool = False
    die_after: int | None = None
    garbage_after: int | None = None
    failure: Failed | None = None
    tokens_per_step: int = 1


@dataclass
class Running:
    request: Request
    plan: Plan
    writer: asyncio.StreamWriter
    sent: int
    samples: list[int]
    began: bool = False
    waited: int = 0
    aborted: set[int] = field(default_factory=set)


class FakeReplica:
    """Serves until closed; ``plan`` decides per request, ``requests`` and ``aborts`` record."""

    def __init__(
        self,
        path: Path | str,
        *,
        vocab_size: int,
        eos: int,
        plan: Callable[[Request], Plan] = lambda request: Plan(),
        interval: float = 0.001,
        max_model_len: int = 512,
        block_size: int = 16,
        greets: bool = True,
        replica_id: str = "fake",
        max_num_seqs: int = 64,
    ) -> None:
        self.path = str(path)
        self.eos = eos
        self.plan = plan
        self.interval = interval
        self.greets = greets
        self.hangs = False  # neither steps nor answers probes
        self.num_cached_tokens = 0
        self.timing = Timing(0.0, 0.0, 0)
        self.origin: Origin | None = None
        self.requests: list[Request] = []
        self.aborts: list[Abort] = []
        self.running: dict[tuple[str, int], Running] = {}
        self.num_connections = 0
        self.hello = Hello(
            replica_id=replica_id,
            pid=0,
            model="fake-model",
            model_revision="0",
            role="unified",
            device="cpu",
            dtype="float32",
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            block_size=block_size,
            num_blocks=1000,
            root_identity=b"r" * 32,
            eos_token_ids=[eos],
            load_seconds=0.0,
            weights_bytes=0,
            kv_bytes=0,
            notes=[],
            instance=secrets.token_hex(8),
            hardware="fake",
        )
        self._work = asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None
        self._stepper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        Path(self.path).unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        self._stepper = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._stepper is not None:
            self._stepper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepper
        if self._server is not None:
            self._server.close()
        self.die()

    def die(self) -> None:
        """Closes every connection without a word, as a killed process does, and goes on as another one."""
        self.running.clear()
        self.hello = replace(self.hello, instance=secrets.token_hex(8))
        for writer in list(self._writers):
            writer.transport.abort()

    @property
    def num_running(self) -> int:
        return len(self.running)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.add(writer)
        decoder = replica_decoder()
        try:
            if self.greets:
                writer.write(encode_frame(self.hello))
            while data := await reader.read(1 << 20):
                for message in decoder.feed(data):
                    self._receive(message, writer)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    def _receive(self, message: object, writer: asyncio.StreamWriter) -> None:
        if isinstance(message, Submit):
            request = message.request
            self.requests.append(request)
            plan = self.plan(request)
            if plan.failure is not None:
                failed = Failed(request.request_id, *_fields(plan.failure)[1:])
                writer.write(encode_frame(Step(outputs=[], failed=[failed], stats=Stats())))
                return
            first = request.sample_index
            samples = list(range(first, first + request.sampling.n))
            key = (request.request_id, first)
            self.running[key] = Running(request, plan, writer, request.num_output_tokens, samples)
            self._work.set()
        elif isinstance(message, Abort):
            self.aborts.append(message)
            for key, running in list(self.running.items()):
                if key[0] == message.request_id:
                    index = message.sample_index
                    running.aborted.update(running.samples if index is None else [index])
                    if running.aborted.issuperset(running.samples):
                        del self.running[key]
        elif isinstance(message, Subscribe):
            writer.write(encode_frame(CacheSnapshot(stored=[], next_seq=0)))
            writer.write(encode_frame(Step(outputs=[], failed=[], stats=self._stats())))
        elif isinstance(message, Probe) and not self.hangs:
            health = Health(nonce=message.nonce, draining=False, stats=self._stats())
            writer.write(encode_frame(health))

    async def _run(self) -> None:
        while True:
            if not self.running:
                self._work.clear()
                await self._work.wait()
            for writer in list(self._writers):
                outputs = [
                    output
                    for running in list(self.running.values())
                    if running.writer is writer
                    for output in self._advance(running)
                ]
                if outputs:
                    writer.write(encode_frame(Step(outputs=outputs, failed=[], stats=self._stats())))
            await asyncio.sleep(self.interval)

    def _advance(self, running: Running) -> list[Output]:
        plan, request = running.plan, running.request
        if plan.silent or self.hangs:
            return []
        if running.waited < plan.start_after:
            running.waited += 1
            return []
        if plan.die_after is not None and running.sent >= plan.die_after:
            self.die()
            return []
        if plan.garbage_after is not None and running.sent >= plan.garbage_after:
            running.writer.write(b"\x05\x00\x00\x00hello")
            self._forget(running)
            return []
        sampling = request.sampling
        tokens: list[int] = []
        reason, stop_token = None, None
        for _ in range(plan.tokens_per_step):
            if running.sent >= len(plan.tokens) and not plan.endless:
                tokens.append(self.eos)
                reason, stop_token = "stop", self.eos
            else:
                tokens.append(plan.tokens[running.sent % len(plan.tokens)])
            running.sent += 1
            if reason is None and sampling.max_tokens is not None and running.sent >= sampling.max_tokens:
                reason = "length"
            if reason is not None:
                break
        if reason is not None:
            self._forget(running)
        first, running.began = not running.began, True
        wanted = 0 if request.record and sampling.logprobs is None else sampling.logprobs
        return [
            Output(
                request_id=request.request_id,
                sample_index=index,
                token_ids=tokens,
                finish_reason=reason,  # type: ignore[arg-type]
                stop_token=stop_token,
                num_cached_tokens=self.num_cached_tokens,
                logprobs=_logprobs(tokens, wanted),
                prompt_logprobs=_prompt_logprobs(request) if first and index == running.samples[0] else None,
                timing=self.timing if first else None,
                origin=self.origin if first and request.record else None,
            )
            for index in running.samples
            if index not in running.aborted
        ]

    def _forget(self, running: Running) -> None:
        self.running.pop((running.request.request_id, running.samples[0]), None)

    def _stats(self) -> Stats:
        return Stats(
            num_running=len(self.running),
            num_waiting=3,
            num_blocks=100,
            num_free_blocks=75,
            num_preemptions=5,
            prefix_cache_queries=200,
            prefix_cache_hits=150,
        )


def _fields(failed: Failed) -> tuple[object, ...]:
    return (failed.request_id, failed.status, failed.kind, failed.message, failed.param, failed.code)


def _logprobs(tokens: list[int], wanted: int | None) -> list[TokenLogprobs] | None:
    if wanted is None:
        return None
    return [
        TokenLogprobs(token, -0.5, 1, [(abs(token - rank), -0.5 - rank) for rank in range(wanted)])
        for token in tokens
    ]


def _prompt_logprobs(request: Request) -> list[TokenLogprobs | None] | None:
    wanted = request.sampling.prompt_logprobs
    if wanted is None:
        return None
    described = _logprobs(request.token_ids().tolist()[1:], wanted) or []
    return [None, *described]
