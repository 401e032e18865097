"""What one turn of the event loop brings goes out together."""

from __future__ import annotations

import asyncio
import logging

from headrace.core.messages import Output, Stats, Step
from headrace.core.wire import encode_frame
from headrace.gateway.outbox import Outbox
from tests.gateway.fake_replica import Plan
from tests.gateway.tiny import CHAT, open_request


async def test_each_is_called_once_after_the_turn(caplog) -> None:
    outbox, calls = Outbox(logging.getLogger("headrace.test")), []

    def broken() -> None:
        raise ZeroDivisionError

    for name in ("a", "b"):
        outbox.add(broken)
        outbox.add(lambda name=name: calls.append(name))
    assert calls == []
    await asyncio.sleep(0)
    assert calls == ["a", "b"], "one that fails keeps no other waiting"
    outbox.add(lambda: outbox.add(lambda: calls.append("c")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert calls == ["a", "b", "c"]
    assert "could not be written" in caplog.text


def test_steps_that_are_read_together_are_written_together(stack):
    """A replica's connection is given three steps at once: the caller gets one chunk with three events."""
    stack.plan(lambda request: Plan(silent=True))
    with open_request(stack, CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True}) as sock:
        stack.wait_for(lambda: stack.replica.running, "running")
        request_id = stack.replica.requests[0].request_id
        ids = stack.tokenizer.encode("one two three", False).tolist()
        steps = [
            Step(outputs=[Output(request_id, 0, [token])], failed=[], stats=Stats()) for token in ids[:3]
        ]

        async def feed() -> None:
            stack.client._link.data_received(b"".join(map(encode_frame, steps)))

        stack.run(feed())
        received = b""
        while received.count(b'"content":"') < 4:
            received += sock.recv(65536)
    *_, last = received.split(b"\r\n\r\n", 1)
    chunks = last.split(b"\r\n")[1::2]
    assert [chunk.count(b"data: ") for chunk in chunks if chunk] == [1, 3]
