"""softmax(scale q kᵀ) v, called by name or written out, for templates/modules/attention.cpp."""

from __future__ import annotations

import math

from headrace.optimize.proposers.module_graph import (
    C_TYPES,
    IDENTITIES,
    Graph,
    NotCoveredError,
    argument,
    base,
    number,
)
from headrace.optimize.records import GraphNode, ModuleCall


class Attention:
    """One module. Raises NotCoveredError for anything but attention over three inputs."""

    def __init__(self, call: ModuleCall) -> None:
        self._graph = Graph(call)
        last = self._graph.node(self._graph.result())
        assert last is not None
        self._count = 0
        last = self._behind(last)
        if base(last) == "scaled_dot_product_attention":
            self._by_name(last)
        else:
            self._written_out(last)
        if self._count != len([node for node in call.graph if base(node) not in IDENTITIES]):
            raise NotCoveredError("more than attention")
        q, k, v = self._names
        shapes = [self._graph.shape(f"%{name}") for name in (q, k, v)]
        leads = {tuple(shape[:-2]) for shape in shapes}
        if len(leads) != 1 or min(len(shape) for shape in shapes) < 3 or shapes[1][-2] != shapes[2][-2]:
            raise NotCoveredError("heads that are not alike")
        self.heads = math.prod(leads.pop())
        self.queries, self.width = shapes[0][-2:]
        self.keys, self.v_width = shapes[2][-2:]

    def source(self) -> str:
        """What attention.cpp includes: sizes and slots."""
        names = dict(zip(("S_QUERY", "S_KEY", "S_VALUE"), self._names, strict=True))
        names["S_OUTPUT"] = self._graph.outputs[0].name
        sizes = {"HEADS": self.heads, "QUERIES": self.queries, "KEYS": self.keys}
        sizes |= {"WIDTH": self.width, "V_WIDTH": self.v_width}
        lines = [f"typedef {C_TYPES[self._graph.dtype]} T;"]
        lines += [f"constexpr int64_t {name} = {value};" for name, value in sizes.items()]
        lines.append(f"constexpr float SCALE = {number(self._scale)};")
        lines.append(f"constexpr bool CAUSAL = {str(self._causal).lower()};")
        lines.append(f"enum {{ {', '.join(f'{name} = S_{slot}' for name, slot in names.items())} }};")
        return "\n".join(lines)

    def _by_name(self, node: GraphNode) -> None:
        if argument(node, 3, "attn_mask") is not None or argument(node, 4, "dropout_p", 0.0):
            raise NotCoveredError("attention with a mask or dropout")
        if argument(node, 7, "enable_gqa", False):
            raise NotCoveredError("attention of groups of queries")
        self._count += 1
        self._names = [self._input(each) for each in node.args[:3]]
        self._causal = bool(argument(node, 5, "is_causal", False))
        scale = argument(node, 6, "scale")
        self._scale = 1.0 / math.sqrt(self._graph.shape(node.args[0])[-1]) if scale is None else float(scale)

    def _written_out(self, node: GraphNode) -> None:
        self._causal, self._scale = False, 1.0
        probabilities, v = self._product(node)
        node = self._node(probabilities)
        rank = len(node.shape)
        if base(node) not in ("softmax", "_softmax") or argument(node, 1, "dim") not in (-1, rank - 1):
            raise NotCoveredError("no softmax over the keys")
        self._count += 1
        scores = self._scaled(node.args[0])
        q, k = self._product(self._node(scores))
        q = self._scaled(q)
        turned = self._node(k)
        rank = len(turned.shape)
        places = [place % rank for place in turned.args[1:] if isinstance(place, int)]
        if base(turned) != "transpose" or sorted(places) != [rank - 2, rank - 1]:
            raise NotCoveredError("keys that are not turned")
        self._count += 1
        self._names = [self._input(q), self._input(self._scaled(turned.args[0])), self._input(v)]
        if self._scale <= 0:
            raise NotCoveredError("a scale that is not positive")

    def _scaled(self, reference: object) -> object:
        """What a reference means before it was multiplied by or divided by numbers."""
        while True:
            node = self._graph.node(reference)
            if node is None:
                return reference
            node = self._behind(node)
            factor = node.args[1] if len(node.args) > 1 else None
            if base(node) not in ("mul", "div") or not isinstance(factor, (int, float)):
                return f"%{node.name}"
            self._count += 1
            self._scale *= factor if base(node) == "mul" else 1.0 / factor
            reference = node.args[0]

    def _product(self, node: GraphNode) -> tuple[object, object]:
        if base(node) not in ("matmul", "bmm"):
            raise NotCoveredError(f"{node.op} where a product was expected")
        self._count += 1
        return node.args[0], node.args[1]

    def _node(self, reference: object) -> GraphNode:
        node = self._graph.node(reference)
        if node is None:
            raise NotCoveredError(f"{reference} where an operator was expected")
        return self._behind(node)

    def _behind(self, node: GraphNode) -> GraphNode:
        while base(node) in IDENTITIES:
            before = self._graph.node(node.args[0])
            if before is None:
                raise NotCoveredError("nothing but copies")
            node = before
        return node

    def _input(self, reference: object) -> str:
        slot = self._graph.slot(reference)
        if slot is None or slot.role != "input":
            raise NotCoveredError(f"{reference} is no input")
        return slot.name
