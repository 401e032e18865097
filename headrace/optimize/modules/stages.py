"""The loop's stages for a user's module: its own call is the profile, the target and the workload.

A kernel counts as faster only where its gain holds three times: alone in the judge's cage, and twice as its
user calls it, through ``load``'s module, in processes that were started for that (``forward``, ``again``).
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from headrace.core.machine import num_cores
from headrace.core.packs import KernelEntry
from headrace.optimize.digest import ENTRY_FILE
from headrace.optimize.judge.baseline import Baseline
from headrace.optimize.judge.judge import judge
from headrace.optimize.judge.layout import Layout
from headrace.optimize.judge.measure import END_TO_END_ABOVE
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.statistics import ratio
from headrace.optimize.keys import Keys
from headrace.optimize.loop import Judged, Stages
from headrace.optimize.modules.host import ModuleHost
from headrace.optimize.modules.problem import ModuleProblem
from headrace.optimize.packing import Winner
from headrace.optimize.profile.roofs import measure_roofs
from headrace.optimize.publishing import publish
from headrace.optimize.records import (
    CallShape,
    KernelProfile,
    Measurement,
    ModuleCall,
    ModuleSlot,
    OpProfile,
    PhaseProfile,
    Published,
    Ratio,
    Roofs,
    Target,
)
from headrace.optimize.registry import Registry
from headrace.optimize.rounds import Round
from headrace.optimize.targets import Tried

OP = "module"
_PAIRS = 61
_RING_BYTES = 256 << 20
_MAX_CALLS = 256


class ModuleStages:
    """One command's module. ``host`` is kept open for all of it."""

    def __init__(
        self,
        name: str,
        host: ModuleHost,
        registry: Registry,
        keys: Keys,
        *,
        approver: str,
        options: JudgeOptions | None = None,
        once: bool = False,
    ) -> None:
        """``once``: one round is all there is to try."""
        self._name, self._host, self._registry, self._keys = name, host, registry, keys
        self._approver, self._options, self._once = approver, options or JudgeOptions(), once

    def stages(self) -> Stages:
        return Stages(
            profile=self._profile,
            targets=self._targets,
            judge=self._judge,
            confirm=self._confirm,
            publish=self._publish,
            pack_folder=self._registry.fetch,
        )

    def _profile(self, base: Path | None, seconds_left: float) -> KernelProfile:
        call, seconds = self._host.describe(), self._host.time(base)
        nbytes, flops = float(_bytes(call)), _flops(call)
        roofs = measure_roofs([nbytes], ["float32"], self._options.num_threads, limit_s=seconds_left)
        return KernelProfile(
            model=self._name,
            revision=call.digest,
            workload="get_inputs()",
            hardware=f"{num_cores()} cores",
            dtype=_main(call).dtype,
            threads=self._options.num_threads,
            source="module",
            created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            roofs=roofs,
            phases=[_phase(call, seconds, nbytes, flops, roofs)],
            packs=[str(base)] if base is not None else [],
        )

    def _targets(self, profile: KernelProfile, tried: Sequence[Tried]) -> list[Target]:
        """The one target there is, unless the last round on it brought nothing, or was the only one."""
        if tried and (self._once or not tried[-1].won):
            return []
        call, op = self._host.describe(), profile.phases[0].ops[0]
        dtype = _main(call).dtype
        weights = [slot.dtype for slot in call.slots if slot.role == "weight" and slot.varies]
        return [
            Target(
                op=OP,
                model=self._name.rpartition(":")[2],
                phase="prefill",
                weight_dtype=weights[0] if weights else dtype,
                activation_dtypes=[dtype],
                max_rows=op.shapes[0].rows,
                shapes=op.shapes,
                dims={},
                floats={},
                present=[],
                layers=1,
                baseline_s=op.total_s,
                end_to_end_gain=op.end_to_end_gain,
                why=f"a call takes {1e3 * op.total_s:.3g} ms and runs at {100 * op.roof_share:.0f} % of its "
                f"roof ({op.bound}-bound)",
                module=self._name,
                call=call,
            )
        ]

    def _judge(self, folder: Path, target: Target, base: Path | None) -> Judged:
        problem = self._problem(folder, target)
        return judge(
            folder, target, baseline_pack=base, problem=problem, end_to_end=False, options=self._options
        )

    def _confirm(self, folder: Path, target: Target, base: Path | None) -> Judged:
        verdict, measurement = self._judge(folder, target, base)
        if measurement is None or not measurement.won:
            return verdict, measurement
        found: dict[str, Ratio] = {}
        for name in ("forward", "again"):
            found[name] = measure_forward(self._problem(folder, target), folder, base, self._options)
            if found[name].low <= END_TO_END_ABOVE:
                break
        won = len(found) == 2 and all(each.low > END_TO_END_ABOVE for each in found.values())
        return verdict, Measurement(
            candidate=measurement.candidate,
            digest=measurement.digest,
            alone=measurement.alone,
            end_to_end=found,
            agreement=measurement.agreement,
            won=won,
            detail="" if won else "as its user calls it, it is not significantly faster",
        )

    def _publish(self, winner: Winner, one: Round, profile: KernelProfile, base: Path | None) -> Published:
        return publish(
            winner,
            one,
            self._registry,
            self._keys,
            dtype=winner.target.weight_dtype,
            shapes={"module": 1},  # no served model has this dimension
            approver=self._approver,
        )

    def _problem(self, folder: Path, target: Target) -> ModuleProblem:
        try:
            entry = msgspec.json.decode((folder / ENTRY_FILE).read_bytes(), type=KernelEntry)
        except (OSError, msgspec.MsgspecError):
            entry = KernelEntry(op=OP, source="")  # the judge will say so
        return ModuleProblem(target, entry, self._host)


