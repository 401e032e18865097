"""Permits: how many requests may be inside at once."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.errors import InvalidRequestError, OverloadedError

MAX_RETRY_AFTER_S = 60
SMOOTHING = 0.1


class Admission:
    """Counts what is inside, running or queued; the next beyond the limit is refused at once.

    A sample is what a permit is for: a body takes as many as its prompts times ``n``.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = 0
        self.num_refused = 0
        self._mean_s = 0.0

    def check(self, prompts: int, n: int = 1) -> None:
        """Raises InvalidRequestError for one request that could never get its permits."""
        if prompts * n > self.limit:
            what = f"{prompts} prompts" if n == 1 else f"{prompts} prompts with n={n}, {prompts * n} samples"
            raise InvalidRequestError(
                f"the request holds {what}; at most {self.limit} are admitted at once",
                hint="Ask for less in one request, or raise --max-concurrent-requests.",
                param="prompt" if prompts > self.limit or n == 1 else "n",
            )

    def take(self, count: int = 1) -> None:
        """Takes ``count`` permits; OverloadedError (429) when fewer are free."""
        if self.in_use + count > self.limit:
            self.num_refused += 1
            raise OverloadedError(
                f"{self.in_use} requests are running or queued, at most {self.limit} are admitted",
                retry_after=self._retry_after(),
                hint="Try again later, or raise --max-concurrent-requests.",
            )
        self.in_use += count

    @contextmanager
    def more(self, count: int) -> Iterator[None]:
        """Holds ``count`` permits beside the one that a request takes at the door."""
        if not count:
            yield
            return
        self.take(count)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.give(count, time.perf_counter() - start)

    def give(self, count: int, seconds: float) -> None:
        """Gives permits back; ``seconds`` is how long they were held."""
        self.in_use -= count
        assert self.in_use >= 0
        self._mean_s += SMOOTHING * (seconds - self._mean_s)

    def _retry_after(self) -> int:
        """Seconds until a permit is likely free: what is inside leaves at its usual pace."""
        return max(1, min(MAX_RETRY_AFTER_S, math.ceil(self._mean_s / self.limit)))
