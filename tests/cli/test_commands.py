"""ps, why, scale and reload against a scripted control socket: what they print and how they fail."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.cli import ps
from headrace.cli.announce import Throughput
from headrace.cli.main import main
from headrace.core.control import (
    Done,
    FromServer,
    Progress,
    Ps,
    PsReply,
    Refusal,
    Reload,
    Scale,
    ToServer,
    Why,
    WhyReply,
    control_path,
)
from headrace.core.messages import Failed
from headrace.core.routing import (
    Candidate,
    Capabilities,
    Decision,
    Endpoint,
    FleetStatus,
    Member,
    ReplicaStatus,
)
from headrace.core.wire import FrameDecoder, encode_frame

PORT = 4711


class Control:
    """Answers each connection with ``script``, raw bytes or messages, and keeps what it was asked."""

    def __init__(self) -> None:
        self.script: list[FromServer | bytes] = []
        self.asked: list[ToServer] = []
        path = control_path(PORT)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            with connection:
                decoder: FrameDecoder[ToServer] = FrameDecoder(ToServer)
                messages = decoder.feed(connection.recv(1 << 16))
                if not messages:
                    return
                self.asked += messages
                for reply in self.script:
                    connection.sendall(reply if isinstance(reply, bytes) else encode_frame(reply))

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(control_path(PORT)))
        self._thread.join()
        self._socket.close()


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Control]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.path.relpath(tmp_path))
    monkeypatch.setenv("HEADRACE_PORT", str(PORT))
    server = Control()
    yield server
    server.close()


def status(**changes: Any) -> FleetStatus:
    ours = Member(
        endpoint=Endpoint(replica_id="replica-0", model="m", address="/x", num_restarts=2),
        state="ready",
        instance="a",
        capabilities=Capabilities(kind="headrace", load=True),
    )
    theirs = Member(
        endpoint=Endpoint(replica_id="hosted", model="m", address="http://a", overflow=True),
        state="down",
        capabilities=Capabilities(kind="openai", limits=["takes text only"]),
    )
    first = ReplicaStatus(
        member=ours,
        **{"num_running": 7, "prefix_cache_queries": 8, "prefix_cache_hits": 6, "ttft_s": 0.25, **changes},
    )
    second = ReplicaStatus(member=theirs, num_in_flight=1, note="connection refused")
    return FleetStatus(policy="predicted_ttft", replicas=[first, second], models=[], num_queued=3)


def test_ps_fits_a_terminal_of_120(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = status()
    busy = msgspec.structs.replace(
        fleet.replicas[0],
        member=msgspec.structs.replace(
            fleet.replicas[0].member,
            endpoint=Endpoint(replica_id="qwen2.5-coder-1.5b-12", model="qwen2.5-coder-1.5b", address="/x"),
            state="draining",
        ),
        breaker="closed",
        num_running=250,
        num_waiting=1000,
        kv_cache_usage=1.0,
        prefix_cache_hits=8,
        ttft_s=12.345,
        predicted_ttft_s=10.0,
        num_rescued=10_000,
    )
    control.script = [PsReply(msgspec.structs.replace(fleet, replicas=[busy]))]
    assert main(["ps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120
    row = next(line.split() for line in lines if "qwen" in line)
    assert row[:2] == ["qwen2.5-coder-1.5b-12", "qwen2.5-coder-1.5b"], "not folded"
    assert row[4:] == ["250", "(1000)", "100.0", "100.0", "12,345", "(10,000)", "10000"]
    assert ps.cells(msgspec.structs.replace(busy, breaker="open"))[3] == "draining, breaker open"


def test_ps_shows_which_pack_runs_where(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    fleet = status()
    packed = msgspec.structs.replace(fleet.replicas[0], pack="0123456789abcdef")
    control.script = [PsReply(msgspec.structs.replace(fleet, replicas=[packed]))]
    assert main(["ps"]) == 0
    assert "replica-0: runs pack 0123456789ab" in capsys.readouterr().out.splitlines()


def test_ps_shows_a_model_that_was_scaled_to_zero(
    control: Control, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = FleetStatus(policy="p", replicas=[], models=[], num_queued=0, scaled_to_zero=["m"])
    control.script = [PsReply(empty)]
    assert main(["ps"]) == 0
    assert "m: 0 replicas, " in (shown := capsys.readouterr().out) and "headrace scale 1 --model m" in shown
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scaled_to_zero"] == ["m"]


def test_ps_is_a_table_and_notes(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    control.script = [PsReply(status())]
    assert main(["ps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert control.asked == [Ps()]
    row = next(line.split() for line in lines if "replica-0" in line)
    assert row == [
        *("replica-0", "m", "headrace", "ready", "7", "(0)", "0.0", "75.0", "250", "(-)", "0"),
    ]
    hosted = next(line.split() for line in lines if line.strip().startswith("hosted "))
    assert hosted[2:7] == ["openai,", "overflow", "down", "-", "-"], "what it does not tell is not shown as 0"
    assert main(["ps", "--wide"]) == 0
    row = next(line.split() for line in capsys.readouterr().out.splitlines() if "replica-0" in line)
    assert row == [
        *("replica-0", "m", "headrace", "ready", "none", "0", "7", "0.0", "75.0", "-", "-", "-", "250"),
        *("0", "0", "0", "closed", "2"),
    ]
    assert "hosted: connection refused" in lines and "hosted: takes text only" in lines
    assert any("waiting in the router: 3" in line for line in lines)


def test_ps_for_programs(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    control.script = [PsReply(status())]
    assert main(["ps", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["replicas"][0]["num_running"] == 7 and found["num_queued"] == 3


def test_why_tells_each_attempt(control: Control, capsys: pytest.CaptureFixture[str]) -> None:
    first = Decision(
        request_id="cmpl-1",
        caller_id="mine",
        model="m",
        at=0.0,
        policy="predicted_ttft",
        attempt=0,
        num_prompt_tokens=1234,
        candidates=[
            Candidate(replica_id="a", score=2.0, ttft_s=0.02, num_cached_tokens=5),
            Candidate(replica_id="b", score=1.0, ttft_s=0.01, num_cached_tokens=1216),
            Candidate(replica_id="c", excluded="breaker open"),
        ],
        chosen="b",
        reason="lowest score",
        outcome="replica_gone",
    )
    control.script = [WhyReply([first])]
    assert main(["why", "mine"]) == 0
    text = capsys.readouterr().out
    assert control.asked == [Why("mine")]
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["a"], ["b"], ["c"])]
    assert [row[0] for row in rows] == ["b", "a", "c"], "best first, those not considered last"
    assert rows[0][-1] == "chosen" and rows[2][1:] == ["breaker", "open"]
    assert "1,234 prompt tokens" in text and "replica gone" in text


def test_progress_goes_to_stderr_and_the_result_to_stdout(
    control: Control, capsys: pytest.CaptureFixture[str]
) -> None:
    control.script = [Progress("starting replica-1"), Done("m runs 2 replicas")]
    assert main(["scale", "2", "--model", "m"]) == 0
    assert main(["reload"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "m runs 2 replicas\n" * 2 and printed.err == "starting replica-1\n" * 2
    assert control.asked == [Scale(2, "m"), Reload("")]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (
            [Refusal(Failed("", 404, "not_found_error", "no replica 'x'"), "there is y")],
            "error: no replica 'x'\nhint: there is y",
        ),
        ([Progress("starting")], "hung up before it was done"),
        ([], "hung up before it was done"),
        ([b"\xff" * 64], "speaks another language"),
        ([Done("what?")], "answered with Done"),
        ([WhyReply([])], "answered with WhyReply"),
    ],
)
def test_whatever_goes_wrong_is_an_error_with_a_hint(
    control: Control, capsys: pytest.CaptureFixture[str], script: list[Any], words: str
) -> None:
    control.script = script
    assert main(["ps"]) == 1
    printed = capsys.readouterr()
    assert words in printed.err and "\nhint: " in printed.err and printed.out == ""


@pytest.mark.parametrize("count", ["many", "65", "1.5"])
def test_a_bad_number_is_wrong_usage(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", count]) == 2
    assert capsys.readouterr().err.startswith("error: N: ")


def test_throughput_is_summed_and_silent_when_idle() -> None:
    throughput = Throughput()
    assert throughput.line(status(), 1.0) is None
    line = throughput.line(
        status(computed_prompt_tokens=100, generation_tokens=50, prefix_cache_queries=18), 2.0
    )
    assert line == ("prompt 50 tok/s, generation 25 tok/s, running 7, waiting 3, KV 0.0 %, prefix hits 0 %")
    assert throughput.line(status(computed_prompt_tokens=100, generation_tokens=50), 2.0) is None
