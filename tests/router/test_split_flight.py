"""Requests whose prompt one replica computes and another answers, through the death of either."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from headrace.core.identity import block_identities
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Timing
from headrace.core.request import Request
from headrace.router.breaker import FAULTS
from headrace.router.dispatcher import Dispatcher
from headrace.router.placer import LocalPlacer
from tests.router.fleet import LOG, FleetUnderTest, Sink, num_ready
from tests.router.replicas import BLOCK_SIZE, ROOT, FakeReplica, expected, make_request, until

PROMPT = 400


def request(name: str, *, prompt: int = PROMPT, **fields: object) -> Request:
    made = make_request(name, prompt=prompt, **fields)
    ids = b"".join(block_identities(ROOT, made.prompt, BLOCK_SIZE))
    return msgspec.structs.replace(made, block_ids=ids)


def told(fetched: bool):
    """What a replica says of a prompt's way to it: fetched as it was asked to, or not at all."""

    def timing(request: Request) -> Timing:
        tokens = request.num_prompt_tokens
        if not request.prefill_from:
            return Timing(0.0, 0.1, tokens)
        return Timing(0.0, 0.01, 4, 0.2, tokens - 4) if fetched else Timing(0.0, 0.2, tokens, 0.1)

    return timing


class Split:
    """Prefill replicas p, q, decode replicas a, b; streams keep the latter busy."""

    def __init__(self, rig: FleetUnderTest, prefill: list[FakeReplica], decode: list[FakeReplica]) -> None:
        self.rig = rig
        self.prefill = prefill
        self.decode = decode
        self.streams: list[Sink] = []

    async def busy(self, count: int = 8) -> None:
        """Lets so many requests run and holds them after their first token."""
        for i in range(count):
            sink = self.rig.submit(request(f"stream{i}", prompt=4, max_tokens=400))
            self.streams.append(sink)
        await until(lambda: all(sink.outputs for sink in self.streams))
        for replica in self.decode:
            replica.paused = True

    def on(self, sink: Sink) -> FakeReplica:
        return self.rig.on(sink.flight)

    def resume(self) -> None:
        for replica in self.decode:
            replica.resume()

    def giver(self, sink: Sink) -> str:
        assert sink.flight is not None and sink.flight.placement is not None
        return sink.flight.placement.prefill_replica

    async def finish(self, *sinks: Sink) -> None:
        """Everything completes, with the right tokens, and nothing is left anywhere."""
        self.resume()
        await until(lambda: all(sink.ended for sink in (*sinks, *self.streams)))
        for sink in (*sinks, *self.streams):
            assert sink.error is None and sink.flight is not None
            assert sink.tokens() == expected(sink.flight.request)
        await self.rig.quiet()


@contextlib.asynccontextmanager
async def split(
    folder: Path, prefill: int = 1, decode: int = 2, *, fetched: bool = True
) -> AsyncIterator[Split]:
    config = RouterConfig()
    givers = [FakeReplica(folder / f"{name}.sock", name) for name in "pq"[:prefill]]
    takers = [FakeReplica(folder / f"{name}.sock", name) for name in "ab"[:decode]]
    for replica in givers:
        replica.take_role("prefill")
    for replica in takers:
        replica.take_role("decode")
        replica.timing = told(fetched)
    everyone = givers + takers
    placer = LocalPlacer(config, log=LOG)
    placer.start()
    dispatcher = Dispatcher(placer, config, log=LOG)
    dispatcher.start()
    try:
        for replica in everyone:
            await replica.start()
            placer.set_endpoint(replica.endpoint)
        await until(lambda: num_ready(dispatcher) == len(everyone))
        yield Split(FleetUnderTest(placer, dispatcher, everyone), givers, takers)
    finally:
        await dispatcher.close()
        await placer.close()
        for replica in everyone:
            await replica.close()


async def test_the_decode_replica_is_told_where_to_fetch(tmp_path):
    async with split(tmp_path) as rig:
        await rig.busy()
        sink = rig.rig.submit(request("r"))
        replica = rig.on(sink)
        await until(lambda: any(each.request_id == "r" for each in replica.submits))
        sent = next(each for each in replica.submits if each.request_id == "r")
        assert sent.prefill_from == rig.prefill[0].hello.kv_address
        assert rig.giver(sink) == "p"
        assert not rig.prefill[0].submits, "a prefill replica hears of it from the decode replica alone"
        assert all(not each.prefill_from for each in replica.submits if each.request_id != "r")
        await rig.finish(sink)
        assert sink.flight.timing.num_fetched_tokens == PROMPT - 4


