"""Rendering a chat template in this process, with every step charged to a budget.

A template gets here only if it is made of plain constructs (no macros, no recursion, no calls or filters
outside a short list). Then each thing it does that can cost time or memory is charged first: a loop by its
iterations times the text in its body, an operation by the size of what it reads or makes. What a template
may spend grows with the request, so ordinary ones never notice; one that overspends, or meets something
unforeseen, raises OverBudget and is rendered in the child process instead. So OverBudget never reaches a
caller, and a rendering here ends within the budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from jinja2 import nodes
from jinja2.runtime import Context, Undefined
from jinja2.utils import pass_context
from jinja2.visitor import NodeTransformer

from headrace.text.jinja_env import ChatEnvironment, PublicNamespace, raise_exception, strftime_now

BASE_BUDGET = 500_000
BUDGET_PER_CHARACTER = 48
_STEP = 10
_ITERATION = 50

_NODES = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.Const, nodes.Name, nodes.NSRef, nodes.Getattr,
    nodes.Getitem, nodes.Slice, nodes.If, nodes.CondExpr, nodes.For, nodes.Assign, nodes.Filter, nodes.Test,
    nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Add, nodes.Sub, nodes.Mul, nodes.Mod,
    nodes.FloorDiv, nodes.Neg, nodes.Concat, nodes.Call, nodes.Keyword, nodes.Pair, nodes.List, nodes.Tuple,
    nodes.Dict, nodes.Scope, nodes.Break, nodes.Continue,
)  # fmt: skip
_FILTERS = (
    "trim", "tojson", "length", "count", "string", "lower", "upper", "first", "last", "list", "default", "d",
    "join", "replace", "capitalize", "title", "items", "safe", "int", "selectattr", "rejectattr", "select",
    "reject", "map",
)  # fmt: skip
_TESTS = (
    "defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "integer", "float",
    "boolean", "true", "false", "odd", "even", "eq", "equalto", "==", "ne", "!=", "in",
)  # fmt: skip
_METHODS: dict[type, set[str]] = {
    str: {"strip", "lstrip", "rstrip", "split", "rsplit", "startswith", "endswith", "lower", "upper", "title",
          "capitalize", "find", "index", "replace", "removeprefix", "removesuffix"},
    dict: {"get", "items", "keys", "values"},
    list: {"index", "count"},
}  # fmt: skip
_FUNCTIONS = (raise_exception, strftime_now, PublicNamespace)
_SCALARS = (int, float, bool, type(None), Undefined)


class OverBudget(Exception):
    """Not for this process: the child renders it."""


class _Meter(threading.local):
    left: float = BASE_BUDGET

    def charge(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            raise OverBudget


class InlineTemplate:
    """A template that can be rendered here. Raises OverBudget if ``source`` is not one. Thread-safe."""

    def __init__(self, source: str) -> None:
        self._environment = _MeteredEnvironment()
        tree = self._environment.parse(source)
        _require_plain(tree)
        self._environment.meter.left = BASE_BUDGET
        self._template = self._environment.from_string(_Metered().visit(tree))

    def render(self, variables: Mapping[str, Any], num_characters: int) -> str:
        """The text. ``num_characters``: size of all strings in ``variables``, which sets the budget."""
        self._environment.meter.left = BASE_BUDGET + BUDGET_PER_CHARACTER * num_characters
        return self._template.render(variables)


class _MeteredEnvironment(ChatEnvironment):
    intercepted_binops = frozenset(["+", "*", "%"])

    def __init__(self) -> None:
        self.meter = _Meter()
        super().__init__(finalize=self._finalize)
        filters: dict[str, Callable[..., Any]] = dict.fromkeys(self.filters, _refuse)
        filters.update({name: self._metered_filter(name, self.filters[name]) for name in _FILTERS})
        filters.update(_loop=self._loop, _measure=self._measure)
        self.filters = filters
        self.tests = {
            name: self._metered_test(cast("Callable[..., Any]", test)) if name in _TESTS else _refuse
            for name, test in self.tests.items()
        }

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and not hasattr(obj, attribute):
            value = obj[attribute]
        else:
            value = super().getattr(obj, attribute)
        self.meter.charge(_STEP + (len(value) if type(value) in (str, list) else 0))
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        self.meter.charge(_STEP + (len(value) if type(value) in (str, list) else 0))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            self.meter.charge(_STEP)
        elif (
            operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple))
        ):
            self.meter.charge(_STEP + len(left) + len(right))
        elif operator != "+":
            raise OverBudget  # repetition or formatting: sizes that do not follow from the operands'
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if owner is None or __obj in _FUNCTIONS:
            if __obj not in _FUNCTIONS:
                raise OverBudget
            self.meter.charge(_STEP + sum(map(self._size, args)))
        else:
            allowed: set[str] = _METHODS.get(type(owner), set())
            if getattr(__obj, "__name__", "") not in allowed:
                raise OverBudget
            self.meter.charge(_STEP + (len(owner) if type(owner) is not dict else 0))
            if __obj.__name__ == "replace":
                self._charge_replacement(owner, *args[:2])
            elif type(owner) is list:
                self.meter.charge(self._size(owner))
        return super().call(__context, __obj, *args, **kwargs)

    def _finalize(self, value: Any) -> Any:
        self.meter.charge(self._size(value))
        return value

    def _loop(self, values: Any, weight: int) -> Any:
        """What a loop runs over, as a sequence whose iterations are paid for."""
        if isinstance(values, Undefined):
            return values
        if not isinstance(values, (list, tuple, str, dict)):
            values = list(values)
        self.meter.charge(len(values) * weight)
        return values

    def _measure(self, value: Any) -> Any:
        self.meter.charge(self._size(value))
        return value

    def _size(self, value: Any) -> int:
        """Characters in ``value``, nested strings included; charges for the walk as it goes."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, _SCALARS):
            # Python refuses to print integers of more than 4,300 digits: a constant here.
            return _STEP
        total = 0
        if isinstance(value, Mapping):
            for key, item in value.items():
                self.meter.charge(2 * _STEP)
                size = self._size(key) + self._size(item)
                self.meter.charge(size)
                total += size
        elif isinstance(value, Sequence):
            for item in value:
                self.meter.charge(_STEP)
                size = self._size(item)
                self.meter.charge(size)
                total += size
        return total

    def _charge_replacement(self, text: Any, old: Any = "", new: Any = "") -> None:
        if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
            raise OverBudget
        self.meter.charge(len(text) + (len(text) // max(1, len(old)) + 1) * len(new))

    def _metered_filter(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        takes_context = hasattr(function, "jinja_pass_arg")

        def metered(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if takes_context else args
            if name in ("length", "count", "default", "d", "first", "last", "safe", "items"):
                self.meter.charge(_STEP)
            elif not isinstance(given[0], (str, list, dict, tuple, *_SCALARS)):
                raise OverBudget
            elif name in ("selectattr", "rejectattr", "select", "reject", "map", "list"):
                self.meter.charge(_ITERATION * _count(given[0]))
            else:
                self.meter.charge(_STEP + self._size(given[0]))
            if name == "replace":
                self._charge_replacement(*given[:3])
            elif name == "join":
                separator = given[1] if len(given) > 1 else kwargs.get("d", "")
                self.meter.charge(self._size(separator) * _count(given[0]))
            elif name == "tojson":
                self._charge_indent(given[0], kwargs.get("indent", given[2] if len(given) > 2 else None))
            result = function(*args, **kwargs)
            if name in ("selectattr", "rejectattr", "select", "reject", "map", "items"):
                result = list(result)
            return result

        if takes_context:
            metered.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
        return metered

    def _charge_indent(self, value: Any, indent: Any) -> None:
        """JSON writes each line's whole indentation, so deep values grow with depth times lines."""
        if indent is None:
            return
        if not isinstance(indent, int) or not 0 <= indent <= 16:
            raise OverBudget
        pending = [(value, 1)]
        while pending:
            item, depth = pending.pop()
            self.meter.charge(indent * depth + _STEP)
            if isinstance(item, dict):
                pending += [(child, depth + 1) for child in item.values()]
            elif isinstance(item, (list, tuple)):
                pending += [(child, depth + 1) for child in item]

    def _metered_test(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if hasattr(function, "jinja_pass_arg"):
            return function

        def metered(*args: Any) -> Any:
            self.meter.charge(_STEP + (sum(map(self._size, args)) if len(args) > 1 else 0))
            return function(*args)

        return metered


def _count(value: Any) -> int:
    return 1 + len(value) if isinstance(value, (str, list, tuple, dict)) else 1


@pass_context
def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise OverBudget


def _require_plain(tree: nodes.Node) -> None:
    pending = [tree]
    while pending:
        node = pending.pop()
        if type(node) not in _NODES:
            raise OverBudget
        if isinstance(node, nodes.For) and node.recursive:
            raise OverBudget
        if isinstance(node, nodes.Filter) and (node.name not in _FILTERS or node.node is None):
            raise OverBudget
        if isinstance(node, nodes.Test) and node.name not in _TESTS:
            raise OverBudget
        if isinstance(node, nodes.Call) and (node.dyn_args is not None or node.dyn_kwargs is not None):
            raise OverBudget
        pending.extend(node.iter_child_nodes())


class _Metered(NodeTransformer):
    """Wraps what the environment cannot intercept: loops, comparisons, and joining with ``~``."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        weight = _ITERATION + sum(
            len(str(data))
            for kind, field in ((nodes.TemplateData, "data"), (nodes.Const, "value"))
            for found in node.find_all(kind)
            for data in [getattr(found, field)]
        )
        self.generic_visit(node)
        node.iter = _filtered(cast("nodes.Expr", node.iter), "_loop", nodes.Const(weight))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        for operand in node.ops:
            both_vary = not isinstance(node.expr, nodes.Const) and not isinstance(operand.expr, nodes.Const)
            if operand.op in ("in", "notin") or both_vary:
                operand.expr = _filtered(operand.expr, "_measure")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [_filtered(part, "_measure") for part in node.nodes]
        return node


def _filtered(value: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)
