"""Whether another replica computes a prompt for the one that will answer it, and which.

    memory has these │ disk has these │ a prefill replica (giver) computes these │ computed here: the rest │
                     └─ read_s ───────┴─ ready there, then moved ────────────────┘ of the last block

    alone = predicted TTFT, all computed here             + streams · seconds of computing here
    split = predicted TTFT, the rest computed here        + streams · seconds of writing blocks into the cache
                                                          + what it costs the giver's own streams

``streams`` run here, or will once the prompts ahead are computed: each stands still while a chunk of a prompt
is computed, and a second of that costs what a second until a first token costs; SMALL_PROMPT tokens go along
with a step of the streams and cost them nothing. So a replica without streams computes its prompts itself
unless its queue is long, and a giver whose queue is too long is not used. Of several givers the one that will
have computed the prompt first is taken. The prompt is in its queue from then on, until the answer begins or
the request ends. Pure functions and the state of leases: no clock, no IO.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from headrace.core.messages import Timing
from headrace.core.routing import Outcome, Placement, Route
from headrace.router.disk_index import DiskFolder
from headrace.router.lease import OpenLease
from headrace.router.plan import Giver, Plan
from headrace.router.prefix_index import PrefixIndex
from headrace.router.rates import SMALL_PROMPT
from headrace.router.registry import Registry, Replica

DELIVERED = 0.5
"""The share of what was expected that a giver must deliver for its part to count as done."""


class Prompt(NamedTuple):
    """What is to be placed, as this module sees it: ``per_block`` tokens to each of ``keys``."""

    route: Route
    keys: Sequence[int]
    per_block: int

    @property
    def num_tokens(self) -> int:
        return self.route.num_prompt_tokens

    @property
    def num_reusable_tokens(self) -> int:
        """Whole blocks without the last token, which is always computed where the answer begins."""
        if not self.per_block:
            return 0
        return min(self.per_block * len(self.keys), (self.num_tokens - 1) // self.per_block * self.per_block)


class Pairs:
    """Plans for the candidates of a request, and the givers' half of each split lease."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    # Planning

    def plans(
        self,
        prompt: Prompt,
        depths: Sequence[int],
        candidates: list[Replica],
        registry: Registry,
        now: float,
    ) -> tuple[list[Replica], list[Plan]]:
        """One per candidate, without those that can do nothing alone and have no giver now. ``depths``: how
        many blocks each slot of the index has in memory."""
        plans = self._disk_plans(prompt, depths, candidates)
        model, is_text = prompt.route.model, prompt.route.text_only
        if is_text or not registry.has_roles(model):
            return candidates, plans
        givers = self._givers(prompt, depths, registry.givers(model), now)
        plans = [
            self._with_giver(prompt, replica, plan, givers, now)
            for replica, plan in zip(candidates, plans, strict=True)
        ]
        able = [i for i, plan in enumerate(plans) if plan.giver or not candidates[i].needs_giver]
        return [candidates[i] for i in able], [plans[i] for i in able]

    def _disk_plans(self, prompt: Prompt, depths: Sequence[int], replicas: Sequence[Replica]) -> list[Plan]:
        """What each has in memory and, where reading is faster than computing, on disk."""
        limit = prompt.num_tokens - 1
        found = [depths[replica.slot] for replica in replicas]
        by_depth = {depth: Plan(min(depth * prompt.per_block, limit)) for depth in set(found)}
        plans = [by_depth[depth] for depth in found]
        by_folder: dict[str, tuple[DiskFolder, list[int]]] = {}
        for place, replica in enumerate(replicas):
            if replica.folder is not None and len(replica.folder):
                by_folder.setdefault(replica.folder.name, (replica.folder, []))[1].append(place)
        for folder, places in by_folder.values():
            ends = folder.runs(prompt.keys, [depths[replicas[place].slot] for place in places])
            for place, end in zip(places, ends, strict=True):
                plans[place] = self._with_disk(prompt, replicas[place], plans[place], end)
        return plans

    def _with_disk(self, prompt: Prompt, replica: Replica, plan: Plan, end: int) -> Plan:
        cached, total = plan.num_cached_tokens, prompt.num_tokens
        on_disk = min(end * prompt.per_block, prompt.num_reusable_tokens) - cached
        if on_disk <= 0 or replica.folder is None or not replica.kv.block_bytes:
            return plan
        read_s = replica.folder.read_s(on_disk / prompt.per_block * replica.kv.block_bytes)
        uncached = total - cached
        if read_s >= replica.prefill_s(uncached, total) - replica.prefill_s(uncached - on_disk, total):
            return plan
        return Plan(cached + on_disk, on_disk, fill_s=read_s)

    def _givers(
        self, prompt: Prompt, depths: Sequence[int], replicas: Sequence[Replica], now: float
    ) -> list[Giver]:
        """Those that have room now."""
        total = prompt.num_reusable_tokens
        free = [replica for replica in replicas if not replica.why_not(1, now)]
        givers = []
        for replica, plan in zip(free, self._disk_plans(prompt, depths, free), strict=True):
            uncached = max(0, total - plan.num_cached_tokens)
            givers.append(
                Giver(
                    replica,
                    depths[replica.slot],
                    plan.num_cached_tokens,
                    replica.predict_ttft(uncached, total, 1, now, plan.fill_s),
                    _stall_s(replica, uncached, total),
                )
            )
        return givers

    def _with_giver(
        self, prompt: Prompt, replica: Replica, plan: Plan, givers: Sequence[Giver], now: float
    ) -> Plan:
        route, total = prompt.route, prompt.num_tokens
        fetched = max(0, prompt.num_reusable_tokens - plan.num_cached_tokens)
        if fetched <= 0 and not replica.needs_giver:
            return plan
        if route.whole and not replica.needs_giver:
            return plan
        able = [giver for giver in givers if _can_give(giver.replica, replica)]
        possible = [giver for giver in able if giver.replica.replica_id not in route.exclude]
        if replica.needs_giver:
            possible = possible or able  # one that failed it before is better than none
        if not possible:
            return plan
        giver = min(possible, key=lambda each: each.ready_s + each.harm_s)
        num_bytes = fetched / prompt.per_block * replica.kv.block_bytes
        fill_s = plan.fill_s + giver.ready_s + replica.move_rates.fetch_s(num_bytes)
        uncached, rest = total - plan.num_cached_tokens, total - plan.num_cached_tokens - fetched
        samples = route.num_samples
        alone_s = replica.predict_ttft(uncached, total, samples, now, plan.fill_s)
        alone_s += _stall_s(replica, uncached, total)
        split_s = replica.predict_ttft(rest, total, samples, now, fill_s) + giver.harm_s
        split_s += num_streams(replica) * replica.move_rates.stall_s(num_bytes)
        saved_s = alone_s - split_s
        if saved_s <= 0 and not replica.needs_giver:
            return plan._replace(asked=giver, saved_s=saved_s)
        return Plan(plan.num_cached_tokens, plan.num_disk_tokens, fetched, fill_s, giver, giver, saved_s)

    # Words

    def words(self, route: Route, plan: Plan, chosen: Replica, registry: Registry, now: float) -> str:
        """Why the prompt is split or not, for people; empty where no other replica could compute it."""
        everyone = [replica for replica in registry.givers(route.model) if _may_give(replica, chosen)]
        if not everyone:
            return ""
        if plan.giver is not None:
            name, tokens = plan.giver.replica.replica_id, plan.num_fetched_tokens
            saves = f", saves {plan.saved_s:.2f} s" if plan.saved_s > 0 else ""
            return f"split: {tokens:,} tokens computed on {name}{saves}"
        if plan.asked is not None:
            name, ready_s = plan.asked.replica.replica_id, plan.asked.ready_s
            return f"not split: {name}, ready in {ready_s:.2f} s, costs {-plan.saved_s:.2f} s more"
        if route.whole:
            return "not split: all of the prompt must be computed there"
        reasons = []
        for replica in everyone:
            reason = "failed this request before" if replica.replica_id in route.exclude else ""
            reason = reason or replica.why_not(1, now)
            if not reason and replica.kv.format != chosen.kv.format:
                reason = "keeps its blocks in another format"
            if not reason and not chosen.kv.reaches(replica.kv):
                reason = "on another host, and gives blocks over shared memory (kv_connector: tcp)"
            if reason:
                reasons.append(f"{replica.replica_id}: {reason}")
        if len(reasons) < len(everyone):
            return "not split: nothing is left to fetch"
        return f"not split: {', '.join(reasons)}"

    # Leases

    def attach(self, lease: OpenLease, plan: Plan, keys: Sequence[int], now: float) -> None:
        """Puts the giver's half of a split lease into its queue, at once."""
        giver = plan.giver
        assert giver is not None and lease.half is None
        replica, route = giver.replica, lease.route
        uncached = max(0, plan.num_cached_tokens + plan.num_fetched_tokens - giver.num_cached_tokens)
        half = lease.half = half_of(route, lease.placement, now, uncached)
        if replica.tells_cache:
            half.claimed = keys[giver.depth :]
            self._index.claim(replica.slot, half.claimed)
        else:
            self._index.assume(replica.slot, keys, now, num_blocks=replica.num_blocks)
        replica.attach(half, now)
        replica.num_placed += 1
        replica.breaker.on_placed(half.route.request_id)
        replica.add_pressure(uncached)

    def adopt(self, lease: OpenLease, giver: Replica, num_uncached_tokens: int, now: float) -> None:
        """Of a lease that another life of this router gave: how much the giver has to compute is a guess."""
        half = lease.half = half_of(lease.route, lease.placement, now, num_uncached_tokens)
        giver.attach(half, now)
        half.delayed = True  # when it began is not known

    def began(self, lease: OpenLease, timing: Timing | None, now: float) -> None:
        """The answer began: what was to come from the giver has come, or never will."""
        half = lease.half
        if half is None or half.replica is None:
            return
        replica, expected = half.replica, lease.num_fetched_tokens
        if timing is None or not expected or timing.num_fetched_tokens >= DELIVERED * expected:
            finished_at = max(half.placed_at, now - (timing.prefill_s if timing is not None else 0.0))
            num_tokens = half.route.num_prompt_tokens
            service_s = finished_at - max(half.placed_at, replica.busy_since)
            if not half.delayed and service_s > 0:
                replica.rates.on_prefill(half.num_uncached_tokens, num_tokens, service_s, alone=half.alone)
            self.end(lease, "finished", now)
        elif timing.num_fetched_tokens or not timing.fill_s or _had_it(lease, timing):
            self.end(lease, "aborted", now)  # partly done, never asked, or not needed: nobody's fault
        else:
            self.end(lease, "replica_fault", now)

    def end(self, lease: OpenLease, outcome: Outcome, now: float) -> None:
        """Takes the giver's half out of its queue and tells its breaker how it went."""
        half = lease.half
        if half is None or half.replica is None:
            return
        replica, name = half.replica, half.route.request_id
        if outcome == "finished":
            replica.breaker.on_finished(name, now)
        elif outcome in ("replica_fault", "replica_gone"):
            replica.num_faults += 1
            if replica.connected:
                replica.breaker.on_fault(name, now)
        else:
            replica.breaker.on_neutral(name)
        self.detach(half, now)

    def detach(self, half: OpenLease, now: float) -> None:
        replica = half.replica
        if replica is not None:
            self._index.unclaim(replica.slot, half.claimed)
            half.claimed = ()
            replica.detach(half, now)


