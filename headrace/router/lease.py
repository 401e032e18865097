"""A placement from the moment it is given until its release."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.core.routing import Placement, Route
from headrace.router.decisions import Entry

if TYPE_CHECKING:
    from headrace.router.registry import Replica


class OpenLease:
    """A placement that has not been released. ``replica`` is None once its process is gone; ``half``: what
    another one computes of it (``router.pairs``)."""

    __slots__ = ("alone", "began", "claimed", "delayed", "entry", "half", "keys", "num_fetched_tokens",
                 "num_samples", "num_uncached_tokens", "placed_at", "placement", "prefill_s", "replica",
                 "route")  # fmt: skip

    def __init__(
        self,
        route: Route,
        placement: Placement,
        replica: Replica | None,
        *,
        placed_at: float,
        num_uncached_tokens: int,
        keys: Sequence[int] = (),
        claimed: Sequence[int] = (),
        entry: Entry | None = None,
    ) -> None:
        self.route = route
        self.placement = placement
        self.replica = replica
        self.placed_at = placed_at
        self.prefill_s = 0.0  # the predicted time to compute it where it is
        self.num_samples = route.num_samples
        self.num_uncached_tokens = num_uncached_tokens
        self.keys = keys
        self.claimed = claimed
        self.entry = entry
        self.half: OpenLease | None = None
        self.num_fetched_tokens = 0
        self.began = False
        self.alone = False  # nothing was ahead of it when it was placed
        self.delayed = False  # it may have waited, or begun before: its time says nothing of the rate
