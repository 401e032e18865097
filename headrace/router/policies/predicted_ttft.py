"""The default: shortest predicted time to first token, with what the placement costs everybody else.

    new     = seconds to compute what no replica has cached of the prompt, at this one's learned rates
    missing = seconds that it would take the replica with most of it cached to compute what is missing here

    score = predicted TTFT                                        this request's wait
          + new · (LATER + STREAM · running)                      later prompts, and streams that run there
          + missing · (keep + STREAM · running)                   what is left behind
          + new · EVICTION · pressure / mean pressure             what it pushes out of that cache
          + CROWD · in flight / max in flight                     decoding in company

    1 + keep = (1 + KEEP / (1 + missing / KEEP_S)) / (1 + max(0, users − FEW))

``keep`` holds a conversation where its past is: leaving costs the next turns too, and two copies of one past
cost others theirs. It is bounded: nobody waits longer than KEEP · KEEP_S to keep a prefix, however long.
Where many others want the same prefix, its cost is divided among them, the wait for it included: a
replica that lacks it computes it once for all, so that a system prompt shared by everybody spreads over
the fleet. Affinity is given up only for a hot replica: each is scored alone, and the others keep what they
have.

A session's last replica is chosen instead of the best if its TTFT is at most NEAR longer and it has as much
cached, and a cheaper one if its score is at most NEAR of a TTFT behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.router.policies.base import Choice, ReplicaView, RouteView

LATER = 0.5
KEEP = 12.0
KEEP_S = 10.0
FEW = 2.0
STREAM = 0.02
EVICTION = 1.0
CROWD = 0.02
NEAR = 0.05


class PredictedTtft:
    name = "predicted_ttft"

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice:
        num_prompt_tokens, num_samples, cached, num_users, home = route
        most = max(cached)
        share = 1.0 / (1.0 + max(0.0, num_users - FEW))
        holder = candidates[cached.index(most)]
        known = holder.prefill_s(num_prompt_tokens - most, num_prompt_tokens)
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
            new = view.prefill_s(num_prompt_tokens - most, num_prompt_tokens)
            score = ttft + new * (LATER + STREAM * view.num_running)
            if tokens < most:
                missing = holder.prefill_s(num_prompt_tokens - tokens, num_prompt_tokens) - known
                keep = share * (1.0 + KEEP / (1.0 + missing / KEEP_S)) - 1.0
                score += missing * (keep + STREAM * view.num_running)
            score += new * eviction * view.pressure + CROWD * view.num_in_flight / view.max_in_flight
            scores.append(score)
            ttfts.append(ttft)
            if best < 0 or score < best_score or (score == best_score and view.last_turn < best_turn):
                best, best_score, best_turn = index, score, view.last_turn
        chosen, reason = best, "lowest score"
        longest = (1.0 + NEAR) * ttfts[best]
        if home is not None and candidates[best].replica_id != home:
            for index, view in enumerate(candidates):
                if view.replica_id == home and ttfts[index] <= longest and cached[index] >= cached[best]:
                    return Choice(index, "its session's replica, and no worse", scores, ttfts)
        price = candidates[best].price_per_hour
        if price > 0.0 and candidates[best].replica_id != home:
            limit = best_score + NEAR * ttfts[best]
            for index, view in enumerate(candidates):
                if scores[index] <= limit and view.price_per_hour < price:
                    chosen, price, reason = index, view.price_per_hour, "cheaper, and no worse"
        return Choice(chosen, reason, scores, ttfts)
