"""Who ends a request: its caller, at any time, a sink that throws, an engine that says so late or never."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from headrace.core.errors import EngineError, UnavailableError
from headrace.core.messages import Output
from headrace.core.request import Request
from headrace.router import flight as flight_module
from tests.router.fleet import fleet
from tests.router.flights import beset, check, once
from tests.router.replicas import make_request, until


async def test_abort_while_it_waits_in_the_router(tmp_path):
    async with fleet(tmp_path, 1) as f:
        f.placer.set_endpoint(msgspec.structs.replace(f.replicas[0].endpoint, draining=True))
        sink = f.submit(make_request())
        assert f.placer.router.status().num_queued == 1
        sink.flight.abort()
        sink.deaf = True
        await f.quiet()
        f.placer.set_endpoint(f.replicas[0].endpoint)
        other = f.submit(make_request("other"))
        await until(lambda: other.ended)
        assert [r.request_id for r in f.replicas[0].submits] == ["other"]


@pytest.mark.parametrize("moved", [False, True])
async def test_abort_while_it_runs(tmp_path, moved):
    async with fleet(tmp_path) as f:
        if moved:
            beset(f.replicas, once("die"))
        sink = f.submit(make_request(max_tokens=10_000, n=2))
        await until(lambda: len(sink.tokens()) > 5)
        sink.flight.abort()
        sink.deaf = True
        sink.flight.abort()
        sink.flight.abort_sample(0)
        await f.quiet()


async def test_abort_from_within_an_output(tmp_path):
    async with fleet(tmp_path) as f:
        sink = f.submit(make_request(max_tokens=10_000))

        def stop(outputs):
            sink.deaf = True
            sink.flight.abort()

        sink.after = stop
        await until(lambda: sink.ended)
        await f.quiet()
        assert len(sink.outputs) == 1


async def test_abort_right_after_a_refusal_hears_nothing(tmp_path):
    async with fleet(tmp_path) as f:
        request = msgspec.structs.replace(make_request(), model="unknown")
        sink = f.submit(request)
        sink.flight.abort()
        sink.deaf = True
        refused = f.submit(msgspec.structs.replace(request, request_id="other"))
        assert refused.error is None
        await until(lambda: refused.error)
        assert isinstance(refused.error, UnavailableError)
        await f.quiet()


async def test_stopping_every_sample_finishes_the_request(tmp_path):
    async with fleet(tmp_path) as f:
        sink = f.submit(make_request(max_tokens=10_000, n=2))

        def stop(outputs):
            for output in outputs:
                sink.flight.abort_sample(output.sample_index)

        sink.after = stop
        await until(lambda: sink.ended)
        await f.quiet()
        (decision,) = await f.placer.why("caller-r")
        assert decision.outcome == "finished"


async def test_a_sink_that_throws_ends_its_own_request_only(tmp_path):
    async with fleet(tmp_path, 1) as f:
        bad, good = f.submit(make_request("bad")), f.submit(make_request("good"))

        def throw(outputs):
            raise RuntimeError("no")

        bad.after = throw
        await until(lambda: bad.ended and good.ended)
        assert isinstance(bad.error, EngineError)
        check(good, make_request("good"))
        await f.quiet()


class Script:
    """A worker that says what a test tells it to."""

    alive = True

    def __init__(self) -> None:
        self.submits: list[tuple[Request, object]] = []
        self.aborts: list[tuple[str, int | None]] = []

    def submit(self, request, receiver):
        self.submits.append((request, receiver))

    def abort(self, request_id, sample_index=None):
        self.aborts.append((request_id, sample_index))


@pytest.fixture
async def scripted(tmp_path, monkeypatch):
    async with fleet(tmp_path) as f:
        workers = {"a": Script(), "b": Script()}
        monkeypatch.setattr(f.dispatcher, "worker", workers.get)
        f.workers = workers
        yield f


def first_leg(f):
    ((worker, request, leg),) = [(w, r, leg) for w in f.workers.values() for r, leg in w.submits]
    return worker, request, leg


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop_token"),
    [
        ({"max_tokens": 3}, [1, 2, 3], "length", None),
        ({"max_tokens": 9}, [1, 2, 7], "stop", 7),  # EOS
        ({"max_tokens": 9, "stop_token_ids": [5]}, [1, 5], "stop", 5),
        ({"max_tokens": None, "ignore_eos": True}, [7] * (512 - 10), "length", None),
    ],
)
async def test_a_sample_that_has_all_its_tokens_is_ended_not_resumed(
    scripted, sampling, tokens, reason, stop_token
):
    """Engines of others tell the end a message after the last token, which may never come."""
    sink = scripted.submit(make_request(**sampling))
    _, _, leg = first_leg(scripted)
    leg.on_outputs([Output("r", 0, tokens)])
    leg.on_failed(UnavailableError("gone"), "replica_gone")
    assert sink.ended and sink.error is None
    assert sink.tokens() == tokens
    assert sink.outputs[-1] == Output("r", 0, [], reason, stop_token)


@pytest.mark.parametrize("sampling", [{"min_tokens": 4}, {"ignore_eos": True}])
async def test_an_end_token_that_does_not_count_is_no_end(scripted, sampling):
    sink = scripted.submit(make_request(**sampling))
    _, _, leg = first_leg(scripted)
    leg.on_outputs([Output("r", 0, [1, 7])])
    leg.on_failed(UnavailableError("gone"), "replica_gone")
    assert not sink.ended
    again = [r for worker in scripted.workers.values() for r, _ in worker.submits][-1]
    assert again.num_output_tokens == 2


async def test_what_a_former_worker_still_says_is_ignored(scripted):
    sink = scripted.submit(make_request(n=2))
    old, _, leg = first_leg(scripted)
    leg.on_outputs([Output("r", 0, [1]), Output("r", 1, [2])])
    leg.on_failed(UnavailableError("gone"), "replica_gone")
    (new,) = [worker for worker in scripted.workers.values() if worker is not old]
    assert [request.sample_index for request, _ in new.submits] == [0, 1]
    leg.on_outputs([Output("r", 0, [9])])
    leg.on_failed(UnavailableError("gone"), "replica_gone")
    assert sink.tokens() == [1] and sink.flight.num_rescues == 1
    _, second = new.submits[0]
    second.on_outputs([Output("r", 0, [3], "stop"), Output("r", 1, [4], "length")])
    assert sink.tokens(0) == [1, 3] and sink.tokens(1) == [2, 4]
    assert sink.ended


async def test_a_submit_that_fails_half_way_stops_what_went_out(scripted):
    sink = scripted.submit(make_request(n=2))
    old, _, leg = first_leg(scripted)
    leg.on_outputs([Output("r", 0, [1])])
    (new,) = [worker for worker in scripted.workers.values() if worker is not old]

    def submit(request, receiver):
        if len(new.submits) == 1:
            raise UnavailableError("gone")
        new.submits.append((request, receiver))

    new.submit = submit
    leg.on_failed(UnavailableError("gone"), "replica_gone")
    assert [r.sample_index for r, _ in new.submits] == [0]
    assert new.aborts == [("r-r1", None)]
    assert sink.flight.num_rescues == 2 and not sink.ended
    assert sink.flight.placement is None  # it waits until one of the two is trusted again


async def test_it_waits_for_this_processs_own_connection(scripted, monkeypatch):
    for worker in scripted.workers.values():
        worker.alive = False
    sink = scripted.submit(make_request())
    await asyncio.sleep(0.05)
    assert not any(worker.submits for worker in scripted.workers.values())
    for worker in scripted.workers.values():
        worker.alive = True
    await until(lambda: any(worker.submits for worker in scripted.workers.values()))
    assert sink.flight.num_rescues == 0
    sink.flight.abort()
    monkeypatch.setattr(flight_module, "CONNECT_S", 0.02)
    for worker in scripted.workers.values():
        worker.alive = False
    late = scripted.submit(make_request("late"))
    await until(lambda: late.ended)
    assert isinstance(late.error, UnavailableError)
    aborted = scripted.submit(make_request("aborted"))
    aborted.flight.abort()
    aborted.deaf = True
    await asyncio.sleep(0.05)
    await scripted.quiet()


async def test_what_the_router_and_the_receipt_are_told(scripted, monkeypatch):
    told: list[tuple] = []
    placer = scripted.placer
    monkeypatch.setattr(placer, "began", lambda *args: told.append(("began", *args)))
    monkeypatch.setattr(placer, "release", lambda *args: told.append(("release", *args)))
    sink = scripted.submit(make_request(max_tokens=9))
    _, _, leg = first_leg(scripted)
    leg.on_outputs([Output("r", 0, [1, 2], num_cached_tokens=4)])
    leg.on_outputs([Output("r", 0, [3], "stop", 3)])
    flight = sink.flight
    assert [entry[0] for entry in told] == ["began", "release"]
    assert told[0][3] == 4
    assert told[1][1:4] == ("r", "finished", 3)
    assert told[0][2] == flight.first_token_at - flight.placed_at
    assert told[1][4] == flight.last_token_at - flight.first_token_at
    assert flight.submitted_at <= flight.placed_at <= flight.first_token_at <= flight.last_token_at
    assert flight.placement.replica_id in "ab"
