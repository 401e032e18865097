"""What a roll-out asks of its replicas, in which order, and who flips back; replicas are made of numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from headrace.core.control import PACK_REFUSED, PACK_ROLLED_BACK
from headrace.core.errors import PackError, UnavailableError
from headrace.core.knobs import EngineConfig
from headrace.core.launch import ReplicaSpec
from headrace.core.messages import Hello, PackReady, Score, Scored, StepTime, StepTimes, TokenLogprobs
from headrace.fleet import rollout
from headrace.fleet.local import LocalReplica
from headrace.fleet.packs import Pack, first_pack
from headrace.fleet.rollout import Rollout
from tests.fleet.test_canary import hello

NEW = Pack("n" * 64, "/packs/new")
OLD = Pack("o" * 64, "/packs/old")


@dataclass
class Machine:
    """One replica: what it runs, what it was asked, and how its steps and scores turn out."""

    replica_id: str
    log: list[str]
    pack: str = OLD.pack_id
    prepared: set[str] = field(default_factory=lambda: {OLD.pack_id})
    live_s: Callable[[int, bool], float] = lambda spell, new: 0.010  # by number of the spell
    scored_s: float = 0.010  # with the new pack
    error: float = 0.0  # of the new pack before the flip
    late_error: float = 0.0  # after it
    fails: str = ""  # the question that it does not survive
    refuses: str = ""
    rows: int = 4
    spell: int = 0

    def ask(self, what: str) -> None:
        self.log.append(f"{self.replica_id} {what}")
        if what == self.fails:
            raise UnavailableError(f"{self.replica_id} went away")
        if what == self.refuses:
            raise PackError("nothing can be made of this")


class Link:
    """Stands in for ReplicaLink."""

    machines: dict[str, Machine]

    def __init__(self, replica_id: str, path: str) -> None:
        self.replica_id = replica_id
        self.machine = self.machines[replica_id]
        self.hello: Hello = hello()

    async def connect(self) -> None:
        self.machine.ask("connect")

    def close(self) -> None:
        self.machine.log.append(f"{self.replica_id} close")

    async def prepare(self, pack_id: str, folder: str) -> PackReady:
        assert (pack_id, folder) in ((NEW.pack_id, NEW.folder), (OLD.pack_id, OLD.folder))
        self.machine.ask("prepare")
        self.machine.prepared.add(pack_id)
        return PackReady(pack_id, 0.1)

    async def use(self, pack_id: str) -> None:
        machine = self.machine
        machine.ask(f"use {pack_id[:1]}")
        assert pack_id in machine.prepared
        if pack_id != machine.pack:
            machine.spell += 1
            machine.pack = pack_id

    async def retire(self, pack_id: str) -> None:
        self.machine.ask(f"retire {pack_id[:1]}")
        assert pack_id != self.machine.pack
        self.machine.prepared.discard(pack_id)

    async def step_times(self) -> StepTimes:
        machine = self.machine
        seconds = machine.live_s(machine.spell, machine.pack == NEW.pack_id)
        times = [StepTime(machine.rows, 100, seconds)] if machine.rows else []
        return StepTimes(machine.pack, 100 if machine.rows else 0, times)

    async def recorded(self) -> list[bytes]:
        return [b"\1\0\0\0" * 300]

    async def score(self, score: Score) -> list[Scored]:
        machine = self.machine
        machine.ask(
            "score " + "".join(pack[:1] for pack in score.pack_ids) + ("" if score.chunk == 1 else " *")
        )
        assert set(score.pack_ids) <= machine.prepared
        found = []
        for pack_id in score.pack_ids:
            new = pack_id == NEW.pack_id
            error = (machine.late_error if machine.pack == NEW.pack_id else machine.error) if new else 0.0
            sequences = []
            for number, packed in enumerate(score.sequences):
                count = len(packed) // 4 - 1
                entries = []
                for i in range(count):
                    off = error if (7 * number + i) % 100 == 50 else 0.0
                    entries.append(TokenLogprobs(1, -1.0 + off, 1, [(1, -1.0 + off)]))
                sequences.append(entries)
            seconds = machine.scored_s if new else 0.010
            found.append(Scored(pack_id, sequences, [StepTime(1, 300, seconds)]))
        return found


@dataclass
class Fleet:
    machines: dict[str, Machine]
    replicas: list[LocalReplica]
    log: list[str]
    lines: list[str] = field(default_factory=list)

    async def roll_out(self) -> None:
        await Rollout(self.replicas, NEW, OLD, self.lines.append).run()

    async def fails(self, code: str, words: str) -> None:
        with pytest.raises(PackError, match=words) as caught:
            await self.roll_out()
        assert caught.value.code == code
        assert all(machine.pack == OLD.pack_id for machine in self.machines.values() if not machine.fails)
        assert self.starts_with == [OLD.folder] * len(self.replicas)
        assert self.log[-len(self.replicas) :] == [f"{name} close" for name in self.machines]

    @property
    def starts_with(self) -> list[str | None]:
        return [replica.spec.engine.pack for replica in self.replicas]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Three replicas."""
    log: list[str] = []
    machines = {name: Machine(name, log) for name in ("a", "b", "c")}
    replicas = [
        LocalReplica(
            ReplicaSpec(
                replica_id=name,
                model="m",
                folder="",
                revision="",
                socket="",
                engine=EngineConfig(pack=OLD.folder),
            )
        )
        for name in machines
    ]
    link = type("FleetLink", (Link,), {"machines": machines})
    monkeypatch.setattr(rollout, "ReplicaLink", link)
    monkeypatch.setattr(rollout, "POLL_S", 0.001)
    monkeypatch.setattr(rollout, "IDLE_S", 0.01)
    return Fleet(machines, replicas, log)


