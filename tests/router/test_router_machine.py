"""The router under random joins, restarts, lost and repeated events, placements and failures.

Replicas are modelled as what they hold, what they have told, and what the router may therefore believe. After
every step ``check_integrity`` adds everything up; besides, leases, queue and index are those of the model.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.core.errors import OverloadedError, UnavailableError
from headrace.core.messages import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent, CacheSnapshot
from headrace.core.routing import Endpoint, Lease, Outcome, Placement, Route
from headrace.router.prefix_index import keys_of
from headrace.router.router import Router
from tests.router.routing import block, make, route, stats, up

NAMES = ["r0", "r1", "r2"]
MAX_QUEUE = 4
QUEUE_TIMEOUT_S = 20.0


class Process:
    """A replica's process: its cache and the events that it numbered."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.cache: set[bytes] = set()
        self.events: list[CacheEvent] = []
        self.told = 0  # events sent, whether or not they arrived

    def happen(self, event: CacheEvent) -> None:
        self.events.append(event)
        if isinstance(event, BlocksStored):
            self.cache |= set(event.block_ids)
        elif isinstance(event, BlocksRemoved):
            self.cache -= set(event.block_ids)
        else:
            self.cache.clear()


class RouterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.router: Router = make(max_queue=MAX_QUEUE, queue_timeout_s=QUEUE_TIMEOUT_S)
        self.now = 0.0
        self.count = 0
        self.endpoints: set[str] = set()
        self.draining: set[str] = set()
        self.processes: dict[str, Process] = {}
        self.connected: set[str] = set()
        self.healed: dict[str, bool] = {}  # nothing is missing of what the router was told
        self.placed: dict[str, tuple[Route, Placement]] = {}
        self.began: set[str] = set()
        self.adopted: set[str] = set()  # placed by a former life of the router
        self.waiting: dict[str, Route] = {}

    @initialize()
    def one_replica(self) -> None:
        self.set_endpoint("r0", False)
        self.connect("r0", True)

    # Membership

    @rule(name=st.sampled_from(NAMES), draining=st.booleans())
    def set_endpoint(self, name: str, draining: bool) -> None:
        endpoint = Endpoint(
            replica_id=name, model="m", address=f"/{name}", kind="headrace", draining=draining
        )
        self.router.set_endpoint(endpoint, self.now)
        self.endpoints.add(name)
        (self.draining.add if draining else self.draining.discard)(name)

    @precondition(lambda self: self.endpoints)
    @rule(data=st.data())
    def remove_endpoint(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.endpoints)))
        self.router.remove_endpoint(name, self.now)
        self.endpoints.discard(name)
        self.connected.discard(name)
        self.draining.discard(name)
        self.processes.pop(name, None)

    @precondition(lambda self: self.endpoints - self.connected)
    @rule(data=st.data(), fresh=st.booleans())
    def up(self, data: st.DataObject, fresh: bool) -> None:
        self.connect(data.draw(st.sampled_from(sorted(self.endpoints - self.connected))), fresh)

    def connect(self, name: str, fresh: bool) -> None:
        process = self.processes.get(name)
        if process is None or fresh:
            self.count += 1
            process = self.processes[name] = Process(f"instance {self.count}")
            self.healed[name] = True
        up(self.router, name, instance=process.instance, max_num_seqs=4, now=self.now)
        self.connected.add(name)

    @precondition(lambda self: self.connected)
    @rule(data=st.data())
    def down(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.connected)))
        self.router.down(name, self.now)
        self.connected.discard(name)

    # What replicas say

    @precondition(lambda self: self.connected)
    @rule(
        data=st.data(),
        numbers=st.lists(st.integers(0, 12), min_size=1, max_size=4, unique=True),
        what=st.sampled_from(["stored", "stored", "stored", "removed", "cleared"]),
        arrives=st.sampled_from(["once", "once", "twice", "not"]),
    )
    def event(self, data: st.DataObject, numbers: list[int], what: str, arrives: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.connected)))
        process = self.processes[name]
        ids = [block(number) for number in numbers]
        first = len(process.events)
        if what == "stored":
            process.happen(BlocksStored(ids, bytes(32)))
        elif what == "removed":
            process.happen(BlocksRemoved(ids))
        else:
            process.happen(CacheCleared())
        if arrives == "not":
            self.healed[name] = False
            return
        for _ in range(2 if arrives == "twice" else 1):
            self.deliver(name, first)

    @precondition(lambda self: any(self.processes[name].events for name in self.connected))
    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        names = sorted(name for name in self.connected if self.processes[name].events)
        name = data.draw(st.sampled_from(names))
        self.deliver(name, data.draw(st.integers(0, len(self.processes[name].events) - 1)))

    def deliver(self, name: str, first: int) -> None:
        """Events from ``first`` on arrive; where the router asks for more it gets it."""
        process = self.processes[name]
        missing = self.router.on_events(name, first, process.events[first:], self.now)
        if missing is not None:
            assert missing < first and not self.healed[name]
            again = self.router.on_events(name, missing, process.events[missing:], self.now)
            assert again is None
        # a gap is told once; until it is told again the index may be behind
        self.healed[name] = self.believed(name) == process.cache

    @precondition(lambda self: self.connected)
    @rule(data=st.data())
    def snapshot(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.connected)))
        process = self.processes[name]
        held = [BlocksStored([one], bytes(32)) for one in sorted(process.cache)]
        self.router.on_snapshot(name, CacheSnapshot(held, len(process.events)), self.now)
        self.healed[name] = True

    @precondition(lambda self: self.connected)
    @rule(data=st.data(), free=st.integers(0, 1000))
    def stats(self, data: st.DataObject, free: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.connected)))
        self.router.on_stats(name, stats(free=free), self.now)

    def believed(self, name: str) -> set[bytes]:
        """The blocks that the index knows of a replica, among all there are."""
        registered = self.router._registry.get(name)
        assert registered is not None
        held = self.router._index._held(registered.slot)
        return {block(number) for number in range(13) if keys_of(block(number))[0] in held}

    # Requests

    @rule(
        numbers=st.lists(st.integers(0, 12), max_size=5),
        samples=st.sampled_from([1, 1, 1, 3]),
        tier=st.sampled_from(["standard", "priority", "batch"]),
        exclude=st.sampled_from([[], [], [], ["r0"]]),
        session=st.sampled_from([None, "s"]),
    )
    def place(
        self, numbers: list[int], samples: int, tier: str, exclude: list[str], session: str | None
    ) -> None:
        self.count += 1
        name = f"q{self.count}"
        asked = route(
            name,
            *numbers,
            num_samples=samples,
            tier=tier,
            exclude=exclude,
            session=session,
            attempt=int(bool(exclude)),
        )
        try:
            placement = self.router.place(asked, self.now, self.now)
        except UnavailableError:
            assert not self.endpoints
            return
        except OverloadedError:
            assert sum(1 for waiting in self.waiting.values() if not waiting.attempt) == MAX_QUEUE or (
                len(self.waiting) >= MAX_QUEUE
            )
            return
        if placement is None:
            self.waiting[name] = asked
        else:
            self.take(asked, placement)

    def take(self, asked: Route, placement: Placement) -> None:
        home = placement.replica_id
        assert home in self.connected - self.draining
        assert 0 <= placement.num_cached_tokens < asked.num_prompt_tokens
        assert placement.ttft_s > 0
        if home in asked.exclude:
            assert not (self.connected - self.draining - set(asked.exclude)), "there was another"
        self.placed[asked.request_id] = (asked, placement)

    @rule(step=st.sampled_from([0.0, 0.5, 3.0, 15.0]))
    def poll(self, step: float) -> None:
        self.now += step
        for name, answer in self.router.poll(self.now, self.now):
            asked = self.waiting.pop(name)
            if isinstance(answer, Placement):
                self.take(asked, answer)
            else:
                assert isinstance(answer, OverloadedError | UnavailableError)

    @precondition(lambda self: set(self.placed) - self.began)
    @rule(data=st.data(), ttft_s=st.sampled_from([0.0, 0.2, 5.0]))
    def begin(self, data: st.DataObject, ttft_s: float) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.placed) - self.began)))
        asked, placement = self.placed[name]
        self.now += ttft_s
        self.router.began(
            name, ttft_s, min(placement.num_cached_tokens, asked.num_prompt_tokens - 1), self.now
        )
        self.began.add(name)

    @precondition(lambda self: self.placed)
    @rule(
        data=st.data(),
        outcome=st.sampled_from(
            ["finished", "finished", "aborted", "caller_fault", "replica_fault", "replica_gone"]
        ),
        tokens=st.integers(0, 50),
    )
    def release(self, data: st.DataObject, outcome: Outcome, tokens: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.placed)))
        del self.placed[name]
        self.began.discard(name)
        self.router.release(name, outcome, tokens, 0.1 * tokens, self.now)
        self.router.release(name, outcome, tokens, 0.1 * tokens, self.now)  # twice does no harm
        decisions = self.router.why(name)
        assert [decision.outcome for decision in decisions] == [outcome] * (name not in self.adopted)
        self.adopted.discard(name)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        del self.waiting[name]
        self.router.release(name, "aborted", 0, 0.0, self.now)

    @rule()
    def router_restarts(self) -> None:
        """All that it knew is told again, in any order that may happen: leases first."""
        self.router = make(max_queue=MAX_QUEUE, queue_timeout_s=QUEUE_TIMEOUT_S)
        for name, (asked, placement) in self.placed.items():
            self.router.adopt(Lease(route=asked, placement=placement, began=name in self.began), self.now)
        self.adopted = set(self.placed)
        self.healed = dict.fromkeys(self.processes, False)
        waiting, self.waiting = self.waiting, {}
        for asked in waiting.values():
            assert self.router.place(asked, self.now, self.now) is None
            self.waiting[asked.request_id] = asked
        for name in sorted(self.endpoints):
            self.set_endpoint(name, name in self.draining)
        for name in sorted(self.connected):
            self.connect(name, False)
            process = self.processes[name]
            held = [BlocksStored([one], bytes(32)) for one in sorted(process.cache)]
            self.router.on_snapshot(name, CacheSnapshot(held, len(process.events)), self.now)
            self.healed[name] = True

    # What must hold

    @invariant()
    def everything_adds_up(self) -> None:
        self.router.check_integrity()

    @invariant()
    def members_are_those_of_the_model(self) -> None:
        members = {member.endpoint.replica_id: member.state for member in self.router.members()}
        assert set(members) == self.endpoints
        for name, state in members.items():
            assert (state in ("ready", "draining")) == (name in self.connected)

    @invariant()
    def leases_and_waits_are_those_of_the_model(self) -> None:
        status = self.router.status()
        assert status.num_queued == len(self.waiting)
        for replica in status.replicas:
            own = [
                asked.num_samples
                for asked, placement in self.placed.values()
                if placement.replica_id == replica.member.endpoint.replica_id
            ]
            assert replica.num_in_flight <= sum(own)

    @invariant()
    def index_is_what_replicas_hold(self) -> None:
        for name in self.endpoints & set(self.processes):
            if self.healed[name]:
                assert self.believed(name) == self.processes[name].cache

    def teardown(self) -> None:
        """When all have ended nothing is left of them."""
        for name in list(self.placed):
            self.router.release(name, "finished", 1, 0.1, self.now)
        for name in list(self.waiting):
            self.router.release(name, "aborted", 0, 0.0, self.now)
        self.router.check_integrity()
        status = self.router.status()
        assert status.num_queued == 0
        assert all(replica.num_in_flight == 0 for replica in status.replicas)
        assert not self.router._index._coming, "a claim outlives its request"


RouterMachine.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestRouterMachine = RouterMachine.TestCase
