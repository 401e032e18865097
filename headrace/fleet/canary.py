"""Whether a pack computes what was computed before it, and whether steps take longer with it.

Both are judged by what the same replica did a moment ago without the pack. The noise floor is what that
replica's own arithmetic changes when it takes the same tokens in one piece instead of one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from headrace.core.messages import Scored, StepTime, TokenLogprobs

# A position is wrong where it differs by more than so many times the largest difference that is noise.
MARGIN = 2.0
# Below this a difference of log-probabilities is rounding, however exact the replica is otherwise.
LEAST_FLOOR = 1e-3
# One wrong position in a hundred must be found on a thousand positions: so few are too many already.
MOST_WRONG = 1 / 400
# Longer steps than that are no accident.
SLOWER = 1.05
MIN_STEPS = 8


@dataclass(frozen=True)
class Agreement:
    """``floor`` and ``worst`` are differences of log-probabilities; a position is wrong beyond MARGIN times
    the floor."""

    num_positions: int
    num_wrong: int
    floor: float
    worst: float

    @property
    def holds(self) -> bool:
        return self.num_wrong <= MOST_WRONG * self.num_positions

    def __str__(self) -> str:
        share = 100 * self.num_wrong / max(1, self.num_positions)
        return (
            f"{self.num_wrong} of {self.num_positions} positions ({share:.2f} %) differ by more than "
            f"{MARGIN:g} x the noise floor of {self.floor:.2g}; the largest difference is {self.worst:.2g}"
        )


def noise_floor(decoded: Scored, elsewise: Scored) -> float:
    """Of two results of one pack: token by token, and in other chunks."""
    return max(LEAST_FLOOR, max(differences(decoded, elsewise), default=0.0))


def agreement(before: Scored, after: Scored, floor: float) -> Agreement:
    """Of two packs' results, both through the decode path."""
    found = list(differences(before, after))
    wrong = sum(not difference <= MARGIN * floor for difference in found)  # a NaN is wrong
    worst = max((math.inf if math.isnan(one) else one for one in found), default=0.0)
    return Agreement(len(found), wrong, floor, worst)


def differences(one: Scored, other: Scored) -> Iterator[float]:
    """For each position the largest difference between what the two say of any token."""
    for ours, theirs in zip(one.sequences, other.sequences, strict=True):
        for mine, its in zip(ours, theirs, strict=True):
            one_way, other_way = _difference(mine, its), _difference(its, mine)
            yield one_way if not one_way <= other_way else other_way  # a NaN is not lost


def _difference(one: TokenLogprobs, other: TokenLogprobs) -> float:
    """Over the token itself and the best of ``one``. Where ``other`` does not name one of them, it is no
    likelier there than the least likely that is named."""
    largest = abs(one.logprob - other.logprob)
    if not other.top:
        return largest
    known = dict(other.top)
    least = other.top[-1][1]
    for token, logprob in one.top:
        its = known.get(token)
        difference = max(0.0, logprob - least) if its is None else abs(logprob - its)
        if not difference <= largest:
            largest = difference
    return largest


def slowdown(before: Iterable[StepTime], after: Iterable[StepTime]) -> tuple[float, int]:
    """How many times as long steps of as many rows take (above 1: longer), weighted by how often they came,
    and how many steps that rests on; (1, 0) where too few compare."""
    earlier = {time.rows: time for time in before if time.count >= MIN_STEPS}
    num_steps, old_s, new_s = 0, 0.0, 0.0
    for time in after:
        old = earlier.get(time.rows)
        if old is not None and time.count >= MIN_STEPS:
            num_steps += time.count
            old_s += time.count * old.median_s
            new_s += time.count * time.median_s
    return (new_s / old_s, num_steps) if old_s else (1.0, 0)
