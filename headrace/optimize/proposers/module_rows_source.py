"""The C++ of a module that works row by row: what templates/modules/rows.cpp includes.

Within a level, element-by-element operators share a loop until one needs a sum or an extreme of the row that
the loop is only making.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.optimize.proposers.module_graph import C_TYPES
from headrace.optimize.proposers.module_steps import Level, Map, Product, Reduce, inputs_of

if TYPE_CHECKING:
    from headrace.optimize.proposers.module_rows import Rows

_LANES = 16

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


def write_rows(rows: Rows, vectors: int, micro_rows: int) -> str:
    """Call, buffers, packing and stages; ``vectors`` wide panels, ``micro_rows`` rows of sums at a time."""
    return _Emitter(rows, _LANES * vectors, vectors, micro_rows).text()


class _Emitter:
    """The C++ of one Rows at one panel width."""

    def __init__(self, rows: Rows, panel: int, vectors: int, micro_rows: int) -> None:
        self._rows, self._graph, self._panel = rows, rows.graph, panel
        self._vectors, self._micro_rows = vectors, micro_rows
        self._inputs = {slot.name for slot in self._graph.inputs}
        self._products = {product.name: product for level in rows.levels for product in level.products}
        self._kept: set[str] = set(self._products)  # values with a buffer
        for product in self._products.values():
            if product.part not in self._inputs:
                self._kept.add(product.part)
        for level in rows.levels:
            self._kept |= {name for name in self._level(level, sliced=False)[1] if name not in self._inputs}

    def text(self) -> str:
        levels = self._rows.levels
        parts = [self._head(), self._buffers(), self._packing()]
        for index, level in enumerate(levels):
            body, _ = self._level(level, sliced=self._is_sliced(index))
            parts.append(
                f"inline void rows_{index}(const Call &call, const Buffers &at, int64_t first, int64_t last, "
                "int64_t c0, int64_t c1) {\n    (void)c0, (void)c1;\n"
                "    for (int64_t r = first; r < last; r++) {\n"
                + "\n".join(f"        {line}" for line in body)
                + "\n    }\n}\n"
            )
        parts += [self._all_stages(), self._sliced_stages()]
        return "namespace {\n\n" + "\n".join(parts) + "\n}  // namespace\n\n" + self._exports()

    # where things are

    def _stride(self, name: str) -> int:
        return -(-self._rows.widths[name] // self._panel) * self._panel

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
        for index, level in enumerate(self._rows.levels[:-1]):
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
        for name, count in self._rows.columns.items():
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
                    f"    pack_floats(call->tensors[S_{product.bias}], {product.width}, "
                    f"{self._stride(product.name)}, (float *)(memory + {places[f'{product.bias} bias']}));"
                )
        for name, count in self._rows.columns.items():
            lines.append(
                f"    pack_floats(call->tensors[S_{name}], {count}, {count}, "
                f"(float *)(memory + {places[name]}));"
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
        levels = self._rows.levels
        if index == 0 or not levels[index].steps:
            return False
        widths = {product.width for product in levels[index - 1].products}
        return len(widths) == 1 and all(
            isinstance(step, Map) and step.width in widths for step in levels[index].steps
        )

    def _level(self, level: Level, *, sliced: bool) -> tuple[list[str], set[str]]:
        """The lines for one row, and the values that are read in another loop than they are made in."""
        return _Loops(self, level, sliced).written()

    def _all_stages(self) -> str:
        lines = [
            "inline void all_stages(const Call &call, const Buffers &at, int64_t first, int64_t last) {",
        ]
        for index, level in enumerate(self._rows.levels):
            if level.steps:
                lines.append(f"    rows_{index}(call, at, first, last, 0, {self._slice_width(index)});")
            for product in level.products:
                panels = self._stride(product.name) // self._panel
                lines += self._product(product, "0", str(panels), "first", "last")
        return "\n".join([*lines, "}", ""])

    def _slice_width(self, index: int) -> int:
        products = self._rows.levels[index - 1].products if index else []
        return products[0].width if self._is_sliced(index) else 0

    def _sliced_stages(self) -> str:
        lines = [
            "inline void sliced_stages(const Call &call, const Buffers &at, int64_t self, int64_t team) {",
            "    (void)self, (void)team;",
        ]
        levels, dirty, private = self._rows.levels, dict[str, int](), set(self._private())

        def settle(read: set[str], own_width: int = 0) -> None:
            if any(name in dirty and dirty[name] != own_width for name in read):
                lines.append("#pragma omp barrier")
                dirty.clear()

        for index, level in enumerate(levels):
            read = {part for step in level.steps for part in inputs_of(step)}
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

    def _product(self, product: Product, start: str, stop: str, first: str, last: str) -> list[str]:
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
            f"{self._panel}, {product.inner}, at.{product.name} + {first} * {target} + p * {self._panel}, "
            f"{target}, {bias});",
        ]


class _Loops:
    """Turns one level's steps into loops over a row."""

    def __init__(self, emitter: _Emitter, level: Level, sliced: bool) -> None:
        self._emitter, self._level, self._sliced = emitter, level, sliced
        self._rows = emitter._rows
        self._lines: list[str] = []
        self._width = 0
        self._body: list[str] = []
        self._here: set[str] = set()  # made in the open loop
        self._sums: list[Reduce] = []
        self._escaped: set[str] = set()
        self._pointers: dict[str, str] = {}

    def written(self) -> tuple[list[str], set[str]]:
        for step in self._level.steps:
            if isinstance(step, Reduce):
                self._reduce(step)
            elif step.width == 1:
                self._number(step)
            else:
                self._element(step)
        self._close()
        return [*self._pointers.values(), *self._lines], self._escaped

    def _reduce(self, step: Reduce) -> None:
        self._open(self._rows.widths[step.part], (step.part,))
        value = self._read(step.part)
        accumulate = {
            "sum": f"{step.name} += {value};",
            "max": f"{step.name} = {value} > {step.name} ? {value} : {step.name};",
            "min": f"{step.name} = {value} < {step.name} ? {value} : {step.name};",
        }
        self._body.append(accumulate[step.kind])
        self._sums.append(step)

    def _number(self, step: Map) -> None:
        if any(part == each.name for part in step.parts for each in self._sums):
            self._close()
        text = step.write([self._read(part) for part in step.parts])
        self._lines.append(f"const float {step.name} = {text};")
        for place, result in enumerate(self._rows.results):
            if result == step.name:
                slot = self._emitter._graph.outputs[place]
                self._lines.append(f"store(call.{slot.name}_, r, {step.name});")

    def _element(self, step: Map) -> None:
        self._open(step.width, step.parts)
        text = step.write([self._read(part) for part in step.parts])
        self._body.append(f"const float {step.name} = {text};")
        self._here.add(step.name)
        if step.name in self._emitter._kept:
            self._point(step.name)
            self._body.append(f"{step.name}_b[j] = {step.name};")
        for place, result in enumerate(self._rows.results):
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
        if part in self._here or rows.widths.get(part) == 1:
            return part
        if part in self._emitter._inputs:
            self._pointers[part] = f"const T *{part}_x = call.{part}_ + r * {rows.widths[part]};"
            return f"load({part}_x, j)"
        if part in rows.columns:
            places, _ = self._emitter._places()
            self._pointers[part] = f"const float *{part}_w = (const float *)(call.packed + {places[part]});"
            return f"{part}_w[0]" if rows.columns[part] == 1 else f"{part}_w[j]"
        if part in rows.widths:
            self._escaped.add(part)
            self._point(part)
            return f"{part}_b[j]"
        return part  # a number

    def _point(self, name: str) -> None:
        self._pointers[name] = f"float *{name}_b = at.{name} + r * {self._emitter._stride(name)};"
