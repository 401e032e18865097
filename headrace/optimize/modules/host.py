"""The child process that runs a user's file, so that nothing of it runs in ours.

    describe          ModuleCall
    time              seconds of one call
    inputs seed       get_inputs() drawn from a seed, by slot
    state             parameters and buffers, by slot
    run wide tensors  the module with these weights and inputs: its outputs, by slot

Messages are a length and a msgpack body, over a socket of their own: what the file prints is kept apart, and
its last words go into the error when the process ends.
"""

from __future__ import annotations

import contextlib
import math
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeAlias

import msgspec
import torch
from torch import Tensor, nn

from headrace.core.engine_environment import engine_environment
from headrace.core.errors import StartupError, UnsupportedModelError, UsageError
from headrace.optimize.modules.bound import bind, find
from headrace.optimize.modules.source import Argument, OpenModule, open_module, state
from headrace.optimize.modules.trace import describe, run, run_wide, widened
from headrace.optimize.records import ModuleCall, ModuleSlot

Tensors: TypeAlias = "dict[str, Tensor]"

TIMEOUT_S = 120.0
"""For opening the file, and for every question."""

_MAX_BYTES = 8 << 30
_LAST_WORDS = 2000
_ERRORS = {"usage": UsageError, "unsupported": UnsupportedModelError}


