"""Candidates for users' modules from templates, chosen by what the module's graph is, and by hill climbing.

rows         norms, softmax, elementwise operators, products with weights in between: row by row
conv2d       a convolution, batch norm and elementwise operators after it
attention    softmax(scale q kᵀ) v
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from headrace.core.packs import KernelEntry
from headrace.optimize.modules.bound import OP, signature_of
from headrace.optimize.proposal import CandidateSource, Trial
from headrace.optimize.proposers.module_attention import Attention
from headrace.optimize.proposers.module_conv import Conv
from headrace.optimize.proposers.module_graph import NotCoveredError
from headrace.optimize.proposers.module_rows import Rows
from headrace.optimize.proposers.source import expanded
from headrace.optimize.records import ModuleCall, Target

Parameters: TypeAlias = "dict[str, int]"

SOURCE = "module.cpp"
_MARK = "// @EMITTED"
_FLAGS = ["-fno-math-errno", "-fno-trapping-math"]
_TEMPLATE = "template"
_VALUES: dict[str, dict[str, tuple[int, ...]]] = {
    "rows": {
        "threads": (1, 0),
        "by_columns": (0, 1),
        "block_rows": (1, 2, 4, 8, 16, 32, 64),
        "vectors": (1, 2, 3, 4),
        "micro_rows": (1, 2, 4, 6, 8, 12),
        "vector_bits": (256, 512),
    },
    "conv2d": {
        "threads": (1, 0),
        "by_image": (0, 1),
        "channels": (2, 4, 6, 8, 12),
        "vectors": (1, 2, 3, 4),
        "vector_bits": (256, 512),
    },
    "attention": {
        "threads": (1, 0),
        "parts": (1, 2, 4, 8),
        "queries": (4, 8, 16, 32, 64),
        "vectors": (1, 2, 3, 4),
        "micro_rows": (2, 4, 6, 8, 12),
        "vector_bits": (256, 512),
    },
}
"""By template, each parameter's values in order; ``threads`` 0: as many as the call may use."""

_ACCUMULATORS = 28
"""Vectors of sums that the 32 registers hold beside the factors."""


