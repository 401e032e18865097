"""The loop with fake stages: what it tries, what it keeps, and that a killed round goes on where it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headrace.core.errors import TimeUpError
from headrace.optimize.loop import Limits
from headrace.optimize.packing import read_manifest
from headrace.optimize.records import KernelProfile, RolloutRecord, Target, Verdict
from headrace.optimize.rounds import NoCandidate
from tests.optimize.fakes import Climber, World


def test_the_fastest_right_candidate_is_confirmed_and_published(tmp_path: Path) -> None:
    world, proposer = World(tmp_path), Climber()
    said: list[str] = []
    (end,) = world.loop(proposer, say=said.append).run(1)
    assert (end.outcome, end.candidate, end.candidates, end.right) == ("won", "003", 4, 3)
    assert proposer.asked[2:4] == [("decoder_layer", 1.09, 2), ("decoder_layer", 1.49, 3)]
    assert world.calls == [
        "profile stock",
        *("judge 001", "judge 002", "judge 003", "judge 004"),
        *("confirm 003", "publish 003"),
    ]
    (listed,) = world.registry.packs()
    assert listed.id == end.pack
    assert [entry.op for entry in listed.manifest.kernels] == ["decoder_layer"]
    assert sum(line.startswith("  00") for line in said) == 5  # one a candidate, one for the confirmation
    transcript = world.store.rounds()[0].transcript.read_text()
    assert "wrong_result: off by one" in transcript
    assert "## summary" in transcript
    assert any(line.startswith("  round ") for line in said)


def test_the_next_round_starts_from_the_new_baseline_and_its_pack_holds_both(tmp_path: Path) -> None:
    world = World(tmp_path)
    first, second = world.loop(Climber()).run(2)
    rounds = world.store.rounds()
    assert [one.spec.base_pack for one in rounds] == ["", first.pack]
    assert rounds[0].spec.run == rounds[1].spec.run
    assert "profile base" in world.calls
    targets = [one.load("bottleneck", Target) for one in rounds]
    assert [target.op for target in targets if target is not None] == ["decoder_layer", "logits_head"]
    manifest = read_manifest(world.registry.fetch(second.pack))
    assert [entry.op for entry in manifest.kernels] == ["decoder_layer", "logits_head"]
    assert manifest.builds_on == first.pack


def test_a_win_alone_that_loses_end_to_end_is_not_published(tmp_path: Path) -> None:
    world = World(tmp_path, end_to_end=lambda speed: 1.0)
    first, second = world.loop(Climber(), limits=Limits(confirmations=2)).run(2)
    assert [first.outcome, second.outcome] == ["no_win", "no_win"]
    assert [call for call in world.calls if call.startswith("confirm")] == ["confirm 003", "confirm 004"] * 2
    assert world.registry.packs() == []
    # what was tried in vain is not tried again
    targets = [one.load("bottleneck", Target) for one in world.store.rounds()]
    assert [target.op for target in targets if target is not None] == ["decoder_layer", "mlp_block"]


def test_what_is_found_out_on_the_whole_workload_is_no_win(tmp_path: Path) -> None:
    world = World(tmp_path, found_out=True)
    (end,) = world.loop(Climber()).run(1)
    assert end.outcome == "no_win"
    assert "stale_result: late" in world.store.rounds()[0].transcript.read_text()


def test_it_ends_when_nothing_is_left_to_gain(tmp_path: Path) -> None:
    ends = World(tmp_path, end_to_end=lambda speed: 1.0).loop(Climber()).run(9)
    assert [end.outcome for end in ends] == ["no_win"] * 3 + ["nothing_to_gain"]


def test_a_slow_candidate_is_not_even_confirmed(tmp_path: Path) -> None:
    world = World(tmp_path)
    (end,) = world.loop(Climber(speeds=(0.9, 1.02))).run(1)
    assert end.outcome == "no_win"
    assert not any(call.startswith("confirm") for call in world.calls)


def test_patience_ends_a_climb_that_stands_still(tmp_path: Path) -> None:
    proposer = Climber(speeds=(1.5, *(1.2 + index / 100 for index in range(50))))
    (end,) = World(tmp_path).loop(proposer, limits=Limits(candidates=50, patience=4)).run(1)
    assert (end.outcome, end.candidates) == ("won", 5)


def test_a_proposer_that_repeats_itself_is_stopped_and_recorded(tmp_path: Path) -> None:
    class Parrot(Climber):
        def propose(self, target, best, history, rng):  # type: ignore[no-untyped-def]
            return super().propose(target, best, [], type("Fixed", (), {"random": lambda self: 0})())

    world = World(tmp_path)
    (end,) = world.loop(Parrot(), limits=Limits(failures=3)).run(1)
    assert (end.outcome, end.candidates) == ("won", 1)
    one = world.store.rounds()[0]
    records = [one.proposed(number) for number in one.numbers("propose")]
    assert [isinstance(record, NoCandidate) for record in records] == [False, True, True, True]
    assert isinstance(records[1], NoCandidate)
    assert records[1].detail == "the same as candidate 001"


def test_files_outside_of_the_folder_are_refused(tmp_path: Path) -> None:
    class Escaping(Climber):
        def propose(self, target, best, history, rng):  # type: ignore[no-untyped-def]
            source = super().propose(target, best, history, rng)
            assert source is not None
            source.files["../../evil.h"] = "x"
            return source

    world = World(tmp_path)
    (end,) = world.loop(Escaping(), limits=Limits(failures=2)).run(1)
    assert end.outcome == "no_candidate"
    assert not list(tmp_path.rglob("evil.h"))


@pytest.mark.parametrize(("outcome", "keeps"), [("rolled_out", True), ("rolled_back", False)])
def test_a_pack_that_was_taken_back_is_no_baseline(tmp_path: Path, outcome: str, keeps: bool) -> None:
    def rollout(pack: str) -> RolloutRecord:
        return RolloutRecord(
            pack=pack, outcome=outcome, approver="policy", detail="canary", steps=["prepared"]
        )  # type: ignore[arg-type]

    world = World(tmp_path, rollout=rollout)
    world.loop(Climber()).run(2)
    first, second = world.store.rounds()
    assert bool(second.spec.base_pack) is keeps
    assert first.load("rollout", RolloutRecord) is not None


def test_time_that_is_up_ends_the_candidates_and_the_rounds(tmp_path: Path) -> None:
    world = World(tmp_path)
    now = [0.0]
    loop = world.loop(Climber(speeds=[1.1 + index / 100 for index in range(50)]), limits=Limits(minutes=2))
    loop._clock = lambda: now.__setitem__(0, now[0] + 1) or now[0]  # type: ignore[func-returns-value]
    (end, *_) = loop.run(3)
    assert end.outcome == "won"
    assert 1 <= end.candidates < 20


def test_no_win_says_whether_the_time_was_up(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (end,) = World(tmp_path / "a").loop(Climber(speeds=(0.9,))).run(1)
    assert end.summary == "decoder_layer: 1 candidate, 1 right, none significantly faster"
    (tmp_path / "b").mkdir()
    now = [0.0]
    limits = Limits(minutes=1)
    loop = World(tmp_path / "b").loop(Climber(speeds=[0.9] * 50), limits=limits)
    loop._clock = lambda: now.__setitem__(0, now[0] + 10) or now[0]  # type: ignore[func-returns-value]
    (end,) = loop.run(1)
    assert end.outcome in ("no_win", "no_candidate")
    assert end.candidates < limits.candidates
    assert end.summary.endswith("none significantly faster; the time was up, 24 were allowed")


def test_a_profile_gets_what_is_left_of_the_time_and_may_need_more(tmp_path: Path) -> None:
    given: list[float] = []

    class Slow(World):
        def _profile(self, base: Path | None, seconds: float) -> KernelProfile:
            given.append(seconds)
            if seconds < 100:
                raise TimeUpError("the time was up in pass 1")
            return super()._profile(base, seconds)

    world = Slow(tmp_path)
    with pytest.raises(TimeUpError, match="in pass 1"):
        world.loop(Climber(), limits=Limits(minutes=1)).run(1)
    assert 0 < given[-1] <= 60
    # the same command with more time goes on with that round; the next one does not get a profile any more
    now = [0.0]
    said: list[str] = []
    loop = world.loop(Climber(), limits=Limits(minutes=2), say=said.append)
    loop._clock = lambda: now.__setitem__(0, now[0] + 2) or now[0]  # type: ignore[func-returns-value]
    (end,) = loop.run(3)
    assert end.outcome == "won"
    assert given[-1] < 100
    assert "  the time was up in pass 1" in said
    assert [one.end is None for one in world.store.rounds()] == [False, True]


@pytest.mark.parametrize("stop_at", ["profile stock", "judge 003", "confirm 003", "publish 003"])
def test_a_round_that_was_killed_goes_on_and_repeats_nothing_finished(tmp_path: Path, stop_at: str) -> None:
    """A real process, killed with SIGKILL in the middle of a stage; only that stage is done again."""
    (tmp_path / "stop-at").write_text(stop_at)
    command = [sys.executable, "-m", "tests.optimize.fakes", str(tmp_path), "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for _ in range(600):
        if (tmp_path / "stopped").exists():
            break
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = (tmp_path / "calls").read_text().splitlines()
    assert before[-1] == stop_at
    (tmp_path / "stop-at").unlink()

    world = World(tmp_path)
    (end,) = world.loop(Climber()).run(1)
    assert (end.outcome, end.candidate, end.candidates) == ("won", "003", 4)
    assert len(world.store.rounds()) == 1
    assert set(before[:-1]).isdisjoint(world.calls)
    assert world.calls[0] == stop_at
    assert sorted(before[:-1] + world.calls) == sorted(set(before) | set(world.calls))
    one = world.store.rounds()[0]
    assert one.load("verify", Verdict, 3) is not None
    assert "going on" in one.transcript.read_text()


def test_a_round_that_another_process_works_on_is_left_alone(tmp_path: Path) -> None:
    world = World(tmp_path)
    spec = {"model": "tiny", "workload": "decode", "proposer": "climber"}
    one = world.store.create(**spec, seed=0)
    with one.held():
        assert world.store.unfinished(**spec) is None
    found = world.store.unfinished(**spec)
    assert found is not None
    assert found.id == one.id
    assert world.store.unfinished(**{**spec, "proposer": "another"}) is None
