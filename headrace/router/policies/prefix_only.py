"""Most of the prompt in its cache, whatever its load; without any match, the fewest in flight."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.router.policies.base import Choice, ReplicaView, RouteView


class PrefixOnly:
    name = "prefix_only"

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice:
        cached = route.cached
        index = min(
            range(len(candidates)),
            key=lambda i: (-cached[i], candidates[i].num_in_flight, candidates[i].last_turn),
        )
        scores = [float(route.num_prompt_tokens - count) for count in cached]
        return Choice(index, "longest prefix" if cached[index] else "no prefix; fewest in flight", scores)
