"""Whole requests through router, flights and pairs of servers that are not ours."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from headrace.core.identity import block_identities
from headrace.core.knobs import RouterConfig
from headrace.core.routing import Endpoint, Role
from headrace.router.breaker import FAULTS
from headrace.router.dispatcher import Dispatcher
from headrace.router.external import make_monitor, make_worker
from headrace.router.placer import LocalPlacer
from tests.router.external.engines import answer_of
from tests.router.external.pair_engines import SGLangPair, VLLMPair
from tests.router.external.stand_in import StandIn, make_request, until
from tests.router.fleet import Sink, num_ready, submit

LOG = logging.getLogger("test")
LONG = list(range(2000))
"""Takes a second by the rate that is assumed; a prompt that pays for its move while streams run."""


class Rig:
    """A router with prefill servers p0, p1, … and one decode server."""

    def __init__(self, make_pair: Callable[[StandIn, StandIn], Any], prefill: int, config: RouterConfig):
        self.config = config
        self.decode_server = StandIn()
        self.prefill_servers = [StandIn() for _ in range(prefill)]
        self.pairs = [make_pair(server, self.decode_server) for server in self.prefill_servers]
        self.pair = self.pairs[-1]  # whose blocks the decode server knows
        self.streams: list[Sink] = []
        self.placer = LocalPlacer(config, log=LOG, make_monitor=make_monitor)
        self.dispatcher = Dispatcher(self.placer, config, log=LOG, make_worker=make_worker)

    async def start(self) -> None:
        self.placer.start()
        self.dispatcher.start()
        await self.decode_server.__aenter__()
        self.add("d0", self.decode_server, "decode")
        for i, server in enumerate(self.prefill_servers):
            await server.__aenter__()
            self.add(f"p{i}", server, "prefill")
        await until(lambda: num_ready(self.dispatcher) == 1 + len(self.prefill_servers))

    def add(self, name: str, server: StandIn, role: Role) -> None:
        self.placer.set_endpoint(Endpoint(replica_id=name, model="m", address=server.url, role=role))

    async def close(self) -> None:
        await self.dispatcher.close()
        await self.placer.close()
        for server in (self.decode_server, *self.prefill_servers):
            await server.__aexit__()

    def submit(self, name: str, prompt: list[int] = LONG, **fields: Any) -> Sink:
        fields.setdefault("max_tokens", 4)
        request = make_request(prompt, name, **fields)
        return submit(self.dispatcher, msgspec.structs.replace(request, model="m", block_ids=ids_of(request)))

    async def busy(self, count: int = 8) -> None:
        """Lets so many requests run until ``finish``."""
        self.pair.decode.hold = 1
        self.streams = [self.submit(f"stream{i}", [i, 1]) for i in range(count)]
        await until(lambda: all(stream.outputs for stream in self.streams))
        self.pair.decode.hold = None

    async def answer(self, sink: Sink, prompt: list[int] = LONG) -> None:
        await until(lambda: sink.ended)
        assert sink.error is None, sink.error
        assert sink.tokens() == answer_of(prompt, 4, [])[0]

    async def finish(self) -> None:
        self.pair.decode.released.set()
        await until(lambda: all(stream.ended for stream in self.streams))
        status = await self.placer.status()
        assert [one.num_in_flight for one in status.replicas] == [0] * len(status.replicas)
        self.placer.router.check_integrity()

    async def breaker(self, name: str) -> str:
        status = await self.placer.status()
        return next(one.breaker for one in status.replicas if one.member.endpoint.replica_id == name)


def ids_of(request: Any) -> bytes:
    """Any identities will do: the stand-ins tell nothing of their caches."""
    count = request.num_prompt_tokens // 16
    return b"".join(block_identities(request.request_id.encode().ljust(32, b"."), request.prompt, 16)[:count])


@contextlib.asynccontextmanager
async def rig_of(
    make_pair: Callable[[StandIn, StandIn], Any], prefill: int = 1, **config: Any
) -> AsyncIterator[Rig]:
    rig = Rig(make_pair, prefill, RouterConfig(**config))
    await rig.start()
    try:
        yield rig
    finally:
        await rig.close()


async def test_vllm_prefills_on_one_server_and_decodes_on_the_other():
    async with rig_of(VLLMPair) as rig:
        await rig.busy()
        sink = rig.submit("r")
        await rig.answer(sink)
        assert sink.flight.placement.prefill_replica == "p0"
        assert rig.pair.pulled == ["blocks-1"]
        assert sink.flight.timing.num_fetched_tokens == len(LONG)
        (decision,) = await rig.placer.why("r")
        assert decision.prefill_replica == "p0" and decision.num_fetched_tokens == len(LONG)
        await rig.finish()


async def test_vllm_decodes_alone_where_moving_does_not_pay():
    async with rig_of(VLLMPair) as rig:
        sink = rig.submit("r", [10, 20, 30])
        await rig.answer(sink, [10, 20, 30])
        assert sink.flight.placement.prefill_replica == "" and rig.pair.computed == [[10, 20, 30]]
        await rig.finish()


@pytest.mark.parametrize("retries", [0, 3])
async def test_a_failed_prefill_half_never_fails_the_request(retries):
    async with rig_of(VLLMPair, max_rescues=retries) as rig:
        await rig.busy()
        rig.pair.status = (500, {"error": {"message": "out of memory"}})
        sink = rig.submit("r")
        await rig.answer(sink)
        assert sink.flight.placement.prefill_replica == "" and LONG in rig.pair.computed
        assert len(await rig.placer.why("r")) == 2
        await rig.finish()


async def test_an_aborted_prefill_is_computed_again_and_not_an_answer():
    async with rig_of(VLLMPair) as rig:
        await rig.busy()
        rig.pair.mode = "abort"
        await rig.answer(rig.submit("r"))
        await rig.finish()


async def test_a_second_prefill_server_takes_over():
    async with rig_of(VLLMPair, prefill=2) as rig:
        await rig.busy()
        rig.pairs[0].status = (500, {"error": {"message": "out of memory"}})
        sink = rig.submit("r")
        await rig.answer(sink)
        assert [one.prefill_replica for one in await rig.placer.why("r")] == ["p0", "p1"]
        assert rig.pair.pulled == ["blocks-1"] and LONG not in rig.pair.computed
        await rig.finish()


async def test_a_server_without_a_connector_is_found_out():
    async with rig_of(VLLMPair) as rig:
        await rig.busy()
        rig.pair.mode = "none"
        for i in range(FAULTS):
            prompt = LONG[i:]
            sink = rig.submit(f"r{i}", prompt)
            await rig.answer(sink, prompt)
            assert sink.flight.placement.prefill_replica == "p0"
        assert await rig.breaker("p0") == "open"
        assert await rig.breaker("d0") == "closed"
        num = len(rig.pair.prefill_bodies)
        prompt = LONG[50:]
        await rig.answer(rig.submit("last", prompt), prompt)
        assert len(rig.pair.prefill_bodies) == num
        await rig.finish()


async def test_a_caller_who_leaves_between_the_halves_leaves_nothing():
    async with rig_of(VLLMPair) as rig:
        await rig.busy()
        rig.pair.mode = "hang"
        sink = rig.submit("r")
        await until(lambda: rig.pair.prefill_bodies)
        sink.deaf = True
        sink.flight.abort()
        await until(lambda: rig.pair.num_gone == 1)
        assert LONG not in rig.pair.computed
        await rig.finish()


async def test_sglang_always_works_in_pairs_and_a_retry_has_a_room_of_its_own():
    async with rig_of(SGLangPair) as rig:
        sink = rig.submit("short", [10, 20, 30])
        await rig.answer(sink, [10, 20, 30])
        assert sink.flight.placement.prefill_replica == "p0"
        rig.pair.prefill_ends, rig.pair.once = (500, "out of memory"), True
        sink = rig.submit("r")
        await rig.answer(sink)
        assert sink.flight.attempt == 1 and len(set(rig.pair.used)) == 3
        await rig.finish()


async def test_no_half_is_sent_while_the_prefill_servers_breaker_is_open():
    async with rig_of(SGLangPair, max_rescues=0, retry_budget=1.0) as rig:
        rig.pair.prefill_ends = (500, "out of memory")
        rig.pair.came.set()
        for i in range(FAULTS):
            sink = rig.submit(f"r{i}", [i, 1])
            await until(lambda sink=sink: sink.ended)
            if await rig.breaker("p0") == "open":
                break
        assert await rig.breaker("p0") == "open" and await rig.breaker("d0") == "closed"
        num = len(rig.pair.decode_bodies)
        waits = rig.submit("waits", [1, 2])
        assert waits.flight.placement is None
        rig.pair.prefill_ends = None
        await until(lambda: waits.ended)  # the one on trial, once the time has come
        assert waits.error is None and await rig.breaker("p0") == "closed"
        assert len(rig.pair.decode_bodies) == num + 1
        await rig.finish()


async def test_a_dead_prefill_server_leaves_sglang_waiting_until_one_is_back():
    async with rig_of(SGLangPair) as rig:
        await rig.prefill_servers[0].stop()
        await until(lambda: num_ready(rig.dispatcher) == 1)
        sink = rig.submit("r", [10, 20, 30])
        assert sink.flight.placement is None and not rig.pair.decode_bodies
        await rig.prefill_servers[0].__aenter__()
        await rig.answer(sink, [10, 20, 30])
        await rig.finish()
