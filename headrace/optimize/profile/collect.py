"""Profiles an engine on a workload: the same steps again and again, with and without timers in turn.

    pass 0      as the requests arrive; everything is built that is built on first use
    pass 1      the survey: which calls each step makes, and what each has to do
    pass 2 …    every other step timed; the next pass times the others

so that a step's profiled and unprofiled times were taken within the same second, under the same neighbours.
A quantity of a step is the mean over the middle half of its runs, a phase's the mean over its steps: sums add
up, and what a neighbour did in one run does not count.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np

from headrace.bench.recipe import base_recipe
from headrace.core.errors import EngineError, TimeUpError, UsageError
from headrace.core.knobs import EngineConfig
from headrace.core.words import count
from headrace.engine.engine import Engine
from headrace.models.cache import Progress as Loading
from headrace.models.resolve import resolve_model
from headrace.optimize.profile.instrument import (
    NUMBERS,
    Call,
    Instrument,
    Overhead,
    calibrate,
    unfold,
)
from headrace.optimize.profile.roofs import measure_roofs
from headrace.optimize.profile.summary import Sample, StepProfile, middle_half, phase_profiles, streamed
from headrace.optimize.profile.workloads import StepTime, Workload, load_workload, run
from headrace.optimize.records import KernelProfile, Phase, Roofs
from headrace.text.tokenizer import Tokenizer

Progress = Callable[[str], None]
MIN_PASSES = 6
_STOCK = {"stock", "reference"}


@dataclass
class _Passes:
    """What was seen so far, step by step."""

    surveyed: list[list[Call]] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    timed: list[list[tuple[list[int], float]]] = field(default_factory=list)  # readings, seconds
    bare: list[list[float]] = field(default_factory=list)


def collect(
    model: str,
    workload: Workload | str,
    *,
    config: EngineConfig | None = None,
    seconds: float = 20.0,
    roofs: Roofs | None = None,
    progress: Progress | None = None,
    loading: Loading | None = None,
) -> KernelProfile:
    """Loads a model into this process and profiles it; see ``profile_engine``.

    ``workload`` may be a name or a file; ``loading`` is told (what, done, total) while the model loads.
    Raises StartupErrors for a model or a workload that cannot be used.
    """
    config = config or EngineConfig()
    resolved = resolve_model(model, dtype=config.dtype, quantization=config.quantization, progress=loading)
    engine = Engine(
        config,
        resolved.folder,
        revision=resolved.revision,
        progress=None if loading is None else (lambda done, total: loading("loading", done, total)),
    )
    try:
        if progress is not None:
            progress(engine.kernels)
        if isinstance(workload, str):
            tokenizers: list[Tokenizer] = []

            def encode(text: str) -> array[int]:
                if not tokenizers:
                    tokenizers.append(Tokenizer.from_folder(resolved.folder))
                return tokenizers[0].encode(text)

            workload = load_workload(workload, engine.vocab_size, max_len=engine.max_model_len, encode=encode)
        return profile_engine(
            engine, workload, model=resolved.name, seconds=seconds, roofs=roofs, progress=progress
        )
    finally:
        engine.close()


def profile_engine(
    engine: Engine,
    workload: Workload,
    *,
    model: str,
    seconds: float = 20.0,
    limit_s: float = math.inf,
    roofs: Roofs | None = None,
    progress: Progress | None = None,
) -> KernelProfile:
    """The profile of an idle engine's ``workload``, from about ``seconds`` of passes over it.

    ``roofs`` of this machine are measured after them unless given. Raises UsageError for an engine on a
    GPU, where timers around calls see launches alone, EngineError when a step does not repeat, and
    TimeUpError when fewer passes than are needed fit into ``limit_s``; the engine is not idle then.
    """
    deadline = time.monotonic() + limit_s
    if engine.device.type != "cpu":
        raise UsageError(
            "profile times ops on a CPU; on a GPU they only launch work",
            hint="profile with --device cpu, or read a torch profiler trace with --trace FILE",
            param="--device",
        )
    say = progress or (lambda text: None)
    command = f"headrace profile {model} --workload {workload.name} --threads {engine.num_threads}"
    recipe = base_recipe(f"{command} --seconds {seconds:g}", threads=engine.num_threads)
    say(f"running {workload.name}: {count(len(workload.requests), 'request')}")
    overhead = calibrate()
    passes = _run_passes(engine, workload, seconds, say, deadline)
    steps = _step_profiles(passes, overhead)
    if roofs is None:
        say("measuring the machine's roofs")
        costs = [call.cost for calls in passes.surveyed for call in calls if call.cost is not None]
        dtypes = {kind for cost in costs for kind in (cost.dtype, *cost.products)}
        roofs = measure_roofs(
            streamed(steps),
            dtypes & {"float32", "bfloat16", "int8"},
            engine.num_threads,
            limit_s=deadline - time.monotonic(),
        )
    hello = engine.hello_fields
    return KernelProfile(
        model=model,
        revision=hello["model_revision"],
        workload=workload.name,
        hardware=hello["hardware"],
        dtype=hello["dtype"],
        threads=engine.num_threads,
        source="engine",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        roofs=roofs,
        phases=phase_profiles(steps, roofs),
        packs=sorted(set(engine.runner.model.ops.provenance.values()) - _STOCK),
        recipe=recipe,
    )


def _run_passes(
    engine: Engine, workload: Workload, seconds: float, say: Progress, deadline: float
) -> _Passes:
    instrument = Instrument(engine)
    passes = _Passes()
    number = -2

    def check_time(_: StepTime | None = None) -> None:
        if time.monotonic() > deadline:
            raise TimeUpError(
                f"the time was up in pass {number + 3} of the {MIN_PASSES + 2} that a profile of "
                f"{workload.name} needs at least",
                hint="give it more time, or a shorter workload",
            )

    try:
        check_time()
        admissions = run(engine, workload, after_step=check_time).admissions
        number += 1

        def surveyed(step: StepTime) -> None:
            check_time()
            passes.surveyed.append(instrument.survey.take())
            passes.phases.append(step.phase)

        instrument.put_on(survey=True)
        run(engine, workload, admissions=admissions, after_step=surveyed)
        num_steps = len(passes.surveyed)
        passes.timed = [[] for _ in range(num_steps)]
        passes.bare = [[] for _ in range(num_steps)]
        until = time.monotonic() + seconds
        number = 0
        while number < MIN_PASSES or number % 2 or time.monotonic() < until:
            instrument.take_off()
            _timed_pass(engine, workload, admissions, instrument, passes, number, check_time)
            number += 1
        say(f"{number} passes over {count(num_steps, 'step')}")
    finally:
        instrument.take_off()
    return passes


def _timed_pass(
    engine: Engine,
    workload: Workload,
    admissions: list[int],
    instrument: Instrument,
    passes: _Passes,
    number: int,
    check_time: Callable[[], None],
) -> None:
    """Times the steps whose number plus the pass's is even."""
    num_steps = len(passes.surveyed)
    done = 0

    def is_timed() -> bool:
        return (done + number) % 2 == 0

    def after_step(step: StepTime) -> None:
        nonlocal done
        check_time()
        if done >= num_steps or step.phase != passes.phases[done]:
            raise EngineError(f"step {done} of the workload is another one in pass {number}: no profile")
        if is_timed():
            passes.timed[done].append((instrument.take_readings(), step.seconds))
        else:
            passes.bare[done].append(step.seconds)
        done += 1
        instrument.put_on() if is_timed() else instrument.take_off()

    if is_timed():
        instrument.put_on()
    run(engine, workload, admissions=admissions, after_step=after_step)
    instrument.readings.clear()


def _step_profiles(passes: _Passes, overhead: Overhead) -> list[StepProfile]:
    steps = []
    for index, calls in enumerate(passes.surveyed):
        expected = [NUMBERS[call.name] for call in calls]
        samples = []
        for readings, seconds in passes.timed[index]:
            numbers, times = unfold(readings, overhead)
            if numbers != expected:
                raise EngineError(
                    f"step {index} of the workload makes other calls in another pass: no profile"
                )
            cost_s = overhead.total * len(numbers) * 1e-9
            samples.append(Sample(seconds - cost_s, cost_s, times.own * 1e-9, times.total * 1e-9))
        bare = passes.bare[index]
        bare_s = float(np.mean([bare[run] for run in middle_half(bare)]))
        steps.append(StepProfile(passes.phases[index], calls, samples, bare_s))
    return steps
