"""The records of one round; each stage turns one into the next, and each is a JSON file of the round.

profile    KernelProfile         where the time of a served workload goes
bottleneck Target                what to write anew, and what it can bring
propose    Candidate             a folder with kernel.json and sources, and who wrote it
verify     Verdict               right or wrong, and why
measure    Measurement           faster or not: alone, and the whole workload
publish    Published             a pack in the registry
rollout    RolloutRecord         what the replicas run now, or why it was taken back
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Phase = Literal["prefill", "decode"]
BoundClass = Literal["memory", "compute", "overhead"]

Reason = Literal[
    "ok",
    "malformed",  # kernel.json or its files are not what they must be
    "forbidden",  # the source does what no kernel needs
    "no_compiler",
    "compile_error",
    "crashed",
    "timed_out",
    "out_of_memory",
    "out_of_limits",  # output, disk, processes
    "wrong_result",
    "not_deterministic",
    "incomplete",  # an output element that was never written
    "input_changed",
    "out_of_bounds",  # wrote beside its tensors
    "stale_result",  # right at first, wrong on fresh content or after timing
    "still_running",  # work goes on after the call returned
    "too_fast",  # beyond the measured roof
    "declined",  # HR_NOT_MINE on a call that it declared to cover
    "not_invariant",  # a row's bits depend on the rest of its call
    "environment_touched",  # rounding mode, files, the judge's own memory
    "not_run_here",  # no such device
]


class CallShape(msgspec.Struct, frozen=True, kw_only=True):
    """One shape in which an op was called: ``rows`` token rows, ``context`` cached tokens each (median)."""

    phase: Phase
    rows: int
    context: int
    calls_per_step: float
    dtype: str
    dims: dict[str, int]


class OpProfile(msgspec.Struct, frozen=True, kw_only=True):
    """One op under one path of its hierarchy, such as ``decoder_layer/mlp_block/linear.down``.

    Times in seconds per step, ``flops`` and ``bytes`` per step as well. ``self_s`` is without the ops it
    calls, ``total_s`` with them: means over the middle half of the runs, which add up; ``self_median_s`` and
    ``self_spread_s`` (interquartile range) are over all runs. ``layers`` are the layers it occurs in, empty
    outside them. ``bound`` and the roof are of the machine as measured at the op's own footprint.
    ``recoverable_s`` is what a step would lose if the op (``total_s``) ran at its roof.
    """

    path: str
    op: str
    phase: Phase
    calls_per_step: float
    self_s: float
    self_spread_s: float
    total_s: float
    share: float
    flops: float
    bytes: float
    intensity: float
    gbytes_per_s: float
    gflops_per_s: float
    roof_share: float
    bound: BoundClass
    recoverable_s: float
    end_to_end_gain: float  # step / (step - recoverable)
    shapes: list[CallShape]
    layers: list[int] = []
    layer_s: list[float] = []  # ``total_s`` by layer, as ``layers``
    self_median_s: float = 0.0


class PhaseProfile(msgspec.Struct, frozen=True, kw_only=True):
    """All steps of one phase. ``step_s`` is the profiled step without ``instrument_s``, the timers'
    own calibrated cost; ``unprofiled_step_s`` the same step without any instrument; ``unnamed_s`` is what no
    entry of ``ops`` explains. ``footprint`` is the bytes of weights and cache that one step goes through."""

    phase: Phase
    num_steps: int
    rows: int
    step_s: float
    unprofiled_step_s: float
    unnamed_s: float
    ops: list[OpProfile]
    instrument_s: float = 0.0
    footprint: float = 0.0


class Roofs(msgspec.Struct, frozen=True, kw_only=True):
    """Measured ceilings: bytes per second by footprint in bytes, and FLOP per second by dtype."""

    stream: dict[int, float]
    gemm: dict[str, float]
    method: str


class KernelProfile(msgspec.Struct, frozen=True, kw_only=True):
    """``source``: engine, or the trace file it was read from; ``recipe`` how to get the figures again."""

    model: str
    revision: str
    workload: str
    hardware: str
    dtype: str
    threads: int
    source: str
    created: str
    roofs: Roofs
    phases: list[PhaseProfile]
    packs: list[str] = []
    recipe: dict[str, str] = {}


class ModuleSlot(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a user's module, contiguous. ``source``: the parameter's or buffer's name for a weight,
    the argument's place for an input. A weight that does not ``vary`` is a constant of the module."""

    name: str
    role: Literal["input", "weight", "output"]
    dtype: str
    shape: list[int]
    source: str = ""
    varies: bool = True


