"""A paced replica on its socket: timing by the formula, what each peer hears, aborts, gone peers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.simulator.clock import run
from headrace.bench.simulator.replica import PacedModel, PacedReplica
from headrace.bench.simulator.step_time import StepTime
from headrace.core.messages import (
    Abort,
    BlocksStored,
    CacheSnapshot,
    FromReplica,
    Health,
    Hello,
    Output,
    Probe,
    Step,
    Submit,
    Subscribe,
)
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.core.wire import encode_frame, gateway_decoder

MODEL = PacedModel(
    name="paced",
    step_time=StepTime(base=1.0, per_prefill=0.1),
    num_blocks=50,
    block_size=4,
    max_num_seqs=4,
    max_num_batched_tokens=16,
    max_model_len=200,
)


class Peer:
    """The other end of a replica's socket: what it said, and when."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.heard: list[tuple[float, FromReplica]] = []
        self._writer = writer
        self._task = asyncio.create_task(self._read(reader))

    @classmethod
    async def connect(cls, path: Path) -> Peer:
        return cls(*await asyncio.open_unix_connection(str(path)))

    async def _read(self, reader: asyncio.StreamReader) -> None:
        decoder = gateway_decoder()
        loop = asyncio.get_running_loop()
        while data := await reader.read(1 << 16):
            self.heard += [(loop.time(), message) for message in decoder.feed(data)]

    def say(self, message: Any) -> None:
        self._writer.write(encode_frame(message))

    async def close(self) -> None:
        self._writer.close()
        await self._task

    @property
    def steps(self) -> list[Step]:
        return [message for _, message in self.heard if isinstance(message, Step)]

    @property
    def outputs(self) -> list[tuple[float, Output]]:
        return [(at, o) for at, step in self.heard if isinstance(step, Step) for o in step.outputs]


def request(name: str, length: int, max_tokens: int, *, first: int = 2, n: int = 1) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, n=n)
    return Request(request_id=name, prompt=pack_tokens(range(first, first + length)), sampling=sampling)


def serve(tmp_path: Path, scenario: Callable[[PacedReplica, Peer], Awaitable[None]]) -> None:
    async def main() -> None:
        replica = PacedReplica("r0", tmp_path / "r.sock", MODEL, seed=1)
        await replica.start()
        peer = await Peer.connect(replica.path)
        await scenario(replica, peer)
        await peer.close()
        await asyncio.sleep(100.0)
        assert not replica.scheduler.has_work
        replica.scheduler.check_integrity()
        await replica.close()

    run(main())


def test_tokens_come_when_the_formula_says(tmp_path: Path) -> None:
    async def scenario(replica: PacedReplica, peer: Peer) -> None:
        peer.say(Submit(request("a", 20, 3)))
        await asyncio.sleep(50.0)
        # chunks of 16 and 4 prompt tokens, then two steps of one token
        assert [round(at, 6) for at, _ in peer.outputs] == [4.0, 5.0, 6.0]
        first = peer.outputs[0][1]
        assert first.timing is not None
        assert (first.timing.queue_s, first.timing.prefill_s) == pytest.approx((0.0, 4.0))
        assert first.timing.num_computed_tokens == 20
        assert [o.finish_reason for _, o in peer.outputs] == [None, None, "length"]
        assert replica.busy_s == pytest.approx(6.0)

    serve(tmp_path, scenario)


def test_a_request_in_the_middle_of_a_step_waits_for_its_end(tmp_path: Path) -> None:
    async def scenario(_: PacedReplica, peer: Peer) -> None:
        peer.say(Submit(request("a", 10, 2)))
        await asyncio.sleep(0.5)
        peer.say(Submit(request("b", 10, 1, first=50)))
        await asyncio.sleep(50.0)
        (b,) = [o for _, o in peer.outputs if o.request_id == "b"]
        assert b.timing is not None and b.timing.queue_s == pytest.approx(1.5)

    serve(tmp_path, scenario)


def test_each_peer_hears_its_own_outputs_and_subscribers_hear_of_the_cache(tmp_path: Path) -> None:
    async def scenario(replica: PacedReplica, peer: Peer) -> None:
        watcher = await Peer.connect(replica.path)
        watcher.say(Subscribe(0, "r0"))
        peer.say(Submit(request("a", 9, 2)))
        await asyncio.sleep(20.0)
        assert isinstance(peer.heard[0][1], Hello) and isinstance(watcher.heard[0][1], Hello)
        assert not watcher.outputs and len(watcher.steps) == 2
        assert not any(step.events for step in peer.steps)
        (event,) = [event for step in watcher.steps for event in step.events]
        assert isinstance(event, BlocksStored) and len(event.block_ids) == 2 and event.parent == MODEL.root
        assert watcher.steps[-1].stats.num_running == 0
        # who comes later gets all at once
        late = await Peer.connect(replica.path)
        late.say(Subscribe())
        await asyncio.sleep(1.0)
        (snapshot,) = [m for _, m in late.heard if isinstance(m, CacheSnapshot)]
        assert [s.block_ids for s in snapshot.stored] == [event.block_ids] and snapshot.next_seq == 1
        for each in (watcher, late):
            await each.close()

    serve(tmp_path, scenario)


def test_a_prefix_that_was_computed_is_found(tmp_path: Path) -> None:
    async def scenario(_: PacedReplica, peer: Peer) -> None:
        peer.say(Submit(request("a", 9, 1)))
        await asyncio.sleep(10.0)
        peer.say(Submit(request("b", 9, 1)))
        await asyncio.sleep(10.0)
        assert [o.num_cached_tokens for _, o in peer.outputs] == [0, 8]

    serve(tmp_path, scenario)


def test_aborted_requests_say_nothing_more(tmp_path: Path) -> None:
    async def scenario(replica: PacedReplica, peer: Peer) -> None:
        peer.say(Submit(request("a", 9, 50)))
        peer.say(Submit(request("b", 9, 3, n=2, first=30)))
        await asyncio.sleep(1.0)
        peer.say(Abort("a"))
        peer.say(Abort("b", 0))
        peer.say(Probe(7))
        await asyncio.sleep(0.0)
        await asyncio.sleep(30.0)
        assert {(o.request_id, o.sample_index) for _, o in peer.outputs} == {("b", 1)}
        assert any(isinstance(m, Health) and m.nonce == 7 for _, m in peer.heard)

    serve(tmp_path, scenario)


def test_a_request_that_cannot_be_served_fails_alone(tmp_path: Path) -> None:
    async def scenario(_: PacedReplica, peer: Peer) -> None:
        peer.say(Submit(request("long", 500, 1)))
        peer.say(Submit(request("a", 9, 1)))
        await asyncio.sleep(10.0)
        assert [f.request_id for step in peer.steps for f in step.failed] == ["long"]
        assert [o.request_id for _, o in peer.outputs] == ["a"]

    serve(tmp_path, scenario)


def test_the_requests_of_a_peer_that_is_gone_are_aborted(tmp_path: Path) -> None:
    async def scenario(replica: PacedReplica, peer: Peer) -> None:
        other = await Peer.connect(replica.path)
        other.say(Submit(request("a", 9, 100)))
        peer.say(Submit(request("b", 9, 3, first=40)))
        await asyncio.sleep(2.0)
        await other.close()
        await asyncio.sleep(30.0)
        assert replica.stats().num_running == 0
        assert [o.finish_reason for _, o in peer.outputs][-1] == "length"

    serve(tmp_path, scenario)