class _Wire(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data: bytes


class _Question(msgspec.Struct, frozen=True):
    kind: Literal["describe", "time", "inputs", "state", "run"]
    seed: int = 0
    wide: bool = False
    pack: str = ""
    tensors: dict[str, _Wire] = {}


class _Answer(msgspec.Struct, frozen=True):
    error: str = ""
    message: str = ""
    hint: str = ""
    call: ModuleCall | None = None
    seconds: float = 0.0
    tensors: dict[str, _Wire] = {}


class ModuleHost:
    """One user's module in a process of its own. A context manager.

    ``digest``: what the file's must be. Every method raises UsageError or UnsupportedModelError for what is
    wrong with the file, StartupError when it takes longer than ``timeout_s`` or the process ends.
    """

    def __init__(
        self, name: str, *, digest: str = "", threads: int = 0, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._name, self._timeout_s = name, timeout_s
        ours, theirs = socket.socketpair()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115  closed by ``close``
        command = [sys.executable, "-m", __name__, str(theirs.fileno()), name, digest, str(threads)]
        self._child = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._words,
            stderr=subprocess.STDOUT,
            env={**engine_environment(), "PYTHONPATH": ":".join(sys.path)},
        )
        theirs.close()
        self._line = ours

    def __enter__(self) -> ModuleHost:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._line.close()
        self._child.kill()
        self._child.wait()
        self._words.close()

    def describe(self) -> ModuleCall:
        call = self._ask(_Question("describe")).call
        assert call is not None
        return call

    def time(self, pack: Path | None = None) -> float:
        """Seconds of one call, the median; ``pack``: with the kernel in that folder."""
        return self._ask(_Question("time", pack="" if pack is None else str(pack))).seconds

    def inputs(self, seed: int) -> Tensors:
        return _unpacked(self._ask(_Question("inputs", seed=seed)).tensors)

    def state(self) -> Tensors:
        return _unpacked(self._ask(_Question("state")).tensors)

    def run(self, tensors: Mapping[str, Tensor], *, wide: bool) -> Tensors:
        """Outputs by slot; ``tensors`` are weights and inputs by slot. ``wide``: in float64."""
        return _unpacked(self._ask(_Question("run", wide=wide, tensors=_packed(tensors))).tensors)

    def _ask(self, question: _Question) -> _Answer:
        deadline = time.monotonic() + self._timeout_s
        try:
            self._line.settimeout(self._timeout_s)
            _send(self._line, msgspec.msgpack.encode(question))
            answer = msgspec.msgpack.decode(_receive(self._line, deadline), type=_Answer)
        except TimeoutError:
            raise StartupError(
                f"{self._name}: no answer to {question.kind!r} within {self._timeout_s:g} s",
                hint="does its file compute something at import, or take very large inputs?",
            ) from None
        except (OSError, EOFError, msgspec.MsgspecError) as error:
            raise StartupError(f"{self._name}: its process ended: {self._last_words() or error}") from None
        if answer.error:
            kind = _ERRORS.get(answer.error, StartupError)
            raise kind(f"{self._name}: {answer.message}", hint=answer.hint or None)
        return answer

    def _last_words(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(1.0)
        size = self._words.seek(0, 2)
        self._words.seek(max(0, size - _LAST_WORDS))
        lines = self._words.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self._child.returncode}"


class _Host:
    """In the child: the file's module and the answers of it."""

    def __init__(self, name: str, digest: str) -> None:
        self._name, self._digest = name, digest
        self._opened: OpenModule | None = None
        self._slots: list[ModuleSlot] = []
        self._wide: nn.Module | None = None
        self._call: ModuleCall | None = None

    def answer(self, question: _Question) -> _Answer:
        try:
            return self._answer(question)
        except UsageError as error:
            return _Answer("usage", error.message, error.hint or "")
        except UnsupportedModelError as error:
            return _Answer("unsupported", error.message, error.hint or "")
        except Exception as error:
            text = " ".join(str(error).split())[:500]
            return _Answer("unsupported", f"it fails: {type(error).__name__}: {text}")

    def _answer(self, question: _Question) -> _Answer:
        if self._opened is None:
            self._opened = open_module(self._name, digest=self._digest)
            self._call = describe(self._opened)
        opened, call = self._opened, self._call
        assert call is not None
        if question.kind == "describe":
            return _Answer(call=call)
        if question.kind == "time":
            module = bind(find(Path(question.pack)), opened.module) if question.pack else opened.module
            return _Answer(seconds=_seconds(module, opened.inputs(1)))
        if question.kind == "inputs":
            return _Answer(tensors=_packed(_given(opened, call, question.seed)))
        if question.kind == "state":
            held = state(opened.module)
            named = {slot.name: held[slot.source] for slot in call.slots if slot.role == "weight"}
            return _Answer(tensors=_packed(named))
        return _Answer(tensors=_packed(self._run(opened, call, _unpacked(question.tensors), question.wide)))

    def _run(self, opened: OpenModule, call: ModuleCall, tensors: Tensors, wide: bool) -> Tensors:
        if wide and self._wide is None:
            self._wide = widened(opened.module)
        module = self._wide if wide else opened.module
        assert module is not None
        set_weights(module, call, tensors, copy=True)
        arguments = [tensors[each] if isinstance(each, str) else each[0] for each in call.arguments]
        outputs = run_wide(module, arguments) if wide else run(module, arguments)
        names = [slot.name for slot in call.slots if slot.role == "output"]
        return dict(zip(names, outputs, strict=True))


def _given(opened: OpenModule, call: ModuleCall, seed: int) -> Tensors:
    """get_inputs() by slot. Raises UnsupportedModelError where it gives others than at first."""
    found, given = {}, opened.inputs(seed)
    for slot in (slot for slot in call.slots if slot.role == "input"):
        place = int(slot.source)
        each = given[place] if place < len(given) else None
        if not isinstance(each, Tensor) or list(each.shape) != slot.shape:
            raise UnsupportedModelError(
                f"get_inputs() gives {slot.name} in another shape each time; a kernel is written for one"
            )
        found[slot.name] = each
    return found


def set_weights(module: nn.Module, call: ModuleCall, tensors: Mapping[str, Tensor], *, copy: bool) -> None:
    """Puts ``tensors`` in place of parameters and buffers, as a copy in their dtype or as they are."""
    held = state(module)
    for slot in call.slots:
        if slot.role == "weight" and slot.name in tensors:
            if copy:
                with torch.no_grad():
                    held[slot.source].copy_(tensors[slot.name])
            else:
                held[slot.source].data = tensors[slot.name]


def _seconds(module: nn.Module, arguments: Sequence[Argument], budget_s: float = 0.5) -> float:
    times: list[float] = []
    until = time.monotonic() + budget_s
    while len(times) < 5 or (time.monotonic() < until and len(times) < 200):
        began = time.perf_counter()
        run(module, arguments)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _packed(tensors: Mapping[str, Tensor]) -> dict[str, _Wire]:
    found = {}
    for name, each in tensors.items():
        flat = each.detach().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(each.dtype).removeprefix("torch.")
        found[name] = _Wire(dtype, list(each.shape), flat.numpy().tobytes())
    return found


def _unpacked(tensors: Mapping[str, _Wire]) -> Tensors:
    found = {}
    for name, each in tensors.items():
        dtype: torch.dtype = getattr(torch, each.dtype)
        count = math.prod(each.shape)
        flat = torch.frombuffer(bytearray(each.data), dtype=dtype) if count else torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(each.shape)
    return found


def _send(line: socket.socket, body: bytes) -> None:
    line.sendall(struct.pack("=q", len(body)))
    line.sendall(body)


def _receive(line: socket.socket, deadline: float = math.inf) -> bytes:
    (size,) = struct.unpack("=q", _exactly(line, 8, deadline))
    if not 0 <= size <= _MAX_BYTES:
        raise EOFError("no message")
    return bytes(_exactly(line, size, deadline))


def _exactly(line: socket.socket, size: int, deadline: float) -> bytearray:
    data = bytearray()
    while len(data) < size:
        if deadline != math.inf:
            line.settimeout(max(1e-3, deadline - time.monotonic()))
        part = line.recv(min(1 << 20, size - len(data)))
        if not part:
            raise EOFError("the line was closed")
        data += part
    return data


def main(arguments: list[str]) -> None:
    line = socket.socket(fileno=int(arguments[0]))
    if int(arguments[3]):
        torch.set_num_threads(int(arguments[3]))
    host, decoder = _Host(arguments[1], arguments[2]), msgspec.msgpack.Decoder(_Question)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            answer: Any = host.answer(decoder.decode(_receive(line)))
            _send(line, msgspec.msgpack.encode(answer))


if __name__ == "__main__":
    main(sys.argv[1:])