async def test_the_canary_first_then_the_others_then_the_old_one_is_retired(fleet: Fleet) -> None:
    await fleet.roll_out()
    assert [line for line in fleet.log if "connect" not in line and "close" not in line] == [
        *("a prepare", "a score on", "a score o *", "a use n", "a score n"),
        *("b prepare", "b score n", "b use n", "c prepare", "c score n", "c use n"),
        *("a retire o", "b retire o", "c retire o"),
    ]
    assert fleet.starts_with == [NEW.folder] * 3


async def test_a_wrong_canary_is_found_before_the_flip(fleet: Fleet) -> None:
    fleet.machines["a"].error = 0.1
    await fleet.fails(PACK_ROLLED_BACK, r"is wrong on a: \d+ of \d+ positions \(1.0. %\)")
    assert not any(" use " in line for line in fleet.log) and "a retire n" in fleet.log


async def test_one_that_goes_wrong_in_service_is_found_after_it(fleet: Fleet) -> None:
    fleet.machines["a"].late_error = 0.1
    await fleet.fails(PACK_ROLLED_BACK, "is wrong on a")
    assert "a use n" in fleet.log and "a use o" in fleet.log


async def test_a_slower_canary_is_found_by_scoring_twice(fleet: Fleet) -> None:
    fleet.machines["a"].scored_s = 0.011
    await fleet.fails(PACK_ROLLED_BACK, r"is slower on a: its steps take 1\.100 x")
    assert fleet.log.count("a score on") == 2


async def test_slower_live_steps_decide_after_four_spells(fleet: Fleet) -> None:
    fleet.machines["a"].live_s = lambda spell, new: 0.011 if new else 0.010
    await fleet.fails(PACK_ROLLED_BACK, r"is slower on a: live steps take 1\.100 x as long, by 4 spells")
    assert fleet.log.count("a use n") == 4 and fleet.log.count("b prepare") == 0


async def test_a_slow_spell_of_the_machine_is_not_the_packs_fault(fleet: Fleet) -> None:
    fleet.machines["a"].live_s = lambda spell, new: 0.030 if spell in (1, 2) else 0.010
    await fleet.roll_out()
    assert all(machine.pack == NEW.pack_id for machine in fleet.machines.values())
    # and a drift, as contexts grow, is not either
    for machine in fleet.machines.values():
        machine.pack, machine.spell = OLD.pack_id, 0
        machine.prepared = {OLD.pack_id}
        machine.live_s = lambda spell, new: 0.010 * 1.2**spell * (0.95 if new else 1.0)
    await fleet.roll_out()


