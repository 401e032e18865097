"""Faster or not: alone, and in the whole workload. A win must be significant in both."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.leftovers import prefix_of
from headrace.optimize.digest import candidate_digest
from headrace.optimize.judge.alone import measure_alone
from headrace.optimize.judge.build import Built
from headrace.optimize.judge.end_to_end import EndToEnd, Setting, compare_engines
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.problem import Problem
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.verify import build
from headrace.optimize.profile.workloads import Workload
from headrace.optimize.records import Measurement, Ratio, Target

ALONE_ABOVE = 1.02
"""The lower bound that a candidate must pass by itself …"""
END_TO_END_ABOVE = 1.005
"""… and in the workload."""


def alone(
    folder: Path,
    target: Target,
    baseline_pack: Path | None = None,
    *,
    problem: Problem | None = None,
    options: JudgeOptions | None = None,
) -> Measurement:
    """Times a verified candidate by itself; it cannot win by that, but for a user's module, which has no
    workload. One that turns out wrong as it is timed is a Measurement that says so.

    ``baseline_pack``: the folder of the pack that it must beat, None: stock operators.
    Raises UnavailableError where no sandbox holds, StartupError when the baseline cannot run.
    """
    return _measured(folder, target, baseline_pack, None, False, problem, options)


def whole(
    folder: Path,
    target: Target,
    baseline_pack: Path | None = None,
    *,
    workload: Workload | None = None,
    problem: Problem | None = None,
    options: JudgeOptions | None = None,
) -> Measurement:
    """As ``alone``, and then the workload on two engines; None: the one named as the target's phase."""
    return _measured(folder, target, baseline_pack, workload, True, problem, options)


def _measured(
    folder: Path,
    target: Target,
    baseline_pack: Path | None,
    workload: Workload | None,
    end_to_end: bool,
    problem: Problem | None,
    options: JudgeOptions | None,
) -> Measurement:
    options = options or JudgeOptions()
    try:
        with tempfile.TemporaryDirectory(prefix=prefix_of("judge")) as scratch:
            built = build(folder, target, Path(scratch), problem=problem, options=options)
            return measure_built(folder, built, target, baseline_pack, workload, end_to_end, options)
    except Rejected as rejected:
        detail = f"{rejected.reason}: {rejected.detail}"
        return _measurement(folder, candidate_digest(folder), {}, None, detail, won=False)


def measure_built(
    folder: Path,
    built: Built,
    target: Target,
    baseline_pack: Path | None,
    workload: Workload | None,
    end_to_end: bool,
    options: JudgeOptions,
) -> Measurement:
    """As ``whole``, of what was built already. Raises Rejected."""
    digest = built.taken.digest
    pack = str(baseline_pack) if baseline_pack is not None else ""
    alone = measure_alone(built, target.baseline_s, pack, options)
    name, first = next(iter(alone.items()))
    if first.low <= ALONE_ABOVE:
        detail = f"not faster alone: {_shown(first)} at {name}"
        return _measurement(folder, digest, alone, None, detail, won=False)
    slower = slower_phase(alone)
    if slower:
        detail = f"alone {_shown(first)} at {name}, but slower at {slower}: {_shown(alone[slower])}"
        return _measurement(folder, digest, alone, None, detail, won=False)
    if target.module or not end_to_end:
        # a user's module has no workload of its own: alone is all there is
        detail = f"alone {_shown(first)} at {name}"
        return _measurement(folder, digest, alone, None, detail, won=bool(target.module))
    try:
        setting = Setting.of(target, workload, baseline_pack, options)
        found = compare_engines(built, setting, options, formats=target.weight_formats)
    except Rejected:
        raise
    except HeadraceError as error:
        detail = f"alone {_shown(first)} at {name}; end to end could not run: {error.message}"
        return _measurement(folder, digest, alone, None, detail, won=False)
    whole = found.ratios["workload"]
    won = whole.low > END_TO_END_ABOVE and found.agrees
    detail = f"alone {_shown(first)} at {name}, end to end {_shown(whole)}"
    if not found.agrees:
        detail += "; its log-probabilities differ by more than the noise floor"
    elif not won:
        detail += ": not significant end to end"
    return _measurement(folder, digest, alone, found, detail, won=won)


def slower_phase(alone: Mapping[str, Ratio]) -> str:
    """The first shape of another phase than the most important one's at which it is surely slower, empty:
    none. Who takes both phases over must not make up for one in the other."""
    phase = next(iter(alone)).partition("/")[0]
    return next(
        (name for name, found in alone.items() if name.partition("/")[0] != phase and found.high < 1.0), ""
    )


def _measurement(
    folder: Path,
    digest: str,
    alone: dict[str, Ratio],
    found: EndToEnd | None,
    detail: str,
    *,
    won: bool,
) -> Measurement:
    return Measurement(
        candidate=folder.name,
        digest=digest,
        alone=alone,
        end_to_end=found.ratios if found is not None else {},
        agreement=found.agreement if found is not None else "",
        won=won,
        detail=detail,
    )


def _shown(found: Ratio) -> str:
    return f"{found.median:.2f}x [{found.low:.2f}, {found.high:.2f}]"
