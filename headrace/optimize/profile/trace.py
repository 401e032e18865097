"""A torch profiler trace of any engine, on a CPU or a GPU, as a KernelProfile.

On a CPU an op's time is its own on the thread that called it. On a GPU it is the time of the kernels that it
launched, a module's that of the kernels inside it, and what no kernel explains is the device's idle time.
Kernels of a CUDA graph were launched at once: they stand under their own names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from headrace.optimize.profile.costs import Cost
from headrace.optimize.profile.roofline import ceilings
from headrace.optimize.profile.summary import op_profile, tree_order
from headrace.optimize.profile.trace_costs import node_cost, short_name
from headrace.optimize.profile.trace_events import Kernel, Node, TraceStep, load_trace
from headrace.optimize.records import CallShape, KernelProfile, OpProfile, Phase, PhaseProfile, Roofs

_NO_ROOFS = Roofs(stream={}, gemm={}, method="not measured: the trace was taken elsewhere (--roofs FILE)")
_PREFILL_ROWS = 64
_LONGEST_NAME = 60


def read_trace(path: Path, *, model: str = "", roofs: Roofs | None = None) -> KernelProfile:
    """``roofs`` are those of the machine that the trace was taken on; without them no roof is known.

    Raises UsageError for a file that is no trace, or one in which no op ran.
    """
    trace = load_trace(path)
    roofs = roofs or _NO_ROOFS
    on_device = bool(trace.device)
    steps = [_Step(step, step.phase or _guess_phase(step), is_device=on_device) for step in trace.steps]
    _set_spans(steps)
    dtypes = [use.cost.dtype for step in steps for use in step.uses if use.cost and use.cost.resident]
    return KernelProfile(
        model=model or path.name.partition(".")[0],
        revision="",
        workload="trace",
        hardware=trace.device or "cpu",
        dtype=max(set(dtypes), key=dtypes.count) if dtypes else "",
        threads=0,
        source=str(path),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        roofs=roofs,
        phases=[
            _phase_profile(phase, members, roofs)
            for phase in ("prefill", "decode")
            if (members := [step for step in steps if step.phase == phase])
        ],
    )


@dataclass
class _Use:
    """One op, module or kernel in one step; seconds without and with what it contains."""

    path: str
    op: str
    own_s: float
    total_s: float
    layer: int
    cost: Cost | None
    is_op: bool


class _Step:
    """A step with its uses in the order in which they begin; ``seconds`` is set by ``_set_spans``."""

    def __init__(self, step: TraceStep, phase: Phase, *, is_device: bool) -> None:
        self.phase = phase
        self.kernels = step.kernels() if is_device else []
        self.begin = self.kernels[0].begin if self.kernels else step.root.begin
        self.end = max((kernel.end for kernel in self.kernels), default=step.root.end)
        self.seconds = self.end - self.begin
        self.uses: list[_Use] = []
        self._is_device = is_device
        for child in step.root.children:
            self._add(child, "")
        self._add_kernels(step.root.kernels, "")
        self.rows = step.rows or int(median(_rows(self.uses) or [0]))
        self.named_s = _busy(self.kernels) if is_device else sum(use.own_s for use in self.uses)

    def _add(self, node: Node, prefix: str) -> float:
        """Adds a node and what is inside; returns its total time."""
        if self._is_device and not _launches(node):
            return 0.0
        name = short_name(node.name) if node.kind == "op" else node.name
        path = f"{prefix}/{name}" if prefix else name
        use = _Use(path, name, 0.0, 0.0, node.layer, None, node.kind == "op")
        self.uses.append(use)
        if node.kind == "op":
            use.cost = _op_cost(node)
            use.total_s = _device_s(node) if self._is_device else node.seconds
            use.own_s = use.total_s
            return use.total_s
        inside = sum(self._add(child, path) for child in node.children)
        if self._is_device:
            use.total_s = inside + self._add_kernels(node.kernels, path)
        else:
            use.total_s, use.own_s = node.seconds, node.seconds - inside
        return use.total_s

    def _add_kernels(self, kernels: list[Kernel], prefix: str) -> float:
        """Kernels that no op stands for, each under its own name."""
        for kernel in kernels:
            name = _kernel_name(kernel.name)
            path = f"{prefix}/{name}" if prefix else name
            spent = kernel.end - kernel.begin
            self.uses.append(_Use(path, name, spent, spent, -1, None, True))
        return sum(kernel.end - kernel.begin for kernel in kernels)


def _op_cost(node: Node) -> Cost | None:
    """Its own, or the sum of what is inside of an op that is no product itself but calls one."""
    inside = [cost for child in node.children if (cost := _op_cost(child)) is not None]
    own = node_cost(node)
    products = [cost for cost in inside if cost.resident]
    if own is None or (products and not own.resident):
        if not inside:
            return own
        first = max(products or inside, key=lambda cost: cost.flops)
        flops, moved = sum(cost.flops for cost in inside), sum(cost.nbytes for cost in inside)
        resident = sum(cost.resident for cost in inside)
        return Cost(first.rows, first.dtype, first.dims, flops, moved, resident, first.context)
    return own


def _set_spans(steps: list[_Step]) -> None:
    """On a device a step lasts until the next one's first kernel, unless nobody asked for anything: a pause
    that is longer than the step itself."""
    ordered = sorted((step for step in steps if step.kernels), key=lambda step: step.begin)
    for step, following in pairwise(ordered):
        pause = following.begin - step.end
        if pause <= step.end - step.begin:
            step.seconds = max(following.begin - step.begin, step.named_s)


def _phase_profile(phase: Phase, steps: list[_Step], roofs: Roofs) -> PhaseProfile:
    count = len(steps)
    step_s = sum(step.seconds for step in steps) / count
    footprint = median(sum(use.cost.resident for use in step.uses if use.cost is not None) for step in steps)
    gathered: dict[str, _Gathered] = {}
    for index, step in enumerate(steps):
        for use in step.uses:
            gathered.setdefault(use.path, _Gathered(use.op, count)).add(index, use, footprint, roofs)
    _add_inside(gathered)
    return PhaseProfile(
        phase=phase,
        num_steps=count,
        rows=int(median(step.rows for step in steps)),
        step_s=step_s,
        unprofiled_step_s=0.0,
        unnamed_s=sum(max(0.0, step.seconds - step.named_s) for step in steps) / count,
        footprint=footprint,
        ops=[gathered[path].profile(path, phase, step_s, roofs, footprint) for path in tree_order(gathered)],
    )


@dataclass
class _Gathered:
    """All uses of one path in one phase."""

    op: str
    num_steps: int
    own: list[float] = field(default_factory=list)
    total_s: float = 0.0
    calls: int = 0
    flops: float = 0.0
    nbytes: float = 0.0
    least_s: float = 0.0
    is_op: bool = False
    layers: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    costs: defaultdict[tuple[int, str, tuple[tuple[str, int], ...]], list[int]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def add(self, step: int, use: _Use, footprint: float, roofs: Roofs) -> None:
        self.own += [0.0] * (step + 1 - len(self.own))
        self.own[step] += use.own_s
        self.total_s += use.total_s
        self.calls += 1
        self.is_op = use.is_op
        if use.layer >= 0:
            self.layers[use.layer] += use.total_s
        cost = use.cost
        if cost is None:
            return
        self.flops += cost.flops
        self.nbytes += cost.nbytes
        found = ceilings(roofs, footprint if cost.resident else cost.nbytes, cost.dtype)
        self.least_s += found.seconds(cost.flops, cost.nbytes)
        self.costs[cost.rows, cost.dtype, tuple(cost.dims.items())].append(cost.context)

    def profile(self, path: str, phase: Phase, step_s: float, roofs: Roofs, footprint: float) -> OpProfile:
        count = self.num_steps
        own = self.own + [0.0] * (count - len(self.own))
        low, middle, high = np.percentile(own, [25, 50, 75])
        dtype = next(iter(self.costs), (0, "", ()))[1]
        known = bool(self.flops or self.nbytes) and bool(roofs.stream or roofs.gemm)
        found = ceilings(roofs, footprint, dtype)
        layers = sorted(self.layers)
        return op_profile(
            path=path,
            op=self.op,
            phase=phase,
            calls_per_step=self.calls / count,
            self_s=sum(own) / count,
            self_median_s=float(middle),
            self_spread_s=float(high - low),
            total_s=self.total_s / count,
            step_s=step_s,
            flops=self.flops / count,
            nbytes=self.nbytes / count,
            least_s=self.least_s / count,
            bound=found.bound(self.flops, self.nbytes, self.total_s) if known else "overhead",
            shapes=self._shapes(phase),
            layers=layers,
            layer_s=[self.layers[layer] / count for layer in layers],
        )

    def _shapes(self, phase: Phase) -> list[CallShape]:
        """None of modules, which do nothing by themselves; an empty one where no shape was recorded."""
        if not self.is_op:
            return []
        unknown = self.calls - sum(map(len, self.costs.values()))
        shapes = [
            CallShape(
                phase=phase,
                rows=rows,
                context=int(median(contexts)),
                calls_per_step=len(contexts) / self.num_steps,
                dtype=dtype,
                dims=dict(dims),
            )
            for (rows, dtype, dims), contexts in sorted(self.costs.items(), key=lambda item: -len(item[1]))
        ]
        if unknown:
            calls = unknown / self.num_steps
            shapes.append(CallShape(phase=phase, rows=0, context=0, calls_per_step=calls, dtype="", dims={}))
        return shapes


def _add_inside(gathered: dict[str, _Gathered]) -> None:
    """Modules have to do what is done inside them."""
    for path, each in gathered.items():
        if each.is_op:
            parts = path.split("/")
            for end in range(1, len(parts)):
                around = gathered["/".join(parts[:end])]
                around.flops += each.flops
                around.nbytes += each.nbytes
                around.least_s += each.least_s


def _guess_phase(step: TraceStep) -> Phase:
    """By the number of queries of an attention, or of rows in the products."""
    rows = []
    for node in _ops(step.root):
        cost = _op_cost(node)
        if cost is None or not cost.resident:
            continue
        if "num_heads" in cost.dims:
            shape = node.arguments.get("Input Dims", [[]])[0]
            if len(shape) == 4:
                return "prefill" if shape[2] > 1 else "decode"
        rows.append(cost.rows)
    return "prefill" if rows and median(rows) >= _PREFILL_ROWS else "decode"


def _ops(node: Node) -> Iterator[Node]:
    for child in node.children:
        if child.kind == "op":
            yield child
        else:
            yield from _ops(child)


def _rows(uses: list[_Use]) -> list[int]:
    return [use.cost.rows for use in uses if use.cost is not None and use.cost.resident]


def _launches(node: Node) -> bool:
    return bool(node.kernels) or any(_launches(child) for child in node.children)


def _device_s(node: Node) -> float:
    return sum(k.end - k.begin for k in node.kernels) + sum(_device_s(child) for child in node.children)


def _busy(kernels: list[Kernel]) -> float:
    """Seconds in which at least one of ``kernels``, sorted by begin, was running."""
    total, until = 0.0, float("-inf")
    for kernel in kernels:
        total += max(0.0, kernel.end - max(kernel.begin, until))
        until = max(until, kernel.end)
    return total


def _kernel_name(name: str) -> str:
    """Without return type, template and arguments."""
    head = name.removeprefix("void ").partition("<")[0].partition("(")[0]
    return (head.rpartition("::")[2] or name)[:_LONGEST_NAME]