def half_of(route: Route, placement: Placement, now: float, num_uncached_tokens: int) -> OpenLease:
    """The giver's half: one prompt to compute, under a name of its own."""
    own = replace(route, request_id=f"{route.request_id}/prefill", num_samples=1)
    return OpenLease(own, placement, None, placed_at=now, num_uncached_tokens=num_uncached_tokens)


def num_streams(replica: Replica) -> int:
    """Samples that run there, or will once the prompts ahead are computed there."""
    queued = [lease.num_samples for lease in replica.unbegun.values() if lease.half is None]
    return replica.num_running + sum(queued)


def _stall_s(replica: Replica, num_uncached_tokens: int, num_tokens: int) -> float:
    """Seconds for which its streams, all together, stand still while a prompt is computed."""
    num_tokens_felt = num_uncached_tokens - SMALL_PROMPT
    if num_tokens_felt <= 0:
        return 0.0
    return num_streams(replica) * replica.prefill_s(num_tokens_felt, num_tokens)


def _can_give(giver: Replica, taker: Replica) -> bool:
    if not _may_give(giver, taker) or not giver.kv.address:
        return False
    return giver.kv.format == taker.kv.format and taker.kv.reaches(giver.kv)


def _may_give(giver: Replica, taker: Replica) -> bool:
    """A unified replica computes for those alone that are there to decode."""
    return giver is not taker and (giver.role == "prefill" or taker.role == "decode")


def _had_it(lease: OpenLease, timing: Timing) -> bool:
    """Whether the taker found the prompt in its own cache meanwhile."""
    return timing.num_computed_tokens <= lease.num_uncached_tokens
