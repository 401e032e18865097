"""What a module that works row by row computes, one step after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Map:
    """One element from others; ``parts`` are names of values or C++ numbers."""

    name: str
    write: Callable[[Sequence[str]], str]
    parts: tuple[str, ...]
    width: int  # 1: one number a row


@dataclass(frozen=True)
class Reduce:
    name: str
    kind: str  # sum, max, min
    part: str
    factor: str  # the sum is multiplied by it; empty: it is not


@dataclass(frozen=True)
class Product:
    """``part`` (rows, inner) by a weight (width, inner)."""

    name: str
    part: str
    weight: str
    bias: str
    width: int
    inner: int


Step: TypeAlias = "Map | Reduce | Product"


@dataclass
class Level:
    steps: list[Map | Reduce] = field(default_factory=list)
    products: list[Product] = field(default_factory=list)


def inputs_of(step: Map | Reduce | Product) -> tuple[str, ...]:
    """The values that a step reads; numbers of C++ too."""
    return step.parts if isinstance(step, Map) else (step.part,)
