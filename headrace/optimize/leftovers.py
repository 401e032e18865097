"""Temporary folders that name their owner, so that those of a killed run can be swept away by the next.

headrace-<kind>-<namespace>-<process id>-…

A process id means something in one namespace of processes (a container has its own), which Linux numbers.
Where it is this process's, an owner that is not in sight is dead.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from functools import lru_cache
from pathlib import Path

_NAME = re.compile(r"headrace-(?:agent|cage|judge|model)-(?:(?:(\d+)-)?(\d+)-)?\w+")
_STALE_S = 3600.0
"""Younger ones of other namespaces stay: their owner may be in another container that shares the folder."""
_UNOWNED_S = 24 * 3600.0
"""The same for those that name no owner, as older versions made them."""


def prefix_of(kind: str) -> str:
    """For tempfile's ``prefix``; the first call of a process sweeps."""
    _sweep_once(Path(tempfile.gettempdir()))
    return f"headrace-{kind}-{_namespace()}-{os.getpid()}-"


def sweep(folder: Path) -> list[Path]:
    """Removes this user's folders whose owner is gone; which."""
    gone = []
    for path in folder.glob("headrace-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink():
            continue
        namespace, owner = match.groups()
        if owner is not None and Path(f"/proc/{owner}").exists():
            continue
        try:
            found = path.stat()
        except OSError:
            continue
        limit = _STALE_S if owner is not None else _UNOWNED_S
        is_dead = namespace is not None and int(namespace) == _namespace() != 0
        if found.st_uid == os.geteuid() and (is_dead or time.time() - found.st_mtime > limit):
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
    return gone


def _namespace() -> int:
    """The number of this process's namespace of processes; 0: the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


@lru_cache
def _sweep_once(folder: Path) -> None:
    if Path("/proc/self").exists():
        sweep(folder)
