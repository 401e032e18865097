"""Is a candidate right? Every way in which it could only seem so is looked at.

each case           poisoned outputs, one call; copies taken as it returns are compared with float64
again               the same bits must come out
many calls          so that what is skipped later is skipped by now
fresh content       new weights, inputs and caches in the same places; then a few elements of inputs changed,
                    then of weights
other company       where it says so: a row's bits are the same whatever else its call holds (invariance.py)
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.leftovers import prefix_of
from headrace.kernels.native.signature import CALL_INTS
from headrace.optimize.digest import candidate_digest
from headrace.optimize.judge.build import Built, compile_caged, take
from headrace.optimize.judge.cases import problem_for, untouched
from headrace.optimize.judge.compare import error, limit, same_bits
from headrace.optimize.judge.invariance import check_invariance
from headrace.optimize.judge.layout import Layout, copied, poison
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.problem import Case, Problem, Tensors
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.runner import Runner, build_runner
from headrace.optimize.judge.sandbox import MIB, Sandbox
from headrace.optimize.records import Reason, ShapeError, Target, Verdict

_LARGE_WEIGHTS = 64 * MIB
"""Up to here two sets of weights are used, so that a kernel cannot know only one."""
_SETTLE_S = 0.002
_LATE_S = 0.1


def verify(
    folder: Path,
    target: Target,
    *,
    problem: Problem | None = None,
    options: JudgeOptions | None = None,
) -> Verdict:
    """Builds and checks the candidate in ``folder``. ``problem``: what it must compute, by default the
    target's op.

    Raises UnavailableError where no sandbox holds. A bad candidate is a Verdict, never an error.
    """
    with tempfile.TemporaryDirectory(prefix=prefix_of("judge")) as scratch:
        return verified(folder, target, Path(scratch), problem=problem, options=options or JudgeOptions())[0]


def verified(
    folder: Path, target: Target, scratch: Path, *, problem: Problem | None, options: JudgeOptions
) -> tuple[Verdict, Built | None]:
    """The verdict, and for one that passed what was built, in ``scratch``."""
    began = time.monotonic()
    held, digest, build_s = "", candidate_digest(folder), 0.0
    try:
        built = build(folder, target, scratch, problem=problem, options=options)
        held, build_s = built.sandbox.describe(), built.build_s
        errors = check(built, options)
        if built.taken.entry.batch_invariant:
            check_invariance(built, options)
    except Rejected as rejected:
        return failed(folder, digest, rejected, held, time.monotonic() - began, build_s), None
    verdict = Verdict(
        candidate=folder.name,
        digest=built.taken.digest,
        passed=True,
        reason="ok",
        detail=f"{len(errors)} kinds of calls"
        + (", the same bits in any company" if built.taken.entry.batch_invariant else ""),
        seconds=time.monotonic() - began,
        sandbox=held,
        errors=errors,
        build_s=build_s,
    )
    return verdict, built


def build(
    folder: Path, target: Target, scratch: Path, *, problem: Problem | None, options: JudgeOptions
) -> Built:
    """The candidate, taken in and compiled. Raises Rejected."""
    sandbox = Sandbox.find(build_runner())
    copy = scratch / "candidate"
    copy.mkdir()
    taken = take(folder, target, copy)
    library, build_s = compile_caged(sandbox, taken, scratch, timeout_s=options.compile_s)
    return Built(taken, library, problem or problem_for(target, taken.entry), sandbox, build_s)


def failed(
    folder: Path, digest: str, rejected: Rejected, sandbox: str, seconds: float, build_s: float = 0.0
) -> Verdict:
    """The verdict on a candidate that was rejected."""
    return Verdict(
        candidate=folder.name,
        digest=digest,
        passed=False,
        reason=rejected.reason,
        detail=rejected.detail,
        seconds=seconds,
        sandbox=sandbox,
        build_s=build_s,
    )


def check(built: Built, options: JudgeOptions) -> list[ShapeError]:
    """The errors by case. Raises Rejected."""
    seed = secrets.randbits(48) if options.seed is None else options.seed
    problem = built.problem
    cases = problem.verify_cases(seed)
    if not cases:
        raise Rejected("malformed", "it declares to cover no call of the target's")
    weights = problem.weights()
    few = sum(spec.nbytes for spec in weights) >= _LARGE_WEIGHTS
    cases, set_of = _assigned(cases, 1 if few else 2)
    sets = max(set_of) + 1
    layout = Layout(problem.signature, weights, sets, cases, set_of, options.num_threads)
    try:
        with Runner(
            built.sandbox, build_runner(), built.library, layout, perturb=True, timeout_s=options.load_s
        ) as runner:
            return _Check(problem, layout, runner, options, seed).all()
    finally:
        layout.close()


def _assigned(cases: list[Case], sets: int) -> tuple[list[Case], list[int]]:
    """Cases in a new order and the weight set of each. Cases whose constant numbers differ, as a layer's
    window does, never share one: it is packed for them. Those that share one stand side by side, so that the
    reference's form of it is made once."""
    groups: dict[tuple[int, ...], list[Case]] = {}
    for case in cases:
        key = tuple(value for name, value in case.ints.items() if name not in CALL_INTS)
        groups.setdefault(key, []).append(case)
    ordered, set_of, used = [], list[int](), 0
    for group in groups.values():
        parts = min(sets, len(group))
        ordered += group
        set_of += [used + index * parts // len(group) for index in range(len(group))]
        used += parts
    return ordered, set_of


@dataclass
class _Expected:
    """What one call must give, and what it had before."""

    before: Tensors
    truth: Tensors
    limits: dict[str, float]
    stock_errors: dict[str, float]


class _Check:
    def __init__(
        self, problem: Problem, layout: Layout, runner: Runner, options: JudgeOptions, seed: int
    ) -> None:
        self._problem, self._layout, self._runner, self._options = problem, layout, runner, options
        self._seed = seed
        self._expected: dict[int, _Expected] = {}

    def all(self) -> list[ShapeError]:
        """Errors by case, or Rejected."""
        order = range(len(self._layout.cases))
        self._runner.load()
        self._fill(0)
        self._runner.pack()
        errors = [self._first(index) for index in order]
        for index in order:
            self._again(index)
        self._endure()
        self._fill(1)
        self._runner.pack()
        for index in order:
            self._fresh(index, "fresh weights and inputs in the same places")
        for index in order:
            self._problem.nudge(self._layout.cases[index], self._layout.call(index), self._seed + 77 + index)
            self._expect(index)
            self._fresh(index, "a few elements changed")
        self._nudge_weights()
        self._settle(order)
        return errors

    def _nudge_weights(self) -> None:
        layout, count = self._layout, len(self._layout.cases)
        nudged = [
            self._problem.nudge_weights(layout.weights(index), self._seed + 7777 + 100 * index)
            for index in range(layout.num_sets)
        ]
        if not any(nudged):
            return
        self._weights = [layout.weights(index) for index in range(layout.num_sets)]
        self._runner.pack()
        for index in sorted({self._seed % count, self._seed // 7 % count, count - 1}):
            self._restore(index)
            self._expect(index)
            self._fresh(index, "a few elements of the weights changed")

    def _fill(self, generation: int) -> None:
        """All weights and inputs anew; the kinds of content stay, the numbers do not."""
        layout, problem = self._layout, self._problem
        self._weights = [layout.weights(index) for index in range(layout.num_sets)] or [{}]
        for index, weights in enumerate(self._weights):
            problem.fill_weights(weights, self._seed + 1000 * generation + 100 * index)
        for index, case in enumerate(layout.cases):
            problem.fill(case, layout.call(index), case.content, case.seed + generation)
            self._expect(index)

    def _expect(self, index: int) -> None:
        layout, case = self._layout, self._layout.cases[index]
        weights = self._weights[layout.set_of[index]] if layout.num_sets else self._weights[0]
        tensors = copied(layout.call(index))
        truth = self._problem.reference(case, weights, tensors)
        stock = self._problem.stock(case, weights, tensors)
        off = {slot: error(stock[slot], truth[slot]) for slot in truth}
        limits = {slot: limit(off[slot], case.precision or tensors[slot].dtype) for slot in truth}
        before = {slot: tensors[slot] for slot in case.slots("inout")}
        self._expected[index] = _Expected(before, truth, limits, off)

    def _first(self, index: int) -> ShapeError:
        self._snap(index)
        case, expected = self._layout.cases[index], self._expected[index]
        off = self._compare(index, "wrong_result", "")
        worst = max(off, key=lambda slot: off[slot] / max(expected.limits[slot], 1e-30))
        return ShapeError(
            shape=case.shape,
            error=off[worst],
            stock_error=expected.stock_errors[worst],
            limit=expected.limits[worst],
        )

    def _again(self, index: int) -> None:
        earlier = {slot: tensor.clone() for slot, tensor in self._results(index).items()}
        self._restore(index)
        self._snap(index)
        for slot, tensor in self._results(index).items():
            if not same_bits(tensor, earlier[slot]):
                raise Rejected(
                    "not_deterministic",
                    f"{slot} differs between two equal calls ({self._layout.cases[index].name})",
                )

    def _endure(self) -> None:
        """Many calls, in whatever time there is for them."""
        count = len(self._layout.cases)
        until = time.monotonic() + self._options.endurance_s
        done = 0
        while done < self._options.endurance_calls and time.monotonic() < until:
            self._runner.run(0, count, self._options.call_s * count)
            done += count

    def _fresh(self, index: int, what: str) -> None:
        self._restore(index)
        self._snap(index)
        self._compare(index, "stale_result", what)

    def _snap(self, index: int) -> None:
        self._layout.poison(index)
        self._runner.snap(index, self._options.call_s)

    def _restore(self, index: int) -> None:
        tensors = self._layout.call(index)
        for slot, before in self._expected[index].before.items():
            tensors[slot].copy_(before)

    def _results(self, index: int) -> Tensors:
        """Outputs as they were when the call returned, and inouts."""
        tensors = self._layout.call(index)
        inouts = {slot: tensors[slot] for slot in self._layout.cases[index].slots("inout")}
        return self._layout.snapshots(index) | inouts

    def _compare(self, index: int, reason: Reason, what: str) -> dict[str, float]:
        """Errors by slot. Raises Rejected when a slot is wrong, unwritten or written too late."""
        case, expected = self._layout.cases[index], self._expected[index]
        where = f"{case.name}, {case.content}" + (f"; {what}" if what else "")
        self._late(index, where)
        slot = self._layout.damage()
        if slot:
            raise Rejected("out_of_bounds", f"it wrote beside {slot} ({where})")
        results = self._results(index)
        for slot in case.slots("inout"):
            self._check_untouched(case, slot, results[slot], expected.before[slot], where)
        off = {slot: error(results[slot], expected.truth[slot]) for slot in expected.truth}
        for slot, value in off.items():
            if value > expected.limits[slot]:
                self._late(index, where, _LATE_S)
                blank = unwritten(results[slot])
                if blank and reason == "wrong_result":
                    raise Rejected("incomplete", f"{blank} elements of {slot} were never written ({where})")
                raise Rejected(
                    reason,
                    f"{slot} is off by {value:.3g} of its row's size, allowed is {expected.limits[slot]:.2g} "
                    f"(stock: {expected.stock_errors[slot]:.2g}) ({where})",
                )
        return off

    def _late(self, index: int, where: str, wait_s: float = _SETTLE_S) -> None:
        """Raises Rejected when outputs change after the call has returned."""
        tensors, copies = self._layout.call(index), self._layout.snapshots(index)
        until = time.monotonic() + wait_s
        while True:
            if any(not same_bits(tensors[slot], copy) for slot, copy in copies.items()):
                raise Rejected("still_running", f"outputs change after the call has returned ({where})")
            if time.monotonic() >= until:
                return
            time.sleep(_SETTLE_S / 2)

    def _check_untouched(self, case: Case, slot: str, now: Tensor, before: Tensor, where: str) -> None:
        mask = untouched(case, slot, now)
        if not same_bits(now[mask], before[mask]):
            raise Rejected("out_of_bounds", f"it changed rows of {slot} that are not this step's ({where})")

    def _settle(self, order: Sequence[int]) -> None:
        time.sleep(_SETTLE_S)
        for index in order:
            self._late(index, "at the end")
        slot = self._layout.damage()
        if slot:
            raise Rejected("out_of_bounds", f"it wrote beside {slot}")


def unwritten(tensor: Tensor) -> int:
    """Elements that still hold what ``poison`` left there."""
    blank = torch.empty_like(tensor[:1].contiguous())
    poison(blank)
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.element_size(), torch.uint8)
    return int((tensor.contiguous().view(width) == blank.view(width).flatten()[0]).sum())
