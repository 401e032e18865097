"""Starts rounds by themselves: when the workload drifted, a target is missed, or the hardware is new.

look (now and then) ──► triggers ──► is there budget left? ──► rounds, on the workload as it is now
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from headrace.optimize.records import KernelProfile
from headrace.optimize.rounds import RoundEnd, RoundStore

DRIFT_LIMIT = 0.3
"""Jensen-Shannon distance, 0 (the same) to 1 (nothing in common), from which on a workload has drifted."""

_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Trigger:
    """``detail`` is for people: what was seen, what was expected."""

    kind: Literal["no_round_yet", "workload_drifted", "missed_target", "new_hardware"]
    detail: str


@dataclass(frozen=True)
class Budget:
    """Minutes of rounds within any 24 hours, counted from the rounds on disk."""

    minutes_a_day: float

    def left(self, store: RoundStore, now: datetime) -> float:
        """Minutes that rounds may still take."""
        used = 0.0
        for one in store.rounds():
            end = one.end
            if end is not None and now - datetime.fromisoformat(one.spec.created) < _DAY:
                used += end.seconds / 60
        return self.minutes_a_day - used


def find_triggers(
    last: KernelProfile | None,
    seen: KernelProfile,
    targets: Mapping[str, float],
    *,
    limit: float = DRIFT_LIMIT,
) -> list[Trigger]:
    """Why a round should run: ``last`` is the profile that the latest round began from, ``seen`` a new one.

    ``targets`` are ceilings in seconds for a step of a phase (``decode``, ``prefill``).
    """
    found = []
    if last is None:
        return [Trigger("no_round_yet", f"{seen.model} on {seen.workload}")]
    if seen.hardware != last.hardware:
        found.append(Trigger("new_hardware", f"{seen.hardware}, it was {last.hardware}"))
    distance = drift(shape_shares(last), shape_shares(seen))
    if distance > limit:
        found.append(Trigger("workload_drifted", f"its shapes are {distance:.2f} away from the last round's"))
    for phase in seen.phases:
        ceiling = targets.get(phase.phase)
        if ceiling is not None and phase.unprofiled_step_s > ceiling:
            took, may = 1e3 * phase.unprofiled_step_s, 1e3 * ceiling
            found.append(
                Trigger("missed_target", f"a {phase.phase} step takes {took:.2f} ms, it may {may:.2f}")
            )
    return found


def shape_shares(profile: KernelProfile) -> dict[tuple[str, int, int], float]:
    """Of the calls of the outermost ops, the share with each (phase, log2 of rows, log2 of context)."""
    counts: Counter[tuple[str, int, int]] = Counter()
    for phase in profile.phases:
        for entry in phase.ops:
            if "/" in entry.path:
                continue
            for shape in entry.shapes:
                key = (shape.phase, shape.rows.bit_length(), shape.context.bit_length())
                counts[key] += shape.calls_per_step * phase.num_steps  # type: ignore[assignment]
    total = sum(counts.values())
    return {key: count / total for key, count in counts.items()} if total else {}


def drift(one: Mapping[tuple[str, int, int], float], other: Mapping[tuple[str, int, int], float]) -> float:
    """Jensen-Shannon distance with logarithms to base 2 (Lin 1991, Endres & Schindelin 2003)."""
    divergence = 0.0
    for key in {*one, *other}:
        p, q = one.get(key, 0.0), other.get(key, 0.0)
        middle = (p + q) / 2
        divergence += sum(0.5 * part * math.log2(part / middle) for part in (p, q) if part)
    return math.sqrt(max(0.0, divergence))


def latest_profile(store: RoundStore, model: str, workload: str) -> KernelProfile | None:
    """What the latest finished round on this workload began from."""
    for one in reversed(store.rounds()):
        if (one.spec.model, one.spec.workload) == (model, workload) and one.end is not None:
            return one.load("profile", KernelProfile)
    return None


def watch(
    *,
    look: Callable[[], KernelProfile | None],
    start: Callable[[float], Sequence[RoundEnd]],
    last: Callable[[], KernelProfile | None],
    budget_left: Callable[[], float],
    targets: Mapping[str, float],
    say: Callable[[str], None],
    every_s: float,
    sleep: Callable[[float], None] = time.sleep,
    looks: int | None = None,
) -> None:
    """Looks every ``every_s`` seconds, for ever or ``looks`` times.

    ``look`` returns None where nothing can have changed since it last did. ``start`` runs rounds within so
    many minutes. A target that is still missed after a round does not start another by itself: only
    something new does.
    """
    answered: set[str] = set()
    count = 0
    while looks is None or count < looks:
        if count:
            sleep(every_s)
        count += 1
        seen = look()
        if seen is None:
            continue
        triggers = find_triggers(last(), seen, targets)
        standing = {trigger.kind for trigger in triggers if trigger.kind == "missed_target"}
        new = [trigger for trigger in triggers if trigger.kind not in answered]
        answered &= standing
        if not new:
            continue
        for trigger in new:
            say(f"{trigger.kind.replace('_', ' ')}: {trigger.detail}")
        left = budget_left()
        if left <= 0:
            say("the budget of 24 hours is used up: no round now")
            continue
        start(left)
        answered |= standing
