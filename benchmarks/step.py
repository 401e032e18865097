"""bench step: where a decode step of 8 and of 64 sequences goes, and how much of it is outside kernels.

The engine in this process, its shipped kernels, timers around the ops of its table and the parts of its step
(headrace/optimize/profile). Outside kernels is whatever is in no op: scheduling, the step's arrays, rotary
angles and the walk over the layers, sampling, booking, cache events, and what no timer explains.

Served: the same sequences as streams of `headrace serve`; its gateway, sockets and client share the cores.
Its step is the median gap between two tokens of a stream; outside kernels is all of it but the kernels' time,
as the timers gave it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from collections import defaultdict

from benchmarks import served
from headrace.bench.load import send_all
from headrace.bench.metrics import summarise
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report, Row, Target, make_row
from headrace.bench.workload import token_prompts
from headrace.core.errors import EngineError
from headrace.core.knobs import EngineConfig
from headrace.core.packs import AUTO
from headrace.engine.engine import Engine
from headrace.models.resolve import resolve_model
from headrace.optimize.profile.collect import profile_engine
from headrace.optimize.profile.instrument import PARTS
from headrace.optimize.profile.workloads import Workload, WorkloadRequest
from headrace.optimize.records import PhaseProfile, Roofs

MODEL = "smollm2-135m"
SEQUENCES = (8, 64)
PROMPT, ANSWER = 128, 33
SERVED_ANSWER = 65
SERVED_ROUNDS = 5
TARGETS = {8: Target(of="value", op="<=", bound=0.10)}
_NO_ROOFS = Roofs(stream={1: 1.0}, gemm={"float32": 1.0, "bfloat16": 1.0}, method="not asked for")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=MODEL, help=f"short name or file [default: {MODEL}]")
    parser.add_argument(
        "--quantization", default="auto", choices=("auto", "none", "int8"), help="none: bf16 [default: auto]"
    )
    parser.add_argument("--pack", default=AUTO, help="kernels: auto, none or a pack's folder")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each number of sequences")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    recipe = base_recipe(command, threads=arguments.threads)
    resolved = resolve_model(arguments.model, dtype="bfloat16", quantization=arguments.quantization)
    config = EngineConfig(
        dtype="bfloat16",
        threads=arguments.threads,
        max_model_len=1024,
        max_num_seqs=max(SEQUENCES),
        kv_cache_gib=1.0,
        quantization=arguments.quantization,
        pack=arguments.pack,
    )
    engine = Engine(config, resolved.folder, revision=resolved.revision)
    recipe |= {
        "model": f"{arguments.model}, {arguments.quantization}; {engine.kernels}",
        "workload": f"{' and '.join(map(str, SEQUENCES))} sequences at once, prompts of {PROMPT}, "
        f"{ANSWER - 1} decode steps, greedy; served: {SERVED_ANSWER - 1} more tokens each, streamed",
        "times": "means over the middle half of each step's runs; the timers' own cost is taken off",
    }
    decodes: dict[int, PhaseProfile] = {}
    try:
        for count in SEQUENCES:
            prompts = token_prompts(random.Random(f"step {count}"), count, PROMPT, engine.vocab_size)
            requests = [WorkloadRequest(prompt=prompt, max_tokens=ANSWER) for prompt in prompts]
            workload = Workload(name=f"step of {count}", requests=requests)
            profile = profile_engine(
                engine, workload, model=arguments.model, seconds=arguments.seconds, roofs=_NO_ROOFS
            )
            (decodes[count],) = [phase for phase in profile.phases if phase.phase == "decode"]
        vocab_size = engine.vocab_size
    finally:
        engine.close()
    gaps = _served_steps(arguments, vocab_size)
    rows = [row for count, decode in decodes.items() for row in rows_of(decode, count, gaps[count])]
    recipe["load average after"] = f"{os.getloadavg()[0]:.1f}"
    return Report(name="step", recipe=recipe, rows=rows), ()


def _served_steps(arguments: argparse.Namespace, vocab_size: int) -> dict[int, float]:
    """Median seconds between two tokens of a stream, by how many streams there are at once."""
    sizes = ["--max-model-len", "1024", "--max-num-seqs", str(max(SEQUENCES)), "--kv-cache-gib", "1"]
    kind = ["--dtype", "bfloat16", "--quantization", arguments.quantization, "--pack", arguments.pack]
    flags = [
        arguments.model,
        "--served-model-name",
        "step",
        "--threads",
        str(arguments.threads),
        *sizes,
        *kind,
    ]
    server = served.start(flags, threads=arguments.threads, name="step")
    try:
        return {count: _gap(server.url, count, vocab_size) for count in SEQUENCES}
    finally:
        server.close()


def _gap(url: str, count: int, vocab_size: int) -> float:
    gaps: list[float] = []
    for turn in range(SERVED_ROUNDS):
        bodies = [
            {
                "model": "step",
                "prompt": prompt,
                "max_tokens": SERVED_ANSWER,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            }
            for prompt in token_prompts(random.Random(f"served {count} {turn}"), count, PROMPT, vocab_size)
        ]
        for trace in asyncio.run(send_all(url, "/v1/completions", bodies, timeout_s=120)):
            if trace.error is not None:
                raise EngineError(f"a stream of the served step failed: {trace.error}")
            gaps += trace.itls
    return summarise(gaps).median


def rows_of(decode: PhaseProfile, count: int, gap: float) -> list[Row]:
    """The shares, the steps, and each part and op of one in microseconds. ``gap``: of the served step, in
    seconds."""
    spent: defaultdict[str, float] = defaultdict(float)
    for op in decode.ops:
        spent[op.op] += op.self_s
    kernels = sum(seconds for name, seconds in spent.items() if name not in PARTS)
    bound = TARGETS.get(count)
    rows = [
        make_row(f"outside_kernels_{count}", 1 - kernels / decode.step_s, "of a step", target=bound),
        make_row(f"outside_kernels_{count}.served", 1 - kernels / gap, "of a step", target=bound),
        make_row(f"step_{count}", 1e3 * decode.unprofiled_step_s, "ms", note="without timers"),
        make_row(f"step_{count}.served", 1e3 * gap, "ms"),
    ]
    parts = {**spent, "unnamed": decode.unnamed_s}
    for name, seconds in sorted(parts.items(), key=lambda part: -part[1]):
        kind = "outside" if name in PARTS or name == "unnamed" else "kernels"
        rows.append(make_row(f"{kind}_{count}.{name}", 1e6 * seconds, "us"))
    return rows
