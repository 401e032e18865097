"""Is a candidate faster by itself? Interleaved passes over a ring of calls larger than the cache.

One pair is a pass of the candidate in its cage and a pass of the baseline in its own process, in changing
order, on the same cores, over inputs that were never seen before. The parent holds the clock, looks at
outputs the moment a pass is reported, and checks some of them against float64.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass

import torch

from headrace.bench.roofs import product_rate, stream_rate
from headrace.optimize.judge.baseline import Baseline
from headrace.optimize.judge.build import Built
from headrace.optimize.judge.compare import error, limit, same_bits
from headrace.optimize.judge.layout import Layout, copied
from headrace.optimize.judge.lesser_cpu import limits
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.problem import Case
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.runner import Runner, build_runner
from headrace.optimize.judge.sandbox import MIB
from headrace.optimize.judge.statistics import ratio
from headrace.optimize.judge.verify import unwritten
from headrace.optimize.records import Ratio

_RING_BYTES = 256 * MIB
_MAX_RING_BYTES = 1024 * MIB
_PASS_S = 1e-3
_MAX_CALLS = 512
_MIN_PAIRS = 9
_MAX_PAIRS = 201
_WARM_UP = 3
_CHECK_SHARE = 0.3
"""Of the time goes into checking results against the reference, at most."""
_MAX_SHAPES = 3
_ABOVE_ROOF = 1.25
"""A pass this much faster than the measured roof did not do the work."""
_ROOF_S = (0.4, 1.0, 2.0)
_LATE_S = 0.1


@dataclass(frozen=True)
class _Pairs:
    baseline: list[float]
    candidate: list[float]


def measure_alone(built: Built, target_s: float, pack: str, options: JudgeOptions) -> dict[str, Ratio]:
    """Ratios by shape (``decode/1``), the most important first; ``target_s`` is about one call's time.

    ``pack`` is the baseline's folder, empty: stock operators. Raises Rejected when a result is wrong, late,
    or came faster than the machine can compute it.
    """
    seed = random.SystemRandom().getrandbits(48) if options.seed is None else options.seed
    shapes = built.problem.timed_cases(seed)[:_MAX_SHAPES]
    if not shapes:
        raise Rejected("malformed", "it covers none of the shapes that the target is timed at")
    ring = _ring_size(built, shapes, target_s)
    cases = [case for case in shapes for _ in range(ring)]
    sets = list(range(ring)) * len(shapes)
    layout = Layout(built.problem.signature, built.problem.weights(), ring, cases, sets, options.num_threads)
    try:
        _fill(built, layout, seed)
        with (
            Baseline(built.problem, layout, pack, options.cpus, limits(options.features)) as baseline,
            Runner(
                built.sandbox,
                build_runner(),
                built.library,
                layout,
                cpus=options.cpus,
                timeout_s=options.load_s,
            ) as runner,
        ):
            runner.load()
            packed = runner.pack()
            baseline.wait_ready()
            found = {}
            for index, case in enumerate(shapes):
                share = options.alone_s * (0.6 if index == 0 and len(shapes) > 1 else 1.0 / len(shapes))
                timing = _Timing(built, layout, runner, baseline, options, index * ring, ring, seed)
                pairs = timing.pairs(share)
                found[f"{case.shape.phase}/{case.shape.rows}"] = ratio(pairs.baseline, pairs.candidate, ring)
                _check_roof(case, layout, ring, packed, min(pairs.candidate), options)
            return found
    finally:
        layout.close()


class _Timing:
    """Pairs of passes over one shape's calls: ``count`` of them from ``first``."""

    def __init__(
        self,
        built: Built,
        layout: Layout,
        runner: Runner,
        baseline: Baseline,
        options: JudgeOptions,
        first: int,
        count: int,
        seed: int,
    ) -> None:
        self._problem, self._layout, self._runner, self._baseline = built.problem, layout, runner, baseline
        self._options, self._first, self._count = options, first, count
        self._random = random.Random(seed + first)
        self._checking_s = 0.0

    def pairs(self, seconds: float) -> _Pairs:
        began, done = time.monotonic(), _Pairs([], [])
        for number in range(_WARM_UP + _MAX_PAIRS):
            spent = time.monotonic() - began
            if number >= _WARM_UP + _MIN_PAIRS and spent > seconds:
                break
            if number >= _WARM_UP + 3 and spent > 6 * seconds:
                break
            self._refresh(number)
            if number % 2:
                theirs = self._baseline.run(self._first, self._count)
                own = self._candidate_pass()
            else:
                own = self._candidate_pass()
                theirs = self._baseline.run(self._first, self._count)
            if number >= _WARM_UP:
                done.baseline.append(theirs)
                done.candidate.append(own)
            if number < 2 or self._checking_s < _CHECK_SHARE * (time.monotonic() - began):
                self._check(self._random.choice([self._count - 1, self._random.randrange(self._count)]))
        self._check(self._random.randrange(self._count))  # and once more when all is over
        slot = self._layout.damage()
        if slot:
            raise Rejected("out_of_bounds", f"it wrote beside {slot} while it was timed")
        return done

    def _refresh(self, number: int) -> None:
        """New inputs for every call, and poison in every output."""
        for index in range(self._first, self._first + self._count):
            case = self._layout.cases[index]
            tensors = {
                slot: tensor
                for slot, tensor in self._layout.call(index).items()
                if slot not in ("keys", "values")  # too large to be new each time; x is
            }
            self._problem.fill(case, tensors, "normal", self._random.getrandbits(48))
            self._layout.poison(index)

    def _candidate_pass(self) -> float:
        timeout = self._options.call_s * max(1.0, self._count / 8)
        taken = self._runner.run(self._first, self._count, timeout)
        # the last calls' outputs at once, then some of the others
        places = [self._count - 1, *(self._random.randrange(self._count) for _ in range(3))]
        for place in places:
            outputs = self._outputs(self._first + place)
            blank = sum(unwritten(tensor) for tensor in outputs.values())
            if blank:
                self._explain_blank(self._first + place, blank)
        return taken

    def _outputs(self, index: int) -> dict[str, torch.Tensor]:
        tensors = self._layout.call(index)
        return {slot: tensors[slot] for slot in self._layout.cases[index].slots("output")}

    def _explain_blank(self, index: int, blank: int) -> None:
        time.sleep(_LATE_S)
        if sum(unwritten(tensor) for tensor in self._outputs(index).values()) < blank:
            raise Rejected("still_running", "outputs were written after their pass was reported as done")
        raise Rejected("stale_result", f"{blank} elements of an output were not written while it was timed")

    def _check(self, place: int) -> None:
        """One call anew, against float64: right before, is it right now?"""
        began = time.monotonic()
        index = self._first + place
        layout, case = self._layout, self._layout.cases[index]
        if case.slots("inout"):  # what a pass left there is not what it began with
            self._problem.fill(case, layout.call(index), "normal", self._random.getrandbits(48))
            before = copied(layout.call(index))
            layout.poison(index)
            self._runner.run(index, 1, self._options.call_s)
        else:
            before = copied(layout.call(index))
        after = copied(layout.call(index))
        weights = layout.weights(layout.set_of[index]) if layout.num_sets else {}
        truth = self._problem.reference(case, weights, before)
        stock = self._problem.stock(case, weights, before)
        for slot, true in truth.items():
            kind = case.precision or after[slot].dtype
            off, allowed = error(after[slot], true), limit(error(stock[slot], true), kind)
            if off > allowed:
                detail = (
                    f"{slot} is off by {off:.3g} while it was timed, allowed is {allowed:.2g} ({case.name})"
                )
                raise Rejected("stale_result", detail)
        now = layout.call(index)
        if any(not same_bits(now[slot], after[slot]) for slot in case.slots("output")):
            raise Rejected("still_running", "outputs change after their pass was reported as done")
        self._checking_s += time.monotonic() - began


