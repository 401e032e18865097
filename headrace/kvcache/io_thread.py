"""One thread that waits on sockets and does small things for other threads."""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

logger = logging.getLogger(__name__)

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE
TICK_S = 0.25


class IoThread:
    """Runs callbacks one at a time: of watched sockets (with READ, WRITE or both), posted ones in order, and
    ``tick`` every TICK_S seconds."""

    def __init__(self, name: str, tick: Callable[[], None]) -> None:
        self._tick = tick
        self._selector = selectors.DefaultSelector()
        self._posted: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._awake = False  # a byte is in the pipe
        self._stopping = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._selector.register(self._wake_read, READ, None)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], None]) -> bool:
        """Has ``call`` run soon on the thread; False, and never, once it stops. From any thread."""
        with self._lock:
            if self._stopping:
                return False
            self._post(call)
        return True

    def watch(self, sock: socket.socket, events: int, ready: Callable[[int], None]) -> None:
        """Calls ``ready`` with the events that hold; replaces an earlier watch. On the thread only."""
        try:
            self._selector.modify(sock, events, ready)
        except KeyError:
            self._selector.register(sock, events, ready)

    def unwatch(self, sock: socket.socket) -> None:
        """Before a socket is closed; on the thread only."""
        with contextlib.suppress(KeyError):
            self._selector.unregister(sock)

    def stop(self, last: Callable[[], None]) -> None:
        """Runs what was posted, then ``last``, and waits for the thread to end. From any other thread."""
        with self._lock:
            if not self._stopping:
                self._post(last)
                self._stopping = True
        self._thread.join()

    def _post(self, call: Callable[[], None]) -> None:
        self._posted.append(call)
        if not self._awake:
            self._awake = True
            os.write(self._wake_write, b"\0")

    def _run(self) -> None:
        while True:
            for key, events in self._selector.select(TICK_S):
                if key.data is None:
                    os.read(self._wake_read, 16)
                else:
                    self._call(partial(key.data, events))
            with self._lock:
                posted, self._posted = self._posted, deque()
                self._awake = False
                stopping = self._stopping
            for call in posted:
                self._call(call)
            if stopping:
                break
            self._call(self._tick)
        self._selector.close()
        os.close(self._wake_read)
        os.close(self._wake_write)

    @staticmethod
    def _call(call: Callable[[], None]) -> None:
        try:
            call()
        except Exception:
            logger.exception("moving blocks failed")
