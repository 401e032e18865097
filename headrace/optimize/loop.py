"""The loop: profile → target → propose → verify → measure → publish → roll out, then on the new baseline.

Each stage is handed in as a callable from records to records (``Stages``), and each result is on disk before
the next begins: a round that was killed goes on after its last whole stage, in the middle of its candidates.

The candidates of a round are a climb: each is proposed with the best so far and all failures at hand, is
judged right or wrong and timed alone. When nothing better comes for a while, the fastest are confirmed on the
whole workload; the first that is significantly faster there as well is published.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import msgspec

from headrace.core.errors import HeadraceError, TimeUpError
from headrace.core.packs import KernelEntry
from headrace.core.words import count
from headrace.optimize.digest import ENTRY_FILE, HEADER, candidate_digest
from headrace.optimize.journal import Journal, measurement_line, trial_line
from headrace.optimize.packing import Winner
from headrace.optimize.proposal import CandidateSource, ProposalError, Proposer, Trial
from headrace.optimize.records import (
    Candidate,
    KernelProfile,
    Measurement,
    Published,
    RolloutRecord,
    Target,
    Verdict,
)
from headrace.optimize.rounds import NoCandidate, Outcome, Round, RoundEnd, RoundStore, write_whole
from headrace.optimize.targets import Tried

ALONE_AT_LEAST = 1.02
"""The interval's lower bound, alone, below which a candidate is not worth the whole workload."""

EXPLORE_SHARE = 0.6
"""Of a round's time; the rest is for confirming, publishing and rolling out."""


Judged: TypeAlias = "tuple[Verdict, Measurement | None]"


@dataclass(frozen=True)
class Stages:
    """What the loop calls. A baseline is the folder of the pack that runs so far, None: stock operators.

    ``profile`` gets the seconds that it may take, and raises TimeUpError where they are too few. ``judge``
    says whether a candidate is right and times it alone, ``confirm`` on the whole workload too; no
    measurement: it is not right, or was found out while it was timed. ``rollout`` None: packs are published
    and no more.
    """

    profile: Callable[[Path | None, float], KernelProfile]
    targets: Callable[[KernelProfile, Sequence[Tried]], list[Target]]
    judge: Callable[[Path, Target, Path | None], Judged]
    confirm: Callable[[Path, Target, Path | None], Judged]
    publish: Callable[[Winner, Round, KernelProfile, Path | None], Published]
    pack_folder: Callable[[str], Path]
    rollout: Callable[[str], RolloutRecord] | None = None


@dataclass(frozen=True)
class Limits:
    """``candidates`` and ``failures`` (tries in a row that bring none) bound a round, ``patience`` is how
    many may pass without a better one; ``confirmations`` how many go through the whole workload."""

    candidates: int = 24
    patience: int = 8
    failures: int = 5
    confirmations: int = 3
    minutes: float = 0.0  # 0: no limit


