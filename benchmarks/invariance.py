"""bench invariance: what the fixed order of additions costs the shipped kernels.

    fixed    packs/cpu as it is                          ┐ the same steps
    again    the same once more: what chance makes of it │ in turns,
    freed    no order is promised                        ┘ in one process

Steps of the model alone: forward and logits, no scheduling, sampling or sockets, which would hide a cost.
A cost is 1 - speed in fixed order / speed without it, a median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.child import niced
from benchmarks.contenders import Model, environment
from benchmarks.freed_pack import FIXED, FREED, write_variant
from benchmarks.quality import kl_divergence, reference_logits
from headrace.bench.metrics import interquartile_range, median
from headrace.bench.recipe import base_recipe
from headrace.bench.report import Report, Row, Target, make_row
from headrace.core.engine_environment import engine_environment
from headrace.core.errors import EngineError

COST_TARGET = Target("value", "<", 0.05)
RIGHT_TARGET = Target("ratio", "<=", 1.5)
FORMS = {"bf16": "none", "file": "auto"}
"""Names of forms and what the loader is told."""
SIDES = ("fixed", "again", "freed")
TIMEOUT_S = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="a short name")
    parser.add_argument("--forms", default=",".join(FORMS), help=f"comma-separated, of {', '.join(FORMS)}")
    parser.add_argument("--repeats", type=int, default=3, help="processes that measure each form")
    parser.add_argument("--seconds", type=float, default=10.0, help="for each kind of step in each process")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--nice", type=int, default=0, help="niceness of what is measured (below 0: root)")


def run(arguments: argparse.Namespace, command: str) -> tuple[Report, tuple[str, ...]]:
    forms = [form for form in arguments.forms.split(",") if form]
    unknown = sorted(set(forms) - set(FORMS))
    if unknown or not forms:
        raise EngineError(
            f"--forms names {', '.join(unknown) or 'none'}", hint=f"forms are {', '.join(FORMS)}"
        )
    recipe = base_recipe(command, threads=arguments.threads)
    recipe |= {
        "model": arguments.model,
        "workload": "decode_N: a step of N sequences with 33 to 513 keys each, spread evenly "
        "(decode_1: 101); decode_8_at_129: all with one key beyond 128; decode_2000: one with 2,001; "
        "prefill_512: a prompt",
        "forms": "bf16; file: the blocks of the shipped file",
        "cost": "1 - speed in fixed order / speed freed of it",
        "chance": "the same between two copies of the shipped kernels",
        "freed": "attention of decodes by another kernel; flags " + " ".join(FREED.flags),
        "repetitions": f"{arguments.repeats} processes a form (memory lies elsewhere in each), in each "
        f"{arguments.seconds:g} s of each kind of step, every side once a round; medians over all rounds "
        "with interquartile ranges",
        "clock": "CPU time of the thread" if arguments.threads == 1 else "wall",
        "kl": "mean of KL(float32 of the file's own weights || side) in nats, tokens decoded one at a time",
    }
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="headrace-invariance-") as folder:
        packs = {
            name: write_variant(variant, Path(folder) / name)
            for name, variant in zip(SIDES, (FIXED, FIXED, FREED), strict=True)
        }
        for form in forms:
            print(f"{form}: building what is not built, then measuring", file=sys.stderr, flush=True)
            measured = measure(arguments, FORMS[form], packs, Path(folder))
            rows += rows_of(form, measured)
    recipe["load average after"] = f"{os.getloadavg()[0]:.1f}"
    return Report(name="invariance", recipe=recipe, rows=rows), ()


@dataclass
class Measured:
    """``times`` are seconds by scenario and side, a round's at the same place; ``tokens`` are a step's.
    ``kl``: by side."""

    times: dict[str, dict[str, list[float]]]
    tokens: dict[str, int]
    kl: dict[str, float]


def measure(
    arguments: argparse.Namespace, quantization: str, packs: dict[str, Path], folder: Path
) -> Measured:
    """Every process loads the sides in another order, so that none always gets the better memory."""
    tokens, reference = reference_logits(Model.resolve(arguments.model))
    pooled = Measured({}, {}, {})
    names = list(packs)
    for repeat in range(max(1, arguments.repeats)):
        first = repeat % len(names)
        order = names[first:] + names[:first]
        command = [sys.executable, "-m", "benchmarks.sides.invariance", arguments.model, quantization]
        command += [str(arguments.threads), str(arguments.seconds), str(folder), json.dumps(tokens)]
        command += [f"{name}={packs[name]}" for name in order]
        answer = _answer(command, arguments)
        pooled.tokens = answer["tokens"]
        for scenario, times in answer["times"].items():
            kept = pooled.times.setdefault(scenario, {name: [] for name in names})
            for name, values in times.items():
                kept[name] += values
    pooled.kl = {name: kl_divergence(reference, np.load(folder / f"{name}.npy")) for name in names}
    return pooled


def _answer(command: list[str], arguments: argparse.Namespace) -> dict[str, Any]:
    done = subprocess.run(
        niced(command, arguments.nice),
        env={**engine_environment(), **environment(arguments.threads)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        start_new_session=True,
        check=False,
    )
    if done.returncode != 0:
        words = (done.stderr.strip().splitlines() or ["no words"])[-1]
        raise EngineError(
            f"the steps could not be measured: {words}", hint="the packs need AVX-512 and a compiler"
        )
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def rows_of(form: str, measured: Measured) -> list[Row]:
    """Of each scenario: speeds, the cost, and chance."""
    rows = []
    for scenario, times in measured.times.items():
        tokens = measured.tokens[scenario]
        speeds = {name: [tokens / seconds for seconds in values] for name, values in times.items()}
        name = f"{form}.{scenario}"
        rows.append(
            make_row(
                name,
                median(speeds["fixed"]),
                "tok/s",
                spread=interquartile_range(speeds["fixed"]),
                peer="freed",
                peer_value=median(speeds["freed"]),
                peer_spread=interquartile_range(speeds["freed"]),
            )
        )
        rows.append(_cost_row(f"{name}.cost", times, "fixed", "freed", COST_TARGET))
        rows.append(_cost_row(f"{name}.chance", times, "fixed", "again"))
    rows.append(
        make_row(
            f"{form}.kl",
            measured.kl["freed"],
            "nats",
            peer="fixed",
            peer_value=measured.kl["fixed"],
            target=RIGHT_TARGET,
            note="that the freed kernels compute the same model",
        )
    )
    return rows


def _cost_row(
    name: str,
    times: dict[str, list[float]],
    ordered: str,
    other: str,
    target: Target | None = None,
) -> Row:
    costs = [1 - free / fixed for fixed, free in zip(times[ordered], times[other], strict=True)]
    return make_row(name, median(costs), "", spread=interquartile_range(costs), target=target)
