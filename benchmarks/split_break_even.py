"""From which prompt length on a move pays: single prompts given straight to the decode replica, beside its
running decodes, once to compute by itself and once with the prefill replica to fetch from, in turns.

    cost = TTFT + what the streams lost until then: seconds that they would have needed, undisturbed, for the
           tokens that they did not get, over all streams

Whoever waits, a second counts the same, as it does for the router. Its own word is whether it had a prompt of
that length, asked over HTTP, computed elsewhere.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence

import aiohttp
import msgspec

from benchmarks.child import Server
from benchmarks.served import Replica, decisions, say
from benchmarks.split_load import PROMPT_TIMEOUT_S, Streams, random_prompt
from headrace.bench.metrics import median
from headrace.core.errors import EngineError
from headrace.core.messages import Failed, FromReplica, Step, Submit
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.core.wire import FrameDecoder, encode_frame, gateway_decoder

LENGTHS = (40, 64, 128, 256, 512, 1024, 2048)
REPEATS = 3
ALONE_S = 3.0


class Way(msgspec.Struct, kw_only=True):
    """One way to come by a prompt: seconds by its length, one value a repeat."""

    ttfts: dict[int, list[float]] = {}
    costs: dict[int, list[float]] = {}

    def add(self, length: int, ttft: float, cost: float) -> None:
        self.ttfts.setdefault(length, []).append(ttft)
        self.costs.setdefault(length, []).append(cost)


class BreakEven(msgspec.Struct, kw_only=True):
    """``router_moves`` says by length what the router chose."""

    here: Way
    moved: Way
    router_moves: dict[int, bool] = {}

    def by_ttft(self) -> float:
        """From which length on the prompt itself is faster by the move."""
        return _crossing(self.here.ttfts, self.moved.ttfts)

    def by_cost(self) -> float:
        """From which length on the move costs everybody less."""
        return _crossing(self.here.costs, self.moved.costs)

    def of_router(self) -> float:
        """The shortest length from which on the router moves every prompt; NaN: none."""
        chosen = math.nan
        for length in sorted(self.router_moves, reverse=True):
            if not self.router_moves[length]:
                break
            chosen = float(length)
        return chosen


def _crossing(here: dict[int, list[float]], moved: dict[int, list[float]]) -> float:
    """From which length on the move takes less for every longer one too: where the lines cross between two
    lengths, or the shortest; NaN if it never does."""
    lengths = sorted(here)
    saved = [median(here[each]) - median(moved[each]) for each in lengths]
    first = len(lengths)
    while first and saved[first - 1] > 0:
        first -= 1
    if first == len(lengths):
        return math.nan
    if first == 0:
        return float(lengths[0])
    below, above = lengths[first - 1], lengths[first]
    share = -saved[first - 1] / (saved[first] - saved[first - 1])
    return below + share * (above - below)


async def measure_break_even(
    server: Server, streams: Streams, model: str, prefill: Replica, decode: Replica
) -> BreakEven:
    """Beside the flowing streams. Raises EngineError when a request fails."""
    found = BreakEven(here=Way(), moved=Way())
    rng = random.Random(11)
    start = time.perf_counter()
    await asyncio.sleep(ALONE_S)
    undisturbed = median(streams.gaps(start, time.perf_counter()))
    direct = await _Direct.connect(decode)
    try:
        for length in LENGTHS:
            for repeat in range(REPEATS):
                for moves in (False, True) if repeat % 2 == 0 else (True, False):
                    address = prefill.hello.kv_address if moves else ""
                    began = time.perf_counter()
                    ttft = await direct.ttft(random_prompt(rng, length), address)
                    lost = streams.lost(began, began + ttft, undisturbed)
                    (found.moved if moves else found.here).add(length, ttft, ttft + lost)
            found.router_moves[length] = await _router_moves(
                server, streams.session, model, random_prompt(rng, length)
            )
            say(
                f"break-even, {length} tokens: {_words(found.here, length)} here, "
                f"{_words(found.moved, length)} moved; the router "
                + ("moves" if found.router_moves[length] else "does not move")
            )
    finally:
        direct.close()
    return found


def _words(way: Way, length: int) -> str:
    return f"TTFT {median(way.ttfts[length]):.2f} s, cost {median(way.costs[length]):.2f} s"


async def _router_moves(
    server: Server, session: aiohttp.ClientSession, model: str, prompt: Sequence[int]
) -> bool:
    """Whether the router pairs a prompt when asked over HTTP."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0}
    async with session.post(server.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise EngineError(f"HTTP {response.status}: {(await response.text())[:300]}")
        request_id = response.headers["x-request-id"]
    known = await asyncio.to_thread(decisions, server, request_id)
    return bool(known and known[-1].prefill_replica)


class _Direct:
    """A connection to one replica, as a gateway has."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: FrameDecoder[FromReplica],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder
        self._count = 0

    @classmethod
    async def connect(cls, replica: Replica) -> _Direct:
        reader, writer = await asyncio.open_unix_connection(replica.socket)
        return cls(reader, writer, gateway_decoder())

    async def ttft(self, prompt: Sequence[int], prefill_from: str) -> float:
        """Seconds from handing it in to its only token."""
        self._count += 1
        request = Request(
            request_id=f"bench-{self._count}",
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, seed=0),
            prefill_from=prefill_from,
        )
        began = time.perf_counter()
        self._writer.write(encode_frame(Submit(request, sent_at=time.monotonic())))
        async with asyncio.timeout(PROMPT_TIMEOUT_S):
            while data := await self._reader.read(1 << 16):
                for message in self._decoder.feed(data):
                    if isinstance(message, Step):
                        self._check(message.failed, request.request_id)
                        if any(output.request_id == request.request_id for output in message.outputs):
                            return time.perf_counter() - began
        raise EngineError("the decode replica hung up")

    def close(self) -> None:
        self._writer.close()

    def _check(self, failed: Sequence[Failed], request_id: str) -> None:
        for each in failed:
            if each.request_id == request_id:
                raise EngineError(f"a prompt failed on the decode replica: {each.message}")