def measure_forward(
    problem: ModuleProblem, folder: Path, base: Path | None, options: JudgeOptions, *, pairs: int = _PAIRS
) -> Ratio:
    """Interleaved passes of the module and of the same with the kernel in ``folder``, each in a fresh process
    of its own; times are this process's. ``base``: the pack that the module runs with already."""
    seed = random.SystemRandom().getrandbits(32) if options.seed is None else options.seed
    (case,) = problem.timed_cases(seed)
    size = sum(spec.nbytes for spec in (*problem.weights(), *case.tensors))
    count = max(4, min(_MAX_CALLS, _RING_BYTES // max(1, size)))
    layout = Layout(problem.signature, problem.weights(), 1, [case] * count, [0] * count, options.num_threads)
    try:
        if layout.num_sets:
            problem.fill_weights(layout.weights(0), seed)
        for index in range(count):
            problem.fill(case, layout.call(index), "normal", seed + 7 * index)
        pack = "" if base is None else str(base)
        with (
            Baseline(problem, layout, pack, options.cpus) as stock,
            Baseline(problem, layout, str(folder), options.cpus) as kernel,
        ):
            stock.wait_ready()
            kernel.wait_ready()
            return _interleaved(stock, kernel, count, 2 * options.alone_s, pairs)
    finally:
        layout.close()


def _interleaved(stock: Baseline, kernel: Baseline, count: int, seconds: float, pairs: int) -> Ratio:
    times: tuple[list[float], list[float]] = ([], [])
    until = time.monotonic() + seconds
    for number in range(3 + pairs):
        if number >= 12 and time.monotonic() > until:
            break
        first = number % 2
        order = ((0, stock), (1, kernel)) if first else ((1, kernel), (0, stock))
        taken = {place: side.run(0, count) for place, side in order}
        if number >= 3:
            times[0].append(taken[0])
            times[1].append(taken[1])
    return ratio(times[0], times[1], count)


def _main(call: ModuleCall) -> ModuleSlot:
    """The first floating-point input: its dtype is the module's, its rows are the call's."""
    return next(slot for slot in call.slots if slot.role == "input" and slot.dtype in ("float32", "bfloat16"))


def _bytes(call: ModuleCall) -> int:
    width = {"float32": 4, "bfloat16": 2, "int32": 4, "int64": 8}
    return sum(width.get(slot.dtype, 1) * math.prod(slot.shape) for slot in call.slots)


def _flops(call: ModuleCall) -> float:
    """Of products, where the call was traced; anything else counts once an element."""
    shapes = {slot.name: slot.shape for slot in call.slots} | {node.name: node.shape for node in call.graph}

    def shape(each: object) -> list[int]:
        return shapes.get(str(each).removeprefix("%"), [])

    total = 0.0
    for node in call.graph:
        size, op = float(math.prod(node.shape)), node.op.split(".")[1]
        if op in ("linear", "conv2d"):
            total += 2 * size * math.prod(shape(node.args[1])[1:])
        elif op in ("matmul", "mm", "bmm"):
            total += 2 * size * (shape(node.args[0]) or [1])[-1]
        elif op == "scaled_dot_product_attention":
            total += 4 * math.prod(shape(node.args[0])) * shape(node.args[1])[-2]
        else:
            total += size
    return total


def _phase(call: ModuleCall, seconds: float, nbytes: float, flops: float, roofs: Roofs) -> PhaseProfile:
    main = _main(call)
    rows = math.prod(main.shape[:-1]) if len(main.shape) > 1 else 1
    shape = CallShape(phase="prefill", rows=rows, context=0, calls_per_step=1.0, dtype=main.dtype, dims={})
    stream = max(roofs.stream.values(), default=1e10)
    memory_s, compute_s = nbytes / stream, flops / max(roofs.gemm.values(), default=1e11)
    roof_s = min(seconds, max(memory_s, compute_s))
    op = OpProfile(
        path=OP,
        op=OP,
        phase="prefill",
        calls_per_step=1.0,
        self_s=seconds,
        self_spread_s=0.0,
        total_s=seconds,
        share=1.0,
        flops=flops,
        bytes=nbytes,
        intensity=flops / max(1.0, nbytes),
        gbytes_per_s=nbytes / seconds / 1e9,
        gflops_per_s=flops / seconds / 1e9,
        roof_share=roof_s / seconds,
        bound="memory" if memory_s >= compute_s else "compute",
        recoverable_s=seconds - roof_s,
        end_to_end_gain=seconds / max(roof_s, 1e-3 * seconds),
        shapes=[shape],
    )
    return PhaseProfile(
        phase="prefill",
        num_steps=1,
        rows=rows,
        step_s=seconds,
        unprofiled_step_s=seconds,
        unnamed_s=0.0,
        ops=[op],
    )
