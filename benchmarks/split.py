"""bench split: running decodes while long prompts keep arriving, on two cores, in one process or two roles.

    interval   one prompt beside the decodes, on the slowest unified setting and on the split
    screening  every unified setting and the split, one window each
    final      the best unified settings (``split_rows.finalists``) and the split, in turns, window by window
    answers    the best of them and the split again, the prompts now with answers of some tokens
    moves      on the split: single prompts of several lengths, computed by the decode replica or moved

Every window has a fresh server, the same streams and prompts at the same times (``split_load``). Replicas of
one thread have a core each; the gateway and the load generator share the first core on every side, which is
the prefill replica's in the split.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from benchmarks import peers, served
from benchmarks.child import Server
from benchmarks.served import Replica, say
from benchmarks.split_break_even import BreakEven, measure_break_even
from benchmarks.split_load import (
    CONTEXT_TOKENS,
    NUM_STREAMS,
    OUTPUT_TOKENS,
    Streams,
    Window,
    complete,
    measure_window,
    random_prompt,
)
from benchmarks.split_rows import SplitRun, Targets, best_unified, finalists, rows_of, short, table
from headrace.bench.load import open_session
from headrace.bench.metrics import DEFINITIONS
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report
from headrace.bench.workload import paragraphs
from headrace.core.errors import UsageError
from headrace.core.messages import Moves

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 8192
CHUNKS = (64, 128, 256, 512, 1024, 2048)
# The part of the time for which a slow side has a prompt in hand.
LOAD = 0.8
WARM_UP_TOKENS = 1000


Part = TypeVar("Part")


class Side(msgspec.Struct, frozen=True):
    """``form``: ``1x2`` and ``2x1`` are unified replicas × threads, ``split`` is prefill and decode, each
    with a chunk of its own."""

    form: str
    chunk: int
    decode_chunk: int = 0

    @property
    def name(self) -> str:
        return f"{self.form}.{self.chunk}" + (f"+{self.decode_chunk}" if self.decode_chunk else "")

    @property
    def flags(self) -> list[str]:
        """All but what says which replicas there are."""
        memory = ["--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-gib", "1"]
        return ["--dtype", "bfloat16", "--threads", str(self.threads), *memory]

    def deployment(self) -> str:
        """The deployment file: JSON, which is YAML."""
        chunks = {"prefill": self.chunk, "decode": self.decode_chunk} if self.decode_chunk else {}
        replicas: list[dict[str, object]] = [
            {"role": role, "max_num_batched_tokens": chunk} for role, chunk in chunks.items()
        ] or [{"max_num_batched_tokens": self.chunk}] * self.num_replicas
        return json.dumps({"models": [{"model": MODEL, "replicas": replicas}]})

    @property
    def num_replicas(self) -> int:
        return 1 if self.form == "1x2" else 2

    @property
    def threads(self) -> int:
        return 2 if self.form == "1x2" else 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chunks", type=int, nargs="+", default=list(CHUNKS), help="of the unified sides")
    parser.add_argument("--forms", nargs="+", choices=("1x2", "2x1"), default=["1x2", "2x1"])
    parser.add_argument("--prefill-chunk", type=int, default=256, help="of the split (default: 256)")
    parser.add_argument("--decode-chunk", type=int, default=16, help="of the split (default: 16)")
    parser.add_argument("--prompt-tokens", type=int, default=4000)
    parser.add_argument("--answer-tokens", type=int, default=16, help="of each prompt in the last phase")
    parser.add_argument("--screen-prompts", type=int, default=1, help="in a screening window (default: 1)")
    parser.add_argument("--prompts", type=int, default=2, help="in a final window (default: 2)")
    parser.add_argument("--repeats", type=int, default=2, help="final windows of each side (default: 2)")
    parser.add_argument(
        "--interval", type=float, metavar="SECONDS", help="between prompts; default: measured"
    )
    parser.add_argument("--gap-target-ms", type=float, default=100.0, help="a stream's p99, for goodput")
    parser.add_argument("--ttft-target-s", type=float, default=15.0, help="a prompt's, for goodput")
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="windows done are kept there, not repeated"
    )
    parser.add_argument("--nice", type=int, default=0, help="niceness of the servers (below 0: root)")
    parser.add_argument("--quick", action="store_true", help="three unified settings, one short final each")


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    if len(os.sched_getaffinity(0)) < 2:
        raise UsageError("bench split needs two cores", hint="run it where it may use two")
    if arguments.quick:
        arguments.chunks, arguments.forms = [64, 256, 1024], ["1x2"]
        arguments.screen_prompts, arguments.prompts, arguments.repeats = 1, 2, 1
    recipe = base_recipe(command, threads=2)
    bench = _Bench(arguments)
    affinity = os.sched_getaffinity(0)
    try:
        measured = asyncio.run(bench.measure())
    finally:
        os.sched_setaffinity(0, affinity)
    targets = Targets(arguments.gap_target_ms / 1e3, arguments.ttft_target_s)
    length, interval = arguments.prompt_tokens, measured.interval
    recipe |= {
        "model": f"{MODEL}, bf16, over HTTP",
        "sides": "1x2: one unified replica of two threads; 2x1: two of one thread, each on its core; split: "
        "a prefill and a decode replica of one thread, each on its core. The numbers after it are "
        "max_num_batched_tokens, of the split each replica's. Gateway and load generator run on the first "
        "core on every side",
        "workload": f"{NUM_STREAMS} streams of {CONTEXT_TOKENS} + {OUTPUT_TOKENS} tokens, begun anew at "
        f"their end with {CONTEXT_TOKENS - 1} tokens cached; distinct prompts of {length:,} tokens, "
        f"one every {interval:.1f} s, which ask for one token (answers: for {arguments.answer_tokens})",
        "interval": "given"
        if arguments.interval
        else f"one prompt's TTFT beside the streams over {LOAD:g}: the longer of 1x2.{min(arguments.chunks)} "
        "and the split; so all sides are busy, and none is overloaded",
        "windows": f"{arguments.screen_prompts} prompts in screening; final: {arguments.prompts} prompts, "
        f"{arguments.repeats} windows a side in turns, gaps pooled, spread between windows",
        "compared with": "of each unified form the setting with the lowest p99 ITL, and of all settings "
        "the one with the lowest p99 ITL of the time; each with its own TTFT",
        "load average after": f"{os.getloadavg()[0]:.1f}",
    }
    return Report(name="split", recipe=recipe, rows=rows_of(measured, targets)), (
        *table(measured, targets),
        "",
        *DEFINITIONS[:1],
        "ITL: every gap between consecutive pieces of text of the running decodes, while prompts arrive.",
        "ITL of the time (itl_time_p99): each gap counts as long as it lasts; for 99 % of the time a running "
        "decode is in a gap of at most so long.",
        f"Goodput: requests per second that met their target: of a stream, its own p99 gap at most "
        f"{arguments.gap_target_ms:g} ms; of a prompt, TTFT at most {arguments.ttft_target_s:g} s.",
        "Overlap: share of the time with a transfer open during which the prefill replica still computed.",
    )


class _Bench:
    """One run, whose finished parts are kept in the state file if there is one."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._split = Side("split", arguments.prefill_chunk, arguments.decode_chunk)
        self._cores = sorted(os.sched_getaffinity(0))[:2]
        self._state = _State(arguments.state)
        self._stream_prompts = _stream_prompts()

    async def measure(self) -> SplitRun:
        arguments = self._arguments
        unified = [Side(form, chunk) for form in arguments.forms for chunk in arguments.chunks]
        interval = arguments.interval or await self._calibrate()
        result = SplitRun(interval=interval, prompt_tokens=arguments.prompt_tokens, split=self._split.name)
        for side in (*unified, self._split):
            result.screening[side.name] = await self._window(
                side, "screening", arguments.screen_prompts, interval
            )
        chosen = finalists(result.screening, self._split.name)
        sides = [self._split, *(side for side in unified if side.name in chosen)]
        for repeat in range(arguments.repeats):
            for side in sides if repeat % 2 == 0 else reversed(sides):
                window = await self._window(side, f"final {repeat}", arguments.prompts, interval)
                result.final.setdefault(side.name, []).append(window)
        best = best_unified(result)
        for side in (self._split, *(each for each in unified if each.name == best)):
            result.answers[side.name] = await self._window(
                side, "answers", arguments.prompts, interval, arguments.answer_tokens
            )
        result.break_even = await self._break_even()
        return result

    async def _calibrate(self) -> float:
        """Seconds between prompts."""
        known = self._state.get("interval", float)
        if known is not None:
            return known
        longest = 0.0
        for side in (Side("1x2", min(self._arguments.chunks)), self._split):
            async with self._serving(side) as (server, session, _):
                streams = Streams(session, server.url, MODEL, self._stream_prompts)
                async with streams.flowing():
                    await self._warm_up(session, server.url)
                    prompt = random_prompt(random.Random(5), self._arguments.prompt_tokens)
                    trace = await complete(session, server.url, MODEL, prompt, 1)
            say(f"one prompt on {side.name}: TTFT {trace.ttft:.2f} s")
            longest = max(longest, trace.ttft)
        interval = round(longest / LOAD, 1)
        say(f"one prompt every {interval:.1f} s")
        self._state.put("interval", interval)
        return interval

    async def _window(
        self, side: Side, phase: str, num_prompts: int, interval: float, answer_tokens: int = 1
    ) -> Window:
        key = f"{phase} {side.name}"
        known = self._state.get(key, Window)
        if known is not None:
            return known
        rng = random.Random(phase)
        prompts = [random_prompt(rng, self._arguments.prompt_tokens) for _ in range(num_prompts)]
        async with self._serving(side) as (server, session, _):
            streams = Streams(session, server.url, MODEL, self._stream_prompts)
            async with streams.flowing():
                await self._warm_up(session, server.url)
                before = await served.metrics(server.url)
                window = await measure_window(
                    streams, side.name, server.url, MODEL, prompts, answer_tokens, interval
                )
                after = await served.metrics(server.url)
        for name in Moves.__struct_fields__:
            series = _SERIES.get(name)
            if series is not None:
                window.moves[name] = after.total(series) - before.total(series)
        window.load_average = os.getloadavg()[0]
        say(f"{key}: {short(window)}")
        self._state.put(key, window)
        return window

    async def _break_even(self) -> BreakEven:
        known = self._state.get("break-even", BreakEven)
        if known is not None:
            return known
        async with self._serving(self._split) as (server, session, found):
            streams = Streams(session, server.url, MODEL, self._stream_prompts)
            async with streams.flowing():
                await self._warm_up(session, server.url)
                prefill, decode = (_of_role(found, role) for role in ("prefill", "decode"))
                result = await measure_break_even(server, streams, MODEL, prefill, decode)
        self._state.put("break-even", result)
        return result

    async def _warm_up(self, session: aiohttp.ClientSession, url: str) -> None:
        """Two prompts, so that rates are learned; then no stream's first step is in the window either."""
        rng = random.Random(3)
        for _ in range(2):
            await complete(session, url, MODEL, random_prompt(rng, WARM_UP_TOKENS), 1)

    @asynccontextmanager
    async def _serving(
        self, side: Side
    ) -> AsyncIterator[tuple[Server, aiohttp.ClientSession, list[Replica]]]:
        """A fresh server with its processes in their places, and a client's session."""
        os.sched_setaffinity(0, self._cores)  # what is started inherits it
        deployment = peers.cache_root() / "bench" / "logs" / f"split-{side.name}.yaml"
        deployment.parent.mkdir(parents=True, exist_ok=True)
        deployment.write_text(side.deployment())
        server = await asyncio.to_thread(
            served.start,
            ["--config", str(deployment), *side.flags],
            threads=side.threads,
            name=f"split-{side.name}",
            nice=self._arguments.nice,
        )
        with contextlib.closing(server):
            await served.until_up(server.url, side.num_replicas)
            found = await asyncio.to_thread(served.replicas, server)
            self._place(server, side, found)
            async with open_session() as session:
                yield server, session, found

    def _place(self, server: Server, side: Side, found: list[Replica]) -> None:
        first = self._cores[:1]
        served.pin(server.pid, first)
        served.pin(os.getpid(), first)
        if side.form == "1x2":
            return
        # The decode replica has the other core to itself.
        ordered = sorted(found, key=lambda one: (one.hello.role == "decode", one.replica_id))
        for core, replica in zip(self._cores, ordered, strict=True):
            served.pin(replica.hello.pid, [core])


