"""Timers around the ops of a table and the parts of an engine's step, put on and taken off between steps.

    survey   every call's name, layer and cost, without times: looking at tensors takes longer than many ops
    timing   two clock readings a call; what a call was is known from the survey of the same step

A call's own cost lies partly between its two readings and partly around them, in its caller's time;
``calibrate`` measures both on a function that does nothing, and ``unfold`` takes them off.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.engine.engine import Engine
from headrace.kernels.table import COMPOSITES, OpTable
from headrace.kernels.weights import LayerWeights
from headrace.optimize.profile.costs import Cost, call_cost

OPS = tuple(name for name in OpTable.names() if name != "pack_linear")
PARTS = {
    "moves": "blocks in and out of the cache before and after the step",
    "schedule": "which requests compute how many tokens",
    "lay_out": "the step's arrays: token ids, positions, block tables, rows that sample",
    "forward": "the model between its ops: rotary angles, the walk over the layers",
    "logits": "the output head's call, without its product",
    "sample": "from logits to tokens",
    "update": "booking of the tokens, blocks of finished requests",
    "events": "what changed in the cache, for the router",
}
"""The parts of a step that are no ops of the table."""

_END = -1
_CALIBRATION_CALLS = 2000

Function = Callable[..., Any]


@dataclass(frozen=True)
class Overhead:
    """Nanoseconds that timing adds to one call: between its readings, and to its caller."""

    inside: float
    outside: float

    @property
    def total(self) -> float:
        return self.inside + self.outside


@dataclass(frozen=True)
class Call:
    """One call of a step: ``path`` is its place in the hierarchy of ops, ``parent`` the number of the call
    that it is part of (-1: none), ``layer`` -1 outside of layers; ``cost`` None for a part of the engine."""

    name: str
    path: str
    parent: int
    layer: int
    cost: Cost | None


class Instrument:
    """Timers for one engine. ``put_on`` and ``take_off`` only between steps."""

    def __init__(self, engine: Engine) -> None:
        self._runner = engine.runner
        self._ops = engine.runner.model.ops
        self._targets: list[tuple[Any, str, str]] = [
            (engine.moves, "before_step", "moves"),
            (engine.moves, "after_step", "moves"),
            (engine.scheduler, "schedule", "schedule"),
            (engine.scheduler, "update", "update"),
            (engine.runner, "execute", "lay_out"),
            (engine.runner.model, "forward", "forward"),
            (engine.runner.model, "logits", "logits"),
            (engine.runner.sampler, "sample", "sample"),
            (engine, "take_events", "events"),
        ]
        self.survey = Survey()
        self.readings: list[int] = []
        self._surveying = self._wrapped(self.survey.watch)
        self._timing = self._wrapped(lambda name, function, _: timed(name, function, self.readings))

    def put_on(self, *, survey: bool = False) -> None:
        table, parts = self._surveying if survey else self._timing
        self._runner.model.ops = table
        for (holder, attribute, _), part in zip(self._targets, parts, strict=True):
            setattr(holder, attribute, part)

    def take_off(self) -> None:
        self._runner.model.ops = self._ops
        for holder, attribute, _ in self._targets:
            with suppress(AttributeError):
                delattr(holder, attribute)

    def take_readings(self) -> list[int]:
        taken = self.readings[:]
        self.readings.clear()
        return taken

    def _wrapped(self, wrap: Callable[[str, Function, bool], Function]) -> tuple[OpTable, list[Function]]:
        ops = {}
        for name in OPS:
            function = getattr(self._ops, name)
            # a composite as it was put into the table, without the table that it is bound to
            is_composite = name in COMPOSITES and isinstance(function, partial)
            ops[name] = wrap(name, function.func if is_composite else function, is_composite)
        ops["pack_linear"] = self._ops.pack_linear
        parts = [wrap(name, getattr(holder, attribute), False) for holder, attribute, name in self._targets]
        return OpTable(ops, self._ops.provenance), parts


def timed(name: str, function: Function, readings: list[int]) -> Function:
    """``function``, which leaves its number and begin, and -1 and its end, in ``readings``."""
    number = NUMBERS[name]
    append, clock = readings.append, time.perf_counter_ns

    def call(*arguments: Any, **keywords: Any) -> Any:
        append(number)
        append(clock())
        try:
            return function(*arguments, **keywords)
        finally:
            ended = clock()
            append(_END)
            append(ended)

    return call


NUMBERS = {name: number for number, name in enumerate((*OPS, *PARTS))}


@dataclass
class Survey:
    """The calls of one step in the order in which they begin."""

    calls: list[Call] = field(default_factory=list)
    _open: list[int] = field(default_factory=list)
    _labels: dict[int, str] = field(default_factory=dict)
    _kept: list[object] = field(default_factory=list)  # what the labels' ids belong to
    _layers: int = 0

    def take(self) -> list[Call]:
        taken, self.calls = self.calls, []
        self._layers = 0
        return taken

    def watch(self, name: str, function: Function, is_composite: bool) -> Function:
        """``function``, which adds its call."""
        is_op = name in OPS

        def call(*arguments: Any, **keywords: Any) -> Any:
            own = arguments[1:] if is_composite else arguments
            self._open.append(len(self.calls))
            self.calls.append(self._call(name, own, keywords) if is_op else self._part(name))
            try:
                return function(*arguments, **keywords)
            finally:
                self._open.pop()

        return call

    def _part(self, name: str) -> Call:
        return Call(name, name, self._parent, -1, None)

    def _call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Call:
        parent = self.calls[self._parent] if self._parent >= 0 else None
        layer = -1 if parent is None else parent.layer
        if name == "decoder_layer":
            layer, self._layers = self._layers, self._layers + 1
            self._know(arguments[1])
        label = name
        if name in ("linear", "rms_norm"):
            label = f"{name}.{self._labels.get(id(arguments[1]), 'final' if name == 'rms_norm' else 'other')}"
        inside = parent is not None and parent.cost is not None
        path = f"{parent.path}/{label}" if parent is not None and inside else label
        return Call(name, path, self._parent, layer, call_cost(name, arguments, keywords))

    @property
    def _parent(self) -> int:
        return self._open[-2] if len(self._open) > 1 else -1

    def _know(self, layer: LayerWeights) -> None:
        if id(layer) in self._labels:
            return
        attention, mlp = layer.attention, layer.mlp
        parts: dict[str, object] = {
            "qkv": attention.qkv,
            "out": attention.out,
            "gate_up": mlp.gate_up,
            "down": mlp.down,
            "q": attention.q_norm,
            "k": attention.k_norm,
            "input": layer.input_norm,
            "post_attention": layer.post_attention_norm,
            "pre_mlp": layer.pre_mlp_norm,
            "post_mlp": layer.post_mlp_norm,
        }
        self._labels[id(layer)] = "layer"
        self._kept.append(layer)
        self._labels |= {id(part): label for label, part in parts.items() if part is not None}


@dataclass(frozen=True)
class CallTimes:
    """Nanoseconds of a step's calls in order: without the calls that they made, and with them."""

    own: NDArray[np.float64]
    total: NDArray[np.float64]


