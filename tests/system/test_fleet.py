"""Replicas that die, drain, come and go under many streams: nobody outside notices.

Contract: exact (float32) but for the test that says otherwise.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.control import Done, Progress, Scale
from tests.engine.test_noise_floor import noise_floor
from tests.system.home import Home
from tests.system.server import Server, wait_until
from tests.system.streams import (
    TEXT,
    Stream,
    check_complete,
    check_same,
    check_same_up_to_noise,
    many_streams,
    run,
    until,
    with_stops,
)
from tests.system.tiny import write_model

NUM_STREAMS = 200
NUM_WITH_STOPS = 40
LENGTH = 160
# Every stream runs from the beginning, and what runs on a replica that leaves does not end by itself.
FLEET = (
    *("--replicas", "3", "--max-num-seqs", "128", "--kv-cache-gib", "0.1", "--threads", "1"),
    *("--served-model-name", "tiny", "--shutdown-grace-s", "0.1", "--max-concurrent-requests", "1000"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    with Home() as made:
        yield made


@pytest.fixture(scope="module")
def fleet(model: Path, home: Home) -> Iterator[Server]:
    with Server(str(model), "--dtype", "float32", *FLEET, environment=home.environment) as server:
        yield server


@pytest.fixture(scope="module")
def reference(fleet: Server) -> list[Stream]:
    """200 streams of a fleet that nothing happens to."""
    plain = run(fleet.url, many_streams(NUM_STREAMS - NUM_WITH_STOPS, LENGTH))
    check_complete(plain)
    stopped = run(fleet.url, with_stops(plain[:NUM_WITH_STOPS]))
    check_complete(stopped)
    assert all(stream.choices[0].finish_reason == "stop" for stream in stopped)
    return plain + stopped


async def begun(streams: list[Stream]) -> None:
    """Every stream has tokens, and nearly all are to get more."""
    await until(lambda: all(stream.num_events >= 2 for stream in streams), "every stream has begun")
    assert sum(not stream.done for stream in streams) > 0.9 * len(streams)


async def drain_one(server: Server) -> list[str]:
    """Takes the third replica away from under its streams; what was told of that."""
    *progress, last = await asyncio.to_thread(server.tell, Scale(2))
    assert isinstance(last, Done), last
    return [reply.line for reply in progress if isinstance(reply, Progress)]


def check_idle(server: Server, num_replicas: int) -> None:
    """All replicas are there, and hold nothing."""
    wait_until(lambda: _is_idle(server, num_replicas), "an idle fleet")


def _is_idle(server: Server, num_replicas: int) -> bool:
    status = server.status()
    return (
        len(status["replicas"]) == num_replicas
        and status["num_queued"] == 0
        and all(
            line["member"]["state"] == "ready"
            and not any(line.get(name) for name in ("num_in_flight", "num_running", "num_waiting"))
            and line.get("kv_cache_usage", 0) == 0
            for line in status["replicas"]
        )
    )


def test_streams_outlive_a_killed_and_a_drained_replica(fleet: Server, reference: list[Stream]) -> None:
    streams = [stream.again() for stream in reference]

    async def faults() -> None:
        await begun(streams)
        os.kill(fleet.pids("headrace.replica")[0], signal.SIGKILL)
        lines = await drain_one(fleet)
        assert any(line.startswith("replica-2 hands over") for line in lines), lines

    run(fleet.url, streams, faults)
    check_complete(streams)
    check_same(streams, reference)
    check_idle(fleet, 2)
    killed = fleet.replicas()["replica-0"]
    assert killed["num_rescued"] > 0 and killed["member"]["endpoint"]["num_restarts"] == 1


def test_scale_and_reload_under_traffic_fail_no_request(fleet: Server) -> None:
    streams: list[Stream] = []
    over = asyncio.Event()

    async def commands() -> None:
        for command in (["scale", "3"], ["reload", "replica-1"], ["scale", "1", "--model", "tiny"]):
            done = await asyncio.to_thread(fleet.command, *command)
            assert done.returncode == 0, done.stderr
        over.set()

    async def more() -> None:
        commanding = asyncio.create_task(commands())
        while not over.is_set() and not commanding.done():
            streams.extend(await traffic(fleet.url, len(streams)))
        await commanding

    asyncio.run(more())
    check_complete(streams)
    check_idle(fleet, 1)
    assert list(fleet.replicas()) == ["replica-0"]


async def traffic(url: str, first: int) -> list[Stream]:
    """A few short streams, different ones each time."""
    bodies = [{"prompt": f"hello {first + i}", "max_tokens": 20, "ignore_eos": True} for i in range(8)]
    return await asyncio.to_thread(run, url, [Stream(TEXT, body) for body in bodies])


def test_ps_and_why_say_what_happened(fleet: Server) -> None:
    (stream,) = run(fleet.url, [Stream(TEXT, {"prompt": "why me?", "max_tokens": 3}, request_id="ask-me")])
    assert stream.done
    table = fleet.command("ps").stdout
    assert "replica-0" in table and "predicted_ttft" in table
    assert "\x1b" not in table, "no colours in a pipe"
    story = fleet.command("why", "ask-me").stdout
    assert "ask-me" in story and "chose replica-0" in story and "finished" in story
    (decision,) = json.loads(fleet.command("why", "ask-me", "--json").stdout)
    assert decision["chosen"] == "replica-0" and decision["caller_id"] == "ask-me"


def test_a_model_without_replicas_is_shown_and_says_how_to_have_some(fleet: Server) -> None:
    assert fleet.command("scale", "0").returncode == 0
    assert "tiny: 0 replicas" in fleet.command("ps").stdout
    (stream,) = run(fleet.url, [Stream(TEXT, {"prompt": "anybody?", "max_tokens": 3})])
    assert not stream.done and "503" in stream.failure and "scaled to 0" in stream.failure
    assert "headrace scale 1 --model tiny" in stream.failure
    assert fleet.command("scale", "1").returncode == 0
    check_complete(run(fleet.url, [Stream(TEXT, {"prompt": "anybody?", "max_tokens": 3})]))
    assert fleet.status()["scaled_to_zero"] == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["why", "nobody"], "nobody"),
        (["scale", "2", "--model", "other"], "other"),
        (["reload", "replica-9"], "replica-9"),
    ],
)
def test_a_refused_command_says_why(fleet: Server, command: list[str], words: str) -> None:
    done = fleet.command(*command)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and words in done.stderr


def test_nothing_is_left_of_a_fleet(fleet: Server, home: Home) -> None:
    home.stop(fleet)


def test_two_gateways_outlive_their_router(model: Path, reference: list[Stream]) -> None:
    streams = [stream.again() for stream in reference]
    late: list[Stream] = []  # sent while no router runs
    with (
        Home() as home,
        Server(
            str(model), "--dtype", "float32", "--gateways", "2", *FLEET, environment=home.environment
        ) as server,
    ):

        async def faults() -> None:
            await begun(streams)
            (router,) = server.pids("headrace.router")
            os.kill(router, signal.SIGKILL)
            os.kill(server.pids("headrace.replica")[0], signal.SIGKILL)
            late.extend(await traffic(server.url, len(late)))
            await drain_one(server)

        run(server.url, streams, faults)
        check_complete(streams + late)
        check_same(streams, reference)
        check_idle(server, 2)
        assert len(server.pids("headrace.gateway")) == 2
        assert server.status()["gateways"] == ["gateway-0", "gateway-1"]
        home.stop(server)


def test_in_bfloat16_streams_part_only_within_the_noise_floor(model: Path) -> None:
    """Contract: up to the noise floor (bfloat16)."""
    bodies = [
        {
            "prompt": f"the capital {i}",
            "max_tokens": LENGTH,
            "ignore_eos": True,
            "temperature": 0,
            "logprobs": 2,
        }
        for i in range(60)
    ]
    reference = [Stream(TEXT, body) for body in bodies]
    floor = noise_floor(model)
    assert floor < 0.5, "far more than rounding to 8 bits explains"
    with (
        Home() as home,
        Server(
            str(model), "--dtype", "bfloat16", *FLEET, "--replicas", "2", environment=home.environment
        ) as server,
    ):
        run(server.url, reference)
        check_complete(reference)
        streams = [stream.again() for stream in reference]

        async def fault() -> None:
            await begun(streams)
            os.kill(server.pids("headrace.replica")[0], signal.SIGKILL)

        run(server.url, streams, fault)
        check_complete(streams)
        num_equal = check_same_up_to_noise(streams, reference, floor)
        assert num_equal > len(streams) // 3, "many streams are equal to the end"
        check_idle(server, 2)
        home.stop(server)


@pytest.mark.parametrize("gateways", ["1", "2"])
def test_a_second_signal_ends_what_runs(model: Path, gateways: str) -> None:
    stream = Stream(TEXT, {"prompt": "hello", "max_tokens": 480, "ignore_eos": True, "n": 8})
    with (
        Home() as home,
        Server(
            *(str(model), "--dtype", "float32", "--kv-cache-gib", "0.05", "--gateways", gateways),
            environment=home.environment,
        ) as server,
    ):

        async def stop_twice() -> None:
            await until(lambda: stream.num_events > 8, "it has begun")
            server.terminate()
            await until(lambda: "stopping; requests" in server.log, "it stops")
            assert not stream.done, "it is let finish"
            server.terminate()

        run(server.url, [stream], stop_twice)
        assert "shutting down" in stream.failure and not stream.done
        home.check_nothing_left(server)


def test_killed_processes_are_replaced_and_none_outlives_the_first(model: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 300, "ignore_eos": True, "temperature": 0, "logprobs": 0}
    flags = (str(model), "--dtype", "float32", "--kv-cache-gib", "0.05", "--gateways", "2")
    with Home() as home, Server(*flags, environment=home.environment) as server:
        reference = run(server.url, [Stream(TEXT, body)])
        check_complete(reference)
        streams = [Stream(TEXT, body)]

        async def kill_the_only_replica() -> None:
            await until(lambda: streams[0].num_events > 5, "it has begun")
            os.kill(server.pids("headrace.replica")[0], signal.SIGKILL)

        run(server.url, streams, kill_the_only_replica)
        check_complete(streams)
        check_same(streams, reference)

        first = server.pids("headrace.gateway")
        os.kill(first[0], signal.SIGKILL)
        wait_until(lambda: first[0] not in server.pids("headrace.gateway"), "it is dead")
        check_complete(run(server.url, [Stream(TEXT, {**body, "max_tokens": 3})]))
        wait_until(lambda: len(server.status()["gateways"]) == 2, "another one in its place")

        server.process.kill()
        wait_until(lambda: home.processes() == {}, "its children end by themselves")
