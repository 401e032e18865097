"""A user's own module from its file: ``path.py:Class``, with KernelBench's conventions.

    class Model(torch.nn.Module)     any name
    def get_init_inputs()            optional: the constructor's arguments, as a list
    def get_inputs()                 forward's arguments, as a list: tensors and numbers

It runs the user's code, so it is only called in a process of its own (host.py, the judge's baseline).
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from headrace.core.errors import UnsupportedModelError, UsageError

Argument: TypeAlias = "Tensor | bool | int | float | None"

DTYPES = ("float32", "bfloat16", "int8", "uint8", "int32", "int64", "bool")
FLOATS = ("float32", "bfloat16")
MAX_DIMS = 6


@dataclass(frozen=True)
class OpenModule:
    """The module in evaluation mode, and what makes its arguments."""

    module: nn.Module
    get_inputs: Callable[[], Any]
    text: str
    digest: str

    def inputs(self, seed: int) -> list[Argument]:
        """forward's arguments, drawn from a seed. Raises UnsupportedModelError for what is neither."""
        torch.manual_seed(seed)
        found = self.get_inputs()
        if not isinstance(found, (list, tuple)):
            raise UsageError(f"get_inputs() gives a {type(found).__name__}", hint="have it return a list")
        for place, each in enumerate(found):
            if isinstance(each, Tensor):
                check_tensor(each, f"get_inputs()[{place}]")
            elif not isinstance(each, (bool, int, float, type(None))):
                raise UnsupportedModelError(
                    f"get_inputs()[{place}] is a {type(each).__name__}; arguments are tensors and numbers"
                )
        return list(found)


def is_module(name: str) -> bool:
    """Whether a model's name means a user's module: ``path.py:Class``."""
    path, _, cls = name.rpartition(":")
    return path.endswith(".py") and cls.isidentifier()


def absolute(name: str) -> str:
    """``path.py:Class`` with the whole path. Raises UsageError where there is no such file."""
    path, _, cls = name.rpartition(":")
    found = Path(path).expanduser().resolve()
    if not found.is_file():
        raise UsageError(f"there is no file {path}", hint="a module is named path.py:Class")
    return f"{found}:{cls}"


def open_module(name: str, *, digest: str = "") -> OpenModule:
    """Runs the file and makes the module. ``digest``: what the file's must be; empty: any.

    Raises UsageError for a file without the class or get_inputs(), UnsupportedModelError for a module that
    cannot be made or holds other dtypes than DTYPES.
    """
    path, _, cls = name.rpartition(":")
    try:
        body = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    found = hashlib.sha256(body).hexdigest()
    if digest and found != digest:
        raise UsageError(
            f"{path} has changed since the round began", hint="begin a new one: `headrace optimize … --fresh`"
        )
    file = _run(path, body)
    kind = getattr(file, cls, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        held = vars(file).items()
        there = [key for key, each in held if isinstance(each, type) and issubclass(each, nn.Module)]
        raise UsageError(
            f"{path} has no torch.nn.Module called {cls}", hint=f"it has {', '.join(there) or 'none at all'}"
        )
    get_inputs = getattr(file, "get_inputs", None)
    if not callable(get_inputs):
        raise UsageError(
            f"{path} has no function get_inputs()", hint="it returns a list of example arguments of forward"
        )
    torch.manual_seed(0)
    get_init = getattr(file, "get_init_inputs", list)
    try:
        module = kind(*get_init())
    except Exception as error:
        raise UnsupportedModelError(
            f"{cls} cannot be made: {_said(error)}",
            hint="get_init_inputs() returns its constructor's arguments",
        ) from error
    module.eval().requires_grad_(False)
    for each, tensor in state(module).items():
        check_tensor(tensor, each)
    return OpenModule(module, get_inputs, body.decode(errors="replace"), found)


def state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, shared ones once; without counters of training steps."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: each for name, each in named if not name.endswith("num_batches_tracked")}


def check_tensor(tensor: Tensor, what: str) -> None:
    """Raises UnsupportedModelError for a tensor that no kernel can be called with."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        kind = dtype if tensor.layout is torch.strided else f"{tensor.layout}"
        raise UnsupportedModelError(
            f"{what} is {kind} on {tensor.device}; kernels are written for CPU tensors of {', '.join(DTYPES)}"
        )
    if tensor.ndim > MAX_DIMS:
        raise UnsupportedModelError(f"{what} has {tensor.ndim} dimensions, the most is {MAX_DIMS}")


def parameter_names(module: nn.Module, count: int) -> list[str]:
    """Names of forward's first ``count`` parameters."""
    names = [
        name
        for name, each in inspect.signature(module.forward).parameters.items()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    return (names + [f"input{place}" for place in range(len(names), count)])[:count]


def _run(path: str, body: bytes) -> ModuleType:
    name = f"headrace_user_{hashlib.sha256(path.encode() + body).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    sys.modules[name] = file  # dataclasses and pickling look it up
    sys.path.insert(0, str(Path(path).parent))
    try:
        spec.loader.exec_module(file)
    except Exception as error:
        raise UsageError(f"{path} cannot be run: {_said(error)}") from error
    finally:
        sys.path.pop(0)
    return file


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
