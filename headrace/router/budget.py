"""How many retries a living fleet bears: a share of its requests, so that faults do not multiply load."""

from __future__ import annotations

MIN_RETRIES = 3.0  # saved up at most without any traffic
REFILL_PER_S = 0.1  # and earned by time alone
MAX_SAVED = 50.0


class RetryBudget:
    """A token bucket: every request pays in ``share``, every retry takes 1."""

    def __init__(self, share: float) -> None:
        assert 0.0 <= share <= 1.0, share
        self.share = share
        self._saved = MIN_RETRIES if share else 0.0
        self._at: float | None = None

    def on_request(self) -> None:
        if self._saved < MAX_SAVED:
            self._saved += self.share

    def take(self, now: float) -> bool:
        """Whether one retry is affordable now; takes it if so. ``now`` is monotonic, in seconds."""
        if self.share and self._at is not None and self._saved < MIN_RETRIES:
            earned = REFILL_PER_S * max(0.0, now - self._at)
            self._saved = min(MIN_RETRIES, self._saved + earned)
        self._at = now
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True
