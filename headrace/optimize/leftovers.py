"""Temporary folders that name their owner, so that those of a killed run can be swept away by the next.

headrace-<kind>-<process id>-…
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from functools import lru_cache
from pathlib import Path

_NAME = re.compile(r"headrace-(?:agent|cage|judge|model)-(\d+)-\w+")
_STALE_S = 3600.0
"""Younger ones stay: a process that is not in sight may be in another container that shares the folder."""


def prefix_of(kind: str) -> str:
    """For tempfile's ``prefix``; the first call of a process sweeps."""
    _sweep_once(Path(tempfile.gettempdir()))
    return f"headrace-{kind}-{os.getpid()}-"


def sweep(folder: Path) -> list[Path]:
    """Removes this user's folders whose owner is gone; which."""
    gone = []
    for path in folder.glob("headrace-*"):
        match = _NAME.fullmatch(path.name)
        if match is None or path.is_symlink() or Path(f"/proc/{match[1]}").exists():
            continue
        try:
            found = path.stat()
        except OSError:
            continue
        if found.st_uid == os.geteuid() and time.time() - found.st_mtime > _STALE_S:
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
    return gone


@lru_cache
def _sweep_once(folder: Path) -> None:
    if Path("/proc/self").exists():
        sweep(folder)
