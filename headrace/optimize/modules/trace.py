"""What a user's module is called with and what it does: slots, and the operators that one call runs.

The operators are seen as the module calls them (``aten.linear``, ``aten.softmax``), before torch takes them
apart. A module whose call cannot be written down as a graph of them is no error: it has none.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.core.errors import UnsupportedModelError
from headrace.optimize.judge import contents
from headrace.optimize.judge.compare import error, same_bits
from headrace.optimize.judge.problem import CONTENTS
from headrace.optimize.modules.source import (
    FLOATS,
    Argument,
    OpenModule,
    check_tensor,
    parameter_names,
    state,
)
from headrace.optimize.records import GraphNode, ModuleCall, ModuleSlot

GIVEN = "given"
_NOISE = 0.1
_FLOOR, _WORSE = 2e-5, 5.0
"""A kind of content is used where the module's own error is below the one, or the other times the usual."""


def describe(opened: OpenModule) -> ModuleCall:
    """Raises UnsupportedModelError for a module that no kernel can replace: one that draws random numbers,
    changes its inputs or its own state, or cannot be computed in float64."""
    arguments = opened.inputs(0)
    slots, named = _slots(opened.module, arguments)
    before = [each.clone() for each in named.values()]
    outputs = run(opened.module, arguments)
    for (name, now), then in zip(named.items(), before, strict=True):
        if not same_bits(now, then):
            raise UnsupportedModelError(f"the module changes {name}; a kernel only writes its outputs")
    again = run(opened.module, arguments)
    if any(not same_bits(*pair) for pair in zip(outputs, again, strict=True)):
        raise UnsupportedModelError("two equal calls of the module give different results; a kernel must not")
    for place, output in enumerate(outputs):
        check_tensor(output, f"output {place}")
        name = "out" if len(outputs) == 1 else f"out{place}"
        slots.append(_slot(name, "output", output))
    graph, results = _graph(opened.module, arguments, named)
    return ModuleCall(
        slots=slots,
        arguments=_argument_names(slots, arguments),
        contents=_contents(opened, arguments),
        digest=opened.digest,
        graph=graph,
        results=results,
        source=opened.text,
    )


def run(module: nn.Module, arguments: Sequence[Argument]) -> list[Tensor]:
    """The outputs of one call. Raises UnsupportedModelError where it gives something else than tensors."""
    with torch.inference_mode():
        found = module(*arguments)
    outputs = list(found) if isinstance(found, (list, tuple)) else [found]
    if not outputs or not all(isinstance(each, Tensor) for each in outputs):
        raise UnsupportedModelError(f"the module gives a {type(found).__name__}; outputs are tensors")
    return [each.contiguous() for each in outputs]


def widened(module: nn.Module) -> nn.Module:
    """A copy in float64, tensors that are no parameters included."""
    wide = copy.deepcopy(module).double()
    for part in wide.modules():
        for name, each in list(vars(part).items()):
            if isinstance(each, Tensor) and each.is_floating_point():
                setattr(part, name, each.double())
    return wide


def run_wide(wide: nn.Module, arguments: Sequence[Argument]) -> list[Tensor]:
    """One call in float64. Raises UnsupportedModelError where the module insists on another dtype."""
    own = [each.double() if _is_float(each) else each for each in arguments]  # type: ignore[union-attr]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run(wide, own)
    except (RuntimeError, TypeError) as failure:
        said = " ".join(str(failure).split())[:300]
        raise UnsupportedModelError(f"the module cannot be computed in float64: {said}") from failure
    finally:
        torch.set_default_dtype(before)


def _is_float(each: object) -> bool:
    return isinstance(each, Tensor) and each.is_floating_point()


def _slots(module: nn.Module, arguments: Sequence[Argument]) -> tuple[list[ModuleSlot], dict[str, Tensor]]:
    slots, named = [], {}
    taken = {"out"}
    places = [place for place, each in enumerate(arguments) if isinstance(each, Tensor)]
    names = parameter_names(module, len(arguments))
    for place in places:
        tensor = arguments[place]
        assert isinstance(tensor, Tensor)
        name = _identifier(names[place], taken)
        slots.append(_slot(name, "input", tensor, source=str(place)))
        named[name] = tensor
    parameters = {id(each) for each in module.parameters()}
    for source, tensor in state(module).items():
        name = _identifier(source, taken)
        varies = tensor.is_floating_point() and (id(tensor) in parameters or "running_" in source)
        slots.append(_slot(name, "weight", tensor, source=source, varies=varies))
        named[name] = tensor
    if not any(slot.role == "input" and slot.dtype in FLOATS for slot in slots):
        raise UnsupportedModelError("get_inputs() holds no float32 or bfloat16 tensor")
    return slots, named


def _slot(name: str, role: Any, tensor: Tensor, *, source: str = "", varies: bool = True) -> ModuleSlot:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ModuleSlot(
        name=name, role=role, dtype=dtype, shape=list(tensor.shape), source=source, varies=varies
    )


