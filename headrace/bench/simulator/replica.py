"""A replica whose model is a formula: the real scheduler, block pool and wire around a timer.

    Unix socket ──► Submit, Abort, Probe, Subscribe ──► Scheduler.add, abort
    timer       ──► Scheduler.schedule ─► (StepTime.seconds pass) ─► Scheduler.update ──► one Step a peer

It takes the place of ``replica/process.py`` with ``engine/engine.py`` in one event loop, many at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.simulator.step_time import StepTime, StepWork
from headrace.core.errors import HeadraceError
from headrace.core.identity import root_identity
from headrace.core.messages import (
    Abort,
    CacheSnapshot,
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
    ToReplica,
)
from headrace.core.request import Request
from headrace.core.wire import encode_frame, replica_decoder
from headrace.engine.schedule import Schedule, SchedulerConfig
from headrace.engine.scheduler import Scheduler
from headrace.engine.sequence import Sequence
from headrace.kvcache.block_pool import BlockPool

REVISION = "paced"


class PacedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One hardware class serving one model: its speed and its sizes."""

    name: str
    step_time: StepTime
    num_blocks: int
    block_size: int = 128
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    max_model_len: int = 262_144
    vocab_size: int = 1024

    @property
    def root(self) -> bytes:
        """Parent of first blocks' identities."""
        return root_identity(
            model_revision=REVISION, kv_dtype="bfloat16", kv_layout="paced", block_size=self.block_size
        )

    def scheduler(self, pool: BlockPool) -> Scheduler:
        config = SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
        )
        return Scheduler(config, pool, self.root, ())


