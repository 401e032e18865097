"""Receipts in text mode: what is known of a body's way, in parts that add up to the whole."""

from __future__ import annotations

import asyncio
import json

import pytest

from headrace.core.routing import Placement
from headrace.gateway.receipt import text_receipt
from headrace.router.worker import TextPlacement
from tests.router.external.front import CHAT, Front, finished, text_servers
from tests.router.external.stand_in import Exchange, until

ASK = [(b"x-headrace-receipt", b"1"), (b"x-request-id", b"mine")]
PARTS = ("text", "route", "first_byte", "stream")


def check(receipt, replica="a", attempts=1):
    parts = receipt["waterfall_ms"]
    assert list(parts) == [*PARTS, "total"] and all(value >= 0 for value in parts.values())
    assert sum(parts[name] for name in PARTS) == pytest.approx(parts["total"], abs=1e-6)
    assert (receipt["request_id"], receipt["replica"], receipt["attempts"]) == ("mine", replica, attempts)
    assert receipt["ttft_ms"]["predicted"] > 0 and receipt["ttft_ms"]["actual"] > 0
    return parts


async def test_a_stream_brings_it_before_done():
    async with text_servers("a") as (server,), Front(server) as front:
        await front.up()
        server.hold = 0
        answer = front.send(CHAT, ASK, stream=True)
        await until(lambda: server.asked)
        await asyncio.sleep(0.05)
        server.released.set()
        await finished(answer)
        assert answer.texts == ["a0", "a1", "a2", "a3"] and answer.events[-1] == "[DONE]"
        chunk = answer.events[-2]
        assert chunk["choices"] == [] and chunk["object"] == "chat.completion.chunk"
        assert check(chunk["receipt"])["first_byte"] >= 50
        plain = await front.ask(stream=True)
        assert not any("receipt" in event for event in plain.events)


async def test_a_whole_answer_has_it_behind_its_other_fields():
    async with text_servers("a") as (server,), Front(server) as front:
        await front.up()
        answer = await front.ask(CHAT, ASK)
        assert int(answer.headers["content-length"]) == len(answer.body)
        *fields, last = json.loads(answer.body)
        assert last == "receipt" and fields == ["object", "choices", "usage"]
        check(json.loads(answer.body)["receipt"])
        assert "receipt" not in json.loads((await front.ask()).body)
        server.status = 400
        assert "receipt" not in json.loads((await front.ask(CHAT, ASK)).body)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
async def test_it_comes_last_whatever_ends_the_stream(end):
    async def answer(exchange: Exchange) -> None:
        exchange.start_stream()
        exchange.chunk(b'data: {"choices": []}' + end + b"data: [DONE]" + end)
        exchange.raw(b"0\r\n\r\n")

    async def no_done(exchange: Exchange) -> None:
        exchange.start_stream()
        exchange.chunk(b'data: {"choices": []}' + end)
        exchange.raw(b"0\r\n\r\n")

    async with text_servers("a") as (server,), Front(server) as front:
        await front.up()
        for route, num_events in ((answer, 3), (no_done, 2)):
            server.post(CHAT, route)
            body = (await front.ask(CHAT, ASK, stream=True)).body.replace(b"\r", b"")
            events = body.removesuffix(b"\n\n").split(b"\n\n")
            assert len(events) == num_events
            check(json.loads(events[1].removeprefix(b"data: "))["receipt"])


async def test_the_way_includes_the_servers_that_failed():
    async with text_servers("a", "b") as servers, Front(*servers) as front:
        await front.up()

        async def fail_once(exchange: Exchange) -> None:
            for server in servers:
                server.post(CHAT, server._answer_chat)
            exchange.reply({}, 500)

        for server in servers:
            server.post(CHAT, fail_once)
        receipt = json.loads((await front.ask(CHAT, ASK)).body)["receipt"]
        check(receipt, receipt["replica"], 2)


@pytest.mark.parametrize("times", [(1.0, 2.0, 3.0, 4.0), (0.0, 0.0, 0.0, 0.0), (5.0, 4.0, 3.0, 4.5)])
def test_parts_add_up_whatever_the_clocks_say(times):
    submitted, placed, first, end = times
    way = TextPlacement(Placement(request_id="mine", replica_id="a", ttft_s=1.0), submitted, placed, 0)
    parts = text_receipt("mine", way, arrival=0.0, first_at=first, end=end)["waterfall_ms"]
    assert sum(parts[name] for name in PARTS) == pytest.approx(parts["total"]) == pytest.approx(1000 * end)
    assert all(value >= 0 for value in parts.values())
