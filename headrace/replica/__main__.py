"""``python -m headrace.replica``: one JSON line in, one JSON line out for each stage, then a socket."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
from pathlib import Path

import msgspec

from headrace.core.errors import EngineError, HeadraceError, UsageError
from headrace.core.launch import ReplicaSpec, StartEvent
from headrace.core.logs import set_up_logging
from headrace.replica.connections import bind

_PROGRESS_INTERVAL_S = 0.1


def main() -> int:
    """Returns the process's exit code."""
    report = _Reporter()
    line = _read_line(0)
    try:
        spec = _decode(line)
        set_up_logging(spec.logs)
        listener = bind(Path(spec.socket))
        # Only now, as it imports torch: mistakes above are reported at once.
        from headrace.engine.engine import Engine
        from headrace.replica.process import ReplicaProcess

        engine = Engine(
            spec.engine,
            Path(spec.folder),
            revision=spec.revision,
            share=spec.share,
            progress=report.loading,
        )
    except HeadraceError as error:
        report.error(error)
        return error.exit_code
    except Exception as error:
        logging.getLogger("headrace.replica").exception("loading failed")
        report.error(EngineError(f"loading failed: {type(error).__name__}: {error}"))
        return 1
    # What was loaded lives as long as the process: keep the garbage collector away from it.
    gc.collect()
    gc.freeze()
    process = ReplicaProcess(spec, engine, listener)
    process.listen()
    report.ready()
    process.run()
    return 0


class _Reporter:
    """Writes stages to what was standard output; anything else that prints goes to standard error."""

    def __init__(self) -> None:
        self._fd = os.dup(1)
        os.dup2(2, 1)
        self._last = 0.0

    def loading(self, done: int, total: int) -> None:
        now = time.monotonic()
        if done >= total or now - self._last >= _PROGRESS_INTERVAL_S:
            self._last = now
            self._write(StartEvent("loading", done=done, total=total))

    def ready(self) -> None:
        self._write(StartEvent("ready"))
        os.close(self._fd)

    def error(self, error: HeadraceError) -> None:
        self._write(StartEvent.of_error(error))

    def _write(self, event: StartEvent) -> None:
        try:
            os.write(self._fd, msgspec.json.encode(event) + b"\n")
        except BrokenPipeError:
            raise SystemExit(1) from None  # the parent is gone; loading on would be for nobody


def _decode(line: bytes) -> ReplicaSpec:
    try:
        return msgspec.json.decode(line, type=ReplicaSpec)
    except msgspec.DecodeError as error:
        raise UsageError(
            f"standard input must hold one JSON line that describes the replica: {error}"
        ) from error


def _read_line(fd: int) -> bytes:
    """The first line of ``fd``, read without taking more than it has."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(fd, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


if __name__ == "__main__":
    sys.exit(main())
