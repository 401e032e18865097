"""bench engine: Headrace beside Transformers, vLLM-CPU, llama.cpp, onnxruntime-genai and openvino-genai.

One run, the same weights, three forms of them (forms.py).
Every side runs in its own process with the same threads; repetitions are interleaved (A B C A B C …) and a
side is stopped (SIGSTOP) while another is measured. No prompt is ever used twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.child import ChildError, Server, niced
from benchmarks.contenders import (
    SCENARIOS,
    SERVED_NAME,
    TG128,
    Contender,
    Model,
    NotInstalled,
    environment,
    start,
    start_server,
)
from benchmarks.engine_rows import NEIGHBOUR, STREAM, Measurements, footprint, rows_of
from benchmarks.forms import FORMS, QUANTIZATION, SIDES, has_server
from benchmarks.quality import kl_divergence, reference_logits
from headrace.bench.load import send_all
from headrace.bench.metrics import DEFINITIONS, output_throughput, summarise
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report
from headrace.bench.workload import token_prompts
from headrace.core.packs import AUTO

MODELS = ("smollm2-135m", "gemma-3-270m")
HTTP_REQUESTS, HTTP_PROMPT, HTTP_OUTPUT = 8, 128, 64


@dataclass
class Plan:
    """What this run measures."""

    models: list[str]
    sides: list[str]
    repeats: int
    loads: int
    threads: int
    nice: int
    http: bool
    quality: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated short names")
    parser.add_argument("--sides", default=",".join(SIDES), help=f"comma-separated, of {', '.join(SIDES)}")
    parser.add_argument("--repeats", type=int, help="repetitions of each figure (default: 7; quick: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, no compiled vLLM")
    parser.add_argument("--no-quality", action="store_true", help="leave the KL divergences out")
    parser.add_argument(
        "--pack", default=AUTO, help="Headrace's kernels: auto, none or a pack's folder (default: auto)"
    )
    parser.add_argument("--no-http", action="store_true", help="leave the servers out")
    parser.add_argument("--nice", type=int, default=0, help="niceness of what is measured (below 0: root)")


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    """All that was asked for, whatever fails in between: a side that cannot run has rows that say why."""
    plan = _plan(arguments)
    os.environ["HEADRACE_PACK"] = arguments.pack  # read by our engine's sides and by our server
    recipe = base_recipe(command, threads=plan.threads, packages=("torch", "transformers"))
    recipe |= {
        "workload": "pp512/pp2048: tokens of one prompt over the time to its first token; tg128: 128 tokens "
        "after the first, from a prompt of 16; tg64x8: 64 more tokens of each of 8 sequences, total rate; "
        f"http: {HTTP_REQUESTS} requests at once of {HTTP_PROMPT} + {HTTP_OUTPUT} tokens, streamed",
        "weights": "of the shipped GGUF file: bf16, 8-bit (Q8_0) or the file's own blocks; random prompts",
        "bits": "what is stored of all weights, the head included, over their number",
        "kl": "mean of KL(float32 of the file's own weights || side) in nats over positions of English text",
        "neighbour": "tg128 while one other process spins",
        "best": "the fastest peer whose bits a weight are within 5 %",
        "repetitions": f"{plan.repeats}, interleaved, medians with interquartile ranges",
        "ratio": "Headrace's figure / the peer's",
        "load": "load.engine: construction of the engine from the converted cache (read, pack, warm up); "
        "load.ready: from spawning the process until it can take a request (interpreter and imports too)",
        "memory": "sum of the highest resident sets of the side's processes, 1 GiB of KV cache at most",
    }
    if plan.nice:
        recipe["niceness"] = str(plan.nice)
        _raise_priority(plan.nice)
    models = [Model.resolve(name) for name in plan.models]
    gemm = max(_roof(plan)["gemm_bf16"] for _ in range(3))
    recipe["roofs"] = (
        "stream: reads at the footprint of a side of ours, before and after each of its tg128; "
        f"bf16 GEMM {gemm / 1e9:.0f} GFLOP/s"
    )
    rows = []
    for model in models:
        measured = Measurements()
        try:
            for form in FORMS:
                sides = [side for side in form.sides if side in plan.sides]
                if "interrupted" not in recipe and sides:
                    _measure_engines(model, sides, plan, measured)
                    if plan.http:
                        _measure_servers(model, sides, plan, measured)
        except (KeyboardInterrupt, SystemExit):
            recipe["interrupted"] = f"during {model.name}: the rows hold what had been measured by then"
        rows += rows_of(model, plan.sides, measured, gemm, http=plan.http)
    recipe["load average after"] = f"{os.getloadavg()[0]:.1f}"
    return Report(name="engine", recipe=recipe, rows=rows), DEFINITIONS


def _plan(arguments: argparse.Namespace) -> Plan:
    sides = arguments.sides.split(",")
    unknown = [side for side in sides if side not in SIDES]
    if unknown:
        raise SystemExit(f"error: unknown side {unknown[0]!r}\nhint: sides are {', '.join(SIDES)}")
    if arguments.quick:
        sides = [side for side in sides if side != "vllm-compiled"]
    return Plan(
        models=arguments.models.split(","),
        sides=sides,
        repeats=arguments.repeats or (3 if arguments.quick else 7),
        loads=2 if arguments.quick else 5,
        threads=arguments.threads,
        nice=arguments.nice,
        http=not arguments.no_http,
        quality=not (arguments.no_quality or arguments.quick),
    )


def _measure_engines(model: Model, sides: list[str], plan: Plan, measured: Measurements) -> None:
    if plan.quality:
        reference_logits(model)  # while no side holds memory: it is the model in float32
    contenders: dict[str, Contender] = {}
    try:
        for side in sides:
            _say(f"{model.name}: loading {side}")
            with measured.failures(side, NotInstalled, ChildError, subprocess.SubprocessError):
                contenders[side] = start(side, model, threads=plan.threads, nice=plan.nice)
                _note_load(contenders[side], side, measured)
                measured.add(side, "bits", model.bits_of(side))
        for repeat in range(plan.repeats):
            for scenario in SCENARIOS:
                for side, contender in list(contenders.items()):
                    rng = random.Random(f"{model.name} {side} {scenario.name} {repeat}")
                    with measured.failures(side, ChildError, subprocess.SubprocessError):
                        if scenario is TG128 and side in QUANTIZATION:
                            _measure_our_decode(contender, side, model, plan, measured, rng)
                        else:
                            measured.add(side, scenario.name, contender.measure(scenario, rng))
                    if side in measured.why:
                        contenders.pop(side).close()
            _say(f"{model.name}: repetition {repeat + 1} of {plan.repeats}")
        for side, contender in contenders.items():
            measured.add(side, "memory", contender.peak_memory() / 2**30)
            rates = ", ".join(f"{s.name} {measured.of(side, s.name)[0]:,.1f}" for s in SCENARIOS)
            _say(f"  {side}: {rates} tok/s")
        if plan.quality:
            _measure_quality(model, contenders, measured)
    finally:
        for contender in contenders.values():
            contender.close()
    if "headrace" in sides:
        for _ in range(plan.loads - 1):
            with measured.failures("headrace", ChildError):
                contender = start("headrace", model, threads=plan.threads, nice=plan.nice)
                _note_load(contender, "headrace", measured)
                contender.close()


def _measure_our_decode(
    contender: Contender, side: str, model: Model, plan: Plan, measured: Measurements, rng: random.Random
) -> None:
    """Between two readings of the stream: a virtual machine's changes within seconds (34 or 58 GB/s here)."""
    size = footprint(model, model.bits_of(side))
    before = _roof(plan, size)
    measured.add(side, TG128.name, contender.measure(TG128, rng))
    after = _roof(plan, size)
    measured.add(side, STREAM, sum(roof["stream"][str(size)] for roof in (before, after)) / 2)
    with _neighbour():
        measured.add(side, NEIGHBOUR, contender.measure(TG128, rng))


