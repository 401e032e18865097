"""The router in this process: waiting, the fleet's news, cache gaps, servers of others."""

from __future__ import annotations

import asyncio

import msgspec

from headrace.core.errors import UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import BlocksStored, CacheSnapshot, Stats
from headrace.core.routing import Capabilities, Endpoint, Fleet, ModelInfo, Placement, Route
from headrace.router.placer import LocalPlacer
from tests.router.fleet import LOG, fleet
from tests.router.replicas import MODEL, ROOT, expected, make_request, until


class Waits:
    """A Waiter that notes its one answer."""

    def __init__(self) -> None:
        self.placement: Placement | None = None
        self.error: Exception | None = None

    def on_placed(self, placement):
        assert not self.answered
        self.placement = placement

    def on_refused(self, error):
        assert not self.answered
        self.error = error

    @property
    def answered(self) -> bool:
        return self.placement is not None or self.error is not None


class Follows:
    """A FleetListener that notes what it is told."""

    def __init__(self) -> None:
        self.fleets: list[Fleet] = []
        self.hand_overs: list[str] = []

    def on_fleet(self, fleet):
        self.fleets.append(fleet)

    def on_hand_over(self, replica_id):
        self.hand_overs.append(replica_id)

    def states(self) -> list[str]:
        return [member.state for member in self.fleets[-1].members]


def route(name: str, **fields) -> Route:
    return Route(**({"request_id": name, "model": MODEL, "num_prompt_tokens": 4} | fields))


def place(placer, name: str, **fields) -> Waits:
    waits = Waits()
    placer.place(route(name, **fields), waits)
    return waits


def block(number: int) -> BlocksStored:
    return BlocksStored(block_ids=[bytes([number]) * 32], parent=ROOT)


async def test_a_placement_comes_at_once_where_there_is_room(tmp_path):
    async with fleet(tmp_path) as f:
        waits = place(f.placer, "r")
        assert waits.placement is not None
        f.placer.release("r", "aborted")


async def test_what_waits_is_placed_as_soon_as_something_ends_in_its_order(tmp_path):
    async with fleet(tmp_path, 1) as f:
        f.placer.set_endpoint(msgspec.structs.replace(f.replicas[0].endpoint, max_in_flight=1))
        assert place(f.placer, "first").placement
        second, third, fourth = (place(f.placer, name) for name in ("second", "third", "fourth"))
        assert not second.answered
        f.placer.release("third", "aborted")
        f.placer.release("first", "finished", 3, 0.1)
        assert not second.answered  # once for all that happens in this turn of the loop
        await asyncio.sleep(0)
        assert second.placement and not third.answered and not fourth.answered
        f.placer.release("second", "finished", 3, 0.1)
        await until(lambda: fourth.answered)
        assert not third.answered
        f.placer.release("fourth", "aborted")


async def test_what_waits_too_long_is_refused_without_anything_else_happening(tmp_path):
    async with fleet(tmp_path, 1, config=RouterConfig(queue_timeout_s=0.05)) as f:
        f.placer.set_endpoint(msgspec.structs.replace(f.replicas[0].endpoint, max_in_flight=1))
        place(f.placer, "first")
        second = place(f.placer, "second")
        await until(lambda: second.error)
        f.placer.release("first", "aborted")


async def test_listeners_hear_of_every_change_and_of_no_other(tmp_path):
    async with fleet(tmp_path, 1) as f:
        (replica,) = f.replicas
        follows = Follows()
        f.placer.watch(follows)
        assert follows.states() == ["ready"]
        f.placer.set_endpoint(replica.endpoint)
        replica.tell(0)
        await f.placer.connection("a").probe()
        assert len(follows.fleets) == 1
        replica.die()
        await until(lambda: follows.states() == ["down"])
        former = follows.fleets[-1].members[0].instance
        await replica.restart()
        await until(lambda: follows.states() == ["ready"])
        assert follows.fleets[-1].members[0].instance != former
        leaving = msgspec.structs.replace(replica.endpoint, draining=True, hand_over=True)
        f.placer.set_endpoint(leaving)
        f.placer.set_endpoint(leaving)
        assert follows.states() == ["draining"] and follows.hand_overs == ["a"]
        f.placer.remove_endpoint("a")
        f.placer.remove_endpoint("a")
        assert follows.fleets[-1].members == []


async def test_a_gap_in_the_cache_events_is_healed_by_asking_from_there(tmp_path):
    async with fleet(tmp_path, 1) as f:
        (replica,) = f.replicas
        await until(lambda: replica.subscribes)
        index = f.placer.router.status
        replica.tell(0, block(1), block(2))
        replica.tell(4, block(5))
        await until(lambda: len(replica.subscribes) == 2)
        assert replica.subscribes[1].next_seq == 2
        assert replica.subscribes[1].instance == replica.hello.instance
        replica.tell(2, block(3), block(4), block(5))
        await until(lambda: index().replicas[0].num_indexed_blocks == 5)
        replica.tell(0, block(1))  # repeated
        replica.snapshot = CacheSnapshot(stored=[block(7)], next_seq=9)
        f.placer.connection("a").subscribe()
        await until(lambda: index().replicas[0].num_indexed_blocks == 1)


