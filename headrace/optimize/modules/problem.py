"""A user's module as the judge's Problem: the module itself in float64 is the reference, as given the stock.

The reference runs in the module's own process (host.py). Shapes are those of get_inputs(); what is hidden are
contents and weights: parameters are drawn anew around the module's own, constants of it stay.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.core.packs import KernelEntry
from headrace.kernels.native.signature import Signature
from headrace.optimize.judge import contents
from headrace.optimize.judge.problem import Case, Tensors, TensorSpec
from headrace.optimize.modules.bound import bind, find, signature_of
from headrace.optimize.modules.host import ModuleHost, set_weights
from headrace.optimize.modules.source import OpenModule, open_module
from headrace.optimize.modules.trace import GIVEN, rows_of, run
from headrace.optimize.records import ModuleSlot, Target

_POOL = 1 << 21


class ModuleProblem:
    """``host`` None: a process of its own is started when it is needed, and ended by ``close``."""

    layers = 1

    def __init__(self, target: Target, entry: KernelEntry, host: ModuleHost | None = None) -> None:
        assert target.call is not None
        self.target, self.entry, self.call = target, entry, target.call
        self._shared = host
        self._own: ModuleHost | None = None
        self._opened: OpenModule | None = None

    def __getstate__(self) -> dict[str, Any]:
        """For the baseline's process, which opens the file itself."""
        return {"target": self.target, "entry": self.entry}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def close(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    @cached_property
    def signature(self) -> Signature:
        return signature_of(self.call)

    def weights(self) -> list[TensorSpec]:
        return [_spec(slot) for slot in self.call.slots if slot.role == "weight"]

    def verify_cases(self, seed: int) -> list[Case]:
        pick = random.Random(seed)
        return [self._case(content, pick.getrandbits(48)) for content in self.call.contents]

    def timed_cases(self, seed: int) -> list[Case]:
        return [self._case(GIVEN, seed)]

    def fill_weights(self, weights: Tensors, seed: int) -> None:
        varied = {slot.name for slot in self.call.slots if slot.varies}
        for place, (slot, tensor) in enumerate(weights.items()):
            tensor.copy_(self._state[slot])
            if slot in varied:
                _vary(tensor, seed + place)

    def fill(self, case: Case, tensors: Tensors, content: str, seed: int) -> None:
        """``content`` beside the call's own kinds: as get_inputs() draws it."""
        inputs = {slot: tensors[slot] for slot in case.slots("input") if slot in tensors}
        drawn = content in self.call.contents and content != GIVEN
        if not drawn or not all(each.is_floating_point() for each in inputs.values()):
            for slot, tensor in self._host.inputs(seed & 0xFFFFFFFF).items():
                inputs[slot].copy_(tensor)
        if not drawn:
            return
        for place, tensor in enumerate(inputs.values()):
            if not tensor.is_floating_point():
                continue
            if content == "normal":
                _fill_normal(tensor, seed + place)
            else:
                contents.fill_activation(rows_of(tensor), content, seed + place)

    def nudge(self, case: Case, tensors: Tensors, seed: int) -> None:
        if "large" not in self.call.contents:  # its inputs are not free: all anew instead
            self.fill(case, tensors, GIVEN, seed)
            return
        for slot in case.slots("input"):
            if tensors[slot].is_floating_point():
                contents.nudge_rows(rows_of(tensors[slot]), seed)

    def nudge_weights(self, weights: Tensors, seed: int) -> bool:
        return False  # a module's parameters may be bound to each other

    def reference(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        return self._run(case, weights, tensors, wide=True)

    def stock(self, case: Case, weights: Tensors, tensors: Tensors) -> Tensors:
        return self._run(case, weights, tensors, wide=False)

    def prepare(
        self, case: Case, weights: Tensors, tensors: Tensors, pack: str
    ) -> Callable[[], list[Tensor]]:
        """The module with these weights, as its user calls it; with ``pack`` the kernel of that folder."""
        if self._opened is None:
            self._opened = open_module(self.target.module, digest=self.call.digest)
        module = copy.deepcopy(self._opened.module)
        set_weights(module, self.call, weights, copy=False)
        arguments = [tensors[each] if isinstance(each, str) else each[0] for each in self.call.arguments]
        if pack:
            module = bind(find(Path(pack)), module)
        return lambda: run(module, arguments)

    def _run(self, case: Case, weights: Tensors, tensors: Tensors, *, wide: bool) -> Tensors:
        given = weights | {slot: tensors[slot] for slot in case.slots("input")}
        return self._host.run(given, wide=wide)

    @property
    def _host(self) -> ModuleHost:
        if self._shared is not None:
            return self._shared
        if self._own is None:
            self._own = ModuleHost(self.target.module, digest=self.call.digest)
        return self._own

    @cached_property
    def _state(self) -> Tensors:
        return self._host.state()

    def _case(self, content: str, seed: int) -> Case:
        specs = [_spec(slot) for slot in self.call.slots if slot.role != "weight"]
        return Case(self.target.shapes[0], tuple(specs), content=content, seed=seed)


def _spec(slot: ModuleSlot) -> TensorSpec:
    return TensorSpec(slot.name, slot.role, getattr(torch, slot.dtype), tuple(slot.shape))


def _vary(tensor: Tensor, seed: int) -> None:
    """Other parameters of the same kind: signs of what is positive stay, zeros become small numbers."""
    random_numbers = contents.generator(seed)
    wide = tensor.float()
    factor = torch.exp(0.3 * torch.randn(tensor.shape, generator=random_numbers))
    noise = torch.randn(tensor.shape, generator=random_numbers)
    if not bool(wide.any()):
        tensor.copy_(0.1 * noise)
    elif bool((wide > 0).all()):
        tensor.copy_(wide * factor)
    else:
        spread = float(wide.std()) if wide.numel() > 1 else 0.1
        tensor.copy_(wide * factor + 0.3 * spread * noise)


def _fill_normal(tensor: Tensor, seed: int) -> None:
    """Gaussian, cut from one pool at places that the seed chooses: the ring is filled for every pass."""
    pool = _normal_pool()
    picked = random.Random(seed)
    flat, done = tensor.view(-1), 0
    while done < tensor.numel():
        start = picked.randrange(_POOL // 2)
        part = pool[start : start + tensor.numel() - done]
        flat[done : done + len(part)] = part * picked.choice((-1.0, 1.0))
        done += len(part)


@lru_cache
def _normal_pool() -> Tensor:
    return torch.randn(_POOL, generator=contents.generator(0))
