"""Folders of a run that was killed are swept; those of living runs, of strangers and young ones that name no
owner in sight stay."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import pytest

from headrace.core import leftovers
from tests.optimize.judge.candidates import HERE, candidate, target


def test_what_a_killed_run_left_is_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    own = leftovers.namespace()
    dead = tmp_path / f"headrace-cage-{own}-{ended.pid}-abc_1"
    elsewhere = tmp_path / f"headrace-cage-{own + 1}-{ended.pid}-abc"
    nowhere = tmp_path / f"headrace-cage-{ended.pid}-nowhere"
    old = tmp_path / f"headrace-cage-{own + 1}-{ended.pid}-old"
    older = tmp_path / "headrace-judge-abcdef"
    living = tmp_path / f"headrace-model-{own}-{os.getpid()}-abc"
    other = tmp_path / f"headrace-replica-{ended.pid}-abc"
    unnamed = tmp_path / "headrace-cage-abcdef"
    target = tmp_path / "kept"
    build = tmp_path / f".build-{own}-{ended.pid}-abc"
    building = tmp_path / f".build-{leftovers.owner()}-abc"
    swept = {dead, old, older, build}
    kept = {elsewhere, nowhere, living, other, unnamed, target, building}
    for folder in swept | kept:
        folder.mkdir()
        (folder / "file").write_text("")
    link = tmp_path / f"headrace-judge-{ended.pid}-link"
    link.symlink_to(target)
    for folder in (old, older, living, other, target):
        os.utime(folder, (0, 0))
    assert set(leftovers.sweep(tmp_path)) == swept
    assert not any(folder.exists() for folder in swept)
    assert all(folder.exists() for folder in {*kept, link})


def test_folders_name_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Path(tempfile.mkdtemp(prefix=leftovers.prefix_of("cage")))
    os.utime(made, (0, 0))
    assert made.parent == tmp_path
    assert leftovers.sweep(tmp_path) == []  # its owner lives


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_judge_that_is_ended_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """By SIGTERM at once, by SIGKILL with the next run."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = candidate(tmp_path / "candidate", HERE / "cheats" / "hangs.cpp")
    (folder / "target.json").write_bytes(msgspec.json.encode(target()))
    environment = {**os.environ, "TMPDIR": str(scratch), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "headrace.cli.main", "judge", str(folder), "--verify-only"]
    judge = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while not list(scratch.glob("headrace-cage-*")):
        assert judge.poll() is None
        time.sleep(0.05)
    judge.send_signal(number)
    code = judge.wait()
    if number == signal.SIGTERM:
        assert code == 128 + number
    else:
        assert code == -number
        assert leftovers.sweep(scratch)
    assert list(scratch.glob("headrace-*")) == []
