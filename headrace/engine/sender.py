"""Copies computed blocks out of the cache into streams, beside the step loop.

    engine's thread              sender's thread
    offer(blocks)  ────────────► read ─► stream.send, as far as there is room, a block of each stream in turn
    withdraw()     ────────────► nothing of it is read any more: the blocks may be freed
    wake ◄────────────────────── a stream has got all that was offered

Between two steps alone, a stream could be sent no more than a window a step, and steps of a prefill replica
are long. A full block is never written again while its sequence holds it, so it can be read meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from headrace.kvcache.connector import SendStream


class Outgoing:
    """One stream's blocks: ``num_sent`` is the index of the next one, of the chain, to be sent."""

    def __init__(self, stream: SendStream, first: int, now: float) -> None:
        self.stream = stream
        self.num_sent = first
        self.last_progress = now
        self.ready: deque[tuple[bytes, int]] = deque()  # (identity, block of the cache)


class Sender:
    """Sends what it is offered; on a thread of its own, or without one when ``pump`` is called."""

    def __init__(
        self,
        *,
        read: Callable[[Sequence[int]], list[bytearray]],
        wake: Callable[[], None],
        threaded: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``read`` copies blocks out of the cache, from any thread."""
        self.num_sent_blocks = 0
        self._read = read
        self._wake = wake
        self._threaded = threaded
        self._clock = clock
        self._outgoing: list[Outgoing] = []
        self._reading = threading.Lock()
        self._wanted = 0  # threads that wait for it: it is left to them
        self._news = threading.Event()
        self._thread: threading.Thread | None = None
        self._closing = False

    def offer(self, outgoing: Outgoing, blocks: Sequence[tuple[bytes, int]]) -> None:
        """Sends (identity, block) in order, once there is room; they stay as they are until ``withdraw``."""
        outgoing.ready.extend(blocks)
        if outgoing not in self._outgoing:
            self._outgoing.append(outgoing)
        if self._threaded and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="headrace-sender", daemon=True)
            self._thread.start()
        self._news.set()

    def withdraw(self, outgoing: Outgoing) -> None:
        """Sends no more of what was offered; when this returns, none of it is being read."""
        self._wanted += 1
        with self._reading:
            outgoing.ready.clear()
        self._wanted -= 1
        if outgoing in self._outgoing:
            self._outgoing.remove(outgoing)

    def notice(self) -> None:
        """A stream may have room again; from any thread."""
        self._news.set()

    def pump(self) -> None:
        """Sends all that there is room for; for who has no thread."""
        while [outgoing for outgoing in list(self._outgoing) if self._send_one(outgoing)]:
            pass

    def close(self) -> None:
        """Ends the thread."""
        self._closing = True
        self._news.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._news.wait()
            self._news.clear()
            self.pump()

    def _send_one(self, outgoing: Outgoing) -> bool:
        """Whether there was a block, and room for it."""
        while self._wanted:
            time.sleep(0.0002)
        with self._reading:
            if self._closing or not outgoing.ready or outgoing.stream.room() <= 0:
                return False
            block_id, block = outgoing.ready[0]
            (payload,) = self._read([block])
            outgoing.stream.send(outgoing.num_sent, block_id, payload)
            outgoing.ready.popleft()
            outgoing.num_sent += 1
            outgoing.last_progress = self._clock()
            self.num_sent_blocks += 1
            is_last = not outgoing.ready
        if is_last:
            self._wake()
        return True
