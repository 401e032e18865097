"""A module whose forward calls a kernel, and the module itself for every other call."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from headrace.core.errors import PackError
from headrace.core.packs import KernelEntry
from headrace.kernels.native.abi import DONE, NOT_MINE, Call
from headrace.kernels.native.build import compile_kernel
from headrace.kernels.native.build_cache import default_build_folder
from headrace.kernels.native.library import NativeKernel
from headrace.kernels.native.signature import Signature, Slot
from headrace.optimize.digest import ENTRY_FILE
from headrace.optimize.modules.source import state
from headrace.optimize.packing import MANIFEST
from headrace.optimize.records import ModuleCall, ModuleSlot, Target

OP = "module"


def signature_of(call: ModuleCall) -> Signature:
    """Slots in the module's order; it has no ints and floats."""
    return Signature(OP, tuple(Slot(slot.name, slot.role) for slot in call.slots))


class KernelModule(nn.Module):
    """``module`` with its forward computed by a kernel, for calls like those that the kernel was judged on.

    Any other (shapes, dtypes, strides, keyword arguments, gradients wanted, training) goes to ``module``.
    Weights may be changed in place or loaded anew: they are packed again at the next call. Not to be called
    from two threads at once.
    """

    def __init__(self, module: nn.Module, kernel: NativeKernel, call: ModuleCall) -> None:
        super().__init__()
        self.module = module
        self.calls = 0
        """How many calls the kernel has computed."""
        self._kernel, self._layout = kernel, call
        self._native = Call(signature_of(call))
        self._inputs = [slot for slot in call.slots if slot.role == "input"]
        self._outputs = [slot for slot in call.slots if slot.role == "output"]
        self._weights = [slot for slot in call.slots if slot.role == "weight"]
        self._words = {slot.name: self._native.tensor_word(slot.name) for slot in call.slots}
        self._expected = [_kind(each, self._inputs) for each in call.arguments]
        self._held: list[Tensor] = []
        self._seen: list[tuple[int, int]] = []
        self._places: list[tuple[dict[str, Any], str, object]] = []
        self._packed: mmap.mmap | None = None
        for slot in (*self._inputs, *self._outputs):
            self._native.set_tensor(slot.name, torch.empty(slot.shape, dtype=getattr(torch, slot.dtype)))
        self._bind_weights()

    def forward(self, *arguments: Any, **named: Any) -> Any:
        if named or self.training or not self._covers(arguments):
            return self.module(*arguments, **named)
        if self._weights_changed() and not self._bind_weights():
            return self.module(*arguments)
        words = self._native.words
        for each, kind in zip(arguments, self._expected, strict=True):
            if kind[0] is not None:
                words[self._words[kind[0]]] = each.data_ptr()
        outputs = []
        for slot in self._outputs:
            output = torch.empty(slot.shape, dtype=getattr(torch, slot.dtype))
            words[self._words[slot.name]] = output.data_ptr()
            outputs.append(output)
        self._native.set_threads(torch.get_num_threads())
        code = self._kernel.run(self._native.address)
        if code == NOT_MINE:
            return self.module(*arguments)
        if code != DONE:
            raise PackError(f"the kernel {self._kernel.library.name} failed with code {code}")
        self.calls += 1
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _covers(self, arguments: tuple[Any, ...]) -> bool:
        if len(arguments) != len(self._expected):
            return False
        wants_gradients = torch.is_grad_enabled()
        if wants_gradients and any(each.requires_grad for each in self._held):
            return False
        for each, (name, value) in zip(arguments, self._expected, strict=True):
            if name is None:
                if type(each) is not type(value[0]) or each != value[0]:
                    return False
            elif (
                not isinstance(each, Tensor)
                or each.dtype != value[0]
                or each.shape != value[1]
                or not each.is_contiguous()
                or each.device.type != "cpu"
                or (wants_gradients and each.requires_grad)
            ):
                return False
        return True

    def _weights_changed(self) -> bool:
        if any(_mark(each) != seen for each, seen in zip(self._held, self._seen, strict=True)):
            return True
        return any(place.get(name) is not each for place, name, each in self._places)

    def _bind_weights(self) -> bool:
        """Packs the module's weights as they are; False where they are not what the kernel was made for."""
        held = state(self.module)
        self._places = [
            (place, name, each)
            for part in self.module.modules()
            for place in (part._parameters, part._buffers, part._modules)
            for name, each in place.items()
        ]
        self._held = [held[slot.source] for slot in self._weights if slot.source in held]
        if len(self._held) != len(self._weights) or not all(
            _fits(slot, each) for slot, each in zip(self._weights, self._held, strict=True)
        ):
            self._seen = [(-1, -1)] * len(self._held)
            return False
        self._seen = [_mark(each) for each in self._held]
        kernel, native = self._kernel, self._native
        for slot, each in zip(self._weights, self._held, strict=True):
            native.set_tensor(slot.name, each.detach())
        if kernel.pack is None or kernel.packed_bytes is None:
            return True
        size = kernel.packed_bytes(native.address)
        if size < 0:
            return False
        self._packed = mmap.mmap(-1, max(size, mmap.PAGESIZE))
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._packed.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._packed))
        native.set_packed(0)
        if kernel.pack(native.address, address) != DONE:
            return False
        native.set_packed(address)
        for slot in self._weights:
            native.set_tensor(slot.name, None)
        return True


