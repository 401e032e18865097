"""How many threads a step gets while other processes want the cores too.

The threads of a step wait for each other several times a layer. Where one of them has to leave its core to
another process, for milliseconds, all of them wait: two threads beside one busy neighbour on two cores decode
at a tenth of their speed, one thread at two thirds of it. So a step gets as many threads as there are cores
that others leave free, and its bits do not depend on it where kernels promise that.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from headrace.core.machine import num_cores

INTERVAL_S = 0.2
PAUSE_S = 0.05
"""What was before a pause between steps of this length says nothing of the next: others may have worked
because this process did not."""
_TAKEN = 0.6
"""A core of which others use more than this share is theirs."""
_GIVEN_BACK = 0.35
"""It is free again when they use less than this."""
_STAT = "/proc/stat"


def busy_seconds() -> float | None:
    """Seconds that the cores this process may run on have worked since the system started, or were taken by
    the machine below it; None where the system does not tell."""
    names = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    ticks = 0
    try:
        with open(_STAT, encoding="ascii") as file:
            for line in file:
                if not line.startswith("cpu"):
                    break
                name, *fields = line.split()
                if name in names:
                    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, fields[:8])
                    ticks += user + nice + system + irq + softirq + steal
    except (OSError, ValueError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")


class FreeCores:
    """Looks again every ``INTERVAL_S``; ``most`` threads where nothing is known of other processes.

    ``busy`` gives the seconds that this process's cores have worked so far, for anyone, and None where the
    system does not tell; ``own`` those that this process has; ``clock`` the time.
    """

    def __init__(
        self,
        most: int,
        *,
        busy: Callable[[], float | None] = busy_seconds,
        own: Callable[[], float] = time.process_time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most = most
        self._busy = busy
        self._own = own
        self._clock = clock
        self._threads = most
        self._looked_at = self._ended_at = clock()
        self._others = self._others_so_far()

    def threads(self) -> int:
        """For the step that begins; 1 at least."""
        now = self._clock()
        paused, seconds = now - self._ended_at > PAUSE_S, now - self._looked_at
        if self._most == 1 or not (paused or seconds >= INTERVAL_S):
            return self._threads
        others, before = self._others_so_far(), self._others
        self._looked_at, self._others = now, others
        if paused or others is None or before is None:
            return self._threads
        free = num_cores() - (others - before) / seconds
        enough, left = math.floor(free + _GIVEN_BACK), math.floor(free + _TAKEN)
        self._threads = max(1, min(self._most, max(enough, min(left, self._threads))))
        return self._threads

    def step_ended(self) -> None:
        self._ended_at = self._clock()

    def _others_so_far(self) -> float | None:
        busy = self._busy()
        return None if busy is None else busy - self._own()
