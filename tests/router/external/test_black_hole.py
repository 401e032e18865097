"""Servers that accept and never answer: found out long before the general time-out, and only those."""

from __future__ import annotations

import asyncio
import time

import pytest

from headrace.router.external import silence
from tests.router.external.front import CHAT, Front, finished, text_servers
from tests.router.external.stand_in import Exchange, until
from tests.router.external.test_text import replica


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name, seconds in (("MIN_PATIENCE_S", 0.2), ("EARLY_PROBE_TIMEOUT_S", 0.2), ("LOOK_S", 0.05)):
        monkeypatch.setattr(silence, name, seconds)


async def never(exchange: Exchange) -> None:
    await exchange.gone.wait()


def swallow_all(server):
    server.post(CHAT, never)
    for path in ("/health", "/v1/models"):
        server.routes[path] = never


@pytest.mark.parametrize("stream", [True, False])
async def test_what_was_sent_there_is_answered_elsewhere(stream):
    async with text_servers("a", "b") as (hole, other), Front(hole, other) as front:
        await front.up()
        swallow_all(hole)
        began = time.monotonic()
        answers = [front.send(stream=stream, messages=[{"content": f"{i}"}]) for i in range(6)]
        for answer in answers:
            await finished(answer)
            assert answer.status == 200
        assert hole.asked, "it got some of them"
        assert time.monotonic() - began < 5.0, "the general time-out is a minute"
        assert len(other.asked) == 6 and front.num_leases() == 0
        assert replica(front, "a").num_faults == len(hole.asked) and replica(front, "b").num_faults == 0


async def test_its_breaker_opens():
    async with text_servers("a") as (hole,), Front(hole) as front:
        await front.up()
        hole.post(CHAT, never)
        hole.routes["/health"] = never  # the page that tells whether it is there; its monitor asks another
        answers = [front.send(stream=True) for _ in range(5)]
        await until(lambda: replica(front, "a").breaker == "open")
        for answer in answers:
            assert answer.call is not None
            answer.call.abort()


async def test_a_slow_server_that_says_it_is_there_is_waited_for():
    async with text_servers("a", "b") as servers, Front(*servers) as front:
        await front.up()
        for server in servers:
            server.hold = 0
        answer = front.send(stream=True)
        await until(lambda: any(server.asked for server in servers))
        await asyncio.sleep(0.8)  # four times its patience
        assert sum(len(server.asked) for server in servers) == 1
        for server in servers:
            server.released.set()
        await finished(answer)
        assert len(answer.texts) == 4
        assert all(replica(front, name).num_faults == 0 for name in "ab")


async def test_patience_grows_with_what_was_predicted():
    assert silence.patience_of(0.0) == silence.MIN_PATIENCE_S
    assert silence.patience_of(30.0) == silence.PATIENCE * 30.0
