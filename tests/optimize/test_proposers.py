"""An endpoint that is down, busy or chatty; an agent that works, hangs, breaks or does nothing."""

from __future__ import annotations

import json
import random
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.kernels.native.build import compile_kernel
from headrace.kernels.native.signature import SIGNATURES
from headrace.optimize.dims import op_dims
from headrace.optimize.loop import Limits
from headrace.optimize.proposal import ProposalError, Trial
from headrace.optimize.proposers.agent import Agent
from headrace.optimize.proposers.brief import facts, op_text, results, skeleton
from headrace.optimize.proposers.endpoint import Endpoint, find_source, prompt
from headrace.optimize.records import Candidate, Target, Verdict
from headrace.optimize.rounds import NoCandidate
from headrace.optimize.targets import find_targets
from tests.optimize.fakes import CONFIG, World, kernel_profile

TARGET = find_targets(kernel_profile(), CONFIG, block_size=32)[0]
RNG = random.Random(0)
CODE = '#include "headrace_kernel.h"\nextern "C" int hr_run(const hr_call *call) { return HR_DONE; }\n'
ANSWER = f"Here it is:\n```cpp\n{CODE}```\nIt is fast."


class Server:
    """Answers each chat completion with the next of ``script``: text, or (status, body)."""

    def __init__(self) -> None:
        self.script: list[str | tuple[int, str]] = []
        self.asked: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, json.dumps({"data": [{"id": "small"}]}))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked.append(json.loads(body))
                step = outer.script.pop(0) if len(outer.script) > 1 else outer.script[0]
                if isinstance(step, tuple):
                    self._answer(*step)
                else:
                    choices = [{"message": {"role": "assistant", "content": step}}]
                    usage = {"prompt_tokens": 100, "completion_tokens": 7}
                    message = {"choices": choices, "usage": usage}
                    self._answer(200, json.dumps(message))

            def _answer(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body.encode())))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.close()


def endpoint(url: str) -> tuple[Endpoint, list[float]]:
    pauses: list[float] = []
    return Endpoint(url, pause=pauses.append), pauses


def test_the_code_of_an_answer_becomes_a_candidate(server: Server) -> None:
    server.script = [ANSWER]
    one, _ = endpoint(server.url)
    source = one.propose(TARGET, None, [], RNG)
    assert source is not None
    assert source.files["kernel.cpp"] == CODE
    assert (source.author, source.entry.op, source.entry.max_rows) == ("small", "decoder_layer", 8)
    sent = server.asked[0]
    assert sent["model"] == "small"
    told = sent["messages"][1]["content"]
    for expected in (
        "def decoder_layer(",
        "hr_run",
        "gate_up (weight)",
        "hidden_size 64",
        "runs at 20 % of its roof",
    ):
        assert expected.replace("gate_up (weight)", "`gate_up` (weight)") in told, expected


def test_prose_is_asked_again_and_then_recorded(server: Server) -> None:
    server.script = ["I cannot write kernels.", ANSWER]
    one, pauses = endpoint(server.url)
    source = one.propose(TARGET, None, [], RNG)
    assert source is not None
    assert source.note == "attempt 2; 200 + 14 tokens in 0 s"
    assert [message["role"] for message in server.asked[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    server.script = ["I still cannot."]
    with pytest.raises(ProposalError, match=r"3 tries: the answer holds no C\+\+") as caught:
        one.propose(TARGET, None, [], RNG)
    assert caught.value.reply == "I still cannot."
    assert pauses == []


def test_a_busy_endpoint_is_asked_again_later(server: Server) -> None:
    server.script = [(503, "busy"), ANSWER]
    one, pauses = endpoint(server.url)
    assert one.propose(TARGET, None, [], RNG) is not None
    assert pauses == [4.0]


def test_what_no_retry_mends_is_said_at_once(server: Server) -> None:
    server.script = [(400, "the prompt is too long")]
    one, pauses = endpoint(server.url)
    with pytest.raises(ProposalError, match="answered 400: the prompt is too long"):
        one.propose(TARGET, None, [], RNG)
    assert (len(server.asked), pauses) == (1, [])


def test_an_endpoint_that_is_down_ends_the_round_and_is_recorded(tmp_path: Path) -> None:
    one, pauses = endpoint("http://127.0.0.1:9")
    world = World(tmp_path)
    said: list[str] = []
    (end,) = world.loop(one, limits=Limits(failures=2), say=said.append).run(1)  # type: ignore[arg-type]
    assert end.outcome == "no_candidate"
    assert len(pauses) == 4
    record = world.store.rounds()[0].proposed(2)
    assert isinstance(record, NoCandidate)
    assert "cannot be reached" in record.detail
    assert any("no candidate: 3 tries" in line for line in said)


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (ANSWER, CODE),
        (CODE, CODE),
        (f"```python\nhr_run()\n```\n```c++\n{CODE}```", CODE),
        (f"```cpp\nint helper();\n```\n```cpp\n{CODE}```", CODE),
        (f"```cpp\n{CODE}", CODE),  # cut at max_tokens: the compiler will say
        ("```cpp\nint main() {}\n```", None),
        ("the function hr_run(call) must be written", None),
        ("", None),
    ],
)
def test_code_is_found_in_answers(reply: str, found: str | None) -> None:
    assert find_source(reply) == found


