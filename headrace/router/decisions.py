"""The last placements and how they were decided, for ``headrace why``.

Written with every placement, read rarely: an entry keeps what the policy saw as plain tuples, and becomes a
``Decision`` only when somebody asks.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from headrace.core.messages import Timing
from headrace.core.routing import Candidate, Decision, Outcome, Route

DEFAULT_SIZE = 4096


class Seen(NamedTuple):
    """One candidate, as ``core.routing.Candidate``."""

    replica_id: str
    score: float
    ttft_s: float
    num_cached_tokens: int
    num_queued_tokens: int
    num_in_flight: int
    num_running: int
    kv_cache_usage: float
    num_disk_tokens: int = 0
    num_fetched_tokens: int = 0
    fill_s: float = 0.0


class Entry:
    """One placement of one request."""

    __slots__ = ("at", "candidates", "chosen", "excluded", "num_cached_tokens", "outcome", "policy",
                 "prefill_replica", "queue_s", "reason", "route", "split", "timing", "ttft_s")  # fmt: skip

    def __init__(
        self,
        route: Route,
        at: float,
        policy: str,
        candidates: list[Seen],
        excluded: list[tuple[str, str]],
        chosen: str,
        reason: str,
        queue_s: float,
    ) -> None:
        self.route = route
        self.at = at
        self.policy = policy
        self.candidates = candidates
        self.excluded = excluded
        self.chosen = chosen
        self.reason = reason
        self.queue_s = queue_s
        self.ttft_s: float | None = None
        self.num_cached_tokens: int | None = None
        self.outcome: Outcome | None = None
        self.prefill_replica = ""
        self.split = ""
        self.timing: Timing | None = None

    def decision(self) -> Decision:
        route = self.route
        candidates = [
            Candidate(
                replica_id=seen.replica_id,
                score=seen.score,
                ttft_s=seen.ttft_s,
                num_cached_tokens=seen.num_cached_tokens,
                num_disk_tokens=seen.num_disk_tokens,
                num_fetched_tokens=seen.num_fetched_tokens,
                fill_s=seen.fill_s,
                num_queued_tokens=seen.num_queued_tokens,
                num_in_flight=seen.num_in_flight,
                num_running=seen.num_running,
                kv_cache_usage=seen.kv_cache_usage,
            )
            for seen in self.candidates
        ]
        timing = self.timing
        candidates += [Candidate(replica_id=name, excluded=reason) for name, reason in self.excluded]
        return Decision(
            request_id=route.request_id,
            caller_id=route.caller_id,
            model=route.model,
            at=self.at,
            policy=self.policy,
            attempt=route.attempt,
            num_prompt_tokens=route.num_prompt_tokens,
            candidates=candidates,
            chosen=self.chosen,
            reason=self.reason,
            queue_s=self.queue_s,
            ttft_s=self.ttft_s,
            num_cached_tokens=self.num_cached_tokens,
            outcome=self.outcome,
            prefill_replica=self.prefill_replica,
            split=self.split,
            num_fetched_tokens=None if timing is None else timing.num_fetched_tokens,
            num_disk_tokens=None if timing is None else timing.num_disk_tokens,
            fill_s=None if timing is None else timing.fill_s,
        )


class Decisions:
    """The last ``size`` entries, found by the request's id or its caller's."""

    def __init__(self, size: int = DEFAULT_SIZE) -> None:
        assert size > 0, size
        self._size = size
        self._ring: deque[Entry] = deque()
        self._by_id: dict[str, list[Entry]] = {}

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, entry: Entry) -> None:
        ring = self._ring
        if len(ring) >= self._size:
            self._drop(ring.popleft())
        ring.append(entry)
        by_id, route = self._by_id, entry.route
        for name in {route.request_id, route.caller_id} if route.caller_id else (route.request_id,):
            known = by_id.get(name)
            if known is None:
                by_id[name] = [entry]
            else:
                known.append(entry)

    def latest(self, request_id: str) -> Entry | None:
        known = self._by_id.get(request_id)
        return known[-1] if known else None

    def find(self, request_id: str) -> list[Decision]:
        """All that is kept of a request, first attempt first; empty for an unknown one."""
        return [entry.decision() for entry in self._by_id.get(request_id, [])]

    def _drop(self, entry: Entry) -> None:
        route = entry.route
        for name in {route.request_id, route.caller_id} if route.caller_id else (route.request_id,):
            known = self._by_id[name]
            known.remove(entry)
            if not known:
                del self._by_id[name]
