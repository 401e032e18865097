"""Load generator: streamed completions and chats over HTTP, traced piece by piece.

Requests go to the loopback interface only, and each has a time limit.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp

from headrace.bench.metrics import RequestTrace
from headrace.core.errors import UsageError

_LOOPBACK = {"127.0.0.1", "localhost", "::1"}


class Clock(Protocol):
    def __call__(self) -> float: ...


class StreamReader:
    """Reads one server-sent-event answer of the OpenAI API, fed with bytes as they arrive."""

    def __init__(self, on_text: Callable[[float], None] | None = None) -> None:
        self.text_times: list[float] = []
        self.text: list[str] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False
        self._rest = b""
        self._on_text = on_text

    def feed(self, data: bytes, now: float) -> None:
        """``data`` arrived at ``now``; every piece of text that it completes has that time."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self.done = True
            return
        message = json.loads(payload)
        if message.get("error"):
            self.error = str(message["error"].get("message", message["error"]))
        self.usage = message.get("usage") or self.usage
        for choice in message.get("choices") or []:
            delta = choice.get("delta")
            text = (delta.get("content") if delta is not None else choice.get("text")) or ""
            if text:
                self.text_times.append(now)
                self.text.append(text)
                if self._on_text is not None:
                    self._on_text(now)
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


def check_loopback(url: str) -> None:
    """Raises UsageError for a server on another machine: load belongs on one's own."""
    if urlsplit(url).hostname not in _LOOPBACK:
        raise UsageError(
            f"the load generator sends to this machine only, not to {url}",
            hint="run it where the server runs",
        )


async def send(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any] | bytes,
    *,
    timeout_s: float = 300.0,
    clock: Clock = time.perf_counter,
    on_text: Callable[[float], None] | None = None,
    reader: StreamReader | None = None,
) -> RequestTrace:
    """One streamed request to its end; failures are told in the trace's ``error``, never raised."""
    payload = body if isinstance(body, bytes) else json.dumps(body).encode()
    reader = reader if reader is not None else StreamReader(on_text)
    server_timing = None
    error = None
    sent = clock()
    try:
        async with asyncio.timeout(timeout_s):
            async with session.post(
                url, data=payload, headers={"Content-Type": "application/json"}
            ) as response:
                server_timing = response.headers.get("Server-Timing")
                if response.status != 200:
                    error = f"HTTP {response.status}: {(await response.text())[:300]}"
                else:
                    async for data in response.content.iter_any():
                        reader.feed(data, clock())
                    error = reader.error
                    if error is None and not reader.done:
                        error = "the stream ended without [DONE]"
    except TimeoutError:
        error = f"not finished within {timeout_s:.0f} s"
    except (aiohttp.ClientError, OSError, ValueError) as failure:
        error = f"{type(failure).__name__}: {failure}"
    usage = reader.usage
    return RequestTrace(
        sent=sent,
        text_times=reader.text_times,
        finished=clock(),
        prompt_tokens=usage.get("prompt_tokens", 0),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        output_tokens=usage.get("completion_tokens", len(reader.text_times)),
        finish_reason=reader.finish_reason,
        server_timing=server_timing,
        error=error,
    )


async def send_all(
    base_url: str,
    path: str,
    bodies: Sequence[dict[str, Any]],
    *,
    concurrency: int | None = None,
    timeout_s: float = 300.0,
) -> list[RequestTrace]:
    """All of ``bodies``, at once or at most ``concurrency`` at a time; traces in their order."""
    check_loopback(base_url)
    gate = asyncio.Semaphore(concurrency or max(1, len(bodies)))

    async def one(body: dict[str, Any]) -> RequestTrace:
        async with gate:
            return await send(session, base_url + path, body, timeout_s=timeout_s)

    async with open_session() as session:
        return list(await asyncio.gather(*(one(body) for body in bodies)))


def open_session() -> aiohttp.ClientSession:
    """A session without aiohttp's own limits on connections, time and line length."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=None),
        read_bufsize=1 << 20,
    )


def parse_server_timing(header: str | None) -> dict[str, float]:
    """``text;dur=12.5, queue;dur=3`` as durations in milliseconds by name."""
    durations = {}
    for entry in (header or "").split(","):
        name, *parameters = (part.strip() for part in entry.split(";"))
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "dur":
                try:
                    durations[name] = float(value.strip().strip('"'))
                except ValueError:
                    continue
    return durations
