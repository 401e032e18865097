"""The graph of a user's module read for the templates: operators as C++ expressions over one element."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from headrace.optimize.records import GraphNode, ModuleCall, ModuleSlot

IDENTITIES = frozenset({"contiguous", "clone", "alias", "detach", "dropout", "feature_dropout"})
"""Of a module in evaluation mode."""

C_TYPES = {"float32": "float", "bfloat16": "bf16"}


class NotCoveredError(Exception):
    """No template computes this graph."""


class Graph:
    """A call's slots and nodes by name."""

    def __init__(self, call: ModuleCall) -> None:
        if not call.graph:
            raise NotCoveredError("the module's call could not be traced")
        self.call = call
        self.slots = {slot.name: slot for slot in call.slots}
        self.nodes = {node.name: node for node in call.graph}
        self.inputs = [slot for slot in call.slots if slot.role == "input"]
        self.outputs = [slot for slot in call.slots if slot.role == "output"]
        self.weights = [slot for slot in call.slots if slot.role == "weight"]
        kinds = {slot.dtype for slot in self.inputs + self.outputs + self.weights}
        if len(kinds) != 1 or not kinds <= set(C_TYPES):
            raise NotCoveredError("tensors of several dtypes")
        self.dtype = kinds.pop()

    def node(self, reference: object) -> GraphNode | None:
        """The node that an argument names, None for a slot or a number."""
        return self.nodes.get(str(reference).removeprefix("%"))

    def slot(self, reference: object) -> ModuleSlot | None:
        return self.slots.get(str(reference).removeprefix("%"))

    def shape(self, reference: object) -> list[int]:
        found = self.node(reference) or self.slot(reference)
        if found is None:
            raise NotCoveredError(f"{reference} is no tensor of the graph")
        return found.shape

    def result(self) -> str:
        if len(self.call.results) != 1:
            raise NotCoveredError("several outputs")
        return self.call.results[0]


def base(node: GraphNode) -> str:
    """``aten.add.Tensor`` → ``add``."""
    return node.op.split(".")[1]


def is_reference(each: object) -> bool:
    return isinstance(each, str) and each.startswith("%")


def argument(node: GraphNode, place: int, name: str, default: Any = None) -> Any:
    if place < len(node.args):
        return node.args[place]
    return node.kwargs.get(name, default)


def number(each: Any) -> str:
    """A Python number as a float of C++."""
    value = float(each)
    if math.isnan(value):
        raise NotCoveredError("a NaN in the graph")
    if math.isinf(value):
        return "INFINITY" if value > 0 else "(-INFINITY)"
    text = repr(value)
    text = text if any(mark in text for mark in ".e") else f"{text}.0"
    return f"({text}f)" if value < 0 else f"{text}f"


Writer = Callable[[GraphNode, Sequence[str]], str]


def _scaled(name: str, mark: str) -> Writer:
    """add and sub with their factor."""

    def write(node: GraphNode, parts: Sequence[str]) -> str:
        alpha = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        second = parts[1] if alpha == 1 else f"{number(alpha)} * {parts[1]}"
        return f"({parts[0]} {mark} {second})"

    return write


def _power(node: GraphNode, parts: Sequence[str]) -> str:
    exponent, x = node.args[1], parts[0]
    if is_reference(exponent):
        return f"std::pow({x}, {parts[1]})"
    known: dict[float, str] = {1: x, 2: f"({x} * {x})", 3: f"({x} * {x} * {x})", -1: f"(1.0f / {x})"}
    known |= {0.5: f"std::sqrt({x})", -0.5: f"(1.0f / std::sqrt({x}))"}
    return known.get(exponent, f"std::pow({x}, {parts[1]})")


def _gelu(node: GraphNode, parts: Sequence[str]) -> str:
    x = parts[0]
    if argument(node, 1, "approximate", "none") == "tanh":
        return f"(0.5f * {x} * (1.0f + tanh_(0.7978845608f * ({x} + 0.044715f * {x} * {x} * {x}))))"
    return f"(0.5f * {x} * (1.0f + erf_({x} * 0.7071067812f)))"


