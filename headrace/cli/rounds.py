"""rounds: list the rounds of the improvement loop, or show one: candidates, verdicts, gains, diffs."""

from __future__ import annotations

import argparse
import difflib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.cli.packs import print_table
from headrace.core.words import count

if TYPE_CHECKING:
    from headrace.optimize.proposal import Trial
    from headrace.optimize.rounds import Round, RoundStore

DIFF_LINES = 40


def add_rounds_dir(parser: argparse.ArgumentParser) -> None:
    """``--rounds-dir``, the same for all commands about rounds."""
    parser.add_argument(
        "--rounds-dir",
        default="",
        metavar="DIR",
        help="where rounds are kept (default: the user's data folder)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds_dir(parser)
    parser.set_defaults(act=_list)
    actions = parser.add_subparsers(dest="action", metavar="ACTION")
    listed = actions.add_parser("list", help="every round, the newest last (the default)", allow_abbrev=False)
    listed.set_defaults(act=_list)
    shown = actions.add_parser("show", help="one round, stage by stage", allow_abbrev=False)
    shown.add_argument("id", metavar="ID", help="the round's id, its beginning or end, or `last`")
    shown.add_argument("--json", action="store_true", help="print its records as JSON, for programs")
    shown.add_argument("--full", action="store_true", help="whole diffs, not their beginnings")
    shown.set_defaults(act=_show)


def main(arguments: argparse.Namespace) -> int:
    result: int = arguments.act(arguments)
    return result


def _store(arguments: argparse.Namespace) -> RoundStore:
    from headrace.optimize.rounds import RoundStore

    return RoundStore(Path(arguments.rounds_dir).expanduser() if arguments.rounds_dir else None)


def _list(arguments: argparse.Namespace) -> int:
    from headrace.optimize.records import Target

    rows = []
    for one in _store(arguments).rounds():
        spec, end, target = one.spec, one.end, one.load("bottleneck", Target)
        state = end.outcome.replace("_", " ") if end is not None else f"{one.last_stage}, {_state(one)}"
        rows.append(
            (
                one.id,
                spec.model,
                spec.workload,
                spec.proposer,
                f"{target.op}, {target.phase}" if target is not None else "-",
                str(len(one.numbers("propose"))),
                state,
                end.summary if end is not None else "",
            )
        )
    header = ("round", "model", "workload", "proposer", "target", "candidates", "outcome", "")
    print_table(header, rows, empty="no rounds")
    return 0


def _state(one: Round) -> str:
    return "running" if one.is_held() else "cut short"


def _show(arguments: argparse.Namespace) -> int:
    one = _store(arguments).open(arguments.id)
    if arguments.json:
        _print_json(one)
        return 0
    from rich.console import Console
    from rich.syntax import Syntax

    from headrace.optimize.journal import measurement_line, trial_line
    from headrace.optimize.records import KernelProfile, Measurement, Published, RolloutRecord, Target
    from headrace.optimize.rounds import NoCandidate

    spec, end = one.spec, one.end
    lines = [
        f"round     {one.id}",
        f"folder    {one.folder}",
        f"asked     {spec.model}, {spec.workload}, proposer {spec.proposer}",
        f"baseline  {spec.base_pack[:12] or 'stock operators'}",
    ]
    profile = one.load("profile", KernelProfile)
    for phase in profile.phases if profile is not None else ():
        lines.append(
            f"profile   {phase.phase}: {1e3 * phase.step_s:.2f} ms a step of {count(phase.rows, 'row')}"
        )
    target = one.load("bottleneck", Target)
    if target is not None:
        lines.append(f"target    {target.op}: {target.why}")
    print("\n".join(lines) + "\n")

    console = Console(highlight=False)
    best: Trial | None = None
    for number in one.numbers("propose"):
        record = one.proposed(number)
        if isinstance(record, NoCandidate):
            print(f"{number:03d}  no candidate: {record.detail}")
            continue
        trial = _trial(one, number)
        if trial is None:
            print(f"{number:03d}  proposed, not judged")
            continue
        is_best = trial.speed > (best.speed if best is not None else 0.0)
        print(trial_line(number, trial, is_best=is_best))
        if trial.candidate.note:
            print(f"     {trial.candidate.author}: {trial.candidate.note}")
        if best is not None and trial.verdict.passed:
            text = diff(best, trial)
            shown = text if arguments.full else text[:DIFF_LINES]
            if shown and console.is_terminal:
                console.print(Syntax("\n".join(shown), "diff", background_color="default"))
            elif shown:
                print("\n".join(shown))
            if len(text) > len(shown):
                print(f"     … {count(len(text) - len(shown), 'more line')}, --full shows them")
        confirmed = one.load("confirm", Measurement, number)
        if confirmed is not None:
            print(f"     {measurement_line(confirmed)}")
        if is_best:
            best = trial
    published, record_ = one.load("publish", Published), one.load("rollout", RolloutRecord)
    if published is not None:
        print(f"\npublished {published.pack[:12]} in {published.registry}: {published.summary}")
    if record_ is not None:
        print(f"{record_.outcome.replace('_', ' ')}: {record_.detail}")
    print(f"\n{end.outcome.replace('_', ' ')}: {end.summary}" if end is not None else f"\n{_state(one)}")
    return 0


def diff(before: Trial, after: Trial) -> list[str]:
    """Unified diff of two candidates' sources, without line ends."""
    from headrace.optimize.digest import candidate_files

    names = sorted({*candidate_files(before.folder), *candidate_files(after.folder)})
    lines: list[str] = []
    for name in names:
        old, new = (_lines(trial.folder / name) for trial in (before, after))
        lines += difflib.unified_diff(
            old, new, f"{before.candidate.name}/{name}", f"{after.candidate.name}/{name}", n=1, lineterm=""
        )
    return lines


def _lines(path: Path) -> list[str]:
    return path.read_text(errors="replace").splitlines() if path.exists() else []


def _trial(one: Round, number: int) -> Trial | None:
    from headrace.optimize.proposal import Trial
    from headrace.optimize.records import Candidate, Measurement, Verdict

    candidate, verdict = one.proposed(number), one.load("verify", Verdict, number)
    if not isinstance(candidate, Candidate) or verdict is None:
        return None
    folder = one.folder / candidate.folder
    return Trial(candidate, folder, verdict, one.load("measure", Measurement, number))


def _print_json(one: Round) -> None:
    """Every record of the round by the name of its file."""
    import msgspec

    records: dict[str, Any] = {
        path.stem: msgspec.json.decode(path.read_bytes())
        for path in sorted(one.folder.glob("*.json"))
        if not path.name.startswith(".")
    }
    sys.stdout.buffer.write(msgspec.json.format(msgspec.json.encode(records)) + b"\n")