class GraphNode(msgspec.Struct, frozen=True, kw_only=True):
    """One operator as the module calls it (``aten.linear.default``); ``%name`` in ``args`` names a slot or an
    earlier node, whose second result is ``%name.1``."""

    name: str
    op: str
    args: list[Any]
    kwargs: dict[str, Any] = {}
    shape: list[int] = []
    dtype: str = ""


class ModuleCall(msgspec.Struct, frozen=True, kw_only=True):
    """How a user's module is called. ``arguments`` of forward, in order: a slot's name, or a number in a list
    by itself. ``contents`` are the kinds of inputs on which it gives finite numbers; ``given``: its own
    get_inputs(). ``graph`` ends in ``results``; it is empty where the module could not be traced.
    ``digest`` is the file's SHA-256."""

    slots: list[ModuleSlot]
    arguments: list[Any]
    contents: list[str]
    digest: str
    graph: list[GraphNode] = []
    results: list[str] = []
    source: str = ""  # the file's text


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a round is after: an op of the table (or ``module`` for a user's own), with the shapes that it
    must cover and the gain that its roof promises.

    ``weight_dtype`` is the model's own; ``weight_formats`` those of its matrices where they are blocks, the
    first of most, the last of values and of what leads back down. ``norm_dtype``: of norms, empty: as others.
    """

    op: str
    model: str
    phase: Phase
    weight_dtype: str
    activation_dtypes: list[str]
    max_rows: int
    shapes: list[CallShape]
    dims: dict[str, int]  # the op's fixed dimensions and switches (signature.py names them)
    floats: dict[str, float]
    present: list[str]  # optional slots that this model's call has
    layers: int  # how many sets of weights one step goes through
    baseline_s: float  # one call at the first shape, stock
    end_to_end_gain: float
    why: str
    module: str = ""  # path.py:Class of a user's module
    call: ModuleCall | None = None  # and how it is called
    weight_formats: list[str] = []
    norm_dtype: str = ""
    quantization: str = "auto"  # the setting with which the model's weights are such

    @property
    def formats(self) -> list[str]:
        """What a kernel must be able to read its matrices in."""
        return self.weight_formats or [self.weight_dtype]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """``folder`` is relative to the round's; ``digest`` is over its files."""

    name: str
    folder: str
    digest: str
    author: str
    note: str = ""
    parameters: dict[str, str] = {}


class ShapeError(msgspec.Struct, frozen=True, kw_only=True):
    """Worst scale-relative error against the float64 reference at one shape, beside stock's own."""

    shape: CallShape
    error: float
    stock_error: float
    limit: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    candidate: str
    digest: str
    passed: bool
    reason: Reason
    detail: str
    seconds: float
    sandbox: str  # what held it
    errors: list[ShapeError] = []
    build_s: float = 0.0


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """Baseline time over candidate time: median of pairs with a 95 % interval; above 1 is faster."""

    median: float
    low: float
    high: float
    pairs: int
    baseline_s: float
    candidate_s: float


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """``alone`` by shape (``decode/1`` …) in isolated processes; ``end_to_end`` by metric of the workload
    (``decode_tok_s``, ``prefill_tok_s``). ``won`` only if both are significant. ``limited``: how torch's
    operators were kept to a lesser CPU than the one it was measured on, empty: they were not."""

    candidate: str
    digest: str
    alone: dict[str, Ratio]
    end_to_end: dict[str, Ratio]
    agreement: str  # how its tokens and logits compare with the baseline's
    won: bool
    detail: str
    limited: str = ""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    pack: str
    registry: str
    candidate: str
    summary: str


class RolloutRecord(msgspec.Struct, frozen=True, kw_only=True):
    pack: str
    outcome: Literal["rolled_out", "rolled_back", "refused", "skipped"]
    approver: str
    detail: str
    steps: list[str] = []
