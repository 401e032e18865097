"""A coding agent's command writes the kernels: started in a folder with a task file, free to call the judge.

    task.md               what to do
    target.json           the target, for `headrace judge .`
    reference.py          what the op means
    headrace_kernel.h     how a kernel is called
    best/                 the fastest candidate so far, if there is one
    kernel.json, kernel.cpp   what is to be left behind; both are there at the start and decline every call

The command is the operator's own tool and is not caged; what it leaves behind is judged like any candidate.
"""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from headrace.core.leftovers import prefix_of
from headrace.core.packs import KernelEntry
from headrace.optimize.digest import ENTRY_FILE, candidate_files
from headrace.optimize.proposal import CandidateSource, ProposalError, Trial
from headrace.optimize.proposers.brief import (
    SOURCE,
    OpText,
    default_entry,
    facts,
    header,
    op_text,
    results,
    skeleton,
)
from headrace.optimize.records import Target

LOG = "agent.log"
_LOG_CHARS = 20_000
_MAX_FILES = 32
_MAX_BYTES = 1 << 20
_GRACE_S = 5.0


class Agent:
    """Runs ``command`` once a candidate, for at most ``minutes``."""

    def __init__(
        self, command: str, *, minutes: float = 15.0, describe: Callable[[Target], OpText] = op_text
    ) -> None:
        self._words = shlex.split(command)
        self._minutes = minutes
        self._describe = describe

    @property
    def author(self) -> str:
        return f"agent:{Path(self._words[0]).name if self._words else ''}"

    def propose(
        self, target: Target, best: Trial | None, history: Sequence[Trial], rng: random.Random
    ) -> CandidateSource | None:
        with tempfile.TemporaryDirectory(prefix=prefix_of("agent"), ignore_cleanup_errors=True) as scratch:
            folder = Path(scratch) / "candidate"
            folder.mkdir()
            begun = lay_out(folder, target, self._describe(target), best, history, self._minutes)
            ended = self._run(folder, Path(scratch) / LOG)
            log = (Path(scratch) / LOG).read_text(encoding="utf-8", errors="replace")[-_LOG_CHARS:]
            return collect(folder, begun, self.author, ended, log)

    def _run(self, folder: Path, log: Path) -> str:
        """Runs the command to its end, or to that of its time; says which."""
        if not self._words or shutil.which(self._words[0]) is None:
            raise ProposalError(f"--agent: no command {' '.join(self._words)!r}", hint="name one on the PATH")
        environment = dict(os.environ)
        environment["PATH"] = (
            f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
        )
        with log.open("wb") as file:
            process = subprocess.Popen(
                self._words,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = process.wait(60 * self._minutes)
            except subprocess.TimeoutExpired:
                return f"stopped after {self._minutes:g} min"
            finally:
                _end(process)
        return "done" if code == 0 else f"ended with code {code}"


def lay_out(
    folder: Path, target: Target, text: OpText, best: Trial | None, history: Sequence[Trial], minutes: float
) -> str:
    """Fills an agent's folder; returns the source that it starts from."""
    begun = skeleton(target, text)
    task = [
        "# Write a faster kernel",
        f"Edit `{SOURCE}` so that it computes `{target.op}` right and as fast as this machine can; edit "
        f"`{ENTRY_FILE}` if it should cover less or needs compiler flags. You have {minutes:g} minutes.",
        "`headrace judge .` builds and checks it in a sandbox and times it against what runs today; call it "
        "as often as you like (`--verify-only` and `--quick` are faster). Its verdict is the only one that "
        "counts: hidden shapes and inputs, a float64 reference. What lies in this folder when you end is "
        "your answer.",
        facts(target, text),
        "`reference.py` says what the op means, `headrace_kernel.h` how a kernel is called. Sums in float32 "
        "or wider; no files, no network, no threads but OpenMP's inside hr_run, no state between calls but "
        "the packed weights.",
        results(best, history),
    ]
    (folder / "task.md").write_text("\n\n".join(part for part in task if part) + "\n", encoding="utf-8")
    (folder / "target.json").write_bytes(msgspec.json.format(msgspec.json.encode(target)) + b"\n")
    (folder / "reference.py").write_text(text.reference, encoding="utf-8")
    (folder / "headrace_kernel.h").write_text(header(), encoding="utf-8")
    if best is not None:
        for name in candidate_files(best.folder):
            (folder / "best" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(best.folder / name, folder / "best" / name)
    (folder / SOURCE).write_text(begun, encoding="utf-8")
    entry = default_entry(target)
    (folder / ENTRY_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(entry)) + b"\n")
    return begun


def collect(folder: Path, begun: str, author: str, ended: str, log: str) -> CandidateSource:
    """What the agent left behind. Raises ProposalError, with the log's end, where that is no candidate."""
    try:
        entry = msgspec.json.decode((folder / ENTRY_FILE).read_bytes(), type=KernelEntry)
    except (OSError, msgspec.MsgspecError) as error:
        raise ProposalError(f"the agent {ended}: {ENTRY_FILE}: {error}", reply=log) from None
    ours = (ENTRY_FILE, "reference.py")
    names = [name for name in candidate_files(folder) if name not in ours and not name.startswith("best/")]
    files: dict[str, str] = {}
    total = 0
    for name in names:
        total += (folder / name).stat().st_size
        if len(files) >= _MAX_FILES or total > _MAX_BYTES:
            raise ProposalError(
                f"the agent {ended}: more than {_MAX_FILES} files or {_MAX_BYTES} bytes", reply=log
            )
        files[name] = (folder / name).read_text(encoding="utf-8", errors="replace")
    if entry.source not in files:
        raise ProposalError(f"the agent {ended}: {entry.source!r} is not there", reply=log)
    if files[entry.source] == begun:
        raise ProposalError(f"the agent {ended} and changed nothing", reply=log)
    return CandidateSource(files={**files, LOG: log}, entry=entry, author=author, note=ended)


def _end(process: subprocess.Popen[bytes]) -> None:
    """The command and whatever it started in its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            if number == signal.SIGKILL:
                return