class PacedReplica:
    """Serves on ``path`` in the running loop until ``close``; noise is drawn from ``seed``."""

    def __init__(self, replica_id: str, path: Path, model: PacedModel, *, seed: int) -> None:
        self.replica_id = replica_id
        self.path = path
        self.model = model
        self.pool = BlockPool(model.num_blocks, model.block_size)
        self.scheduler = model.scheduler(self.pool)
        self.busy_s = 0.0
        self.num_steps = 0
        self._rng = random.Random(seed)
        self._tokens = itertools.cycle(range(2, model.vocab_size))  # what the model "says"
        self._peers: set[_Peer] = set()
        self._owners: dict[tuple[str, int], _Peer] = {}  # of unfinished samples
        self._server: asyncio.Server | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_unix_server(lambda: _Peer(self), str(self.path))

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._server is not None:
            self._server.close()
        for peer in list(self._peers):
            peer.transport.abort()
        await asyncio.sleep(0)
        self.path.unlink(missing_ok=True)

    def stats(self) -> Stats:
        counters, scheduler, pool = self.scheduler.counters, self.scheduler, self.pool
        return Stats(
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_queued_tokens=scheduler.num_queued_tokens,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_preemptions=counters.num_preemptions,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            prompt_tokens=counters.prompt_tokens,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generation_tokens=counters.generation_tokens,
            num_steps=self.num_steps,
        )

    # From the peers

    def greet(self, peer: _Peer) -> None:
        """Every connection hears first what this replica can do."""
        self._peers.add(peer)
        model = self.model
        peer.send(
            Hello(
                replica_id=self.replica_id,
                pid=os.getpid(),
                model=model.name,
                model_revision=REVISION,
                role="unified",
                device="paced",
                dtype="bfloat16",
                vocab_size=model.vocab_size,
                max_model_len=model.max_model_len,
                max_num_seqs=model.max_num_seqs,
                block_size=model.block_size,
                num_blocks=model.num_blocks,
                root_identity=model.root,
                eos_token_ids=[],
                load_seconds=0.0,
                weights_bytes=0,
                kv_bytes=0,
                notes=[],
                instance=self.replica_id,
                hardware="paced",
            )
        )

    def receive(self, peer: _Peer, message: ToReplica) -> None:
        if isinstance(message, Submit):
            self._submit(peer, message.request)
        elif isinstance(message, Abort):
            self._forget(self.scheduler.abort(message.request_id, message.sample_index))
        elif isinstance(message, Probe):
            peer.send(Health(message.nonce, False, self.stats()))
        elif isinstance(message, Subscribe):
            self._publish([])  # what happened before belongs before the answer
            peer.subscribed = True
            next_seq, _ = self.pool.take_events()
            if (message.next_seq, message.instance) != (next_seq, self.replica_id):
                peer.send(CacheSnapshot(self.pool.snapshot(), next_seq))

    def lost(self, peer: _Peer) -> None:
        """A peer is gone, and with it everybody who waited for its requests."""
        self._peers.discard(peer)
        for request_id in {request_id for (request_id, _), owner in self._owners.items() if owner is peer}:
            self._forget(self.scheduler.abort(request_id))

    def _submit(self, peer: _Peer, request: Request) -> None:
        try:
            samples = self.scheduler.add(request)
        except HeadraceError as error:
            peer.send(Step([], [Failed.of_error(request.request_id, error)], self.stats()))
            return
        now = asyncio.get_running_loop().time()
        for sequence in samples:
            sequence.added_at = now
            self._owners[sequence.request_id, sequence.sample_index] = peer
        if self._timer is None:
            self._begin_step()

    # The step loop

    def _begin_step(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        schedule = self.scheduler.schedule()
        if not schedule.entries:
            return
        for sequence in schedule.admitted:
            sequence.started_at = loop.time()
        seconds = self.model.step_time.seconds(StepWork.of(schedule), self._rng)
        self.busy_s += seconds
        self.num_steps += 1
        self._timer = loop.call_later(seconds, self._end_step, schedule)

    def _end_step(self, schedule: Schedule) -> None:
        loop = asyncio.get_running_loop()
        sampling = [entry.sequence for entry in schedule.entries if entry.samples]
        tokens = list(itertools.islice(self._tokens, len(sampling)))
        finished = self.scheduler.update(schedule, tokens)
        now = loop.time()
        outputs = [
            _output(sequence, token, now)
            for sequence, token in zip(sampling, tokens, strict=True)
            if sequence.finish_reason != "abort"
        ]
        self._publish(outputs)
        self._forget(finished)
        # As a timer, so that what has arrived meanwhile is read before the next schedule.
        self._timer = loop.call_later(0.0, self._begin_step) if self.scheduler.has_work else None

    def _publish(self, outputs: list[Output]) -> None:
        event_seq, events = self.pool.take_events()
        stats = self.stats()
        for peer in list(self._peers):
            own = [o for o in outputs if self._owners[o.request_id, o.sample_index] is peer]
            if own or peer.subscribed:
                heard = events if peer.subscribed else []
                peer.send(Step(own, [], stats, heard, event_seq if heard else 0))

    def _forget(self, ended: list[Sequence]) -> None:
        for sequence in ended:
            del self._owners[sequence.request_id, sequence.sample_index]


def _output(sequence: Sequence, token: int, now: float) -> Output:
    timing = None
    if sequence.num_sampled_tokens == 1:
        timing = Timing(
            sequence.started_at - sequence.added_at,
            now - sequence.started_at,
            sequence.prompt_length - sequence.num_hit_tokens,
        )
    return Output(
        sequence.request_id,
        sequence.sample_index,
        [token],
        sequence.finish_reason,
        num_cached_tokens=sequence.num_cached_tokens,
        timing=timing,
    )


class _Peer(asyncio.Protocol):
    """One connection to a paced replica."""

    transport: asyncio.Transport

    def __init__(self, replica: PacedReplica) -> None:
        self._replica = replica
        self._decoder = replica_decoder()
        self.subscribed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._replica.greet(self)

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._replica.receive(self, message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._replica.lost(self)

    def send(self, message: Any) -> None:
        self.transport.write(encode_frame(message))
