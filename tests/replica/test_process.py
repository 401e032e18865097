"""A replica as its peers see it: real processes, real sockets, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.core.knobs import LogConfig
from headrace.core.messages import Drain, Health, Probe, Submit
from headrace.core.request import Request, SamplingParams, pack_tokens
from headrace.core.wire import encode_frame
from tests.models.tiny import make_tiny
from tests.replica.harness import PATIENCE_S, Peer, Replica, start

ENDLESS = {"max_tokens": 400}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def replica(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    running = Replica(folder, tmp_path_factory.mktemp("replica")).wait_ready()
    yield running
    assert running.process.poll() is None, "the replica died during the tests"
    running.stop()


@pytest.fixture
def peer(replica: Replica) -> Iterator[Peer]:
    connected = replica.connect()
    yield connected
    connected.close()
    observer = replica.connect()
    observer.wait_idle()
    observer.close()


def test_hello_says_what_it_can_do(replica: Replica, peer: Peer) -> None:
    hello = peer.hello
    assert (hello.replica_id, hello.model, hello.role, hello.pid) == (
        "r0",
        "tiny",
        "unified",
        replica.process.pid,
    )
    assert (hello.vocab_size, hello.max_model_len, hello.block_size) == (320, 500, 4)
    assert hello.dtype == "float32" and hello.eos_token_ids == [1] and len(hello.root_identity) == 32
    assert hello.hardware.startswith("cpu x1 ") and hello.instance
    assert hello.kv_bytes > 0 and hello.weights_bytes > 0
    assert replica.events[0]["event"] == "loading" and replica.events[-1] == {"event": "ready"}
    assert replica.events[-2]["done"] == replica.events[-2]["total"]
    assert replica.socket.parent.stat().st_mode & 0o777 == 0o700


def test_steps_carry_outputs_and_stats_and_reach_who_asked(peer: Peer, replica: Replica) -> None:
    other = replica.connect()
    before = peer.probe().stats
    peer.submit("a", list(range(2, 22)), max_tokens=6)
    steps = [peer.step()]
    while not (steps[-1].outputs and steps[-1].outputs[0].finish_reason):
        steps.append(peer.step())
    assert all(len(step.outputs) == 1 for step in steps)
    assert steps[-1].outputs[0].finish_reason == "length"
    assert steps[-1].stats.num_steps - before.num_steps == len(steps) == 6
    assert steps[-1].stats.generation_tokens - before.generation_tokens == 6
    assert [step.outputs[0].timing is not None for step in steps] == [True] + 5 * [False]
    assert not any(step.events for step in steps), "it did not subscribe"
    # nobody is woken for another's tokens: the answer to a probe is the first that the other hears
    other.send(Probe(7))
    health = other.receive()
    assert isinstance(health, Health) and health.nonce == 7
    other.close()


def test_many_peers_get_their_own_answers(replica: Replica, peer: Peer) -> None:
    prompts = {f"many-{i}": [i + 2, 2 * i + 3, 7] for i in range(12)}
    alone = {}
    for name, prompt in prompts.items():
        peer.submit(name, prompt, max_tokens=8)
        alone |= peer.finish(name)
    peers = [replica.connect() for _ in range(4)]
    for index, (name, prompt) in enumerate(prompts.items()):
        peers[index % 4].submit(name, prompt, max_tokens=8)
    together = {}
    for index, one in enumerate(peers):
        together |= one.finish(*list(prompts)[index::4])
        one.close()
    assert together == alone


def test_abort_frees_blocks_and_ends_messages(peer: Peer) -> None:
    peer.submit("gone", [5, 6, 7], **ENDLESS)
    peer.submit("pair", [5, 6, 8], n=2, temperature=1.0, **ENDLESS)
    peer.until(
        lambda outputs, _: {(o.request_id, o.sample_index) for o in outputs} >= {("gone", 0), ("pair", 1)}
    )
    peer.abort("gone")
    peer.abort("pair", 0)
    peer.abort("never heard of")
    assert peer.probe().stats.num_running == 1
    outputs, _ = peer.until(lambda outputs, _: len(outputs) >= 5)
    assert {(o.request_id, o.sample_index) for o in outputs} == {("pair", 1)}
    peer.abort("pair", 1)
    assert peer.wait_idle().stats.num_running == 0


@pytest.mark.parametrize("ending", ["close", "reset", "kill"])
def test_a_lost_peer_frees_its_blocks(ending: str, replica: Replica, peer: Peer) -> None:
    if ending == "kill":
        script = (
            "import sys, time; from pathlib import Path; from tests.replica.harness import Peer\n"
            "peer = Peer(Path(sys.argv[1]))\n"
            "for i in range(3): peer.submit(f'lost-{i}', [5, 6, i + 2], max_tokens=400)\n"
            "peer.step(); print('running', flush=True); time.sleep(1000)\n"
        )
        victim = subprocess.Popen(
            [sys.executable, "-c", script, str(replica.socket)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert victim.stdout is not None and victim.stdout.readline() == b"running\n"
        victim.kill()
        victim.wait(PATIENCE_S)
        victim.stdout.close()
    else:
        lost = replica.connect()
        for i in range(3):
            lost.submit(f"lost-{i}", list(range(2, 300)), **ENDLESS)
        lost.step()
        if ending == "reset":
            lost.sock.shutdown(socket.SHUT_RDWR)
        lost.close()
    # what it asked for ends long before its 400 tokens
    before = peer.probe().stats.generation_tokens
    peer.wait_idle()
    assert peer.probe().stats.generation_tokens - before < 3 * 400 - 100


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\x05\x00\x00\x00hello",
        b"GET / HTTP/1.1\r\n\r\n",
        encode_frame({"type": "?"}),
    ],
    ids=["huge length", "not msgpack", "http", "unknown message"],
)
def test_garbage_ends_only_its_own_connection(garbage: bytes, replica: Replica, peer: Peer) -> None:
    peer.submit("steady", [5, 6, 7], max_tokens=60)
    bad = replica.connect()
    bad.submit("bad", [5, 6, 9], **ENDLESS)
    bad.sock.sendall(garbage)
    while bad.receive() is not None:
        pass
    bad.close()
    assert len(peer.finish("steady")["steady"]) == 60
    peer.wait_idle()


def test_half_a_frame_is_no_harm(replica: Replica, peer: Peer) -> None:
    half = replica.connect()
    half.sock.sendall(b"\x40\x00\x00\x00half")
    peer.submit("whole", [5, 6, 7], max_tokens=5)
    assert len(peer.finish("whole")["whole"]) == 5
    half.close()


@pytest.mark.parametrize(
    ("prompt", "params", "param", "code"),
    [
        ([], {}, "prompt", None),
        ([320], {}, "prompt", None),
        ([2] * 500, {}, "prompt", "context_length_exceeded"),
        ([2], {"temperature": -1.0}, "temperature", None),
        ([2], {"top_p": float("nan")}, "top_p", None),
        ([2], {"logit_bias": {320: 1.0}}, "logit_bias", None),
        ([2], {"n": 1000}, "n", None),
    ],
    ids=["empty", "token id", "too long", "temperature", "nan", "bias", "n"],
)
def test_a_bad_request_fails_alone(
    prompt: list[int], params: dict[str, object], param: str, code: str | None, peer: Peer
) -> None:
    peer.submit("bad", prompt, **params)
    peer.submit("good", [5, 6], max_tokens=3)
    outputs, failed = peer.until(lambda o, f: bool(f) and bool(o) and o[-1].finish_reason is not None)
    assert [(f.request_id, f.status, f.kind, f.param, f.code) for f in failed] == [
        ("bad", 400, "invalid_request_error", param, code)
    ]
    assert [o.request_id for o in outputs] == ["good"] * 3


def test_an_id_in_use_is_refused_wherever_it_comes_from(replica: Replica, peer: Peer) -> None:
    other = replica.connect()
    peer.submit("mine", [5, 6], max_tokens=200)
    peer.step()
    other.submit("mine", [7, 8], max_tokens=5)
    other.abort("mine")
    outputs, failed = other.until(lambda _, f: bool(f))
    assert outputs == [] and failed[0].param == "request_id"
    other.close()
    assert len(peer.finish("mine")["mine"]) > 100


def test_a_flood_is_served(replica: Replica, peer: Peer) -> None:
    """300 requests and 2,000 probes in one write, some aborted before they ever ran."""
    requests = [
        Submit(
            Request(
                request_id=f"flood-{i}",
                prompt=pack_tokens([2 + i % 300, 3]),
                sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=1 + i % 3, ignore_eos=True),
            )
        )
        for i in range(300)
    ]
    peer.send(*requests)
    for i in range(0, 300, 10):
        peer.abort(f"flood-{i}")
    other = replica.connect()
    for _ in range(2000):
        other.probe()
    alive = [f"flood-{i}" for i in range(300) if i % 10]
    outputs, failed = peer.until(
        lambda outputs, _: {o.request_id for o in outputs if o.finish_reason is not None} >= set(alive)
    )
    assert failed == []
    ended = [o.request_id for o in outputs if o.finish_reason is not None]
    assert len(ended) == len(set(ended))
    other.close()


def test_a_reader_that_sleeps_is_cut_off(folder: Path, tmp_path: Path) -> None:
    replica = Replica(folder, tmp_path, module="tests.replica.small_backlog").wait_ready()
    try:
        awake, asleep = replica.connect(), replica.connect()
        # 20 alternatives a token fill the socket's buffer and then the backlog
        for i in range(4):
            asleep.submit(f"asleep-{i}", [5, 6, i + 2], logprobs=20, max_tokens=490)
        for name in ("first", "second", "third"):
            awake.submit(name, [9, 9], max_tokens=490)
            assert len(awake.finish(name)[name]) == 490
        awake.wait_idle()
        received = 0
        while asleep.receive() is not None:
            received += 1
        assert 0 < received < 490
    finally:
        replica.stop()


def test_one_message_above_the_limit_reaches_a_peer_that_reads(folder: Path, tmp_path: Path) -> None:
    knobs = {"max_num_batched_tokens": 4096, "kv_cache_gib": 0.1}
    replica = Replica(folder, tmp_path, module="tests.replica.small_backlog", **knobs).wait_ready()
    try:
        peer = replica.connect()
        # 800 KiB in one message: more than the limit and a socket's buffer together
        peer.submit("long", [5, 6] * 240, prompt_logprobs=20, n=6, max_tokens=4)
        outputs, failed = peer.until(
            lambda outputs, failed: bool(failed) or sum(o.finish_reason is not None for o in outputs) == 6
        )
        assert not failed and sum(o.prompt_logprobs is not None for o in outputs) == 6
    finally:
        replica.stop()


@pytest.mark.parametrize("how", ["signal", "message"])
def test_draining_finishes_what_runs_and_refuses_the_rest(how: str, folder: Path, tmp_path: Path) -> None:
    replica = Replica(folder, tmp_path).wait_ready()
    try:
        peer = replica.connect()
        peer.submit("last", [5, 6, 7], max_tokens=300)
        peer.step()
        if how == "signal":
            replica.process.send_signal(signal.SIGTERM)
        else:
            peer.send(Drain())
        while not peer.probe().draining:
            pass
        peer.submit("late", [5, 6, 7], max_tokens=2)
        outputs, failed = peer.until(lambda o, f: bool(o) and o[-1].finish_reason is not None and bool(f))
        assert [(f.request_id, f.status, f.code) for f in failed] == [("late", 503, "unavailable")]
        assert {o.request_id for o in outputs} == {"last"} and outputs[-1].finish_reason == "length"
        while peer.receive() is not None:
            pass
        assert replica.process.wait(PATIENCE_S) == 0
        assert not replica.socket.exists()
    finally:
        replica.stop()


def test_a_signal_right_after_ready_drains(folder: Path, tmp_path: Path) -> None:
    replica = Replica(folder, tmp_path).wait_ready()
    try:
        replica.process.send_signal(signal.SIGTERM)
        assert replica.process.wait(PATIENCE_S) == 0
        assert not replica.socket.exists()
    finally:
        replica.stop()


def test_it_stops_loading_when_nobody_listens(folder: Path, tmp_path: Path) -> None:
    replica = Replica(folder, tmp_path)
    try:
        assert replica.process.stdout is not None
        replica.process.stdout.close()
        assert replica.process.wait(PATIENCE_S) == 1
    finally:
        replica.stop()


@pytest.mark.parametrize("level", ["info", "warning"])
def test_it_logs_as_it_is_told(
    level: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    logs = LogConfig(log_level=level, log_json=True)  # type: ignore[arg-type]
    replica = Replica(folder, tmp_path, logs=logs).wait_ready()
    try:
        assert replica.process.stdin is not None
        replica.process.stdin.close()
        assert replica.process.wait(PATIENCE_S) == 0
    finally:
        replica.stop()
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    told = [line["level"] for line in lines if "parent is gone" in line["message"]]
    assert told == (["info"] if level == "info" else [])


def test_it_leaves_with_its_parent(folder: Path, tmp_path: Path) -> None:
    """EOF on standard input ends it, also in the middle of work; an idle one did nothing before."""
    replica = Replica(folder, tmp_path).wait_ready()
    try:
        peer = replica.connect()
        peer.probe()
        used = _cpu_ticks(replica.process.pid)
        # it sleeps in select: waiting for an answer that never comes costs it nothing
        peer.sock.settimeout(1.0)
        with pytest.raises(TimeoutError):
            peer.sock.recv(1)
        assert _cpu_ticks(replica.process.pid) - used <= 5
        peer.sock.settimeout(PATIENCE_S)
        peer.submit("cut", [5, 6, 7], **ENDLESS)
        peer.step()
        assert replica.process.stdin is not None
        replica.process.stdin.close()
        assert replica.process.wait(PATIENCE_S) == 0
        assert not replica.socket.exists()
    finally:
        replica.stop()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.parametrize(
    ("line", "kind", "code"),
    [
        ("not json\n", "UsageError", 2),
        ('{"replica_id": "r"}\n', "UsageError", 2),
        ("", "UsageError", 2),
        ("MISSING FOLDER", "ModelNotFoundError", 1),
        ("TOO LONG", "UsageError", 2),
        ("TOO LITTLE MEMORY", "InsufficientMemoryError", 1),
        ("NOWHERE TO LISTEN", "UsageError", 2),
        ("NO FOLDER FOR BLOCKS", "UsageError", 2),
    ],
)
def test_a_failed_start_says_why(line: str, kind: str, code: int, folder: Path, tmp_path: Path) -> None:
    spec = {
        "replica_id": "r",
        "model": "m",
        "folder": str(folder),
        "revision": "",
        "socket": str(tmp_path / "s"),
        "engine": {"device": "cpu"},
    }
    if line == "MISSING FOLDER":
        line = json.dumps({**spec, "folder": str(tmp_path / "nothing")}) + "\n"
    elif line == "TOO LONG":
        line = json.dumps({**spec, "engine": {"max_model_len": 513}}) + "\n"
    elif line == "TOO LITTLE MEMORY":
        line = json.dumps({**spec, "engine": {"kv_cache_gib": 1e-5}}) + "\n"
    elif line == "NOWHERE TO LISTEN":  # its threads run already, and must not keep it
        engine = {"device": "cpu", "kv_disk_gb": 0.1, "kv_disk_path": str(tmp_path / "kv")}
        line = json.dumps({**spec, "engine": engine, "kv_listen": "tcp://203.0.113.1:1"}) + "\n"
    elif line == "NO FOLDER FOR BLOCKS":
        engine = {"device": "cpu", "kv_disk_gb": 0.1, "kv_disk_path": f"{folder}/config.json"}
        line = json.dumps({**spec, "engine": engine}) + "\n"
    process = start()
    stdout, _ = process.communicate(line.encode(), timeout=PATIENCE_S)
    last = json.loads(stdout.splitlines()[-1])
    assert (last["event"], last["kind"]) == ("error", kind)
    assert last["message"] and process.returncode == code