async def test_another_process_begins_with_an_empty_cache(tmp_path):
    async with fleet(tmp_path, 1) as f:
        (replica,) = f.replicas
        replica.tell(0, block(1))
        await until(lambda: f.placer.router.status().replicas[0].num_indexed_blocks == 1)
        await replica.restart()
        await until(lambda: f.placer.router.status().replicas[0].num_indexed_blocks == 0)


async def test_a_replica_that_is_removed_without_notice_gives_its_requests_to_others(tmp_path):
    async with fleet(tmp_path) as f:
        request = make_request(max_tokens=200)
        sink = f.submit(request)
        await until(lambda: len(sink.tokens()) > 3)
        f.placer.remove_endpoint(f.on(sink.flight).replica_id)
        await until(lambda: sink.ended)
        assert sink.tokens() == expected(request)


async def test_an_endpoint_with_another_address_is_another_connection(tmp_path):
    async with fleet(tmp_path, 2) as f:
        first, second = f.replicas
        moved = msgspec.structs.replace(first.endpoint, address=second.path)
        f.placer.remove_endpoint(second.replica_id)
        f.placer.set_endpoint(moved)
        await until(lambda: f.placer.connection("a").alive and f.dispatcher.ready(MODEL))
        assert f.dispatcher.worker("a") is f.placer.connection("a")
        sink = f.submit(make_request())
        await until(lambda: sink.ended)
        assert [r.request_id for r in second.submits] == ["r"] and not first.submits


async def test_close_refuses_what_waits(tmp_path):
    placer = LocalPlacer(RouterConfig(), log=LOG)
    placer.start()
    address = str(tmp_path / "a.sock")
    placer.set_endpoint(Endpoint(replica_id="a", model=MODEL, address=address, kind="headrace"))
    waits = place(placer, "r")
    assert not waits.answered
    await placer.close()
    assert isinstance(waits.error, UnavailableError)


async def test_a_hung_replica_is_told_with_its_process(tmp_path):
    hung: list[tuple[str, int]] = []
    async with fleet(tmp_path, 1, config=RouterConfig(replica_timeout_s=0.2, max_rescues=0)) as f:
        f.placer._clients["a"]._on_hang = lambda pid: hung.append(("a", pid))
        f.replicas[0].hangs = True
        sink = f.submit(make_request())
        await until(lambda: sink.error)
        assert hung == [("a", f.replicas[0].hello.pid)]


class Monitor:
    """Stands in for router.external: says what a test tells it to."""

    def __init__(self, endpoint, listener) -> None:
        self.endpoint = endpoint
        self.listener = listener
        self.running = False

    def start(self) -> None:
        self.running = True

    async def close(self) -> None:
        self.running = False

    def up(self, instance: str, **capabilities) -> None:
        self.listener.on_up(
            self.endpoint.replica_id,
            instance=instance,
            capabilities=Capabilities(kind="vllm", **capabilities),
            model=ModelInfo(model=MODEL, max_model_len=100, block_size=4, root_identity=ROOT),
            max_num_seqs=0,
            num_blocks=0,
            block_size=4,
            hardware="",
        )


async def test_servers_of_others_are_watched_by_their_monitor():
    monitors: list[Monitor] = []

    def make_monitor(endpoint, listener, *, log):
        monitors.append(Monitor(endpoint, listener))
        return monitors[-1]

    placer = LocalPlacer(RouterConfig(), log=LOG, make_monitor=make_monitor)
    placer.start()
    follows = Follows()
    placer.watch(follows)
    placer.set_endpoint(Endpoint(replica_id="x", model=MODEL, address="http://localhost:1"))
    (monitor,) = monitors
    assert monitor.running and follows.states() == ["starting"]
    waits = place(placer, "r")
    assert not waits.answered
    monitor.up("1", tokens=True)
    await until(lambda: waits.placement)
    assert placer.connection("x") is None
    assert placer.model_info(MODEL).root_identity == ROOT
    monitor.listener.on_stats("x", Stats(num_running=3))
    monitor.listener.on_events("x", 0, [block(1)])
    assert (await placer.status()).replicas[0].num_running == 3
    monitor.listener.on_down("x", "test")
    assert follows.states() == ["down"]
    placer.remove_endpoint("x")
    await until(lambda: not monitor.running)
    monitor.up("1")  # too late: nothing happens
    monitor.listener.on_down("x", "test")
    assert follows.fleets[-1].members == []
    await placer.close()