def _clamp(node: GraphNode, parts: Sequence[str]) -> str:
    low, high = argument(node, 1, "min"), argument(node, 2, "max")
    if base(node) == "hardtanh":
        low, high = argument(node, 1, "min_val", -1.0), argument(node, 2, "max_val", 1.0)
    text = parts[0]
    if low is not None:
        text = f"std::max({text}, {number(low)})"
    return text if high is None else f"std::min({text}, {number(high)})"


def _elu(node: GraphNode, parts: Sequence[str]) -> str:
    alpha = number(argument(node, 1, "alpha", 1.0))
    if argument(node, 2, "scale", 1) != 1 or argument(node, 3, "input_scale", 1) != 1:
        raise NotCoveredError("a scaled elu")
    return f"({parts[0]} > 0.0f ? {parts[0]} : {alpha} * (exp_({parts[0]}) - 1.0f))"


def _leaky(node: GraphNode, parts: Sequence[str]) -> str:
    slope = number(argument(node, 1, "negative_slope", 0.01))
    return f"({parts[0]} > 0.0f ? {parts[0]} : {slope} * {parts[0]})"


def _softplus(node: GraphNode, parts: Sequence[str]) -> str:
    if argument(node, 1, "beta", 1) != 1:
        raise NotCoveredError("a softplus with another slope")
    return f"({parts[0]} > 20.0f ? {parts[0]} : std::log1p(exp_({parts[0]})))"


def _plain(form: str) -> Writer:
    def write(node: GraphNode, parts: Sequence[str]) -> str:
        return form.format(*parts)

    return write


ELEMENTWISE: dict[str, Writer] = {
    "add": _scaled("add", "+"),
    "sub": _scaled("sub", "-"),
    "rsub": _plain("({1} - {0})"),
    "mul": _plain("({0} * {1})"),
    "div": _plain("({0} / {1})"),
    "maximum": _plain("std::max({0}, {1})"),
    "minimum": _plain("std::min({0}, {1})"),
    "pow": _power,
    "square": _plain("({0} * {0})"),
    "neg": _plain("(-{0})"),
    "abs": _plain("std::fabs({0})"),
    "sqrt": _plain("std::sqrt({0})"),
    "rsqrt": _plain("(1.0f / std::sqrt({0}))"),
    "reciprocal": _plain("(1.0f / {0})"),
    "exp": _plain("exp_({0})"),
    "log": _plain("std::log({0})"),
    "erf": _plain("erf_({0})"),
    "tanh": _plain("tanh_({0})"),
    "sigmoid": _plain("sigmoid_({0})"),
    "silu": _plain("({0} * sigmoid_({0}))"),
    "relu": _plain("({0} > 0.0f ? {0} : 0.0f)"),
    "relu6": _plain("std::min(std::max({0}, 0.0f), 6.0f)"),
    "hardsigmoid": _plain("(std::min(std::max({0} + 3.0f, 0.0f), 6.0f) * 0.1666666667f)"),
    "hardswish": _plain("({0} * std::min(std::max({0} + 3.0f, 0.0f), 6.0f) * 0.1666666667f)"),
    "gelu": _gelu,
    "clamp": _clamp,
    "hardtanh": _clamp,
    "elu": _elu,
    "leaky_relu": _leaky,
    "softplus": _softplus,
}
"""By operator: one element from those of its arguments."""


def expression(node: GraphNode, parts: Sequence[str]) -> str:
    """``node`` on one element; ``parts`` are its first arguments, numbers included.

    Raises NotCoveredError.
    """
    name = base(node)
    if name == "div" and (node.kwargs.get("rounding_mode") or len(node.args) > 2):
        raise NotCoveredError("a division that rounds")
    if name == "rsub" and node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1) != 1:
        raise NotCoveredError("a difference with a factor")
    writer = ELEMENTWISE.get(name)
    if writer is None:
        raise NotCoveredError(f"{node.op} has no template")
    return writer(node, parts)
