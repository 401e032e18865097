"""Two policies on real replicas: `headrace serve` with two replicas of SmolLM2, one core each.

Users talk in turns: each prompt is a common head, the user's turns so far, and a new one. Requests come at
fixed times whatever the answers do, so that a slower policy queues; each run has a fresh server, and
the policies take turns.
"""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
import urllib.request

import aiohttp
import msgspec

from benchmarks import peers
from benchmarks.child import ChildError, Server, free_port
from benchmarks.contenders import environment
from headrace.bench.load import open_session, send
from headrace.bench.metrics import RequestTrace, interquartile_range, median, percentile
from headrace.bench.report import Row, Target, make_row
from headrace.core.errors import EngineError

MODEL = "smollm2-135m"
NUM_USERS = 10
NUM_TURNS = 6
HEAD_TOKENS = 64
TURN_TOKENS = 256
ANSWER_TOKENS = 8
REQUESTS_PER_S = 2.0
VOCABULARY = range(100, 40_000)
FASTER = Target("ratio", "<", 1.0)


class Run(msgspec.Struct, frozen=True):
    """One policy once; times in seconds."""

    ttft_mean: float
    ttft_p99: float
    hit_rate: float


def confirm(first: str, last: str, repeats: int) -> tuple[dict[str, str], list[Row]]:
    """Whether ``first`` is faster than ``last`` here too: rows that begin with ``real``."""
    runs: dict[str, list[Run]] = {first: [], last: []}
    for repeat in range(repeats):
        for policy in (first, last) if repeat % 2 == 0 else (last, first):
            run = asyncio.run(_run(policy, repeat))
            runs[policy].append(run)
            _say(
                f"real #{repeat} {policy}: TTFT {1000 * run.ttft_mean:.0f} ms, "
                f"p99 {1000 * run.ttft_p99:.0f} ms, hits {100 * run.hit_rate:.0f} %"
            )
    recipe = {
        "real replicas": f"headrace serve {MODEL} --replicas 2 --threads 1, a fresh server a run; "
        f"{NUM_USERS} users, {NUM_TURNS} turns of {TURN_TOKENS} tokens after {HEAD_TOKENS} common ones, "
        f"{ANSWER_TOKENS} tokens answered, {REQUESTS_PER_S:g} requests/s; {repeats} runs of each policy in "
        "turns, medians"
    }
    rows = []
    for field in ("ttft_mean", "ttft_p99", "hit_rate"):
        ours, theirs = ([getattr(run, field) for run in runs[policy]] for policy in (first, last))
        rows.append(
            make_row(
                f"real.{field}.{first}",
                median(ours),
                "" if field == "hit_rate" else "s",
                spread=interquartile_range(ours),
                peer=last,
                peer_value=median(theirs),
                peer_spread=interquartile_range(theirs),
                target=FASTER if field == "ttft_mean" else None,
            )
        )
    return recipe, rows


async def _run(policy: str, seed: int) -> Run:
    port = free_port()
    log = peers.cache_root() / "bench" / "logs" / f"routing-{policy}.log"
    command = [sys.executable, "-m", "headrace.cli.main", "serve", MODEL, "--replicas", "2", "--threads", "1"]
    command += ["--routing-policy", policy, "--port", str(port)]
    try:
        server = Server(
            command, port=port, environment=environment(1), log=log, timeout=180, ready_path="/ready"
        )
    except ChildError as error:
        raise EngineError(f"the server did not start: {error}", hint=f"its log is {log}") from error
    try:
        await _until_both_are_up(server.url)
        rng = random.Random(seed)
        async with open_session() as session:
            await _warm_up(session, server.url)
            began = time.perf_counter()
            traces = await asyncio.gather(
                *(_at(began + at, session, server.url, prompt) for at, prompt in _schedule(rng))
            )
    finally:
        server.close()
    failed = [trace.error for trace in traces if trace.error]
    if failed:
        raise EngineError(f"{len(failed)} requests failed under {policy}: {failed[0]}", hint=f"see {log}")
    ttfts = [trace.ttft for trace in traces]
    cached, asked = sum(t.cached_tokens for t in traces), sum(t.prompt_tokens for t in traces)
    return Run(sum(ttfts) / len(ttfts), percentile(ttfts, 99), cached / asked)


def _schedule(rng: random.Random) -> list[tuple[float, list[int]]]:
    """When each request is sent and its prompt: turn by turn, in each the users in an order of its own."""
    head = rng.choices(VOCABULARY, k=HEAD_TOKENS)
    pasts = [list(head) for _ in range(NUM_USERS)]
    schedule = []
    for turn in range(NUM_TURNS):
        for place, user in enumerate(rng.sample(range(NUM_USERS), NUM_USERS)):
            pasts[user] += rng.choices(VOCABULARY, k=TURN_TOKENS)
            at = (turn * NUM_USERS + place + rng.random()) / REQUESTS_PER_S
            schedule.append((at, list(pasts[user])))
    return schedule


async def _at(when: float, session: aiohttp.ClientSession, url: str, prompt: list[int]) -> RequestTrace:
    await asyncio.sleep(max(0.0, when - time.perf_counter()))
    return await _complete(session, url, prompt)


async def _complete(session: aiohttp.ClientSession, url: str, prompt: list[int]) -> RequestTrace:
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return await send(session, url + "/v1/completions", body, timeout_s=300)


async def _warm_up(session: aiohttp.ClientSession, url: str) -> None:
    """Some prompts that nobody shares, a few at once so that both replicas see some."""
    rng = random.Random(0)
    for _ in range(3):
        prompts = [rng.choices(VOCABULARY, k=TURN_TOKENS) for _ in range(4)]
        await asyncio.gather(*(_complete(session, url, prompt) for prompt in prompts))


async def _until_both_are_up(url: str) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        page = await asyncio.to_thread(_read, url + "/metrics")
        if sum(float(value) for value in re.findall(r"replica_up\{[^}]*\} (\S+)", page)) == 2:
            return
        await asyncio.sleep(0.1)
    raise EngineError("the second replica did not come up within 120 s")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as response:
        return str(response.read().decode())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
