"""Modules that work row by row, written as stages of templates/modules/rows.cpp.

A level is what can be computed of a row from the products before it, then the products whose inputs that
completes. Within a level, element-by-element operators share a loop until one needs a sum or an extreme of the
row that the loop is only making.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.optimize.proposers.module_graph import (
    C_TYPES,
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
from headrace.optimize.records import GraphNode, ModuleCall

_LANES = 16
_VIEWS = frozenset({"view", "reshape", "_unsafe_view", "flatten", "unsqueeze", "squeeze", "unflatten"})
_REDUCTIONS = {"sum": "sum", "mean": "sum", "amax": "max", "amin": "min", "max": "max", "min": "min"}


@dataclass(frozen=True)
class _Map:
    """One element from others; ``parts`` are names of values or C++ numbers."""

    name: str
    write: Callable[[Sequence[str]], str]
    parts: tuple[str, ...]
    width: int  # 1: one number a row


@dataclass(frozen=True)
class _Reduce:
    name: str
    kind: str  # sum, max, min
    part: str
    factor: str  # the sum is multiplied by it; empty: it is not


@dataclass(frozen=True)
class _Product:
    """``part`` (rows, inner) by a weight (width, inner)."""

    name: str
    part: str
    weight: str
    bias: str
    width: int
    inner: int


_Step = _Map | _Reduce | _Product


@dataclass
class _Level:
    steps: list[_Map | _Reduce] = field(default_factory=list)
    products: list[_Product] = field(default_factory=list)


class Rows:
    """One module. Raises NotCoveredError where it is more than rows."""

    def __init__(self, call: ModuleCall) -> None:
        self._graph = graph = Graph(call)
        lead = graph.inputs[0].shape[:-1]
        if any(slot.shape[:-1] != lead or not lead for slot in graph.inputs):
            raise NotCoveredError("inputs that are not rows alike")
        self._lead, self.rows = list(lead), math.prod(lead)
        self._widths: dict[str, int] = {slot.name: slot.shape[-1] for slot in graph.inputs}
        if min(self._widths.values()) < 2:
            raise NotCoveredError("rows of one element")
        self._columns: dict[str, int] = {}  # weights along a row
        self._alias: dict[str, str] = {}
        self._steps: list[_Step] = []
        for node in call.graph:
            self._add(node)
        self._results: list[str] = []
        for result in call.results:
            self._results.append(self._output(result))
        self._levels = self._leveled()

    @property
    def has_products(self) -> bool:
        return any(level.products for level in self._levels)

    @property
    def weight_bytes(self) -> int:
        products = [product for level in self._levels for product in level.products]
        return sum(4 * product.width * product.inner for product in products)

    def source(self, vectors: int, micro_rows: int) -> str:
        """What rows.cpp includes: the call, its buffers, packing and stages."""
        return _Emitter(self, _LANES * vectors, vectors, micro_rows).text()

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
        slot = self._graph.slots.get(name)
        if slot is not None and slot.role == "weight":
            size = math.prod(slot.shape)
            if size != 1 and (not slot.shape or slot.shape[-1] != size):
                raise NotCoveredError(f"{name} is no vector")
            self._columns[name] = size
            return name
        name = self._alias.get(name, name)
        if name not in self._widths:
            raise NotCoveredError(f"{name} is not by rows")
        return name

    def _width(self, name: str) -> int:
        """Elements a row; 0 for a number."""
        return self._widths.get(name, 0) or (self._columns.get(name, 0) if self._columns.get(name) != 1 else 0)

    def _checked(self, node: GraphNode, width: int) -> None:
        """The node's shape is that of rows of this width."""
        if node.shape != [*self._lead, width] and not (width == 1 and node.shape == self._lead):
            raise NotCoveredError(f"{node.op} mixes rows")

    def _view(self, node: GraphNode, name: str) -> None:
        width = self._widths.get(name, 0)
        whole = math.prod(node.shape) == self.rows * max(1, width)
        if not whole or (width > 1 and node.shape[-1] != width):
            raise NotCoveredError(f"{node.op} cuts rows")
        if node.shape not in ([*self._lead, width], self._lead):
            raise NotCoveredError(f"{node.op} gives other rows")
        self._alias[node.name] = name

    def _elementwise(self, node: GraphNode) -> None:
        parts = [self._value(each) for each in node.args[:2] if is_reference(each) or isinstance(each, (int, float))]
        widths = {self._width(part) for part in parts} - {0}
        wide = widths - {1}
        if len(wide) > 1 or not any(part in self._widths for part in parts):
            raise NotCoveredError(f"{node.op} on rows of several widths")
        width = wide.pop() if wide else 1
        self._checked(node, width)
        if base(node) == "div" and self._width(parts[1]) <= 1 < width and expression(node, ["x", "y"]):
            inverse = self._form(f"{node.name}_inverse", "(1.0f / {0})", parts[1]) if self._width(parts[1]) else ""
            factor = inverse or f"(1.0f / {parts[1]})"
            self._map(node.name, lambda texts: f"({texts[0]} * {texts[1]})", [parts[0], factor], width)
            return
        self._map(node.name, lambda texts: expression(node, texts), parts, width)

    def _map(
        self, name: str, write: Callable[[Sequence[str]], str], parts: Sequence[str], width: int
    ) -> str:
        write(["x"] * max(2, len(parts)))  # raises where it cannot be written
        self._steps.append(_Map(name, write, tuple(parts), width))
        self._widths[name] = width
        return name

    def _form(self, name: str, form: str, *parts: str) -> str:
        width = max((self._width(part) for part in parts), default=1) or 1
        return self._map(name, lambda texts: form.format(*texts), parts, width)

    def _reduce(self, name: str, kind: str, part: str, factor: float = 1.0) -> str:
        if self._widths.get(part, 0) < 2:
            raise NotCoveredError("a sum over one element")
        self._steps.append(_Reduce(name, kind, part, "" if factor == 1.0 else number(factor)))
        self._widths[name] = 1
        return name

    def _reduction(self, node: GraphNode) -> None:
        part = self._value(node.args[0])
        self._check_last(node, argument(node, 1, "dim"))
        self._checked(node, 1)
        factor = 1.0 / self._widths[part] if base(node) == "mean" else 1.0
        self._reduce(node.name, _REDUCTIONS[base(node)], part, factor)

    def _check_last(self, node: GraphNode, dims: object) -> None:
        places = dims if isinstance(dims, list) else [dims]
        last = len(self._graph.shape(node.args[0])) - 1
        if len(places) != 1 or places[0] not in (-1, last):
            raise NotCoveredError(f"{node.op} over another dimension than the last")

    def _variance(self, node: GraphNode) -> None:
        part, name = self._value(node.args[0]), node.name
        self._check_last(node, argument(node, 1, "dim"))
        self._checked(node, 1)
        correction = node.kwargs.get("correction", 1) if node.op.endswith("correction") else int(bool(argument(node, 2, "unbiased", True)))
        width = self._widths[part]
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
        width = self._widths.get(part, 0)
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
        self._checked(node, self._widths[part])
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
        weight = self._graph.slot(node.args[1])
        bias = self._graph.slot(argument(node, 2, "bias"))
        part = self._value(node.args[0])
        if weight is None or weight.role != "weight" or (argument(node, 2, "bias") is not None and bias is None):
            raise NotCoveredError("a product of two inputs")
        width, inner = weight.shape
        if width < 2 or self._widths.get(part) != inner:
            raise NotCoveredError("a product with one column")
        self._checked(node, width)
        if part in {slot.name for slot in self._graph.inputs} and self._graph.dtype != "float32":
            part = self._form(f"{node.name}_in", "({0})", part)
        name = bias.name if bias is not None else ""
        self._steps.append(_Product(node.name, part, weight.name, name, width, inner))
        self._widths[node.name] = width

    def _output(self, result: str) -> str:
        """A step of its own that is stored: an input or a product is copied first."""
        name = self._alias.get(result, result)
        if name not in self._widths:
            raise NotCoveredError("an output that is not by rows")
        step = next((step for step in self._steps if step.name == name), None)
        if isinstance(step, _Map) and step.width > 1 and name not in self._results:
            return name
        return self._form(f"{name}_out{len(self._results)}", "({0})", name)

    def _leveled(self) -> list[_Level]:
        products = {step.name for step in self._steps if isinstance(step, _Product)}
        needed = self._needed()
        place: dict[str, int] = {}
        levels: list[_Level] = []
        for step in self._steps:
            if step.name not in needed:
                continue
            parts = step.parts if isinstance(step, _Map) else (step.part,)
            level = max((place.get(part, 0) + (part in products) for part in parts), default=0)
            place[step.name] = level
            while len(levels) <= level:
                levels.append(_Level())
            if isinstance(step, _Product):
                levels[level].products.append(step)
            else:
                levels[level].steps.append(step)
        for step in self._steps:  # one number a row is not kept from level to level
            parts = step.parts if isinstance(step, _Map) else (step.part,)
            for part in parts:
                if self._widths.get(part) == 1 and step.name in place and place[part] != place[step.name]:
                    raise NotCoveredError("a sum that is used after another product")
        return levels

    def _needed(self) -> set[str]:
        needed = set(self._results)
        for step in reversed(self._steps):
            if step.name in needed:
                needed |= set(step.parts if isinstance(step, _Map) else (step.part,))
        return needed


