"""The less loaded of two drawn at random (Mitzenmacher, "The power of two choices in randomized load
balancing", 2001)."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace.router.policies.base import Choice, ReplicaView, RouteView


class PowerOfTwo:
    name = "power_of_two"

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice:
        if len(candidates) == 1:
            return Choice(0, "the only one")
        first, second = self._random.sample(range(len(candidates)), 2)
        one, other = candidates[first], candidates[second]
        if one.num_in_flight / one.max_in_flight <= other.num_in_flight / other.max_in_flight:
            return Choice(first, f"fewer in flight than {other.replica_id}")
        return Choice(second, f"fewer in flight than {one.replica_id}")
