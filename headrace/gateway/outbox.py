"""One write for each stream and turn of the event loop, however many tokens the turn brought.

A write costs more than all the rest of a token's way. While the gateway keeps up, each step comes in a turn
of its own and goes out at its end; when it falls behind, several steps wait in the replicas' sockets, are
read together and go out together, so that it catches up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable


class Outbox:
    """Calls what was added once everything else of this turn is done."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._waiting: list[Callable[[], None]] = []

    def add(self, flush: Callable[[], None]) -> None:
        """``flush`` will be called soon, once."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(flush)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for flush in waiting:
            try:
                flush()
            except Exception:  # one stream's trouble must not keep the others waiting
                self._log.exception("a stream could not be written")
