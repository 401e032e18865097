"""Folders of a run that was killed are swept; those of living runs, of strangers and young ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from headrace.optimize import leftovers


def test_what_a_killed_run_left_is_swept(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    old = tmp_path / f"headrace-cage-{ended.pid}-abc_1"
    young = tmp_path / f"headrace-cage-{ended.pid}-young"
    living = tmp_path / f"headrace-model-{os.getpid()}-abc"
    other = tmp_path / f"headrace-replica-{ended.pid}-abc"
    unnamed = tmp_path / "headrace-cage-abcdef"
    target = tmp_path / "kept"
    for folder in (old, young, living, other, unnamed, target):
        folder.mkdir()
        (folder / "file").write_text("")
    link = tmp_path / f"headrace-judge-{ended.pid}-link"
    link.symlink_to(target)
    for folder in (old, living, other, unnamed, target):
        os.utime(folder, (0, 0))
    assert leftovers.sweep(tmp_path) == [old]
    assert not old.exists()
    assert all(folder.exists() for folder in (young, living, other, unnamed, target, link))


def test_folders_name_their_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = Path(tempfile.mkdtemp(prefix=leftovers.prefix_of("cage")))
    os.utime(made, (0, 0))
    assert made.parent == tmp_path
    assert leftovers.sweep(tmp_path) == []  # its owner lives
