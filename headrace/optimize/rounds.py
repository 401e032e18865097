"""Rounds on disk: every stage is a file that appears whole or not at all, so that a killed round goes on.

rounds/<id>/
├── round.json                what was asked
├── 01-profile.json           KernelProfile
├── 02-bottleneck.json        Target
├── 03-propose-007.json       Candidate, or NoCandidate: why none came
├── 04-verify-007.json        Verdict
├── 05-measure-007.json       Measurement, alone
├── 06-confirm-007.json       Measurement, alone and end to end
├── 07-publish.json           Published
├── 08-rollout.json           RolloutRecord
├── 09-end.json               RoundEnd
├── candidates/007/           kernel.json and sources, as they were judged
├── lock                      held by the process that works on the round
└── transcript.md             what was said on the way
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from headrace.core.errors import CorruptFileError, NotFoundError, UnavailableError
from headrace.optimize.records import Candidate

STAGES = ("profile", "bottleneck", "propose", "verify", "measure", "confirm", "publish", "rollout", "end")

Stage = Literal[
    "profile", "bottleneck", "propose", "verify", "measure", "confirm", "publish", "rollout", "end"
]
Outcome = Literal["won", "no_win", "no_candidate", "nothing_to_gain"]
Record = TypeVar("Record")


class RoundSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a round was asked. ``base_pack``: id of the pack that is its baseline, empty: stock operators.

    ``run`` is the id of the first round of the command that this one belongs to.
    """

    id: str
    run: str
    model: str
    workload: str
    proposer: str
    seed: int
    created: str
    base_pack: str = ""


class NoCandidate(msgspec.Struct, frozen=True, kw_only=True, tag="none"):
    """A try that brought no candidate: ``detail`` says why, ``reply`` what came instead."""

    author: str
    detail: str
    seconds: float
    reply: str = ""


class RoundEnd(msgspec.Struct, frozen=True, kw_only=True):
    """``candidate`` and ``pack`` are set when it won."""

    outcome: Outcome
    summary: str
    candidates: int
    right: int
    seconds: float
    candidate: str = ""
    pack: str = ""


class Round:
    """One round's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.spec: RoundSpec = _read(folder / "round.json", RoundSpec)

    @property
    def id(self) -> str:
        return self.spec.id

    def path(self, stage: Stage, number: int | None = None) -> Path:
        suffix = "" if number is None else f"-{number:03d}"
        return self.folder / f"{STAGES.index(stage) + 1:02d}-{stage}{suffix}.json"

    def save(self, stage: Stage, record: msgspec.Struct, number: int | None = None) -> None:
        write_whole(self.path(stage, number), _pretty(record))

    def load(self, stage: Stage, kind: type[Record], number: int | None = None) -> Record | None:
        """The stage's record, None before it is done. Raises CorruptFileError."""
        path = self.path(stage, number)
        return _read(path, kind) if path.exists() else None

    def proposed(self, number: int) -> Candidate | NoCandidate | None:
        """What candidate ``number`` came to, None before it was asked for."""
        path = self.path("propose", number)
        if not path.exists():
            return None
        record: dict[str, Any] = _read(path, dict)
        if "type" in record:
            return msgspec.convert(record, NoCandidate)
        return msgspec.convert(record, Candidate)

    def numbers(self, stage: Stage) -> list[int]:
        """The numbers of the candidates that have been through ``stage``, in order."""
        pattern = re.compile(re.escape(f"{STAGES.index(stage) + 1:02d}-{stage}") + r"-(\d+)\.json")
        found = (pattern.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def candidate_folder(self, number: int) -> Path:
        return self.folder / "candidates" / f"{number:03d}"

    @property
    def transcript(self) -> Path:
        return self.folder / "transcript.md"

    @property
    def end(self) -> RoundEnd | None:
        return self.load("end", RoundEnd)

    @property
    def last_stage(self) -> str:
        """The latest stage that is on disk, for people."""
        done = [stage for stage in STAGES if self.path(stage).exists() or self.numbers(stage)]  # type: ignore[arg-type]
        return done[-1] if done else "begun"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Works on the round alone. Raises UnavailableError while another process does; a killed process's
        hold is gone with it."""
        with (self.folder / "lock").open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UnavailableError(f"another process works on round {self.id}") from None
            yield

    def is_held(self) -> bool:
        try:
            with self.held():
                return False
        except UnavailableError:
            return True


class RoundStore:
    """All rounds in one folder, which need not exist yet."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = rounds_folder() if folder is None else folder

    def create(
        self, *, model: str, workload: str, proposer: str, seed: int, base_pack: str = "", run: str = ""
    ) -> Round:
        now = datetime.now(UTC)
        stem = f"{now:%Y%m%d-%H%M%S}-{_slug(model)}"
        self.folder.mkdir(parents=True, exist_ok=True)
        for attempt in range(1000):
            round_id = stem if attempt == 0 else f"{stem}-{attempt + 1}"
            folder = self.folder / round_id
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                break
        else:
            raise AssertionError("a thousand rounds within one second")
        spec = RoundSpec(
            id=round_id,
            run=run or round_id,
            model=model,
            workload=workload,
            proposer=proposer,
            seed=seed,
            created=now.isoformat(),
            base_pack=base_pack,
        )
        write_whole(folder / "round.json", _pretty(spec))
        return Round(folder)

    def rounds(self) -> list[Round]:
        """Oldest first; a folder that was killed before it was a round is passed over."""
        if not self.folder.is_dir():
            return []
        folders = [path for path in self.folder.iterdir() if (path / "round.json").exists()]
        return sorted((Round(path) for path in folders), key=lambda one: one.spec.created)

    def open(self, prefix: str) -> Round:
        """The round with this id, or the only one whose id begins or ends like that; ``last``: the newest."""
        rounds = self.rounds()
        if prefix == "last" and rounds:
            return rounds[-1]
        found = [one for one in rounds if one.id == prefix] or [
            one for one in rounds if one.id.startswith(prefix) or one.id.endswith(prefix)
        ]
        if len(found) == 1:
            return found[0]
        what = "several rounds are" if found else "no round is"
        raise NotFoundError(
            f"{what} called {prefix!r} in {self.folder}",
            hint="`headrace rounds` lists them; `last` is one too",
        )

    def unfinished(self, *, model: str, workload: str, proposer: str) -> Round | None:
        """The newest round of this kind that was cut short and that nobody works on."""
        for one in reversed(self.rounds()):
            spec = one.spec
            if (spec.model, spec.workload, spec.proposer) != (model, workload, proposer):
                continue
            return one if one.end is None and not one.is_held() else None
        return None

    def of_run(self, run: str) -> list[Round]:
        return [one for one in self.rounds() if one.spec.run == run]


def rounds_folder() -> Path:
    """Where rounds are kept; ``XDG_DATA_HOME`` moves it."""
    return data_folder() / "rounds"


def data_folder() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or ""
    if not os.path.isabs(base):
        base = os.path.expanduser("~/.local/share")
    return Path(base) / "headrace"


def write_whole(path: Path, data: bytes) -> None:
    """The file appears with all of ``data``, or not at all, even if the machine stops."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _read(path: Path, kind: Any) -> Any:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (msgspec.DecodeError, OSError) as error:
        raise CorruptFileError(
            f"{path}: {error}", hint="remove the file, and its stage is done again"
        ) from error


def _pretty(record: msgspec.Struct) -> bytes:
    return msgspec.json.format(msgspec.json.encode(record), indent=2) + b"\n"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", Path(text).name.lower()).strip("-.")[:40] or "round"
