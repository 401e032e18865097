"""How a candidate fails: one exception that carries the verdict's reason."""

from __future__ import annotations

from headrace.core.errors import HeadraceError
from headrace.optimize.records import Reason


class Rejected(HeadraceError):
    """A candidate was found wanting; it becomes a Verdict and never leaves the judge."""

    default_code = "rejected"

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail
