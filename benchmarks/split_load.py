"""The load of `bench split`: decodes that never end, and long prompts that come at fixed times.

    8 streams   a prompt whose blocks are cached but for its last token, OUTPUT_TOKENS greedy tokens, again
    prompts     of random tokens, never used before; the k-th at k intervals after the window's start

So the streams' contexts stay between CONTEXT_TOKENS and OUTPUT_TOKENS more on every side, however fast it
is, and a stream's new start costs no more than a token. The gap between two of a stream's requests is not
counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from headrace.bench.load import StreamReader, send
from headrace.bench.metrics import RequestTrace, percentile
from headrace.core.errors import EngineError

NUM_STREAMS = 8
CONTEXT_TOKENS = 129
OUTPUT_TOKENS = 256
# Ids of plain words and pieces of words.
VOCABULARY = range(100, 40_000)
FLOW_TIMEOUT_S = 120.0
PROMPT_TIMEOUT_S = 300.0


class Window(msgspec.Struct, kw_only=True):
    """What one side did in one window; times in seconds.

    ``stream_p99s`` holds one value for each stream request that ended in the window: the 99th percentile of
    its own gaps. ``moves`` are differences of the replicas' counters over the window, named as in
    ``core.messages.Moves``.
    """

    side: str
    seconds: float
    gaps: list[float]
    stream_p99s: list[float]
    ttfts: list[float]
    pieces_per_token: float
    moves: dict[str, float] = {}
    load_average: float = 0.0


def random_prompt(rng: random.Random, num_tokens: int) -> list[int]:
    return rng.choices(VOCABULARY, k=num_tokens)


async def complete(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: list[int],
    max_tokens: int,
    reader: StreamReader | None = None,
) -> RequestTrace:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return await send(session, url + "/v1/completions", body, timeout_s=PROMPT_TIMEOUT_S, reader=reader)


class Streams:
    """The running decodes of one server."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, model: str, prompts: list[list[int]]
    ) -> None:
        """``prompts``: one of CONTEXT_TOKENS tokens for each stream."""
        self.session = session
        self._url = url
        self._model = model
        self._prompts = prompts
        self._runs: list[list[StreamReader]] = [[] for _ in prompts]
        self._traces: list[RequestTrace] = []
        self.error: str | None = None

    @asynccontextmanager
    async def flowing(self) -> AsyncIterator[Streams]:
        """Has the streams run inside, all of them from the beginning."""
        tasks = [asyncio.create_task(self._run(index)) for index in range(len(self._prompts))]
        try:
            until = time.perf_counter() + FLOW_TIMEOUT_S
            while not all(runs and runs[-1].text_times for runs in self._runs):
                self.check()
                if time.perf_counter() > until:
                    raise EngineError("the running decodes did not begin")
                await asyncio.sleep(0.05)
            yield self
            self.check()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    def check(self) -> None:
        """Raises EngineError if a stream failed."""
        if self.error is not None:
            raise EngineError(f"a running decode failed: {self.error}")

    def gaps(self, start: float, end: float) -> list[float]:
        """Gaps between pieces of text that ended in [start, end]."""
        return [
            later - earlier
            for runs in self._runs
            for reader in runs
            for earlier, later in itertools.pairwise(reader.text_times)
            if start <= later <= end
        ]

    def lost(self, start: float, end: float, undisturbed: float) -> float:
        """Seconds, over all streams, that their tokens of (start, end] came later than at ``undisturbed``
        seconds a token."""
        times = [at for runs in self._runs for reader in runs for at in reader.text_times]
        num_tokens = sum(start < at <= end for at in times)
        return max(0.0, len(self._runs) * (end - start) - num_tokens * undisturbed)

    def ended(self, start: float, end: float) -> list[RequestTrace]:
        """The stream requests that ended in [start, end]."""
        return [trace for trace in self._traces if start <= trace.finished <= end]

    async def _run(self, index: int) -> None:
        # First outputs of different length, so that the streams do not all begin anew in one step.
        length = OUTPUT_TOKENS * (index + 1) // len(self._prompts)
        while self.error is None:
            reader = StreamReader()
            self._runs[index].append(reader)
            trace = await complete(self.session, self._url, self._model, self._prompts[index], length, reader)
            self.error = self.error or trace.error
            self._traces.append(trace)
            length = OUTPUT_TOKENS


async def measure_window(
    streams: Streams,
    side: str,
    url: str,
    model: str,
    prompts: list[list[int]],
    answer_tokens: int,
    interval: float,
) -> Window:
    """``prompts`` at fixed times beside the flowing streams; raises EngineError when a request fails."""
    start = time.perf_counter()

    async def arrive(index: int, prompt: list[int]) -> RequestTrace:
        await asyncio.sleep(max(0.0, start + index * interval - time.perf_counter()))
        return await complete(streams.session, url, model, prompt, answer_tokens)

    pending = [asyncio.create_task(arrive(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        end = start + len(prompts) * interval
        await asyncio.sleep(max(0.0, end - time.perf_counter()))
        traces = await asyncio.gather(*pending)
    finally:
        for task in pending:
            task.cancel()
    streams.check()
    failed = [trace.error for trace in traces if trace.error]
    if failed:
        raise EngineError(f"{len(failed)} prompts failed on {side}: {failed[0]}")
    ended = streams.ended(start, end)
    return Window(
        side=side,
        seconds=end - start,
        gaps=streams.gaps(start, end),
        stream_p99s=[percentile(trace.itls, 99) for trace in ended],
        ttfts=[trace.ttft for trace in traces],
        pieces_per_token=(
            sum(len(trace.text_times) for trace in ended) / sum(trace.output_tokens for trace in ended)
            if ended
            else float("nan")
        ),
    )
