"""What a replica answers about packs, while it serves."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.messages import (
    AskRecorded,
    AskStepTimes,
    PackFailed,
    PackReady,
    PackRetired,
    PackUsed,
    PreparePack,
    Recorded,
    RetirePack,
    Score,
    Scores,
    Step,
    StepTimes,
    UsePack,
)
from tests.engine.packs import write_pack
from tests.models.tiny import make_tiny
from tests.replica.harness import PATIENCE_S, Peer, Replica

PROMPT = [(7 * i) % 300 + 2 for i in range(20)]
TOKENS = [array("I", [(31 * i + 7 * j) % 300 + 2 for j in range(200)]).tobytes() for i in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def replica(folder: Path, tmp_path: Path) -> Iterator[Replica]:
    started = Replica(folder, tmp_path, module="tests.replica.python_packs")
    try:
        yield started.wait_ready()
    finally:
        started.stop()


def ask(peer: Peer, message: Any) -> Any:
    peer.send(message)
    return peer.receive()


def test_a_pack_is_tried_and_flipped_under_streams(replica: Replica, tmp_path: Path) -> None:
    caller, fleet, listener = replica.connect(), replica.connect(), replica.connect()
    listener.subscribe()
    caller.submit("a", PROMPT, max_tokens=300)
    wanted = caller.finish("a")["a"]
    pack = write_pack(tmp_path / "same", "same", prepare_s=0.1)
    wrong = write_pack(tmp_path / "wrong", "wrong", every=1, error=1.0)
    caller.submit("b", PROMPT, max_tokens=300)
    fleet.send(PreparePack(pack, str(tmp_path / "same")))
    failed = ask(fleet, UsePack(pack))
    assert isinstance(failed, PackFailed) and "not prepared" in failed.failed.message
    assert isinstance(fleet.receive(), PackReady)
    assert isinstance(ask(fleet, PreparePack(wrong, str(tmp_path / "wrong"))), PackReady)
    assert caller.finish("b")["b"] == wanted
    caller.submit("c", PROMPT, max_tokens=300)
    scores = ask(fleet, Score(TOKENS, [1, 7], ["", pack, wrong], 1, 4))
    assert isinstance(scores, Scores) and [one.pack_id for one in scores.scored] == ["", pack, wrong]
    own, same, other = (one.sequences for one in scores.scored)
    assert own == same and own != other
    assert ask(fleet, UsePack(pack)) == PackUsed(pack)
    assert caller.finish("c")["c"] == wanted
    times = ask(fleet, AskStepTimes())
    assert isinstance(times, StepTimes) and times.pack_id == pack
    recorded = ask(fleet, AskRecorded())
    assert isinstance(recorded, Recorded)
    assert recorded.sequences == [array("I", [*PROMPT, *wanted]).tobytes()] * 3
    failed = ask(fleet, RetirePack(pack))
    assert isinstance(failed, PackFailed) and "in use" in failed.failed.message
    assert ask(fleet, UsePack("")) == PackUsed("")
    assert ask(fleet, RetirePack(pack)) == PackRetired(pack)
    told = [""]
    while told[-2:] != [pack, ""]:  # subscribers hear of both flips, the idle one too
        message = listener.receive()
        assert message is not None
        if isinstance(message, Step) and message.stats.pack != told[-1]:
            told.append(message.stats.pack)


def test_what_a_peer_had_begun_ends_with_it(replica: Replica, tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "same", "same", prepare_s=0.5)
    slow = write_pack(tmp_path / "slow", "slow", seconds=0.05)
    gone, fleet = replica.connect(), replica.connect()
    assert isinstance(ask(gone, PreparePack(slow, str(tmp_path / "slow"))), PackReady)
    gone.send(Score(TOKENS, [8], [slow], 1, 4), PreparePack(pack, str(tmp_path / "same")))
    busy = ask(fleet, Score(TOKENS[:1], [1], [""], 1, 4))
    assert isinstance(busy, PackFailed) and "being scored" in busy.failed.message
    gone.close()
    deadline = time.monotonic() + PATIENCE_S
    while isinstance(ask(fleet, Score(TOKENS[:1], [1], [""], 1, 4)), PackFailed):
        assert time.monotonic() < deadline
    # nobody waits for it: whoever wants it has it prepared anew
    while not isinstance(answer := ask(fleet, PreparePack(pack, str(tmp_path / "same"))), PackReady):
        assert "being prepared" in answer.failed.message and time.monotonic() < deadline
    assert ask(fleet, UsePack(pack)) == PackUsed(pack)
    fleet.submit("a", PROMPT, max_tokens=5)
    assert len(fleet.finish("a")["a"]) == 5


def test_a_pack_that_cannot_be_had_leaves_all_as_it_was(replica: Replica, tmp_path: Path) -> None:
    fleet = replica.connect()
    broken = write_pack(tmp_path / "broken", "broken")
    failed = ask(fleet, PreparePack(broken, str(tmp_path / "broken")))
    assert isinstance(failed, PackFailed) and failed.failed.code == "pack_refused"
    assert ask(fleet, AskStepTimes()) == StepTimes("", 0, [])
    assert isinstance(ask(fleet, Score([], [1], [""], 1, 4)), PackFailed)
    raises = write_pack(tmp_path / "raises", "raises")
    assert isinstance(ask(fleet, PreparePack(raises, str(tmp_path / "raises"))), PackReady)
    failed = ask(fleet, Score(TOKENS, [8], [raises], 1, 4))
    assert isinstance(failed, PackFailed) and "a kernel of its own mind" in failed.failed.message
    fleet.wait_idle()
