"""Replicas of our protocol in this process. Their tokens follow from seed, sample and position alone, as
those of a real engine do: wherever a stream goes on, the right next token is known. They die, lie and hang.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from headrace.core.messages import (
    Abort,
    CacheEvent,
    CacheSnapshot,
    Drain,
    Failed,
    Health,
    Hello,
    Output,
    Probe,
    Stats,
    Step,
    Submit,
    Subscribe,
    Timing,
    TokenLogprobs,
    ToReplica,
)
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.core.routing import Endpoint, Role
from headrace.core.wire import encode_frame, replica_decoder

MODEL = "m"
ROOT = b"r" * 32
BLOCK_SIZE = 4
EOS = 7

Trouble = Literal["die", "garbage", "half", "hang", "fail", "stop"]


def token(seed: int, sample: int, position: int) -> int:
    """Never EOS."""
    return 10 + (seed * 1_000_003 + sample * 7919 + position * 31 + position * position) % 89


def expected(request: Request, sample: int = 0, count: int | None = None) -> list[int]:
    """The output of one sample, undisturbed."""
    count = request.sampling.max_tokens if count is None else count
    assert count is not None
    return [token(request.sampling.seed or 0, sample, position) for position in range(count)]


def make_request(
    name: str = "r", *, seed: int = 1, prompt: int = 10, sample_index: int = 0, **sampling: object
) -> Request:
    sampling.setdefault("max_tokens", 8)
    return Request(
        request_id=name,
        model=MODEL,
        sample_index=sample_index,
        prompt=pack_tokens(range(100, 100 + prompt)),
        sampling=SamplingParams(seed=seed, **sampling),  # type: ignore[arg-type]
    )


class _Sample:
    def __init__(self, request: Request, index: int, peer: _Peer) -> None:
        self.request = request
        self.index = index
        self.peer = peer
        self.position = request.num_output_tokens
        self.sent = 0


class FakeReplica:
    """``trouble(request, sample, position)`` is asked before each token; ``submits`` and ``aborts`` record.

    It steps on its own, one token a sample a step, whenever the event loop comes round; ``paused`` holds it.
    """

    def __init__(self, path: Path | str, replica_id: str = "a") -> None:
        self.path = str(path)
        self.replica_id = replica_id
        self.trouble: Callable[[Request, int, int], Trouble | None] = lambda *_: None
        self.submits: list[Request] = []
        self.aborts: list[Abort] = []
        self.subscribes: list[Subscribe] = []
        self.samples: dict[tuple[str, int], _Sample] = {}
        self.peers: list[_Peer] = []
        self.num_connections = 0
        self.draining = False
        self.hangs = False
        self.paused = False
        self.greets = True
        self.snapshot = CacheSnapshot(stored=[], next_seq=0)
        self.stats = Stats(num_blocks=1000, num_free_blocks=1000)
        self._generation = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._stepping = False
        self.role: Role = "unified"
        self.timing = lambda request: Timing(0.1, 0.2, 3)  # told with the first token
        self.hello: Hello
        self._new_process()

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint(
            replica_id=self.replica_id, model=MODEL, address=self.path, kind="headrace", role=self.role
        )

    def take_role(self, role: Role) -> None:
        """Before it starts: what it is there for, and where others fetch from it."""
        self.role = role
        self._new_process()

    def _new_process(self) -> None:
        number = next(self._generation)
        self.hello = Hello(
            replica_id=self.replica_id,
            pid=number,
            model=MODEL,
            model_revision="0",
            role=self.role,
            device="cpu",
            dtype="float32",
            vocab_size=200,
            max_model_len=512,
            max_num_seqs=64,
            block_size=BLOCK_SIZE,
            num_blocks=1000,
            root_identity=ROOT,
            eos_token_ids=[EOS],
            load_seconds=0.0,
            weights_bytes=0,
            kv_bytes=0,
            notes=[],
            instance=f"{self.replica_id}-{number}",
            hardware="fake",
            kv_address="" if self.role == "decode" else f"unix:{self.path}.kv-{number}",
            kv_block_bytes=1000,
            kv_format="fake",
        )

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        Path(self.path).unlink(missing_ok=True)
        self._server = await loop.create_unix_server(lambda: _Peer(self), self.path)

    def die(self) -> None:
        """Ends at once, as by SIGKILL; nothing listens any more."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.samples.clear()
        for peer in list(self.peers):
            peer.transport.abort()

    async def restart(self) -> None:
        """Another process on the same path."""
        self.die()
        self._new_process()
        self.hangs = self.draining = self.paused = False
        await self.start()

    async def close(self) -> None:
        self.die()
        while self.peers:
            await asyncio.sleep(0)

    def resume(self) -> None:
        self.paused = False
        self._wake()

    def tell(self, first_seq: int, *events: CacheEvent) -> None:
        """Sends cache events to everybody."""
        for peer in self.peers:
            peer.send(Step(outputs=[], failed=[], stats=self.stats, events=list(events), event_seq=first_seq))

    def receive(self, peer: _Peer, message: ToReplica) -> None:
        if isinstance(message, Submit):
            self._submit(peer, message.request)
        elif isinstance(message, Abort):
            self.aborts.append(message)
            for key in list(self.samples):
                if key[0] == message.request_id and message.sample_index in (None, key[1]):
                    del self.samples[key]
        elif isinstance(message, Probe):
            if not self.hangs:
                peer.send(Health(nonce=message.nonce, draining=self.draining, stats=self.stats))
        elif isinstance(message, Subscribe):
            self.subscribes.append(message)
            if not self.hangs and not message.instance:  # a replay is up to the test
                peer.send(self.snapshot)
        elif isinstance(message, Drain):
            self.draining = True

    def _submit(self, peer: _Peer, request: Request) -> None:
        self.submits.append(request)
        if self.draining:
            failed = Failed(request.request_id, 503, "service_unavailable", "draining", None, "unavailable")
            peer.send(Step(outputs=[], failed=[failed], stats=self.stats))
            return
        for index in range(request.sample_index, request.sample_index + request.sampling.n):
            assert (request.request_id, index) not in self.samples
            self.samples[request.request_id, index] = _Sample(request, index, peer)
        self._wake()

    def _wake(self) -> None:
        if not self._stepping:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._stepping = False
        if self.hangs or self.paused:
            return
        steps: dict[_Peer, Step] = {}
        for key, sample in list(self.samples.items()):
            if key not in self.samples:
                continue
            step = steps.setdefault(sample.peer, Step(outputs=[], failed=[], stats=self.stats))
            trouble = self.trouble(sample.request, sample.index, sample.position)
            if trouble is None:
                self._advance(key, sample, step)
            elif trouble == "fail":
                request_id = key[0]
                step.failed.append(
                    Failed(request_id, 500, "server_error", "step failed", None, "engine_error")
                )
                for other in [k for k in self.samples if k[0] == request_id]:
                    del self.samples[other]
            elif trouble == "stop":
                del self.samples[key]
                step.outputs.append(Output(key[0], key[1], [], "abort"))
            else:
                self._disturb(trouble, steps)
                return
        for peer, step in steps.items():
            peer.send(step)
        if self.samples:
            self._wake()

    def _disturb(self, trouble: Trouble, steps: dict[_Peer, Step]) -> None:
        """Whatever was sampled in this step before is still sent."""
        for peer, step in steps.items():
            peer.send(step)
            if trouble == "garbage":
                peer.transport.write(b"\x05\x00\x00\x00hello")
            elif trouble == "half":
                frame = encode_frame(Step(outputs=[Output("x", 0, [1])], failed=[], stats=self.stats))
                peer.transport.write(frame[: len(frame) // 2])
        if trouble in ("die", "half"):
            self._server and self._server.close()
            self._server = None
            self.samples.clear()
            for peer in list(self.peers):
                peer.transport.close()  # what was written is still read
        elif trouble == "garbage":
            self.samples.clear()
        elif trouble == "hang":
            self.hangs = True

    def _advance(self, key: tuple[str, int], sample: _Sample, step: Step) -> None:
        request, sampling = sample.request, sample.request.sampling
        new = token(sampling.seed or 0, sample.index, sample.position)
        sample.position += 1
        sample.sent += 1
        first = sample.sent == 1
        done = sample.position == sampling.max_tokens
        if done:
            del self.samples[key]
        logprobs = prompt_logprobs = None
        if sampling.logprobs is not None:
            logprobs = [TokenLogprobs(new, -float(sample.position), 1, [])]
        if first and sampling.prompt_logprobs is not None:
            ids = request.token_ids()
            prompt_logprobs = [None, *(TokenLogprobs(t, -1.0, 1, []) for t in ids[1:])]
        step.outputs.append(
            Output(
                key[0],
                key[1],
                [new],
                "length" if done else None,
                num_cached_tokens=2 if first else 0,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                timing=self.timing(request) if first else None,
            )
        )


class _Peer(asyncio.Protocol):
    def __init__(self, replica: FakeReplica) -> None:
        self._replica = replica
        self._decoder = replica_decoder()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._replica.num_connections += 1
        self._replica.peers.append(self)
        if self._replica.greets:
            self.send(self._replica.hello)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._replica.receive(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._replica.peers.remove(self)
        for key in [key for key, sample in self._replica.samples.items() if sample.peer is self]:
            del self._replica.samples[key]

    def send(self, message: object) -> None:
        self.transport.write(encode_frame(message))


async def until(condition: Callable[[], object], timeout: float = 20.0) -> None:
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def running(*replicas: FakeReplica):
    for replica in replicas:
        await replica.start()
    try:
        yield
    finally:
        for replica in replicas:
            await replica.close()
