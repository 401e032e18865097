"""Modules that work row by row, written as stages of templates/modules/rows.cpp.

A level is what can be computed of a row from the products before it, then the products whose inputs that
completes. module_rows_source.py writes them in C++.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headrace.optimize.proposers.module_graph import (
    ELEMENTWISE,
    IDENTITIES,
    Graph,
    NotCoveredError,
    argument,
    base,
    expression,
    is_reference,
    number,
)
from headrace.optimize.proposers.module_rows_source import write_rows
from headrace.optimize.proposers.module_steps import Level, Map, Product, Reduce, Step, inputs_of
from headrace.optimize.records import GraphNode, ModuleCall

_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "unflatten"})
_REDUCTIONS = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min", "max": "max", "min": "min"}


class Rows:
    """One module. Raises NotCoveredError where it is more than rows."""

    def __init__(self, call: ModuleCall) -> None:
        self.graph = graph = Graph(call)
        lead = graph.inputs[0].shape[:-1]
        if any(slot.shape[:-1] != lead or not lead for slot in graph.inputs):
            raise NotCoveredError("inputs that are not rows alike")
        self._lead, self.rows = list(lead), math.prod(lead)
        self.widths: dict[str, int] = {slot.name: slot.shape[-1] for slot in graph.inputs}
        if min(self.widths.values()) < 2:
            raise NotCoveredError("rows of one element")
        self.columns: dict[str, int] = {}  # weights along a row
        self._alias: dict[str, str] = {}
        self._steps: list[Step] = []
        for node in call.graph:
            self._add(node)
        self.results: list[str] = []
        for result in call.results:
            self.results.append(self._output(result))
        self.levels = self._leveled()

    @property
    def has_products(self) -> bool:
        return any(level.products for level in self.levels)

    @property
    def weight_bytes(self) -> int:
        products = [product for level in self.levels for product in level.products]
        return sum(4 * product.width * product.inner for product in products)

    def source(self, vectors: int, micro_rows: int) -> str:
        """What rows.cpp includes: the call, its buffers, packing and stages."""
        return write_rows(self, vectors, micro_rows)

    # reading the graph

    def _add(self, node: GraphNode) -> None:
        name, first = base(node), node.args[0] if node.args else None
        if name in IDENTITIES:
            self._alias[node.name] = self._value(first)
        elif name in _VIEWS:
            self._view(node, self._value(first))
        elif name == "linear":
            self._linear(node)
        elif name == "layer_norm":
            self._layer_norm(node)
        elif name == "rms_norm":
            self._rms_norm(node)
        elif name in ("softmax", "log_softmax", "_softmax", "_log_softmax"):
            self._softmax(node, is_log="log" in name)
        elif name == "var":
            self._variance(node)
        elif name in _REDUCTIONS and (name not in ("max", "min") or node.op.endswith(".dim")):
            self._reduction(node)
        elif name in ELEMENTWISE:
            self._elementwise(node)
        else:
            raise NotCoveredError(f"{node.op} is not computed by rows")

    def _value(self, reference: object) -> str:
        """The name of a value, or a number in C++."""
        if not is_reference(reference):
            if isinstance(reference, (bool, int, float)) or reference in ("inf", "-inf"):
                return number(reference)
            raise NotCoveredError(f"an argument {reference!r}")
        name = str(reference)[1:]
        slot = self.graph.slots.get(name)
        if slot is not None and slot.role == "weight":
            size = math.prod(slot.shape)
            if size != 1 and (not slot.shape or slot.shape[-1] != size):
                raise NotCoveredError(f"{name} is no vector")
            self.columns[name] = size
            return name
        name = self._alias.get(name, name)
        if name not in self.widths:
            raise NotCoveredError(f"{name} is not by rows")
        return name

    def _width(self, name: str) -> int:
        """Elements a row; 0 for a number."""
        columns = self.columns.get(name, 0)
        return self.widths.get(name, 0) or (columns if columns != 1 else 0)

    def _checked(self, node: GraphNode, width: int) -> None:
        """The node's shape is that of rows of this width."""
        if node.shape != [*self._lead, width] and not (width == 1 and node.shape == self._lead):
            raise NotCoveredError(f"{node.op} mixes rows")

    def _view(self, node: GraphNode, name: str) -> None:
        width = self.widths.get(name, 0)
        whole = math.prod(node.shape) == self.rows * max(1, width)
        if not whole or (width > 1 and node.shape[-1] != width):
            raise NotCoveredError(f"{node.op} cuts rows")
        if node.shape not in ([*self._lead, width], self._lead):
            raise NotCoveredError(f"{node.op} gives other rows")
        self._alias[node.name] = name

    def _elementwise(self, node: GraphNode) -> None:
        given = [each for each in node.args[:2] if is_reference(each) or isinstance(each, (int, float))]
        parts = [self._value(each) for each in given]
        widths = {self._width(part) for part in parts} - {0}
        wide = widths - {1}
        if len(wide) > 1 or not any(part in self.widths for part in parts):
            raise NotCoveredError(f"{node.op} on rows of several widths")
        width = wide.pop() if wide else 1
        self._checked(node, width)
        if base(node) == "div" and self._width(parts[1]) <= 1 < width and expression(node, ["x", "y"]):
            factor = f"(1.0f / {parts[1]})"
            if self._width(parts[1]):
                factor = self._form(f"{node.name}_inverse", "(1.0f / {0})", parts[1])
            self._map(node.name, lambda texts: f"({texts[0]} * {texts[1]})", [parts[0], factor], width)
            return
        self._map(node.name, lambda texts: expression(node, texts), parts, width)

    def _map(self, name: str, write: Callable[[Sequence[str]], str], parts: Sequence[str], width: int) -> str:
        write(["x"] * max(2, len(parts)))  # raises where it cannot be written
        self._steps.append(Map(name, write, tuple(parts), width))
        self.widths[name] = width
        return name

    def _form(self, name: str, form: str, *parts: str) -> str:
        width = max((self._width(part) for part in parts), default=1) or 1
        return self._map(name, lambda texts: form.format(*texts), parts, width)

    def _reduce(self, name: str, kind: str, part: str, factor: float = 1.0) -> str:
        if self.widths.get(part, 0) < 2:
            raise NotCoveredError("a sum over one element")
        self._steps.append(Reduce(name, kind, part, "" if factor == 1.0 else number(factor)))
        self.widths[name] = 1
        return name

    def _reduction(self, node: GraphNode) -> None:
        part = self._value(node.args[0])
        self._check_last(node, argument(node, 1, "dim"))
        self._checked(node, 1)
        factor = 1.0 / self.widths[part] if base(node) == "mean" else 1.0
        self._reduce(node.name, _REDUCTIONS[base(node)], part, factor)

    def _check_last(self, node: GraphNode, dims: object) -> None:
        places = dims if isinstance(dims, list) else [dims]
        last = len(self.graph.shape(node.args[0])) - 1
        if len(places) != 1 or places[0] not in (-1, last):
            raise NotCoveredError(f"{node.op} over another dimension than the last")

    def _variance(self, node: GraphNode) -> None:
        part, name = self._value(node.args[0]), node.name
        self._check_last(node, argument(node, 1, "dim"))
        self._checked(node, 1)
        correction = int(bool(argument(node, 2, "unbiased", True)))
        if node.op.endswith(".correction"):
            correction = node.kwargs.get("correction", 1)
        width = self.widths[part]
        if width <= correction:
            raise NotCoveredError("the variance of one element")
        mean = self._reduce(f"{name}_mean", "sum", part, 1.0 / width)
        square = self._form(f"{name}_square", "(({0} - {1}) * ({0} - {1}))", part, mean)
        self._reduce(name, "sum", square, 1.0 / (width - correction))

    def _layer_norm(self, node: GraphNode) -> None:
        part, name = self._value(node.args[0]), node.name
        width = self._norm_width(node, part)
        eps = number(argument(node, 4, "eps", 1e-5))
        mean = self._reduce(f"{name}_mean", "sum", part, 1.0 / width)
        centred = self._form(f"{name}_centred", "({0} - {1})", part, mean)
        square = self._form(f"{name}_square", "({0} * {0})", centred)
        variance = self._reduce(f"{name}_var", "sum", square, 1.0 / width)
        scale = self._form(f"{name}_scale", "(1.0f / std::sqrt({0} + {1}))", variance, eps)
        self._scaled(node, centred, scale, [argument(node, 2, "weight"), argument(node, 3, "bias")])

    def _rms_norm(self, node: GraphNode) -> None:
        part, name = self._value(node.args[0]), node.name
        width = self._norm_width(node, part)
        eps = argument(node, 3, "eps")
        square = self._form(f"{name}_square", "({0} * {0})", part)
        mean = self._reduce(f"{name}_mean", "sum", square, 1.0 / width)
        floor = number(1.1920929e-07 if eps is None else eps)
        scale = self._form(f"{name}_scale", "(1.0f / std::sqrt({0} + {1}))", mean, floor)
        self._scaled(node, part, scale, [argument(node, 2, "weight"), None])

    def _norm_width(self, node: GraphNode, part: str) -> int:
        width = self.widths.get(part, 0)
        if node.args[1] != [width]:
            raise NotCoveredError(f"{node.op} over several dimensions")
        self._checked(node, width)
        return width

    def _scaled(self, node: GraphNode, part: str, scale: str, affine: Sequence[object]) -> None:
        weight, bias = (None if each is None else self._value(each) for each in affine)
        form, parts = "({0} * {1})", [part, scale]
        if weight is not None:
            form, parts = "({0} * {1} * {2})", [*parts, weight]
        if bias is not None:
            form, parts = f"({form} + {{{len(parts)}}})", [*parts, bias]
        self._form(node.name, form, *parts)

    def _softmax(self, node: GraphNode, *, is_log: bool) -> None:
        part, name = self._value(node.args[0]), node.name
        self._check_last(node, argument(node, 1, "dim"))
        self._checked(node, self.widths[part])
        if argument(node, 2, "dtype") not in (None, False):
            raise NotCoveredError("a softmax in another dtype")
        most = self._reduce(f"{name}_max", "max", part)
        power = self._form(f"{name}_exp", "exp_({0} - {1})", part, most)
        total = self._reduce(f"{name}_sum", "sum", power)
        if is_log:
            floor = self._form(f"{name}_log", "({0} + std::log({1}))", most, total)
            self._form(name, "({0} - {1})", part, floor)
        else:
            inverse = self._form(f"{name}_inverse", "(1.0f / {0})", total)
            self._form(name, "({0} * {1})", power, inverse)

    def _linear(self, node: GraphNode) -> None:
        weight = self.graph.slot(node.args[1])
        bias = self.graph.slot(argument(node, 2, "bias"))
        part = self._value(node.args[0])
        lost_bias = argument(node, 2, "bias") is not None and bias is None
        if weight is None or weight.role != "weight" or lost_bias:
            raise NotCoveredError("a product of two inputs")
        width, inner = weight.shape
        if width < 2 or self.widths.get(part) != inner:
            raise NotCoveredError("a product with one column")
        self._checked(node, width)
        if part in {slot.name for slot in self.graph.inputs} and self.graph.dtype != "float32":
            part = self._form(f"{node.name}_in", "({0})", part)
        name = bias.name if bias is not None else ""
        self._steps.append(Product(node.name, part, weight.name, name, width, inner))
        self.widths[node.name] = width

    def _output(self, result: str) -> str:
        """A step of its own that is stored: an input or a product is copied first."""
        name = self._alias.get(result, result)
        if name not in self.widths:
            raise NotCoveredError("an output that is not by rows")
        step = next((step for step in self._steps if step.name == name), None)
        if isinstance(step, Map) and step.width > 1 and name not in self.results:
            return name
        return self._form(f"{name}_out{len(self.results)}", "({0})", name)

    def _leveled(self) -> list[Level]:
        products = {step.name for step in self._steps if isinstance(step, Product)}
        needed = self._needed()
        place: dict[str, int] = {}
        levels: list[Level] = []
        for step in self._steps:
            if step.name not in needed:
                continue
            level = max((place.get(part, 0) + (part in products) for part in inputs_of(step)), default=0)
            place[step.name] = level
            while len(levels) <= level:
                levels.append(Level())
            if isinstance(step, Product):
                levels[level].products.append(step)
            else:
                levels[level].steps.append(step)
        for step in self._steps:  # one number a row is not kept from level to level
            for part in inputs_of(step):
                if self.widths.get(part) == 1 and step.name in place and place[part] != place[step.name]:
                    raise NotCoveredError("a sum that is used after another product")
        return levels

    def _needed(self) -> set[str]:
        needed = set(self.results)
        for step in reversed(self._steps):
            if step.name in needed:
                needed |= set(inputs_of(step))
        return needed