async def test_without_traffic_the_scored_steps_decide(fleet: Fleet) -> None:
    fleet.machines["a"].rows = 0
    await fleet.roll_out()
    assert "a: too few live steps to compare" in fleet.lines


@pytest.mark.parametrize("question", ["prepare", "score on", "score o *"])
async def test_a_canary_that_dies_before_the_flip_changes_nothing(fleet: Fleet, question: str) -> None:
    fleet.machines["a"].fails = question
    await fleet.fails(PACK_REFUSED, "a went away")
    assert not any(" use " in line for line in fleet.log)


@pytest.mark.parametrize("question", ["use n", "score n"])
async def test_one_that_dies_with_it_comes_back_without(fleet: Fleet, question: str) -> None:
    fleet.machines["a"].fails = question
    await fleet.fails(PACK_ROLLED_BACK, "a went away")


@pytest.mark.parametrize("name", ["b", "c"])
async def test_when_another_cannot_all_that_have_flipped_flip_back(fleet: Fleet, name: str) -> None:
    fleet.machines[name].refuses = "prepare"
    await fleet.fails(PACK_ROLLED_BACK, "nothing can be made of this")
    back = [line for line in fleet.lines if line.endswith("again")]
    assert len(back) == {"b": 1, "c": 2}[name]
    assert all(machine.prepared == {OLD.pack_id} for machine in fleet.machines.values())


async def test_a_replica_that_cannot_be_reached_changes_nothing(fleet: Fleet) -> None:
    fleet.machines["c"].fails = "connect"
    await fleet.fails(PACK_REFUSED, "c went away")
    assert not any("prepare" in line for line in fleet.log)


async def test_back_to_none_needs_no_preparation(fleet: Fleet) -> None:
    for machine in fleet.machines.values():
        machine.prepared.add("")
    await Rollout(fleet.replicas, Pack(), OLD, fleet.lines.append).run_unseen()
    assert {machine.pack for machine in fleet.machines.values()} == {""}
    assert fleet.starts_with == ["none"] * 3 and not any("prepare" in line for line in fleet.log)


async def test_back_to_what_replicas_choose_by_themselves(fleet: Fleet) -> None:
    """The shipped pack is prepared by its folder, and later processes look for the best one again."""
    said = [msgspec.structs.replace(hello(), pack=OLD.pack_id, pack_folder=OLD.folder)]
    first = first_pack("auto", said)
    assert (first.pack_id, first.folder, first.setting) == (OLD.pack_id, OLD.folder, "auto")
    await Rollout(fleet.replicas, NEW, first, fleet.lines.append).run()
    assert fleet.starts_with == [NEW.folder] * 3
    await Rollout(fleet.replicas, first, NEW, fleet.lines.append).run_unseen()
    assert fleet.starts_with == ["auto"] * 3
    assert {machine.pack for machine in fleet.machines.values()} == {OLD.pack_id}


async def test_a_canary_that_slips_goes_back_to_what_was_chosen(fleet: Fleet) -> None:
    first = Pack(OLD.pack_id, OLD.folder, "auto")
    fleet.machines["a"].late_error = 0.5
    with pytest.raises(PackError):
        await Rollout(fleet.replicas, NEW, first, fleet.lines.append).run()
    assert fleet.starts_with == ["auto", OLD.folder, OLD.folder], "the others were not touched"
    assert {machine.pack for machine in fleet.machines.values()} == {OLD.pack_id}


def test_what_replicas_started_with() -> None:
    silent = hello()
    told = msgspec.structs.replace(silent, pack="a" * 64, pack_folder="/packs/a")
    assert first_pack("auto", []) == Pack(chosen_by="auto")
    assert first_pack("auto", [silent]).setting == "auto" and first_pack("auto", [silent]).pack_id == ""
    assert first_pack("none", [silent]).setting == "none"
    assert first_pack("/packs/a", [silent, told]) == Pack("a" * 64, "/packs/a")
    assert first_pack("/packs/a", [told]).setting == "/packs/a"
