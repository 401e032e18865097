"""A rate learned from what was done, the recent counting most."""

from __future__ import annotations

# Of what was seen earlier, so much is kept for each second of new work: half is forgotten in 7 s of it.
_KEEP_PER_SECOND = 0.9


class Rate:
    """Units a second, as the quotient of two sums that fade with the time spent on newer work.

    A mean of single rates would give a step of one token the weight of a step of a thousand.
    """

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0

    @property
    def value(self) -> float:
        """0 while nothing is known."""
        return self._amount / self._seconds if self._seconds else 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Books ``amount`` done in ``seconds``."""
        keep = _KEEP_PER_SECOND**seconds
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + seconds
