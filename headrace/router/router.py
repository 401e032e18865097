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

from headrace.core.errors import HeadraceError, OverloadedError, UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import BlocksRemoved, BlocksStored, CacheEvent, CacheSnapshot, Stats
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
    ReplicaStatus,
    Route,
)
from headrace.router.decisions import Decisions, Entry, Seen
from headrace.router.policies import make_policy
from headrace.router.policies.base import RouteView
from headrace.router.prefix_index import PrefixIndex, keys_of
from headrace.router.recent import Popularity, Sessions
from headrace.router.registry import SUSPECT_S, OpenLease, Registry, Replica
from headrace.router.waiting import LineKey, Waiter, Waiting

HEAL_S = 5.0  # how long an answer to a Subscribe may take before the gap is told again
SWEEP_S = 0.25
MAX_RETRY_AFTER_S = 60
TTFT_STEP = 0.1


class Router:
    """One for the whole fleet. ``seed`` is for policies that draw."""

    def __init__(self, config: RouterConfig, *, seed: int = 0) -> None:
        self.config = config
        self.version = 0  # changes whenever members() or models() would answer differently
        self._policy = make_policy(config.routing_policy, seed)
        self._registry = Registry()
        self._index = PrefixIndex(config.max_index_blocks)
        self._waiting = Waiting()
        self._decisions = Decisions()
        self._leases: dict[str, OpenLease] = {}
        self._sessions = Sessions()
        self._popularity = Popularity()
        self._turn = 0
        self._had_endpoint = False
        self._sweep_at = 0.0

    # Membership

    def set_endpoint(self, endpoint: Endpoint, now: float) -> None:
        """Adds a replica, or changes what is known of one."""
        self.version += 1
        self._had_endpoint = True
        replica = self._registry.get(endpoint.replica_id)
        if replica is not None:
            replica.endpoint = endpoint
            replica.hardware = endpoint.hardware or replica.hardware
            replica.refresh()
            self._registry.regroup()
            return
        replica = Replica(endpoint, self._index.add_slot())
        self._registry.add(replica)
        for lease in self._leases.values():  # adopted before the supervisor spoke
            if lease.replica is None and lease.placement.replica_id == endpoint.replica_id:
                replica.attach(lease, now)

    def remove_endpoint(self, replica_id: str, now: float) -> None:
        """Forgets a replica; what still runs there is not counted any more. Unknown ids are ignored."""
        replica = self._registry.get(replica_id)
        if replica is None:
            return
        self.version += 1
        for lease in list(replica.leases.values()):
            self._detach(lease, now)
            del self._leases[lease.route.request_id]
        self._registry.remove(replica)
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
    ) -> None:
        """A replica is connected and has said what it is; 0 for numbers that it does not tell."""
        replica = self._registry.get(replica_id)
        if replica is None:
            return
        self.version += 1
        if replica.instance != instance:
            self._reset(replica, now)
            replica.instance = instance
        replica.connected = True
        replica.capabilities = capabilities
        replica.model = model
        replica.reported = max_num_seqs
        replica.num_blocks = num_blocks
        replica.block_size = block_size
        replica.capacity_tokens = replica.free_tokens = num_blocks * block_size
        replica.hardware = replica.endpoint.hardware or hardware
        replica.suspect_until = 0.0
        replica.refresh()
        self._registry.regroup()
        for mate in self._registry.of_model(replica.endpoint.model):
            if mate is not replica and mate.hardware == replica.hardware:
                replica.rates.set_prior(mate.rates)

    def down(self, replica_id: str, now: float) -> None:
        """Its connection ended. Its blocks are kept in case that the same process comes back."""
        replica = self._registry.get(replica_id)
        if replica is None or not replica.connected:
            return
        self.version += 1
        replica.connected = False
        replica.breaker.reset()
        replica.refresh()

    def members(self) -> list[Member]:
        return [replica.member() for replica in self._registry]

    def models(self) -> list[ModelInfo]:
        """One per model that some replica has described; ``tokens`` if any of them takes tokens."""
        found: dict[str, ModelInfo] = {}
        for replica in self._registry:
            info = replica.model
            if info is None:
                continue
            known = found.get(replica.endpoint.model)
            if known is None or (info.tokens and not known.tokens):
                found[replica.endpoint.model] = info
        return list(found.values())

    # What replicas say

    def on_stats(self, replica_id: str, stats: Stats, now: float) -> None:
        replica = self._registry.get(replica_id)
        if replica is not None:
            replica.set_stats(stats)

    def on_events(
        self, replica_id: str, first_seq: int, events: Sequence[CacheEvent], now: float
    ) -> int | None:
        """None, or the number to subscribe from again because events are missing before ``first_seq``.

        Events that were seen already are skipped. While the answer to a Subscribe is on its way the gap
        is not told again.
        """
        replica = self._registry.get(replica_id)
        if replica is None:
            return None
        expected = replica.next_seq
        if first_seq > expected:
            if now < replica.healing_until:
                return None
            replica.healing_until = now + HEAL_S
            return expected
        index, slot = self._index, replica.slot
        for event in events[expected - first_seq :]:
            if type(event) is BlocksStored:
                index.store(slot, keys_of(b"".join(event.block_ids)), now)
            elif type(event) is BlocksRemoved:
                index.remove(slot, keys_of(b"".join(event.block_ids)))
            else:
                index.clear(slot)
                replica.num_index_resets += 1
        replica.next_seq = max(expected, first_seq + len(events))
        replica.healing_until = 0.0
        return None

    def on_snapshot(self, replica_id: str, snapshot: CacheSnapshot, now: float) -> None:
        replica = self._registry.get(replica_id)
        if replica is None:
            return
        index, slot = self._index, replica.slot
        if index.count(slot):
            replica.num_index_resets += 1
        index.clear(slot)
        for stored in snapshot.stored:
            index.store(slot, keys_of(b"".join(stored.block_ids)), now)
        replica.next_seq = snapshot.next_seq
        replica.healing_until = 0.0

    # Requests

    def place(self, route: Route, now: float, wall: float) -> Placement | None:
        """A replica and a lease on it; None: it waits, and ``poll`` will answer.

        UnavailableError when no endpoint serves the model in this way, OverloadedError when too many wait.
        """
        assert route.request_id not in self._leases, f"{route.request_id} is placed already"
        if not self._waiting or not self._waiting.is_ahead(route):
            placement = self._try_place(route, now, wall, 0.0)
            if placement is not None:
                return placement
        if not self._registry.groups(route.model, route.text_only) and self._had_endpoint:
            raise self._no_replica(route)
        if len(self._waiting) >= self.config.max_queue:
            raise OverloadedError(
                f"every replica of {route.model!r} is full and {len(self._waiting)} requests wait already",
                hint="retry later, add replicas, or raise --max-queue",
                retry_after=self._retry_after(route.model),
            )
        self._waiting.add(Waiter(route, now))
        return None

    def poll(self, now: float, wall: float) -> list[tuple[str, Placement | HeadraceError]]:
        """Requests that waited and can go now, or have waited too long; each is told once."""
        answers: list[tuple[str, Placement | HeadraceError]] = []
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
        opened = OpenLease(route, lease.placement, None, placed_at=now, num_uncached_tokens=uncached)
        opened.began = lease.began
        self._leases[route.request_id] = opened
        if replica is not None:
            replica.attach(opened, now)

    def began(self, request_id: str, ttft_s: float, num_cached_tokens: int, now: float) -> None:
        """The first token arrived ``ttft_s`` after the placement; unknown ids are ignored."""
        lease = self._leases.get(request_id)
        if lease is None or lease.began:
            return
        if lease.entry is not None:
            lease.entry.ttft_s, lease.entry.num_cached_tokens = ttft_s, num_cached_tokens
        replica = lease.replica
        if replica is None:
            lease.began = True
            return
        service_s = replica.begin(lease, now)
        replica.breaker.on_began(request_id)
        if lease.entry is None:
            return  # adopted: when it was placed is not known
        computed = lease.route.num_prompt_tokens - num_cached_tokens
        first_lesson = not replica.rates.num_prefills
        replica.rates.on_prefill(computed, min(service_s, ttft_s), alone=lease.alone)
        if first_lesson and replica.rates.num_prefills:
            self._teach_mates(replica)
        replica.num_ttfts += 1
        step = max(TTFT_STEP, 1.0 / replica.num_ttfts)
        predicted = lease.placement.ttft_s
        replica.ttft_s += step * (ttft_s - replica.ttft_s)
        replica.predicted_ttft_s += step * (predicted - replica.predicted_ttft_s)
        replica.ttft_error_s += step * (abs(ttft_s - predicted) - replica.ttft_error_s)

    def release(
        self,
        request_id: str,
        outcome: Outcome,
        num_output_tokens: int,
        decode_s: float,
        now: float,
    ) -> None:
        """Ends a lease, or a wait for one; unknown ids are ignored."""
        lease = self._leases.pop(request_id, None)
        if lease is None:
            self._waiting.remove(request_id)
            return
        if lease.entry is not None:
            lease.entry.outcome = outcome
        replica = lease.replica
        if replica is None:
            return
        breaker = replica.breaker
        if outcome == "finished":
            breaker.on_finished(now)
        elif outcome in ("replica_fault", "replica_gone"):
            replica.num_faults += 1
            if replica.connected:
                breaker.on_fault(request_id, now)
                if outcome == "replica_gone":
                    # another gateway may still reach it; otherwise ``down`` is on its way
                    replica.suspect_until = now + SUSPECT_S
        else:
            breaker.on_neutral(request_id)
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
            replicas=[self._replica_status(replica) for replica in self._registry],
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
        assert on_replicas == attached, "leases and replicas differ"
        assert all(self._registry.get(le.placement.replica_id) is le.replica for le in attached.values())
        assert len(self._waiting) <= self.config.max_queue, "the queue is longer than it may be"
        assert not any(waiter.route.request_id in self._leases for waiter in self._waiting)
        self._index.check_integrity()

    def _try_place(self, route: Route, now: float, wall: float, queue_s: float) -> Placement | None:
        candidates = self._candidates(route, now)
        if not candidates:
            return None
        registry, index, num_prompt_tokens = self._registry, self._index, route.num_prompt_tokens
        registry.fade(now)
        keys = keys_of(route.block_ids)
        depths = index.match(keys)
        # at least the last token is computed, for its logits
        limit = num_prompt_tokens - 1
        per_block = self._tokens_per_block(route, candidates[0], len(keys))
        cached = [min(depths[replica.slot] * per_block, limit) for replica in candidates]
        users = 0.0
        if keys:
            deepest = max(depths)
            users = self._popularity.touch(keys[deepest - 1], now) if deepest else 0.0
        home = self._sessions.get(route.model, route.session) if route.session else None
        view = RouteView(num_prompt_tokens, route.num_samples, cached, users, home)
        chosen, reason, scores, ttfts = self._policy.choose(view, candidates, now)
        replica = candidates[chosen]
        uncached = num_prompt_tokens - cached[chosen]
        ttft_s = (
            ttfts[chosen]
            if ttfts
            else replica.predict_ttft(uncached, num_prompt_tokens, route.num_samples, now)
        )
        placement = Placement(
            request_id=route.request_id,
            replica_id=replica.replica_id,
            num_cached_tokens=cached[chosen],
            ttft_s=ttft_s,
            queue_s=queue_s,
        )
        entry = self._record(route, candidates, cached, scores, ttfts, replica, reason, queue_s, now, wall)
        lease = OpenLease(
            route,
            placement,
            replica,
            placed_at=now,
            num_uncached_tokens=uncached,
            entry=entry,
        )
        if replica.tells_cache:
            lease.claimed = keys[depths[replica.slot] :]
            index.claim(replica.slot, lease.claimed)
        else:
            lease.keys = keys
            index.assume(replica.slot, keys, now, num_blocks=replica.num_blocks)
        replica.attach(lease, now)
        self._leases[route.request_id] = lease
        self._turn += 1
        replica.last_turn = self._turn
        replica.num_placed += 1
        replica.breaker.on_placed(route.request_id)
        replica.add_pressure(uncached + replica.rates.output_tokens)
        if route.session:
            self._sessions.set(route.model, route.session, replica.replica_id)
        return placement

    def _candidates(self, route: Route, now: float) -> list[Replica]:
        """Replicas that may take it now: of the first group in which any has room.

        Those that failed it are used again only when no other is up.
        """
        num_samples, exclude = route.num_samples, route.exclude
        groups = self._registry.groups(route.model, route.text_only)
        others_up = False
        for group in groups:
            if not route.text_only and route.attempt and not group[0].takes_tokens and len(groups) > 1:
                continue  # what has begun in tokens cannot go on as text
            found = [
                replica
                for replica in group
                if replica.open
                and not replica.why_not(num_samples, now)
                and not (exclude and replica.replica_id in exclude)
            ]
            if found:
                return found
            if exclude:
                others_up |= any(r.open and r.replica_id not in exclude for r in group)
        if exclude and not others_up:
            return [r for group in groups for r in group if not r.why_not(num_samples, now)]
        return []

    def _tokens_per_block(self, route: Route, replica: Replica, num_blocks: int) -> int:
        if route.text_only:
            return route.num_prompt_tokens // num_blocks if num_blocks else 0
        return replica.model.block_size if replica.model is not None else replica.block_size

    def _record(
        self,
        route: Route,
        candidates: list[Replica],
        cached: list[int],
        scores: Sequence[float],
        ttfts: Sequence[float],
        chosen: Replica,
        reason: str,
        queue_s: float,
        now: float,
        wall: float,
    ) -> Entry:
        seen: list[Seen] = []
        for i, replica in enumerate(candidates):
            capacity = replica.capacity_tokens
            seen.append(
                Seen(
                    replica.replica_id,
                    scores[i] if scores else 0.0,
                    ttfts[i] if ttfts else 0.0,
                    cached[i],
                    replica.num_queued_tokens,
                    replica.num_in_flight,
                    replica.num_running,
                    1.0 - replica.free_tokens / capacity if capacity else 0.0,
                )
            )
        everyone = self._registry.of_model(route.model)
        excluded: list[tuple[str, str]] = []
        if len(everyone) > len(candidates):
            for replica in everyone:
                if replica not in candidates:
                    excluded.append((replica.replica_id, self._why_excluded(route, replica, now)))
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
            excluded,
            chosen.replica_id,
            reason,
            queue_s,
        )
        self._decisions.add(entry)
        return entry

    def _why_excluded(self, route: Route, replica: Replica, now: float) -> str:
        if replica.replica_id in route.exclude:
            return "failed this request before"
        if route.text_only and not replica.takes_text:
            return "takes tokens only"
        return replica.why_not(route.num_samples, now) or "not needed: others have room"

    def _detach(self, lease: OpenLease, now: float) -> None:
        replica = lease.replica
        if replica is not None:
            self._index.unclaim(replica.slot, lease.claimed)
            lease.claimed = ()
            replica.detach(lease, now)

    def _reset(self, replica: Replica, now: float) -> None:
        """Another process answers in its name: what ran and was cached in the former one is gone."""
        for lease in list(replica.leases.values()):
            self._detach(lease, now)
        if self._index.count(replica.slot):
            replica.num_index_resets += 1
        self._index.clear(replica.slot)
        replica.next_seq = 0
        replica.healing_until = 0.0
        replica.pressure = 0.0
        replica.set_stats(Stats())
        replica.breaker.reset()

    def _teach_mates(self, replica: Replica) -> None:
        for mate in self._registry.of_model(replica.endpoint.model):
            if mate is not replica and mate.hardware == replica.hardware:
                mate.rates.set_prior(replica.rates)

    # The queue

    def _advance(
        self,
        key: LineKey,
        now: float,
        wall: float,
        answers: list[tuple[str, Placement | HeadraceError]],
    ) -> None:
        if not self._registry.groups(*key) and self._had_endpoint:
            for waiter in self._waiting.line(key):
                self._waiting.remove(waiter.route.request_id)
                answers.append((waiter.route.request_id, self._no_replica(waiter.route)))
            return
        for waiter in self._waiting.line(key):
            route = waiter.route
            placement = self._try_place(route, now, wall, now - waiter.since)
            if placement is not None:
                self._waiting.remove(route.request_id)
                answers.append((route.request_id, placement))
            elif not route.exclude:
                return  # nobody overtakes; one that avoids some replicas holds up nobody

    def _sweep(self, now: float, wall: float, answers: list[tuple[str, Placement | HeadraceError]]) -> None:
        """Ends what waited too long, and lets old guesses go."""
        longest = self.config.queue_timeout_s
        for waiter in list(self._waiting):
            route, waited = waiter.route, now - waiter.since
            late = route.deadline is not None and wall >= route.deadline
            if waited < longest and not late:
                continue
            self._waiting.remove(route.request_id)
            answers.append((route.request_id, self._too_long(route, waited, late)))

    def _too_long(self, route: Route, waited: float, late: bool) -> HeadraceError:
        groups = self._registry.groups(route.model, route.text_only)
        if not any(replica.open for group in groups for replica in group):
            return UnavailableError(
                f"no replica of {route.model!r} became ready within {waited:.0f} s",
                hint="see `headrace ps`",
            )
        until = "its deadline passed" if late else f"waited {waited:.0f} s"
        return OverloadedError(
            f"{until} while every replica of {route.model!r} was full",
            hint="retry later, add replicas, or raise --queue-timeout-s",
            retry_after=self._retry_after(route.model),
        )

    def _no_replica(self, route: Route) -> UnavailableError:
        if route.text_only and self._registry.of_model(route.model):
            return UnavailableError(
                f"no replica of {route.model!r} takes this request: it can only be sent on as text",
                hint="add a server with an OpenAI-compatible API by --worker-urls",
            )
        return UnavailableError(
            f"the fleet has no replica of {route.model!r}", hint="add one; see `headrace ps`"
        )

    def _retry_after(self, model: str) -> int:
        """Seconds until those who wait will have been placed, from how long requests take."""
        replicas = [replica for replica in self._registry.of_model(model) if replica.open]
        per_second = sum(r.max_in_flight / max(r.rates.decode_s + r.ttft_s, 0.01) for r in replicas)
        seconds = len(self._waiting) / per_second if per_second else MAX_RETRY_AFTER_S
        return max(1, min(MAX_RETRY_AFTER_S, round(seconds)))

    def _replica_status(self, replica: Replica) -> ReplicaStatus:
        stats, rates = replica.stats, replica.rates
        return ReplicaStatus(
            member=replica.member(),
            num_in_flight=replica.num_in_flight,
            num_running=stats.num_running or replica.num_running,
            num_waiting=stats.num_waiting,
            kv_cache_usage=stats.kv_cache_usage,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
            prefill_rate=rates.prefill_rate,
            decode_rate=rates.decode_rate,
            ttft_s=replica.ttft_s,
            predicted_ttft_s=replica.predicted_ttft_s,
            ttft_error_s=replica.ttft_error_s,
            num_placed=replica.num_placed,
            num_faults=replica.num_faults,
            num_rescued=replica.num_rescued,
            breaker=replica.breaker.state,
            num_indexed_blocks=self._index.count(replica.slot),
            num_index_resets=replica.num_index_resets,
            computed_prompt_tokens=stats.computed_prompt_tokens,
            generation_tokens=stats.generation_tokens,
        )
