"""Fewest requests in flight for its size; the one not chosen for longest among equals."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.router.policies.base import Choice, ReplicaView, RouteView


class LeastLoad:
    name = "least_load"

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice:
        loads = [view.num_in_flight / view.max_in_flight for view in candidates]
        index = min(range(len(candidates)), key=lambda i: (loads[i], candidates[i].last_turn))
        return Choice(index, "fewest in flight", loads)
