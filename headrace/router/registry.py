"""The replicas as the router knows them: what they are, what runs there, and who may be chosen.

    endpoint set ──► starting ──up──► ready ◄──► draining (endpoint)      removed: nothing is kept
                                        │ ▲
                                     down │ up: the same instance keeps its blocks, another one starts empty
                                        ▼ │
                                       down

Sums over a replica's leases are kept up to date with every placement and release, so that choosing costs no
sum. ``unbegun`` holds the leases that wait for their first token, in order of placement: a replica computes
prompts one after another, so the first of them is being computed and the others queue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isclose

from headrace.core.messages import Stats
from headrace.core.routing import (
    Capabilities,
    Endpoint,
    Member,
    ModelInfo,
    ReplicaState,
    ReplicaStatus,
    Route,
)
from headrace.router.breaker import Breaker
from headrace.router.cache_feed import CacheFeed
from headrace.router.decisions import Seen
from headrace.router.disk_index import DiskFolder
from headrace.router.kv_traits import KvTraits, traits_of_server
from headrace.router.lease import OpenLease
from headrace.router.moves import MoveRates
from headrace.router.plan import Plan
from headrace.router.rates import ClassRates, Rates
from headrace.router.worker import is_ours

DEFAULT_MAX_IN_FLIGHT = 64
MIN_LOOKAHEAD = 2
LOOKAHEAD_SHARE = 4  # a quarter
SUSPECT_S = 1.0
MIN_HELD_SHARE = 0.05
UNKNOWN_CAPACITY_TOKENS = 100_000
PRESSURE_HALF_LIFE_S = 120.0
TTFT_STEP = 0.1


class Replica:
    """One replica. Policies read it (``policies.base.ReplicaView``); the router writes it."""

    __slots__ = (
        "_last_foreign", "block_size", "breaker", "busy_since", "capabilities", "capacity_tokens",
        "connected", "down_reason", "endpoint", "feed", "folder", "free_tokens", "hardware", "head_s",
        "head_tokens", "instance", "kv", "last_turn", "leases", "max_in_flight", "model", "move_rates",
        "needs_giver", "num_blocks", "num_faults", "num_foreign", "num_in_flight", "num_placed",
        "num_queued_tokens", "num_rescued", "num_running", "num_split", "num_ttfts", "num_unsplit", "open",
        "predicted_ttft_s", "pressure", "price_per_hour", "queue_s", "rates", "replica_id", "reported",
        "role", "serves", "slot", "stats", "suspect_until", "takes_text", "takes_tokens", "tells_cache",
        "ttft_error_s", "ttft_s", "unbegun", "unbegun_tokens", "window",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, feed: CacheFeed, slot: int) -> None:
        self.replica_id = endpoint.replica_id
        self.endpoint = endpoint
        self.feed = feed
        self.slot = slot
        self.down_reason = ""
        self.connected = False
        self.instance = ""
        self.capabilities: Capabilities | None = None
        self.model: ModelInfo | None = None
        self.hardware = endpoint.hardware
        self.reported = 0  # max_num_seqs as it says itself
        self.num_blocks = 0
        self.block_size = 0
        self.capacity_tokens = 0
        self.free_tokens = 0
        self.stats = Stats()
        self.kv = KvTraits()
        self.folder: DiskFolder | None = None  # its disk tier
        # what runs
        self.leases: dict[str, OpenLease] = {}
        self.unbegun: dict[str, OpenLease] = {}
        self.num_in_flight = 0  # samples
        self.num_running = 0  # samples whose request began to answer
        self.num_foreign = 0  # requests of others, as its load tells
        self._last_foreign = 0
        self.num_queued_tokens = 0  # prompt tokens to compute of requests that did not
        self.queue_s = 0.0  # the time that takes
        self.unbegun_tokens = 0  # all prompt tokens of those requests
        self.head_s = 0.0  # the first of them: its time and its prompt tokens
        self.head_tokens = 0
        self.busy_since = 0.0
        self.last_turn = 0
        self.pressure = 0.0
        # what was learned
        self.rates = Rates(ClassRates())
        self.move_rates = MoveRates()
        self.breaker = Breaker()
        self.suspect_until = 0.0
        self.num_placed = 0
        self.num_faults = 0
        self.num_rescued = 0
        self.num_split = 0
        self.num_unsplit = 0
        self.num_ttfts = 0
        self.ttft_s = 0.0
        self.predicted_ttft_s = 0.0
        self.ttft_error_s = 0.0
        self.refresh()

    @property
    def state(self) -> ReplicaState:
        if self.connected:
            return "draining" if self.endpoint.draining else "ready"
        return "down" if self.instance or self.down_reason else "starting"

    def refresh(self) -> None:
        """Recomputes what follows from endpoint, connection and capabilities."""
        endpoint, capabilities = self.endpoint, self.capabilities
        self.price_per_hour = endpoint.price_per_hour
        kind = capabilities.kind if capabilities is not None else endpoint.kind
        if kind != "headrace":
            self.kv = traits_of_server(endpoint, capabilities)
        self.role = self.kv.role or endpoint.role
        # A server of SGLang's with a role does its half of the work and nothing else.
        half = kind == "sglang" and self.role != "unified"
        self.needs_giver = half and self.role == "decode"
        self.serves = not half or self.needs_giver
        self.takes_text = kind != "headrace" and not half
        self.takes_tokens = not endpoint.text_only and (
            capabilities.tokens if capabilities is not None else kind == "headrace"
        )
        self.tells_cache = capabilities is not None and capabilities.cache_events
        self.max_in_flight = endpoint.max_in_flight or self.reported or DEFAULT_MAX_IN_FLIGHT
        lookahead = 0 if endpoint.max_in_flight else max(MIN_LOOKAHEAD, self.max_in_flight // LOOKAHEAD_SHARE)
        self.window = self.max_in_flight + lookahead
        self.open = self.connected and not endpoint.draining

    def why_not(self, num_samples: int, now: float) -> str:
        """Why a request may not be placed here now; empty if it may."""
        if not self.open:
            return "draining" if self.connected else self.state
        if self.suspect_until > now:
            return "lost a connection just now"
        if self.breaker.state != "closed" and not self.breaker.allows(now):
            return f"breaker {self.breaker.state}"
        if self.num_in_flight and self.num_in_flight + num_samples > self.window:
            return "full"
        return ""

    def prefill_s(self, num_uncached_tokens: int, num_tokens: int) -> float:
        """Seconds to compute what is missing of a prompt of ``num_tokens``, once it is its turn."""
        return self.rates.prefill_s(num_uncached_tokens, num_tokens)

    def predict_ttft(
        self, num_uncached_tokens: int, num_tokens: int, num_samples: int, now: float, fill_s: float = 0.0
    ) -> float:
        """Seconds from now to the first token of a prompt of ``num_tokens``, placed here.

        Its own work at the learned rates and an overhead, after the longest of four waits: for the prompts
        ahead, less the time for which the first of them has been computed; for a seat, where more than
        ``max_in_flight`` would run; for blocks, where the cache has too few free tokens; ``fill_s`` for
        what is brought there. Seats and blocks come free as running requests end, in the mean time that
        they decode.
        """
        rates, ahead_s, seat_s, room_s = self.rates, 0.0, 0.0, 0.0
        queued = 0  # tokens of prompts ahead that have no blocks yet: all but the first
        if self.unbegun:
            computed_s = now - self.busy_since
            ahead_s = self.queue_s - (computed_s if computed_s < self.head_s else self.head_s)
            queued = self.unbegun_tokens - self.head_tokens
        over = self.num_in_flight + self.num_foreign + num_samples - self.max_in_flight
        if over > 0:
            seat_s = over * rates.decode_s / self.max_in_flight
        if self.capacity_tokens:
            short = num_tokens + queued - self.free_tokens
            if short > 0:
                held = self.capacity_tokens - self.free_tokens
                room_s = rates.decode_s * short / max(held, MIN_HELD_SHARE * self.capacity_tokens)
        wait_s = max(ahead_s, seat_s, room_s, fill_s)
        return wait_s + rates.overhead_s + rates.prefill_s(num_uncached_tokens, num_tokens)

    # Leases

    def attach(self, lease: OpenLease, now: float) -> None:
        """Counts a placement in, at once."""
        lease.replica = self
        self.leases[lease.route.request_id] = lease
        self.num_in_flight += lease.num_samples
        if lease.began:
            self.num_running += lease.num_samples
            return
        num_tokens = lease.route.num_prompt_tokens + self.num_queued_tokens
        lease.delayed = self.num_in_flight > self.max_in_flight or (
            self.capacity_tokens > 0 and num_tokens > self.free_tokens
        )
        lease.prefill_s = self.rates.prefill_s(lease.num_uncached_tokens, lease.route.num_prompt_tokens)
        if not self.unbegun:
            lease.alone = True
            self.busy_since = now
            self.head_s, self.head_tokens = lease.prefill_s, lease.route.num_prompt_tokens
        self.unbegun[lease.route.request_id] = lease
        self.num_queued_tokens += lease.num_uncached_tokens
        self.unbegun_tokens += lease.route.num_prompt_tokens
        self.queue_s += lease.prefill_s

    def begin(self, lease: OpenLease, now: float) -> float:
        """Its first token arrived. Returns the seconds that it was served, as opposed to queued."""
        service_s = now - max(lease.placed_at, self.busy_since)
        lease.began = True
        self._leave_queue(lease, now)
        self.num_running += lease.num_samples
        return service_s

    def detach(self, lease: OpenLease, now: float) -> None:
        """Counts it out."""
        del self.leases[lease.route.request_id]
        self.num_in_flight -= lease.num_samples
        if lease.began:
            self.num_running -= lease.num_samples
        else:
            self._leave_queue(lease, now)
        lease.replica = None

    def _leave_queue(self, lease: OpenLease, now: float) -> None:
        del self.unbegun[lease.route.request_id]
        self.num_queued_tokens -= lease.num_uncached_tokens
        self.unbegun_tokens -= lease.route.num_prompt_tokens
        # whichever left: what the engine did until now went to prompts that are accounted for
        self.busy_since = now
        if self.unbegun:
            self.queue_s -= lease.prefill_s
            head = next(iter(self.unbegun.values()))
            self.head_s, self.head_tokens = head.prefill_s, head.route.num_prompt_tokens
        else:
            self.queue_s = self.head_s = 0.0  # rounding errors do not add up
            self.head_tokens = 0

    def add_pressure(self, num_tokens: float) -> None:
        """Counts what a request will write into the cache, as a share of it."""
        self.pressure += num_tokens / (self.capacity_tokens or UNKNOWN_CAPACITY_TOKENS)

    def set_stats(self, stats: Stats) -> None:
        self.stats = stats
        if self.takes_text:  # ours serve nobody else; the last two words on it, as ours come and go between
            foreign = max(0, stats.num_running + stats.num_waiting - self.num_in_flight)
            self.num_foreign, self._last_foreign = min(foreign, self._last_foreign), foreign
        if stats.num_blocks:
            self.num_blocks = stats.num_blocks
            self.capacity_tokens = stats.num_blocks * self.block_size
            self.free_tokens = stats.num_free_blocks * self.block_size
        if stats.moves is not None:
            self.move_rates.on_moves(stats.moves, self.folder)

    def check_integrity(self) -> None:
        """Asserts that the sums are those of the leases."""
        leases = self.leases.values()
        assert all(lease.replica is self for lease in leases), "a lease of another replica"
        assert self.num_in_flight == sum(lease.num_samples for lease in leases)
        assert self.num_running == sum(lease.num_samples for lease in leases if lease.began)
        waiting = {i: lease for i, lease in self.leases.items() if not lease.began}
        assert self.unbegun == waiting, "the queue differs from the leases that have not begun"
        assert self.num_queued_tokens == sum(lease.num_uncached_tokens for lease in waiting.values())
        assert isclose(self.queue_s, sum(lease.prefill_s for lease in waiting.values()), abs_tol=1e-6)
        assert self.unbegun_tokens == sum(lease.route.num_prompt_tokens for lease in waiting.values())
        assert self.head_s == (next(iter(self.unbegun.values())).prefill_s if self.unbegun else 0.0)

    def on_ttft(self, ttft_s: float, predicted_s: float) -> None:
        """Compares a prediction with what came."""
        self.num_ttfts += 1
        step = max(TTFT_STEP, 1.0 / self.num_ttfts)
        self.ttft_s += step * (ttft_s - self.ttft_s)
        self.predicted_ttft_s += step * (predicted_s - self.predicted_ttft_s)
        self.ttft_error_s += step * (abs(ttft_s - predicted_s) - self.ttft_error_s)

    def seen(self, score: float, ttft_s: float, plan: Plan) -> Seen:
        """Itself as it is now, for the record of a decision."""
        capacity = self.capacity_tokens
        usage = 1.0 - self.free_tokens / capacity if capacity else 0.0
        return Seen(
            self.replica_id,
            score,
            ttft_s,
            plan.num_cached_tokens,
            self.num_queued_tokens,
            self.num_in_flight,
            self.num_running,
            usage,
            plan.num_disk_tokens,
            plan.num_fetched_tokens,
            plan.fill_s,
        )

    def status(self, num_indexed_blocks: int) -> ReplicaStatus:
        stats, rates = self.stats, self.rates
        now = stats if self.connected else Stats()  # what it holds is not known once it is gone
        return ReplicaStatus(
            member=self.member(),
            num_in_flight=self.num_in_flight,
            num_running=now.num_running or self.num_running,
            num_waiting=now.num_waiting,
            kv_cache_usage=now.kv_cache_usage,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            prefill_rate=rates.prefill_rate if rates.group.num_samples else None,
            decode_rate=rates.decode_rate if rates.has_decode_rate else None,
            ttft_s=self.ttft_s if self.num_ttfts else None,
            predicted_ttft_s=self.predicted_ttft_s if self.num_ttfts else None,
            ttft_error_s=self.ttft_error_s if self.num_ttfts else None,
            num_placed=self.num_placed,
            num_faults=self.num_faults,
            num_rescued=self.num_rescued,
            num_split=self.num_split,
            num_unsplit=self.num_unsplit,
            breaker=self.breaker.state,
            num_indexed_blocks=num_indexed_blocks,
            num_index_resets=self.feed.num_resets,
            num_preemptions=stats.num_preemptions,
            computed_prompt_tokens=stats.computed_prompt_tokens,
            generation_tokens=stats.generation_tokens,
            moves=stats.moves,
            pack=stats.pack,
            note=self.down_reason,
        )

    def member(self) -> Member:
        return Member(
            endpoint=self.endpoint, state=self.state, instance=self.instance, capabilities=self.capabilities
        )


class Registry:
    """All replicas, by id and by model, grouped in the order in which they are tried."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._by_model: dict[str, list[Replica]] = {}
        self._groups: dict[tuple[str, bool], list[list[Replica]]] = {}
        self._givers: dict[str, list[Replica]] = {}
        self._classes: dict[tuple[str, str], ClassRates] = {}
        self._pressure_at = 0.0

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, replica_id: str) -> Replica | None:
        return self._replicas.get(replica_id)

    def of_model(self, model: str) -> list[Replica]:
        return self._by_model.get(model, [])

    def groups(self, model: str, text_only: bool) -> list[list[Replica]]:
        """Replicas that can take such requests; a later group is for when the earlier ones are full.

        Token requests prefer replicas that take tokens, all prefer those that are not overflow. Replicas of
        role prefill come last.
        """
        return self._groups.get((model, text_only), [])

    def has_roles(self, model: str) -> bool:
        """Whether any replica of the model is there to prefill or to decode alone."""
        return model in self._givers

    def givers(self, model: str) -> Sequence[Replica]:
        """Replicas that compute prompts for others of the model, whether they can now or not."""
        return self._givers.get(model, ())

    def candidates(self, route: Route, now: float) -> list[Replica]:
        """Replicas that may take it now: of the first group in which any has room.

        Those that failed it are used again only when no other is up, and those of role prefill only when
        there is nothing else of the model.
        """
        num_samples, exclude = route.num_samples, route.exclude
        groups = self.groups(route.model, route.text_only)
        if route.model in self._givers:
            groups = _without_givers(groups)
        if route.attempt and not route.text_only and groups and groups[0][0].takes_tokens:
            # what has begun in tokens cannot go on as text
            groups = [group for group in groups if group[0].takes_tokens]
        others_up = False
        for group in groups:
            found = [r for r in group if r.open and not r.why_not(num_samples, now)]
            if exclude:
                found = [r for r in found if r.replica_id not in exclude]
                others_up |= any(r.open and r.replica_id not in exclude for r in group)
            if found:
                return found
        if exclude and not others_up:
            return [r for group in groups for r in group if not r.why_not(num_samples, now)]
        return []

    def has_room(self, key: tuple[str, bool], now: float) -> bool:
        """Whether any replica takes one sample more of such requests."""
        return any(not replica.why_not(1, now) for group in self.groups(*key) for replica in group)

    def models(self) -> list[ModelInfo]:
        """One per model that some replica has described; ``tokens`` if any of them takes tokens.

        One of our own decides the identities before servers that adopt them.
        """
        found: dict[str, tuple[tuple[bool, bool], ModelInfo]] = {}
        for replica in self._replicas.values():
            info = replica.model
            if info is None:
                continue
            rank = (info.tokens, is_ours(replica.endpoint))
            known = found.get(replica.endpoint.model)
            if known is None or rank > known[0]:
                found[replica.endpoint.model] = (rank, info)
        return [info for _, info in found.values()]

    def excluded(self, route: Route, candidates: list[Replica], now: float) -> list[tuple[str, str]]:
        """The model's other replicas, each with the reason why it was not considered."""
        everyone = self.of_model(route.model)
        if len(everyone) == len(candidates):
            return []
        reasons = []
        for replica in everyone:
            if replica not in candidates:
                if replica.replica_id in route.exclude:
                    reason = "failed this request before"
                elif route.text_only and not replica.takes_text:
                    reason = "takes tokens only"
                else:
                    reason = replica.why_not(route.num_samples, now) or "others have room"
                    if reason == "others have room" and replica.role == "prefill":
                        reason = "role prefill"
                    elif reason == "others have room" and replica.needs_giver:
                        reason = "no prefill server has room"
                reasons.append((replica.replica_id, reason))
        return reasons

    def add(self, replica: Replica) -> None:
        assert replica.replica_id not in self._replicas, replica.replica_id
        self._replicas[replica.replica_id] = replica
        self.regroup()

    def remove(self, replica: Replica) -> None:
        del self._replicas[replica.replica_id]
        self.regroup()

    def classify(self, replica: Replica) -> None:
        """Lets it learn together with the replicas of the same model and hardware; hardware that is not
        known is a class of its own."""
        if replica.hardware:
            key = (replica.endpoint.model, replica.hardware)
            replica.rates.group = self._classes.setdefault(key, replica.rates.group)
        for mate in self.of_model(replica.endpoint.model):
            if mate is not replica and mate.rates.group is replica.rates.group:
                replica.rates.set_prior(mate.rates)

    def regroup(self) -> None:
        """After any change to a replica's model, overflow, role, or capabilities."""
        self._by_model = {}
        for replica in self._replicas.values():
            self._by_model.setdefault(replica.endpoint.model, []).append(replica)
        self._groups = {}
        self._givers = {}
        for model, replicas in self._by_model.items():
            ranked: dict[tuple[bool, bool, bool], list[Replica]] = {}
            for replica in replicas:
                rank = (replica.role == "prefill", replica.endpoint.overflow, not replica.takes_tokens)
                if replica.serves:
                    ranked.setdefault(rank, []).append(replica)
            if any(replica.role != "unified" for replica in replicas):
                self._givers[model] = [r for r in replicas if r.role == "prefill" or r.kv.address]
            by_rank = [ranked[rank] for rank in sorted(ranked)]
            self._groups[model, False] = by_rank
            texts = [[r for r in group if r.takes_text] for group in by_rank]
            self._groups[model, True] = [group for group in texts if group]

    def fade(self, now: float) -> None:
        """Lets what was written into the caches fade, for all at once so that they stay comparable."""
        elapsed, self._pressure_at = now - self._pressure_at, now
        kept = 0.5 ** (elapsed / PRESSURE_HALF_LIFE_S)
        for replica in self._replicas.values():
            replica.pressure *= kept


def _without_givers(groups: list[list[Replica]]) -> list[list[Replica]]:
    """Those whose replicas answer requests, if any of them is up."""
    others = [group for group in groups if group[0].role != "prefill"]
    return others if any(replica.open for group in others for replica in group) else groups