def _measure_quality(model: Model, contenders: dict[str, Contender], measured: Measurements) -> None:
    tokens, reference = reference_logits(model)
    for side, contender in contenders.items():
        with measured.failures(f"{side} quality", ChildError, subprocess.SubprocessError):
            table = contender.logits(tokens)
            if table is not None:
                measured.add(side, "kl", kl_divergence(reference, table))
                _say(f"  {side}: KL divergence {measured.of(side, 'kl')[0]:.5f}")


@contextlib.contextmanager
def _neighbour() -> Iterator[None]:
    """One process that spins; it ends by itself after two minutes."""
    command = [sys.executable, "-c", "import time\nt = time.time() + 120\nwhile time.time() < t: pass"]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _note_load(contender: Contender, side: str, measured: Measurements) -> None:
    if contender.spawn_seconds is not None:
        measured.add(side, "load.ready", contender.spawn_seconds)
    if contender.weights_seconds is not None:
        measured.add(side, "load.engine", contender.weights_seconds)
    if contender.notes:
        _say(f"  {side}: {contender.notes}")


def _measure_servers(model: Model, sides: list[str], plan: Plan, measured: Measurements) -> None:
    servers: dict[str, Server] = {}
    try:
        for side in filter(has_server, sides):
            _say(f"{model.name}: starting the server of {side}")
            with measured.failures(f"{side} server", NotInstalled, ChildError):
                servers[side] = start_server(side, model, threads=plan.threads, nice=plan.nice)
                _serve_once(servers[side], side, model, random.Random(f"warm-up {side}"))
                servers[side].pause()
        for repeat in range(plan.repeats):
            for side, server in list(servers.items()):
                rng = random.Random(f"{model.name} {side} http {repeat}")
                with measured.failures(f"{side} server", ChildError):
                    server.resume()
                    _serve_once(server, side, model, rng, requests=1, output=4)
                    for metric, value in _serve_once(server, side, model, rng).items():
                        measured.add(side, metric, value)
                    server.pause()
                if f"{side} server" in measured.why:
                    servers.pop(side).close()
        for side, server in servers.items():
            measured.add(side, "http.ready", server.spawn_seconds)
            measured.add(side, "http.memory", server.peak_memory() / 2**30)
    finally:
        for server in servers.values():
            server.close()