def _ring_size(built: Built, shapes: list[Case], target_s: float) -> int:
    """Calls in a pass: as many as the model has layers, and more until no cache holds them and a pass takes
    long against its own start; fewer where memory ends."""
    weights = sum(spec.nbytes for spec in built.problem.weights())
    own = max(sum(spec.nbytes for spec in case.tensors) for case in shapes)
    count = max(built.problem.layers, -(-_RING_BYTES // max(1, weights + own)) if weights else 1)
    if target_s > 0:
        count = max(count, int(_PASS_S / target_s))
    most = max(1, _MAX_RING_BYTES // max(1, weights + own * len(shapes)))
    return max(1, min(count, most, _MAX_CALLS))


def _fill(built: Built, layout: Layout, seed: int) -> None:
    for index in range(layout.num_sets):
        built.problem.fill_weights(layout.weights(index), seed + 100 * index)
    for index, case in enumerate(layout.cases):
        built.problem.fill(case, layout.call(index), "normal", seed + 7 * index)


def _roof(moved: int, enough: float, options: JudgeOptions) -> float:
    """Bytes per second that the machine streams at this size at most, by one thread or all: looked for longer
    and longer until ``enough``, because a busy neighbour hides it."""
    previous = os.sched_getaffinity(0)
    os.sched_setaffinity(0, options.cpus)
    best = 0.0
    try:
        for seconds in _ROOF_S:
            for threads in sorted({options.num_threads, 1}, reverse=True):
                best = max(best, stream_rate(moved, threads, seconds=seconds)[0])
                if best >= enough:
                    return best
    finally:
        os.sched_setaffinity(0, previous)
    return best


def _check_roof(
    case: Case, layout: Layout, ring: int, packed: int, pass_s: float, options: JudgeOptions
) -> None:
    """Raises Rejected("too_fast") when a pass beat what the machine can stream or multiply."""
    weights = layout.weight_bytes
    # a form of the weights that is smaller is read faster; a quarter is the least that could be right, and of
    # blocks, which are small already, three quarters
    specs = [place.spec for place in layout.weight_places[0].values()] if layout.weight_places else []
    in_blocks = any(spec.parts for spec in specs)
    least = weights * 3 // 4 if in_blocks else weights // 4
    read = weights if not packed else max(least, min(weights, packed))
    own = sum(spec.nbytes for spec in case.tensors if spec.slot not in ("keys", "values"))
    moved = ring * (read + own)
    rate = options.roof
    if not rate and moved >= 4096 and moved / pass_s > 1e9:
        rate = _roof(moved, moved / pass_s / _ABOVE_ROOF, options)
    if rate and moved / pass_s > _ABOVE_ROOF * rate:
        raise Rejected(
            "too_fast",
            f"{moved / pass_s / 1e9:.0f} GB/s, where this machine streams {rate / 1e9:.0f} GB/s at this size",
        )
    shapes = [spec.matrix if spec.parts else spec.shape for spec in specs]
    flops = 2.0 * case.shape.rows * ring * sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    if case.shape.rows >= 32 and flops:
        roof = product_rate("bfloat16", options.num_threads, seconds=0.5)
        roof *= 2 if in_blocks else 1  # as many more products of bytes a cycle
        if flops / pass_s > _ABOVE_ROOF * roof:
            raise Rejected(
                "too_fast",
                f"{flops / pass_s / 1e9:.0f} GFLOP/s, where this machine reaches {roof / 1e9:.0f}",
            )
