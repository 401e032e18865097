"""Candidates from templates, by hill climbing: no model needed, the judge's times are the guide.

It begins where the roofline says (space.py), and then changes one parameter of the best so far by one step:
further in a direction that has just helped, else any that was not tried, the weightiest first. When all
around the best is known it changes two at once. Nothing is proposed twice, failed candidates included.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from headrace.core.packs import KernelEntry
from headrace.optimize.proposal import CandidateSource, Trial
from headrace.optimize.proposers.source import write_source
from headrace.optimize.proposers.space import (
    SPACES,
    Parameters,
    constants,
    first_guess,
    moved,
    worth_changing,
)
from headrace.optimize.records import Target

_TEMPLATE = "template"
_Key: TypeAlias = "tuple[tuple[str, int], ...]"


class Search:
    """A Proposer over the templates of this folder; ``threads`` is what the kernels will run on."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or len(os.sched_getaffinity(0))

    @property
    def author(self) -> str:
        return "search"

    def propose(
        self, target: Target, best: Trial | None, history: Sequence[Trial], rng: random.Random
    ) -> CandidateSource | None:
        """None where no template fits the target, and when the neighbourhood is exhausted."""
        if not covers(target):
            return None
        trials = {key: trial for trial in history if (key := _key(target.op, trial)) is not None}
        parameters = first_guess(target, self._threads)
        if tuple(parameters.items()) not in trials:
            return self._candidate(target, parameters, "where the roofline says to begin")
        found = self._next(target, best, trials, rng)
        return None if found is None else self._candidate(target, *found)

    def _next(
        self, target: Target, best: Trial | None, trials: dict[_Key, Trial], rng: random.Random
    ) -> tuple[Parameters, str] | None:
        """An untried neighbour of the best, and why."""
        top = None if best is None else _key(target.op, best)
        if top is None or top not in trials:  # the best is somebody else's: go on from our own
            top = max(trials, key=lambda key: trials[key].speed)
        here = dict(top)
        ways = [(name, step) for name in worth_changing(target) for step in (1, -1)]
        for name, step in ways:  # the best came from one step back: one more
            behind, onward = moved(here, name, -step), moved(here, name, step)
            parent = None if behind is None else trials.get(tuple(behind.items()))
            if onward is None or parent is None or tuple(onward.items()) in trials:
                continue
            if parent.speed < trials[top].speed:
                return onward, f"{name} further, after {behind[name] if behind else 0} to {here[name]} helped"
        for neighbours in (_single(here, ways, rng), _double(here, ways, rng)):
            for neighbour, note in neighbours:
                if tuple(neighbour.items()) not in trials:
                    return neighbour, note
        return None

    def _candidate(self, target: Target, parameters: Parameters, note: str) -> CandidateSource:
        source = f"{target.op}.cpp"
        return CandidateSource(
            files={source: write_source(target.op, constants(target, parameters))},
            entry=KernelEntry(
                op=target.op,
                source=source,
                phases=["decode"],
                max_rows=target.max_rows,
                activation_dtypes=["float32", "bfloat16"],
                weight_formats=[target.weight_dtype],
            ),
            author=self.author,
            note=note,
            parameters={_TEMPLATE: target.op, **{name: str(value) for name, value in parameters.items()}},
        )


def covers(target: Target) -> bool:
    """Whether a template computes this target: decode rows of a model whose weights are bfloat16."""
    if target.module or target.op not in SPACES or target.phase != "decode" or target.formats != ["bfloat16"]:
        return False
    heads, kv_heads = target.dims.get("num_heads", 1), target.dims.get("num_kv_heads", 1)
    return kv_heads > 0 and heads % kv_heads == 0


def _key(op: str, trial: Trial) -> _Key | None:
    """A trial's parameters, in the op's order; None when it is not of this template."""
    found = trial.candidate.parameters
    if found.get(_TEMPLATE) != op or any(name not in found for name in SPACES[op]):
        return None
    return tuple((name, int(found[name])) for name in SPACES[op])


def _single(
    here: Parameters, ways: list[tuple[str, int]], rng: random.Random
) -> Iterator[tuple[Parameters, str]]:
    """One change, the op's weightiest parameters first, either direction by chance."""
    for _, pair in itertools.groupby(ways, key=lambda way: way[0]):
        both = list(pair)
        rng.shuffle(both)
        for name, step in both:
            there = moved(here, name, step)
            if there is not None:
                yield there, f"{name} {here[name]} to {there[name]}"


def _double(
    here: Parameters, ways: list[tuple[str, int]], rng: random.Random
) -> Iterator[tuple[Parameters, str]]:
    """Two changes at once, in any order."""
    pairs = [pair for pair in itertools.combinations(ways, 2) if pair[0][0] != pair[1][0]]
    rng.shuffle(pairs)
    for (first, step), (second, other) in pairs:
        between = moved(here, first, step)
        there = None if between is None else moved(between, second, other)
        if there is not None:
            yield (
                there,
                f"{first} {here[first]} to {there[first]}, {second} {here[second]} to {there[second]}",
            )
