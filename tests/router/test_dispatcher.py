"""A worker for each member, a flight for each request; servers that take text."""

from __future__ import annotations

import pytest

from headrace.core.errors import UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Output
from headrace.core.routing import Capabilities, Endpoint, Fleet, Member, ModelInfo, Placement
from headrace.router.dispatcher import Dispatcher
from tests.router.fleet import LOG, fleet, submit
from tests.router.replicas import MODEL, ROOT, FakeReplica, expected, make_request, running, until

INFO = ModelInfo(model=MODEL, max_model_len=512, block_size=4, root_identity=ROOT)


class Placer:
    """Places where it is told to; has no connection of its own, as the one of another process."""

    def __init__(self) -> None:
        self.is_away = False
        self.routes: list = []
        self.told: list[tuple] = []
        self.target: str | None = None
        self.waiter = None

    def place(self, route, waiter):
        self.routes.append(route)
        if self.target is None:
            self.waiter = waiter
        else:
            waiter.on_placed(Placement(request_id=route.request_id, replica_id=self.target))

    def began(self, *args):
        self.told.append(("began", *args))

    def release(self, *args):
        self.told.append(("release", *args))

    def watch(self, listener):
        self.listener = listener

    def connection(self, replica_id):
        return None


class Made:
    """A worker of router.external."""

    alive = True

    def __init__(self, endpoint, capabilities) -> None:
        self.endpoint = endpoint
        self.capabilities = capabilities
        self.closed = False
        self.submits: list = []
        self.aborts: list = []

    def submit(self, request, receiver):
        self.submits.append((request, receiver))

    def abort(self, *args):
        self.aborts.append(args)

    async def close(self):
        self.closed = True


class Stage:
    def __init__(self, placer, dispatcher, made) -> None:
        self.placer = placer
        self.dispatcher = dispatcher
        self.made = made

    def fleet(self, *members: Member) -> None:
        self.placer.listener.on_fleet(Fleet(members=list(members), models=[INFO] if members else []))

    def submit(self, request):
        return submit(self.dispatcher, request)


@pytest.fixture
async def stage():
    made: list[Made] = []

    def make_worker(endpoint, capabilities, *, log, silence_s):
        made.append(Made(endpoint, capabilities))
        return made[-1]

    placer = Placer()
    dispatcher = Dispatcher(placer, RouterConfig(), log=LOG, make_worker=make_worker)
    dispatcher.start()
    yield Stage(placer, dispatcher, made)
    await dispatcher.close()
    assert all(worker.closed for worker in made)


def server(name: str, *, tokens: bool = True, instance: str = "1", state="ready") -> Member:
    return Member(
        endpoint=Endpoint(replica_id=name, model=MODEL, address=f"http://{name}"),
        state=state,
        instance=instance,
        capabilities=Capabilities(kind="vllm" if tokens else "openai", tokens=tokens),
    )


def ours(replica: FakeReplica, state="ready") -> Member:
    return Member(endpoint=replica.endpoint, state=state, instance="1")


async def test_what_is_known_of_a_model_stays_when_its_replicas_go(stage):
    assert stage.dispatcher.info(MODEL) is None and not stage.dispatcher.ready(MODEL)
    stage.fleet(server("x"), server("y", state="down"))
    assert stage.dispatcher.info(MODEL) == INFO and stage.dispatcher.ready(MODEL)
    assert [m.endpoint.replica_id for m in stage.dispatcher.members()] == ["x", "y"]
    stage.fleet(server("x", state="draining"))
    assert not stage.dispatcher.ready(MODEL)
    stage.placer.is_away = True  # what it said last may be wrong: requests wait for it
    assert stage.dispatcher.ready(MODEL) and not stage.dispatcher.ready("another")
    stage.fleet()
    assert stage.dispatcher.info(MODEL) == INFO and stage.dispatcher.members() == []


async def test_a_server_that_restarted_gets_a_new_worker(stage):
    stage.fleet(server("x"))
    stage.fleet(server("x"), server("y"))
    assert len(stage.made) == 2
    stage.fleet(server("x", instance="2"), server("y"))
    assert len(stage.made) == 3
    assert stage.dispatcher.worker("x") is stage.made[2]
    await until(lambda: stage.made[0].closed)
    assert not stage.made[1].closed


async def test_a_member_that_is_removed_keeps_its_worker_while_requests_run_there(stage):
    stage.fleet(server("x"))
    stage.placer.target = "x"
    sinks = [stage.submit(make_request(name)) for name in "ab"]
    stage.fleet()
    assert stage.dispatcher.members() == []
    (worker,) = stage.made
    for sink, (_, receiver) in zip(sinks, worker.submits, strict=True):
        assert not worker.closed
        receiver.on_outputs([Output(sink.flight.request.request_id, 0, [1], "stop")])
    await until(lambda: worker.closed)
    assert stage.dispatcher.worker("x") is None


async def test_a_member_that_is_named_again_is_the_one_it_was(stage):
    """As when a router that has just started tells of the fleet bit by bit."""
    stage.fleet(server("x"), server("y"))
    stage.placer.target = "x"
    sink = stage.submit(make_request())
    stage.fleet(server("y"))
    stage.fleet(server("x"), server("y"))
    worker = stage.made[0]
    ((_, receiver),) = worker.submits
    receiver.on_outputs([Output("r", 0, [1], "stop")])
    assert sink.ended
    assert stage.dispatcher.worker("x") is worker and not worker.closed


