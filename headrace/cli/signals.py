"""SIGINT and SIGTERM, from the start of a server until its last process has ended."""

from __future__ import annotations

import asyncio
import signal
from types import TracebackType

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class Signals:
    """The first signal cancels the task that starts the server, or sets ``stop`` once it runs.

    The second sets ``hurry``: what still runs is then ended. A context manager, entered by that task.
    """

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.hurry = asyncio.Event()
        self._starting: asyncio.Task[object] | None = None

    def __enter__(self) -> Signals:
        self._starting = asyncio.current_task()
        loop = asyncio.get_running_loop()
        for number in NUMBERS:
            loop.add_signal_handler(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        loop = asyncio.get_running_loop()
        for number in NUMBERS:
            loop.remove_signal_handler(number)

    def started(self) -> None:
        """The server runs: from now on it stops rather than being cancelled."""
        self._starting = None

    def _on_signal(self) -> None:
        if self.stop.is_set():
            self.hurry.set()
        elif self._starting is not None:
            self._starting.cancel()
        self.stop.set()
