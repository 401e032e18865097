"""The default: shortest predicted time to first token, with what the placement costs everybody else.

    work  = seconds to compute what the replica has not cached of the prompt, at its learned rates
    score = predicted TTFT                                       this request's wait
          + work' · (QUEUE + STREAM · running)                   later prompts, and streams that run there
          + new · EVICTION · pressure / mean pressure            what it pushes out of that cache
          + CROWD · in flight / max in flight                    decoding in company

``new`` is the work that every replica would have. work' charges only a share of a popular prefix: where N
others want it too, a replica that lacks it computes it once for all of them, so that a system prompt
shared by everybody spreads over the fleet. A conversation's own prefix has no other users and stays dear.
Affinity is thus given up only for the hot replica: the others keep what they have, as each is scored alone.

Among those within NEAR of the best, the session's last replica goes first, then the cheapest.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.router.policies.base import Choice, ReplicaView, RouteView

QUEUE = 0.5
STREAM = 0.02
EVICTION = 0.5
CROWD = 0.02
NEAR = 0.05


class PredictedTtft:
    name = "predicted_ttft"

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice:
        num_prompt_tokens, num_samples, cached, num_users, home = route
        most = max(cached)
        share = 1.0 / (1.0 + num_users)  # this request's, of a prefix that others want too
        total = 0.0
        for view in candidates:
            total += view.pressure
        eviction = EVICTION * len(candidates) / total if total > 0.0 else 0.0
        scores: list[float] = []
        ttfts: list[float] = []
        best = -1
        best_score = best_turn = 0.0
        for index, view in enumerate(candidates):
            tokens = cached[index]
            ttft = view.predict_ttft(num_prompt_tokens - tokens, num_prompt_tokens, num_samples, now)
            new = work = view.prefill_s(num_prompt_tokens - most, num_prompt_tokens)
            if tokens < most:
                missing = view.prefill_s(num_prompt_tokens - tokens, num_prompt_tokens) - new
                work += missing * share
            score = (
                ttft
                + work * (QUEUE + STREAM * view.num_running)
                + new * eviction * view.pressure
                + CROWD * view.num_in_flight / view.max_in_flight
            )
            scores.append(score)
            ttfts.append(ttft)
            if best < 0 or score < best_score or (score == best_score and view.last_turn < best_turn):
                best, best_score, best_turn = index, score, view.last_turn
        chosen, reason = best, "lowest score"
        limit = best_score * (1.0 + NEAR)
        if home is not None and candidates[best].replica_id != home:
            for index, view in enumerate(candidates):
                if view.replica_id == home and scores[index] <= limit:
                    return Choice(index, "its session's replica, and no worse", scores, ttfts)
        price = candidates[best].price_per_hour
        if price > 0.0 and candidates[best].replica_id != home:
            for index, view in enumerate(candidates):
                if scores[index] <= limit and view.price_per_hour < price:
                    chosen, price, reason = index, view.price_per_hour, "cheaper, and no worse"
        return Choice(chosen, reason, scores, ttfts)
