"""bench long: a conversation of 200,000 tokens through the real server, on a synthetic model.

    light streams flow ──► fresh long bodies, left at the response's headers   gaps, first turn
    nothing else       ──► the first turn to its end                           TTFT, first turn
                       ──► next turns of 2,000 new tokens                      TTFT, gateway's share
    light streams flow ──► next turns, left at the response's headers          gaps, next turn
    server stopped     ──► the engine's operators alone at that depth          the prediction

"While the gateway handles the body" is from the first byte sent until the response's headers, which the
gateway sends once the request's text work is done. A gap that reaches beyond the window is cut there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import aiohttp

from benchmarks import peers
from benchmarks.child import Child, ChildError, Server, free_port, niced
from benchmarks.contenders import environment
from benchmarks.long_rows import LongRun, rows_of
from benchmarks.synthetic import CONTEXT, long_context_model
from headrace.bench.load import StreamReader, open_session, parse_server_timing, send
from headrace.bench.metrics import DEFINITIONS, RequestTrace
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report
from headrace.bench.workload import conversation, text_of_length
from headrace.core.errors import EngineError

MODEL = "bench"
ANSWER_TOKENS = 16
CHUNK = 1024
TEMPLATE_TOKENS_PER_TURN = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=200_000, help="length of the conversation")
    parser.add_argument("--turn-tokens", type=int, default=1_000, help="length of each of its messages")
    parser.add_argument("--new-tokens", type=int, default=2_000, help="length of the next turn")
    parser.add_argument("--repeats", type=int, default=5, help="next turns measured")
    parser.add_argument("--streams", type=int, default=4, help="light streams beside")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--nice", type=int, default=0, help="niceness of what is measured (below 0: root)")
    parser.add_argument(
        "--gaps-only", action="store_true", help="leave the turns out: they take most of the time"
    )
    parser.add_argument("--first-turn-timeout", type=float, default=3600.0, metavar="SECONDS")


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    folder = long_context_model()
    recipe = base_recipe(command, threads=arguments.threads)
    recipe |= {
        "model": f"random weights, {folder.name}: 4 layers, hidden 512, 8 query / 2 kv heads of 64, bf16",
        "workload": f"chat of {arguments.tokens:,} tokens in messages of about {arguments.turn_tokens:,} "
        f"(prose, code, JSON, lists), then next turns of {arguments.new_tokens:,} new tokens, "
        f"{ANSWER_TOKENS} tokens answered each; {arguments.streams} light streams in the gap phases only",
        "prediction": "the next turn's arithmetic over the rate of the engine's own linear and attention "
        f"operators, each timed alone at these shapes and this depth in chunks of {CHUNK}",
        "gaps": "of the light streams, from the long body's first byte sent until its response's headers",
    }
    if arguments.nice:
        recipe["niceness"] = str(arguments.nice)
    port = free_port()
    log = peers.cache_root() / "bench" / "logs" / "long-server.log"
    serve = [sys.executable, "-m", "headrace.cli.main", "serve", str(folder), "--dtype", "bfloat16"]
    serve += ["--max-model-len", str(CONTEXT), "--kv-cache-gib", "2", "--threads", str(arguments.threads)]
    serve += ["--max-num-batched-tokens", str(CHUNK), "--served-model-name", MODEL, "--port", str(port)]
    try:
        server = Server(
            serve,
            port=port,
            environment=environment(arguments.threads),
            log=log,
            timeout=120,
            ready_path="/ready",
            nice=arguments.nice,
        )
    except ChildError as error:
        raise EngineError(f"the server did not start: {error}", hint=f"its log is {log}") from error
    try:
        measured = asyncio.run(_Bench(server, folder, arguments).measure())
        server.pause()
        operators = _operators(folder, measured, arguments) if measured.next_turns else None
    except ChildError as error:
        raise EngineError(f"bench long failed: {error}", hint=f"the server's log is {log}") from error
    finally:
        server.close()
    recipe["load average after"] = f"{os.getloadavg()[0]:.1f}"
    return Report(name="long", recipe=recipe, rows=rows_of(measured, operators)), DEFINITIONS


class _Bench:
    """One run against one server."""

    def __init__(self, server: Server, folder: Path, arguments: argparse.Namespace) -> None:
        from headrace.text.tokenizer import Tokenizer

        self._server = server
        self._arguments = arguments
        self._rng = random.Random(7)
        self._chat = server.url + "/v1/chat/completions"
        self._tokenizer = Tokenizer.from_folder(folder)

    async def measure(self) -> LongRun:
        result = LongRun()
        arguments = self._arguments
        async with open_session() as session:
            await self._complete(session, [{"role": "user", "content": "Hello"}], 300)
            with _streams(self._server.url, arguments) as streams:
                streams.ask({"op": "times"})
                await asyncio.sleep(2)
                result.add_baseline(streams.ask({"op": "times"})["streams"])
                for _ in range(3):
                    await self._visit(session, streams, self._conversation(), result, "first")
            messages = self._conversation()
            if not arguments.gaps_only:
                await self._turns(session, messages, result)
            with _streams(self._server.url, arguments) as streams:
                if arguments.gaps_only:  # the conversation must have been seen
                    await self._visit(session, streams, messages, result, "warm-up")
                for _ in range(2 * arguments.repeats):
                    await self._visit(session, streams, [*messages, self._message()], result, "next")
        return result

    async def _turns(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], result: LongRun
    ) -> None:
        """The first turn, whose answer joins ``messages``, then next turns after it."""
        arguments = self._arguments
        _say(f"the first turn of {arguments.tokens:,} tokens (minutes)")
        first, answer = await self._complete(session, messages, arguments.first_turn_timeout)
        result.first_turn = first
        _say(f"first turn: {first.prompt_tokens:,} tokens, TTFT {first.ttft:.1f} s")
        messages.append({"role": "assistant", "content": answer})
        for repeat in range(arguments.repeats):
            turn, _ = await self._complete(session, [*messages, self._message()], 600)
            result.next_turns.append(turn)
            new = turn.prompt_tokens - turn.cached_tokens
            _say(f"next turn {repeat + 1}: {new:,} new tokens, TTFT {turn.ttft:.2f} s")

    def _conversation(self) -> list[dict[str, str]]:
        arguments = self._arguments
        # What the chat template adds to each message is part of the conversation's length.
        share = arguments.turn_tokens / (arguments.turn_tokens + TEMPLATE_TOKENS_PER_TURN)
        length = int(arguments.tokens * share)
        return conversation(self._rng, length, arguments.turn_tokens, self._count)

    def _message(self) -> dict[str, str]:
        return {
            "role": "user",
            "content": text_of_length(self._rng, self._arguments.new_tokens, self._count),
        }

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))

    async def _complete(
        self, session: aiohttp.ClientSession, messages: list[dict[str, str]], timeout_s: float
    ) -> tuple[RequestTrace, str]:
        """The trace and the answer's text; raises ChildError when the request did not end well."""
        reader = StreamReader()
        trace = await send(session, self._chat, _body(messages), timeout_s=timeout_s, reader=reader)
        if trace.error is not None:
            raise ChildError(trace.error)
        return trace, "".join(reader.text)

    async def _visit(
        self,
        session: aiohttp.ClientSession,
        streams: Child,
        messages: list[dict[str, str]],
        result: LongRun,
        turn: str,
    ) -> None:
        """Sends a long body beside the light streams and leaves as soon as the headers are there."""
        payload = _body(messages)
        streams.ask({"op": "times"})
        await asyncio.sleep(0.5)
        began = time.perf_counter()
        async with session.post(
            self._chat, data=payload, headers={"Content-Type": "application/json"}
        ) as response:
            ended = time.perf_counter()
            if response.status != 200:
                raise ChildError(f"HTTP {response.status}: {(await response.text())[:300]}")
            text_ms = parse_server_timing(response.headers.get("Server-Timing")).get("text", float("nan"))
            response.close()
        await asyncio.sleep(1.0)
        answer = streams.ask({"op": "times"})
        if answer["errors"]:
            raise ChildError(f"a light stream failed: {answer['errors'][0]}")
        result.add_visit(turn, answer["streams"], began, ended, text_ms, len(payload))
        _say(f"gap phase, {turn} turn: body of {len(payload):,} bytes handled in {ended - began:.3f} s")


