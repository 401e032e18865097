"""What a policy sees and says. It keeps no clock, does no IO, and never changes what it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class ReplicaView(Protocol):
    """One replica that may take the request now.

    ``num_in_flight`` and ``num_running`` count samples, ``max_in_flight`` how many run at once there.
    ``num_queued_tokens``: prompt tokens to compute of requests that were placed and have not begun to
    answer. ``pressure``: the share of its cache that was written anew lately. ``last_turn``: when it was
    chosen last, counted in placements.
    """

    @property
    def replica_id(self) -> str: ...
    @property
    def num_in_flight(self) -> int: ...
    @property
    def num_running(self) -> int: ...
    @property
    def max_in_flight(self) -> int: ...
    @property
    def num_queued_tokens(self) -> int: ...
    @property
    def pressure(self) -> float: ...
    @property
    def last_turn(self) -> int: ...
    @property
    def price_per_hour(self) -> float: ...

    def prefill_s(self, num_uncached_tokens: int, num_tokens: int) -> float: ...

    def predict_ttft(
        self, num_uncached_tokens: int, num_tokens: int, num_samples: int, now: float, fill_s: float = 0.0
    ) -> float: ...


class RouteView(NamedTuple):
    """The request. ``cached``: tokens of its prompt that each candidate has, in their order; also on disk.

    ``fetched``: tokens that another replica would compute for each, and ``fill_s`` how long it takes until
    those and what is on disk are in its memory; empty: none.
    ``num_users``: how many recent requests ended their match at the block where this one's best match
    ends, hence how many will want that prefix again; a conversation's own prefix has about one.
    ``home``: the replica that served its session last.
    """

    num_prompt_tokens: int
    num_samples: int
    cached: Sequence[int]
    num_users: float = 0.0
    home: str | None = None
    fetched: Sequence[int] = ()
    fill_s: Sequence[float] = ()


class Choice(NamedTuple):
    """Position of the chosen candidate and why; ``scores`` (lower is better) and ``ttfts`` in seconds, where
    the policy has any, are in the candidates' order."""

    position: int
    reason: str
    scores: Sequence[float] = ()
    ttfts: Sequence[float] = ()


class Policy(Protocol):
    """Chooses among at least one candidate: all are up, of the right model, and have room."""

    @property
    def name(self) -> str: ...

    def choose(self, route: RouteView, candidates: Sequence[ReplicaView], now: float) -> Choice: ...
