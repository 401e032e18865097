"""bench routing: every policy under recorded traffic, on a fleet in virtual time, then on real replicas.

    for each trace, cache size and repeat     bound: the rate that is load 1, the ideal cache's hits
      for each policy                         a replay with the same arrivals and the same noise
    for each trace, once                      the default again through the gateway, over HTTP
    two real replicas of SmolLM2, one core    the grid's first and last policy     (routing_real.py)

The traces (Mooncake's conversation_trace.jsonl and synthetic_trace.jsonl) do not come with Headrace; say
where they are by --traces or HEADRACE_TRACES.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TypeVar

from benchmarks import routing_real
from benchmarks.routing_rows import ranking, rows_of, table
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report, Row, make_row
from headrace.bench.simulator.grid import Bound, Cell, Figures, bound, measure
from headrace.bench.simulator.replica import PacedModel
from headrace.bench.simulator.step_time import A100_8B
from headrace.core.errors import UsageError
from headrace.core.knobs import RouterConfig

DEFAULT = RouterConfig().routing_policy
OTHERS = ("round_robin", "random", "least_load", "power_of_two", "prefix_only")
POLICIES = (DEFAULT, *OTHERS)
# Parts of a trace, each a repeat of its own; 1: the whole, and repeats differ by their seed.
TRACES = {"conversation": 5, "synthetic": 1}
BLOCK_SIZE = 128
FOOTER = (
    "hit_share: prompt tokens found in a cache, over those that one cache of the fleet's size finds when it "
    "serves the same requests one by one.",
    "upper95: upper end of the 95 % t interval of the paired differences of the repeats; below 0, the first "
    "is faster.",
    "TTFT: from the arrival at the gateway's dispatcher to the first token.",
    "busy_share: share of the replicas' time with a step in progress.",
)
Job = TypeVar("Job")
Done = TypeVar("Done")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", type=Path, metavar="DIR", help="Mooncake's traces (HEADRACE_TRACES)")
    parser.add_argument("--only", nargs="+", choices=list(TRACES), default=list(TRACES), help="of the traces")
    parser.add_argument("--replicas", type=int, default=16, help="paced replicas (default: 16)")
    parser.add_argument(
        "--cache-tokens",
        type=int,
        nargs="+",
        default=[204_800, 409_600, 819_200],
        help="of each replica; about what half an A100, one and two hold for an 8B model",
    )
    parser.add_argument("--load", type=float, default=0.7, help="of what an ideal fleet can take")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--quick", action="store_true", help="one cache size, three repeats, nothing real")
    parser.add_argument("--no-real", action="store_true", help="leave the real replicas out")
    parser.add_argument("--real-only", nargs=2, choices=POLICIES, metavar="POLICY", help="just these two")


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    recipe = base_recipe(command, threads=1, packages=("msgspec", "uvloop"))
    rows: list[Row] = []
    footer: tuple[str, ...] = ()
    pair: Sequence[str] = arguments.real_only or ()
    if not arguments.real_only:
        if arguments.quick:
            arguments.cache_tokens, arguments.repeats = (
                arguments.cache_tokens[len(arguments.cache_tokens) // 2 :][:1],
                3,
            )
        simulated = _Grid(arguments)
        recipe |= simulated.recipe() | {"level": "simulated; rows that begin with real: measured"}
        rows += simulated.run()
        footer = (*table(simulated.runs), "", *FOOTER)
        order = ranking(simulated.runs)
        footer = (*footer, f"policies by mean TTFT over all cells, best first: {', '.join(order)}")
        pair = (order[0], order[-1])
    if arguments.real_only or not (arguments.quick or arguments.no_real):
        real_recipe, real_rows = routing_real.confirm(pair[0], pair[1], arguments.repeats)
        recipe |= real_recipe
        rows += real_rows
    recipe["load average after"] = f"{os.getloadavg()[0]:.1f}"
    return Report(name="routing", recipe=recipe, rows=rows), footer


class _Grid:
    """All replays of one run of the bench."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        folder = arguments.traces or os.environ.get("HEADRACE_TRACES")
        if not folder:
            raise UsageError(
                "bench routing replays Mooncake's traces, and no folder with them was given",
                hint="give --traces DIR, or set HEADRACE_TRACES, to the folder with "
                + " and ".join(f"{name}_trace.jsonl" for name in TRACES),
                param="--traces",
            )
        self.runs: dict[tuple[str, int], dict[str, list[Figures]]] = {}
        self._cells = {
            (trace, cache_tokens, repeat): Cell(
                trace=Path(folder) / f"{trace}_trace.jsonl",
                part=repeat % TRACES[trace],
                num_parts=TRACES[trace],
                seed=repeat,
                model=_model(cache_tokens),
                num_replicas=arguments.replicas,
                load=arguments.load,
            )
            for trace in arguments.only
            for cache_tokens in arguments.cache_tokens
            for repeat in range(arguments.repeats)
        }
        for trace in arguments.only:
            self._cells[trace, arguments.cache_tokens[0], 0].requests()  # a wrong folder is told at once

    def recipe(self) -> dict[str, str]:
        arguments, pace = self._arguments, A100_8B
        model = _model(arguments.cache_tokens[0])
        parts = {
            name: f"{count} consecutive parts" if count > 1 else "whole, seeds differ"
            for name, count in TRACES.items()
        }
        return {
            "workload": "Mooncake's traces ("
            + ", ".join(f"{name}: {parts[name]}" for name in arguments.only)
            + f"), arrival order kept, timestamps stretched to load {arguments.load:g}; tokens made up from "
            "hash_ids",
            "load": "1 is the rate at which one ideal replica with the whole fleet's speed and cache works "
            "off the same requests when all of them wait at once",
            "fleet": f"{arguments.replicas} paced replicas: real router, wire, scheduler and block pool; "
            f"{' / '.join(map(str, arguments.cache_tokens))} tokens each in blocks of {model.block_size}, "
            f"{model.max_num_seqs} sequences, {model.max_num_batched_tokens} tokens a step",
            "step time": f"{1e3 * pace.base:g} ms + {1e6 * pace.per_decode:g} µs a decode + "
            f"{1e6 * pace.per_prefill:g} µs a prompt token + {1e9 * pace.per_context:g} ns a token of "
            f"context + {1e9 * pace.per_pair:g} ns a pair of prompt attention, {100 * pace.noise:g} % noise: "
            "an 8B model in bf16 on an A100 at the shares of its data sheet that public sweeps of vLLM reach",
            "repeats": f"{arguments.repeats}, the same seeds for every policy; requests enter at the "
            "gateway's dispatcher, and once a trace over HTTP (rows .http)",
        }

    def run(self) -> list[Row]:
        arguments = self._arguments
        with ProcessPoolExecutor(
            arguments.processes, mp_context=multiprocessing.get_context("spawn")
        ) as pool:
            keys = list(self._cells)
            bounds = dict(zip(keys, _each(pool, bound, [(self._cells[key],) for key in keys]), strict=True))
            _say(f"{len(keys)} cells bounded; {len(keys) * len(arguments.policies)} replays to go")
            jobs = [(key, policy) for key in keys for policy in arguments.policies]
            figures = _each(pool, measure, [(self._cells[key], bounds[key], policy) for key, policy in jobs])
            for (key, policy), found in zip(jobs, figures, strict=True):
                trace, cache_tokens, repeat = key
                self.runs.setdefault((trace, cache_tokens), {}).setdefault(policy, []).append(found)
                _say(f"{trace} {cache_tokens} #{repeat} {policy}: {_short(found)}")
            return [*rows_of(self.runs, DEFAULT), *self._http(pool, bounds)]

    def _http(self, pool: ProcessPoolExecutor, bounds: dict[tuple[str, int, int], Bound]) -> list[Row]:
        """One cell of each trace again, through the gateway."""
        cache_tokens = self._arguments.cache_tokens[len(self._arguments.cache_tokens) // 2]
        keys = [(trace, cache_tokens, 0) for trace in self._arguments.only]
        jobs = [(self._cells[key], bounds[key], DEFAULT, "http") for key in keys]
        rows = []
        for (trace, size, _), found in zip(keys, _each(pool, measure, jobs), strict=True):
            direct = self.runs[trace, size][DEFAULT][0]
            _say(f"{trace} {size} #0 {DEFAULT} over HTTP: {_short(found)}")
            for field in ("ttft_mean", "ttft_p99"):
                rows.append(
                    make_row(
                        f"{trace}.{size}.{DEFAULT}.{field}.http",
                        getattr(found, field),
                        "s",
                        peer="the same run without HTTP",
                        peer_value=getattr(direct, field),
                    )
                )
        return rows


def _model(cache_tokens: int) -> PacedModel:
    return PacedModel(
        name="paced", step_time=A100_8B, num_blocks=cache_tokens // BLOCK_SIZE, block_size=BLOCK_SIZE
    )


def _each(
    pool: ProcessPoolExecutor, function: Callable[..., Done], jobs: Iterable[tuple[object, ...]]
) -> Iterator[Done]:
    futures = [pool.submit(_call, function, *job) for job in jobs]
    return (future.result() for future in futures)


def _call(function: Callable[..., Done], *job: object) -> Done:
    return function(*job)


def _short(found: Figures) -> str:
    return (
        f"hits {100 * found.hit_share:.1f} % of ideal, TTFT {found.ttft_mean:.2f} s, "
        f"p99 {found.ttft_p99:.1f} s, {found.output_rate:.0f} tok/s"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