class _Streams(Child):
    def __enter__(self) -> _Streams:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _streams(url: str, arguments: argparse.Namespace) -> _Streams:
    command = [sys.executable, "-m", "benchmarks.sides.streams", url, MODEL, str(arguments.streams)]
    log = peers.cache_root() / "bench" / "logs" / "long-streams.log"
    return _Streams(command, environment=environment(1), log=log, timeout=150, nice=arguments.nice)


def _body(messages: list[dict[str, str]]) -> bytes:
    return json.dumps(
        {
            "model": MODEL,
            "messages": messages,
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        },
        ensure_ascii=False,
    ).encode()


def _operators(folder: Path, measured: LongRun, arguments: argparse.Namespace) -> dict[str, float]:
    turn = measured.next_turns[0]
    new = turn.prompt_tokens - turn.cached_tokens
    numbers = [arguments.threads, turn.cached_tokens, new, CHUNK]
    command = [sys.executable, "-m", "benchmarks.sides.operators", str(folder), *map(str, numbers)]
    result = subprocess.run(
        niced(command, arguments.nice),
        env=environment(arguments.threads),
        capture_output=True,
        text=True,
        timeout=1200,
        start_new_session=True,
        check=False,
    )
    if result.returncode != 0:
        raise ChildError(f"the operators could not be timed: {result.stderr.strip()[-300:]}")
    operators: dict[str, float] = json.loads(result.stdout)
    return operators


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
