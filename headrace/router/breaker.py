"""Keeps requests away from a replica that answers and fails.

    closed ──► open        FAULTS in a row, or half of at least WINDOW_MIN requests within about WINDOW_S
    open ──► half-open     after a cool-down, which doubles with every time it was in vain
    half-open ──► closed   the one request on trial begins to answer; its next fault opens it again
    half-open ──► open     it fails

Only the replica's own faults count: what the caller did wrong or broke off says nothing of it.
"""

from __future__ import annotations

from math import exp

from headrace.core.routing import BreakerState

FAULTS = 5
WINDOW_S = 30.0
WINDOW_MIN = 10
WINDOW_SHARE = 0.5
COOL_DOWN_S = 1.0
MAX_COOL_DOWN_S = 60.0


class Breaker:
    """One replica's; ``blocked`` says whether nothing may be placed, and ``state`` why."""

    __slots__ = ("_cool_down_s", "_ended", "_faults", "_in_row", "_open_until", "_trial", "_window_at",
                 "blocked", "state")  # fmt: skip

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """As new: another process, or a new connection."""
        self.state: BreakerState = "closed"
        self.blocked = False
        self._in_row = 0
        self._faults = self._ended = 0.0  # within the window, fading
        self._window_at = 0.0
        self._cool_down_s = COOL_DOWN_S
        self._open_until = 0.0
        self._trial: str | None = None

    def allows(self, now: float) -> bool:
        """Whether a request may be placed; an open one becomes half-open when its time has come."""
        if self.state == "open" and now >= self._open_until:
            self.state = "half-open"
            self.blocked = False
        return not self.blocked

    def on_placed(self, request_id: str) -> None:
        """When half-open this is the one on trial, and nothing else is placed until it is heard of."""
        if self.state == "half-open":
            self._trial = request_id
            self.blocked = True

    def on_began(self, request_id: str) -> None:
        if request_id == self._trial:
            self.state = "closed"
            self.blocked = False
            self._trial = None
            self._in_row = FAULTS - 1
            self._faults = self._ended = 0.0

    def on_finished(self, request_id: str, now: float) -> None:
        self.on_began(request_id)
        self._fade(now)
        self._ended += 1
        self._in_row = 0
        if self.state == "closed":
            self._cool_down_s = COOL_DOWN_S

    def on_fault(self, request_id: str, now: float) -> None:
        self._fade(now)
        self._ended += 1
        self._faults += 1
        self._in_row += 1
        if self.state == "closed":
            often = self._ended >= WINDOW_MIN and self._faults >= WINDOW_SHARE * self._ended
            if self._in_row >= FAULTS or often:
                self._open(now)
        elif request_id == self._trial:
            self._open(now)

    def on_neutral(self, request_id: str) -> None:
        """A request ended in a way that says nothing; if it was on trial, another one may be."""
        if request_id == self._trial:
            self._trial = None
            self.blocked = False

    def _open(self, now: float) -> None:
        self.state = "open"
        self.blocked = True
        self._trial = None
        self._open_until = now + self._cool_down_s
        self._cool_down_s = min(2 * self._cool_down_s, MAX_COOL_DOWN_S)
        self._in_row = 0
        self._faults = self._ended = 0.0

    def _fade(self, now: float) -> None:
        kept = exp(-max(0.0, now - self._window_at) / WINDOW_S)
        self._faults *= kept
        self._ended *= kept
        self._window_at = now
