"""A convolution and what follows it, element by element or by channel, for templates/modules/conv2d.cpp."""

from __future__ import annotations

from typing import Any

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


class Conv:
    """One module. Raises NotCoveredError for anything but conv2d, batch norm and elementwise operators."""

    def __init__(self, call: ModuleCall) -> None:
        self._graph = graph = Graph(call)
        nodes = [node for node in call.graph if base(node) not in IDENTITIES]
        if not nodes or base(nodes[0]) != "conv2d" or len(graph.inputs) != 1:
            raise NotCoveredError("it does not begin with a convolution")
        self._conv = nodes[0]
        self._input, self._weight = graph.inputs[0], graph.slot(self._conv.args[1])
        is_weight = self._weight is not None and self._weight.role == "weight"
        if graph.slot(self._conv.args[0]) is not self._input or not is_weight:
            raise NotCoveredError("a convolution of something else than input and weight")
        if len(self._input.shape) != 4:
            raise NotCoveredError("a convolution without batch")
        self._norm: GraphNode | None = None
        self._text, last = "value", self._conv.name
        for node in nodes[1:]:
            tensors = [each for each in node.args if is_reference(each)]
            if not tensors or self._behind(tensors[0]) != last:
                raise NotCoveredError("more than one chain of operators")
            first = self._norm is None and self._text == "value"
            if base(node) == "batch_norm" and first and not node.args[5]:
                self._norm = node
            elif base(node) in ELEMENTWISE and all(self._behind(each) == last for each in tensors):
                self._text = self._follow(node)
            else:
                raise NotCoveredError(f"{node.op} after a convolution")
            last = node.name
        if self._behind(f"%{graph.result()}") != last:
            raise NotCoveredError("an output in between")
        self.batch = self._input.shape[0]

    def source(self) -> str:
        """What conv2d.cpp includes: sizes, the affine map by channel, the epilogue."""
        weight, x = self._weight, self._input
        assert weight is not None
        stride, padding, dilation = self._pairs()
        sizes = {
            "BATCH": x.shape[0],
            "IN_C": x.shape[1],
            "IN_H": x.shape[2],
            "IN_W": x.shape[3],
            "OUT_C": weight.shape[0],
            "KERNEL_H": weight.shape[2],
            "KERNEL_W": weight.shape[3],
            "GROUPS": x.shape[1] // weight.shape[1],
            **dict(zip(("STRIDE_H", "STRIDE_W"), stride, strict=True)),
            **dict(zip(("PAD_H", "PAD_W"), padding, strict=True)),
            **dict(zip(("DIL_H", "DIL_W"), dilation, strict=True)),
        }
        kind = C_TYPES[self._graph.dtype]
        lines = [f"typedef {kind} T;", f"typedef {kind} W;"]
        lines += [f"constexpr int64_t {name} = {value};" for name, value in sizes.items()]
        lines += [
            f"enum {{ S_INPUT = S_{x.name}, S_WEIGHT = S_{weight.name}, "
            f"S_OUTPUT = S_{self._graph.outputs[0].name} }};",
            "",
            f"inline float epilogue(float value) {{\n    return {self._text};\n}}",
            "",
            self._affine(),
        ]
        return "\n".join(lines)

    def _behind(self, reference: object) -> str:
        """The node that a reference means, identities passed over."""
        node = self._graph.node(reference)
        while node is not None and base(node) in IDENTITIES:
            node = self._graph.node(node.args[0])
        if node is None:
            raise NotCoveredError(f"{reference} is no result of the convolution")
        return node.name

    def _follow(self, node: GraphNode) -> str:
        parts = []
        for each in node.args[:2]:
            if is_reference(each):
                parts.append("value")
            elif isinstance(each, (int, float)):
                parts.append(number(each))
        text = expression(node, parts)
        # the chain so far is one local value, so that an operator that reads it twice computes it once
        return f"[](float value) {{ return {text}; }}({self._text})" if self._text != "value" else text

    def _pairs(self) -> tuple[list[int], list[int], list[int]]:
        node = self._conv
        found = [argument(node, place, name, default) for place, name, default in _PAIRS]
        if any(isinstance(each, str) for each in found):
            raise NotCoveredError("a padding by name")
        stride, padding, dilation = (_pair(each) for each in found)
        return stride, padding, dilation

    def _affine(self) -> str:
        """Bias and batch norm as one factor and one summand by channel."""
        lines = [
            "inline float channel_of(const hr_tensor &tensor, int64_t i) {",
            "    return load((const W *)tensor.data, i);",
            "}",
            "",
            "inline void affine(const hr_call *call, int64_t channel, float &scale, float &shift) {",
            "    scale = 1.0f, shift = 0.0f;",
        ]
        bias = argument(self._conv, 2, "bias")
        if bias is not None:
            lines.append(f"    shift = {self._channel(bias)};")
        if self._norm is not None:
            weight, offset, mean, variance = self._norm.args[1:5]
            eps = number(self._norm.args[7])
            lines.append(f"    const float factor = 1.0f / std::sqrt({self._channel(variance)} + {eps});")
            gain = self._channel(weight) if weight is not None else "1.0f"
            lines.append(f"    scale = {gain} * factor;")
            lines.append(f"    shift = (shift - {self._channel(mean)}) * scale;")
            if offset is not None:
                lines.append(f"    shift += {self._channel(offset)};")
        return "\n".join([*lines, "}"])

    def _channel(self, reference: Any) -> str:
        slot = self._graph.slot(reference)
        assert self._weight is not None
        if slot is None or slot.role != "weight" or slot.shape != [self._weight.shape[0]]:
            raise NotCoveredError(f"{reference} is no weight by channel")
        return f"channel_of(call->tensors[S_{slot.name}], channel)"


_PAIRS = ((3, "stride", 1), (4, "padding", 0), (5, "dilation", 1))


def _pair(value: Any) -> list[int]:
    found = value if isinstance(value, list) else [value]
    return found * 2 if len(found) == 1 else found
