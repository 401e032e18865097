"""What a candidate must compute, as the judge sees it: tensors, numbers, contents and the right answer.

``cases.OpProblem`` is one op of the table; a user's module is another. The judge itself knows neither.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from headrace.core.words import count
from headrace.kernels.native.signature import Role, Signature
from headrace.optimize.records import CallShape

Tensors: TypeAlias = "dict[str, Tensor]"

CONTENTS = ("normal", "heavy", "structured", "large")
"""Kinds of content: Gaussian; heavy-tailed with outlier columns; constant, zero and one-hot rows; wide."""


@dataclass(frozen=True)
class TensorSpec:
    """One slot of a call. ``stride`` counts elements, None: contiguous; gaps between rows are not the
    kernel's and must stay as they are.

    A weight in quantized blocks is a buffer of bytes (kernels/block_layout.py): ``parts`` are formats and
    rows, ``matrix`` is the weight's own shape, which the kernel is told.
    """

    slot: str
    role: Role
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    parts: tuple[tuple[str, int], ...] = ()
    matrix: tuple[int, int] = (0, 0)

    @property
    def strides(self) -> tuple[int, ...]:
        if self.stride is not None:
            return self.stride
        strides, step = [], 1
        for size in reversed(self.shape):
            strides.append(step)
            step *= size
        return tuple(reversed(strides))

    @property
    def span(self) -> int:
        """Elements from the first to the last, both included; 0 when it is empty."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * step for size, step in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.span * self.dtype.itemsize


@dataclass(frozen=True)
class Case:
    """One call. ``content`` and ``seed`` fix what its tensors hold; ``plan`` is the problem's own (which
    sequences, in which blocks). ``precision``: what it may be as inexact as, None: each slot's own dtype."""

    shape: CallShape
    tensors: tuple[TensorSpec, ...]
    ints: Mapping[str, int] = field(default_factory=dict)
    floats: Mapping[str, float] = field(default_factory=dict)
    content: str = "normal"
    seed: int = 0
    plan: Any = None
    precision: torch.dtype | None = None

    @property
    def name(self) -> str:
        shape = self.shape
        return f"{shape.phase}/{count(shape.rows, 'row')}, context {shape.context}, {shape.dtype}"

    def slots(self, *roles: Role) -> list[str]:
        return [spec.slot for spec in self.tensors if spec.role in roles]


class Problem(Protocol):
    """Weights are one set that all calls of a model's layer share; the judge makes several."""

    @property
    def signature(self) -> Signature: ...

    @property
    def layers(self) -> int:
        """How many sets of weights one step of the model goes through."""
        ...

    def weights(self) -> Sequence[TensorSpec]: ...

    def verify_cases(self, seed: int) -> list[Case]:
        """Calls of every kind that the candidate declares to cover; the seed hides which."""
        ...

    def timed_cases(self, seed: int) -> list[Case]:
        """One call for each shape that is timed, the most important first."""
        ...

    def fill_weights(self, weights: Tensors, seed: int) -> None: ...

    def fill(self, case: Case, tensors: Tensors, content: str, seed: int) -> None:
        """Inputs and what is both read and written, in place."""
        ...

    def nudge(self, case: Case, tensors: Tensors, seed: int) -> None:
        """Changes the inputs in few places, so that the answer changes well beyond its tolerance."""
        ...

    def nudge_weights(self, weights: Tensors, seed: int) -> bool:
        """As ``nudge``, for a set of weights; False where they are not free to change."""
        ...

    def reference(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        """Outputs and inouts as they must be, in float64; ``tensors`` are not changed. Rows of an inout that
        must not change are left as they were."""
        ...

    def stock(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        """The same from the stock operators, in their own dtypes."""
        ...

    def prepare(self, case: Case, weights: Tensors, tensors: Tensors, pack: str) -> Any:
        """A function without arguments that computes the call the way the baseline does: stock operators, or
        those of the pack in folder ``pack``. Called in the baseline's own process, once a weight set."""
        ...
