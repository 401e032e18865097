"""From the calls of many steps to the profile of each phase."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median

import numpy as np
from numpy.typing import NDArray

from headrace.optimize.profile.instrument import Call
from headrace.optimize.profile.roofline import Ceilings, ceilings
from headrace.optimize.records import BoundClass, CallShape, OpProfile, Phase, PhaseProfile, Roofs

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One timed run of a step, in seconds: the whole without the instrument's own cost, that cost, and each
    call's own and total time."""

    step_s: float
    instrument_s: float
    own: Floats
    total: Floats


@dataclass(frozen=True)
class StepProfile:
    """One step of the workload: its calls, its timed runs, and how long it takes without any timer."""

    phase: Phase
    calls: list[Call]
    samples: list[Sample]
    bare_s: float

    @cached_property
    def middle(self) -> list[int]:
        """The runs whose times count: see ``middle_half``."""
        return middle_half([sample.step_s for sample in self.samples])

    def mean(self, values: Sequence[float] | Floats) -> float:
        """Of one number a run, over the runs that count."""
        return float(np.mean([values[run] for run in self.middle]))

    @property
    def streamed(self) -> float:
        """Bytes of weights and cache that the step goes through."""
        return sum(
            call.cost.resident
            for call in self.calls
            if call.cost is not None and (call.parent < 0 or self.calls[call.parent].cost is None)
        )

    @property
    def rows(self) -> int:
        return max((call.cost.rows for call in self.calls if call.cost is not None), default=0)


@dataclass
class _Entry:
    """One path in one phase; lists hold one number a step."""

    name: str
    own: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    medians: list[float] = field(default_factory=list)
    deviations: list[float] = field(default_factory=list)  # of each run's own time from its step's median
    layer_totals: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    shapes: Counter[tuple[int, str, tuple[tuple[str, int], ...]]] = field(default_factory=Counter)
    contexts: defaultdict[tuple[int, str, tuple[tuple[str, int], ...]], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )
    calls: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    least_s: float = 0.0
    footprint: float = 0.0
    dtype: str = ""
    products: Counter[str] = field(default_factory=Counter)


