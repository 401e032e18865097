"""Ends a selector's wait from another thread."""

from __future__ import annotations

import contextlib
import os


class Waker:
    """Register it with a selector for reading; ``wake`` may be called from any thread until ``close``.

    Many calls between two ``take`` are one byte in a pipe. Whatever was left for the sleeper before a
    ``wake`` is seen by a sleeper that looks after ``take``.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for descriptor in (self._read, self._write):
            os.set_blocking(descriptor, False)
        self._pending = False

    def fileno(self) -> int:
        return self._read

    def wake(self) -> None:
        if not self._pending:
            self._pending = True
            with contextlib.suppress(BlockingIOError):  # full: it will be read
                os.write(self._write, b"\0")

    def take(self) -> bool:
        """Whether anybody woke it since the last call."""
        try:
            os.read(self._read, 4096)
        except BlockingIOError:
            return False
        # Not before the read: a byte that comes in between would be lost, and none would follow it.
        self._pending = False
        return True

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)