@dataclass(frozen=True)
class _Fit:
    """A template that computes the module."""

    template: str
    lowered: Rows | Conv | Attention

    def names(self) -> list[str]:
        """Its parameters that make a difference here."""
        names = list(_VALUES[self.template])
        if isinstance(self.lowered, Rows) and not self.lowered.has_products:
            return ["threads", "block_rows", "vector_bits"]
        return names

    def start(self) -> Parameters:
        """Where the sizes say to begin."""
        found = {"threads": 0, "vector_bits": 512, "vectors": 2}
        lowered = self.lowered
        if isinstance(lowered, Rows):
            few = lowered.rows <= 16
            found |= {"by_columns": int(few), "block_rows": 4 if few else 32, "micro_rows": 4 if few else 8}
            if not lowered.has_products:
                found["block_rows"] = 8
        elif isinstance(lowered, Conv):
            found |= {"by_image": int(lowered.batch % 2 == 0), "channels": 6, "vectors": 3}
        else:
            found |= {"parts": 1, "queries": 16, "micro_rows": 8}
        return {name: found[name] for name in self.names()}

    def allowed(self, parameters: Parameters) -> bool:
        """Whether the sums of a step fit the registers."""
        rows = parameters.get("micro_rows", parameters.get("channels", 1))
        return rows * parameters.get("vectors", 1) <= _ACCUMULATORS

    def files(self, call: ModuleCall, parameters: Parameters) -> dict[str, str]:
        lowered = self.lowered
        defines = {"HR_THREADS": parameters["threads"]}
        if isinstance(lowered, Rows):
            vectors, micro_rows = parameters.get("vectors", 1), parameters.get("micro_rows", 1)
            defines["HR_BY_COLUMNS"] = parameters.get("by_columns", 0)
            defines["HR_BLOCK_ROWS"] = parameters["block_rows"]
            text = lowered.source(vectors, micro_rows)
        elif isinstance(lowered, Conv):
            defines |= {"HR_BY_IMAGE": parameters["by_image"], "HR_CHANNELS": parameters["channels"]}
            defines["HR_VECTORS"] = parameters["vectors"]
            text = lowered.source()
        else:
            part = -(-lowered.queries // parameters["parts"])
            defines |= {"HR_PART": part, "HR_QUERIES": min(part, parameters["queries"])}
            defines |= {"HR_VECTORS": parameters["vectors"], "HR_ROWS": parameters["micro_rows"]}
            text = lowered.source()
        names = signature_of(call).names()
        lines = [f"// a user's module, written by headrace's search from its template {self.template}"]
        lines += [f"#define {name} {value}" for name, value in defines.items()]
        lines.append(f"enum {{ {', '.join(f'S_{name}' for name in names)} }};")
        body = expanded(f"modules/{self.template}.cpp").replace(_MARK, text)
        return {SOURCE: "\n".join(lines) + "\n\n" + body}


class ModuleSearch:
    """A Proposer over templates/modules/; ``threads`` is what the kernels will run on."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or len(os.sched_getaffinity(0))

    @property
    def author(self) -> str:
        return "search"

    def propose(
        self, target: Target, best: Trial | None, history: Sequence[Trial], rng: random.Random
    ) -> CandidateSource | None:
        """None where no template computes the module, and when the neighbourhood is exhausted."""
        fit = fit_of(target)
        if fit is None or target.call is None:
            return None
        known = [(_key(fit, trial.candidate.parameters), trial) for trial in history]
        trials = {key: trial for key, trial in known if key is not None}
        start = fit.start()
        if self._threads == 1 and "threads" in start:
            start["threads"] = 1
        if tuple(start.items()) not in trials:
            return _candidate(fit, target, start, "where its sizes say to begin")
        top = max(trials, key=lambda key: trials[key].speed)
        for parameters, note in _around(fit, dict(top), rng):
            if tuple(parameters.items()) not in trials:
                return _candidate(fit, target, parameters, note)
        return None


def fit_of(target: Target) -> _Fit | None:
    """The template that computes a target's module, None: none does."""
    if target.call is None:
        return None
    makers: dict[str, type[Rows | Conv | Attention]] = {
        "attention": Attention,
        "conv2d": Conv,
        "rows": Rows,
    }
    for template, make in makers.items():
        try:
            fit = _Fit(template, make(target.call))
            fit.files(target.call, fit.start())  # whatever cannot be written shows here
        except NotCoveredError:
            continue
        return fit
    return None


def covers(target: Target) -> bool:
    """Whether a template computes this target."""
    return fit_of(target) is not None


def _candidate(fit: _Fit, target: Target, parameters: Parameters, note: str) -> CandidateSource:
    assert target.call is not None
    return CandidateSource(
        files=fit.files(target.call, parameters),
        entry=KernelEntry(
            op=OP,
            source=SOURCE,
            flags=[*_FLAGS, f"-mprefer-vector-width={parameters['vector_bits']}"],
            phases=[target.phase],
            max_rows=target.max_rows,
            activation_dtypes=target.activation_dtypes,
            weight_formats=[target.weight_dtype],
        ),
        author="search",
        note=note,
        parameters={_TEMPLATE: fit.template, **{name: str(value) for name, value in parameters.items()}},
    )


def _around(fit: _Fit, here: Parameters, rng: random.Random) -> Iterator[tuple[Parameters, str]]:
    """Neighbours: one parameter by one step, then two at once."""
    ways = [(name, step) for name in fit.names() for step in (1, -1)]
    ones = []
    for name, step in ways:
        there = _moved(fit, here, name, step)
        if there is not None:
            ones.append((there, f"{name} {here[name]} to {there[name]}"))
    rng.shuffle(ones)
    yield from ones
    twos = []
    for (name, step), (other, again) in itertools.combinations(ways, 2):
        there = _moved(fit, here, name, step) if name != other else None
        beyond = _moved(fit, there, other, again) if there is not None else None
        if beyond is not None:
            note = f"{name} {here[name]} to {beyond[name]}, {other} {here[other]} to {beyond[other]}"
            twos.append((beyond, note))
    rng.shuffle(twos)
    yield from twos


def _moved(fit: _Fit, parameters: Parameters, name: str, step: int) -> Parameters | None:
    """One parameter a step further; None beyond its last, and where registers end."""
    values = _VALUES[fit.template][name]
    place = values.index(parameters[name]) + step
    if not 0 <= place < len(values):
        return None
    moved = {**parameters, name: values[place]}
    return moved if fit.allowed(moved) else None


def _key(fit: _Fit, found: Mapping[str, str]) -> tuple[tuple[str, int], ...] | None:
    """A trial's parameters in order; None when it is not of this template."""
    if found.get(_TEMPLATE) != fit.template or any(name not in found for name in fit.names()):
        return None
    return tuple((name, int(found[name])) for name in fit.names())