class _State:
    """Finished parts by name, one JSON object in a file; without a file nothing is kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._parts: dict[str, object] = {}
        if path is not None and path.exists():
            self._parts = msgspec.json.decode(path.read_bytes())

    def get(self, name: str, kind: type[Part]) -> Part | None:
        return msgspec.convert(self._parts[name], kind, strict=False) if name in self._parts else None

    def put(self, name: str, part: object) -> None:
        self._parts[name] = msgspec.to_builtins(part)
        if self._path is not None:
            partial = self._path.with_suffix(".partial")
            partial.write_bytes(msgspec.json.encode(self._parts))
            partial.replace(self._path)


# Counters of core.messages.Moves as /metrics names them.
_SERIES = {
    "fetched_blocks": "kv_fetched_blocks_total",
    "fetched_bytes": "kv_fetched_bytes_total",
    "fetch_s": "kv_fetch_seconds_total",
    "fetch_overlap_s": "kv_fetch_overlap_seconds_total",
    "failed_fetches": "kv_fetches_failed_total",
    "sent_bytes": "kv_sent_bytes_total",
    "damaged_blocks": "kv_damaged_blocks_total",
}


def _of_role(found: list[Replica], role: str) -> Replica:
    return next(one for one in found if one.hello.role == role)


def _stream_prompts() -> list[list[int]]:
    """Plain prose for each stream, which the model goes on with in plain prose: nearly every token of its
    answer is a piece of text, so that a gap is a token's."""
    from headrace.models.resolve import resolve_model
    from headrace.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve_model(MODEL).folder)
    prose = (text for text in paragraphs(random.Random(1)) if text.isascii() and "`" not in text)
    prompts = []
    for _ in range(NUM_STREAMS):
        tokens: list[int] = []
        while len(tokens) < CONTEXT_TOKENS:
            tokens += tokenizer.encode(next(prose))
        prompts.append(tokens[:CONTEXT_TOKENS])
    tokenizer.close()
    return prompts
