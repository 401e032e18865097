"""bench cache-tiers: conversations larger than memory, with and without the disk tier.

    for each repeat, with and without, in turns:
      a fresh server, an empty tier
      main      every conversation's first turn, every conversation's second, …    one request at a time
      a cold restart: the server ends, another begins on the same folder
      restart   every conversation's next turn

By the time a conversation's next turn comes, the others have pushed its prefix out of memory. Before every
turn the page cache is dropped for all of the tier's files (fsync, then POSIX_FADV_DONTNEED), and what is left
of it is counted (reads with RWF_NOWAIT), so that a read comes from the disk.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp

from benchmarks import peers, served
from benchmarks.cache_tiers_rows import Pass, TiersRun, rows_of, short
from benchmarks.page_cache import drop, file_system, left
from benchmarks.served import say
from headrace.bench.load import StreamReader, open_session, send
from headrace.bench.metrics import DEFINITIONS
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report
from headrace.bench.workload import text_of_length
from headrace.core.errors import EngineError

MODEL = "smollm2-135m"
MAX_MODEL_LEN = 4096
SIDES = ("without", "with")
DISK_GB = 4
REQUEST_TIMEOUT_S = 600.0
DROP_TIMEOUT_S = 5.0

Messages = list[dict[str, str]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--turns", type=int, default=5, help="of each, before the restart (default: 5)")
    parser.add_argument("--first-tokens", type=int, default=1500, help="length of the first message")
    parser.add_argument("--turn-tokens", type=int, default=250, help="length of each later message")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--kv-cache-gib", type=float, default=0.125, help="memory for blocks")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", type=Path, metavar="DIR", help="the tier's; default: in the user's cache")
    parser.add_argument("--quick", action="store_true", help="one repeat of three turns")


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    if arguments.quick:
        arguments.turns, arguments.repeats = 3, 1
    recipe = base_recipe(command, threads=arguments.threads)
    with _folder(arguments.folder) as folder:
        system = file_system(folder)
        result = asyncio.run(_Bench(arguments, folder).measure())
    recipe |= {
        "model": f"{MODEL}, bf16, one replica, over HTTP",
        "workload": f"{arguments.conversations} conversations of {arguments.turns} turns, round-robin, one "
        f"request at a time: a message of {arguments.first_tokens:,} tokens, then of "
        f"{arguments.turn_tokens}, {arguments.answer_tokens} tokens answered each; one more turn each after "
        "a cold restart",
        "memory": f"--kv-cache-gib {arguments.kv_cache_gib:g}; the tier: --kv-disk-gb {DISK_GB} on {system}",
        "page cache": "dropped for all of the tier's files before every turn: fsync, POSIX_FADV_DONTNEED",
        "repeats": f"{arguments.repeats} of each side in turns, a fresh server and an empty tier each; turns "
        "pooled, spread of TTFT over turns, of rates over repeats",
        "load average after": f"{os.getloadavg()[0]:.1f}",
    }
    return Report(name="cache-tiers", recipe=recipe, rows=rows_of(result)), (
        *DEFINITIONS[:1],
        "returning: all turns but each conversation's first, whose prefix nobody has seen.",
        "hits: prompt tokens found in memory or brought from disk, over all prompt tokens of the pass.",
    )


@contextmanager
def _folder(given: Path | None) -> Iterator[Path]:
    """A new folder on a real disk for the tier, gone afterwards."""
    parent = given if given is not None else peers.cache_root() / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kv-", dir=parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


class _Bench:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        from headrace.models.resolve import resolve_model
        from headrace.text.tokenizer import Tokenizer

        self._arguments = arguments
        self._folder = folder
        self._tokenizer = Tokenizer.from_folder(resolve_model(MODEL).folder)

    async def measure(self) -> TiersRun:
        result = TiersRun()
        try:
            for repeat in range(self._arguments.repeats):
                for side in SIDES if repeat % 2 == 0 else reversed(SIDES):
                    main, restart = await self._side(side, repeat)
                    result.main.setdefault(side, []).append(main)
                    result.restart.setdefault(side, []).append(restart)
        finally:
            self._tokenizer.close()
        return result

    async def _side(self, side: str, repeat: int) -> tuple[Pass, Pass]:
        arguments = self._arguments
        tier = self._folder / f"{side}-{repeat}"
        rng = random.Random(repeat)
        # (turn, conversation): the same texts on both sides
        texts = [
            [self._text(rng, turn) for _ in range(arguments.conversations)]
            for turn in range(arguments.turns + 1)
        ]
        conversations: list[Messages] = [[] for _ in range(arguments.conversations)]
        main = await self._pass(side, tier, conversations, texts[:-1])
        say(f"#{repeat} {side} the tier, main: {short(main)}")
        restart = await self._pass(side, tier, conversations, texts[-1:])
        say(f"#{repeat} {side} the tier, after a restart: {short(restart)}")
        shutil.rmtree(tier, ignore_errors=True)
        return main, restart

    async def _pass(
        self, side: str, tier: Path, conversations: list[Messages], texts: list[list[str]]
    ) -> Pass:
        """One server's life: the next turns of all conversations, which grow by them."""
        arguments = self._arguments
        flags = [MODEL, "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN)]
        flags += ["--kv-cache-gib", str(arguments.kv_cache_gib), "--threads", str(arguments.threads)]
        if side == "with":
            flags += ["--kv-disk-gb", str(DISK_GB), "--kv-disk-path", str(tier)]
        server = await asyncio.to_thread(
            served.start, flags, threads=arguments.threads, name=f"cache-tiers-{side}"
        )
        with contextlib.closing(server):
            memory = served.replicas(server)[0].hello
            found = Pass(memory_bytes=memory.kv_bytes)
            before = await served.metrics(server.url)
            async with open_session() as session:
                for turn in texts:
                    for messages, text in zip(conversations, turn, strict=True):
                        if side == "with":
                            found.files_in_page_cache += await asyncio.to_thread(_drop, tier)
                        await self._turn(session, server.url, messages, text, found)
            found.count(before, await served.metrics(server.url), memory.block_size)
        tokens = sum(self._num_tokens(messages) for messages in conversations)
        found.conversation_bytes = tokens * memory.kv_bytes // (memory.num_blocks * memory.block_size)
        return found

    async def _turn(
        self, session: aiohttp.ClientSession, url: str, messages: Messages, text: str, found: Pass
    ) -> None:
        returning = bool(messages)
        messages.append({"role": "user", "content": text})
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": self._arguments.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reader = StreamReader()
        trace = await send(
            session,
            url + "/v1/chat/completions",
            json.dumps(body).encode(),
            timeout_s=REQUEST_TIMEOUT_S,
            reader=reader,
        )
        if trace.error is not None:
            raise EngineError(f"a turn failed: {trace.error}")
        messages.append({"role": "assistant", "content": "".join(reader.text)})
        (found.returning if returning else found.first).append(trace.ttft)

    def _text(self, rng: random.Random, turn: int) -> str:
        length = self._arguments.turn_tokens if turn else self._arguments.first_tokens
        return text_of_length(rng, length, lambda piece: len(self._tokenizer.encode(piece))).strip()

    def _num_tokens(self, messages: Messages) -> int:
        return len(self._tokenizer.encode_chat(messages))


def _drop(tier: Path) -> int:
    """Drops the tier's blocks from the page cache, again while others are still being written; returns how
    many are left there after all."""
    until = time.monotonic() + DROP_TIMEOUT_S
    while True:
        drop(tier)
        count = left(tier)
        if not count or time.monotonic() > until:
            return count
        time.sleep(0.05)
