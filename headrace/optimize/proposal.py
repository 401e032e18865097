"""What a proposer is asked and what it answers; the loop writes the answer into the candidate's folder."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from headrace.core.errors import HeadraceError
from headrace.core.packs import KernelEntry
from headrace.optimize.records import Candidate, Measurement, Target, Verdict


class CandidateSource(msgspec.Struct, frozen=True, kw_only=True):
    """``files`` maps paths in the candidate's folder to their text; ``entry.source`` is one of them.

    ``author`` is who wrote it, ``parameters`` what a search may change about it.
    """

    files: dict[str, str]
    entry: KernelEntry
    author: str
    note: str = ""
    parameters: dict[str, str] = {}


@dataclass(frozen=True)
class Trial:
    """A candidate of this round so far. ``folder`` holds its kernel.json and sources.

    No measurement: it was not right, or has not been timed.
    """

    candidate: Candidate
    folder: Path
    verdict: Verdict
    measurement: Measurement | None = None

    @property
    def speed(self) -> float:
        """How many times faster than the baseline it surely is, alone, at the target's first shape, which is
        the most frequent; 0 if unknown."""
        if self.measurement is None or not self.measurement.alone:
            return 0.0
        return next(iter(self.measurement.alone.values())).low


class ProposalError(HeadraceError):
    """No candidate came of it: the endpoint is down, the answer holds no code, the agent ran out of time.

    ``reply`` is what came instead, for the record.
    """

    default_code = "no_proposal"

    def __init__(self, message: str, *, hint: str | None = None, reply: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reply = reply


class Proposer(Protocol):
    """``author`` names it in records and packs."""

    @property
    def author(self) -> str: ...

    def propose(
        self, target: Target, best: Trial | None, history: Sequence[Trial], rng: random.Random
    ) -> CandidateSource | None:
        """The next candidate, None when it has nothing more to try. Raises ProposalError."""
        ...