async def test_a_removed_members_worker_is_closed_when_its_last_request_moves_away(stage):
    stage.fleet(server("x"), server("y"))
    stage.placer.target = "x"
    stage.submit(make_request())
    stage.fleet(server("y"))
    worker = stage.made[0]
    stage.placer.target = "y"
    worker.submits[0][1].on_failed(UnavailableError("gone"), "replica_gone")
    await until(lambda: worker.closed)
    assert len(stage.made[1].submits) == 1


async def test_hand_over_moves_only_what_runs_there(stage):
    stage.fleet(server("x"), server("y"))
    for name, target in (("a", "x"), ("b", "y"), ("c", "x")):
        stage.placer.target = target
        stage.submit(make_request(name))
    stage.placer.target = None
    waiting = stage.submit(make_request("d"))
    stage.placer.target = "y"
    stage.placer.listener.on_hand_over("x")
    x, y = stage.made
    assert [args[0] for args in x.aborts] == ["a", "c"]
    assert [request.request_id for request, _ in y.submits] == ["b", "a-r1", "c-r1"]
    assert waiting.flight.placement is None


async def test_end_all_ends_what_waits_and_what_runs(stage):
    stage.fleet(server("x"))
    stage.placer.target = "x"
    running_one = stage.submit(make_request("a"))
    stage.placer.target = None
    waiting = stage.submit(make_request("b"))
    stage.dispatcher.end_all("closing down")
    for sink in (running_one, waiting):
        assert isinstance(sink.error, UnavailableError) and sink.error.message == "closing down"
    assert stage.made[0].aborts == [("a",)]
    assert [told[:3] for told in stage.placer.told] == [
        ("release", "a", "aborted"),
        ("release", "b", "aborted"),
    ]
    assert stage.dispatcher.num_open == 0


async def test_a_placement_on_our_replica_waits_for_this_processs_connection(stage, tmp_path):
    replica = FakeReplica(tmp_path / "a.sock", "a")
    stage.fleet(ours(replica))
    stage.placer.target = "a"
    sink = stage.submit(make_request())
    async with running(replica):
        await until(lambda: sink.ended)
        assert sink.tokens() == expected(make_request())
        assert sink.flight.num_rescues == 0
        stage.fleet()
        await until(lambda: not replica.peers)


async def test_text_is_forwarded_by_the_sink_and_its_lease_tells_how_it_went(stage):
    stage.fleet(server("x", tokens=False))
    stage.placer.target = "x"
    sink = stage.submit(make_request())
    assert not sink.texts
    await until(lambda: sink.texts)
    worker, lease = sink.texts[0]
    assert worker is stage.made[0]
    lease.began()
    lease.began()
    lease.release("finished", 5)
    lease.release("finished", 5)
    assert [told[0] for told in stage.placer.told] == ["began", "release"]
    assert stage.placer.told[1][2:4] == ("finished", 5)
    assert sink.flight.ended and sink.flight.first_token_at and sink.error is None


async def test_a_text_server_that_fails_before_anything_was_sent_is_replaced(stage):
    stage.fleet(server("x", tokens=False), server("y"))
    stage.placer.target = "x"
    sink = stage.submit(make_request())
    await until(lambda: sink.texts)
    stage.placer.target = "y"
    _, lease = sink.texts[0]
    lease.failed(UnavailableError("gone"), "replica_gone")
    assert stage.placer.routes[1].exclude == ["x"] and stage.placer.routes[1].attempt == 1
    assert len(stage.made[1].submits) == 1
    lease.release("finished", 5)  # of a lease that has ended: ignored
    assert not sink.flight.ended


async def test_what_began_in_tokens_does_not_go_on_as_text(stage):
    stage.fleet(server("x"), server("y", tokens=False))
    stage.placer.target = "x"
    sink = stage.submit(make_request())
    ((_, receiver),) = stage.made[0].submits
    receiver.on_outputs([Output("r", 0, [1])])
    stage.placer.target = "y"
    receiver.on_failed(UnavailableError("gone"), "replica_gone")
    assert isinstance(sink.error, UnavailableError) and not sink.texts


async def test_abort_before_the_sink_was_asked_to_forward(stage):
    stage.fleet(server("x", tokens=False))
    stage.placer.target = "x"
    sink = stage.submit(make_request())
    sink.flight.abort()
    later = stage.submit(make_request("later"))
    await until(lambda: later.texts)
    assert not sink.texts


async def test_many_at_once(tmp_path):
    async with fleet(tmp_path, 3) as f:
        requests = [make_request(str(i), seed=i, n=1 + i % 3, max_tokens=5 + i % 7) for i in range(90)]
        sinks = [f.submit(request) for request in requests]
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, requests, strict=True):
            for sample in range(request.sampling.n):
                assert sink.tokens(sample) == expected(request, sample)
        assert all(replica.num_connections == 1 for replica in f.replicas)
        await f.quiet()
