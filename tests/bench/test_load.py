from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from headrace.bench.load import StreamReader, open_session, parse_server_timing, send, send_all
from headrace.core.errors import UsageError


def event(text: str | None = None, *, chat: bool = False, **extra: Any) -> bytes:
    choice: dict[str, Any] = {"index": 0, "finish_reason": extra.pop("finish_reason", None)}
    if chat:
        choice["delta"] = {"content": text} if text is not None else {"role": "assistant"}
    else:
        choice["text"] = text or ""
    return b"data: " + json.dumps({"choices": [choice], **extra}).encode() + b"\n\n"


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
LAST = b'data: {"choices": [], "usage": ' + json.dumps(USAGE).encode() + b"}\n\n"
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def server(handler: Any) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


async def stream(request: web.Request, pieces: list[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(
        headers={"Content-Type": "text/event-stream", "Server-Timing": "text;dur=12.5"}
    )
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


def test_reader_takes_bytes_however_they_are_cut() -> None:
    data = event("Hel") + event("") + event("lo", finish_reason="length") + LAST + DONE
    for size in (1, 2, 7, len(data)):
        reader = StreamReader()
        for start in range(0, len(data), size):
            reader.feed(data[start : start + size], float(start))
        assert "".join(reader.text) == "Hello"
        assert len(reader.text_times) == 2  # an empty piece is no text
        assert reader.done and reader.finish_reason == "length" and reader.usage == USAGE


def test_reader_times_chat_text_and_not_the_role() -> None:
    seen: list[float] = []
    reader = StreamReader(seen.append)
    reader.feed(event(chat=True), 1.0)
    reader.feed(event("a", chat=True) + event("b", chat=True), 2.0)
    assert reader.text_times == seen == [2.0, 2.0]


async def test_send_traces_a_stream() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        assert body["stream"] is True
        return await stream(request, [event("a"), event("b"), event("c", finish_reason="stop") + LAST, DONE])

    async with server(handler) as url:
        traces = await send_all(url, "/v1/completions", [{"stream": True}] * 3)
    for trace in traces:
        assert trace.error is None and trace.finish_reason == "stop"
        assert (trace.prompt_tokens, trace.cached_tokens, trace.output_tokens) == (7, 5, 3)
        assert trace.sent <= trace.text_times[0] <= trace.text_times[-1] <= trace.finished
        assert parse_server_timing(trace.server_timing) == {"text": 12.5}


async def test_concurrency_is_bounded() -> None:
    inside = highest = 0

    async def handler(request: web.Request) -> web.StreamResponse:
        nonlocal inside, highest
        inside += 1
        highest = max(highest, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        return await stream(request, [event("a"), DONE])

    async with server(handler) as url:
        traces = await send_all(url, "/v1/completions", [{}] * 9, concurrency=3)
    assert highest == 3 and all(trace.error is None for trace in traces)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([event("a")], "without [DONE]"),
        ([event("a"), b'data: {"error": {"message": "engine died"}}\n\n', DONE], "engine died"),
        ([b"data: {nonsense\n\n"], "JSONDecodeError"),
    ],
)
async def test_a_broken_stream_is_an_error_in_the_trace(pieces: list[bytes], error: str) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, pieces)

    async with server(handler) as url:
        (trace,) = await send_all(url, "/v1/completions", [{}])
    assert trace.error is not None and error in trace.error


async def test_status_and_time_limit_are_told() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        if (await request.json()).get("slow"):
            await asyncio.sleep(5)
        return web.json_response({"error": {"message": "full"}}, status=429)

    async with server(handler) as url, open_session() as session:
        refused = await send(session, url + "/v1/completions", {})
        late = await send(session, url + "/v1/completions", {"slow": True}, timeout_s=0.05)
    assert refused.error is not None and "429" in refused.error and "full" in refused.error
    assert late.error is not None and "not finished within" in late.error


async def test_nobody_there_is_an_error_in_the_trace() -> None:
    async with open_session() as session:
        trace = await send(session, "http://127.0.0.1:9/v1/completions", {}, timeout_s=5)
    assert trace.error is not None and trace.text_times == []


async def test_load_stays_on_this_machine() -> None:
    with pytest.raises(UsageError, match="this machine only"):
        await send_all("http://192.0.2.1:8000", "/v1/completions", [{}])


def test_server_timing() -> None:
    assert parse_server_timing('text;dur=1.5, queue;desc="x";dur=2') == {"text": 1.5, "queue": 2.0}
    assert parse_server_timing(None) == {} and parse_server_timing("text;dur=oops, plain") == {}