@dataclass(frozen=True)
class Found:
    """A kernel on disk: the folder of its sources, and what it says of itself."""

    folder: Path
    entry: KernelEntry
    call: ModuleCall


def find(folder: Path) -> Found:
    """The kernel in a candidate's folder, or the one in a pack. Nothing is checked. Raises PackError."""
    target = folder / "target.json"
    try:
        if (folder / MANIFEST).exists():
            (place,) = (path.name for path in (folder / "kernels").iterdir())
            folder, target = folder / "kernels" / place, folder / "evidence" / place / "target.json"
        entry = msgspec.json.decode((folder / ENTRY_FILE).read_bytes(), type=KernelEntry)
        call = msgspec.json.decode(target.read_bytes(), type=Target).call
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise PackError(f"{folder} holds no kernel of a module: {error}") from None
    if call is None:
        raise PackError(
            f"{folder} holds a kernel for a model's {entry.op}", hint="`headrace serve --pack` loads it"
        )
    return Found(folder, entry, call)


def bind(found: Found, module: nn.Module) -> KernelModule:
    """``module`` with this kernel, compiled. Raises PackError and its children."""
    library = compile_kernel(found.folder / found.entry.source, found.entry.flags, default_build_folder())
    bound = KernelModule(module, NativeKernel(library), found.call)
    bound.train(module.training)
    return bound


def mismatch(module: nn.Module, call: ModuleCall) -> str:
    """Why ``call``'s kernel is not for ``module``; empty: names, shapes and dtypes of its weights agree."""
    held = state(module)
    wanted = {slot.source: slot for slot in call.slots if slot.role == "weight"}
    for name in sorted(set(held) ^ set(wanted)):
        if name in held:
            return f"the module has {name}, the judged one had not"
        return f"the module lacks {name}"
    for name, slot in wanted.items():
        if not _fits(slot, held[name]):
            found = f"{str(held[name].dtype).removeprefix('torch.')} {tuple(held[name].shape)}"
            return f"{name} is {found}, was {slot.dtype} {tuple(slot.shape)}"
    return ""


def _kind(argument: Any, inputs: list[ModuleSlot]) -> tuple[str | None, tuple[Any, ...]]:
    if not isinstance(argument, str):
        return None, (argument[0],)
    slot = next(each for each in inputs if each.name == argument)
    return argument, (getattr(torch, slot.dtype), torch.Size(slot.shape))


def _fits(slot: ModuleSlot, tensor: Tensor) -> bool:
    same = list(tensor.shape) == slot.shape and tensor.dtype == getattr(torch, slot.dtype)
    return same and tensor.is_contiguous() and tensor.device.type == "cpu"


def _mark(tensor: Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version