def middle_half(times: Sequence[float]) -> list[int]:
    """Which runs lie in the middle half of ``times``, of three the median alone.

    What is taken from these runs and averaged adds up, as medians of parts do not, and yet a run in which
    somebody else had the processor does not count.
    """
    order = sorted(range(len(times)), key=lambda run: times[run])
    left_out = max(len(order) // 4, int(len(order) > 2))
    return order[left_out : len(order) - left_out]


def streamed(steps: Iterable[StepProfile]) -> list[float]:
    """The median footprint of each phase's steps, in bytes."""
    found: defaultdict[Phase, list[float]] = defaultdict(list)
    for step in steps:
        found[step.phase].append(step.streamed)
    return [median(each) for each in found.values()]


def phase_profiles(steps: list[StepProfile], roofs: Roofs) -> list[PhaseProfile]:
    """Phases in the order prefill, decode; one without steps is left out."""
    profiles = []
    for phase in ("prefill", "decode"):
        members = [step for step in steps if step.phase == phase]
        if members:
            profiles.append(_phase_profile(phase, members, roofs))
    return profiles


def _phase_profile(phase: Phase, steps: list[StepProfile], roofs: Roofs) -> PhaseProfile:
    count = len(steps)
    footprint = median(step.streamed for step in steps)
    entries: dict[str, _Entry] = {}
    step_s, unnamed_s, instrument_s = [], [], []
    for step in steps:
        step_s.append(step.mean([sample.step_s for sample in step.samples]))
        unnamed_s.append(step.mean([sample.step_s - float(sample.own.sum()) for sample in step.samples]))
        instrument_s.append(step.samples[0].instrument_s)
        _add_step(entries, step, footprint, roofs)
    mean_step = float(np.mean(step_s))
    return PhaseProfile(
        phase=phase,
        num_steps=count,
        rows=int(median(step.rows for step in steps)),
        step_s=mean_step,
        unprofiled_step_s=float(np.mean([step.bare_s for step in steps])),
        unnamed_s=float(np.mean(unnamed_s)),
        instrument_s=float(np.mean(instrument_s)),
        footprint=footprint,
        ops=[
            _op_profile(path, entries[path], phase, count, mean_step, roofs) for path in tree_order(entries)
        ],
    )


def _add_step(entries: dict[str, _Entry], step: StepProfile, footprint: float, roofs: Roofs) -> None:
    """Adds a step's calls to the entries of their paths, in the order in which they first occur."""
    members: defaultdict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(step.calls):
        members[call.path].append(index)
    for path, indices in members.items():
        entry = entries.setdefault(path, _Entry(step.calls[indices[0]].name))
        own = np.array([sample.own[indices].sum() for sample in step.samples])
        totals = np.array([sample.total[indices] for sample in step.samples])  # (runs, calls)
        median_s = float(np.median(own))
        entry.own.append(step.mean(own))
        entry.medians.append(median_s)
        entry.deviations += (own - median_s).tolist()
        entry.total.append(step.mean(totals.sum(axis=1)))
        entry.calls += len(indices)
        for place, index in enumerate(indices):
            call = step.calls[index]
            if call.layer >= 0:
                entry.layer_totals[call.layer] += step.mean(totals[:, place])
            if call.cost is not None:
                _add_cost(entry, call, footprint, roofs)


def _add_cost(entry: _Entry, call: Call, footprint: float, roofs: Roofs) -> None:
    cost = call.cost
    assert cost is not None
    entry.dtype = cost.dtype
    entry.footprint = footprint if cost.resident else cost.nbytes
    entry.flops += cost.flops
    entry.nbytes += cost.nbytes
    entry.products.update(cost.products)
    found = ceilings(roofs, entry.footprint, cost.dtype, cost.flops, cost.products)
    entry.least_s += found.seconds(cost.flops, cost.nbytes)
    key = cost.rows, cost.dtype, tuple(cost.dims.items())
    entry.shapes[key] += 1
    entry.contexts[key].append(cost.context)


def _op_profile(
    path: str, entry: _Entry, phase: Phase, num_steps: int, step_s: float, roofs: Roofs
) -> OpProfile:
    own, total = sum(entry.own) / num_steps, sum(entry.total) / num_steps
    flops, nbytes, least = (x / num_steps for x in (entry.flops, entry.nbytes, entry.least_s))
    is_kernel = bool(entry.shapes)
    found = Ceilings(1.0, 1.0)
    if is_kernel:
        found = ceilings(roofs, entry.footprint, entry.dtype, entry.flops, entry.products)
    low, high = np.percentile(entry.deviations, [25, 75])
    layers = sorted(entry.layer_totals)
    return op_profile(
        path=path,
        op=entry.name,
        phase=phase,
        calls_per_step=entry.calls / num_steps,
        self_s=own,
        self_median_s=sum(entry.medians) / num_steps,
        self_spread_s=float(high - low),
        total_s=total,
        step_s=step_s,
        flops=flops,
        nbytes=nbytes,
        least_s=least,
        bound=found.bound(flops, nbytes, total) if is_kernel else "overhead",
        shapes=[
            CallShape(
                phase=phase,
                rows=rows,
                context=int(median(entry.contexts[rows, dtype, dims])),
                calls_per_step=calls / num_steps,
                dtype=dtype,
                dims=dict(dims),
            )
            for (rows, dtype, dims), calls in entry.shapes.most_common()
        ],
        layers=layers,
        layer_s=[entry.layer_totals[layer] / num_steps for layer in layers],
    )


def tree_order(paths: Iterable[str]) -> list[str]:
    """Paths with what is inside of each right after it, otherwise in the order given."""
    children: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        children[path.rpartition("/")[0]].append(path)
    ordered: list[str] = []
    open_paths = children[""][::-1]
    while open_paths:
        path = open_paths.pop()
        ordered.append(path)
        open_paths += children[path][::-1]
    return ordered


def op_profile(
    *,
    path: str,
    op: str,
    phase: Phase,
    calls_per_step: float,
    self_s: float,
    self_median_s: float,
    self_spread_s: float,
    total_s: float,
    step_s: float,
    flops: float,
    nbytes: float,
    least_s: float,
    bound: BoundClass,
    shapes: list[CallShape],
    layers: list[int] | None = None,
    layer_s: list[float] | None = None,
) -> OpProfile:
    """The record with what follows from the rest; ``least_s``: a step at the roof, 0: there is none."""
    recoverable = max(0.0, total_s - least_s) if least_s else 0.0
    rest = step_s - recoverable
    return OpProfile(
        path=path,
        op=op,
        phase=phase,
        calls_per_step=calls_per_step,
        self_s=self_s,
        self_median_s=self_median_s,
        self_spread_s=self_spread_s,
        total_s=total_s,
        share=self_s / step_s if step_s else 0.0,
        flops=flops,
        bytes=nbytes,
        intensity=flops / nbytes if nbytes else 0.0,
        gbytes_per_s=nbytes / total_s / 1e9 if total_s > 0 else 0.0,
        gflops_per_s=flops / total_s / 1e9 if total_s > 0 else 0.0,
        roof_share=least_s / total_s if total_s > 0 else 0.0,
        bound=bound,
        recoverable_s=recoverable,
        end_to_end_gain=step_s / rest if rest > 0 else 1.0,
        shapes=shapes,
        layers=layers or [],
        layer_s=layer_s or [],
    )
