"""How a process of ours begins: it reads its spec, claims its socket, and says how its start goes.

See ``core.launch`` for what passes; ``python -m headrace.replica``, ``.router`` and ``.gateway`` begin so.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.core.errors import HeadraceError, UsageError
from headrace.core.launch import StartEvent

_PROGRESS_INTERVAL_S = 0.1
_GC_THRESHOLDS = (50_000, 20, 20)

Spec = TypeVar("Spec")


class StartReporter:
    """Writes stages to what was standard output; anything else that prints goes to standard error."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._last = 0.0

    def loading(self, done: int, total: int) -> None:
        """Bytes of weights; not more often than one can look."""
        now = time.monotonic()
        if done >= total or now - self._last >= _PROGRESS_INTERVAL_S:
            self._last = now
            self._write(StartEvent("loading", done=done, total=total))

    def ready(self) -> None:
        """The last word."""
        self._write(StartEvent("ready"))
        os.close(self._fd)

    def error(self, error: HeadraceError) -> None:
        self._write(StartEvent.of_error(error))

    def _write(self, event: StartEvent) -> None:
        try:
            os.write(self._fd, msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            raise SystemExit(1) from None  # the parent is gone: to go on would be for nobody


def read_spec(kind: type[Spec], fd: int = 0) -> Spec:
    """The first line of ``fd``, read without taking more than it has. Raises UsageError."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"standard input must hold one JSON line, a {kind.__name__}: {error}",
            hint="these processes are started by `headrace serve`",
        ) from error


def bind_unix(path: Path) -> socket.socket:
    """A Unix socket bound to ``path`` in a directory only its owner may enter; not listening yet. A stale one
    is replaced. Raises UsageError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    try:
        sock.bind(str(path))
    except OSError as error:
        sock.close()
        raise UsageError(f"cannot listen on {path}: {error}", hint="use a shorter, writable path") from error
    path.chmod(0o600)
    return sock


def spare_the_loaded() -> None:
    """Keeps the garbage collector away from what lives as long as the process, and lets it look less often.

    Requests leave few cycles behind; looking for them after every 700 allocations costs a gateway 5 % of
    its time. Call it once everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


@contextlib.contextmanager
def until_orphaned() -> Iterator[asyncio.Event]:
    """An event that is set when standard input ends: whoever started this process is gone."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_input() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            stop.set()

    loop.add_reader(0, on_input)
    try:
        yield stop
    finally:
        loop.remove_reader(0)