class Loop:
    """Rounds of one command. ``base`` is the id of the pack to begin from, empty: stock operators."""

    def __init__(
        self,
        store: RoundStore,
        stages: Stages,
        proposer: Proposer,
        journal: Journal,
        *,
        model: str,
        workload: str,
        limits: Limits | None = None,
        base: str = "",
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._stages, self._proposer, self._journal = store, stages, proposer, journal
        self._model, self._workload, self._seed = model, workload, seed
        self._limits = limits or Limits()
        self._base = base
        self._clock = clock

    def run(self, rounds: int, *, fresh: bool = False) -> list[RoundEnd]:
        """Runs ``rounds`` rounds, the first of which goes on with one that was cut short unless ``fresh``.

        It ends sooner when nothing is left to gain or the time is up. Raises TimeUpError when it is up before
        the first profile is there.
        """
        deadline = self._clock() + 60 * self._limits.minutes if self._limits.minutes else float("inf")
        names = {"model": self._model, "workload": self._workload, "proposer": self._proposer.author}
        open_round = None if fresh else self._store.unfinished(**names)
        base, run = self._base, ""
        done: list[tuple[Round, RoundEnd]] = []
        for number in range(rounds):
            left = deadline - self._clock()
            if left <= 0:
                self._journal.line(f"the time is up after {len(done)} of {count(rounds, 'round')}")
                break
            one = open_round or self._store.create(**names, seed=self._seed, base_pack=base, run=run)
            open_round = None
            run = one.spec.run
            try:
                with one.held():
                    end = self._round(
                        one, number + 1, rounds, self._clock() + left / (rounds - number), deadline
                    )
            except TimeUpError as error:  # its round is on disk, and goes on with the next command
                if not done:
                    raise
                self._journal.line(error.message)
                break
            done.append((one, end))
            base = end.pack or one.spec.base_pack
            if end.outcome == "nothing_to_gain":
                break
        self._summary(done)
        return [end for _, end in done]

    def _round(self, one: Round, number: int, rounds: int, deadline: float, last: float) -> RoundEnd:
        """``deadline`` is the round's own, ``last`` that of all rounds: a profile may take what is left."""
        began = self._clock()
        spec, stages, journal = one.spec, self._stages, self._journal
        journal.open(one.transcript, f"round {number} of {rounds}, {one.id}: {spec.model}, {spec.workload}")
        journal.line(f"proposer {spec.proposer}, baseline {_short(spec.base_pack) or 'stock operators'}")
        base = stages.pack_folder(spec.base_pack) if spec.base_pack else None

        profile = one.load("profile", KernelProfile)
        if profile is None:
            profile = stages.profile(base, last - self._clock())
            one.save("profile", profile)
            for line in _profile_lines(profile):
                journal.line(line)
        target = one.load("bottleneck", Target)
        if target is None:
            found = stages.targets(profile, self._tried(one))
            if not found:
                return self._end(
                    one, began, "nothing_to_gain", "no op, block or layer is worth another round"
                )
            target = found[0]
            one.save("bottleneck", target)
            journal.line(f"target {target.op} ({target.phase}): {target.why}")

        trials, cut_short = self._explore(one, target, base, began + EXPLORE_SHARE * (deadline - began))
        winner = self._confirm(one, target, trials, base)
        if winner is None:
            right = sum(trial.verdict.passed for trial in trials)
            outcome: Outcome = "no_win" if trials else "no_candidate"
            summary = (
                f"{target.op}: {count(len(trials), 'candidate')}, {right} right, none significantly faster"
            )
            if cut_short:
                summary += f"; the time was up, {self._limits.candidates} were allowed"
            return self._end(one, began, outcome, summary, trials)
        published = one.load("publish", Published)
        if published is None:
            published = stages.publish(winner, one, profile, base)
            one.save("publish", published)
            journal.line(f"published {_short(published.pack)} in {published.registry}: {published.summary}")
        record = one.load("rollout", RolloutRecord)
        if record is None:
            record = self._roll_out(published)
            one.save("rollout", record)
        for step in record.steps:
            journal.line(step)
        journal.line(f"{record.outcome.replace('_', ' ')}: {record.detail}")
        kept = record.outcome in ("rolled_out", "skipped")
        return self._end(
            one,
            began,
            "won",
            published.summary
            if kept
            else f"{published.summary}; {record.outcome.replace('_', ' ')}: {record.detail}",
            trials,
            candidate=published.candidate,
            pack=published.pack if kept else "",
        )

    def _explore(
        self, one: Round, target: Target, base: Path | None, deadline: float
    ) -> tuple[list[Trial], bool]:
        """Candidates until the budget is used up, or nothing better came for a while; whether it was the time
        that ended them."""
        trials: list[Trial] = []
        best: Trial | None = None
        number = since_best = failures = 0
        recorded = len(one.numbers("propose"))
        while number < max(self._limits.candidates, recorded):
            number += 1
            if number > recorded:
                if (best is not None and since_best >= self._limits.patience) or (
                    failures >= self._limits.failures
                ):
                    break
                if self._clock() >= deadline:
                    return trials, True
            candidate = self._propose(one, number, target, best, trials)
            if candidate is None:
                break
            if isinstance(candidate, NoCandidate):
                failures += 1
                continue
            failures = 0
            is_new = not one.path("verify", number).exists()
            trial = self._judge(one, number, candidate, target, base)
            trials.append(trial)
            is_best = trial.speed > (best.speed if best is not None else 0.0)
            best, since_best = (trial, 0) if is_best else (best, since_best + 1)
            if is_new:
                self._journal.line(trial_line(number, trial, is_best=is_best))
        return trials, False

    def _propose(
        self, one: Round, number: int, target: Target, best: Trial | None, trials: Sequence[Trial]
    ) -> Candidate | NoCandidate | None:
        """The recorded answer if there is one; None: the proposer has nothing more to try."""
        recorded = one.proposed(number)
        if recorded is not None:
            return recorded
        began = self._clock()
        rng = random.Random(f"{one.spec.seed}/{one.id}/{number}")
        folder = one.candidate_folder(number)
        record: Candidate | NoCandidate
        try:
            source = self._proposer.propose(target, best, trials, rng)
            if source is None:
                return None
            digest = write_candidate(folder, source, target)
            same = next((trial for trial in trials if trial.candidate.digest == digest), None)
            if same is not None:
                raise ProposalError(f"the same as candidate {same.candidate.name}")
            record = Candidate(
                name=f"{number:03d}",
                folder=str(folder.relative_to(one.folder)),
                digest=digest,
                author=source.author,
                note=source.note,
                parameters=source.parameters,
            )
        except ProposalError as error:
            record = NoCandidate(
                author=self._proposer.author,
                detail=error.message,
                seconds=self._clock() - began,
                reply=error.reply,
            )
            self._journal.line(f"{number:03d}  no candidate: {error.message}")
        one.save("propose", record, number)
        return record

    def _judge(
        self, one: Round, number: int, candidate: Candidate, target: Target, base: Path | None
    ) -> Trial:
        folder = one.folder / candidate.folder
        verdict = one.load("verify", Verdict, number)
        if verdict is not None:
            return Trial(candidate, folder, verdict, one.load("measure", Measurement, number))
        verdict, measurement = self._stages.judge(folder, target, base)
        if measurement is not None:
            one.save("measure", measurement, number)
        one.save("verify", verdict, number)  # after it, so that a verdict on disk is all there is to it
        return Trial(candidate, folder, verdict, measurement)

    def _confirm(
        self, one: Round, target: Target, trials: Sequence[Trial], base: Path | None
    ) -> Winner | None:
        """The fastest candidate that is significantly faster on the whole workload too."""
        fastest = sorted(trials, key=lambda trial: -trial.speed)
        for trial in fastest[: self._limits.confirmations]:
            if trial.speed <= ALONE_AT_LEAST:
                break
            number = int(trial.candidate.name)
            measurement = one.load("confirm", Measurement, number)
            if measurement is None:
                if candidate_digest(trial.folder) != trial.candidate.digest:
                    self._journal.line(f"{number:03d}  its files have changed since it was judged: left out")
                    continue
                measurement = self._whole(trial, target, base)
                one.save("confirm", measurement, number)
                self._journal.line(f"{number:03d}  {measurement_line(measurement)}")
            if measurement.won:
                entry = msgspec.json.decode((trial.folder / ENTRY_FILE).read_bytes(), type=KernelEntry)
                author = trial.candidate.author
                return Winner(trial.folder, entry, target, trial.verdict, measurement, author)
        return None

    def _whole(self, trial: Trial, target: Target, base: Path | None) -> Measurement:
        """The measurement that decides; one that found the candidate out is no win and says why."""
        verdict, measurement = self._stages.confirm(trial.folder, target, base)
        if measurement is not None and verdict.passed:
            return measurement
        return Measurement(
            candidate=trial.candidate.name,
            digest=trial.candidate.digest,
            alone={},
            end_to_end={},
            agreement="",
            won=False,
            detail=f"{verdict.reason}: {verdict.detail}",
        )

    def _roll_out(self, published: Published) -> RolloutRecord:
        if self._stages.rollout is None:
            detail = "no server was named; `headrace packs rollout` does it later"
            return RolloutRecord(pack=published.pack, outcome="skipped", approver="", detail=detail)
        try:
            return self._stages.rollout(published.pack)
        except HeadraceError as error:
            return RolloutRecord(pack=published.pack, outcome="refused", approver="", detail=error.message)

    def _tried(self, one: Round) -> list[Tried]:
        tried = []
        for other in self._store.of_run(one.spec.run):
            target, end = other.load("bottleneck", Target), other.end
            if other.id != one.id and target is not None and end is not None:
                tried.append(Tried(target, end.outcome == "won"))
        return tried

    def _end(
        self,
        one: Round,
        began: float,
        outcome: Outcome,
        summary: str,
        trials: Sequence[Trial] = (),
        *,
        candidate: str = "",
        pack: str = "",
    ) -> RoundEnd:
        end = RoundEnd(
            outcome=outcome,
            summary=summary,
            candidates=len(trials),
            right=sum(trial.verdict.passed for trial in trials),
            seconds=self._clock() - began,
            candidate=candidate,
            pack=pack,
        )
        one.save("end", end)
        self._journal.line(f"{outcome.replace('_', ' ')} after {end.seconds / 60:.1f} min: {summary}")
        return end

    def _summary(self, done: Sequence[tuple[Round, RoundEnd]]) -> None:
        header = ("round", "target", "candidates", "right", "outcome", "end to end", "pack", "min")
        rows = []
        for one, end in done:
            target = one.load("bottleneck", Target)
            rows.append(
                (
                    one.id,
                    f"{target.op}, {target.phase}" if target is not None else "-",
                    str(end.candidates),
                    str(end.right),
                    end.outcome.replace("_", " "),
                    end.summary.rpartition(": ")[2] if end.outcome == "won" else "-",
                    _short(end.pack) or "-",
                    f"{end.seconds / 60:.1f}",
                )
            )
        if rows:
            self._journal.table("summary", header, rows)


def write_candidate(folder: Path, source: CandidateSource, target: Target) -> str:
    """Lays a candidate out in ``folder``, anew; returns its digest. Raises ProposalError for files that may
    not be: outside of the folder, or missing."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if source.entry.source not in source.files:
        raise ProposalError(f"kernel.json names {source.entry.source!r}, which is not among its files")
    for name, text in source.files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()) or path.name == HEADER:
            raise ProposalError(f"a candidate may not have a file {name!r}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    write_whole(folder / ENTRY_FILE, _pretty(source.entry))
    write_whole(folder / "target.json", _pretty(target))
    return candidate_digest(folder)


def _profile_lines(profile: KernelProfile) -> list[str]:
    lines = [f"profiled on {profile.hardware}, {count(profile.threads, 'thread')}"]
    for phase in profile.phases:
        top = sorted(phase.ops, key=lambda op: -op.self_s)[:3]
        shares = ", ".join(f"{op.path} {100 * op.share:.0f} %" for op in top)
        lines.append(
            f"{phase.phase}: {1e3 * phase.step_s:.2f} ms a step of {count(phase.rows, 'row')}; "
            f"most of it {shares}; unnamed {100 * phase.unnamed_s / phase.step_s:.1f} %"
        )
    return lines


def _short(pack: str) -> str:
    return pack[:12]


def _pretty(record: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"