async def test_a_short_prompt_and_one_with_log_probabilities_stay_whole(tmp_path):
    async with split(tmp_path) as rig:
        await rig.busy()
        short = rig.rig.submit(request("short", prompt=8))
        whole = rig.rig.submit(request("whole", prompt_logprobs=1))
        assert rig.giver(short) == rig.giver(whole) == ""
        await rig.finish(short, whole)


async def test_a_dead_prefill_replica_costs_time_only(tmp_path):
    async with split(tmp_path, fetched=False) as rig:
        await rig.busy()
        sink = rig.rig.submit(request("r"))
        assert rig.giver(sink) == "p"
        rig.prefill[0].die()
        later = rig.rig.submit(request("later", prompt=PROMPT - 4))
        await until(lambda: num_ready(rig.rig.dispatcher) == 2)
        alone = rig.rig.submit(request("alone", prompt=PROMPT - 8))
        assert rig.giver(alone) == ""
        await rig.finish(sink, later, alone)
        assert sink.flight.num_rescues == 0


async def test_a_prefill_replica_that_never_delivers_is_left_alone(tmp_path):
    async with split(tmp_path, fetched=False) as rig:
        for i in range(FAULTS):
            rig.streams.clear()
            await rig.busy()
            sink = rig.rig.submit(request(f"r{i}", prompt=PROMPT + 8 * i))
            assert rig.giver(sink) == "p"
            await rig.finish(sink)
        rig.streams.clear()
        await rig.busy()
        sink = rig.rig.submit(request("last", prompt=PROMPT + 800))
        assert rig.giver(sink) == ""
        await rig.finish(sink)


@pytest.mark.parametrize("after", [0, 3])
async def test_a_dead_decode_replica_is_replaced_and_the_prompt_is_fetched_again(tmp_path, after):
    async with split(tmp_path) as rig:
        await rig.busy()
        sink = rig.rig.submit(request("r", max_tokens=20))
        first = rig.on(sink)
        other = next(each for each in rig.decode if each is not first)
        assert rig.giver(sink) == "p"
        first.trouble = lambda request, sample, position: (
            "die" if request.request_id == "r" and position == after else None
        )
        first.resume()
        await until(lambda: any(each.request_id == "r-r1" for each in other.submits))
        sent = next(each for each in other.submits if each.request_id == "r-r1")
        assert sent.num_output_tokens == after
        assert sent.prefill_from == rig.prefill[0].hello.kv_address
        await rig.finish(sink)
        assert sink.flight.num_rescues == 1 and sink.flight.placement.prefill_replica == "p"


async def test_both_sides_die_and_the_request_is_answered_by_what_comes_back(tmp_path):
    async with split(tmp_path, decode=1) as rig:
        await rig.busy()
        sink = rig.rig.submit(request("r"))
        rig.prefill[0].die()
        rig.decode[0].die()
        await until(lambda: num_ready(rig.rig.dispatcher) == 0)
        await rig.decode[0].restart()
        await rig.finish(sink)
        assert rig.giver(sink) == ""


async def test_with_all_decode_replicas_gone_a_prefill_replica_answers(tmp_path):
    async with split(tmp_path) as rig:
        await rig.busy()
        sink = rig.rig.submit(request("r"))
        for replica in rig.decode:
            replica.die()
        await until(lambda: sink.ended)
        assert sink.error is None and sink.tokens() == expected(sink.flight.request)
        assert sink.flight.placement.replica_id == "p" and rig.giver(sink) == ""
        await until(lambda: all(stream.ended for stream in rig.streams))


async def test_the_caller_leaves_and_the_givers_queue_is_free(tmp_path):
    async with split(tmp_path) as rig:
        await rig.busy()
        sink = rig.rig.submit(request("r"))
        assert rig.giver(sink) == "p"
        sink.deaf = True
        sink.flight.abort()
        status = await rig.rig.placer.status()
        assert {s.member.endpoint.replica_id: s.num_in_flight for s in status.replicas}["p"] == 0
        await rig.finish()


async def test_samples_that_go_on_alone_fetch_each(tmp_path):
    async with split(tmp_path) as rig:
        await rig.busy()
        sink = rig.rig.submit(request("r", n=2, max_tokens=12))
        first = rig.on(sink)
        other = next(each for each in rig.decode if each is not first)
        first.trouble = lambda request, sample, position: (
            "die" if request.request_id == "r" and position == 4 else None
        )
        first.resume()
        await until(lambda: sum(each.request_id == "r-r1" for each in other.submits) == 2)
        sent = [each for each in other.submits if each.request_id == "r-r1"]
        assert [each.prefill_from for each in sent] == [rig.prefill[0].hello.kv_address] * 2
        rig.resume()
        await until(lambda: sink.ended)
        assert sink.tokens(0) == expected(sink.flight.request, 0)
        assert sink.tokens(1) == expected(sink.flight.request, 1)
        await rig.finish()
