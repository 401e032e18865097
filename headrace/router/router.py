"""Decides which replica serves which request. A pure state machine: no clock, no IO, no tasks.

    place ──► Placement ──► began ──► release          a lease counts on its replica until its release
      │           ▲
      └► queued ──┴ poll                               every replica full, or none up

``now`` is monotonic and never goes back, ``wall`` is Unix time. The caller calls ``poll`` after whatever
may have made room (release, up, an endpoint) and on a timer. All that is known here comes from
replicas and gateways and is told again after a restart: endpoints by the supervisor, blocks by the
replicas' snapshots, leases by the gateways (``adopt``).
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.core.errors import HeadraceError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import CacheEvent, CacheSnapshot, Stats, Timing
from headrace.core.routing import (
    Capabilities,
    Decision,
    Endpoint,
    FleetStatus,
    Lease,
    Member,
    ModelInfo,
    Outcome,
    Placement,
    Route,
)
from headrace.router.cache_feed import CacheFeed
from headrace.router.decisions import Decisions, Entry
from headrace.router.disk_index import DiskIndex
from headrace.router.kv_traits import NO_TRAITS, KvTraits
from headrace.router.lease import OpenLease
from headrace.router.pairs import Pairs, Prompt
from headrace.router.plan import Plan, tokens_per_block, view_of
from headrace.router.policies import make_policy
from headrace.router.policies.base import Choice
from headrace.router.prefix_index import PrefixIndex, keys_of
from headrace.router.recent import Popularity, Sessions
from headrace.router.refusals import no_replica, queue_full, waited_too_long
from headrace.router.registry import SUSPECT_S, Registry, Replica
from headrace.router.waiting import LineKey, Waiter, Waiting

SWEEP_S = 0.25
TIDY_S = 5.0

Answer = tuple[str, Placement | HeadraceError]


class Router:
    """One for the whole fleet. ``seed`` is for policies that draw."""

    def __init__(self, config: RouterConfig, *, seed: int = 0) -> None:
        self.config = config
        self._policy = make_policy(config.routing_policy, seed)
        self._registry = Registry()
        self._index = PrefixIndex(config.max_index_blocks)
        self._disks = DiskIndex(config.max_index_blocks)
        self._pairs = Pairs(self._index)
        self._waiting = Waiting()
        self._decisions = Decisions()
        self._leases: dict[str, OpenLease] = {}
        self._orphans: dict[str, list[OpenLease]] = {}  # adopted before their endpoint was set
        self._sessions = Sessions()
        self._popularity = Popularity()
        self._turn = 0
        self._had_endpoint = False
        self._sweep_at = 0.0
        self._tidy_at = 0.0

    # Membership

    def set_endpoint(self, endpoint: Endpoint, now: float) -> None:
        """Adds a replica, or changes what is known of one."""
        self._had_endpoint = True
        replica = self._registry.get(endpoint.replica_id)
        if replica is not None:
            replica.endpoint = endpoint
            replica.hardware = endpoint.hardware or replica.hardware
            replica.refresh()
            self._registry.regroup()
            return
        slot = self._index.add_slot()
        replica = Replica(endpoint, CacheFeed(self._index, slot), slot)
        self._registry.add(replica)
        for lease in self._orphans.pop(endpoint.replica_id, []):
            replica.attach(lease, now)

    def remove_endpoint(self, replica_id: str, now: float) -> None:
        """Forgets a replica; what still runs there is not counted any more. Unknown ids are ignored."""
        replica = self._registry.get(replica_id)
        if replica is None:
            return
        for lease in list(replica.leases.values()):
            self._detach(lease, now)
        self._registry.remove(replica)
        self._disks.move(replica.folder, "")
        self._index.drop_slot(replica.slot)

    def up(
        self,
        replica_id: str,
        *,
        instance: str,
        capabilities: Capabilities,
        model: ModelInfo,
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        hardware: str,
        now: float,
        kv: KvTraits = NO_TRAITS,
    ) -> None:
        """A replica is connected and has said what it is; 0 for numbers that it does not tell."""
        replica = self._registry.get(replica_id)
        if replica is None:
            return
        if replica.instance and replica.instance != instance:
            self._reset(replica, now)
        replica.instance = instance
        replica.down_reason = ""
        replica.connected = True
        replica.capabilities = capabilities
        replica.model = model
        replica.reported = max_num_seqs
        replica.num_blocks = num_blocks
        replica.block_size = block_size
        replica.capacity_tokens = replica.free_tokens = num_blocks * block_size
        replica.hardware = replica.endpoint.hardware or hardware
        replica.suspect_until = 0.0
        replica.kv = kv
        replica.folder = replica.feed.folder = self._disks.move(replica.folder, kv.disk)
        told = replica.tells_cache
        replica.refresh()
        if replica.tells_cache != told:
            self._index.clear(replica.slot)  # guesses are no knowledge
        self._registry.regroup()
        self._registry.classify(replica)

    def down(self, replica_id: str, now: float, reason: str = "") -> None:
        """Its connection ended, or none came about; ``reason`` is for people. Its blocks are kept in case
        that the same process comes back."""
        replica = self._registry.get(replica_id)
        if replica is None:
            return
        replica.down_reason = reason or "does not answer"
        if not replica.connected:
            return
        replica.connected = False
        replica.breaker.reset()
        replica.refresh()

    def members(self) -> list[Member]:
        return [replica.member() for replica in self._registry]

    def models(self) -> list[ModelInfo]:
        """One per model that some replica has described."""
        return self._registry.models()

    # What replicas say

    def on_stats(self, replica_id: str, stats: Stats, now: float) -> None:
        replica = self._registry.get(replica_id)
        if replica is not None:
            replica.set_stats(stats)

    def on_events(
        self, replica_id: str, first_seq: int, events: Sequence[CacheEvent], now: float
    ) -> int | None:
        """None, or the number to subscribe from again (see CacheFeed)."""
        replica = self._registry.get(replica_id)
        return None if replica is None else replica.feed.on_events(first_seq, events, now)

    def on_snapshot(self, replica_id: str, snapshot: CacheSnapshot, now: float) -> None:
        replica = self._registry.get(replica_id)
        if replica is not None:
            replica.feed.on_snapshot(snapshot)

    # Requests

    def place(self, route: Route, now: float, wall: float) -> Placement | None:
        """A replica and a lease on it; None: it waits, and ``poll`` will answer.

        UnavailableError when no endpoint serves the model in this way, OverloadedError when too many wait.
        """
        assert route.request_id not in self._leases, f"{route.request_id} is placed already"
        self._tidy(now)
        if not self._waiting or not self._waiting.is_ahead(route):
            placement = self._try_place(route, now, wall, 0.0)
            if placement is not None:
                return placement
        registry, num_waiting = self._registry, len(self._waiting)
        if self._had_endpoint and not registry.groups(route.model, route.text_only):
            raise no_replica(route, registry.of_model(route.model))
        if num_waiting >= self.config.max_queue and not route.attempt:
            raise queue_full(route, registry.of_model(route.model), num_waiting)
        self._waiting.add(Waiter(route, now))
        return None

    def poll(self, now: float, wall: float) -> list[Answer]:
        """Requests that waited and can go now, or have waited too long; each is told once."""
        answers: list[Answer] = []
        self._tidy(now)
        if not self._waiting:
            return answers
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            self._sweep(now, wall, answers)
        for key in self._waiting.line_keys():
            self._advance(key, now, wall, answers)
        return answers

    def adopt(self, lease: Lease, now: float) -> None:
        """A lease that another life of this router gave; known ones are left as they are."""
        route = lease.route
        if route.request_id in self._leases:
            return
        self._waiting.remove(route.request_id)
        replica = self._registry.get(lease.placement.replica_id)
        uncached = max(0, route.num_prompt_tokens - lease.placement.num_cached_tokens)
        giver = self._registry.get(lease.placement.prefill_replica) if not lease.began else None
        here = 1 if lease.placement.prefill_replica else uncached
        opened = OpenLease(route, lease.placement, None, placed_at=now, num_uncached_tokens=here)
        opened.began = lease.began
        self._leases[route.request_id] = opened
        if giver is not None:
            self._pairs.adopt(opened, giver, uncached, now)
        if replica is not None:
            replica.attach(opened, now)
        else:
            self._orphans.setdefault(lease.placement.replica_id, []).append(opened)

    def began(
        self,
        request_id: str,
        ttft_s: float,
        num_cached_tokens: int,
        now: float,
        timing: Timing | None = None,
    ) -> None:
        """The first token arrived ``ttft_s`` after the placement; unknown ids are ignored."""
        lease = self._leases.get(request_id)
        if lease is None or lease.began:
            return
        if lease.entry is not None:
            lease.entry.ttft_s, lease.entry.num_cached_tokens = ttft_s, num_cached_tokens
            lease.entry.timing = timing
        self._pairs.began(lease, timing, now)
        replica = lease.replica
        if replica is None:
            lease.began = True
            return
        service_s = replica.begin(lease, now)
        replica.breaker.on_began(request_id)
        if lease.entry is None:
            return  # adopted: when it was placed is not known
        if not lease.delayed and not lease.placement.prefill_replica and not (timing and timing.fill_s):
            if not replica.tells_cache:  # nor does it always tell what it found
                num_cached_tokens = max(num_cached_tokens, lease.placement.num_cached_tokens)
            num_tokens = lease.route.num_prompt_tokens
            computed = num_tokens - num_cached_tokens
            if timing is not None:  # of a rescued request output was found in the cache as well
                computed = min(computed, timing.num_computed_tokens)
            replica.rates.on_prefill(computed, num_tokens, min(service_s, ttft_s), alone=lease.alone)
        replica.on_ttft(ttft_s, lease.placement.ttft_s)

    def release(
        self,
        request_id: str,
        outcome: Outcome,
        num_output_tokens: int,
        decode_s: float,
        now: float,
        prefill_outcome: Outcome | None = None,
    ) -> None:
        """Ends a lease, or a wait for one; unknown ids are ignored."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            self._waiting.remove(request_id)
            return
        if lease.entry is not None:
            lease.entry.outcome = outcome
        self._pairs.end(lease, prefill_outcome or "aborted", now)
        faulty = outcome in ("replica_fault", "replica_gone")
        replica = lease.replica
        if replica is None:  # its process is gone already
            orphans = self._orphans.get(lease.placement.replica_id)
            if orphans is not None and lease in orphans:
                orphans.remove(lease)
            return
        replica.num_faults += faulty
        if outcome == "finished":
            replica.breaker.on_finished(request_id, now)
        elif not faulty:
            replica.breaker.on_neutral(request_id)
        elif replica.connected:
            replica.breaker.on_fault(request_id, now)
            if outcome == "replica_gone":  # ``down`` is on its way, or another gateway still reaches it
                replica.suspect_until = now + SUSPECT_S
        if lease.began and num_output_tokens:
            replica.rates.on_decode(num_output_tokens, lease.num_samples, decode_s)
        if not replica.tells_cache and lease.began:
            num_other = num_output_tokens // replica.block_size if replica.block_size else 0
            self._index.assume(
                replica.slot, lease.keys, now, num_blocks=replica.num_blocks, num_other=num_other
            )
        self._detach(lease, now)

    # What it tells

    def status(self) -> FleetStatus:
        return FleetStatus(
            policy=self._policy.name,
            replicas=[replica.status(self._index.count(replica.slot)) for replica in self._registry],
            models=self.models(),
            num_queued=len(self._waiting),
        )

    def why(self, request_id: str) -> list[Decision]:
        """All attempts of a request, by its engine id or its caller's; empty if it is not known any more."""
        return self._decisions.find(request_id)

    def check_integrity(self) -> None:
        """Asserts that sums, queue and index agree with each other."""
        on_replicas: dict[str, OpenLease] = {}
        for replica in self._registry:
            replica.check_integrity()
            on_replicas.update(replica.leases)
        attached = {i: lease for i, lease in self._leases.items() if lease.replica is not None}
        assert all(self._registry.get(le.placement.replica_id) is le.replica for le in attached.values())
        halves = [lease.half for lease in self._leases.values() if lease.half is not None]
        attached |= {half.route.request_id: half for half in halves if half.replica is not None}
        assert on_replicas == attached, "leases and replicas differ"
        queued = sum(1 for waiter in self._waiting if not waiter.route.attempt)
        assert queued <= self.config.max_queue, "the queue is longer than it may be"
        assert not any(waiter.route.request_id in self._leases for waiter in self._waiting)
        self._index.check_integrity()

    def _try_place(self, route: Route, now: float, wall: float, queue_s: float) -> Placement | None:
        candidates = self._registry.candidates(route, now)
        if not candidates:
            return None
        index, num_prompt_tokens = self._index, route.num_prompt_tokens
        keys = keys_of(route.block_ids)
        depths = index.match(keys)
        prompt = Prompt(route, keys, tokens_per_block(route, candidates[0], len(keys)))
        candidates, plans = self._pairs.plans(prompt, depths, candidates, self._registry, now)
        if not candidates:
            return None
        users = 0.0
        if keys:
            deepest = max(depths)
            users = self._popularity.touch(keys[deepest - 1], now) if deepest else 0.0
        home = self._sessions.get(route.model, route.session) if route.session else None
        choice = self._policy.choose(view_of(route, plans, users, home), candidates, now)
        replica, plan = candidates[choice.position], plans[choice.position]
        uncached = num_prompt_tokens - plan.num_cached_tokens - plan.num_fetched_tokens
        if choice.ttfts:
            ttft_s = choice.ttfts[choice.position]
        else:
            ttft_s = replica.predict_ttft(uncached, num_prompt_tokens, route.num_samples, now, plan.fill_s)
        giver = plan.giver.replica if plan.giver is not None else None
        placement = Placement(
            request_id=route.request_id,
            replica_id=replica.replica_id,
            num_cached_tokens=plan.num_cached_tokens,
            ttft_s=ttft_s,
            queue_s=queue_s,
            prefill_replica=giver.replica_id if giver is not None else "",
            prefill_address=giver.kv.address if giver is not None else "",
        )
        entry = self._record(route, candidates, plans, choice, placement, now, wall)
        lease = OpenLease(route, placement, replica, placed_at=now, num_uncached_tokens=uncached)
        lease.entry = entry
        lease.keys = () if replica.tells_cache else keys
        if plan.giver is not None:
            # what is on its way is not here for who comes next: the giver is the one to ask
            lease.num_fetched_tokens = plan.num_fetched_tokens
            self._pairs.attach(lease, plan, keys, now)
        elif replica.tells_cache:
            lease.claimed = keys[depths[replica.slot] :]
            index.claim(replica.slot, lease.claimed)
        else:
            index.assume(replica.slot, keys, now, num_blocks=replica.num_blocks)
        replica.attach(lease, now)
        self._leases[route.request_id] = lease
        self._turn += 1
        replica.last_turn = self._turn
        replica.num_placed += 1
        replica.breaker.on_placed(route.request_id)
        replica.add_pressure(num_prompt_tokens - plan.num_cached_tokens + replica.rates.output_tokens)
        if route.session:
            self._sessions.set(route.model, route.session, replica.replica_id)
        return placement

    def _record(
        self,
        route: Route,
        candidates: list[Replica],
        plans: Sequence[Plan],
        choice: Choice,
        placement: Placement,
        now: float,
        wall: float,
    ) -> Entry:
        scores, ttfts = choice.scores, choice.ttfts
        seen = [
            replica.seen(scores[i] if scores else 0.0, ttfts[i] if ttfts else 0.0, plans[i])
            for i, replica in enumerate(candidates)
        ]
        if route.attempt:
            last = self._decisions.latest(route.request_id)
            if last is not None and last.ttft_s is not None:
                left = self._registry.get(last.chosen)
                if left is not None:
                    left.num_rescued += 1
        entry = Entry(
            route,
            wall,
            self._policy.name,
            seen,
            self._registry.excluded(route, candidates, now),
            placement.replica_id,
            choice.reason,
            placement.queue_s,
        )
        entry.prefill_replica = placement.prefill_replica
        chosen = candidates[choice.position]
        entry.split = self._pairs.words(route, plans[choice.position], chosen, self._registry, now)
        if placement.prefill_replica:
            chosen.num_split += 1
        elif entry.split:
            chosen.num_unsplit += 1
        self._decisions.add(entry)
        return entry

    def _detach(self, lease: OpenLease, now: float) -> None:
        replica = lease.replica
        if replica is not None:
            self._index.unclaim(replica.slot, lease.claimed)
            lease.claimed = ()
            replica.detach(lease, now)
        if lease.half is not None:
            self._pairs.detach(lease.half, now)

    def _reset(self, replica: Replica, now: float) -> None:
        """Another process answers in its name: what ran and was cached in the former one is gone."""
        for lease in list(replica.leases.values()):
            self._detach(lease, now)
        replica.feed.restart()
        replica.move_rates.restart()
        replica.pressure = 0.0
        replica.set_stats(Stats())
        replica.breaker.reset()

    # The queue

    def _advance(self, key: LineKey, now: float, wall: float, answers: list[Answer]) -> None:
        """Places the requests of one line until one finds no room."""
        if self._had_endpoint and not self._registry.groups(*key):
            for waiter in self._waiting.line(key):
                self._waiting.remove(waiter.route.request_id)
                refusal = no_replica(waiter.route, self._registry.of_model(waiter.route.model))
                answers.append((waiter.route.request_id, refusal))
            return
        if not self._registry.has_room(key, now):
            return
        for waiter in self._waiting.line(key):
            route = waiter.route
            placement = self._try_place(route, now, wall, now - waiter.since)
            if placement is not None:
                self._waiting.remove(route.request_id)
                answers.append((route.request_id, placement))
            elif not route.exclude:
                return  # nobody overtakes; one that avoids some replicas holds up nobody

    def _sweep(self, now: float, wall: float, answers: list[Answer]) -> None:
        """Ends the waits that took too long."""
        for waiter in list(self._waiting):
            route, waited_s = waiter.route, now - waiter.since
            late = route.deadline is not None and wall >= route.deadline
            if late or waited_s >= self.config.queue_timeout_s:
                self._waiting.remove(route.request_id)
                replicas = self._registry.of_model(route.model)
                refusal = waited_too_long(route, replicas, len(self._waiting), waited_s=waited_s, late=late)
                answers.append((route.request_id, refusal))

    def _tidy(self, now: float) -> None:
        """Lets pressure fade and old guesses go, from time to time."""
        if now < self._tidy_at:
            return
        self._tidy_at = now + TIDY_S
        self._registry.fade(now)
        for replica in self._registry:
            if not replica.tells_cache:
                self._index.expire(replica.slot, now - self.config.index_ttl_s)
