"""An event loop whose time is computed instead of waited for.

Whenever nothing can be read or written and only timers are left, the clock jumps to the next one. Sockets
between tasks of the loop are real, so code that runs here is the code that runs in production; hours of
traffic take as long as the computing for them. Work in threads takes no virtual time: the clock stands
still until it is done.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class DeadlockError(RuntimeError):
    """Every task waits, and neither a timer nor a thread will ever wake one."""


class _JumpingSelector(selectors.BaseSelector):
    """Waits for real only while threads work; otherwise adds the timeout to ``now``."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_threads_busy = 0
        self._real = selectors.DefaultSelector()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = self._real.select(0)
        if ready or timeout == 0:
            return ready
        if self.num_threads_busy:
            return self._real.select(None)
        if timeout is None:
            raise DeadlockError("nothing is scheduled and nothing can be read: all tasks wait for ever")
        self.now += max(0.0, timeout)
        return ready

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._real.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        return self._real.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        return self._real.get_map()

    def close(self) -> None:
        self._real.close()


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is seconds since the loop was made, by the virtual clock."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._jumping.num_threads_busy += 1
        future.add_done_callback(self._thread_done)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        self._jumping.num_threads_busy += 1  # a thread of its own waits for the others
        try:
            await super().shutdown_default_executor()
        finally:
            self._jumping.num_threads_busy -= 1

    def _thread_done(self, _: asyncio.Future[Any]) -> None:
        self._jumping.num_threads_busy -= 1


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``, on a virtual clock that begins at 0."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