class _Emitter:
    """The C++ of one Rows at one panel width."""

    def __init__(self, rows: Rows, panel: int, vectors: int, micro_rows: int) -> None:
        self._rows, self._graph, self._panel = rows, rows._graph, panel
        self._vectors, self._micro_rows = vectors, micro_rows
        self._inputs = {slot.name for slot in self._graph.inputs}
        self._products = {product.name: product for level in rows._levels for product in level.products}
        self._kept: set[str] = set(self._products)  # values with a buffer
        for product in self._products.values():
            if product.part not in self._inputs:
                self._kept.add(product.part)
        for level in rows._levels:
            self._kept |= {name for name in self._level(level, sliced=False)[1] if name not in self._inputs}

    def text(self) -> str:
        levels = self._rows._levels
        parts = [self._head(), self._buffers(), self._packing()]
        for index, level in enumerate(levels):
            body, _ = self._level(level, sliced=self._is_sliced(index))
            parts.append(
                f"inline void rows_{index}(const Call &call, const Buffers &at, int64_t first, int64_t last, "
                f"int64_t c0, int64_t c1) {{\n    (void)c0, (void)c1;\n    for (int64_t r = first; r < last; r++) {{\n"
                + "\n".join(f"        {line}" for line in body)
                + "\n    }\n}\n"
            )
        parts += [self._all_stages(), self._sliced_stages()]
        return "namespace {\n\n" + "\n".join(parts) + "\n}  // namespace\n\n" + self._exports()

    # where things are

    def _stride(self, name: str) -> int:
        return -(-self._rows._widths[name] // self._panel) * self._panel

    def _ordered(self) -> list[str]:
        return sorted(self._kept)

    def _head(self) -> str:
        kind = C_TYPES[self._graph.dtype]
        lines = [f"typedef {kind} T;", f"typedef {kind} W;", f"constexpr int64_t ROWS = {self._rows.rows};"]
        lines += ["", "struct Call {"]
        lines += [f"    const T *{slot.name}_;" for slot in self._graph.inputs]
        lines += [f"    T *{slot.name}_;" for slot in self._graph.outputs]
        lines += ["    const char *packed;", "    explicit Call(const hr_call *call) {"]
        for slot in self._graph.inputs:
            lines.append(f"        {slot.name}_ = (const T *)call->tensors[S_{slot.name}].data;")
        for slot in self._graph.outputs:
            lines.append(f"        {slot.name}_ = (T *)call->tensors[S_{slot.name}].data;")
        lines += ["        packed = (const char *)call->packed;", "    }", "};", ""]
        return "\n".join(lines)

    def _buffers(self) -> str:
        names = self._ordered()
        columns = sum(self._stride(name) for name in names)
        lines = [f"constexpr int64_t BUFFER_COLUMNS = {max(1, columns)};", "struct Buffers {"]
        lines += [f"    float *{name};" for name in names] + ["};"]
        lines.append("inline void place_all(Buffers &at, float *memory, int64_t rows, int64_t first) {")
        before = 0
        for name in names:
            lines.append(f"    at.{name} = memory + {before} * rows - first * {self._stride(name)};")
            before += self._stride(name)
        lines += ["}", "inline void place_private(Buffers &at, float *memory, int64_t rows) {"]
        before = 0
        for name in self._private():
            lines.append(f"    at.{name} = memory + {before} * rows;")
            before += self._stride(name)
        return "\n".join([*lines, "}", ""])

    def _private(self) -> list[str]:
        """What every thread computes for itself when all rows go through a stage together."""
        found = []
        for index, level in enumerate(self._rows._levels[:-1]):
            if not self._is_sliced(index):
                found += [step.name for step in level.steps if step.name in self._kept]
        return sorted(found)

    def _places(self) -> tuple[dict[str, int], int]:
        """Where weights lie in the packed form, and its size in bytes."""
        places, size = {}, 0
        width = 4 if self._graph.dtype == "float32" else 2
        for product in self._products.values():
            if product.weight not in places:
                places[product.weight] = size
                size += -(-width * self._stride(product.name) * product.inner // 64) * 64
            if product.bias and f"{product.bias} bias" not in places:
                places[f"{product.bias} bias"] = size
                size += 4 * self._stride(product.name)
        for name, count in self._rows._columns.items():
            places[name] = size
            size += -(-4 * count // 64) * 64
        return places, size

    def _packing(self) -> str:
        places, _ = self._places()
        lines = [_PACKING, "inline void pack_all(const hr_call *call, char *memory) {"]
        lines.append("    (void)call, (void)memory;")
        for product in self._products.values():
            lines.append(
                f"    pack_panels(call->tensors[S_{product.weight}], {product.width}, {product.inner}, "
                f"{self._panel}, (W *)(memory + {places[product.weight]}));"
            )
            if product.bias:
                lines.append(
                    f"    pack_floats(call->tensors[S_{product.bias}], {product.width}, {self._stride(product.name)}, "
                    f"(float *)(memory + {places[f'{product.bias} bias']}));"
                )
        for name, count in self._rows._columns.items():
            lines.append(
                f"    pack_floats(call->tensors[S_{name}], {count}, {count}, (float *)(memory + {places[name]}));"
            )
        return "\n".join([*lines, "}", ""])

    def _exports(self) -> str:
        if not self._graph.weights:
            return ""
        _, size = self._places()
        return (
            f'extern "C" int64_t hr_packed_bytes(const hr_call *) {{ return {max(64, size)}; }}\n\n'
            'extern "C" int hr_pack(const hr_call *call, void *memory) {\n'
            "    pack_all(call, (char *)memory);\n    return HR_DONE;\n}\n"
        )

    # one level's loops

    def _is_sliced(self, index: int) -> bool:
        """Element by element on the columns of the products before: a thread needs its own alone."""
        levels = self._rows._levels
        if index == 0 or not levels[index].steps:
            return False
        widths = {product.width for product in levels[index - 1].products}
        return len(widths) == 1 and all(
            isinstance(step, _Map) and step.width in widths for step in levels[index].steps
        )

    def _level(self, level: _Level, *, sliced: bool) -> tuple[list[str], set[str]]:
        """The lines for one row, and the values that are read in another loop than they are made in."""
        return _Loops(self, level, sliced).written()

    def _all_stages(self) -> str:
        lines = [
            "inline void all_stages(const Call &call, const Buffers &at, int64_t first, int64_t last) {",
        ]
        for index, level in enumerate(self._rows._levels):
            if level.steps:
                lines.append(f"    rows_{index}(call, at, first, last, 0, {self._slice_width(index)});")
            for product in level.products:
                lines += self._product(product, "0", str(self._stride(product.name) // self._panel), "first", "last")
        return "\n".join([*lines, "}", ""])

    def _slice_width(self, index: int) -> int:
        products = self._rows._levels[index - 1].products if index else []
        return products[0].width if self._is_sliced(index) else 0

    def _sliced_stages(self) -> str:
        lines = [
            "inline void sliced_stages(const Call &call, const Buffers &at, int64_t self, int64_t team) {",
            "    (void)self, (void)team;",
        ]
        levels, dirty, private = self._rows._levels, dict[str, int](), set(self._private())

        def settle(read: set[str], own_width: int = 0) -> None:
            if any(name in dirty and dirty[name] != own_width for name in read):
                lines.append("#pragma omp barrier")
                dirty.clear()

        for index, level in enumerate(levels):
            read = {part for step in level.steps for part in (step.parts if isinstance(step, _Map) else (step.part,))}
            made = {step.name for step in level.steps if step.name in self._kept} - private
            if level.steps and self._is_sliced(index):
                width = self._slice_width(index)
                panels = -(-width // self._panel)
                settle(read - made, width)
                lines.append(
                    f"    rows_{index}(call, at, 0, ROWS, {panels} * self / team * {self._panel}, "
                    f"std::min<int64_t>({width}, {panels} * (self + 1) / team * {self._panel}));"
                )
                dirty |= dict.fromkeys(made, width)
            elif level.steps:
                settle(read - made)
                last = index == len(levels) - 1
                part = "ROWS * self / team, ROWS * (self + 1) / team" if last else "0, ROWS"
                lines.append(f"    rows_{index}(call, at, {part}, 0, 0);")
            for product in level.products:
                settle({product.part})
            for product in level.products:
                panels = self._stride(product.name) // self._panel
                lines += self._product(
                    product, f"{panels} * self / team", f"{panels} * (self + 1) / team", "0", "ROWS"
                )
                dirty[product.name] = product.width
        return "\n".join([*lines, "}", ""])

    def _product(self, product: _Product, start: str, stop: str, first: str, last: str) -> list[str]:
        places, _ = self._places()
        if product.part in self._kept:
            stride, source = self._stride(product.part), f"at.{product.part}"
        else:
            stride, source = product.inner, f"call.{product.part}_"
        bias = "(const float *)nullptr"
        if product.bias:
            bias = f"(const float *)(call.packed + {places[f'{product.bias} bias']}) + p * {self._panel}"
        target = self._stride(product.name)
        return [
            f"    for (int64_t p = {start}; p < {stop}; p++)",
            f"        product_rows<{self._micro_rows}, {self._vectors}>({last} - {first}, "
            f"{source} + {first} * {stride}, {stride}, "
            f"(const W *)(call.packed + {places[product.weight]}) + p * {product.inner * self._panel}, "
            f"{self._panel}, {product.inner}, at.{product.name} + {first} * {target} + p * {self._panel}, {target}, "
            f"{bias});",
        ]


class _Loops:
    """Turns one level's steps into loops over a row."""

    def __init__(self, emitter: _Emitter, level: _Level, sliced: bool) -> None:
        self._emitter, self._level, self._sliced = emitter, level, sliced
        self._rows = emitter._rows
        self._lines: list[str] = []
        self._width = 0
        self._body: list[str] = []
        self._here: set[str] = set()  # made in the open loop
        self._sums: list[_Reduce] = []
        self._escaped: set[str] = set()
        self._pointers: dict[str, str] = {}

    def written(self) -> tuple[list[str], set[str]]:
        for step in self._level.steps:
            if isinstance(step, _Reduce):
                self._reduce(step)
            elif step.width == 1:
                self._number(step)
            else:
                self._element(step)
        self._close()
        return [*self._pointers.values(), *self._lines], self._escaped

    def _reduce(self, step: _Reduce) -> None:
        self._open(self._rows._widths[step.part], (step.part,))
        value = self._read(step.part)
        accumulate = {
            "sum": f"{step.name} += {value};",
            "max": f"{step.name} = {value} > {step.name} ? {value} : {step.name};",
            "min": f"{step.name} = {value} < {step.name} ? {value} : {step.name};",
        }
        self._body.append(accumulate[step.kind])
        self._sums.append(step)

    def _number(self, step: _Map) -> None:
        if any(part == each.name for part in step.parts for each in self._sums):
            self._close()
        text = step.write([self._read(part) for part in step.parts])
        self._lines.append(f"const float {step.name} = {text};")
        for place, result in enumerate(self._rows._results):
            if result == step.name:
                slot = self._emitter._graph.outputs[place]
                self._lines.append(f"store(call.{slot.name}_, r, {step.name});")

    def _element(self, step: _Map) -> None:
        self._open(step.width, step.parts)
        self._body.append(f"const float {step.name} = {step.write([self._read(part) for part in step.parts])};")
        self._here.add(step.name)
        if step.name in self._emitter._kept:
            self._point(step.name)
            self._body.append(f"{step.name}_b[j] = {step.name};")
        for place, result in enumerate(self._rows._results):
            if result == step.name:
                slot = self._emitter._graph.outputs[place]
                self._body.append(f"store(call.{slot.name}_, r * {step.width} + j, {step.name});")

    def _open(self, width: int, parts: Sequence[str]) -> None:
        if width != self._width or any(part == each.name for part in parts for each in self._sums):
            self._close()
        self._width = width

    def _close(self) -> None:
        if not self._body:
            return
        starts = {"sum": "0.0f", "max": "-INFINITY", "min": "INFINITY"}
        marks = {"sum": "+", "max": "max", "min": "min"}
        clauses = ""
        for each in self._sums:
            self._lines.append(f"float {each.name} = {starts[each.kind]};")
            clauses += f" reduction({marks[each.kind]} : {each.name})"
        bounds = "int64_t j = c0; j < c1" if self._sliced else f"int64_t j = 0; j < {self._width}"
        self._lines += [f"#pragma omp simd{clauses}", f"for ({bounds}; j++) {{"]
        self._lines += [f"    {line}" for line in self._body] + ["}"]
        self._lines += [f"{each.name} *= {each.factor};" for each in self._sums if each.factor]
        self._body, self._here, self._sums, self._width = [], set(), [], 0

    def _read(self, part: str) -> str:
        rows = self._rows
        if part in self._here or rows._widths.get(part) == 1:
            return part
        if part in self._emitter._inputs:
            self._pointers[part] = f"const T *{part}_x = call.{part}_ + r * {rows._widths[part]};"
            return f"load({part}_x, j)"
        if part in rows._columns:
            places, _ = self._emitter._places()
            self._pointers[part] = f"const float *{part}_w = (const float *)(call.packed + {places[part]});"
            return f"{part}_w[0]" if rows._columns[part] == 1 else f"{part}_w[j]"
        if part in rows._widths:
            self._escaped.add(part)
            self._point(part)
            return f"{part}_b[j]"
        return part  # a number

    def _point(self, name: str) -> None:
        self._pointers[name] = f"float *{name}_b = at.{name} + r * {self._emitter._stride(name)};"


_PACKING = """inline float element(const hr_tensor &tensor, int64_t i) {
    return tensor.dtype == HR_BF16 ? load((const bf16 *)tensor.data, i) : load((const float *)tensor.data, i);
}

// (columns, inner) → panels of `panel` columns, rows of one panel side by side
inline void pack_panels(const hr_tensor &weight, int64_t columns, int64_t inner, int64_t panel, W *to) {
    for (int64_t p = 0; p * panel < columns; p++)
        for (int64_t i = 0; i < inner; i++)
            for (int64_t c = 0; c < panel; c++, to++)
                store(to, 0, p * panel + c < columns ? element(weight, (p * panel + c) * inner + i) : 0.0f);
}

inline void pack_floats(const hr_tensor &weight, int64_t count, int64_t all, float *to) {
    for (int64_t i = 0; i < all; i++) to[i] = i < count ? element(weight, i) : 0.0f;
}
"""


def rows_of(call: ModuleCall) -> Rows | None:
    """None where the module is more than rows."""
    try:
        return Rows(call)
    except NotCoveredError:
        return None