def _identifier(text: str, taken: set[str]) -> str:
    stem = re.sub(r"\W", "_", text)
    name, number = stem, 1
    while name in taken:
        number += 1
        name = f"{stem}_{number}"
    taken.add(name)
    return name


def _argument_names(slots: Sequence[ModuleSlot], arguments: Sequence[Argument]) -> list[Any]:
    by_place = {slot.source: slot.name for slot in slots if slot.role == "input"}
    return [by_place.get(str(place), [each]) for place, each in enumerate(arguments)]


def _contents(opened: OpenModule, arguments: Sequence[Argument]) -> list[str]:
    """The kinds of content on which the module's own error says something of a kernel's: results are finite,
    and the module in its own dtype is nearly as close to float64 as on its own inputs."""
    wide, kept, usual = widened(opened.module), [], 0.0
    for kind in (GIVEN, *CONTENTS):
        draws = [_drawn(opened, arguments, kind, seed) for seed in range(3)]
        worst = max(_own_error(opened.module, wide, draw) for draw in draws)
        if kind == GIVEN:
            if worst > _NOISE:
                raise UnsupportedModelError(
                    "the module's results on get_inputs() are not finite, or no better than noise"
                )
            usual = worst
        if worst <= max(_WORSE * usual, _FLOOR):
            kept.append(kind)
    return kept


def _drawn(opened: OpenModule, arguments: Sequence[Argument], kind: str, seed: int) -> list[Any]:
    if kind == GIVEN:
        return opened.inputs(1 + seed)
    own: list[Any] = [each.clone() if isinstance(each, Tensor) else each for each in arguments]
    for place, each in enumerate(own):
        if _is_float(each):
            contents.fill_activation(rows_of(each), kind, 100 * seed + place)
    return own


def _own_error(module: nn.Module, wide: nn.Module, arguments: Sequence[Argument]) -> float:
    truth, found = run_wide(wide, arguments), run(module, arguments)
    if not all(bool(torch.isfinite(each).all()) for each in truth):
        return math.inf
    return max(error(*pair) for pair in zip(found, truth, strict=True))


def rows_of(tensor: Tensor) -> Tensor:
    """The same memory as rows, for filling."""
    return tensor.view(-1, tensor.shape[-1]) if tensor.ndim else tensor.view(1, 1)


class _Untraced(Exception):
    """The call is more than a graph of operators over its slots."""


def _graph(
    module: nn.Module, arguments: Sequence[Argument], named: dict[str, Tensor]
) -> tuple[list[GraphNode], list[str]]:
    recorder = _Recorder(named)
    try:
        with torch.inference_mode(), recorder:
            found = module(*arguments)
        outputs = found if isinstance(found, (list, tuple)) else [found]
        return recorder.nodes, [recorder.reference(each) for each in outputs]
    except _Untraced:
        return [], []


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, named: dict[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nodes: list[GraphNode] = []
        self._names = {id(tensor): name for name, tensor in named.items()}
        self._alive: list[Any] = [*named.values()]  # an id stays its tensor's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        written = [self._written(each) for each in args]
        named = {key: self._written(each) for key, each in (kwargs or {}).items()}
        found = func(*args, **(kwargs or {}))
        op, name = str(func), f"v{len(self.nodes)}_"
        if func._schema.is_mutable:
            op = self._in_place(op, args, found)
        first = found[0] if isinstance(found, (list, tuple)) else found
        if not isinstance(first, Tensor):
            raise _Untraced
        results = list(found) if isinstance(found, (list, tuple)) else [found]
        for place, each in enumerate(results):
            self._names[id(each)] = name if place == 0 else f"{name}.{place}"
        self._alive += results
        dtype = str(first.dtype).removeprefix("torch.")
        self.nodes.append(
            GraphNode(name=name, op=op, args=written, kwargs=named, shape=list(first.shape), dtype=dtype)
        )
        return found

    def reference(self, tensor: Tensor) -> str:
        if id(tensor) not in self._names:
            raise _Untraced
        return self._names[id(tensor)]

    def _in_place(self, op: str, args: Any, found: Any) -> str:
        """An operator that overwrites what only it sees is as good as one that does not."""
        target = args[0] if args else None
        if found is not target or not isinstance(target, Tensor):
            raise _Untraced
        storage = target.untyped_storage().data_ptr()
        others = [each for each in self._alive if each is not target and isinstance(each, Tensor)]
        if any(each.untyped_storage().data_ptr() == storage for each in others):
            raise _Untraced
        return re.sub(r"_\.", ".", op, count=1)

    def _written(self, each: Any) -> Any:
        if isinstance(each, Tensor):
            return "%" + self.reference(each)
        if isinstance(each, float) and not math.isfinite(each):
            return str(each)
        if isinstance(each, (bool, int, float, type(None))):
            return each
        if isinstance(each, (list, tuple)):
            return [self._written(one) for one in each]
        return str(each)
