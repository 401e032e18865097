"""One after another, whatever they hold and do."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.router.policies.base import Choice, ReplicaView, RouteView


class RoundRobin:
    name = "round_robin"

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice:
        turns = [view.last_turn for view in candidates]
        return Choice(turns.index(min(turns)), "longest not chosen")
