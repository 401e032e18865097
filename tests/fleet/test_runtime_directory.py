"""A server's folder of sockets: its own, gone with it, and swept up by the next where it was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from headrace.fleet.runtime_directory import RuntimeDirectory

HOLD = """
import sys, time
from pathlib import Path
from headrace.fleet.runtime_directory import RuntimeDirectory
directory = RuntimeDirectory(Path(sys.argv[1]))
Path(directory.socket("x")).touch()
print(directory.path, flush=True)
time.sleep(1000)
"""


def test_only_its_owner_can_enter_and_it_goes_with_all_that_is_in_it(tmp_path: Path) -> None:
    with RuntimeDirectory(tmp_path) as directory:
        assert directory.path.parent == tmp_path and directory.path.stat().st_mode & 0o777 == 0o700
        names = [directory.socket(name) for name in ("a", "a", "../../etc/pässwd" * 100)]
        assert len(set(names)) == 3
        for name in names:
            assert Path(name).parent == directory.path and len(Path(name).name) < 32
            Path(name).touch()
    assert not list(tmp_path.iterdir())


def test_what_a_killed_server_left_is_swept_up_and_a_living_ones_is_not(tmp_path: Path) -> None:
    others = [tmp_path / "headrace-run-mine", tmp_path / "headrace-0", tmp_path / "something"]
    for folder in others:
        folder.mkdir()  # nobody ever locked them
        (folder / "file").touch()
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        )
        for _ in range(2)
    ]
    try:
        folders = []
        for holder in holders:
            assert holder.stdout is not None
            folders.append(Path(holder.stdout.readline().strip()))
        holders[0].send_signal(signal.SIGKILL)
        holders[0].wait()
        assert all(folder.is_dir() for folder in folders)
        with RuntimeDirectory(tmp_path) as directory:
            assert not folders[0].exists() and folders[1].is_dir() and directory.path.is_dir()
            assert all((folder / "file").exists() for folder in others)
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
            assert holder.stdout is not None
            holder.stdout.close()


def test_a_child_does_not_keep_the_lock_of_its_dead_parent(tmp_path: Path) -> None:
    script = HOLD.replace(
        "time.sleep(1000)",
        "import subprocess; child = subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True); time.sleep(1000)",
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert parent.stdout is not None
    folder, child = Path(parent.stdout.readline().strip()), int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        with RuntimeDirectory(tmp_path):
            assert not folder.exists()
    finally:
        os.kill(child, signal.SIGKILL)