def test_a_prompt_holds_the_best_so_far_and_the_last_failures(tmp_path: Path) -> None:
    (tmp_path / "kernel.cpp").write_text("// the best\n")

    def trial(number: int, passed: bool) -> Trial:
        verdict = Verdict(
            candidate=str(number),
            digest="",
            passed=passed,
            reason="ok" if passed else "crashed",
            detail=f"reason {number}",
            seconds=0,
            sandbox="",
        )
        candidate = Candidate(name=f"{number:03d}", folder="", digest="", author="")
        return Trial(candidate, tmp_path, verdict)

    history = [trial(number, passed=number == 0) for number in range(6)]
    text = prompt(TARGET, op_text(TARGET), history[0], history)
    assert "// the best" in text
    assert [f"reason {number}" in text for number in range(6)] == [False, False, False, True, True, True]


@pytest.mark.parametrize("op", list(SIGNATURES))
def test_every_op_can_be_described(op: str, tmp_path: Path) -> None:
    fixed = op_dims(op, CONFIG, phase="decode", block_size=32, part="down")
    target: Target = msgspec.structs.replace(
        TARGET, op=op, dims=fixed.dims, floats=fixed.floats, present=fixed.present
    )
    text = op_text(target)
    assert f"def {op}(" in text.reference
    told = facts(target, text)
    for slot in text.signature.slots:
        assert f"- `{slot.name}` ({slot.role}): " in told
    assert "as the reference says" not in told
    (tmp_path / "kernel.cpp").write_text(skeleton(target, text))
    compile_kernel(tmp_path / "kernel.cpp", [], tmp_path)


def test_slots_are_told_with_shape_and_dtype() -> None:
    told = facts(TARGET, op_text(TARGET))
    assert "- `x` (input): (rows, 64) float32" in told
    assert "- `gate_up` (weight): (192, 64) bfloat16, gate rows, then up rows" in told
    assert "- `post_mlp_norm` (weight): absent here" in told
    both = msgspec.structs.replace(TARGET, activation_dtypes=["float32", "bfloat16"])
    assert "- `x` (input): (rows, 64) float32 or bfloat16" in facts(both, op_text(both))
    assert "*x = " in skeleton(TARGET, op_text(TARGET))
    assert "*x = " not in skeleton(both, op_text(both))


def test_without_a_best_the_last_failure_is_shown_whole(tmp_path: Path) -> None:
    (tmp_path / "kernel.cpp").write_text("// does not compile\n")
    verdict = Verdict(
        candidate="1", digest="", passed=False, reason="compile_error", detail="", seconds=0, sandbox=""
    )
    failed = Trial(Candidate(name="001", folder="", digest="", author=""), tmp_path, verdict)
    told = results(None, [failed])
    assert "## Candidate 001, which failed so" in told
    assert "```cpp\n// does not compile\n```" in told
    assert "## Candidate 001" not in results(failed, [failed])


def agent(program: str, minutes: float = 1.0) -> Agent:
    return Agent(f"{sys.executable} -c {shlex.quote(program)}", minutes=minutes)


def test_an_agent_leaves_a_candidate_behind() -> None:
    program = (
        "import os, pathlib; print(sorted(os.listdir())); "
        "pathlib.Path('kernel.cpp').write_text('// mine'); pathlib.Path('part.h').write_text('// part')"
    )
    source = agent(program).propose(TARGET, None, [], RNG)
    assert source is not None
    assert source.files["kernel.cpp"] == "// mine"
    assert source.files["part.h"] == "// part"
    assert "task.md" in source.files["agent.log"]
    assert set(source.files) == {"kernel.cpp", "part.h", "agent.log"}
    assert source.author.startswith("agent:python")


def test_an_agent_that_hangs_is_stopped_with_all_it_started() -> None:
    program = "echo '// in time' > kernel.cpp; sleep 600 & echo $!; wait"
    source = Agent(f"sh -c {shlex.quote(program)}", minutes=0.05).propose(TARGET, None, [], RNG)
    assert source is not None
    assert (source.note, source.files["kernel.cpp"]) == ("stopped after 0.05 min", "// in time\n")
    started = Path(f"/proc/{source.files['agent.log'].strip()}/cwd")
    deadline = time.monotonic() + 30
    while started.exists() and time.monotonic() < deadline:  # killed, and gone when the system gets to it
        time.sleep(0.01)
    assert not started.exists()


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("pass", "changed nothing"),
        ("import os; os.remove('kernel.cpp')", "'kernel.cpp' is not there"),
        ("open('kernel.json', 'w').write('{')", "kernel.json"),
        ("print('no idea'); raise SystemExit(3)", "ended with code 3"),
    ],
)
def test_an_agent_that_leaves_nothing_of_use(program: str, reason: str) -> None:
    with pytest.raises(ProposalError, match=reason):
        agent(program).propose(TARGET, None, [], RNG)


def test_an_agent_that_is_no_command() -> None:
    with pytest.raises(ProposalError, match="no command"):
        Agent("/no/such/agent --now").propose(TARGET, None, [], RNG)
