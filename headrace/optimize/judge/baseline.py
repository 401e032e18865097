"""The other side of a comparison: a trusted process that makes the same calls with the operators in use.

It sees the memory that the candidate's calls are laid out in, and keeps what it writes to itself. Pickles go
one way, from the judge to this child.

    python -m headrace.optimize.judge.baseline DESCRIPTOR      of a socket
"""

from __future__ import annotations

import contextlib
import pickle
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headrace.core.engine_environment import engine_environment
from headrace.core.errors import StartupError
from headrace.optimize.judge.layout import NONE, OUTPUTS, Layout, Memory, Place
from headrace.optimize.judge.problem import Case, Problem, Tensors

_COMMAND = struct.Struct("=2q")
_START_S = 120.0


@dataclass(frozen=True)
class _Task:
    """All that the child needs; ``pack`` is a folder, empty: stock operators."""

    problem: Problem
    cases: list[Case]
    weight_places: list[dict[str, Place]]
    call_places: list[dict[str, Place]]
    set_of: list[int]
    threads: int
    pack: str
    inputs: tuple[int, int]  # descriptor, size
    outputs: tuple[int, int]
    cpus: frozenset[int]


class Baseline:
    """The child, ready to run. A context manager."""

    def __init__(
        self,
        problem: Problem,
        layout: Layout,
        pack: str,
        cpus: frozenset[int],
        limits: Mapping[str, str] | None = None,
    ) -> None:
        """``limits``: environment that keeps torch's operators to a lesser CPU (lesser_cpu.py)."""
        self._line, theirs = socket.socketpair()
        inputs, outputs = layout.inputs, layout.outputs
        keep = (theirs.fileno(), inputs.descriptor, outputs.descriptor)
        command = [sys.executable, "-m", "headrace.optimize.judge.baseline", str(theirs.fileno())]
        self._child = subprocess.Popen(
            command,
            pass_fds=keep,
            env=_environment(layout.threads) | dict(limits or {}),
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # as the cage: Linux shares the cores among sessions
        )
        theirs.close()
        task = _Task(
            problem,
            layout.cases,
            layout.weight_places if layout.num_sets else [],
            layout.call_places,
            layout.set_of,
            layout.threads,
            pack,
            (inputs.descriptor, inputs.size),
            (outputs.descriptor, outputs.size),
            cpus,
        )
        body = pickle.dumps(task)
        self._line.settimeout(_START_S)
        try:
            self._line.sendall(struct.pack("=q", len(body)) + body)
        except OSError:
            self.close()
            raise StartupError(
                "the baseline's process ended before it started; its words are above"
            ) from None

    def __enter__(self) -> Baseline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._line.close()
        self._child.kill()
        self._child.wait()

    def wait_ready(self) -> None:
        """Weights are packed. Raises StartupError when the process has ended."""
        self._answer()

    def run(self, first: int, count: int) -> float:
        """Calls in order; seconds by the parent's clock."""
        began = time.perf_counter()
        self._line.sendall(_COMMAND.pack(first, count))
        self._answer()
        return time.perf_counter() - began

    def _answer(self) -> None:
        try:
            answer = self._line.recv(1)
        except OSError:
            answer = b""
        if not answer:
            raise StartupError("the baseline's process ended or hangs; its words are above")


def serve(descriptor: int) -> None:
    """In the child: makes the calls ready, then runs them on command."""
    line = socket.socket(fileno=descriptor)
    (size,) = struct.unpack("=q", _exactly(line, 8))
    task: _Task = pickle.loads(_exactly(line, size))
    torch.set_num_threads(task.threads)
    with torch.inference_mode():
        calls = _calls(task)
        calls[0]()
        line.sendall(b".")
        with contextlib.suppress(EOFError):
            while True:
                first, count = _COMMAND.unpack(_exactly(line, _COMMAND.size))
                for index in range(first, first + count):
                    calls[index]()
                line.sendall(b".")


def _calls(task: _Task) -> list[Callable[[], Any]]:
    inputs, outputs = (Memory.attach(*each) for each in (task.inputs, task.outputs))

    def tensors(places: dict[str, Place]) -> Tensors:
        found: Tensors = {}
        for slot, place in places.items():
            if place.region == NONE:
                found[slot] = torch.empty(place.spec.shape, dtype=place.spec.dtype)
            else:
                memory = outputs if place.region == OUTPUTS else inputs
                found[slot] = memory.tensor(place.spec, place.offset)
        return found

    weights = [tensors(places) for places in task.weight_places] or [{}]
    calls = []
    for case, places, index in zip(task.cases, task.call_places, task.set_of, strict=True):
        own = weights[index if task.weight_places else 0]
        calls.append(task.problem.prepare(case, own, tensors(places), task.pack))
    return calls


def _exactly(line: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = line.recv(min(1 << 20, size - len(data)))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _environment(threads: int) -> dict[str, str]:
    return {**engine_environment(), "OMP_NUM_THREADS": str(threads), "PYTHONPATH": ":".join(sys.path)}


def main(arguments: Sequence[str]) -> None:
    serve(int(arguments[0]))


if __name__ == "__main__":
    main(sys.argv[1:])