def _serve_once(
    server: Server,
    side: str,
    model: Model,
    rng: random.Random,
    *,
    requests: int = HTTP_REQUESTS,
    output: int = HTTP_OUTPUT,
) -> dict[str, float]:
    """One burst of requests; raises ChildError when any of them fails or is short."""
    extra = {"cache_prompt": False} if side.startswith("llama") else {}
    bodies = [
        {
            "model": SERVED_NAME,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **extra,
        }
        for prompt in token_prompts(rng, requests, HTTP_PROMPT, model.vocab_size)
    ]
    traces = asyncio.run(send_all(server.url, "/v1/completions", bodies, timeout_s=120))
    for trace in traces:
        if trace.error is not None:
            raise ChildError(trace.error)
        if trace.output_tokens != output:
            raise ChildError(f"asked for {output} tokens, got {trace.output_tokens}")
    return {
        "http.output": output_throughput(traces),
        "http.ttft": 1000 * summarise(trace.ttft for trace in traces).median,
        "http.tpot": 1000 * summarise(trace.tpot for trace in traces).median,
    }


def _roof(plan: Plan, *footprints: int) -> dict[str, Any]:
    """Measured in a process of its own, like every side: the streams of the footprints, or the product."""
    command = [sys.executable, "-m", "headrace.bench.roofs", str(plan.threads), *map(str, footprints)]
    result = subprocess.run(
        niced(command, plan.nice),
        env=environment(plan.threads),
        capture_output=True,
        check=True,
        timeout=120,
        start_new_session=True,
    )
    roof: dict[str, Any] = json.loads(result.stdout)
    return roof


def _raise_priority(nice: int) -> None:
    """The load generator must not wait for neighbours either."""
    os.setpriority(os.PRIO_PROCESS, 0, nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(nice))


def _say(line: str) -> None:
    print(time.strftime("%H:%M:%S"), line, file=sys.stderr, flush=True)
