"""What the commands print for people: on stderr, in colour only on a terminal that wants it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class Printer:
    """Start-up lines: plain text for people, log records where the log is JSON."""

    def __init__(self, *, as_log: bool = False) -> None:
        self._log = logging.getLogger("headrace") if as_log else None
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        if self._log is not None:
            self._log.info("%s", text)
        else:
            self.console.print(text, markup=False)

    def warning(self, text: str) -> None:
        if self._log is not None:
            self._log.warning("%s", text)
        else:
            self.console.print(f"warning: {text}", markup=False, style="yellow")

    @contextmanager
    def progress(self) -> Iterator[Callable[[str, int, int], None]]:
        """Yields ``update(what, done, total)``: one bar on a terminal, one line a stage elsewhere."""
        if not self.console.is_terminal or self._log is not None:
            yield self._stage_lines()
            return
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        with bar:
            task = bar.add_task("", total=None, visible=False)

            def update(what: str, done: int, total: int) -> None:
                bar.update(task, description=what, completed=done, total=total or None, visible=True)

            yield update

    def _stage_lines(self) -> Callable[[str, int, int], None]:
        seen: set[str] = set()

        def update(what: str, done: int, total: int) -> None:
            if what not in seen:
                seen.add(what)
                self.line(what)

        return update


def gib(num_bytes: float) -> str:
    """Bytes as GiB with a sensible number of digits."""
    value = num_bytes / 2**30
    return f"{value:.2f} GiB" if value < 10 else f"{value:.1f} GiB"
