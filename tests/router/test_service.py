"""The router's socket: gateways and the supervisor on it, what they ask, and how one of them fails."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import pytest

from headrace.core.errors import NotFoundError, OverloadedError, UnavailableError
from headrace.core.knobs import RouterConfig
from headrace.core.messages import Failed, Timing
from headrace.core.routing import Attach, Place, Route
from headrace.core.wire import encode_frame
from tests.router.replicas import MODEL, FakeReplica, make_request, running, until
from tests.router.services import Gateway, check, empty, everything, service, supervisor


async def test_gateways_share_the_replicas_and_each_knows_the_model(tmp_path):
    async with everything(tmp_path) as (_, boss, replicas, gates):
        requests = [make_request(f"{i}", n=2) for i in range(20)]
        sinks = [gates[i % 2].submit(request) for i, request in enumerate(requests)]
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, requests, strict=True):
            check(sink, request)
        assert [len(replica.submits) for replica in replicas] == [10, 10]
        for gate in gates:
            assert gate.dispatcher.ready(MODEL)
            assert gate.dispatcher.info(MODEL).max_model_len == 512
        await empty(boss)
        (decision,) = await gates[0].placer.why("caller-3")
        assert decision.outcome == "finished" and decision.ttft_s is not None


async def test_a_death_is_seen_by_all_and_the_streams_go_on(tmp_path):
    async with everything(tmp_path) as (_, boss, replicas, gates):
        requests = [make_request(f"{i}", max_tokens=300) for i in range(8)]
        sinks = [gates[i % 2].submit(request) for i, request in enumerate(requests)]
        await until(lambda: all(len(sink.tokens()) > 5 for sink in sinks))
        replicas[0].die()
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, requests, strict=True):
            check(sink, request)
        assert sum(sink.flight.num_rescues for sink in sinks) == 4
        await empty(boss)


async def test_what_came_of_a_pair_reaches_the_router(tmp_path):
    """The way of a prompt to its replica, and a prefill side that a gateway saw fail."""
    told = Timing(0.0, 0.1, 4, 0.3, 96, 32)
    async with everything(tmp_path) as (one, boss, replicas, gates):
        for replica in replicas:
            replica.timing = lambda request: told
        sink = gates[0].submit(make_request("r"))
        await until(lambda: sink.ended)
        await empty(boss)
        (decision,) = await gates[0].placer.why("r")
        assert (decision.num_fetched_tokens, decision.num_disk_tokens, decision.fill_s) == (96, 32, 0.3)
        heard = []
        release = one.placer.release
        one.placer.release = lambda *args: (heard.append(args), release(*args))
        gates[0].placer.place(Route(request_id="s", model=MODEL, num_prompt_tokens=4), _Deaf())
        await until(lambda: gates[0].placer._leases)
        gates[0].placer.release("s", "aborted", 0, 0.0, "replica_gone")
        await until(lambda: heard)
        assert heard == [("s", "aborted", 0, 0.0, "replica_gone")]


class _Deaf:
    """Waits for a placement and does nothing with it."""

    def on_placed(self, placement):
        pass

    def on_refused(self, error):
        raise AssertionError(error)


async def test_hand_over_reaches_every_gateway(tmp_path):
    async with everything(tmp_path) as (_, boss, replicas, gates):
        requests = [make_request(f"{i}", max_tokens=300) for i in range(8)]
        sinks = [gates[i % 2].submit(request) for i, request in enumerate(requests)]
        await until(lambda: all(len(sink.tokens()) > 5 for sink in sinks))
        old = replicas[0]
        boss.set_endpoint(msgspec.structs.replace(old.endpoint, draining=True, hand_over=True))
        await until(lambda: not old.samples)
        boss.remove_endpoint(old.replica_id)
        old.die()
        await until(lambda: all(sink.ended for sink in sinks))
        for sink, request in zip(sinks, requests, strict=True):
            check(sink, request)
        assert all(len(gate.dispatcher.members()) == 1 for gate in gates)


async def test_a_gateway_that_vanishes_gives_back_what_it_held_and_waited_for(tmp_path):
    async with everything(tmp_path) as (one, boss, replicas, gates):
        for replica in replicas:
            replica.paused = True
            boss.set_endpoint(msgspec.structs.replace(replica.endpoint, max_in_flight=1))
        await until(lambda: all(m.endpoint.max_in_flight for m in gates[0].dispatcher.members()))
        sinks = [gates[0].submit(make_request(f"{i}")) for i in range(5)]
        other = gates[1].submit(make_request("other"))
        await until(lambda: sum(len(replica.submits) for replica in replicas) == 2)
        status = await boss.status()
        assert status.num_queued == 4
        gates[0].placer._link.end("test")  # as if its process had been killed, for the router
        gates[0].placer._leases.clear()
        gates[0].placer._waiting.clear()
        await until(lambda: any(r.request_id == "other" for replica in replicas for r in replica.submits))
        assert (await boss.status()).num_queued == 0
        for replica in replicas:
            replica.resume()
        await until(lambda: other.ended)
        check(other, make_request("other"))
        await empty(boss)
        one.placer.router.check_integrity()
        for sink in sinks:
            sink.flight.abort()
            sink.deaf = True


async def test_refusals_keep_their_kind_across_the_socket(tmp_path):
    async with everything(tmp_path, config=RouterConfig(max_queue=0)) as (_, boss, replicas, gates):
        stranger = gates[0].submit(msgspec.structs.replace(make_request(), model="unknown"))
        await until(lambda: stranger.error)
        assert isinstance(stranger.error, UnavailableError) and "unknown" in stranger.error.message
        for replica in replicas:
            boss.set_endpoint(msgspec.structs.replace(replica.endpoint, draining=True))
        await until(lambda: not gates[0].dispatcher.ready(MODEL))
        refused = gates[0].submit(make_request("more"))
        await until(lambda: refused.error)
        assert isinstance(refused.error, OverloadedError)
        await empty(boss)


@pytest.mark.parametrize("error", [OverloadedError("full", retry_after=17), NotFoundError("no", param="x")])
def test_an_error_is_the_same_on_the_other_side(error):
    there = Failed.of_error("r", error).to_error()
    assert (type(there), there.message, there.param, there.code) == (
        type(error),
        error.message,
        error.param,
        error.code,
    )
    assert getattr(there, "retry_after", None) == getattr(error, "retry_after", None)


async def test_questions_about_the_router(tmp_path):
    async with everything(tmp_path) as (_, boss, _, gates):
        for gate, counters in zip(gates, (b"one", b"two"), strict=True):
            gate.placer.report(counters)
            await gate.placer.status()  # answered after the report was read
        assert sorted(await gates[0].placer.reports()) == [b"one", b"two"]
        status = await boss.status()
        assert status.gateways == ["gateway-0", "gateway-1"]
        assert await boss.why("nothing") == []


async def test_without_a_router_questions_fail_and_requests_wait(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.router.remote.ANSWER_S", 0.05)
    config = RouterConfig(max_queue=1)
    async with Gateway(str(tmp_path / "nobody.sock"), "g", config) as gate:
        with pytest.raises(UnavailableError, match="did not answer"):
            await gate.placer.status()
        waits = gate.submit(make_request("waits"))
        too_many = gate.submit(make_request("more"))
        await until(lambda: too_many.error)
        assert isinstance(too_many.error, OverloadedError)
        assert not waits.ended
        waits.flight.abort()
        waits.deaf = True
        assert not gate.placer._waiting


async def test_a_router_that_never_comes_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.router.remote.LATE_S", 0.0)
    monkeypatch.setattr("headrace.router.remote.SWEEP_S", 0.02)
    async with Gateway(str(tmp_path / "nobody.sock"), "g", RouterConfig(queue_timeout_s=0.05)) as gate:
        sink = gate.submit(make_request())
        await until(lambda: sink.error)
        assert isinstance(sink.error, UnavailableError)


async def test_a_peer_that_sends_garbage_is_cut_off_and_others_are_not(tmp_path):
    async with everything(tmp_path) as (_, _, _, gates):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "router.sock"))
        writer.write(b"\x05\x00\x00\x00hello")
        while await reader.read(1 << 16):
            pass
        writer.close()
        await writer.wait_closed()
        sink = gates[0].submit(make_request())
        await until(lambda: sink.ended)
        check(sink, make_request())


async def test_a_peer_that_does_not_read_is_cut_off_and_loses_its_leases(tmp_path):
    async with everything(tmp_path, max_backlog_bytes=10_000) as (one, boss, _, gates):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "router.sock"), limit=1)
        writer.write(encode_frame(Attach("deaf")))
        for number in range(20):
            writer.write(
                encode_frame(Place(Route(request_id=f"deaf-{number}", model=MODEL, num_prompt_tokens=1)))
            )
        await until(lambda: any(peer.held for peer in one._links.values() if peer.name == "deaf"))

        def say_more() -> bool:
            for number in range(200):
                one.on_hand_over(f"nobody-{number}")
            return not any(peer.name == "deaf" for peer in one._links.values())

        await until(say_more)
        await empty(boss)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        del reader
        sink = gates[1].submit(make_request())
        await until(lambda: sink.ended)
        check(sink, make_request())


async def test_a_hung_replica_is_told_to_the_supervisor(tmp_path):
    config = RouterConfig(replica_timeout_s=0.2)
    replica = FakeReplica(tmp_path / "a.sock", "a")
    hung: list[tuple[str, int]] = []
    path = str(tmp_path / "router.sock")
    async with (
        running(replica),
        service(tmp_path, config),
        supervisor(path, replica, on_hang=lambda *args: hung.append(args)) as boss,
    ):
        async with asyncio.timeout(20):
            while [r.member.state for r in (await boss.status()).replicas] != ["ready"]:
                await asyncio.sleep(0.001)
        replica.hangs = True
        await until(lambda: hung)
        assert hung[0] == ("a", replica.hello.pid)
