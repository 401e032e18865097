"""What a gateway costs: ours beside Rust and Python routers, one core, the same load, interleaved.

64 keep-alive clients post streaming chat requests (2.2 KB prompts in 16 groups of a common prefix, 32
chunks) to four mock backends. CPU per request is the gateway's process time divided by its requests;
"added" is the time to the first event minus that of the same load sent straight to the backends.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.child import niced
from benchmarks.gateway_rows import Sample, rows
from benchmarks.gateway_sides import (
    HARNESS_CORE,
    MODEL,
    SIDES,
    Running,
    Side,
    backends,
    build_harness,
    gateway,
    replicas,
)
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report
from headrace.core.errors import EngineError, UsageError

NUM_TOKENS = 32
NUM_CLIENTS = 64
LOADS = {"10ms": 10_000, "1ms": 1_000, "saturated": 0}
"""Microseconds between a stream's tokens; 0: back to back."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [side.name for side in SIDES]
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--seconds", type=float, default=6.0, help="measured seconds a run (default: 6)")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds before that (default: 2)")
    parser.add_argument("--nice", type=int, default=0, help="niceness of what is measured (below 0: root)")
    parser.add_argument("--sides", nargs="+", choices=names, default=names, help="only these")
    parser.add_argument("--loads", nargs="+", choices=list(LOADS), default=list(LOADS), help="only these")


@dataclass
class Bench:
    """The running harness of one load."""

    programs: dict[str, Path]
    seconds: float
    warmup: float
    nice: int

    def load(self, ports: list[int]) -> dict[str, float]:
        command = [
            *("taskset", "-c", str(HARNESS_CORE), str(self.programs["load"])),
            *(str(self.seconds), str(self.warmup), str(NUM_CLIENTS), MODEL, str(NUM_TOKENS), str(NUM_TOKENS)),
            *map(str, ports),
        ]
        limit = self.seconds + self.warmup + 30
        done = subprocess.run(
            niced(command, self.nice),
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=limit,
            check=True,
        )
        figures: dict[str, float] = json.loads(done.stdout)
        return figures

    def run(self, behind: Running, ports: list[int], under_test: Running | None) -> Sample:
        before = behind.cpu_seconds(), under_test.cpu_seconds() if under_test is not None else 0.0
        figures = self.load(ports)
        after = behind.cpu_seconds(), under_test.cpu_seconds() if under_test is not None else 0.0
        count = max(1.0, figures["all_requests"])
        if figures["errors"]:
            print(f"  {figures['errors']} errors: {figures['last_error']}", file=sys.stderr)
        return Sample(
            cpu_us=1e6 * (after[1] - before[1]) / count,
            harness_us=1e6 * (after[0] - before[0]) / count,
            requests_per_s=figures["requests_per_s"],
            ttft_p50_ms=figures["ttft_p50_ms"],
            ttft_p99_ms=figures["ttft_p99_ms"],
            gap_p99_ms=figures["gap_p99_ms"],
            errors=int(figures["errors"]),
        )


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    if arguments.rounds < 1:
        raise UsageError("--rounds must be at least 1")
    bench = Bench(build_harness(), arguments.seconds, arguments.warmup, arguments.nice)
    sides = [side for side in SIDES if side.name in arguments.sides]
    for side in [side for side in sides if not side.installed()]:
        print(f"{side.name} is not installed (scripts/bench install-peers): left out", file=sys.stderr)
        sides.remove(side)
    samples: dict[tuple[str, str], list[Sample]] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        for name in arguments.loads:
            _measure(bench, name, sides, arguments.rounds, Path(scratch), samples)
    recipe = base_recipe(command, threads=1, packages=("uvloop", "httptools", "msgspec"))
    recipe["workload"] = (
        f"{NUM_CLIENTS} clients, 4 backends, {NUM_TOKENS} chunks, 2.2 KB prompts in 16 groups"
    )
    if arguments.nice:
        recipe["niceness"] = str(arguments.nice)
    recipe["method"] = (
        f"gateway alone on one core, harness on another; {arguments.rounds} interleaved rounds of"
        f" {arguments.warmup:g} + {arguments.seconds:g} s; medians, spread between rounds"
    )
    return Report(name="gateway", recipe=recipe, rows=rows(samples, list(arguments.loads))), (
        "headrace text: HTTP backends, bodies pass through. headrace token: our own replicas' wire, with the"
        " prompt's template and tokenization inside.",
        "harness: CPU of the mock backends a request in the same runs, as a control.",
    )


def _measure(
    bench: Bench,
    name: str,
    sides: list[Side],
    rounds: int,
    scratch: Path,
    samples: dict[tuple[str, str], list[Sample]],
) -> None:
    """All sides at one load, started once and measured in turn, round after round."""
    itl_us = LOADS[name]
    with ExitStack() as stack:
        text, urls = stack.enter_context(
            backends(bench.programs["backend"], itl_us, NUM_TOKENS, scratch, bench.nice)
        )
        token, sockets = stack.enter_context(
            replicas(bench.programs["replica"], itl_us, NUM_TOKENS, scratch, bench.nice)
        )
        running = {}
        for side in sides:
            try:
                targets = urls if side.mode == "text" else sockets
                running[side] = stack.enter_context(gateway(side, targets, scratch, bench.nice))
            except EngineError as error:
                print(f"{side.name}: {error.message}", file=sys.stderr)
        direct = [int(url.rpartition(":")[2]) for url in urls]
        for number in range(rounds):
            samples.setdefault((name, "direct"), []).append(bench.run(text, direct, None))
            for side, (process, port) in running.items():
                behind = text if side.mode == "text" else token
                sample = bench.run(behind, [port], process)
                samples.setdefault((name, side.name), []).append(sample)
                print(f"{name} round {number + 1} {side.name}: {sample.short()}", file=sys.stderr, flush=True)
