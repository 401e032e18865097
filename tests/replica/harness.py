"""A replica in a process of its own, and a peer that speaks to it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.knobs import EngineConfig, LogConfig
from headrace.core.launch import ReplicaSpec
from headrace.core.messages import Abort, Failed, Health, Hello, Output, Probe, Step, Submit, Subscribe
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.core.routing import Role
from headrace.core.wire import encode_frame, gateway_decoder

PATIENCE_S = 120.0  # a bound for a loaded machine; nothing here normally takes a second


class Replica:
    """``python -m headrace.replica`` (or another module with its protocol)."""

    def __init__(
        self,
        folder: Path,
        directory: Path,
        *,
        module: str = "headrace.replica",
        logs: LogConfig | None = None,
        role: Role = "unified",
        kv_listen: str = "",
        **knobs: Any,
    ) -> None:
        """``kv_listen``: ``unix`` is a socket beside its own."""
        engine = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 500, "block_size": 4}
        self.socket = directory / "private" / "replica.sock"
        if kv_listen == "unix":
            kv_listen = f"unix:{directory}/private/kv.sock"
        spec = ReplicaSpec(
            replica_id="r0",
            model="tiny",
            folder=str(folder),
            revision="",
            socket=str(self.socket),
            engine=EngineConfig(**{**engine, "kv_cache_gib": 0.01, "max_num_seqs": 8, **knobs}),
            logs=logs or LogConfig(),
            role=role,
            kv_listen=kv_listen,
        )
        self.process = start(module)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(spec) + b"\n")
        self.process.stdin.flush()
        self.events: list[dict[str, Any]] = []
        self._peers: list[Peer] = []

    def connect(self) -> Peer:
        """A new peer; ``stop`` closes those that are still open."""
        self._peers.append(Peer(self.socket))
        return self._peers[-1]

    def wait_ready(self) -> Replica:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))
            if self.events[-1]["event"] in ("ready", "error"):
                break
        assert self.events and self.events[-1]["event"] == "ready", self.events
        return self

    def stop(self) -> None:
        for peer in self._peers:
            peer.close()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.kill()
        self.process.wait(PATIENCE_S)


def start(module: str = "headrace.replica") -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Peer:
    """A blocking client on one connection."""

    def __init__(self, path: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(path))
        self._decoder = gateway_decoder()
        self._inbox: list[Any] = []
        self._nonce = 0
        hello = self.receive()
        assert isinstance(hello, Hello)
        self.hello = hello

    def send(self, *messages: Any) -> None:
        self.sock.sendall(b"".join(encode_frame(message) for message in messages))

    def submit(self, request_id: str, prompt: list[int], *, prefill_from: str = "", **params: Any) -> None:
        sampling = SamplingParams(**{"temperature": 0.0, "seed": 0, "ignore_eos": True, **params})
        request = Request(
            request_id=request_id, prompt=pack_tokens(prompt), sampling=sampling, prefill_from=prefill_from
        )
        self.send(Submit(request))

    def abort(self, request_id: str, sample_index: int | None = None) -> None:
        self.send(Abort(request_id, sample_index))

    def subscribe(self, next_seq: int = 0, instance: str = "") -> None:
        self.send(Subscribe(next_seq, instance))

    def receive(self) -> Any:
        """The next message, or None once the replica has closed the connection."""
        while not self._inbox:
            try:
                data = self.sock.recv(1 << 20)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
            self._inbox += self._decoder.feed(data)
        return self._inbox.pop(0)

    def step(self) -> Step:
        message = self.receive()
        assert isinstance(message, Step), message
        return message

    def until(self, done: Callable[[list[Output], list[Failed]], bool]) -> tuple[list[Output], list[Failed]]:
        """Outputs and failures of the steps received until ``done`` says so."""
        outputs: list[Output] = []
        failed: list[Failed] = []
        while not done(outputs, failed):
            message = self.receive()
            assert message is not None, "the replica closed the connection"
            if isinstance(message, Step):
                outputs += message.outputs
                failed += message.failed
        return outputs, failed

    def finish(self, *request_ids: str) -> dict[str, list[int]]:
        """Tokens of requests (one sample each) once all have ended well."""
        outputs, failed = self.until(
            lambda outputs, failed: (
                bool(failed)
                or {o.request_id for o in outputs if o.finish_reason is not None} >= set(request_ids)
            )
        )
        assert failed == []
        return {
            name: [token for o in outputs if o.request_id == name for token in o.token_ids]
            for name in request_ids
        }

    def probe(self) -> Health:
        """The replica's answer to a probe; drops steps that came before it."""
        self._nonce += 1
        self.send(Probe(self._nonce))
        while True:
            message = self.receive()
            assert message is not None, "the replica closed the connection"
            if isinstance(message, Health):
                assert message.nonce == self._nonce
                return message

    def wait_idle(self) -> Health:
        """Probes until nothing runs and every block is free."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            health = self.probe()
            stats = health.stats
            if not stats.num_running and not stats.num_waiting:
                assert stats.num_free_blocks == stats.num_blocks
                return health
            assert time.monotonic() < deadline, f"still busy: {stats}"

    def close(self) -> None:
        self.sock.close()