def unfold(readings: list[int], overhead: Overhead) -> tuple[list[int], CallTimes]:
    """The calls' numbers in order, and their times with the instrument's own cost taken off."""
    numbers: list[int] = []
    own: list[float] = []
    total: list[float] = []
    opened: list[int] = []
    begun: list[int] = []
    inner: list[float] = []  # of each open call: readings of the calls that it made, and their cost outside
    inside: list[int] = []  # of each open call: how many calls it made, at any depth
    for mark, at in zip(readings[::2], readings[1::2], strict=True):
        if mark != _END:
            opened.append(len(numbers))
            begun.append(at)
            inner.append(0.0)
            inside.append(0)
            numbers.append(mark)
            own.append(0.0)
            total.append(0.0)
            continue
        call, spent = opened.pop(), float(at - begun.pop())
        made = inside.pop()
        own[call] = spent - overhead.inside - inner.pop()
        total[call] = spent - overhead.inside - made * overhead.total
        if opened:
            inner[-1] += spent + overhead.outside
            inside[-1] += made + 1
    assert not opened, "a call has begun and not ended"
    return numbers, CallTimes(np.array(own), np.array(total))


def calibrate() -> Overhead:
    """Times calls of a function that does nothing, with and without a timer."""

    def nothing(*arguments: Any, **keywords: Any) -> None:
        pass

    def per_call(function: Function) -> float:
        began = time.perf_counter_ns()
        for _ in range(_CALIBRATION_CALLS):
            function(1, 2, 3)
        return (time.perf_counter_ns() - began) / _CALIBRATION_CALLS

    readings: list[int] = []
    wrapped = timed(OPS[0], nothing, readings)
    totals, insides = [], []
    for _ in range(15):
        bare = per_call(nothing)
        readings.clear()
        totals.append(per_call(wrapped) - bare)
        spans = [end - begin for begin, end in zip(readings[1::4], readings[3::4], strict=True)]
        insides.append(max(0.0, median(spans) - bare))
    total, inside = max(0.0, median(totals)), median(insides)
    return Overhead(min(inside, total), max(0.0, total - inside))
