"""The whole judgement: right or wrong, then faster or not, alone and end to end."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from headrace.core.leftovers import prefix_of
from headrace.optimize.judge.measure import measure_built
from headrace.optimize.judge.options import JudgeOptions
from headrace.optimize.judge.problem import Problem
from headrace.optimize.judge.rejected import Rejected
from headrace.optimize.judge.verify import failed, verified
from headrace.optimize.profile.workloads import Workload
from headrace.optimize.records import Measurement, Target, Verdict


def judge(
    folder: Path,
    target: Target,
    *,
    baseline_pack: Path | None = None,
    problem: Problem | None = None,
    workload: Workload | None = None,
    end_to_end: bool = True,
    options: JudgeOptions | None = None,
) -> tuple[Verdict, Measurement | None]:
    """Verifies and measures the candidate in ``folder``; no measurement for one that is rejected.

    ``baseline_pack``: the pack that it must beat, None: stock operators. ``problem``: what it computes, by
    default the target's op; one of a user's module has no workload, and wins alone. ``workload`` None: the
    one named as the target's phase.

    Raises UnavailableError where no sandbox holds, StartupError when the baseline cannot run.
    """
    options = options or JudgeOptions()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=prefix_of("judge")) as scratch:
        verdict, built = verified(folder, target, Path(scratch), problem=problem, options=options)
        if built is None:
            return verdict, None
        try:
            found = measure_built(folder, built, target, baseline_pack, workload, end_to_end, options)
        except Rejected as rejected:
            took = time.monotonic() - began
            return failed(folder, built.taken.digest, rejected, verdict.sandbox, took, built.build_s), None
    return verdict, found
