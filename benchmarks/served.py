"""A running `headrace serve` as the benches look into it: its metrics, its replicas, and where they run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Iterable
from pathlib import Path

import msgspec

from benchmarks import peers
from benchmarks.child import ChildError, Server, free_port
from benchmarks.contenders import environment
from headrace.core.control import FromServer, Ps, PsReply, ToServer, Why, WhyReply, control_path
from headrace.core.errors import EngineError
from headrace.core.messages import Hello
from headrace.core.routing import Decision, FleetStatus
from headrace.core.wire import FrameDecoder, encode_frame, gateway_decoder

START_TIMEOUT_S = 180.0
UP_TIMEOUT_S = 120.0
_SAMPLE = re.compile(r"^headrace_(\w+?)(\{[^}]*\})? (\S+)$", re.MULTILINE)


class Metrics:
    """One reading of /metrics; names without the prefix."""

    def __init__(self, page: str) -> None:
        self._samples = [(name, labels or "", float(value)) for name, labels, value in _SAMPLE.findall(page)]

    def total(self, name: str, replica: str = "") -> float:
        """Sum over the series of a name, or those of one replica; 0 where there are none."""
        label = f'replica="{replica}"' if replica else ""
        return sum(value for each, labels, value in self._samples if each == name and label in labels)


class Replica(msgspec.Struct, frozen=True):
    """One replica's process: its id in the fleet, where it listens, and what it says of itself."""

    replica_id: str
    socket: str
    hello: Hello


def start(flags: list[str], *, threads: int, name: str, nice: int = 0) -> Server:
    """`headrace serve` with these flags on a free port, once its first replica is ready. Raises EngineError
    with the place of its log."""
    port = free_port()
    log = peers.cache_root() / "bench" / "logs" / f"{name}.log"
    command = [sys.executable, "-m", "headrace.cli.main", "serve", *flags, "--port", str(port)]
    try:
        return Server(
            [*command, "--stats-interval-s", "0"],
            port=port,
            environment=environment(threads),
            log=log,
            timeout=START_TIMEOUT_S,
            ready_path="/ready",
            nice=nice,
        )
    except ChildError as error:
        raise EngineError(f"the server did not start: {error}", hint=f"its log is {log}") from error


async def metrics(url: str) -> Metrics:
    return Metrics(await asyncio.to_thread(_read, url + "/metrics"))


async def until_up(url: str, num_replicas: int) -> None:
    """Waits until so many replicas are ready; raises EngineError when that takes too long."""
    deadline = time.monotonic() + UP_TIMEOUT_S
    while time.monotonic() < deadline:
        if (await metrics(url)).total("replica_up") == num_replicas:
            return
        await asyncio.sleep(0.1)
    raise EngineError(f"{num_replicas} replicas did not come up within {UP_TIMEOUT_S:.0f} s")


def status(server: Server) -> FleetStatus:
    """What `headrace ps` is told."""
    reply = _ask(server, Ps())
    assert isinstance(reply, PsReply)
    return reply.status


def decisions(server: Server, request_id: str) -> list[Decision]:
    """What `headrace why` is told of one request."""
    reply = _ask(server, Why(request_id))
    assert isinstance(reply, WhyReply)
    return reply.decisions


def replicas(server: Server) -> list[Replica]:
    """The server's own replicas, asked one by one, in the order of their ids."""
    endpoints = [one.member.endpoint for one in status(server).replicas]
    found = [Replica(each.replica_id, each.address, _hello(each.address)) for each in endpoints]
    return sorted(found, key=lambda replica: replica.replica_id)


def pin(pid: int, cores: Iterable[int]) -> None:
    """Confines a process, with all the threads it has now, to some cores."""
    chosen = set(cores)
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(thread.name), chosen)


def _hello(address: str) -> Hello:
    decoder = gateway_decoder()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(UP_TIMEOUT_S)
        connection.connect(address)
        while data := connection.recv(1 << 16):
            for message in decoder.feed(data):
                if isinstance(message, Hello):
                    return message
    raise EngineError(f"the replica at {address} hung up without a word")


def _ask(server: Server, message: ToServer) -> FromServer:
    decoder: FrameDecoder[FromServer] = FrameDecoder(FromServer)
    port = int(server.url.rpartition(":")[2])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(30)
        connection.connect(str(control_path(port)))
        connection.sendall(encode_frame(message))
        while data := connection.recv(1 << 16):
            for reply in decoder.feed(data):
                return reply
    raise EngineError(f"the server on port {port} hung up without an answer")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        return str(response.read().decode())


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)
