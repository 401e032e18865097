"""How long steps take, by the number of rows that they compute."""

from __future__ import annotations

from collections import deque
from statistics import median

from headrace.core.messages import StepTime

# The latest of each number of rows; older ones had shorter contexts and other neighbours.
_KEEP = 128


class StepTimes:
    """Durations in seconds, since the last ``clear``."""

    def __init__(self) -> None:
        self.num_steps = 0
        self._latest: dict[int, deque[float]] = {}

    def add(self, rows: int, seconds: float) -> None:
        self.num_steps += 1
        latest = self._latest.get(rows)
        if latest is None:
            latest = self._latest[rows] = deque(maxlen=_KEEP)
        latest.append(seconds)

    def clear(self) -> None:
        self.num_steps = 0
        self._latest.clear()

    def medians(self) -> list[StepTime]:
        """Of each number of rows that occurred."""
        return [StepTime(rows, len(times), median(times)) for rows, times in sorted(self._latest.items())]
