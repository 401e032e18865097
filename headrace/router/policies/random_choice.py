"""Any."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace.router.policies.base import Choice, ReplicaView, RouteView


class RandomChoice:
    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice:
        return Choice(self._random.randrange(len(candidates)), "drawn")
